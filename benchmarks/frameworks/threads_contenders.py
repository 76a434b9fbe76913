"""netjac's verbs as functions of the number of threads, beside memory filled with a constant by as many.

Each contender is a function from `Task` to one that works with so many threads, into a buffer that is there already or,
with None, into a new one. Verbs that take no number of threads, or no buffer, ignore them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

import netjac as nj
from benchmarks import networks
from benchmarks.frameworks.keras_models import build
from benchmarks.frameworks.plain import TILE_BYTES
from benchmarks.task import Task

PACKAGES = ("netjac", "tensorflow", "tensorflow_cpu", "keras", "numpy", "scipy")

Array = NDArray[Any]
Work = Callable[[int, Array | None], Array]


def _jacobian(task: Task) -> Any:
    return nj.jacobian(build(task.network), networks.inputs(task.network, task.n))


def to_array(task: Task) -> Work:
    """The explicit matrix, in the task's layout."""
    J = _jacobian(task)
    return lambda threads, out: J.to_array(task.layout, out=out, threads=threads)


def fill(task: Task) -> Work:
    """A buffer of the same size, filled with a constant, by one thread or by the task's."""
    shape, pool = _jacobian(task).shape, ThreadPoolExecutor(task.threads)

    def work(threads: int, out: Array | None) -> Array:
        buffer = np.empty(shape, np.float32) if out is None else out
        tiles = np.array_split(buffer.reshape(-1), max(threads, buffer.nbytes // TILE_BYTES))
        for _ in (pool.map if threads > 1 else map)(lambda tile: tile.fill(1.0), tiles):
            pass
        return buffer

    return work


def gram(task: Task) -> Work:
    """J Jᵀ."""
    J = _jacobian(task)
    return lambda threads, out: J.gram(out=out, threads=threads)


def normal(task: Task) -> Work:
    """Jᵀ J."""
    J = _jacobian(task)
    return lambda threads, _: J.normal(threads=threads)


def stream(task: Task) -> Work:
    """Jᵀ J and Jᵀ u in one pass over x; the network's own threads are TensorFlow's."""
    model, x = build(task.network), networks.inputs(task.network, task.n)
    u = networks.cotangent(task.network, task.n)

    def work(threads: int, _: Array | None) -> Array:
        found = nj.stream(model, x, memory="64 MiB", threads=threads).reduce(normal=True, adjoint=u)
        return np.asarray(found.normal)

    return work


def jacobian(task: Task) -> Work:
    """The factors."""
    model, x = build(task.network), networks.inputs(task.network, task.n)
    return lambda *_: nj.jacobian(model, x).y


def lstsq(task: Task) -> Work:
    """One damped least-squares step."""
    J, r = _jacobian(task), networks.cotangent(task.network, task.n)
    return lambda *_: J.lstsq(r, damping=1e-3)


def fit(task: Task) -> Work:
    """Five steps of ``solve(method="netjac")``, each time from the same start."""
    network, n = task.network, task.n
    model = build(network)
    problem = nj.LeastSquares(model, networks.inputs(network, n), networks.targets(network, n))
    start = np.array(problem.x0)

    def work(*_: Any) -> Array:
        problem.parameters.assign(start)
        return np.asarray(problem.solve(method="netjac", max_nfev=6, verbose=0).x)

    return work


CONTENDERS: dict[str, Callable[[Task], Work]] = {
    "to_array": to_array,
    "fill": fill,
    "gram": gram,
    "normal": normal,
    "stream": stream,
    "jacobian": jacobian,
    "lstsq": lstsq,
    "fit": fit,
}
