"""The outer block: J[n, l, (g, k, c)] = sum_p A[n, p, g, k] · D[n, l, p, g, c], kept as A and D.

For p = 1 and g = 1 each row is a Kronecker product of a row of A and a row of D (the block is their row-wise
Khatri–Rao product), so that J Jᵀ = (A Aᵀ) ∘ (D Dᵀ) with A repeated over the outputs, and the squared norm of a row is
the product of two.
"""

from __future__ import annotations

from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from netjac.blocks.base import Block, Placement
from netjac.blocks.tiles import TILE, contract, copy_into, is_matrix, multiply_into, product, sample_tiles
from netjac.errors import ShapeError


@final
class OuterBlock(Block):
    """Block of a parameter that meets the samples in a product, as two factors.

    Parameters
    ----------
    A : (n, p, g, k)
        What comes in.
    D : (n, l, p, g, c)
        Cotangents of what comes out.
    placement
        Columns of the entries (g, k, c).

    Raises
    ------
    ShapeError
        If the three do not fit together.
    """

    def __init__(self, A: NDArray[Any], D: NDArray[Any], placement: Placement) -> None:
        n, p, g, k = A.shape
        l, c = D.shape[1], D.shape[4]
        if D.shape != (n, l, p, g, c) or placement.sizes != (g, k, c):
            raise ShapeError(
                f"expected A (n, p, g, k), D (n, l, p, g, c) and a placement of (g, k, c), "
                f"and got {A.shape}, {D.shape} and {placement.sizes}."
            )
        if A.dtype != D.dtype:  # once here, rather than in every product
            dtype = np.result_type(A, D)
            A, D = A.astype(dtype, copy=False), D.astype(dtype, copy=False)
        self.A, self.D, self.placement = A, D, placement
        self.n, self.l, self.p, self.g, self.k, self.c = n, l, p, g, k, c
        self._single = p == 1 and g == 1
        # The factors as matrices, so that a product costs two BLAS calls and little else.
        self._A: NDArray[Any] = A.reshape(n, k) if self._single else A
        self._D: NDArray[Any] = D.reshape(n, l, p * g * c)

    def columns(self) -> NDArray[np.intp]:
        return np.sort(self.placement.indices(), axis=None)

    @property
    def nbytes(self) -> int:
        return self.A.nbytes + self.D.nbytes

    def add_product(self, v: NDArray[Any], out: NDArray[Any]) -> None:
        q = v.shape[1]
        if self._single and q == 1:
            place = self.placement
            rows = v[place.offset : place.offset + self.k * self.c] if place.contiguous else place.rows(v)
            out += self._D @ product(self._A, rows.reshape(self.k, self.c))[:, :, None]
            return
        V = self.placement.rows(v).reshape(self.g, self.k, self.c * q)
        width = self.p * self.g * self.c
        for s in sample_tiles(self.n, width * q):
            Z = self._apply(self.A[s], V)  # (r, p, g, c·q)
            out[s] += self._D[s] @ Z.reshape(len(Z), width, q)

    def _apply(self, A: NDArray[Any], V: NDArray[Any]) -> NDArray[Any]:
        """sum_k A (r, p, g, k) · V (g, k, cq) as (r, p, g, cq)."""
        r, p, g, k = A.shape
        if g == 1:
            return product(A.reshape(r * p, k), V[0]).reshape(r, p, g, V.shape[2])
        Z = A.transpose(2, 0, 1, 3).reshape(g, r * p, k) @ V
        return Z.reshape(g, r, p, V.shape[2]).transpose(1, 2, 0, 3)

    def add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        q = u.shape[2]
        if self._single and q == 1:
            place = self.placement
            V = product(self._A.T, (self._D.swapaxes(1, 2) @ u).reshape(self.n, self.c))
            if place.contiguous:
                out[place.offset : place.offset + self.k * self.c] += V.reshape(self.k * self.c, 1)
            else:
                rows = place.rows(out)
                rows += V.reshape(rows.shape)
            return
        rows = self.placement.rows(out)
        for s in sample_tiles(self.n, self.p * self.g * self.c * q):
            W = self._D[s].swapaxes(1, 2) @ u[s]  # (r, p·g·c, q)
            rows += self._gather(self.A[s], W.reshape(len(W), self.p, self.g, self.c * q)).reshape(rows.shape)

    def _gather(self, A: NDArray[Any], W: NDArray[Any]) -> NDArray[Any]:
        """sum_{n, p} A (r, p, g, k) · W (r, p, g, cq) as (g, k, cq)."""
        r, p, g, k = A.shape
        if g == 1:
            return product(A.reshape(r * p, k).T, W.reshape(r * p, W.shape[3]))
        return A.transpose(2, 3, 0, 1).reshape(g, k, r * p) @ W.transpose(2, 0, 1, 3).reshape(g, r * p, W.shape[3])

    def fill(self, out: NDArray[Any], samples: slice, *, add: bool) -> None:
        view = self.placement.view(out)  # (r, l, *fine axes)
        A, D = self.A[samples], self.D[samples]
        if self.p == 1 and not add:
            self._multiply(A, D, view)
        elif not add and self.placement.counts == (0, 1, 1) and is_matrix(view, D.dtype):
            np.matmul(A[:, :, 0].swapaxes(1, 2)[:, None], D[:, :, :, 0], out=view)
        else:
            self._fill_by_tiles(out, samples, add)

    def _fill_by_tiles(self, out: NDArray[Any], samples: slice, add: bool) -> None:
        """Sum over p some samples at a time, then write or add; many at a time where n is an inner axis of ``out``."""
        r, width = len(out), max(1, self.l * self.placement.size)
        many = min(r, 64) if abs(out.strides[0]) < abs(out.strides[2]) else 1
        if many * width > TILE:
            pieces = self.pieces(TILE // max(1, many * self.l))
            if len(pieces) > 1:
                for piece in pieces:
                    piece.fill(out, samples, add=add)
                return
        view, A, D = self.placement.view(out), self.A[samples], self.D[samples]
        for s in sample_tiles(r, width, max(many * width, TILE // 8)):
            tile = contract(A[s], D[s]).reshape(view[s].shape)
            if add:
                view[s] += tile
            else:
                copy_into(view[s], tile)

    def _multiply(self, A: NDArray[Any], D: NDArray[Any], view: NDArray[Any]) -> None:
        """view (r, l, *fine axes) = A (r, 1, g, k) · D (r, l, 1, g, c)."""
        r, fine = len(A), self.placement.shape
        g, k, c = self.placement.counts
        a = A.reshape(r, 1, *fine[: g + k], *(1,) * c)
        d = D.reshape(r, self.l, *fine[:g], *(1,) * k, *fine[g + k :])
        multiply_into(a, d, view)

    def add_gram(self, other: Self, rows: slice, columns: slice, out: NDArray[Any]) -> None:
        if not out.size:
            return
        A, D, B, E = self.A[rows], self.D[rows], other.A[columns], other.D[columns]
        pairs = self.g * self.p * other.p * (self.k + self.l * other.l * (self.c + 1))
        if self._single or pairs <= self.l * other.l * self.placement.size:
            for g, i, j in np.ndindex(self.g, self.p, other.p):
                _add_hadamard(A[:, i, g], D[:, :, i, g], B[:, j, g], E[:, :, j, g], out)
        else:
            _add_explicit_gram(A, D, B, E, out)

    def row_squares(self) -> NDArray[Any]:
        if self.p == 1:
            A, D = self.A[:, 0], self.D[:, :, 0]
            return np.einsum("nlg,ng->nl", np.einsum("nlgc,nlgc->nlg", D, D), np.einsum("ngk,ngk->ng", A, A))
        # Sum over pairs of positions of (A_i · A_j)(D_i · D_j), or over the explicit entries: the cheaper. Where pairs
        # nearly cancel, as behind a normalisation, little but rounding is left of their sum, and entries are summed.
        positions, entries = self.p * self.g * (self.k + self.l * (self.c + 1)), self.l * self.placement.size
        out = np.zeros((self.n, self.l), self.D.dtype)
        explicit = np.ones(self.n, bool)
        if self.p * positions < (self.p + 1) * entries:
            lost = 30 * np.sqrt(np.finfo(out.dtype).eps)
            for s in sample_tiles(self.n, self.p * self.p * self.g * (self.l + 1)):
                A, D = self.A[s].transpose(0, 2, 1, 3), self.D[s].transpose(0, 1, 3, 2, 4)
                AA, DD = A @ A.swapaxes(-1, -2), D @ D.swapaxes(-1, -2)
                out[s] = np.einsum("ngij,nlgij->nl", AA, DD)
                size = np.einsum("ngij,nlgij->nl", np.abs(AA, out=AA), np.abs(DD, out=DD))
                explicit[s] = (out[s] < lost * size).any(axis=1)
        rows = np.flatnonzero(explicit)
        for s in sample_tiles(len(rows), entries):
            J = contract(self.A[rows[s]], self.D[rows[s]])
            out[rows[s]] = np.einsum("nlgkc,nlgkc->nl", J, J)
        return out

    def add_column_squares(self, out: NDArray[Any]) -> None:
        view = self.placement.view(out)
        for s in sample_tiles(self.n, self.l * self.placement.size if self.p > 1 else self.k + self.l * self.c):
            A, D = self.A[s], self.D[s]
            if self.p == 1:
                squares = self._gather(A * A, np.einsum("nlpgc,nlpgc->npgc", D, D))
            else:
                J = contract(A, D)
                squares = np.einsum("nlgkc,nlgkc->gkc", J, J)
            view += squares.reshape(view.shape)

    def take(self, samples: NDArray[np.intp] | slice, outputs: slice = slice(None)) -> Self:
        return type(self)(self.A[samples], self.D[samples][:, outputs], self.placement)

    def scaled(self, b: NDArray[Any]) -> Self:
        D = (b @ self._D).reshape(self.n, b.shape[1], self.p, self.g, self.c)
        return type(self)(self.A, D, self.placement)

    def weighted(self, w: NDArray[Any]) -> Self:
        return type(self)(self.A, self.D * w[:, :, None, None, None], self.placement)

    def pieces(self, columns: int) -> list[Block]:
        blocks: list[Block] = []
        for axis, part, placement in self.placement.cut(columns):
            A = (self.A[:, :, part], self.A[..., part], self.A)[axis]
            D = (self.D[:, :, :, part], self.D, self.D[..., part])[axis]
            blocks.append(type(self)(A, D, placement))
        return blocks

    def restricted(self, start: int, stop: int, shift: int) -> Block | None:
        part = self.placement.part(start, stop, shift)
        return None if part is None else type(self)(self.A[..., part[0]], self.D, part[1])


def _add_hadamard(A: NDArray[Any], D: NDArray[Any], B: NDArray[Any], E: NDArray[Any], out: NDArray[Any]) -> None:
    """out (r, l, s, t) += (A Bᵀ) ∘ (D Eᵀ) for A (r, k), D (r, l, c), B (s, k), E (s, t, c)."""
    r, l, s, t = out.shape
    c = D.shape[2]
    E = E.reshape(s * t, c).T
    for rows in sample_tiles(r, l * s * t, TILE // 2):
        some = A[rows]
        products = (D[rows].reshape(len(some) * l, c) @ E).reshape(len(some), l, s * t)
        weights = some @ B.T
        products *= (weights if t == 1 else np.repeat(weights, t, axis=1))[:, None]  # one long inner loop
        out[rows] += products.reshape(len(some), l, s, t)
        del products  # before the next is made


def _add_explicit_gram(A: NDArray[Any], D: NDArray[Any], B: NDArray[Any], E: NDArray[Any], out: NDArray[Any]) -> None:
    """The same through explicit columns, some of g or of k at a time; all factors with all their axes."""
    r, l, s, t = out.shape
    g, k, c = A.shape[2], A.shape[3], D.shape[4]
    rows = max(1, r * l + s * t)
    for gs in sample_tiles(g, rows * k * c):
        for ks in sample_tiles(k, rows * c * (gs.stop - gs.start)):
            e = (gs.stop - gs.start) * (ks.stop - ks.start) * c
            X = contract(A[:, :, gs, ks], D[:, :, :, gs]).reshape(r * l, e)
            Y = contract(B[:, :, gs, ks], E[:, :, :, gs]).reshape(s * t, e)
            for part in sample_tiles(r, l * s * t):
                out[part] += (X[part.start * l : part.stop * l] @ Y.T).reshape(-1, l, s, t)
