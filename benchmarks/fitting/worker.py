"""A contender's process: prepares, fits, and saves where it ended. Started as ``benchmarks.worker`` is."""

from __future__ import annotations

import gc
import importlib
import sys
import time
from typing import Any

import numpy as np

from benchmarks.fitting.task import FitTask, Goal, PreparedFit
from benchmarks.memory import PeakMemory
from benchmarks.worker import serve, version


class FitWorker:
    """One contender through its stages: prepare, and any number of fits."""

    def __init__(self, module: str, contender: str) -> None:
        self._module = module
        self._contender = contender
        self._prepared: PreparedFit | None = None

    def prepare(self, task: dict[str, Any]) -> dict[str, Any]:
        """Import the framework and build the network."""
        module = importlib.import_module(f"benchmarks.fitting.frameworks.{self._module}")
        self._prepared = module.CONTENDERS[self._contender](FitTask.from_json(task))
        return {"versions": {name: found for name in module.PACKAGES if (found := version(name))}}

    def outputs(self, path: str) -> dict[str, Any]:
        """Save the outputs at the start."""
        np.savez(path, y=np.asarray(self._ready.outputs()))
        return {}

    def fit(self, goal: dict[str, Any], path: str) -> dict[str, Any]:
        """One fit from the start, timed, its memory watched; the weights where it ended go to ``path``."""
        with PeakMemory() as memory:
            began = time.perf_counter()
            watch = self._ready.fit(Goal(**goal))
            seconds = time.perf_counter() - began
        np.savez(path, **self._ready.weights())  # type: ignore[arg-type]
        gc.collect()
        told = {name: getattr(watch, name) for name in ("steps", "evaluations", "ended", "note")}
        return {"seconds": seconds, "peak": memory.growth, **told}

    @property
    def _ready(self) -> PreparedFit:
        if self._prepared is None:
            raise RuntimeError("the worker was asked to fit before it was prepared.")
        return self._prepared


if __name__ == "__main__":
    serve(FitWorker(*sys.argv[1:3]))
