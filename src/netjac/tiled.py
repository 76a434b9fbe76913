"""A Jacobian that is never held whole: its verbs compute the factors of some samples and outputs at a time.

For networks with very many outputs, or more samples than fit: a tile is a `Jacobian` of a range of samples and of
outputs, computed when it is needed and dropped when it was used. Tiles are cut by `netjac.planning` such that two of
them, one held and one being computed, stay within a memory budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from netjac import planning
from netjac.allocation import Limit, attempt, attempts
from netjac.blocks.base import Block
from netjac.jacobian import Jacobian
from netjac.operator import JacobianOperator
from netjac.progress import Shown
from netjac.sites import Coverage
from netjac.spaces import OutputSpace, ParameterSpace

SOLVER_BYTES = 1 << 25
"""A matrix that `TiledJacobian.lstsq` factorises may take that much whatever the budget."""


class Source(Protocol):
    """What a framework provides: the factors of a network at fixed x and θ, as often as they are asked for."""

    @property
    def footprint(self) -> planning.Footprint:
        """Bytes they take."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the factors, single or double precision."""

    def blocks(self, samples: NDArray[np.intp], rows: slice | NDArray[Any] | None) -> tuple[Block, ...]:
        """Blocks of some samples: all outputs (None), a range of them, or the combinations (samples, q, l)."""


