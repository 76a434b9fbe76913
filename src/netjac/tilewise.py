"""What every kind of Jacobian computes over its tiles; checked arguments come from the verbs of `netjac.operator`.

A kind says where a tile comes from. What it can do better than tile by tile, it overrides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy.sparse.linalg import LinearOperator

from netjac import algebra, arguments, kronecker, materialise, normal
from netjac.errors import ShapeError
from netjac.progress import Progress, Shown
from netjac.sites import Coverage
from netjac.spaces import OutputSpace, ParameterSpace

if TYPE_CHECKING:
    from netjac.jacobian import Jacobian


class Tilewise(LinearOperator, ABC):
    """Derivative of n samples' l outputs with respect to m parameters, in tiles of rows.

    Parameters
    ----------
    parameters, output_space, coverage
        As for `netjac.Jacobian`.
    y : (n, l)
        The outputs the derivative belongs to; kept as a read-only view.
    dtype
        Real floating.
    """

    def __init__(
        self,
        parameters: ParameterSpace,
        output_space: OutputSpace,
        y: ArrayLike,
        coverage: Coverage,
        dtype: DTypeLike | None = None,
    ) -> None:
        outputs = np.asarray(y).view()
        if outputs.ndim != 2 or outputs.shape[1] != output_space.size:
            raise ShapeError(f"y must have shape (n, {output_space.size}), and has {outputs.shape}.")
        outputs.flags.writeable = False
        n, l = outputs.shape
        self.y = outputs
        self.n, self.l, self.m = n, l, parameters.size
        self.parameters = parameters
        self.output_space = output_space
        self.coverage = coverage
        super().__init__(arguments.floating(outputs.dtype if dtype is None else dtype), (n * l, parameters.size))

    progress: Shown = None
    """Whether verbs that take several tiles show how far they are: None, with a bar on standard error after a second if
    that is a terminal; False, not; True, whatever standard error is; or on a text stream."""

    _solver_bytes: int | None = None  # most that `lstsq` may spend on an explicit matrix, where that is limited
    # ---- what a kind provides

    @abstractmethod
    def _grid(self) -> Sequence[tuple[slice, slice]]:
        """Ranges of samples and of outputs that together are all rows, each row once."""

    @abstractmethod
    def _tile(self, samples: slice, outputs: slice) -> Jacobian:
        """The rows of one of these ranges."""

    @abstractmethod
    def _widened(self, dtype: np.dtype[Any]) -> Self:
        """The same Jacobian in a wider precision; itself where that is not wider."""

    @abstractmethod
    def _columns(self, space: ParameterSpace, positions: Sequence[int]) -> Self:
        """The columns of ``space``: the variables at these positions."""

    @abstractmethod
    def _samples(self, index: slice | NDArray[np.intp]) -> Jacobian | Self:
        """Some of the samples."""

    @abstractmethod
    def _scaled(self, b: NDArray[Any], y: NDArray[Any], space: OutputSpace) -> Jacobian | Self:
        """Rows combined by b (n, q, l), which has the type of the result: of outputs ``y`` (n, q), called ``space``."""

    # ---- what follows from it, unless it can do better

    def _tiles(self, ranges: Iterable[tuple[slice, slice]]) -> Iterator[tuple[slice, slice, Jacobian]]:
        """The rows of each of the ranges, in tiles as large or smaller."""
        for samples, outputs in ranges:
            yield samples, outputs, self._tile(samples, outputs)

    def tiles(self) -> Iterator[tuple[slice, slice, Jacobian]]:
        """Iterate over (samples, outputs, the Jacobian of those alone); together they are all rows, each once.

        A tile that cannot be allocated is tried again in halves, after a warning, where it is computed for this.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> total = np.zeros(J.m)
        >>> for samples, outputs, tile in J.tiles():  # Jᵀ y, whatever the number of tiles
        ...     total += tile.T @ J.y[samples, outputs].reshape(-1)
        >>> np.allclose(total, J.T @ J.y.reshape(-1))
        True
        """
        return self._tiles(self._grid())

    def _shown(self, what: str) -> Iterator[tuple[slice, slice, Jacobian]]:
        """The tiles, with the rows of those that were used counted where that is to be seen."""
        with Progress(what, self.shape[0], self.progress if len(self._grid()) > 1 else False) as bar:
            for samples, outputs, tile in self.tiles():
                yield samples, outputs, tile
                bar.add(tile.shape[0])
                del tile

    def _add_product(self, v: NDArray[Any], out: NDArray[Any]) -> None:
        """out (n, l, q) += J v, for v (m, q)."""
        for samples, outputs, tile in self.tiles():
            tile._add_product(v, out[samples, outputs])

    def _add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        """out (m, q) += Jᵀ u, for u (n, l, q)."""
        for samples, outputs, tile in self.tiles():
            tile._add_adjoint(u[samples, outputs], out)

    def _fill(self, out: NDArray[Any], threads: int) -> None:
        """Write the explicit J into ``out`` (n, l, m), of any strides and any real floating dtype."""
        for samples, outputs, tile in self._shown("to_array"):
            materialise.fill(tile.blocks, tile.cover, out[samples, outputs], threads=threads)

    def _within(self, memory: int | None) -> Self:
        """The same Jacobian, tiles that are computed for it within ``memory`` bytes; None for the budget they have."""
        return self

    def _least_tile(self, dtype: np.dtype[Any]) -> int:
        """Bytes of the smallest tiles that can be computed for it, in ``dtype``; 0 where none are."""
        return 0

    def _copied(self, dtype: np.dtype[Any]) -> int:
        """Bytes of copies of the factors that `_widened` makes."""
        return 0

    def _gram(self, other: Tilewise | None, out: NDArray[Any], threads: int, work: int) -> None:
        """Write J Jᵀ, or J otherᵀ, into ``out`` (n, l, n of other, l of other), two tiles in memory at once at most.

        The sums are in the precision of ``out``, which is no narrower than that of either, and take ``work`` bytes.
        """
        columns = self if other is None else other
        done: list[tuple[slice, slice]] = []
        with Progress("gram", out.size, self.progress if len(self._grid()) > 1 else False, "entries") as bar:
            for r, i, rows in self.tiles():
                if other is None:
                    algebra.gram(rows.parts, None, out[r, i, r, i], threads, work)
                    bar.add(out[r, i, r, i].size)
                for c, j, some in columns._tiles(tuple(done) if other is None else columns._grid()):
                    part = out[r, i, c, j]
                    algebra.gram(rows.parts, some.parts, part, threads, work)
                    del some  # what is computed next has its place
                    if other is None:
                        out[c, j, r, i] = part.transpose(2, 3, 0, 1)
                    bar.add(part.size * (2 if other is None else 1))
                done.append((r, i))
                del rows

    def _normal(
        self, weights: NDArray[np.float64] | None, dtype: np.dtype[Any], threads: int, work: int
    ) -> NDArray[Any]:
        """Jᵀ J (m, m), or Jᵀ diag(w) J for weights (n, l), summed in ``dtype`` with ``work`` bytes; symmetric."""
        total = normal.NormalSum(self.m, dtype, threads, work)
        for samples, outputs, tile in self._shown("normal"):
            total.add(tile.parts, None if weights is None else weights[samples, outputs])
        return total.result()

    def _normal_product(self, v: NDArray[Any], weights: NDArray[Any] | None = None) -> NDArray[Any]:
        """Jᵀ diag(w) J v (m, q), for v (m, q) in the type of J and weights (n, l): one pass over the tiles."""
        out = np.zeros(v.shape, self.dtype)
        for samples, outputs, tile in self.tiles():
            u = np.zeros((tile.n, tile.l, v.shape[1]), self.dtype)
            tile._add_product(v, u)
            if weights is not None:
                u *= weights[samples, outputs][:, :, None]
            tile._add_adjoint(u, out)
            del tile
        return out

    def _layers(self, limit: int | None = None) -> int | None:
        """How many layers `_kronecker` finds; None where that takes a computation."""
        return None

    def _kronecker(self, weights: NDArray[np.float64] | None = None, limit: int | None = None) -> list[kronecker.Layer]:
        """Kronecker factors of the layers that are products, of rows with weights (n, l) that are not negative.

        Those alone that are within ``limit`` bytes; see `netjac.kronecker.places`.
        """
        found: list[kronecker.Layer] | None = None
        for samples, outputs, tile in self.tiles():
            places = kronecker.places(tile.parts, limit)
            # Those alone that are products in every tile.
            found = kronecker.nothing(places) if found is None else [f for f in found if f.placement in places]
            w = None if weights is None else weights[samples, outputs]
            kronecker.add(found, tile.parts, w, inputs=not outputs.start)
            del tile
        return found or []

    def _row_squares(self) -> NDArray[Any]:
        """Squared norm of each row (n, l)."""
        squares = np.zeros((self.n, self.l), self.dtype)
        for samples, outputs, tile in self._shown("row_norms"):
            algebra.add_row_squares(tile.parts, squares[samples, outputs])
        return squares

    def _column_squares(self, weights: NDArray[np.float64] | None = None) -> NDArray[Any]:
        """Squared norm of each column (m,), the squares times weights (n, l) that are not negative."""
        squares = np.zeros(self.m, self.dtype)
        for samples, outputs, tile in self._shown("column_norms"):
            algebra.add_column_squares(tile.parts, squares, None if weights is None else weights[samples, outputs])
        return squares
