r"""The inverse of the information matrix of a fit, as far as it is wanted, and which directions have none.

With data rows J (d, M) and prior rows diag(π) over θ (M,), the information matrix and the covariance of θ are

    F = Jᵀ J + diag(π²),    Σ = σ² F⁻¹.

A combination aᵀθ is *determined* where a lies in the range of F; there aᵀF⁻a is the same for every generalised inverse,
and elsewhere its variance is infinite (Searle 1971, Linear Models, §5.4, "estimable functions"). Two forms:

- `Spectral`: with the columns brought to unit length, [J; diag(π)] D⁻¹ = U S Vᵀ and F⁻ = W Wᵀ, W = D⁻¹ V S⁻¹; from the
  explicit rows where those are small, else from Jᵀ J (by a Cholesky factor L of D⁻¹ F D⁻¹ where it is well conditioned:
  W = D⁻¹ L⁻ᵀ).
- `FewRows`: everything from (d, d) matrices and products, however large M is. Let w = 1/π² where there is a prior and 0
  elsewhere, E the 0/1 diagonal of the parameters without one, and

      C = 1 + J diag(w) Jᵀ = L Lᵀ,    L⁻¹ J E Jᵀ L⁻ᵀ = U Λ Uᵀ (eigenvalues of rounding size dropped).

  The data then see the parameters without prior as a least-squares problem with noise of covariance C, and

      aᵀ F⁻¹ a = Σ w a² − ‖k‖² + ‖Λ⁻¹ Uᵀ b − Uᵀ k‖²,    k = L⁻¹ J (w ∘ a),    b = L⁻¹ J E a,

  which is the matrix inversion lemma where every parameter has a prior, and universal kriging otherwise (Rasmussen and
  Williams 2006, Gaussian Processes for Machine Learning, eq. 2.42, with their K as J diag(w) Jᵀ).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, eigh, eigvalsh, lapack, solve_triangular, svd

from netjac import algebra, planning
from netjac.errors import MemoryBudgetError
from netjac.jacobian import Jacobian
from netjac.optimize.residual import ResidualJacobian
from netjac.tiled import TiledJacobian

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Positions = NDArray[np.intp]

LARGEST = algebra.DIRECT_SIZE
"""Side of the largest matrix that is taken apart, or returned."""

EXPLICIT_BYTES = 2**26
"""Largest explicit derivative that is taken apart by its singular values."""

CHUNK_BYTES = 2**26
"""Vectors over all parameters that are multiplied at once."""

UNDETERMINED = 1e-6
"""Share of a direction outside the range of F above which it counts as undetermined."""

_SAFE_CONDITION = 1e-10  # reciprocal condition of D⁻¹ F D⁻¹ down to which Cholesky is trusted
_EPSILON = float(np.finfo(np.float64).eps)


def chunks(count: int, length: int) -> list[slice]:
    """Ranges of ``count`` vectors of ``length`` entries that fit into memory at once."""
    return planning.tiles(count, 8 * max(1, length), CHUNK_BYTES)


class Inverse(ABC):
    """F⁻¹ over θ (M,), in parts.

    Attributes
    ----------
    shape : (d, M)
        Of the data rows.
    rank : int
        Of [J; diag(π)]; below M where the data leave directions undetermined.
    spent : int
        Degrees of freedom the fit takes from the data: the rank of the columns of J that have no prior.
    route : str
        How it was computed, for people.
    """

    shape: tuple[int, int]
    rank: int
    spent: int
    route: str

    @abstractmethod
    def _variances(self, A: Matrix) -> Vector: ...

    @abstractmethod
    def _diagonal(self, positions: Positions) -> Vector: ...

    @abstractmethod
    def _block(self, positions: Positions) -> Matrix: ...

    @abstractmethod
    def _leverage(self) -> Vector: ...

    def variances(self, A: Matrix) -> Vector:
        """aᵀ F⁻¹ a (q,) for the columns a of A (M, q); infinite where a is undetermined."""
        out = np.empty(A.shape[1])
        for part in chunks(A.shape[1], self.shape[1]):
            out[part] = self._variances(A[:, part])
        return out

    def diagonal(self, positions: Positions) -> Vector:
        """F⁻¹[i, i] (q,) at some positions; infinite where undetermined."""
        return self._diagonal(positions)

    def leverage(self) -> Vector:
        """Diagonal (d,) of the hat matrix J F⁻¹ Jᵀ."""
        return self._leverage()

    def block(self, positions: Positions) -> Matrix:
        """F⁻¹[i, j] (q, q); for an undetermined i infinite on the diagonal and NaN beside it."""
        out = self._block(positions)
        diagonal = self.diagonal(positions)
        lost = ~np.isfinite(diagonal)
        out[lost, :] = out[:, lost] = np.nan
        out[np.diag_indices(len(out))] = diagonal
        return out


def inverse_of(R: ResidualJacobian) -> Inverse:
    """F⁻¹ in the form that is most exact where R is small, and cheapest where it is not.

    Raises
    ------
    MemoryBudgetError
        If neither J Jᵀ nor Jᵀ J can be taken apart.
    """
    d, m = R.data_rows, R.shape[1]
    if _is_small(R):
        return _by_singular_values(R)
    if min(d, m) > LARGEST:
        raise MemoryBudgetError(
            f"{d} data rows and {m} parameters: both are more than {LARGEST}, the largest matrix that is taken "
            "apart. Fit fewer parameters (trainable=), or take the uncertainty from some of the samples.",
            8 * min(d, m) ** 2,
        )
    return FewRows(R) if d < m else _by_normal(R)


def singular_values(R: ResidualJacobian) -> Vector:
    """Those of the data rows J alone, (min(d, M),) in falling order; of J Jᵀ or Jᵀ J where J is large.

    In the latter case what is smaller than 1e-8 of the largest is rounding, and is returned as 0.
    """
    d, m = R.data_rows, R.shape[1]
    if _is_small(R):
        return np.asarray(svd(R.rows.to_array(), compute_uv=False))
    squares = eigvalsh(R.gram() if d < m else R.normal(), overwrite_a=True, check_finite=False)[::-1]
    floor = len(squares) * _EPSILON * squares[0]
    return np.asarray(np.sqrt(np.where(squares > floor, squares, 0.0)))


def _is_small(R: ResidualJacobian) -> bool:
    rows, m = R.shape
    return 8 * rows * m <= EXPLICIT_BYTES and rows * m * min(rows, m) <= 10**10


@final
class Spectral(Inverse):
    """F⁻ = W Wᵀ.

    Parameters
    ----------
    R
        The rows.
    W : (M, rank)
    scale : (M,)
        D.
    V : (M, rank)
        Orthonormal basis of the range of F, in coordinates D θ; None where that is everything.
    spent, route
        See `Inverse`.
    U : (rows, rank), optional
        Left singular vectors.
    """

    def __init__(
        self,
        R: ResidualJacobian,
        W: Matrix,
        scale: Vector,
        V: Matrix | None,
        spent: int,
        route: str,
        U: Matrix | None = None,
    ) -> None:
        self.shape, self.rank, self.spent, self.route = (R.data_rows, R.shape[1]), W.shape[1], spent, route
        self._rows, self._W, self._scale, self._U = R.rows, W, scale, U
        self._V = None if self.rank == self.shape[1] else V

    def _variances(self, A: Matrix) -> Vector:
        out = _squares(self._W.T @ A)
        if self._V is not None:
            scaled = A / self._scale[:, None]
            outside = _squares(scaled - self._V @ (self._V.T @ scaled))
            out[outside > UNDETERMINED**2 * _squares(scaled)] = np.inf
        return out

    def _diagonal(self, positions: Positions) -> Vector:
        out = _squares(self._W[positions].T)
        if self._V is not None:
            out[1 - _squares(self._V[positions].T) > UNDETERMINED**2] = np.inf
        return out

    def _block(self, positions: Positions) -> Matrix:
        W = self._W[positions]
        return W @ W.T

    def _leverage(self) -> Vector:
        if self._U is not None:
            return _squares(self._U[: self.shape[0]].T)
        out = np.zeros(self.shape[0])
        for part in chunks(self.rank, max(self.shape)):
            out += _squares(self._rows.matmat(self._W[:, part]).T)
        return out


def _by_singular_values(R: ResidualJacobian) -> Spectral:
    explicit, held = R.to_array(), _held(R)
    scale = _nonzero(np.linalg.norm(explicit, axis=0))
    U, values, Vt = svd(explicit / scale, full_matrices=False)
    kept = values > max(R.shape) * _EPSILON * values[0]
    spent = int(kept.sum())
    if held.any():
        data = explicit[: R.data_rows, ~held]
        spent = int(np.linalg.matrix_rank(data / _nonzero(np.linalg.norm(data, axis=0)))) if data.size else 0
    route = f"singular values of the explicit rows, {R.shape[0]} × {R.shape[1]}"
    V = Vt[kept].T
    return Spectral(R, V / values[kept] / scale[:, None], scale, V, spent, route, U[:, kept])


def _by_normal(R: ResidualJacobian) -> Spectral:
    normal, held = R.normal(), _held(R)
    spent = _rank(normal[np.ix_(~held, ~held)]) if held.any() else None
    if R.prior is not None:
        normal[np.diag_indices(len(normal))] += R.prior**2
    scale = _nonzero(np.sqrt(normal.diagonal()))
    normal /= scale
    normal /= scale[:, None]
    size = len(normal)
    L, failed = lapack.dpotrf(normal, lower=1)
    if not failed and lapack.dpocon(L, lapack.dlange("1", normal), uplo="L")[0] > _SAFE_CONDITION:
        W = solve_triangular(L, np.eye(size), lower=True, trans="T") / scale[:, None]
        route = f"Cholesky factor of Jᵀ J, {size} × {size}"
        return Spectral(R, W, scale, None, size if spent is None else spent, route)
    squares, V = eigh(normal, overwrite_a=True)
    kept = squares > size * _EPSILON * squares[-1]
    V = V[:, kept]
    route = f"eigenvalues of Jᵀ J, {size} × {size}"
    rank = V.shape[1]
    W = V / np.sqrt(squares[kept]) / scale[:, None]
    return Spectral(R, W, scale, V, rank if spent is None else spent, route)


@final
class FewRows(Inverse):
    """From (d, d) matrices and products; see the top of the file.

    Parameters
    ----------
    R
        The rows.
    """

    def __init__(self, R: ResidualJacobian) -> None:
        d, m = self.shape = (R.data_rows, R.shape[1])
        held = _held(R)
        self._rows = R.rows
        self._w = np.zeros(m)
        self._w[held] = 1 / R.prior[held] ** 2 if R.prior is not None else 0.0
        self._free = ~held
        self._L: Matrix | None = None
        if held.any():
            C = weighted_gram(R, self._w)
            C[np.diag_indices(d)] += 1
            self._L = cholesky(C, lower=True, overwrite_a=True)
        self._U, self._values = np.zeros((d, 0)), np.zeros(0)
        if self._free.any():
            G = weighted_gram(R, self._free.astype(np.float64))
            G = self._whiten(self._whiten(G).T)
            values, U = eigh(0.5 * (G + G.T), overwrite_a=True)
            kept = values > d * _EPSILON * values[-1]
            self._U, self._values = U[:, kept], values[kept]
        self.spent = len(self._values)
        self.rank = self.spent + int(held.sum())
        self.route = f"J Jᵀ, {d} × {d}"

    def _whiten(self, X: Matrix) -> Matrix:
        """L⁻¹ X."""
        return X if self._L is None else np.asarray(solve_triangular(self._L, X, lower=True))

    def _unwhiten(self, X: Matrix) -> Matrix:
        """L⁻ᵀ X."""
        return X if self._L is None else np.asarray(solve_triangular(self._L, X, lower=True, trans="T"))

    def _reduced(self, A: Matrix) -> tuple[Matrix, Matrix, Matrix]:
        """k (d, q), Uᵀ b (rank, q) and Λ⁻¹ Uᵀ b − Uᵀ k for the columns of A (M, q)."""
        none = np.zeros((self.shape[0], A.shape[1]))
        k = none if self._L is None else self._whiten(self._rows.matmat(self._w[:, None] * A))
        b = self._whiten(self._rows.matmat(self._free[:, None] * A)) if self.spent else none
        seen = self._U.T @ b
        return k, seen, seen / self._values[:, None] - self._U.T @ k

    def _variances(self, A: Matrix) -> Vector:
        k, seen, z = self._reduced(A)
        value = np.maximum(self._w @ A**2 - _squares(k) + _squares(z), 0.0)
        outside = self._free @ A**2 - _squares(seen / np.sqrt(self._values)[:, None])
        return np.where(outside > UNDETERMINED**2 * _squares(A), np.inf, value)

    def _diagonal(self, positions: Positions) -> Vector:
        if len(positions) > self.shape[0]:
            return self._whole_diagonal[positions]
        out = np.empty(len(positions))
        for part, units in self._units(positions):
            out[part] = self._variances(units)
        return out

    @property
    def _whole_diagonal(self) -> Vector:
        """F⁻¹[i, i] of all parameters, by products with d vectors instead of M."""
        seen = self._unwhiten(self._U)
        root = np.sqrt(self._values)
        with_prior = self._w
        if self._L is not None:
            explained = self._column_squares(self._unwhiten(np.eye(self.shape[0])))
            if self.spent:
                explained -= self._column_squares(seen)
            with_prior = np.maximum(self._w - self._w**2 * explained, 0.0)
        if not self._free.any():
            return with_prior
        determined = 1 - self._column_squares(seen / root) <= UNDETERMINED**2
        without = np.where(determined, self._column_squares(seen / self._values), np.inf)
        return np.where(self._free, without, with_prior)

    def _column_squares(self, Q: Matrix) -> Vector:
        """Squared norm (M,) of each column of Qᵀ J, Q (d, q)."""
        out = np.zeros(self.shape[1])
        for part in chunks(Q.shape[1], self.shape[1]):
            out += _squares(self._rows.rmatmat(Q[:, part]).T)
        return out

    def _block(self, positions: Positions) -> Matrix:
        k, z = np.empty((self.shape[0], len(positions))), np.empty((self.spent, len(positions)))
        for part, units in self._units(positions):
            k[:, part], _, z[:, part] = self._reduced(units)
        return np.asarray(np.diag(self._w[positions]) - k.T @ k + z.T @ z)

    def _units(self, positions: Positions) -> Iterator[tuple[slice, Matrix]]:
        for part in chunks(len(positions), self.shape[1]):
            chosen = positions[part]
            units = np.zeros((self.shape[1], len(chosen)))
            units[chosen, np.arange(len(chosen))] = 1
            yield part, units

    def _leverage(self) -> Vector:
        if self._L is None:
            return _squares(self._U.T)
        inverse = self._whiten(np.eye(self.shape[0]))  # 1 − H = L⁻ᵀ (1 − U Uᵀ) L⁻¹
        return 1 - _squares(inverse - self._U @ (self._U.T @ inverse))


def weighted_gram(R: ResidualJacobian, w: Vector) -> Matrix:
    """J diag(w) Jᵀ (d, d) of the data rows, for w (M,) not negative.

    From the factors where w is one number a variable, else by products.
    """
    d, m = R.data_rows, R.shape[1]
    if w.min() == w.max():
        return np.asarray(w[0] * R.gram())
    data = R.data
    if isinstance(data, Jacobian | TiledJacobian) and all(np.ptp(w[s.slice]) == 0 for s in data.parameters if s.size):
        total = np.zeros((d, d))
        for segment in data.parameters:
            if segment.size and w[segment.start]:
                total += w[segment.start] * data.columns(segment.name).gram(dtype=np.float64)
        return total
    total = np.empty((d, d))
    for part in chunks(d, m):
        units = np.zeros((d, part.stop - part.start))
        units[np.arange(part.start, part.stop), np.arange(units.shape[1])] = 1
        total[:, part] = R.rows.matmat(w[:, None] * R.rows.rmatmat(units))
    return 0.5 * (total + total.T)


def _held(R: ResidualJacobian) -> NDArray[np.bool_]:
    """Which parameters have a prior (M,)."""
    return np.zeros(R.shape[1], bool) if R.prior is None else R.prior > 0


def _squares(A: Matrix) -> Vector:
    """Squared norm of each column."""
    return np.asarray(np.einsum("ij,ij->j", A, A))


def _nonzero(scale: Vector) -> Vector:
    return np.where(scale > 0, scale, 1.0)


def _rank(normal: Matrix) -> int:
    if not normal.size:
        return 0
    scale = _nonzero(np.sqrt(normal.diagonal()))
    squares = eigvalsh(normal / np.outer(scale, scale))
    return int(np.sum(squares > len(squares) * _EPSILON * squares[-1]))
