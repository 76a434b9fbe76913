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

Vector = NDArray[np.float64]
Loss = str | Callable[[NDArray[Any]], Any]
"""A name that SciPy knows, or a callable: z (q,) → ρ, ρ', ρ'' stacked (3, q)."""


def _linear(z: Vector) -> tuple[Vector, Vector]:
    return z, np.ones_like(z)


def _huber(z: Vector) -> tuple[Vector, Vector]:
    root = np.sqrt(np.maximum(z, 1.0))
    return np.where(z <= 1, z, 2 * root - 1), 1 / root


def _soft_l1(z: Vector) -> tuple[Vector, Vector]:
    root = np.sqrt(1 + z)
    return 2 * (root - 1), 1 / root


def _cauchy(z: Vector) -> tuple[Vector, Vector]:
    return np.log1p(z), 1 / (1 + z)


def _arctan(z: Vector) -> tuple[Vector, Vector]:
    return np.arctan(z), 1 / (1 + z**2)


LOSSES: dict[str, Callable[[Vector], tuple[Vector, Vector]]] = {
    "linear": _linear,
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
}


def _rho(residual: Vector, loss: Loss, f_scale: float) -> tuple[Vector, Vector]:
    # A far trial point may overflow: its cost is then infinite, which is the right answer and needs no warning.
    with np.errstate(over="ignore", invalid="ignore"):
        z = (residual / f_scale) ** 2
        if callable(loss):
            value, slope, _ = np.asarray(loss(z), dtype=np.float64)
            return value, slope
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
    value, _ = _rho(residual, loss, f_scale)
    return float(0.5 * f_scale**2 * np.sum(value))


def weighted(residual: Vector, loss: Loss = "linear", f_scale: float = 1.0) -> Vector:
    """ρ'(z) ∘ r (q,): what Jᵀ takes to the gradient of the cost."""
    if loss == "linear":
        return residual
    return _rho(residual, loss, f_scale)[1] * residual
