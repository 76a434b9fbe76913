"""The damped linear least-squares problem of one Levenberg–Marquardt step, solved in whichever form is cheapest.

At a point with residual r, derivative J (rows, m), prior rows diag(π), gradient g = Jᵀ r + (prior part) and scale d, a
step s solves

    min ½ ‖J s + r‖² + ½ ‖π ∘ s + …‖² + ½ λ ‖s / d‖²    ⇔    (Jᵀ J + diag(w)) s = −g,    w = π² + λ / d².

Four ways, one class each:

- `NormalSystem`: Cholesky of Jᵀ J + diag(w), (m, m).
- `GramSystem`: Cholesky of J diag(w)⁻¹ Jᵀ + 1, (rows, rows), by the push-through identity.
- `SpectralSystem`: singular values of the explicit J diag(d), after which every λ costs next to nothing, and which
  takes J of any rank. The safe way down when a Cholesky factor cannot be trusted.
- `ProductSystem`: conjugate gradients, preconditioned, from products alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, blas, lapack, qr, svd
from scipy.sparse.linalg import LinearOperator

from netjac.optimize.losses import Vector
from netjac.optimize.precondition import Preconditioner

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]

_SAFE_CONDITION = 1e-15
"""Reciprocal condition number of Jᵀ J + diag(w) below which the solution is not used: errors lie along directions that
hardly change the residual, and the gain ratio has the last word."""

_SAFE_GRAM_CONDITION = 1e-11
"""The same for J diag(w)⁻¹ Jᵀ + 1, whose solution holds the part of r outside the range of J in full: multiplied by
Jᵀ / w it should vanish, and leaves its rounding errors."""

_CG_STEPS = 250


class Linearisation:
    """Residual and derivative at one point, rows of the data first and those of the prior last.

    Parameters
    ----------
    J
        Explicit array (rows, m), sparse array, or `LinearOperator`; one with the verbs of
        `netjac.optimize.residual.ResidualJacobian` is used through them.
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


