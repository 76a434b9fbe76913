"""The embedding block: an outer block whose A is one-hot over the vocabulary k and kept as indices."""

from __future__ import annotations

from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from netjac.blocks.base import Block, Placement
from netjac.blocks.tiles import sample_tiles
from netjac.errors import ShapeError


class _Merged(NamedTuple):
    """Cotangents with the positions of one sample that hold the same index summed."""

    sample: NDArray[np.intp]  # (t,)
    token: NDArray[np.intp]  # (t,), its index
    D: NDArray[Any]  # (t, l, c)


@final
class EmbeddingBlock(Block):
    """Block of a table whose rows are looked up: J[n, l, (k, c)] = sum_p [k = indices[n, p]] · D[n, l, p, c].

    Rows of the table that no sample looks up have exactly zero columns.

    Parameters
    ----------
    indices : (n, p) integers
        Row of the table, 0 ≤ index < k.
    D : (n, l, p, c)
        Cotangents of what comes out.
    placement
        Columns of the entries (1, k, c).

    Raises
    ------
    ShapeError
        If the three do not fit together.
    """

    def __init__(self, indices: NDArray[Any], D: NDArray[Any], placement: Placement) -> None:
        n, l, p, c = D.shape
        if indices.shape != (n, p) or placement.sizes != (1, placement.sizes[1], c):
            raise ShapeError(
                f"expected indices (n, p), D (n, l, p, c) and a placement of (1, k, c), "
                f"and got {indices.shape}, {D.shape} and {placement.sizes}."
            )
        self.indices, self.D, self.placement = indices, D, placement
        self.n, self.l, self.p, self.k, self.c = n, l, p, placement.sizes[1], c

    def columns(self) -> NDArray[np.intp]:
        return np.sort(self.placement.indices(), axis=None)

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.D.nbytes

    def add_product(self, v: NDArray[Any], out: NDArray[Any]) -> None:
        q, width = v.shape[1], self.p * self.c
        V = self.placement.rows(v).reshape(self.k, self.c * q)
        for s in sample_tiles(self.n, width * q):
            r = s.stop - s.start
            Z = V[self.indices[s]].reshape(r, width, q)
            out[s] += self.D[s].reshape(r, self.l, width) @ Z

    def add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        q, width = u.shape[2], self.p * self.c
        rows = self._table(self.placement.rows(out), 0)
        for s in sample_tiles(self.n, width * q):
            W = self.D[s].reshape(s.stop - s.start, self.l, width).swapaxes(1, 2) @ u[s]
            index, sums = _sum_by(self.indices[s].reshape(-1), W.reshape(self.indices[s].size, self.c * q))
            place = self._unravel(index)
            rows[place] += sums.reshape(rows[place].shape)

    def _table(self, view: NDArray[Any], axis: int) -> NDArray[Any]:
        """The view with an axis for k at ``axis``, also where k = 1 has none."""
        return view if self.placement.counts[1] else np.expand_dims(view, axis)

    def _unravel(self, index: NDArray[np.intp]) -> tuple[NDArray[np.intp], ...]:
        """Rows of the table in the fine axes of k."""
        return np.unravel_index(index, self.placement.shape[: self.placement.counts[1]] or (1,))

    def _merge(self, samples: slice) -> _Merged:
        indices = self.indices[samples].astype(np.intp)
        r = len(indices)
        keys = (np.arange(r)[:, None] * self.k + indices).reshape(-1)
        D = self.D[samples].transpose(0, 2, 1, 3).reshape(r * self.p, self.l * self.c)
        key, sums = _sum_by(keys, D)
        sample, index = np.divmod(key, max(1, self.k))
        return _Merged(sample, index, sums.reshape(len(key), self.l, self.c))

    def fill(self, out: NDArray[Any], samples: slice, *, add: bool) -> None:
        view = self._table(self.placement.view(out), 2)  # (r, l, *fine axes)
        if not add:
            view[...] = 0
        for s in sample_tiles(len(view), self.p * self.l * self.c):
            start = (samples.start or 0) + s.start
            merged = self._merge(slice(start, start + s.stop - s.start))
            place: Any = (merged.sample, slice(None), *self._unravel(merged.token))
            tile = view[s]
            tile[place] += merged.D.reshape(tile[place].shape)

    def add_gram(self, other: Self, rows: slice, columns: slice, out: NDArray[Any]) -> None:
        r, l, s, t = out.shape
        if not out.size:
            return
        ours, theirs = self._merge(rows), other._merge(columns)
        common = np.intersect1d(ours.token, theirs.token)
        for part in sample_tiles(len(common), (r * l + s * t) * self.c):
            e = (part.stop - part.start) * self.c
            X = _explicit(ours, common[part], r).reshape(r * l, e)
            Y = _explicit(theirs, common[part], s).reshape(s * t, e).T
            for some in sample_tiles(r, l * s * t):
                out[some] += (X[some.start * l : some.stop * l] @ Y).reshape(-1, l, s, t)

    def row_squares(self) -> NDArray[Any]:
        out = np.zeros((self.n, self.l), self.D.dtype)
        for s in sample_tiles(self.n, self.p * self.l * self.c):
            merged = self._merge(s)
            sample, sums = _sum_by(merged.sample, np.einsum("tlc,tlc->tl", merged.D, merged.D))
            out[s.start + sample] = sums
        return out

    def add_column_squares(self, out: NDArray[Any]) -> None:
        view = self._table(self.placement.view(out), 0)
        for s in sample_tiles(self.n, self.p * self.l * self.c):
            merged = self._merge(s)
            index, sums = _sum_by(merged.token, np.einsum("tlc,tlc->tc", merged.D, merged.D))
            place = self._unravel(index)
            view[place] += sums.reshape(view[place].shape)

    def take(self, samples: NDArray[np.intp] | slice, outputs: slice = slice(None)) -> Self:
        return type(self)(self.indices[samples], self.D[samples][:, outputs], self.placement)

    def scaled(self, b: NDArray[Any]) -> Self:
        D = b @ self.D.reshape(self.n, self.l, self.p * self.c)
        return type(self)(self.indices, D.reshape(self.n, b.shape[1], self.p, self.c), self.placement)

    def weighted(self, w: NDArray[Any]) -> Self:
        return type(self)(self.indices, self.D * w[:, :, None, None], self.placement)

    def pieces(self, columns: int) -> list[Block]:
        cut = self.placement.cut(columns)
        if any(axis != 2 for axis, _, _ in cut):  # a part of the table would need a part of the tokens
            return [self]
        return [type(self)(self.indices, self.D[..., part], placement) for _, part, placement in cut]

    def restricted(self, start: int, stop: int, shift: int) -> Block | None:
        part = self.placement.part(start, stop, shift)
        return None if part is None else type(self)(self.indices, self.D, part[1])


def _sum_by(keys: NDArray[np.intp], values: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """The keys (t,) that occur, sorted, and for each the sum of its rows of ``values`` (t, w)."""
    unique, group = np.unique(keys, return_inverse=True)
    t = len(keys)
    select = csc_array((np.ones(t, values.dtype), group.reshape(-1), np.arange(t + 1)), shape=(len(unique), t))
    return unique, select @ values


def _explicit(merged: _Merged, vocabulary: NDArray[np.intp], r: int) -> NDArray[Any]:
    """Entries (r, l, vocabulary, c) for some rows of the table, sorted."""
    _, l, c = merged.D.shape
    out = np.zeros((r, l, len(vocabulary), c), merged.D.dtype)
    place = np.minimum(np.searchsorted(vocabulary, merged.token), len(vocabulary) - 1)
    known = np.flatnonzero(vocabulary[place] == merged.token)
    out[merged.sample[known], :, place[known]] = merged.D[known]
    return out
