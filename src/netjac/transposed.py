"""The transpose of a Jacobian, with as little between it and the blocks as can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import DTypeLike, NDArray
from scipy.sparse.linalg import LinearOperator

from netjac import arguments

if TYPE_CHECKING:
    from netjac.operator import JacobianOperator


@final
class TransposedJacobian(LinearOperator):
    """The transpose of a Jacobian, of shape (m, n*l); its own transpose is the Jacobian it came from."""

    def __init__(self, jacobian: JacobianOperator) -> None:
        self.jacobian = jacobian
        self.dtype = jacobian.dtype  # known to be valid: LinearOperator.__init__ would check them again
        self.shape = (jacobian.shape[1], jacobian.shape[0])

    def __matmul__(self, other: Any) -> Any:
        if type(other) is np.ndarray and 0 < other.ndim <= 2:
            return self.jacobian._transposed_product(other)
        return super().__matmul__(other)

    def _matvec(self, x: Any) -> NDArray[Any]:
        return self.jacobian._transposed_product(arguments.array(x))

    def _matmat(self, X: Any) -> NDArray[Any]:
        return self.jacobian._transposed_product(arguments.array(X))

    def _rmatvec(self, x: Any) -> NDArray[Any]:
        return self.jacobian._product(arguments.array(x))

    def _rmatmat(self, X: Any) -> NDArray[Any]:
        return self.jacobian._product(arguments.array(X))

    def _transpose(self) -> JacobianOperator:
        return self.jacobian

    def _adjoint(self) -> JacobianOperator:
        return self.jacobian

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self.jacobian.__array__(dtype, copy).T
