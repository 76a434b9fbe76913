"""The loss of a residual and its gradient factor, as `scipy.optimize.least_squares` defines them.

SciPy minimises ½ C² Σ_i ρ((r_i / C)²) with C = ``f_scale``. The gradient over θ is Jᵀ (ρ'(z) ∘ r), z = (r / C)².
Written here again because SciPy keeps its own table private, and the best point seen must be judged by what is
minimised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.errors import DtypeError, ShapeError

Vector = NDArray[np.float64]
Loss = str | Callable[[NDArray[Any]], Any]
"""A name that SciPy knows, or a callable: z (q,) → ρ, ρ', ρ'' stacked (3, q)."""


Rho = tuple[Vector, Vector, Vector]
"""ρ, ρ' and ρ'' at z, (q,) each."""


def _linear(z: Vector) -> Rho:
    return z, np.ones_like(z), np.zeros_like(z)


def _huber(z: Vector) -> Rho:
    root = np.sqrt(np.maximum(z, 1.0))
    return np.where(z <= 1, z, 2 * root - 1), 1 / root, np.where(z <= 1, 0.0, -0.5 / root**3)


def _soft_l1(z: Vector) -> Rho:
    root = np.sqrt(1 + z)
    return 2 * (root - 1), 1 / root, -0.5 / root**3


def _cauchy(z: Vector) -> Rho:
    return np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2


def _arctan(z: Vector) -> Rho:
    return np.arctan(z), 1 / (1 + z**2), -2 * z / (1 + z**2) ** 2


LOSSES: dict[str, Callable[[Vector], Rho]] = {
    "linear": _linear,
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
}


def _stacked(loss: Callable[[Vector], Any], z: Vector) -> NDArray[np.float64]:
    """What a callable says of z (q,): (3, q)."""
    given = loss(z)
    try:
        rho = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise DtypeError(
            f"the loss must return ρ, ρ' and ρ'' as an array (3, {z.size}), and returned {given!r}."
        ) from None
    if rho.shape != (3, z.size):
        raise ShapeError(
            f"the loss must return ρ, ρ' and ρ'' of the {z.size} residuals as an array (3, {z.size}), and returned "
            f"one of shape {rho.shape}."
        )
    return rho


def _rho(residual: Vector, loss: Loss, f_scale: float) -> Rho:
    # A far trial point may overflow: its cost is then infinite, which is the right answer and needs no warning.
    with np.errstate(over="ignore", invalid="ignore"):
        z = (residual / f_scale) ** 2
        if callable(loss):
            value, slope, curvature = _stacked(loss, z)
            return value, slope, curvature
        return LOSSES[loss](z)


def cost(residual: Vector, loss: Loss = "linear", f_scale: float = 1.0) -> float:
    """½ C² Σ ρ((r / C)²) for a residual r (q,); NaN or infinity when r holds one.

    Examples
    --------
    >>> cost(np.array([3.0, 4.0]))
    12.5
    """
    if loss == "linear":  # C cancels
        with np.errstate(over="ignore", invalid="ignore"):
            return float(0.5 * np.dot(residual, residual))
    value, _, _ = _rho(residual, loss, f_scale)
    return float(0.5 * f_scale**2 * np.sum(value))


def weighted(residual: Vector, loss: Loss = "linear", f_scale: float = 1.0) -> Vector:
    """ρ'(z) ∘ r (q,): what Jᵀ takes to the gradient of the cost."""
    if loss == "linear":
        return residual
    return _rho(residual, loss, f_scale)[1] * residual


def linearised(residual: Vector, loss: Loss = "linear", f_scale: float = 1.0) -> tuple[Vector | None, Vector]:
    """Row weights w and residual r̃ (q,) such that ½ ‖w ∘ (J s) + r̃‖² is a model of the cost; w is None for "linear".

    Its gradient is that of the cost, and its curvature the part of the cost's that stays positive (Triggs et al. 2000,
    "Bundle adjustment: a modern synthesis", §4.3).
    """
    if loss == "linear":
        return None, residual
    _, slope, curvature = _rho(residual, loss, f_scale)
    z = (residual / f_scale) ** 2
    w = np.sqrt(np.maximum(slope + 2 * curvature * z, np.finfo(np.float64).eps))
    return w, slope / w * residual


def of_first(loss: Loss, size: int) -> Loss:
    """A loss of the first ``size`` residuals; those after them stay squared."""
    if loss == "linear":
        return loss
    of_rows = loss if callable(loss) else LOSSES[loss]

    def rho(z: Vector) -> NDArray[np.float64]:
        out = np.stack([z, np.ones_like(z), np.zeros_like(z)])
        out[:, :size] = _stacked(of_rows, z[:size])
        return out

    return rho
