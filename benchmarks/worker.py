"""A contender's process: reads one JSON line, does what it says, answers one JSON line; arrays go through files.

Started by `benchmarks.process` as ``python -m benchmarks.worker MODULE CONTENDER``. Whatever libraries print goes to
the error stream, so that only answers travel on the pipe.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from typing import Any

import numpy as np

from benchmarks.memory import PeakMemory
from benchmarks.task import Prepared, Task

MOST_RUNS = 1000  # in one turn


class Worker:
    """One contender through its stages: prepare, first, check, memory, and any number of turns."""

    def __init__(self, module: str, contender: str) -> None:
        self._module = module
        self._contender = contender
        self._prepared: Prepared | None = None
        self._last: Any = None

    def prepare(self, task: dict[str, Any]) -> dict[str, Any]:
        """Import the framework and build the network."""
        module = importlib.import_module(f"benchmarks.frameworks.{self._module}")
        self._prepared = module.CONTENDERS[self._contender](Task.from_json(task))
        return {"versions": {name: found for name in module.PACKAGES if (found := version(name))}}

    def first(self) -> dict[str, Any]:
        """The first call: tracing and compiling as well, where the contender has not done that before."""
        self._last = None
        with PeakMemory() as memory:
            started = time.perf_counter()
            self._last = self._ready.run()
            seconds = time.perf_counter() - started
        return {"seconds": seconds, "peak": memory.growth, "files": memory.files}

    def check(self, path: str) -> dict[str, Any]:
        """Save what the first call gave, for comparison, and let go of it."""
        arrays = self._ready.check(self._last)
        held = self._ready.held(self._last)
        self._last = None
        np.savez(path, **arrays)
        return {"held": held}

    def memory(self) -> dict[str, Any]:
        """Peak memory of one call after the first, and its time."""
        with PeakMemory() as memory:
            started = time.perf_counter()
            result = self._ready.run()
            seconds = time.perf_counter() - started
        del result
        return {"seconds": seconds, "peak": memory.growth}

    def turn(self, seconds: float) -> dict[str, Any]:
        """Time of every call, made again and again for ``seconds``, at least once; results are let go untimed.

        One call goes before, untimed: after others have worked, caches are cold, and on a virtual machine the host may
        have taken back the memory that was let go seconds ago, which then costs fifty times what it costs to use again.
        """
        run, times = self._ready.run, []
        gc.collect()
        run()
        gc.disable()
        began = time.perf_counter()
        while True:
            started = time.perf_counter()
            result = run()
            ended = time.perf_counter()
            times.append(ended - started)
            del result
            if ended - began >= seconds or len(times) >= MOST_RUNS:
                break
        gc.enable()
        return {"times": times}

    @property
    def _ready(self) -> Prepared:
        if self._prepared is None:
            raise RuntimeError("the worker was asked to run before it was prepared.")
        return self._prepared


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def serve(worker: Any) -> None:
    """Call the worker's methods by name, until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        verb = message.pop("do")
        try:
            answer = {"ok": True, **getattr(worker, verb)(**message)}
        except Exception as error:
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}".split("\n")[0]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(Worker(*sys.argv[1:3]))
