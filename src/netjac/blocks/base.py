"""The abstract block and its verbs, and where a block's columns lie.

A block is the part of a Jacobian that belongs to some parameters: conceptually an array (n, l, g, k, c) whose last
three axes are spread over the m columns by a `Placement`. Blocks are a closed set of final classes: outer, embedding,
dense, mapped. All verbs take and give arrays in the coordinates of the whole Jacobian (m columns), and *add* to what
they are given, so that a Jacobian is the plain sum of its blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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
        Of the fine axes, g's first, then k's, then c's; strides counted in columns. Distinct entries have distinct columns.
    offset : int
        Column of entry (0, 0, 0).
    sizes : (g, k, c)
        Coarse sizes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    sizes: tuple[int, int, int]

    def view(self, buffer: NDArray[Any]) -> NDArray[Any]:
        """View (..., *fine axes) of the block's columns in ``buffer`` (..., m); writing to it writes the buffer."""
        step = buffer.strides[-1]
        return as_strided(
            buffer[..., self.offset :],
            shape=buffer.shape[:-1] + self.shape,
            strides=buffer.strides[:-1] + tuple(step * s for s in self.strides),
        )


class Block(ABC):
    """Columns of a Jacobian for some of its parameters; immutable.

    Attributes
    ----------
    n, l : int
        Samples and outputs per sample.
    """

    n: int
    l: int  # noqa: E741

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
        """out (rows, l, columns, l of other) += J[rows] otherᵀ[columns], for ``other`` the same block of another Jacobian.

        Same block means same class, placement and p; n and l may differ.
        """

    @abstractmethod
    def row_squares(self) -> NDArray[Any]:
        """Sum over the columns of the squared entries, (n, l)."""

    @abstractmethod
    def add_column_squares(self, out: NDArray[Any]) -> None:
        """out (m,) += sum over the rows of the squared entries."""

    @abstractmethod
    def take(self, samples: NDArray[np.intp] | slice) -> Self:
        """The same columns for some of the samples."""

    @abstractmethod
    def scaled(self, b: NDArray[Any]) -> Self:
        """Rows combined per sample: new row i of sample n is sum_j b[n, i, j] · row j; ``b`` is (n, q, l)."""

    @abstractmethod
    def restricted(self, start: int, stop: int, shift: int) -> Block | None:
        """The part in columns ``start:stop``, moved by ``shift`` columns; None where there is none.

        ``start`` and ``stop`` are the borders of one variable.
        """