@final
class TiledJacobian(JacobianOperator):
    """A `netjac.Jacobian` within a memory budget: the same verbs, each computed tile by tile.

    Made by `netjac.jacobian` where the factors of all samples and outputs would take more than ``memory``. Parameters
    and inputs are those of the moment it was made, whatever becomes of the model; variables of the model that are not
    trained must stay as they are. Every verb runs the network again, once over all tiles (``gram``: once for each
    tile), so that several vectors are best multiplied as one matrix. `lstsq` factorises a matrix that fits the budget
    (or 32 MiB), and otherwise iterates, with two passes over all tiles in each iteration.

    Like the network it computes with, it cannot be pickled (`PicklingError`, which says what to save instead).

    Parameters
    ----------
    source
        Computes the factors.
    parameters, output_space, y, coverage
        As for `netjac.Jacobian`, of the whole network.
    memory : int
        Most bytes of factors and of temporaries made on the way to them. Results come on top.
    dtype
        By default that of the source.
    samples : (n,) integers, optional
        Which of the source's samples; by default all.
    combinations : (n, q, l), optional
        What the rows are made of, where they are not the outputs themselves.
    names : sequence of str, optional
        The variables, by their full names, where not all are columns.
    progress
        Whether verbs show how far they are; as for `netjac.jacobian`.
    limit
        Rows of a tile that could be allocated, as far as is known.

    Attributes
    ----------
    shape, dtype, n, l, m, y, parameters, output_space, coverage
        As of `netjac.Jacobian`.
    memory : int
        The budget in bytes.
    tile_shape : (int, int)
        Samples and outputs of the largest tile.

    Raises
    ------
    MemoryBudgetError
        One output of one sample is above the budget; the message states the least that works.

    Examples
    --------
    ::

        J = nj.jacobian(classifier, x, memory="512 MiB")  # l = 1000
        gradient = J.T @ residual
        for samples, outputs, tile in J.tiles():
            ...  # each tile is a Jacobian, small enough to be held
    """

    def __init__(
        self,
        source: Source,
        parameters: ParameterSpace,
        output_space: OutputSpace,
        y: ArrayLike,
        coverage: Coverage,
        memory: int,
        dtype: DTypeLike | None = None,
        samples: NDArray[np.intp] | None = None,
        combinations: NDArray[Any] | None = None,
        names: Sequence[str] | None = None,
        progress: Shown = None,
        limit: Limit | None = None,
    ) -> None:
        chosen = parameters if names is None else parameters.select(names)[0]
        covered = coverage if names is None else coverage.of(names)
        super().__init__(chosen, output_space, y, covered, source.dtype if dtype is None else dtype)
        self.memory = memory
        self.progress = progress
        self._solver_bytes = max(memory, SOLVER_BYTES)
        self._source = source
        self._whole = parameters, coverage
        self._names = names
        self._sample = np.arange(self.n) if samples is None else samples
        self._combinations = combinations
        self._limit = Limit() if limit is None else limit

    def _with(self, **changes: Any) -> TiledJacobian:
        """The same with other arguments."""
        return TiledJacobian(**(self._arguments() | changes))

    def _arguments(self) -> dict[str, Any]:
        parameters, coverage = self._whole
        return {
            "source": self._source,
            "parameters": parameters,
            "output_space": self.output_space,
            "y": self.y,
            "coverage": coverage,
            "memory": self.memory,
            "dtype": self.dtype,
            "samples": self._sample,
            "combinations": self._combinations,
            "names": self._names,
            "progress": self.progress,
            "limit": self._limit,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return TiledJacobian, tuple(self._arguments().values())  # pickles if its source does

    # ---- what it is

    @cached_property
    def footprint(self) -> planning.Footprint:
        """Bytes that factors of these rows take."""
        found = self._source.footprint
        if self.dtype.itemsize > self._source.dtype.itemsize:
            found = found.widened()
        return found if self._combinations is None else found.combined(self._combinations.shape[2])

    @cached_property
    def tile_shape(self) -> tuple[int, int]:
        """Samples and outputs of the largest tile."""
        samples, outputs = self._tiling[0]
        return samples.stop - samples.start, outputs.stop - outputs.start

    @cached_property
    def _tiling(self) -> list[tuple[slice, slice]]:
        return planning.tile_grid(self.n, self.l, self.footprint, self.memory)

    def held(self) -> Jacobian | TiledJacobian:
        """Return a `Jacobian` that holds all its factors if they fit the budget and can be allocated, else this."""
        if not self.n * self.l or self.footprint.peak(self.n, self.l) <= self.memory:
            whole = slice(0, self.n), slice(0, self.l)
            tile = attempt(self._tile, *whole, _named(self.n, self.l), self._limit)
            if tile is not None:
                return tile
            return self._within(max(self.footprint.peak(self.n, self.l) // 2, self._least_tile(self.dtype)))
        _ = self._tiling  # raises where the budget is too small
        return self

    def __repr__(self) -> str:
        samples, outputs = self.tile_shape
        return (
            f"<TiledJacobian of {self.n} samples × {self.l} outputs with respect to {self.m} parameters: "
            f"shape {self.shape}, {self.dtype}, {len(self._tiling)} tiles of up to {samples} × {outputs} "
            f"within {planning.in_words(self.memory)}>"
        )

    def _tiles(self, ranges: Iterable[tuple[slice, slice]]) -> Iterator[tuple[slice, slice, Jacobian]]:
        """A tile that cannot be allocated is tried again in halves, after a warning, and so are those after it."""
        return attempts(ranges, self._tile, _named, self._limit)

    def _grid(self) -> Sequence[tuple[slice, slice]]:
        return self._tiling

    def _tile(self, samples: slice, outputs: slice) -> Jacobian:
        index = self._sample[samples]
        whole = outputs == slice(0, self.l)
        rows: slice | NDArray[Any] | None = None if whole else outputs
        if self._combinations is not None:
            rows = self._combinations[samples, outputs]
        y = self.y[samples, outputs]
        space = self.output_space if whole else OutputSpace.flat(y.shape[1], y.dtype.name)
        parameters, coverage = self._whole
        blocks = self._source.blocks(index, rows) if y.size else ()
        tile = Jacobian(parameters, space, y, blocks, coverage, self._source.dtype)
        return (tile if self._names is None else tile.columns(self._names))._widened(self.dtype)

    def _within(self, memory: int | None) -> TiledJacobian:
        return self if memory is None else self._with(memory=memory)

    def _least_tile(self, dtype: np.dtype[Any]) -> int:
        return self._widened(dtype).footprint.combined(self.l).need(1, 1)  # of any verb, adjoint products included

    def _widened(self, dtype: np.dtype[Any]) -> TiledJacobian:
        return self if np.can_cast(dtype, self.dtype) else self._with(dtype=dtype)

    def _add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        if u.shape[2] < self.l:
            self._add_combined(u, out)
        else:
            super()._add_adjoint(u, out)

    def _add_combined(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        """The same by one backward pass for each of the q columns, instead of l: the columns are combinations of rows.

        They are brought to a largest entry of 1, for the network may compute in a narrower type.
        """
        largest = np.abs(u).max(axis=(0, 1), initial=0)
        size = np.where(largest > 0, largest, 1).astype(u.dtype)
        for _, columns, tile in self.scaled((u / size).transpose(0, 2, 1)).tiles():
            units = np.broadcast_to(np.eye(tile.l, dtype=tile.dtype), (tile.n, tile.l, tile.l))
            part = np.zeros((self.m, tile.l), out.dtype)
            tile._add_adjoint(units, part)
            out[:, columns] += part * size[columns]

    # ---- parts of it

    def _columns(self, space: ParameterSpace, positions: Sequence[int]) -> TiledJacobian:
        return self._with(names=space.names)

    def _samples(self, index: slice | NDArray[np.intp]) -> Jacobian | TiledJacobian:
        B = self._combinations
        part = self._with(y=self.y[index], samples=self._sample[index], combinations=None if B is None else B[index])
        return part.held()

    def _scaled(self, b: NDArray[Any], y: NDArray[Any], space: OutputSpace) -> Jacobian | TiledJacobian:
        if self._combinations is not None:
            b = b @ self._combinations.astype(b.dtype, copy=False)
        return self._with(y=y, output_space=space, dtype=b.dtype, combinations=b).held()


def _named(samples: int, outputs: int) -> str:
    return f"a tile of {samples} samples × {outputs} outputs"