class System(ABC):
    """One of the ways to solve for steps at one point, for any damping and any set of free parameters."""

    def __init__(self, at: Linearisation, scale: Vector) -> None:
        self.at, self.scale = at, scale
        self._ridge = np.zeros_like(scale) if at.prior is None else at.prior**2

    def weights(self, damping: float) -> Vector:
        """w (m,) = π² + λ / d²."""
        return self._ridge + damping / self.scale**2

    @abstractmethod
    def step(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Vector | None:
        """The step s (m,) of the free parameters, the others displaced by ``shift`` (0 by default); without ``shift``.

        None where it cannot be computed to any use at this damping.
        """

    def slope(self, step: Vector) -> float:
        """−d‖s / d‖ / dλ at the step last returned, with its damping and its free parameters."""
        t = step / self.scale**2
        length = float(np.linalg.norm(step / self.scale))
        return float(t @ self._inverse(t)) / length if length else 0.0

    @abstractmethod
    def _inverse(self, t: Vector) -> Vector:
        """(Jᵀ J + diag(w))⁻¹ t over the free parameters, for the damping and the free ones of the last step."""

    any_damping = False  # whether steps can be computed at λ = 0 whatever the rank of J

    def _gradient(self, shift: Vector | None) -> Vector:
        """Of the quadratic model at ``shift``."""
        return self.at.g if shift is None else self.at.g + self.at.adjoint(self.at.apply(shift))


class NormalSystem(System):
    """By Cholesky of Jᵀ J + diag(w)."""

    def __init__(self, at: Linearisation, scale: Vector) -> None:
        super().__init__(at, scale)
        J = at.J
        if hasattr(J, "normal"):
            self._normal = np.asarray(J.normal(dtype=np.float64), np.float64)
        else:
            self._normal = _columns_gram(explicit(J))

    def step(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Vector | None:
        g, w = self._gradient(shift), self.weights(damping)
        s = np.zeros_like(g)
        chosen = np.arange(len(g)) if free is None else np.flatnonzero(free)
        if not len(chosen):
            return s
        matrix = self._normal.copy() if len(chosen) == len(g) else self._normal[chosen[:, None], chosen]
        matrix.flat[:: len(matrix) + 1] += w[chosen]
        self._chosen, self._factor = chosen, _cholesky(matrix)
        if self._factor is None:
            return None
        s[chosen] = _solve(self._factor, -g[chosen])
        return s if np.all(np.isfinite(s)) else None

    def _inverse(self, t: Vector) -> Vector:
        s = np.zeros_like(t)
        if self._factor is not None:
            s[self._chosen] = _solve(self._factor, t[self._chosen])
        return s


class GramSystem(System):
    """By Cholesky of J diag(w)⁻¹ Jᵀ + 1 over the data rows.

    With few rows this is small whatever m is. Where w takes few values, each on whole variables, J Jᵀ of those is
    formed once for all dampings and never needs the explicit J; else the explicit J is kept.
    """

    def __init__(self, at: Linearisation, scale: Vector) -> None:
        super().__init__(at, scale)
        self._groups = column_groups(at, scale)
        self._grams: list[Matrix] = []  # of the groups, made when they are needed
        self._kept_rows: Matrix | None = None

    @property
    def _rows(self) -> Matrix:
        """The explicit data rows."""
        if self._kept_rows is None:
            J = self.at.J
            self._kept_rows = explicit(getattr(J, "data", J) if is_operator(J) else J)
        return self._kept_rows

    def _gram(self, inverse: Vector) -> Matrix:
        """J diag(inverse) Jᵀ over the data rows, the caller's own."""
        groups = self._groups
        if groups is None or not all(uniform(inverse[group.columns]) for group in groups):
            return _rows_gram(self._rows * np.sqrt(inverse))
        if not self._grams:
            self._grams = [np.asarray(group.gram(), np.float64) for group in groups]
        total = self._grams[0] * inverse[groups[0].columns[0]]
        for group, gram in zip(groups[1:], self._grams[1:], strict=True):
            total += gram * inverse[group.columns[0]]
        return total

    def step(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Vector | None:
        at = self.at
        inverse = 1 / self.weights(damping)
        if free is not None:
            inverse = np.where(free, inverse, 0.0)
        q, r = at.prior_gradient, at.r[: at.data]
        if shift is not None:
            q, r = q + self._ridge * shift, r + self._apply(shift)
        matrix = self._gram(inverse)
        matrix.flat[:: len(matrix) + 1] += 1.0
        self._weights_inverse, self._factor = inverse, _cholesky(matrix, _SAFE_GRAM_CONDITION)
        if self._factor is None:
            return None
        s = -inverse * (q + self._adjoint(_solve(self._factor, r - self._apply(inverse * q))))
        return s if np.all(np.isfinite(s)) else None

    def _inverse(self, t: Vector) -> Vector:
        assert self._factor is not None
        u = self._weights_inverse * t
        return u - self._weights_inverse * self._adjoint(_solve(self._factor, self._apply(u)))

    def _apply(self, s: Vector) -> Vector:
        """J s over the data rows; explicit where that is at hand."""
        if not s.any():
            return np.zeros(self.at.data)
        return self._kept_rows @ s if self._kept_rows is not None else self.at.apply(s)[: self.at.data]

    def _adjoint(self, a: Vector) -> Vector:
        if self._kept_rows is not None:
            return np.asarray(self._kept_rows.T @ a)
        return self.at.adjoint(np.concatenate([a, np.zeros(self.at.shape[0] - self.at.data)]))


@dataclass(frozen=True, eq=False)
class ColumnGroup:
    """Parameters on which w is one number, whatever the damping, and J Jᵀ over them alone."""

    columns: NDArray[np.intp]
    gram: Callable[[], Any]


_MOST_GROUPS = 4


def column_groups(at: Linearisation, scale: Vector) -> list[ColumnGroup] | None:
    """The groups, if they are few and can be told apart without the explicit J; else None."""
    J, m = at.J, at.shape[1]
    ridge = np.zeros(m) if at.prior is None else at.prior
    kinds, labels = np.unique(np.stack([ridge, scale]), axis=1, return_inverse=True)
    if kinds.shape[1] == 1:
        gram = (lambda: J.gram(dtype=np.float64)) if hasattr(J, "gram") else (lambda: _rows_gram(explicit(J)))
        return [ColumnGroup(np.arange(m), gram)]
    data = getattr(J, "data", J)
    if kinds.shape[1] > _MOST_GROUPS or not hasattr(data, "columns") or data.shape[1] != m:
        return None
    names: dict[int, list[str]] = {}
    for segment in data.parameters:
        found = np.unique(labels[segment.slice])
        if len(found) > 1:
            return None
        names.setdefault(int(found[0]), []).extend([segment.name] if segment.size else [])
    return [
        ColumnGroup(np.flatnonzero(labels == label), partial(_gram_of, data, chosen)) for label, chosen in names.items()
    ]


def _gram_of(J: Any, names: list[str]) -> Any:
    return J.columns(names).gram(dtype=np.float64)


def is_operator(J: Any) -> bool:
    """Whether J has the verbs of a Jacobian kept as factors."""
    return hasattr(J, "gram") and hasattr(J, "normal")


class SpectralSystem(System):
    """By the singular values of the explicit J diag(d), prior rows included."""

    any_damping = True

    def __init__(self, at: Linearisation, scale: Vector) -> None:
        super().__init__(at, scale)
        self._rows = at.explicit()
        self._kept: tuple[bytes, Matrix, Vector, Matrix] | None = None

    def step(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Vector | None:
        chosen = np.ones(len(self.scale), np.bool_) if free is None else free
        s = np.zeros_like(self.scale)
        if not chosen.any():
            return s
        U, values, Vt = self._decomposed(chosen)
        r = self.at.r if shift is None else self.at.r + self._rows @ shift
        kept = values > np.finfo(np.float64).eps * max(self._rows.shape) * values[0]
        curvature = values**2 + damping
        self._gains = chosen, np.divide(1.0, curvature, where=kept, out=np.zeros_like(values)), Vt
        gain = np.divide(values, curvature, where=kept, out=np.zeros_like(values))
        s[chosen] = -self.scale[chosen] * (Vt.T @ (gain * (U.T @ r)))
        return s

    def _inverse(self, t: Vector) -> Vector:
        chosen, gain, Vt = self._gains
        s = np.zeros_like(t)
        s[chosen] = self.scale[chosen] * (Vt.T @ (gain * (Vt @ (self.scale[chosen] * t[chosen]))))
        return s

    def _decomposed(self, chosen: Mask) -> tuple[Matrix, Vector, Matrix]:
        key = chosen.tobytes()
        if self._kept is None or self._kept[0] != key:
            matrix = self._rows[:, chosen] * self.scale[chosen]
            self._kept = (key, *_singular(matrix))
        return self._kept[1:]


class ProductSystem(System):
    """By conjugate gradients on (Jᵀ J + diag(w)) s = −g, from products alone."""

    def __init__(self, at: Linearisation, scale: Vector, preconditioner: Preconditioner, tolerance: float) -> None:
        super().__init__(at, scale)
        self._preconditioner, self._tolerance = preconditioner, tolerance

    def step(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Vector | None:
        at = self.at
        mask = np.ones_like(self.scale) if free is None else free.astype(np.float64)
        extra = damping / self.scale**2

        def apply(v: Vector) -> Vector:
            return mask * (at.adjoint(at.apply(v)) + extra * v)

        self._apply, self._mask = apply, mask
        inverse = self._precondition = self._preconditioner.at(self.weights(damping))
        right = -mask * self._gradient(shift)
        return conjugate_gradients(apply, right, lambda v: mask * inverse(v), self._tolerance)

    def _inverse(self, t: Vector) -> Vector:
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


def uniform(values: Vector) -> bool:
    """Whether all entries are one number."""
    return not len(values) or bool(values.min() == values.max())


def _cholesky(matrix: Matrix, safe: float = _SAFE_CONDITION) -> Matrix | None:
    """The factor of a positive definite matrix, which is overwritten; None where it cannot be trusted."""
    norm = lapack.dlange("1", matrix.T)
    if not np.isfinite(norm):
        return None
    factor, failed = lapack.dpotrf(matrix.T, lower=1, clean=0, overwrite_a=1)
    return None if failed or lapack.dpocon(factor, norm, uplo="L")[0] < safe else factor


def _solve(factor: Matrix, b: Vector) -> Vector:
    return np.asarray(lapack.dpotrs(factor, b, lower=1)[0])


def _columns_gram(J: Matrix) -> Matrix:
    """Jᵀ J (m, m), symmetric."""
    return _mirrored(blas.dsyrk(1.0, J.T, lower=1) if J.flags.c_contiguous else blas.dsyrk(1.0, J, trans=1, lower=1))


def _rows_gram(J: Matrix) -> Matrix:
    """J Jᵀ (rows, rows), symmetric."""
    return _mirrored(blas.dsyrk(1.0, J.T, trans=1, lower=1) if J.flags.c_contiguous else blas.dsyrk(1.0, J, lower=1))


def _mirrored(lower: Matrix) -> Matrix:
    """The symmetric matrix of which BLAS computed the lower triangle."""
    full = np.asarray(lower)
    upper = np.triu_indices(len(full), 1)
    if len(full) <= 256:
        full[upper] = full.T[upper]
        return full
    return np.tril(full) + np.tril(full, -1).T


def _singular(matrix: Matrix) -> tuple[Matrix, Vector, Matrix]:
    """Thin singular value decomposition; of the triangle of a QR factorisation where the matrix is long."""
    rows, columns = matrix.shape
    if rows > 2 * columns:
        Q, R = qr(matrix, mode="economic", check_finite=False)
        U, values, Vt = _singular(R)
        return Q @ U, values, Vt
    try:
        return svd(matrix, full_matrices=False, check_finite=False)
    except LinAlgError:
        return svd(matrix, full_matrices=False, check_finite=False, lapack_driver="gesvd")
