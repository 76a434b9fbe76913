"""An approximate inverse of Jᵀ J + diag(w), for conjugate gradients: Kronecker factors of each layer's own block.

A layer's block of Jᵀ J is Σ_n,p,p' (a aᵀ) ⊗ (Σ_l d dᵀ). With what comes in taken as independent of what is
differentiated there, it is (Σ a aᵀ) ⊗ (Σ d dᵀ) up to a number, and the two factors are Aᵀ A and Dᵀ D (Martens and
Grosse 2015, "Optimizing neural networks with Kronecker-factored approximate curvature", §3; for shared positions,
Grosse and Martens 2016). The number is chosen here so that the trace is exact. Blocks between layers are left out. A
parameter that is used twice, or whose block is no product, gets its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.blocks.base import Placement
from netjac.blocks.outer import OuterBlock
from netjac.optimize.losses import Vector

_WIDEST = 4096
"""Largest factor that is decomposed; wider ones would cost more than the products they save."""


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
        The derivative: a `netjac.Jacobian` (Kronecker factors where its blocks are products), anything with
        ``column_norms`` (its diagonal), or any other operator (w alone).
    """

    def __init__(self, J: Any) -> None:
        self._J = J
        self._layers = _product_blocks(J)

    @property
    def kind(self) -> str:
        """What it is made of, in words; nothing is computed for that."""
        if self._layers:
            return f"Kronecker factors of {len(self._layers)} layers"
        return "the diagonal of Jᵀ J" if _has_columns(self._J) else "the damping alone"

    @cached_property
    def _squares(self) -> Vector | None:
        return _column_squares(self._J)

    @cached_property
    def _parts(self) -> list[_Kronecker]:
        if self._squares is None:
            return []
        found = (_decomposed(block, self._squares) for block in self._layers)
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


def _product_blocks(J: Any) -> list[OuterBlock]:
    """The blocks that are products, of parameters that no other block holds."""
    blocks = getattr(getattr(J, "data", J), "blocks", None)
    if blocks is None:
        return []
    columns = [block.columns() for block in blocks]
    used = np.zeros(J.shape[1], np.intp)
    for own in columns:
        used[own] += 1
    return [
        block
        for block, own in zip(blocks, columns, strict=True)
        if isinstance(block, OuterBlock) and max(block.k, block.c) <= _WIDEST and used[own].max(initial=0) == 1
    ]


def _decomposed(block: OuterBlock, squares: Vector) -> _Kronecker | None:
    """The block's Kronecker factors in their eigenvectors, of the trace that Jᵀ J has there; None where that is 0."""
    A, D = block.A.astype(np.float64), block.D.astype(np.float64)
    values_a, vectors_a = np.linalg.eigh(np.einsum("npgk,npgj->gkj", A, A, optimize=True))
    values_d, vectors_d = np.linalg.eigh(np.einsum("nlpgc,nlpgb->gcb", D, D, optimize=True))
    values = np.maximum(values_a, 0)[:, :, None] * np.maximum(values_d, 0)[:, None, :]
    total, exact = values.sum(), float(block.placement.view(squares).sum())
    return _Kronecker(block.placement, vectors_a, vectors_d, values * (exact / total)) if total > 0 else None
