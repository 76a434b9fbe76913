"""Residuals whose rows stay on the workers: m + 1 rows that stand for all of them; see `netjac.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import scipy.linalg
from numpy.typing import DTypeLike, NDArray

from netjac.distributed import worker
from netjac.distributed.placing import Placed
from netjac.distributed.tiles import Held
from netjac.kronecker import Layer, unpacked
from netjac.optimize import names
from netjac.optimize.losses import Vector
from netjac.optimize.options import OptionError
from netjac.optimize.rows import Products, Rows
from netjac.optimize.sources import Data


@final
class OnWorkers:
    """Residuals of the data as `netjac.optimize.sources.Source`: m + 1 rows that stand for all."""

    failure = None

    def __init__(self, placed: Placed, fit: worker.Fit, check: bool, known: dict[str, NDArray[Any]]) -> None:
        self._placed, self._fit, self._check = placed, fit, check
        self.extra = names.extras(fit.extra)
        self.space = names.together(placed.parameters, self.extra)
        self.size: int | None = self.space.size + 1
        self.known = known

    def described(self) -> list[str]:
        """See `netjac.optimize.sources.Source`."""
        return [f"{self._placed.n} samples in {len(self._placed.samples)} tiles on the workers"]

    def need(self, copies: int) -> None:
        """See `netjac.optimize.sources.Source`: the workers' tiles keep to a budget of their own."""

    def evaluate(self, theta: Vector, memory: int | None = None) -> Data:
        """See `netjac.optimize.sources.Source`."""
        placed, m = self._placed, self.space.size
        checks = [self._check and i == 0 for i in range(len(placed.samples))]
        held = placed.each(worker.residuals, list(placed.given or ()), self._fit, placed.vector(theta), checks)
        squared, _ = held.total(worker.squares)
        self._check = False
        residual = np.zeros(m + 1)
        residual[0] = np.sqrt(squared)
        return Data(residual, lambda: TurnedRows(held, m, float(residual[0])), _no_second)


@final
class TurnedRows(Rows):
    """J' (m + 1, m) of `netjac.distributed`, each part of it computed when it is asked for.

    Jᵀ r, the column norms and Jᵀ J v are vectors, summed over the tiles; Jᵀ J is a matrix, and so are the rows beneath
    the first, which come of it.

    Parameters
    ----------
    held
        `netjac.distributed.worker.Residuals`, as futures.
    m
        Parameters.
    norm
        ‖r‖.
    """

    def __init__(self, held: Held, m: int, norm: float) -> None:
        super().__init__((m + 1, m))
        self._held, self._norm = held, norm

    @cached_property
    def _gradient(self) -> Vector:
        return self._held.total(worker.gradient)

    @cached_property
    def _normal(self) -> NDArray[np.float64]:
        return self._held.total(worker.residual_normal)

    @cached_property
    def _explicit(self) -> NDArray[np.float64]:
        return turned(self._gradient, self._normal, self._norm)

    @property
    def normal_product(self) -> Callable[[Vector], Vector]:
        """v ↦ Jᵀ J v (m,): v goes out, and a vector like it comes back."""
        if "_normal" in self.__dict__:
            return lambda v: np.asarray(self._normal @ v)
        return lambda v: self._held.total(worker.residual_normal_product, self._held.cluster.submit(np.array, v))

    def layers(self, limit: int | None = None) -> None:
        """See `Rows`: the workers know."""

    def kronecker(self, limit: int | None = None) -> list[Layer]:
        """See `Rows`; the factors of the tiles are summed among the workers."""
        places = self._held.first(worker.residual_places, limit)
        return unpacked(self._held.total(worker.residual_layers, tuple(places)), places)

    def _product(self, V: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._explicit @ V

    def _adjoint_product(self, U: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._norm > 0 and not U[1:].any():  # as for the gradient of the cost
            return np.outer(self._gradient / self._norm, U[0])
        return self._explicit.T @ U

    def to_array(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """See `Rows`, as for the verbs below."""
        return self._explicit.astype(dtype)

    def gram(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """J' J'ᵀ."""
        return (self._explicit @ self._explicit.T).astype(dtype, copy=False)

    def normal(self, weights: Vector | None = None, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """Jᵀ J, or J'ᵀ diag(w) J'."""
        if weights is None:
            return self._normal.astype(dtype)
        return (self._explicit.T @ (weights[:, None] * self._explicit)).astype(dtype, copy=False)

    def column_norms(self, squared: bool = False) -> Vector:
        """Of J as of J'."""
        squares = np.diag(self._normal) if "_normal" in self.__dict__ else self._columns
        return squares.copy() if squared else np.sqrt(squares)

    @cached_property
    def _columns(self) -> Vector:
        return self._held.total(worker.residual_column_squares)

    def scaled_rows(self, w: Vector) -> Rows:
        """diag(w) J'."""
        return Products(Explicit(self._explicit), self.shape[1]).scaled_rows(w)


def _no_second(v: Vector) -> Vector:
    raise OptionError("second derivatives of the residual are not summed over the workers: use evaluator().")


def turned(gradient: Vector, normal: NDArray[np.float64], norm: float) -> NDArray[np.float64]:
    """J' (m + 1, m) with J'ᵀ J' = Jᵀ J and J'ᵀ [‖r‖; 0] = Jᵀ r, from Jᵀ r (m,), Jᵀ J (m, m) and ‖r‖.

    Examples
    --------
    >>> J, r = np.array([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0]]), np.array([1.0, -1.0, 2.0])
    >>> K = turned(J.T @ r, J.T @ J, np.linalg.norm(r))
    >>> np.allclose(K.T @ K, J.T @ J), np.allclose(K[0] * np.linalg.norm(r), J.T @ r)
    (True, True)
    """
    first = gradient / norm if norm > 0 else np.zeros_like(gradient)
    return np.concatenate([first[None], _root(normal - np.outer(first, first))])


def _root(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """C (m, m) with Cᵀ C = the matrix, which is positive semi-definite but for rounding."""
    try:
        return np.asarray(scipy.linalg.cholesky(matrix, lower=False))
    except scipy.linalg.LinAlgError:
        values, vectors = scipy.linalg.eigh(matrix)
        return np.asarray(np.sqrt(np.maximum(values, 0))[:, None] * vectors.T)


@dataclass(frozen=True, eq=False)
class Explicit:
    """A matrix with the verbs of an evaluated Jacobian."""

    matrix: NDArray[np.float64]  # (m + 1, m)
    dtype = np.dtype(np.float64)

    @property
    def y(self) -> NDArray[np.float64]:
        """Not asked for but in size: the outputs of m + 1 rows."""
        return np.zeros((len(self.matrix), 1))

    def matmat(self, V: NDArray[Any]) -> NDArray[Any]:
        """J' V."""
        return self.matrix @ V

    def rmatmat(self, U: NDArray[Any]) -> NDArray[Any]:
        """J'ᵀ U."""
        return self.matrix.T @ U

    def to_array(self, layout: str = "(n l) m", *, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """J'; the layout is the one."""
        return self.matrix.astype(np.float64 if dtype is None else dtype)
