"""Steps from products alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from netjac.optimize.linear import Linearisation, Mask, System, Trial
from netjac.optimize.losses import Vector
from netjac.optimize.precondition import Preconditioner

_CG_STEPS = 250
"""Most products for one step; what is reached by then is used."""


class ProductSystem(System):
    """By conjugate gradients on (Jᵀ J + diag(w)) s = −g, from products alone."""

    def __init__(self, at: Linearisation, scale: Vector, preconditioner: Preconditioner, tolerance: float) -> None:
        super().__init__(at, scale)
        self._preconditioner, self._tolerance = preconditioner, tolerance

    def solve(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Trial | None:
        at = self.at
        mask = np.ones_like(self.scale) if free is None else free.astype(np.float64)
        extra = damping / self.scale**2

        def apply(v: Vector) -> Vector:
            return mask * (at.normal_product(v) + extra * v)

        self._apply, self._mask = apply, mask
        inverse = self._precondition = self._preconditioner.at(self.weights(damping))
        right = -mask * self._gradient(shift)
        step = conjugate_gradients(apply, right, lambda v: mask * inverse(v), self._tolerance)
        return None if step is None else self._trial(step)

    def inverse(self, t: Vector) -> Vector:
        inverse = self._precondition
        solution = conjugate_gradients(self._apply, self._mask * t, lambda v: self._mask * inverse(v), self._tolerance)
        return np.zeros_like(t) if solution is None else solution


def conjugate_gradients(
    apply: Callable[[Vector], Vector],
    b: Vector,
    precondition: Callable[[Vector], Vector],
    tolerance: float,
    steps: int = _CG_STEPS,
) -> Vector | None:
    """x with A x ≈ b for a positive definite A, to a relative residual (Hestenes and Stiefel 1952); None for overflow.

    Ends early at a direction without curvature, with what there is: any iterate lowers ½ xᵀ A x − bᵀ x.
    """
    x, residual = np.zeros_like(b), b.copy()
    z = precondition(residual)
    direction, product = z.copy(), float(residual @ z)
    goal = tolerance * float(np.linalg.norm(b))
    for _ in range(steps):
        if float(np.linalg.norm(residual)) <= goal:
            break
        image = apply(direction)
        curvature = float(direction @ image)
        if not curvature > 0:
            break
        length = product / curvature
        x += length * direction
        residual -= length * image
        z = precondition(residual)
        product, previous = float(residual @ z), product
        direction = z + (product / previous) * direction
    return x if np.all(np.isfinite(x)) else None
