"""`scipy.optimize.least_squares`, stopped at the first evaluation that reaches the goal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from benchmarks.fitting.task import Goal, Watch

Vector = NDArray[np.float64]

# No tolerance may end a fit before the goal does; MINPACK insists on all three.
TOLERANCES = {
    "trf": {"ftol": None, "xtol": 1e-15, "gtol": None},
    "dogbox": {"ftol": None, "xtol": 1e-15, "gtol": None},
    "lm": {"ftol": 2.3e-16, "xtol": 2.3e-16, "gtol": 2.3e-16},
}


class _OverError(Exception):
    """Raised through SciPy, which in 'lm' has no other way to end early."""


def fit(
    fun: Callable[[Vector], Vector],
    jac: Callable[[Vector], Any],
    start: Vector,
    goal: Goal,
    method: str,
    bound: float | None,
) -> tuple[Vector, Watch]:
    """Where the fit ended, and what it took; ``fun`` gives outputs − targets (n·l,), ``jac`` an array (n·l, m)."""
    watch, best = Watch(goal), (np.inf, start)

    def watched(theta: Vector) -> Vector:
        nonlocal best
        residual = fun(theta)
        watch.evaluations += 1
        mse = float(residual @ residual) / residual.size
        if mse < best[0]:
            best = mse, theta.copy()
        if watch.over(mse):
            raise _OverError
        return residual

    def counted(theta: Vector) -> Any:
        watch.steps += 1  # a derivative a step, from the start of the step
        return jac(theta)

    limits = (-np.inf, np.inf) if bound is None else (-bound, bound)
    try:
        result = scipy.optimize.least_squares(
            watched, start, counted, bounds=limits, method=method, max_nfev=10**9, **TOLERANCES[method]
        )
        watch.ended = f"stopped by itself: {result.message}"
    except _OverError:
        pass
    return best[1], watch
