"""`netjac.least_squares` as a method of `scipy.optimize.minimize`, for the cost of a least-squares problem.

SciPy calls a method of one's own as ``method(fun, x0, args, jac=, hess=, hessp=, bounds=, constraints=, callback=,
**options)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import Bounds, OptimizeResult

from netjac.errors import DataError, ShapeError
from netjac.optimize import callbacks, solvers
from netjac.optimize.losses import Vector
from netjac.optimize.options import OptionError

OPTIONS = ("tol", "ftol", "xtol", "gtol", "maxiter", "max_nfev", "x_scale", "linear_solver", "disp")
"""What ``tol`` and ``options`` of `scipy.optimize.minimize` may hold."""


class Residuals(Protocol):
    """A problem whose cost is half the sum of its squared residuals."""

    @property
    def bounds(self) -> Bounds:
        """Over θ."""

    def fun(self, theta: ArrayLike) -> Vector:
        """Residual."""

    def jac(self, theta: ArrayLike) -> Any:
        """Its derivative."""

    def cost(self, theta: ArrayLike) -> float:
        """½ ‖residual‖²."""


def minimize(
    problem: Residuals,
    fun: Callable[..., float],
    x0: ArrayLike,
    args: tuple[Any, ...] = (),
    *,
    jac: Callable[[Vector], Any],
    bounds: Any = None,
    constraints: Any = (),
    callback: Callable[..., Any] | None = None,
    memory: int | None = None,
    **options: Any,
) -> OptimizeResult:
    """Run `netjac.least_squares` on the problem's residual; see `netjac.LeastSquares.minimizer`.

    Parameters
    ----------
    problem
        Whose cost is minimised.
    fun, x0, args, bounds, constraints, callback, options
        What SciPy hands over.
    jac, memory
        The derivative of the residual that the solver is to get, and the bytes that it may take.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise OptionError(f"there are no options {', '.join(unknown)}: the minimizer knows {', '.join(OPTIONS)}.")
    if constraints is not None and np.size(constraints):
        raise OptionError("the minimizer keeps bounds, and no constraints: use method 'SLSQP' or 'trust-constr'.")
    limits = problem.bounds if bounds is None else _bounds(bounds, np.size(x0))
    start = np.clip(np.asarray(x0, np.float64), limits.lb, limits.ub)
    value, own = float(fun(start, *args)), problem.cost(start)
    if not np.isclose(value, own, rtol=1e-9, atol=0):
        raise DataError(
            f"the minimizer minimises the cost of its problem, {own} at the start, and fun is {value} there: hand "
            "problem.cost to scipy.optimize.minimize."
        )
    tol = options.get("tol")
    default = 1e-8 if tol is None else tol
    most = options.get("maxiter")
    if most is not None and most < 1:
        raise OptionError(f"maxiter must be a positive whole number, and is {most!r}.")
    told = callbacks.stops(callback)
    asked = False

    def after_step(intermediate_result: OptimizeResult) -> bool:
        nonlocal asked
        asked = told is not None and told(_as_minimum(intermediate_result))
        return asked or (most is not None and intermediate_result.nit >= most)

    result = solvers.least_squares(
        problem.fun,
        start,
        jac,
        limits,
        **{key: options.get(key, default) for key in ("ftol", "xtol", "gtol")},
        max_nfev=options.get("max_nfev"),
        x_scale=options.get("x_scale"),
        linear_solver=options.get("linear_solver", "auto"),
        memory=memory,
        verbose=int(options.get("disp") or 0),
        callback=after_step,
    )
    if result.status == -2 and not asked:
        result.update(status=0, message="Maximum number of iterations has been exceeded.")
    return _as_minimum(result)


def _as_minimum(result: OptimizeResult) -> OptimizeResult:
    """The result with the value as ``fun`` and its gradient as ``jac``, as minimize has them."""
    made = OptimizeResult(result)
    made.fun, made.jac = made.pop("cost"), made.pop("grad")
    made.pop("state")
    return made


def _bounds(given: Any, size: int) -> Bounds:
    """Bounds, or pairs (lower, upper) with None for no bound, as `scipy.optimize.minimize` takes them."""
    if isinstance(given, Bounds):
        return Bounds(np.broadcast_to(given.lb, size), np.broadcast_to(given.ub, size))
    pairs = list(given)
    if len(pairs) != size or any(np.size(pair) != 2 for pair in pairs):
        raise ShapeError(f"bounds must be scipy.optimize.Bounds, or {size} pairs (lower, upper), one a parameter.")
    lower, upper = zip(*pairs, strict=True)
    return Bounds(
        np.array([-np.inf if bound is None else bound for bound in lower], np.float64),
        np.array([np.inf if bound is None else bound for bound in upper], np.float64),
    )
