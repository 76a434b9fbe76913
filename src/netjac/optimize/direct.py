"""Steps by factorisations: of Jᵀ J, of J Jᵀ, or of the explicit J."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, blas, lapack, qr, svd

from netjac.algebra import mirror
from netjac.optimize.linear import Linearisation, Mask, Matrix, System, Trial, explicit, is_operator, uniform
from netjac.optimize.losses import Vector

_SAFE_CONDITION = 1e-15
"""Reciprocal condition number of Jᵀ J + diag(w) below which the solution is not used: errors lie along directions that
hardly change the residual, and the gain ratio has the last word."""

_SAFE_GRAM_CONDITION = 1e-11
"""The same for J diag(w)⁻¹ Jᵀ + 1, whose solution holds the part of r outside the range of J in full: multiplied by
Jᵀ / w it should vanish, and leaves its rounding errors."""


class NormalSystem(System):
    """By Cholesky of Jᵀ J + diag(w)."""

    def __init__(self, at: Linearisation, scale: Vector) -> None:
        super().__init__(at, scale)
        J = at.J
        made = J.normal(dtype=np.float64) if hasattr(J, "normal") else _columns_gram(explicit(J))
        self._normal = np.asarray(made, np.float64)
        self._size = float(np.trace(self._normal))  # no less than the largest eigenvalue

    def solve(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Trial | None:
        g, w = self._gradient(shift), self.weights(damping)
        s = np.zeros_like(g)
        self._factor = None  # freed before the next is made
        self._chosen = chosen = np.arange(len(g)) if free is None else np.flatnonzero(free)
        if not len(chosen):
            self._factor = None
            return Trial(self, s)
        matrix = self._normal.copy() if len(chosen) == len(g) else self._normal[chosen[:, None], chosen]
        matrix.flat[:: len(matrix) + 1] += w[chosen]
        self._factor = _cholesky(matrix, w[chosen].min() / (self._size + w.max()), _SAFE_CONDITION)
        if self._factor is None:
            return None
        s[chosen] = _solved(self._factor, -g[chosen])
        return self._trial(s)

    def inverse(self, t: Vector) -> Vector:
        s = np.zeros_like(t)
        if self._factor is not None:
            s[self._chosen] = _solved(self._factor, t[self._chosen])
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

    def solve(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Trial | None:
        alike = self._groups is not None and len(self._groups) == 1
        if alike and free is None and shift is None and self.at.prior is None and damping > 0:
            return self._solve_dual(damping)
        at = self.at
        inverse = 1 / self.weights(damping)
        if free is not None:
            inverse = np.where(free, inverse, 0.0)
        self._factor = None  # freed before the next is made
        q, r = at.prior_gradient, at.r[: at.data]
        if shift is not None:
            q, r = q + self._ridge * shift, r + self._apply(shift)
        matrix = self._gram(inverse)
        bound = 1 / (1 + float(np.trace(matrix)))
        matrix.flat[:: len(matrix) + 1] += 1.0
        self._weights_inverse, self._factor = inverse, _cholesky(matrix, bound, _SAFE_GRAM_CONDITION)
        if self._factor is None:
            return None
        return self._trial(-inverse * (q + self._adjoint(_solved(self._factor, r - self._apply(inverse * q)))))

    def _solve_dual(self, damping: float) -> Trial | None:
        """The same for w one number: s = −Jᵀ c with (J Jᵀ + w) c = r, whose length needs no product with J."""
        weight = damping / self.scale[0] ** 2
        if not self._grams:
            self._gram(np.ones_like(self.scale))
        gram = self._grams[0]
        matrix = gram.copy()
        bound = weight / (weight + float(np.trace(gram)))
        matrix.flat[:: len(matrix) + 1] += weight
        factor = _cholesky(matrix, bound, _SAFE_GRAM_CONDITION)
        if factor is None:
            return None
        c = _solved(factor, self.at.r)
        return _DualTrial(self, gram, factor, c) if np.all(np.isfinite(c)) else None

    def inverse(self, t: Vector) -> Vector:
        assert self._factor is not None
        u = self._weights_inverse * t
        return u - self._weights_inverse * self._adjoint(_solved(self._factor, self._apply(u)))

    def _apply(self, s: Vector) -> Vector:
        """J s over the data rows; explicit where that is at hand."""
        if not s.any():
            return np.zeros(self.at.data)
        return self._kept_rows @ s if self._kept_rows is not None else self.at.apply(s)[: self.at.data]

    def _adjoint(self, a: Vector) -> Vector:
        """Jᵀ a over the data rows."""
        if self._kept_rows is not None:
            return np.asarray(self._kept_rows.T @ a)
        return self.at.adjoint(np.concatenate([a, np.zeros(self.at.shape[0] - self.at.data)]))


class _DualTrial(Trial):
    """s = −Jᵀ c: ‖s‖² = cᵀ (J Jᵀ) c, and its derivative likewise."""

    def __init__(self, system: GramSystem, gram: Matrix, factor: Matrix, c: Vector) -> None:
        self._gram_system, self._factor, self._c = system, factor, c
        self._scale = float(system.scale[0])
        self._image = gram @ c
        self.length = float(np.sqrt(max(0.0, float(c @ self._image)))) / self._scale

    def step(self) -> Vector:
        return -self._gram_system._adjoint(self._c)

    def slope(self) -> float:
        rate = float(_solved(self._factor, self._c) @ self._image)
        return rate / (self.length * self._scale**4) if self.length else 0.0


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
    if uniform(ridge) and uniform(scale):
        gram = (lambda: J.gram(dtype=np.float64)) if hasattr(J, "gram") else (lambda: _rows_gram(explicit(J)))
        return [ColumnGroup(np.arange(m), gram)]
    data = getattr(J, "data", J)
    if not hasattr(data, "columns") or data.shape[1] != m:
        return None
    kinds: dict[tuple[float, float], list[Any]] = {}
    for segment in data.parameters:
        if not segment.size:
            continue
        own, sizes = ridge[segment.slice], scale[segment.slice]
        if not (uniform(own) and uniform(sizes)):
            return None
        kinds.setdefault((own[0], sizes[0]), []).append(segment)
    if len(kinds) > _MOST_GROUPS:
        return None
    return [
        ColumnGroup(
            np.concatenate([np.arange(s.start, s.stop) for s in segments]),
            partial(_gram_of, data, [s.name for s in segments]),
        )
        for segments in kinds.values()
    ]


def _gram_of(J: Any, names: list[str]) -> Any:
    return J.columns(names).gram(dtype=np.float64)


class SpectralSystem(System):
    """By the singular values of the explicit J diag(d), prior rows included."""

    any_damping = True

    def __init__(self, at: Linearisation, scale: Vector) -> None:
        super().__init__(at, scale)
        self._rows = at.explicit()
        self._kept: tuple[bytes, Matrix, Vector, Matrix] | None = None

    def solve(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Trial | None:
        chosen = np.ones(len(self.scale), np.bool_) if free is None else free
        s = np.zeros_like(self.scale)
        if not chosen.any():
            self._gains = chosen, np.zeros(0), np.zeros((0, 0))
            return Trial(self, s)
        U, values, Vt = self._decomposed(chosen)
        r = self.at.r if shift is None else self.at.r + self._rows @ shift
        kept = values > np.finfo(np.float64).eps * max(self._rows.shape) * values[0]
        curvature = values**2 + damping
        self._gains = chosen, np.divide(1.0, curvature, where=kept, out=np.zeros_like(values)), Vt
        gain = np.divide(values, curvature, where=kept, out=np.zeros_like(values))
        s[chosen] = -self.scale[chosen] * (Vt.T @ (gain * (U.T @ r)))
        return self._trial(s)

    def inverse(self, t: Vector) -> Vector:
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


def _cholesky(matrix: Matrix, bound: float, safe: float) -> Matrix | None:
    """The factor of a positive definite matrix, which is overwritten; None where it cannot be trusted.

    ``bound`` is no more than the reciprocal condition number, and ``safe`` what that must be; where the bound does not
    show it, the number is estimated.
    """
    if not np.isfinite(bound):
        return None
    norm = lapack.dlange("1", matrix.T) if bound < safe else 0.0
    factor, failed = lapack.dpotrf(matrix.T, lower=1, clean=0, overwrite_a=1)
    if failed or (bound < safe and not lapack.dpocon(factor, norm, uplo="L")[0] >= safe):
        return None
    return np.asarray(factor)


def _solved(factor: Matrix, b: Vector) -> Vector:
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
    mirror(full)
    return full


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
