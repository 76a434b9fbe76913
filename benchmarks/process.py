"""The other end of a worker's pipe: starting it, asking it, and stopping it when it takes too long or too much."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from benchmarks.memory import resident

ROOT = Path(__file__).resolve().parent.parent

# Workers start without these: the first two force kernels and buffer sizes onto NumPy's BLAS that need not suit the
# machine, the third chooses TensorFlow's kernels, which are to be those it comes with.
DROPPED_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "TF_ENABLE_ONEDNN_OPTS")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
POLL_SECONDS = 0.02


class WorkerError(Exception):
    """A worker that gave no answer; the message is what the report shows."""


class OverCap(WorkerError):
    """A worker stopped because it took more time, ``seconds`` of it, or more memory than it was given."""

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


def environment(threads: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a worker: CPU only, ``threads`` threads, quiet, this repository importable."""
    kept = {name: value for name, value in base.items() if name not in DROPPED_VARIABLES}
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return {
        **kept,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


class Process:
    """A worker process; use as a context manager, so that it never outlives its case."""

    def __init__(
        self,
        python: str,
        module: str,
        contender: str,
        threads: int,
        log: Path,
        byte_cap: int | None = None,
        extra: Mapping[str, str] | None = None,
        worker: str = "benchmarks.worker",
    ) -> None:
        self._log = log
        self._byte_cap = byte_cap
        with log.open("wb") as stream:
            self._popen = subprocess.Popen(
                [python, "-m", worker, module, contender],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                cwd=ROOT,
                env={**environment(threads), **(extra or {})},
                preexec_fn=lambda: _keep_to(threads),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, do: str, **arguments: Any) -> None:
        """Ask without waiting; `receive` gives the answer."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._popen.stdin.flush()
        except OSError as error:
            raise WorkerError(self._died()) from error

    def receive(self, cap: float) -> dict[str, Any]:
        """The answer, or `OverCap` after ``cap`` seconds or above the memory cap: the worker is killed then."""
        assert self._popen.stdout is not None
        deadline = time.monotonic() + cap
        # an answer is one line written at once, so when something can be read, the line can
        while not select.select([self._popen.stdout], [], [], POLL_SECONDS)[0]:
            if time.monotonic() > deadline:
                self.close()
                raise OverCap(f"over the time cap of {cap:.0f} s", cap)
            used = resident(self._popen.pid) if self._byte_cap else None
            if used and self._byte_cap and used > self._byte_cap:
                self.close()
                raise OverCap(f"over the memory cap of {self._byte_cap / 1e9:.1f} GB")
        line = self._popen.stdout.readline()
        if not line:
            raise WorkerError(self._died())
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise WorkerError(answer["error"])
        return answer

    def ask(self, do: str, cap: float, **arguments: Any) -> dict[str, Any]:
        """`send`, then `receive`."""
        self.send(do, **arguments)
        return self.receive(cap)

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self._popen.kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _died(self) -> str:
        code = self._popen.wait()
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the process ended with code {code}" + (f": {lines[-1][:300]}" if lines else "")


def _keep_to(threads: int) -> None:
    """Keep this process to ``threads`` processors: every framework sizes its pools by what it may run on."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[:threads])
