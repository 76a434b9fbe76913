"""The abstract block and its verbs, and where a block's columns lie.

A block is the part of a Jacobian that belongs to some parameters: conceptually an array (n, l, g, k, c) whose last
three axes are spread over the m columns by a `Placement`. Blocks are a closed set of final classes: outer, embedding,
dense, mapped. All verbs take and give arrays in the coordinates of the whole Jacobian (m columns), and *add* to what
they are given, so that a Jacobian is the plain sum of its blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray


@dataclass(frozen=True)
class Placement:
    """Columns of the entries of E: ``offset + sum_i index_i * stride_i`` over its fine axes.

    E (g, k, c) is split into fine axes wherever its memory in the variable is not one stride (the k of a transposed
    convolution is patch × channels, with the channels out between them in memory).

    Attributes
    ----------
    shape, strides : tuple of int
        Of the fine axes, g's first, then k's, then c's; strides counted in columns. Distinct entries have distinct
        columns.
    offset : int
        Column of entry (0, 0, 0).
    sizes : (g, k, c)
        Coarse sizes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    sizes: tuple[int, int, int]

    @property
    def size(self) -> int:
        """Number of entries, g·k·c."""
        return prod(self.sizes)

    @property
    def bounds(self) -> tuple[int, int]:
        """Lowest column and one past the highest; equal where there are no entries."""
        if not self.size:
            return self.offset, self.offset
        reach = [stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True)]
        return self.offset + sum(min(r, 0) for r in reach), self.offset + sum(max(r, 0) for r in reach) + 1

    @cached_property
    def counts(self) -> tuple[int, int, int]:
        """How many of the fine axes belong to g, to k and to c."""
        counts, i = [], 0
        for size in self.sizes[:2]:
            first, product = i, 1
            while product != size:
                product *= self.shape[i]
                i += 1
            counts.append(i - first)
        return counts[0], counts[1], len(self.shape) - i

    @cached_property
    def contiguous(self) -> bool:
        """Whether the entries in C order are the columns ``offset, offset + 1, …``."""
        return self._range is not None and self._range[1] == tuple(range(len(self.shape)))

    @cached_property
    def _range(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Where the columns are all of a range: shape of the axes by falling stride, and the transpose back."""
        order = sorted(range(len(self.shape)), key=lambda i: -self.strides[i])
        step = 1
        for i in reversed(order):
            if self.strides[i] != step and self.size:
                return None
            step *= self.shape[i]
        return tuple(self.shape[i] for i in order), tuple(order.index(i) for i in range(len(order)))

    def view(self, buffer: NDArray[Any]) -> NDArray[Any]:
        """View (..., *fine axes) of the block's columns in ``buffer`` (..., m); writing to it writes the buffer."""
        lead = buffer.ndim - 1
        if self._range is not None:  # the same as below, at a tenth of as_strided's price
            shape, back = self._range
            view = buffer[..., self.offset : self.offset + self.size].reshape(buffer.shape[:-1] + shape)
            return view if self.contiguous else view.transpose(*range(lead), *(lead + i for i in back))
        step = buffer.strides[-1]
        return as_strided(
            buffer[..., self.offset :],
            shape=buffer.shape[:-1] + self.shape,
            strides=buffer.strides[:-1] + tuple(step * s for s in self.strides),
        )

    def part(self, start: int, stop: int, shift: int) -> tuple[slice, Placement] | None:
        """The entries with columns in ``start:stop``, as a range of k and their placement moved by ``shift``.

        ``start`` and ``stop`` are the borders of one variable, and joined variables follow each other along k.
        None where no entry lies there.
        """
        low, high = self.bounds
        if low == high or high <= start or stop <= low:
            return None
        if start <= low and high <= stop:
            return slice(None), replace(self, offset=self.offset + shift)
        columns = self.indices()
        ks = np.flatnonzero((columns[0, :, 0] >= start) & (columns[0, :, 0] < stop))
        if not len(ks):
            return None
        placement = strided_placement(columns[:, ks] + shift)
        assert placement is not None, "variables are joined only where each is strided by itself"
        return slice(int(ks[0]), int(ks[-1]) + 1), placement

    def cut(self, columns: int) -> list[tuple[int, slice, Placement]]:
        """Pieces of about ``columns`` columns, following each other in the columns.

        Each is an axis (0 for g, 1 for k, 2 for c), the range of it, and the placement of what lies there; one piece,
        all of the block, where the slowest fine axis is not the first of its coarse axis.
        """
        slowest = max(range(len(self.shape)), key=lambda i: abs(self.strides[i]) * (self.shape[i] > 1), default=0)
        firsts = (0, self.counts[0], self.counts[0] + self.counts[1])
        count = min(self.shape[slowest], -(-self.size // max(1, columns))) if self.size and self.shape else 1
        axis = max((i for i in range(3) if self.counts[i] and firsts[i] == slowest), default=None)
        if count <= 1 or axis is None:
            return [(1, slice(None), self)]
        inner = self.sizes[axis] // self.shape[slowest]
        pieces = []
        for i in range(count):
            start, stop = (j * self.shape[slowest] // count for j in (i, i + 1))
            shape = (*self.shape[:slowest], stop - start, *self.shape[slowest + 1 :])
            g, k, c = ((stop - start) * inner if j == axis else size for j, size in enumerate(self.sizes))
            placement = Placement(shape, self.strides, self.offset + start * self.strides[slowest], (g, k, c))
            pieces.append((axis, slice(start * inner, stop * inner), placement))
        return pieces

    def rows(self, array: NDArray[Any]) -> NDArray[Any]:
        """View (*fine axes, q) of the block's rows in ``array`` (m, q); writing to it writes the array."""
        view = self.view(array.T)
        return view.transpose(*range(1, view.ndim), 0)

    def indices(self) -> NDArray[np.intp]:
        """Column of every entry, (g, k, c)."""
        columns = np.array(self.offset, np.intp)
        for size, stride in zip(self.shape, self.strides, strict=True):
            columns = columns[..., None] + np.arange(size, dtype=np.intp) * stride
        return columns.reshape(self.sizes)


def strided_placement(columns: NDArray[np.intp]) -> Placement | None:
    """The `Placement` whose entries lie at ``columns`` (g, k, c); None where they are not strided or some repeat."""
    g, k, c = columns.shape
    if columns.size == 0:
        return Placement((g, k, c), (0, 0, 0), 0, (g, k, c))
    offset = int(columns[0, 0, 0])
    axes = [fine for line in (columns[:, 0, 0], columns[0, :, 0], columns[0, 0, :]) for fine in _fine_axes(line)]
    placement = Placement(tuple(size for size, _ in axes), tuple(stride for _, stride in axes), offset, (g, k, c))
    if prod(placement.shape) != columns.size or not np.array_equal(placement.indices(), columns):
        return None
    return placement if _distinct(placement) else None


def _fine_axes(line: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Split ``line`` into axes (size, stride) wherever its stride breaks; right if the line can be split at all."""
    axes: list[tuple[int, int]] = []
    while len(line) > 1:
        steps = np.diff(line)
        breaks = np.flatnonzero(steps != steps[0])
        run = int(breaks[0]) + 1 if len(breaks) else len(line)
        axes.insert(0, (run, int(steps[0])))
        line = line[::run]
    return axes


def _distinct(placement: Placement) -> bool:
    """Whether no column occurs twice: proved by nested strides where possible, else counted."""
    reach = 0
    for stride, size in sorted((abs(s), n) for s, n in zip(placement.strides, placement.shape, strict=True)):
        if stride <= reach:
            return len(np.unique(placement.indices())) == placement.size
        reach += stride * (size - 1)
    return True


class Block(ABC):
    """Columns of a Jacobian for some of its parameters; immutable.

    Attributes
    ----------
    n, l : int
        Samples and outputs per sample.
    """

    n: int
    l: int

    @abstractmethod
    def columns(self) -> NDArray[np.intp]:
        """The columns of J this block adds to, each once, sorted."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the arrays held."""

    @abstractmethod
    def add_product(self, v: NDArray[Any], out: NDArray[Any]) -> None:
        """out (n, l, q) += J v, for v (m, q)."""

    @abstractmethod
    def add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        """out (m, q) += Jᵀ u, for u (n, l, q)."""

    @abstractmethod
    def fill(self, out: NDArray[Any], samples: slice, *, add: bool) -> None:
        """Write (or add) the explicit columns of ``samples`` into ``out`` (samples, l, m), any strides, any real dtype.

        Only the block's own columns of ``out`` are touched.
        """

    @abstractmethod
    def add_gram(self, other: Self, rows: slice, columns: slice, out: NDArray[Any]) -> None:
        """out (rows, l, columns, l of other) += J[rows] otherᵀ[columns], ``other`` the same block of another Jacobian.

        Same block means same class, placement and p; n and l may differ.
        """

    @abstractmethod
    def row_squares(self) -> NDArray[Any]:
        """Sum over the columns of the squared entries, (n, l)."""

    @abstractmethod
    def add_column_squares(self, out: NDArray[Any]) -> None:
        """out (m,) += sum over the rows of the squared entries."""

    @abstractmethod
    def take(self, samples: NDArray[np.intp] | slice, outputs: slice = slice(None)) -> Self:
        """The same columns for some of the samples, and for a range of the outputs."""

    @abstractmethod
    def scaled(self, b: NDArray[Any]) -> Self:
        """Rows combined per sample: new row i of sample n is sum_j b[n, i, j] · row j; ``b`` is (n, q, l)."""

    @abstractmethod
    def weighted(self, w: NDArray[Any]) -> Self:
        """Each row times a number, ``w`` (n, l)."""

    @abstractmethod
    def pieces(self, columns: int) -> list[Block]:
        """Blocks of about ``columns`` columns each that together are this one; a single one where it cannot be cut.

        They share this block's arrays. Made for buffers whose slowest axis is m, which several threads fill best by
        columns: each then writes one region of memory.
        """

    @abstractmethod
    def restricted(self, start: int, stop: int, shift: int) -> Block | None:
        """The part in columns ``start:stop``, moved by ``shift`` columns; None where there is none.

        ``start`` and ``stop`` are the borders of one variable.
        """
