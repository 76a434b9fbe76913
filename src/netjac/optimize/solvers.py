"""Nonlinear least squares with SciPy's signature, on whatever form of the Jacobian is cheapest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import OptimizeResult

from netjac import planning
from netjac.errors import ShapeError
from netjac.optimize import callbacks, options
from netjac.optimize.control import State
from netjac.optimize.levenberg import Iteration
from netjac.optimize.losses import Loss, Vector
from netjac.optimize.minimand import Minimand
from netjac.optimize.options import OptionError

_EPS = float(np.finfo(np.float64).eps)


def least_squares(
    fun: Callable[..., Any],
    x0: ArrayLike,
    jac: Any = "2-point",
    bounds: Any = (-np.inf, np.inf),
    *,
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    x_scale: Any = None,
    loss: Loss = "linear",
    f_scale: float = 1.0,
    diff_step: ArrayLike | None = None,
    max_nfev: int | None = None,
    linear_solver: str = "auto",
    memory: float | str | None = None,
    verbose: int = 0,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    callback: Callable[..., Any] | None = None,
    state: State | None = None,
) -> OptimizeResult:
    """Minimise ½ Σ ρ(r_i(x)²) subject to bounds, with the signature and result of `scipy.optimize.least_squares`.

    Parameters
    ----------
    fun
        Residuals: x (m,) → (q,).
    x0 : (m,)
        Start, within the bounds.
    jac
        Derivative: x (m,) → (q, m), an array, a sparse array or a `LinearOperator`, a `netjac.Jacobian` included; or a
        scheme of finite differences, "2-point", "3-point" or "cs".
    bounds
        (lower, upper), numbers or (m,), or `scipy.optimize.Bounds`.
    ftol, xtol, gtol : float or None
        The fit ends where the cost falls by less than ``ftol * cost`` in a step that went as predicted; where a step is
        shorter than ``xtol * (xtol + ‖x‖)``; where no entry of the gradient is larger than ``gtol``, those that push
        against a bound left out. None switches a test off.
    x_scale : float, (m,) or "jac", optional
        Characteristic size of each parameter; "jac": the inverse of the largest column norm of J so far. By default
        "jac" where the linear algebra works with the columns of J, else 1.
    loss, f_scale
        As in SciPy: "linear", "soft_l1", "huber", "cauchy", "arctan", or a callable.
    diff_step : float or (m,), optional
        Relative step of finite differences.
    max_nfev : int, optional
        Most evaluations of ``fun``, those of finite differences not counted; by default 100 m.
    linear_solver : {"auto", "gram", "normal", "svd", "products"}
        How the step is computed: Cholesky of J Jᵀ, of Jᵀ J, singular values of J, or preconditioned conjugate
        gradients on products. "auto" takes the cheapest that fits, and says which and why in the result.
    memory : number of bytes or str, optional
        Most that the matrices of the steps may take, such as ``"2 GiB"``; what ``jac`` returns is not counted. By
        default half of what the system has free, where they take more than 64 MiB.
    verbose : {0, 1, 2}
        1 prints why the fit ended, 2 a line an iteration as well.
    args, kwargs
        Handed to ``fun`` and ``jac``.
    callback
        Called after every accepted step with ``intermediate_result`` (an `OptimizeResult`: x, fun, cost, grad,
        optimality, nit, nfev, njev, damping, state), or, under any other name of its parameter, with x. Ends the fit by
        raising StopIteration or returning True.
    state
        To go on from, as a callback of an earlier run saw it; x0 is then only compared in length. Where its last step
        met a test, the run ends there, as the earlier one did: ``dataclasses.replace(state, met=None)`` goes on.

    Returns
    -------
    scipy.optimize.OptimizeResult
        x, cost, fun, jac, grad, optimality, active_mask, nfev, njev, nit, status, message, success as in SciPy, and
        ``damping``, ``linear_solver`` and ``reason``. After Ctrl-C: the best point so far, with status -3.

    Raises
    ------
    OptionError, ShapeError, DtypeError, DataError
        Each a ValueError or TypeError: options that do not exist, shapes that do not fit, a start outside the bounds or
        with residuals that are not finite.
    MemoryBudgetError
        ``memory`` is too little; the message states the least that works.

    Notes
    -----
    A trial point with residuals that are not finite is a rejected step.

    Examples
    --------
    >>> import numpy as np, netjac as nj
    >>> def rosenbrock(x):
    ...     return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])
    >>> nj.least_squares(rosenbrock, [-2.0, 1.0]).x.round(6)
    array([1., 1.])
    """
    problem = Minimand.checked(fun, x0, jac, bounds, loss, f_scale, diff_step, args, kwargs)
    options.check_tolerances(ftol=ftol, xtol=xtol, gtol=gtol)
    tolerances = _tolerances(ftol, xtol, gtol)
    options.check_count(max_nfev)
    if verbose not in (0, 1, 2):
        raise OptionError(f"verbose must be 0, 1 or 2, and is {verbose!r}.")
    fit = Iteration(
        problem,
        tolerances,
        _checked_scale(x_scale, problem.x0),
        100 * len(problem.x0) if max_nfev is None else max_nfev,
        linear_solver,
        callbacks.stops(callback),
        verbose,
        None if memory is None else planning.memory_bytes(memory),
    )
    return fit.run(State(problem.x0) if state is None else state)


def _tolerances(*given: float | None) -> tuple[float, float, float]:
    f, x, g = (0.0 if tolerance is None else float(tolerance) for tolerance in given)
    if max(f, x, g) < _EPS:
        raise OptionError(f"at least one of ftol, xtol and gtol must be at least the machine precision, {_EPS:.1e}.")
    return f, x, g


def _checked_scale(x_scale: Any, x0: Vector) -> Vector | str | None:
    if x_scale is None or (isinstance(x_scale, str) and x_scale == "jac"):
        return x_scale
    try:
        scale = np.asarray(x_scale, np.float64)
    except (TypeError, ValueError):
        scale = np.array(-1.0)
    if not (np.all(np.isfinite(scale)) and np.all(scale > 0)):
        raise OptionError(f"x_scale must be 'jac', or positive numbers, and is {x_scale!r}.")
    if scale.shape not in ((), x0.shape):
        raise ShapeError(f"x_scale must be a number or of shape {x0.shape}, as x0 is, and has {scale.shape}.")
    return np.broadcast_to(scale, x0.shape).copy()
