"""netjac's own solver, and SciPy fed from netjac."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import netjac as nj
from benchmarks.fitting.frameworks import scipy_fit
from benchmarks.fitting.task import FitTask, Goal, PreparedFit, Watch, joined, split
from benchmarks.frameworks.keras_models import build

PACKAGES = ("netjac", "tensorflow", "tensorflow_cpu", "keras", "numpy", "scipy")


def _problem(task: FitTask, jac: str) -> tuple[nj.LeastSquares, dict[str, NDArray[Any]]]:
    """A float32 model, as Keras builds it, evaluated in the task's precision; and the start."""
    x, y, start = task.load()
    model = build(task.network)
    bounds = None if task.bound is None else (-task.bound, task.bound)
    precision = "float64" if task.dtype == "float64" else None
    problem = nj.LeastSquares(model, x.astype(np.float32), y, bounds=bounds, jac=jac, dtype=precision)
    return problem, start


def _outputs(problem: nj.LeastSquares, task: FitTask, theta: NDArray[np.float64]) -> NDArray[Any]:
    y = task.load()[1]
    return problem.fun(theta).reshape(y.shape) + y


def netjac(task: FitTask) -> PreparedFit:
    """``problem.solve(method="netjac")``."""
    problem, start = _problem(task, "operator")
    theta = ended = joined(start)
    size = task.load()[1].size

    def fit(goal: Goal) -> Watch:
        nonlocal ended
        watch = Watch(goal)

        def stop(intermediate_result: Any) -> bool:
            watch.steps = intermediate_result.nit
            return watch.over(2 * intermediate_result.cost / size)

        problem.parameters.assign(theta)
        result = problem.solve("netjac", ftol=None, xtol=1e-15, gtol=None, max_nfev=10**9, callback=stop)
        ended, watch.evaluations, watch.steps = result.x, result.nfev, result.nit
        watch.ended = watch.ended or f"stopped by itself: {result.message}"
        watch.note = f"steps by {result.linear_solver}"
        return watch

    return PreparedFit(fit, lambda: _outputs(problem, task, theta), lambda: split(ended, start))


def scipy(task: FitTask, method: str) -> PreparedFit:
    """`scipy.optimize.least_squares` with the dense Jacobian of a `netjac.LeastSquares`."""
    problem, start = _problem(task, "dense")
    theta = ended = joined(start)

    def fit(goal: Goal) -> Watch:
        nonlocal ended
        problem.forget()
        ended, watch = scipy_fit.fit(problem.fun, problem.jac, theta, goal, method, task.bound)
        return watch

    return PreparedFit(fit, lambda: _outputs(problem, task, theta), lambda: split(ended, start))


CONTENDERS: dict[str, Callable[[FitTask], PreparedFit]] = {
    "netjac": netjac,
    **{f"scipy-{method}": partial(scipy, method=method) for method in ("trf", "dogbox", "lm")},
}
