"""Rows of a derivative as operators with verbs: factors alone, coupled by a matrix, widened, stacked.

Every kind takes and gives float64, whatever type its factors are in: SciPy's solvers work in nothing else. The products
themselves are taken in the type of the factors: those of a float32 network are wrong in the eighth digit anyway, and
their products with float64 vectors cost three to five times as much (all of A and D is converted each time).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np
import scipy.sparse
from numpy.typing import DTypeLike, NDArray
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from netjac.jacobian import Jacobian
from netjac.kronecker import Layer
from netjac.operator import JacobianOperator
from netjac.optimize.evaluations import EvaluatedJacobian
from netjac.optimize.losses import Vector

Array = NDArray[np.float64]
CHUNK_BYTES = 2**26
"""Rows of a coupled derivative that are explicit at once, where only a sum over them is wanted."""

FOLDED = 16
"""Outputs a sample up to which weights are folded into the factors, at l² numbers a sample; else they stay outside."""


class Rows(LinearOperator, ABC):
    """Some rows of a derivative, (d, M), float64 in and out. Products with zero vectors are answered for nothing."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(np.float64, shape)

    @abstractmethod
    def _product(self, V: Array) -> Array:
        """(M, q) → (d, q)."""

    @abstractmethod
    def _adjoint_product(self, U: Array) -> Array:
        """(d, q) → (M, q)."""

    @abstractmethod
    def to_array(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """The explicit rows (d, M)."""

    @abstractmethod
    def gram(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """J Jᵀ (d, d)."""

    @abstractmethod
    def normal(self, weights: Vector | None = None, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """Jᵀ J (M, M), or Jᵀ diag(w) J with one weight a row, of any sign."""

    @abstractmethod
    def column_norms(self, squared: bool = False) -> Vector:
        """Euclidean norm of each column (M,), or its square."""

    @abstractmethod
    def scaled_rows(self, w: Vector) -> Rows:
        """diag(w) J, one number a row."""

    @property
    def normal_product(self) -> Callable[[Vector], Vector] | None:
        """v ↦ Jᵀ J v (M,), where that is cheaper than two products."""
        return None

    def layers(self, limit: int | None = None) -> int | None:
        """How many layers `kronecker` finds; None where that takes a computation."""
        return 0

    def kronecker(self, limit: int | None = None) -> list[Layer]:
        """Kronecker factors of the layers, those alone that are within ``limit`` bytes."""
        return []

    def _matvec(self, x: Any) -> Vector:
        v = np.asarray(x, np.float64).reshape(-1, 1)
        return self._product(v)[:, 0] if v.any() else np.zeros(self.shape[0])

    def _rmatvec(self, x: Any) -> Vector:
        u = np.asarray(x, np.float64).reshape(-1, 1)
        return self._adjoint_product(u)[:, 0] if u.any() else np.zeros(self.shape[1])

    def _matmat(self, X: Any) -> Array:
        return self._product(np.asarray(X, np.float64))

    def _rmatmat(self, X: Any) -> Array:
        return self._adjoint_product(np.asarray(X, np.float64))


def rows_of(jacobian: EvaluatedJacobian, m: int) -> Rows:
    """The rows of a Jacobian over m parameters: by its own verbs where it has them."""
    if isinstance(jacobian, JacobianOperator):
        return Factors(jacobian)
    return Products(jacobian, m)


def _double(array: NDArray[Any]) -> Array:
    return np.asarray(array, np.float64)


def _norms(squares: Vector, squared: bool) -> Vector:
    return squares if squared else np.sqrt(squares)


def _weighted_normal(A: Array, weights: Vector | None) -> Array:
    return A.T @ (A if weights is None else weights[:, None] * A)


@final
class Factors(Rows):
    """The rows of a `JacobianOperator`; scaled rows are folded into its factors, so they stay factored."""

    def __init__(self, jacobian: JacobianOperator) -> None:
        super().__init__(jacobian.shape)
        self.jacobian: Any = jacobian

    def _product(self, V: Array) -> Array:
        return _double(self.jacobian @ V.astype(self.jacobian.dtype, copy=False))

    def _adjoint_product(self, U: Array) -> Array:
        return _double(self.jacobian.T @ U.astype(self.jacobian.dtype, copy=False))

    def to_array(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        return np.asarray(self.jacobian.to_array(dtype=dtype))

    def gram(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        return np.asarray(self.jacobian.gram(dtype=dtype))

    def normal(self, weights: Vector | None = None, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        return np.asarray(self.jacobian.normal(weights, dtype))

    def column_norms(self, squared: bool = False) -> Vector:
        return _double(self.jacobian.column_norms(squared))

    @property
    def normal_product(self) -> Callable[[Vector], Vector] | None:
        return self.weighted_product(None)

    def weighted_product(self, weights: Vector | None) -> Callable[[Vector], Vector] | None:
        """v ↦ Jᵀ diag(w) J v (M,): one pass over tiles where there are tiles."""
        J = self.jacobian
        if isinstance(J, Jacobian):
            return None
        w = None if weights is None else weights.reshape(-1, J.l).astype(J.dtype)
        return lambda v: _double(J._normal_product(v[:, None].astype(J.dtype), w)[:, 0])

    def layers(self, limit: int | None = None) -> int | None:
        return self.jacobian._layers(limit)

    def kronecker(self, limit: int | None = None, weights: Vector | None = None) -> list[Layer]:
        return self.jacobian._kronecker(None if weights is None else weights.reshape(-1, self.jacobian.l), limit)

    def scaled_rows(self, w: Vector) -> Rows:
        if self.jacobian.l > FOLDED or not isinstance(self.jacobian, Jacobian):
            return Weighted(self, w)
        J = self.jacobian
        B = np.zeros((J.n, J.l, J.l), J.dtype)
        B[:, range(J.l), range(J.l)] = w.reshape(-1, J.l)
        return Factors(J.scaled(B))


@final
class Products(Rows):
    """The rows of anything with products and an array: sums are taken of the array."""

    def __init__(self, jacobian: EvaluatedJacobian, m: int) -> None:
        super().__init__((jacobian.y.size, m))
        self.jacobian = jacobian

    def _product(self, V: Array) -> Array:
        return _double(self.jacobian.matmat(V.astype(self.jacobian.dtype, copy=False)))

    def _adjoint_product(self, U: Array) -> Array:
        return _double(self.jacobian.rmatmat(U.astype(self.jacobian.dtype, copy=False)))

    def to_array(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        return self.jacobian.to_array(dtype=dtype)

    def gram(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        A = self.to_array(dtype)
        return A @ A.T

    def normal(self, weights: Vector | None = None, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        return _weighted_normal(self.to_array(), weights).astype(dtype, copy=False)

    def column_norms(self, squared: bool = False) -> Vector:
        return _norms(np.sum(self.to_array() ** 2, axis=0), squared)

    def scaled_rows(self, w: Vector) -> Weighted:
        return Weighted(self, w)


@final
class Weighted(Rows):
    """diag(w) J, the numbers not folded into factors, which would take one for each pair of outputs of a sample.

    Parameters
    ----------
    rows
        J, (d, M).
    w : (d,)
    """

    def __init__(self, rows: Factors | Products, w: Vector) -> None:
        super().__init__(rows.shape)
        self.rows, self.w = rows, w

    def _product(self, V: Array) -> Array:
        return self.w[:, None] * self.rows.matmat(V)

    def _adjoint_product(self, U: Array) -> Array:
        return self.rows.rmatmat(self.w[:, None] * U)

    def to_array(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        return self.w[:, None].astype(dtype) * self.rows.to_array(dtype)

    def gram(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        w, product = self.w.astype(dtype), self.rows.gram(dtype)
        product *= w
        product *= w[:, None]
        return product

    def normal(self, weights: Vector | None = None, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        return self.rows.normal(self.w**2 if weights is None else weights * self.w**2, dtype)

    def column_norms(self, squared: bool = False) -> Vector:
        if isinstance(self.rows, Factors):
            return _double(self.rows.jacobian.column_norms(squared, self.w**2))
        return _norms(np.sum(self.to_array() ** 2, axis=0), squared)

    @property
    def normal_product(self) -> Callable[[Vector], Vector] | None:
        return self.rows.weighted_product(self.w**2) if isinstance(self.rows, Factors) else None

    def layers(self, limit: int | None = None) -> int | None:
        return self.rows.layers(limit)

    def kronecker(self, limit: int | None = None) -> list[Layer]:
        return self.rows.kronecker(limit, self.w**2) if isinstance(self.rows, Factors) else []

    def scaled_rows(self, w: Vector) -> Weighted:
        return Weighted(self.rows, self.w * w)


@final
class Coupled(Rows):
    """C J: rows that mix the outputs of all samples.

    Parameters
    ----------
    rows
        J, (n*l, M).
    C : (d, n*l)
        Array, sparse matrix or `LinearOperator`.
    """

    def __init__(self, rows: Rows, C: Any) -> None:
        super().__init__((C.shape[0], rows.shape[1]))
        self.rows, self.C = rows, C

    def _product(self, V: Array) -> Array:
        return _double(self.C @ self.rows.matmat(V))

    def _adjoint_product(self, U: Array) -> Array:
        return self.rows.rmatmat(_double(self.C.T @ U))

    def _chunks(self, size: int) -> Iterator[tuple[slice, Array]]:
        """Explicit rows, ``size`` at once: Jᵀ times columns of Cᵀ."""
        for start in range(0, self.shape[0], size):
            part = slice(start, min(start + size, self.shape[0]))
            if isinstance(self.C, LinearOperator):
                transposed = _double(self.C.T @ np.eye(self.shape[0])[:, part])
            else:
                rows = self.C[part]
                transposed = (rows.toarray() if scipy.sparse.issparse(rows) else rows).T
            yield part, self.rows.rmatmat(transposed).T

    def to_array(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        if self.rows.shape[0] < self.shape[0]:  # fewer outputs than rows
            return _double(self.C @ self.rows.to_array()).astype(dtype, copy=False)
        out = np.empty(self.shape, dtype)
        for part, rows in self._chunks(self._some()):
            out[part] = rows
        return out

    def _some(self) -> int:
        return max(1, CHUNK_BYTES // (8 * max(self.shape[1], self.rows.shape[0])))

    def gram(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """C (J Jᵀ) Cᵀ, or from the explicit rows where those are fewer numbers."""
        outputs = self.rows.shape[0]
        if outputs**2 <= self.shape[0] * self.shape[1]:
            half = _double(self.C @ self.rows.gram())  # (d, n*l)
            product = _double(self.C @ half.T)
            product = 0.5 * (product + product.T)
        else:
            A = self.to_array()
            product = A @ A.T
        return product.astype(dtype, copy=False)

    def normal(self, weights: Vector | None = None, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        total = np.zeros((self.shape[1],) * 2)
        for part, rows in self._chunks(self._some()):
            total += _weighted_normal(rows, None if weights is None else weights[part])
        return total.astype(dtype, copy=False)

    def column_norms(self, squared: bool = False) -> Vector:
        squares = np.zeros(self.shape[1])
        for _, rows in self._chunks(self._some()):
            squares += np.sum(rows**2, axis=0)
        return _norms(squares, squared)

    def scaled_rows(self, w: Vector) -> Coupled:
        if isinstance(self.C, np.ndarray):
            return Coupled(self.rows, w[:, None] * self.C)
        diagonal = scipy.sparse.diags_array(w).tocsr()
        if isinstance(self.C, LinearOperator):
            return Coupled(self.rows, aslinearoperator(diagonal) @ self.C)
        return Coupled(self.rows, diagonal @ self.C)


@final
class Widened(Rows):
    """[J, E]: more columns, for parameters that are not the network's.

    Parameters
    ----------
    rows
        J, (d, m).
    E : (d, p)
    """

    def __init__(self, rows: Rows, E: Array) -> None:
        super().__init__((rows.shape[0], rows.shape[1] + E.shape[1]))
        self.rows, self.E = rows, E
        self._m = rows.shape[1]

    def _product(self, V: Array) -> Array:
        return self.rows.matmat(V[: self._m]) + self.E @ V[self._m :]

    def _adjoint_product(self, U: Array) -> Array:
        return np.concatenate([self.rows.rmatmat(U), self.E.T @ U])

    def to_array(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        return np.concatenate([self.rows.to_array(dtype), self.E.astype(dtype, copy=False)], axis=1)

    def gram(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        return self.rows.gram(dtype) + (self.E @ self.E.T).astype(dtype, copy=False)

    def normal(self, weights: Vector | None = None, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        weighted = self.E if weights is None else weights[:, None] * self.E
        corner = self.rows.rmatmat(weighted)  # (m, p)
        blocks = [[self.rows.normal(weights, dtype), corner], [corner.T, self.E.T @ weighted]]
        return np.block(blocks).astype(dtype, copy=False)

    def column_norms(self, squared: bool = False) -> Vector:
        return np.concatenate([self.rows.column_norms(squared), _norms(np.sum(self.E**2, axis=0), squared)])

    def layers(self, limit: int | None = None) -> int | None:
        return self.rows.layers(limit)

    def kronecker(self, limit: int | None = None) -> list[Layer]:
        return self.rows.kronecker(limit)

    def scaled_rows(self, w: Vector) -> Widened:
        return Widened(self.rows.scaled_rows(w), w[:, None] * self.E)


@final
class Stacked(Rows):
    """Several derivatives one below the other, each over some of the M parameters.

    Parameters
    ----------
    parts
        The rows, and the positions of their columns among the M, each position once.
    columns
        M.
    """

    def __init__(self, parts: Sequence[tuple[Rows, NDArray[np.intp]]], columns: int) -> None:
        self.parts = tuple(parts)
        borders = np.cumsum([0, *(rows.shape[0] for rows, _ in parts)])
        self._places = [slice(int(a), int(b)) for a, b in pairwise(borders)]
        super().__init__((int(borders[-1]), columns))

    def _each(self) -> Iterator[tuple[slice, Rows, NDArray[np.intp]]]:
        for place, (rows, columns) in zip(self._places, self.parts, strict=True):
            yield place, rows, columns

    def _product(self, V: Array) -> Array:
        return np.concatenate([rows.matmat(V[columns]) for rows, columns in self.parts])

    def _adjoint_product(self, U: Array) -> Array:
        out = np.zeros((self.shape[1], U.shape[1]))
        for place, rows, columns in self._each():
            out[columns] += rows.rmatmat(U[place])
        return out

    def to_array(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        out = np.zeros(self.shape, dtype)
        for place, rows, columns in self._each():
            out[place, columns] = rows.to_array(dtype)
        return out

    def gram(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        out = np.empty((self.shape[0],) * 2, dtype)
        for i, (place, rows, columns) in enumerate(self._each()):
            out[place, place] = rows.gram(dtype)
            for j in range(i):
                cross = _cross(rows, columns, *self.parts[j])
                out[place, self._places[j]] = cross
                out[self._places[j], place] = cross.T
        return out

    def normal(self, weights: Vector | None = None, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        out = np.zeros((self.shape[1],) * 2, dtype)
        for place, rows, columns in self._each():
            out[np.ix_(columns, columns)] += rows.normal(None if weights is None else weights[place], dtype)
        return out

    def column_norms(self, squared: bool = False) -> Vector:
        squares = np.zeros(self.shape[1])
        for _, rows, columns in self._each():
            squares[columns] += rows.column_norms(squared=True)
        return _norms(squares, squared)

    def scaled_rows(self, w: Vector) -> Stacked:
        return Stacked([(rows.scaled_rows(w[place]), columns) for place, rows, columns in self._each()], self.shape[1])


def _cross(a: Rows, a_columns: NDArray[np.intp], b: Rows, b_columns: NDArray[np.intp]) -> Array:
    """J_a J_bᵀ over the parameters that both have."""
    if isinstance(a, Factors) and isinstance(b, Factors) and np.array_equal(a_columns, b_columns):
        return _double(a.jacobian.gram(b.jacobian))
    _, here, there = np.intersect1d(a_columns, b_columns, assume_unique=True, return_indices=True)
    shared = np.zeros((a.shape[1], b.shape[0]))
    shared[here] = b.to_array()[:, there].T
    return a.matmat(shared)
