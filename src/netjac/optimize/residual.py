"""The derivative of all residual rows over θ: the data's, and below them the prior's.

With data rows J_d (d, M) and a Gaussian prior of standard deviations σ on some of the parameters, the residual and its
derivative are

    r = [r_d; (θ − θ₀) / σ],    R = [J_d; diag(1 / σ)],

one prior row for each parameter that has a prior, in the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy.sparse.linalg import LinearOperator

from netjac.errors import DataError, ShapeError
from netjac.operator import JacobianOperator
from netjac.optimize.losses import Vector
from netjac.optimize.rows import Array, Factors, Rows


@final
class ResidualJacobian(LinearOperator):
    """Derivative of the residual, ∂r/∂θ, as a SciPy operator of shape (rows, M), float64 in and out.

    `gram`, `normal` and `column_norms` are of the data rows alone: a solver adds the prior, which is diagonal, where it
    needs it.

    Parameters
    ----------
    rows : (d, M)
        The data rows.
    prior : (M,), optional
        1/σ of each parameter; 0 where there is no prior.

    Attributes
    ----------
    shape : (rows, M)
    dtype : float64
    data_rows : int
        d.
    prior : (M,) float64, or None
        As given; None where there is no prior at all.

    Examples
    --------
    >>> from netjac.examples import linear_layer
    >>> from netjac.optimize.rows import Factors
    >>> R = ResidualJacobian(Factors(linear_layer()), prior=np.ones(8))
    >>> R.shape, R.data_rows, R.gram().shape
    ((14, 8), 6, (6, 6))
    """

    def __init__(self, rows: Rows, prior: ArrayLike | None = None) -> None:
        self.rows = rows
        self.data_rows, columns = rows.shape
        scale = None if prior is None else np.asarray(prior, np.float64)
        if scale is not None and scale.shape != (columns,):
            raise ShapeError(f"prior must have the shape ({columns},), one entry a parameter, and has {scale.shape}.")
        self.prior: Vector | None = scale if scale is not None and scale.any() else None
        self._with_prior = np.flatnonzero(0 if self.prior is None else self.prior)
        super().__init__(np.float64, (self.data_rows + len(self._with_prior), columns))

    @property
    def data(self) -> JacobianOperator | Rows:
        """The data rows alone: the `netjac.Jacobian` itself where they are its rows, else something with its verbs."""
        return self.rows.jacobian if isinstance(self.rows, Factors) else self.rows

    # ---- products

    def _matvec(self, x: Any) -> Vector:
        v = np.asarray(x, np.float64).reshape(-1)
        data = self.rows.matvec(v)
        return data if self.prior is None else np.concatenate([data, self._scale * v[self._with_prior]])

    def _rmatvec(self, x: Any) -> Vector:
        u = np.asarray(x, np.float64).reshape(-1)
        out = self.rows.rmatvec(u[: self.data_rows])
        if self.prior is not None:
            out[self._with_prior] += self._scale * u[self.data_rows :]
        return out

    def _matmat(self, X: Any) -> Array:
        V = np.asarray(X, np.float64)
        data = self.rows.matmat(V)
        return data if self.prior is None else np.concatenate([data, self._scale[:, None] * V[self._with_prior]])

    def _rmatmat(self, X: Any) -> Array:
        U = np.asarray(X, np.float64)
        out = self.rows.rmatmat(U[: self.data_rows])
        if self.prior is not None:
            out[self._with_prior] += self._scale[:, None] * U[self.data_rows :]
        return out

    @property
    def normal_product(self) -> Callable[[Vector], Vector] | None:
        """v ↦ Rᵀ R v (M,), prior rows included, where that is cheaper than two products; else None."""
        product = self.rows.normal_product
        if product is None or self.prior is None:
            return product
        ridge = self.prior**2
        return lambda v: product(v) + ridge * v

    @property
    def _scale(self) -> Vector:
        assert self.prior is not None
        return self.prior[self._with_prior]

    # ---- matrices

    def to_array(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """The explicit derivative (rows, M), prior rows included."""
        data = self.rows.to_array(dtype)
        if self.prior is None:
            return data
        below = np.zeros((len(self._with_prior), self.shape[1]), dtype)
        below[np.arange(len(below)), self._with_prior] = self._scale
        return np.concatenate([data, below])

    def gram(self, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """J Jᵀ (data_rows, data_rows) of the data rows alone."""
        return self.rows.gram(dtype)

    def normal(self, weights: ArrayLike | None = None, dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """Jᵀ J (M, M) of the data rows alone, or Jᵀ diag(w) J with weights (data_rows,) of any sign."""
        return self.rows.normal(None if weights is None else self._a_row(weights, "weights"), dtype)

    def column_norms(self, squared: bool = False) -> Vector:
        """Euclidean norm of each column of the data rows alone (M,), or its square."""
        return self.rows.column_norms(squared)

    def scaled_rows(self, w: ArrayLike) -> ResidualJacobian:
        """The same derivative with its rows multiplied by numbers: the data's (data_rows,), or all of them (rows,).

        Numbers for prior rows must be positive.
        """
        array = np.asarray(w, np.float64)
        if self.prior is None or array.shape != (self.shape[0],):
            return ResidualJacobian(self.rows.scaled_rows(self._a_row(array, "w")), self.prior)
        below = array[self.data_rows :]
        if not np.all(below > 0):
            raise DataError(f"the prior's rows must be multiplied by positive numbers, and one is {below.min()}.")
        prior = self.prior.copy()
        prior[self._with_prior] *= below
        return ResidualJacobian(self.rows.scaled_rows(array[: self.data_rows]), prior)

    def _a_row(self, w: ArrayLike, name: str) -> Vector:
        array = np.asarray(w, np.float64)
        if array.shape != (self.data_rows,):
            raise ShapeError(f"{name} must have the shape ({self.data_rows},), one a data row, and has {array.shape}.")
        return array
