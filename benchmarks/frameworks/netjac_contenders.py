"""netjac through its public names, in the state that repeated calls reach (first calls are timed apart).

netjac is imported by the first ``run``, so that the time of a first call holds its import.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.frameworks.gram import prepared
from benchmarks.frameworks.keras_models import build
from benchmarks.task import Prepared, Task

PACKAGES = ("netjac", "tensorflow", "tensorflow_cpu", "keras", "numpy", "scipy")


def _jacobian(model: Any, x: NDArray[Any]) -> Any:
    import netjac as nj

    return nj.jacobian(model, x)


def _outputs(jacobian: Any, task: Task) -> NDArray[Any]:
    return np.asarray(jacobian.outputs).reshape(task.n, task.network.outputs)


def factored(task: Task, outputs_only: bool = False) -> Prepared:
    """``nj.jacobian(model, x)``; ``outputs_only``: the outputs are compared, in cases where products with J are."""
    model, x = build(task.network), networks.inputs(task.network, task.n)

    def check(jacobian: Any) -> dict[str, NDArray[Any]]:
        if outputs_only:
            return {"y": _outputs(jacobian, task)}
        rows = jacobian[list(task.samples)].to_array("n l m", threads=task.threads)
        return {"y": _outputs(jacobian, task), "jacobian": rows}

    return Prepared(lambda: _jacobian(model, x), check, lambda jacobian: int(jacobian.nbytes))


def dense(task: Task, held: bool = False, again: bool = False) -> Prepared:
    """``nj.jacobian(model, x).to_array(layout)``.

    ``held``: of a Jacobian that is there already; ``again``: into the buffer of the call before, with ``out=``.
    """
    model, x = build(task.network), networks.inputs(task.network, task.n)
    kept = [_jacobian(model, x)] if held else []
    buffer: NDArray[Any] | None = None

    def run() -> Any:
        nonlocal buffer
        jacobian = kept[0] if held else _jacobian(model, x)
        array = jacobian.to_array(task.layout, out=buffer, threads=task.threads)
        if again:
            buffer = array
        return jacobian, array

    def check(result: Any) -> dict[str, NDArray[Any]]:
        jacobian, array = result
        cube = rearrange(array, f"{task.layout} -> n l m", n=task.n, l=task.network.outputs)
        return {"y": _outputs(jacobian, task), "jacobian": cube[list(task.samples)]}

    return Prepared(run, check, lambda result: int(result[1].nbytes))


def product(task: Task, adjoint: bool) -> Prepared:
    """``J @ v`` or ``J.T @ u``, of a Jacobian that is there already."""
    jacobian = _jacobian(build(task.network), networks.inputs(task.network, task.n))
    if adjoint:
        transposed, u = jacobian.T, networks.cotangent(task.network, task.n).ravel()
        return Prepared(lambda: transposed @ u, lambda result: {"vjp": result})
    v = networks.direction(jacobian.shape[1])
    return Prepared(lambda: jacobian @ v, lambda result: {"jvp": result.reshape(task.n, task.network.outputs)})


def twice(task: Task, kernel: bool) -> Prepared:
    """``J @ (J.T @ u)`` or ``J.T @ (J @ v)``, of a Jacobian that is there already."""
    jacobian = _jacobian(build(task.network), networks.inputs(task.network, task.n))
    transposed, v = jacobian.T, networks.direction(jacobian.shape[1])
    u = networks.cotangent(task.network, task.n).ravel()
    if kernel:
        return Prepared(lambda: jacobian @ (transposed @ u), lambda result: {"kernel": result.reshape(task.n, -1)})
    return Prepared(lambda: transposed @ (jacobian @ v), lambda result: {"normal": result})


def gram(task: Task, held: bool) -> Prepared:
    """``nj.jacobian(model, x).gram()``; ``held``: of a Jacobian that is there already."""
    model, x = build(task.network), networks.inputs(task.network, task.n)
    kept = [_jacobian(model, x)] if held else []

    def run() -> Any:
        jacobian = kept[0] if held else _jacobian(model, x)
        return jacobian.outputs, jacobian.gram()

    return prepared(task, run)


def fit(task: Task) -> Prepared:
    """Residual and dense Jacobian, float64, as SciPy asks for them, at another θ in every call."""
    import netjac as nj

    network, n = task.network, task.n
    problem = nj.LeastSquares(build(network), networks.inputs(network, n), networks.targets(network, n), jac="dense")
    start = np.array(problem.x0)
    # many, because the problem keeps the last evaluation and the best one
    thetas = itertools.cycle([start * (1 + 1e-6 * k) for k in range(1000)])

    def at(theta: NDArray[Any]) -> tuple[Any, Any]:
        return problem.fun(theta), problem.jac(theta)

    def run() -> tuple[Any, Any]:
        return at(next(thetas))

    def check(_: Any) -> dict[str, NDArray[Any]]:
        residual, jacobian = at(start)
        return {"residual": residual, "jacobian": jacobian.reshape(n, network.outputs, -1)[list(task.samples)]}

    return Prepared(run, check)


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "factored": factored,
    "dense": dense,
    "dense-again": partial(dense, again=True),
    "dense-held": partial(dense, held=True),
    "jvp": partial(product, adjoint=False),
    "vjp": partial(product, adjoint=True),
    "factors": partial(factored, outputs_only=True),
    "gram": partial(gram, held=False),
    "gram-held": partial(gram, held=True),
    "kernel": partial(twice, kernel=True),
    "normal": partial(twice, kernel=False),
    "fit": fit,
}
