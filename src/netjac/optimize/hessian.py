"""Products with a Hessian that is not Gauss–Newton's, and Hessians as arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from netjac.optimize.losses import Vector

CURVATURES = ("gauss-newton", "difference", "exact")


def by_difference(gradient: Callable[[Vector], Vector], theta: Vector, v: Vector) -> Vector:
    """∇²F(θ) v ≈ (∇F(θ + h v) − ∇F(θ − h v)) / 2h (Nocedal and Wright 2006, "Numerical optimization", eq. 8.20).

    The step h ‖v‖ is the cube root of the precision, relative to 1 + ‖θ‖, which balances truncation and rounding.
    """
    length = float(np.linalg.norm(v))
    if length == 0:
        return np.zeros_like(theta)
    h = np.cbrt(np.finfo(np.float64).eps) * (1 + float(np.linalg.norm(theta))) / length
    return (gradient(theta + h * v) - gradient(theta - h * v)) / (2 * h)


def explicit(product: Callable[[Vector], Vector], size: int) -> NDArray[np.float64]:
    """The Hessian (M, M) from its M columns, exactly symmetric."""
    columns = np.stack([product(unit) for unit in np.eye(size)], axis=1)
    return 0.5 * (columns + columns.T)
