"""Is the derivative right? Numbers as dataclasses that print readably; `netjac.plots` draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from netjac.errors import DataError


class Differentiable(Protocol):
    """A vector function with its derivative, as an optimiser sees it: `netjac.LeastSquares`, or your own."""

    @property
    def x0(self) -> NDArray[Any]:
        """Where it starts (m,)."""

    def fun(self, theta: NDArray[Any], /) -> NDArray[Any]:
        """Value (q,)."""

    def jac(self, theta: NDArray[Any], /) -> Any:
        """Derivative (q, m), an array or an operator."""


@dataclass(frozen=True, eq=False)
class DerivativeCheck:
    """J against central differences along random directions, and J against Jᵀ.

    Attributes
    ----------
    relative_errors : (q,) float64
        ‖J v − (f(θ + h v) − f(θ − h v)) / 2h‖ / ‖the difference‖ for each direction v, ‖v‖ = 1.
    adjoint_errors : (q,) float64
        |uᵀ (J v) − vᵀ (Jᵀ u)| / (‖u‖ ‖J v‖) for each v and a random u.
    step : float
        h, near the best for central differences in the arithmetic of the function: ε^⅓ · max(1, ‖θ‖).
    tolerance : float
        What both kinds of error are compared with.
    zero : bool
        Whether every J v was exactly zero, though the function changes: the mark of a derivative that got lost.
    """

    relative_errors: NDArray[np.float64]
    adjoint_errors: NDArray[np.float64]
    step: float
    tolerance: float
    zero: bool

    @property
    def passed(self) -> bool:
        """Whether every error is within the tolerance; False for NaN."""
        errors = np.concatenate([self.relative_errors, self.adjoint_errors])
        return bool(np.all(errors <= self.tolerance))

    def __str__(self) -> str:
        verdict = "agrees with" if self.passed else "DISAGREES with"
        lines = [
            f"derivative {verdict} central differences along {len(self.relative_errors)} random directions",
            f"  step h                  {self.step:.1e}",
            f"  largest relative error  {self.relative_errors.max():.1e}   (tolerance {self.tolerance:.1e})",
            f"  largest adjoint error   {self.adjoint_errors.max():.1e}",
        ]
        if self.zero and not self.passed:
            lines.append("  every product J v is exactly zero, though the function changes")
        return "\n".join(lines)


def check_derivative(
    problem: Differentiable,
    theta: ArrayLike | None = None,
    *,
    directions: int = 5,
    precision: Any = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> DerivativeCheck:
    """Compare the derivative of a problem with central differences of its value.

    Parameters
    ----------
    problem
        Has ``fun``, ``jac`` and ``x0``, as `netjac.LeastSquares`.
    theta : (m,), optional
        Where; by default ``problem.x0``.
    directions
        Number of random directions. Each costs two evaluations.
    precision
        Type the function computes in. By default the widest of the problem's parameters, where it tells, else float64.
    tolerance
        By default 30 √ε: 4e-7 in float64, 1e-2 in float32. A difference across the kink of a ReLU is off by more, so
        compare several directions before a network with kinks is blamed.
    seed
        Of the directions.

    Returns
    -------
    DerivativeCheck

    Raises
    ------
    DataError
        If the value at theta or beside it is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> square = SimpleNamespace(x0=np.ones(3), fun=lambda t: t**2, jac=lambda t: np.diag(2 * t))
    >>> check_derivative(square).passed
    True
    """
    rng = np.random.default_rng(seed)
    point = np.array(problem.x0 if theta is None else theta, dtype=np.float64)
    if precision is None:
        space = getattr(problem, "parameters", None)
        precision = np.result_type(*(s.dtype for s in space)) if space is not None and len(space) else np.float64
    epsilon = float(np.finfo(precision).eps)
    step = epsilon ** (1 / 3) * max(1.0, float(np.linalg.norm(point)))
    J = problem.jac(point)
    relative, adjoint, zero = [], [], True
    for _ in range(directions):
        v = rng.normal(size=point.size)
        v /= np.linalg.norm(v)
        ahead, behind = np.asarray(problem.fun(point + step * v)), np.asarray(problem.fun(point - step * v))
        if not (np.isfinite(ahead).all() and np.isfinite(behind).all()):
            raise DataError(f"the function is not finite within {step:.1e} of theta, so no difference can be taken.")
        difference = (ahead - behind) / (2 * step)
        product = np.asarray(J @ v)
        u = rng.normal(size=product.size)
        back = np.asarray(J.T @ u)
        zero = zero and not product.any()
        relative.append(_ratio(np.linalg.norm(product - difference), np.linalg.norm(difference)))
        adjoint.append(_ratio(abs(u @ product - v @ back), np.linalg.norm(u) * np.linalg.norm(product)))
    limit = 30 * epsilon**0.5 if tolerance is None else tolerance
    return DerivativeCheck(np.array(relative), np.array(adjoint), step, limit, zero)


def _ratio(numerator: Any, denominator: Any) -> float:
    """numerator / denominator, with 0 / 0 = 0."""
    if numerator == 0:
        return 0.0
    return float(numerator / denominator) if denominator else float("inf")
