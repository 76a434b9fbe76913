"""The process of `benchmarks.threads`: times one verb by number of threads, and counts what runs meanwhile."""

from __future__ import annotations

import gc
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.task import Task
from benchmarks.worker import serve, version

SETTLE_SECONDS = 0.1  # threads that spin after their last work have stopped by then


class ThreadsWorker:
    """One contender of `benchmarks.frameworks.threads_contenders`."""

    def __init__(self, module: str, contender: str) -> None:
        self._module, self._contender = module, contender

    def prepare(self, task: dict[str, Any]) -> dict[str, Any]:
        """Import the framework, build the network."""
        module = importlib.import_module(f"benchmarks.frameworks.{self._module}")
        self._work = module.CONTENDERS[self._contender](Task.from_json(task))
        return {"versions": {name: found for name in module.PACKAGES if (found := version(name))}}

    def alternate(self, threads: list[int], again: bool, seconds: float, least: int) -> dict[str, Any]:
        """Times of calls with each of ``threads``, in turns, and the largest difference between what they gave.

        With ``again`` all write to one buffer, else each to a new one, which is let go untimed.
        """
        buffer = self._work(threads[0], None) if again else None
        first = np.array(self._work(threads[0], buffer))
        other = self._work(threads[-1], buffer)
        difference = float(np.abs(first - other).max(initial=0.0) / np.abs(first).max(initial=1.0))
        del first, other
        times: dict[int, list[float]] = {count: [] for count in threads}
        gc.collect()
        gc.disable()
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or len(times[threads[0]]) < least:
            for count in threads:
                started = time.perf_counter()
                result = self._work(count, buffer)
                times[count].append(time.perf_counter() - started)
                del result
        gc.enable()
        return {"times": [times[count] for count in threads], "difference": difference}

    def usage(self, threads: int, seconds: float) -> dict[str, Any]:
        """Processors' time used, and time that threads waited for a processor, a second of work."""
        buffer = self._work(threads, None)
        time.sleep(SETTLE_SECONDS)
        waited, used, began = _waited(), time.process_time(), time.perf_counter()
        while time.perf_counter() - began < seconds:
            self._work(threads, buffer)
        wall = time.perf_counter() - began
        return {"running": (time.process_time() - used) / wall, "waiting": (_waited() - waited) / wall}


def _waited() -> float:
    """Seconds that the threads of this process were ready to run and had no processor."""
    found = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            found += int(path.read_text().split()[1])
        except OSError:  # a thread that has just ended
            continue
    return found / 1e9


if __name__ == "__main__":
    serve(ThreadsWorker(*sys.argv[1:3]))
