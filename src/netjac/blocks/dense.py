"""The dense block: explicit entries, where they are smaller than their factors or no factors are known."""

from __future__ import annotations

from math import prod
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from netjac.blocks.base import Block, Placement
from netjac.blocks.tiles import copy_into, sample_tiles
from netjac.errors import ShapeError


@final
class DenseBlock(Block):
    """Block of explicit entries.

    Parameters
    ----------
    values : (n, l, e)
        J of the e = g·k·c entries.
    placement
        Columns of the entries (g, k, c).

    Raises
    ------
    ShapeError
        If the two do not fit together.
    """

    def __init__(self, values: NDArray[Any], placement: Placement) -> None:
        n, l, e = values.shape
        if e != placement.size:
            raise ShapeError(f"expected values (n, l, {placement.size}) for {placement.sizes}, and got {values.shape}.")
        self.values, self.placement = values, placement
        self.n, self.l = n, l

    def columns(self) -> NDArray[np.intp]:
        return np.sort(self.placement.indices(), axis=None)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def add_product(self, v: NDArray[Any], out: NDArray[Any]) -> None:
        place = self.placement
        if place.contiguous:
            out += self.values @ v[place.offset : place.offset + place.size]
        else:
            out += self.values @ place.rows(v).reshape(place.size, v.shape[1])

    def add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        n, l, e = self.values.shape
        place = self.placement
        sums = self.values.reshape(n * l, e).T @ u.reshape(n * l, u.shape[2])
        if place.contiguous:
            out[place.offset : place.offset + e] += sums
        else:
            rows = place.rows(out)
            rows += sums.reshape(rows.shape)

    def fill(self, out: NDArray[Any], samples: slice, *, add: bool) -> None:
        view = self.placement.view(out)  # (r, l, *fine axes)
        values = self.values[samples].reshape(view.shape)
        if add:
            view += values
        else:
            copy_into(view, values)

    def add_gram(self, other: Self, rows: slice, columns: slice, out: NDArray[Any]) -> None:
        r, l, s, t = out.shape
        if not out.size:
            return
        e = self.placement.size
        Y = other.values[columns].reshape(s * t, e).T
        values = self.values[rows]
        for part in sample_tiles(r, l * s * t):
            some = values[part]
            out[part] += (some.reshape(len(some) * l, e) @ Y).reshape(len(some), l, s, t)

    def row_squares(self) -> NDArray[Any]:
        return np.einsum("nle,nle->nl", self.values, self.values)

    def add_column_squares(self, out: NDArray[Any]) -> None:
        view = self.placement.view(out)
        view += np.einsum("nle,nle->e", self.values, self.values).reshape(view.shape)

    def take(self, samples: NDArray[np.intp] | slice, outputs: slice = slice(None)) -> Self:
        return type(self)(self.values[samples][:, outputs], self.placement)

    def scaled(self, b: NDArray[Any]) -> Self:
        return type(self)(b @ self.values, self.placement)

    def weighted(self, w: NDArray[Any]) -> Self:
        return type(self)(self.values * w[:, :, None], self.placement)

    def pieces(self, columns: int) -> list[Block]:
        cut = self.placement.cut(columns)
        axis = cut[0][0]
        inner = prod(self.placement.sizes[axis + 1 :])
        if len(cut) == 1 or prod(self.placement.sizes[:axis]) != 1:  # a piece would not be a range of the entries
            return [self]
        return [type(self)(self.values[..., p.start * inner : p.stop * inner], place) for _, p, place in cut]

    def restricted(self, start: int, stop: int, shift: int) -> Block | None:
        part = self.placement.part(start, stop, shift)
        if part is None:
            return None
        ks, placement = part
        entries = self.values.reshape(self.n, self.l, *self.placement.sizes)[:, :, :, ks]
        return type(self)(entries.reshape(self.n, self.l, placement.size), placement)
