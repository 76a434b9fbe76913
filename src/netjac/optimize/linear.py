"""The damped linear least-squares problem of one Levenberg–Marquardt step, solved in whichever form is cheapest.

At a point with residual r, derivative J (rows, m), prior rows diag(π), gradient g = Jᵀ r + (prior part) and scale d, a
step s solves

    min ½ ‖J s + r‖² + ½ ‖π ∘ s + …‖² + ½ λ ‖s / d‖²    ⇔    (Jᵀ J + diag(w)) s = −g,    w = π² + λ / d².

Four ways, one class each, in `netjac.optimize.direct` and `netjac.optimize.iterative`:

- `NormalSystem`: Cholesky of Jᵀ J + diag(w), (m, m).
- `GramSystem`: Cholesky of J diag(w)⁻¹ Jᵀ + 1, (rows, rows), by the push-through identity.
- `SpectralSystem`: singular values of the explicit J diag(d), after which every λ costs next to nothing, and which
  takes J of any rank. The safe way down when a Cholesky factor cannot be trusted.
- `ProductSystem`: conjugate gradients, preconditioned, from products alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator

from netjac.optimize.losses import Vector

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Linearisation:
    """Residual and derivative at one point, rows of the data first and those of the prior last.

    Parameters
    ----------
    J
        Explicit array (rows, m), sparse array, or `LinearOperator`; one with the verbs of
        `netjac.optimize.residual.ResidualJacobian` is used through them. Where it has a ``normal_product``, v ↦ Jᵀ J v,
        that is not None, no J v is asked for by products.
    r : (rows,)
        Residual.
    g : (m,)
        Gradient Jᵀ r.

    Attributes
    ----------
    prior : (m,) or None
        1/σ of each parameter; the last rows of r are those with 1/σ > 0.
    data : int
        Number of rows that are not of the prior.
    """

    def __init__(self, J: Any, r: Vector, g: Vector) -> None:
        self.J, self.r, self.g = J, r, g
        self.shape: tuple[int, int] = J.shape
        prior = getattr(J, "prior", None)
        self.prior: Vector | None = None if prior is None else np.asarray(prior, np.float64)
        self.data = self.shape[0] - (0 if self.prior is None else int(np.count_nonzero(self.prior)))

    def apply(self, s: Vector) -> Vector:
        """J s (rows,)."""
        return np.asarray(self.J @ s, np.float64)

    def adjoint(self, u: Vector) -> Vector:
        """Jᵀ u (m,)."""
        return np.asarray(self.J.T @ u, np.float64)

    def normal_product(self, v: Vector) -> Vector:
        """Jᵀ J v (m,)."""
        product = getattr(self.J, "normal_product", None)
        return self.adjoint(self.apply(v)) if product is None else np.asarray(product(v), np.float64)

    def curvature(self, s: Vector) -> float:
        """‖J s‖²."""
        if getattr(self.J, "normal_product", None) is not None:
            return float(s @ self.normal_product(s))
        return float(np.sum(self.apply(s) ** 2))

    def explicit(self) -> Matrix:
        """J (rows, m), prior rows included; not to be written to."""
        return explicit(self.J)

    @property
    def prior_gradient(self) -> Vector:
        """diag(π)ᵀ times the prior's rows of the residual (m,)."""
        q = np.zeros(self.shape[1])
        if self.prior is not None:
            held = self.prior > 0
            q[held] = self.prior[held] * self.r[self.data :]
        return q


def explicit(J: Any) -> Matrix:
    """J as a float64 array; the same object where it is one."""
    if scipy.sparse.issparse(J):
        return np.asarray(J.toarray(), np.float64)
    if hasattr(J, "to_array"):
        return np.asarray(J.to_array(dtype=np.float64), np.float64)
    if isinstance(J, LinearOperator):
        return np.asarray(J @ np.eye(J.shape[1]), np.float64)
    return np.asarray(J, np.float64)


class Trial:
    """A step for one damping: its length at once, the step itself when it is wanted.

    Parameters
    ----------
    system
        That solved for it last.
    step : (m,)
    """

    def __init__(self, system: System, step: Vector) -> None:
        self._system, self._step = system, step
        self.length = float(np.linalg.norm(step / system.scale))

    def step(self) -> Vector:
        """The step (m,)."""
        return self._step

    def slope(self) -> float:
        """−d‖s / d‖ / dλ."""
        t = self._step / self._system.scale**2
        return float(t @ self._system.inverse(t)) / self.length if self.length else 0.0


class System(ABC):
    """One of the ways to solve for steps at one point, for any damping and any set of free parameters."""

    any_damping = False  # whether steps can be computed at λ = 0 whatever the rank of J

    def __init__(self, at: Linearisation, scale: Vector) -> None:
        self.at, self.scale = at, scale
        self._ridge = np.zeros_like(scale) if at.prior is None else at.prior**2

    def weights(self, damping: float) -> Vector:
        """w (m,) = π² + λ / d²."""
        return self._ridge + damping / self.scale**2

    @abstractmethod
    def solve(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Trial | None:
        """The step of the free parameters, the others displaced by ``shift`` (0 by default); without ``shift``.

        None where it cannot be computed to any use at this damping.
        """

    @abstractmethod
    def inverse(self, t: Vector) -> Vector:
        """(Jᵀ J + diag(w))⁻¹ t over the free parameters, for the damping and the free ones of the last `solve`."""

    def step(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Vector | None:
        """The step (m,) of `solve`."""
        trial = self.solve(damping, free, shift)
        return None if trial is None else trial.step()

    def _gradient(self, shift: Vector | None) -> Vector:
        """Of the quadratic model at ``shift``."""
        return self.at.g if shift is None else self.at.g + self.at.normal_product(shift)

    def _trial(self, step: Vector) -> Trial | None:
        return Trial(self, step) if np.all(np.isfinite(step)) else None


def uniform(values: Vector) -> bool:
    """Whether all entries are one number."""
    return not len(values) or bool(values.min() == values.max())


def is_operator(J: Any) -> bool:
    """Whether J has the verbs of a Jacobian kept as factors."""
    return hasattr(J, "gram") and hasattr(J, "normal")
