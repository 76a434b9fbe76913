"""An approximate inverse of Jᵀ J + diag(w), for conjugate gradients: Kronecker factors of each layer's own block.

Blocks between layers are left out, and each layer's own is the product of the factors in `netjac.kronecker`, times a
number that makes its trace exact. A parameter that is used twice, or whose block is no product, gets its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.blocks.base import Placement
from netjac.kronecker import Layer
from netjac.operator import JacobianOperator
from netjac.optimize.losses import Vector
from netjac.optimize.residual import ResidualJacobian


@dataclass(frozen=True, eq=False)
class _Kronecker:
    """One layer's block: (U_a ⊗ U_d) diag(a ⊗ d) (U_a ⊗ U_d)ᵀ over the columns of ``placement``, for each group."""

    placement: Placement
    vectors_a: NDArray[np.float64]  # (g, k, k)
    vectors_d: NDArray[np.float64]  # (g, c, c)
    values: NDArray[np.float64]  # (g, k, c)

    def solve(self, w: Vector, v: Vector, out: Vector) -> None:
        """Write (block + mean w)⁻¹ v into the block's columns of ``out``."""
        sizes = self.placement.sizes
        x = self.placement.view(v).reshape(sizes)
        mean = float(self.placement.view(w).mean())
        x = self.vectors_a.swapaxes(1, 2) @ x @ self.vectors_d
        x /= self.values + mean
        x = self.vectors_a @ x @ self.vectors_d.swapaxes(1, 2)
        view = self.placement.view(out)
        view[...] = x.reshape(view.shape)


class Preconditioner:
    """An approximate inverse of Jᵀ J + diag(w), for any w.

    Parameters
    ----------
    J
        The derivative: rows of a `netjac.Jacobian` of any kind (Kronecker factors where its blocks are products),
        anything with ``column_norms`` (its diagonal), or any other operator (w alone).
    limit
        Bytes that the Kronecker factors may take; the layers that are too wide for it get their diagonal.
    """

    def __init__(self, J: Any, limit: int | None = None) -> None:
        self._J, self._limit = J, limit

    @property
    def kind(self) -> str:
        """What it is made of, in words; nothing is computed for that."""
        count = _layer_count(self._J, self._limit)
        if count != 0:
            return "Kronecker factors of " + ("each layer" if count is None else f"{count} layers")
        return "the diagonal of Jᵀ J" if _has_columns(self._J) else "the damping alone"

    @cached_property
    def _squares(self) -> Vector | None:
        return _column_squares(self._J)

    @cached_property
    def _parts(self) -> list[_Kronecker]:
        squares = self._squares
        if squares is None:
            return []
        found = (_decomposed(layer, squares) for layer in _layers(self._J, self._limit))
        return [part for part in found if part is not None]

    def at(self, w: Vector) -> Callable[[Vector], Vector]:
        """The approximate inverse for weights w (m,), as a function of a vector (m,)."""
        diagonal = w if self._squares is None else w + self._squares

        def solve(v: Vector) -> Vector:
            out = v / diagonal
            for part in self._parts:
                part.solve(w, v, out)
            return out

        return solve


def _has_columns(J: Any) -> bool:
    return isinstance(J, np.ndarray) or hasattr(J, "column_norms")


def _column_squares(J: Any) -> Vector | None:
    if not _has_columns(J):
        return None
    squares = np.einsum("nm,nm->m", J, J) if isinstance(J, np.ndarray) else J.column_norms(squared=True)
    return np.asarray(squares, np.float64)


def _layer_count(J: Any, limit: int | None) -> int | None:
    if isinstance(J, JacobianOperator):
        return J._layers(limit)
    return J.rows.layers(limit) if isinstance(J, ResidualJacobian) else 0


def _layers(J: Any, limit: int | None) -> list[Layer]:
    if isinstance(J, JacobianOperator):
        return J._kronecker(None, limit)
    return J.rows.kronecker(limit) if isinstance(J, ResidualJacobian) else []


def _decomposed(layer: Layer, squares: Vector) -> _Kronecker | None:
    """A layer's factors in their eigenvectors, of the trace that Jᵀ J has there; None where that is 0."""
    values_a, vectors_a = np.linalg.eigh(layer.A)
    values_d, vectors_d = np.linalg.eigh(layer.D)
    values = np.maximum(values_a, 0)[:, :, None] * np.maximum(values_d, 0)[:, None, :]
    total, exact = values.sum(), float(layer.placement.view(squares).sum())
    return _Kronecker(layer.placement, vectors_a, vectors_d, values * (exact / total)) if total > 0 else None
