"""The mapped block: entries E that are no plain rearrangement of a variable, followed by a sparse matrix.

Where entries repeat (a weight that was tiled), lie in no strided order, or carry a factor each, the block of E is
multiplied by T = dE/dvariable, which has at most one number in each of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from netjac.blocks.base import Block
from netjac.blocks.tiles import TILE, sample_tiles
from netjac.errors import ShapeError


@final
class MappedBlock(Block):
    """Block J_E · T spread over some columns.

    Parameters
    ----------
    inner
        Block of E flattened: its columns are 0 … size of E − 1.
    T : (size of E, e) sparse
        Derivative of E with respect to the entries of the variable that it is made of.
    where : (e,) integers
        Column of each of those entries, rising.

    Raises
    ------
    ShapeError
        If the last two do not fit together.
    """

    def __init__(self, inner: Block, T: csr_array, where: NDArray[np.intp]) -> None:
        if T.shape[1] != len(where):
            raise ShapeError(f"expected a column for each of the {T.shape[1]} columns of T, and got {len(where)}.")
        self.inner, self.T, self.where = inner, T, where
        self.n, self.l = inner.n, inner.l
        ranged = len(where) > 0 and where[-1] - where[0] + 1 == len(where)
        self._place: Any = slice(int(where[0]), int(where[-1]) + 1) if ranged else where

    def columns(self) -> NDArray[np.intp]:
        return self.where

    @property
    def nbytes(self) -> int:
        T = self.T
        return self.inner.nbytes + T.data.nbytes + T.indices.nbytes + T.indptr.nbytes + self.where.nbytes

    def add_product(self, v: NDArray[Any], out: NDArray[Any]) -> None:
        self.inner.add_product(self.T @ v[self._place], out)

    def add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        sums = np.zeros((self.T.shape[0], u.shape[2]), out.dtype)
        self.inner.add_adjoint(u, sums)
        out[self._place] += self.T.T @ sums

    def fill(self, out: NDArray[Any], samples: slice, *, add: bool) -> None:
        start = samples.start or 0
        for s, tile in self._explicit(slice(start, start + len(out))):
            if add:
                out[s.start - start : s.stop - start][..., self._place] += tile
            else:
                out[s.start - start : s.stop - start][..., self._place] = tile

    def _explicit(self, samples: slice) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Explicit entries (r, l, e), some samples at a time."""
        size, e = self.T.shape
        for s in sample_tiles(samples.stop - samples.start, self.l * (size + e), TILE // 4):
            part = slice(samples.start + s.start, samples.start + s.stop)
            r = part.stop - part.start
            tile = np.zeros((r, self.l, size), self.T.dtype)
            self.inner.fill(tile, part, add=False)
            yield part, (self.T.T @ tile.reshape(r * self.l, size).T).T.reshape(r, self.l, e)

    def add_gram(self, other: Self, rows: slice, columns: slice, out: NDArray[Any]) -> None:
        if not out.size:
            return
        rows, columns = (slice(*x.indices(n)[:2]) for x, n in ((rows, self.n), (columns, other.n)))
        _, l, _, t = out.shape
        e = self.T.shape[1]
        for some, X in self._explicit(rows):
            for others, Y in other._explicit(columns):
                tile = out[some.start - rows.start : some.stop - rows.start]
                tile = tile[:, :, others.start - columns.start : others.stop - columns.start]
                tile += (X.reshape(len(X) * l, e) @ Y.reshape(len(Y) * t, e).T).reshape(len(X), l, len(Y), t)

    def row_squares(self) -> NDArray[Any]:
        out = np.zeros((self.n, self.l), self.T.dtype)
        for s, J in self._explicit(slice(0, self.n)):
            out[s] = np.einsum("nle,nle->nl", J, J)
        return out

    def add_column_squares(self, out: NDArray[Any]) -> None:
        for _, J in self._explicit(slice(0, self.n)):
            out[self._place] += np.einsum("nle,nle->e", J, J)

    def take(self, samples: NDArray[np.intp] | slice, outputs: slice = slice(None)) -> Self:
        return type(self)(self.inner.take(samples, outputs), self.T, self.where)

    def scaled(self, b: NDArray[Any]) -> Self:
        return type(self)(self.inner.scaled(b), self.T, self.where)

    def weighted(self, w: NDArray[Any]) -> Self:
        return type(self)(self.inner.weighted(w), self.T, self.where)

    def pieces(self, columns: int) -> list[Block]:
        return [self]

    def restricted(self, start: int, stop: int, shift: int) -> Block | None:
        if not len(self.where) or self.where[-1] < start or self.where[0] >= stop:
            return None
        return type(self)(self.inner, self.T, self.where + shift)
