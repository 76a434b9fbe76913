"""The Jacobian whose factors are on the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self, final

import dask
import dask.array
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from netjac import arguments, planning
from netjac.distributed import worker
from netjac.distributed.cluster import Cluster
from netjac.errors import DataError, PicklingError
from netjac.jacobian import Jacobian
from netjac.kronecker import Layer, unpacked
from netjac.layout import parse
from netjac.operator import JacobianOperator
from netjac.sites import Coverage
from netjac.spaces import OutputSpace, ParameterSpace


@dataclass(frozen=True, eq=False)
class Held:
    """Tiles on the workers, and which rows of the Jacobian they are."""

    cluster: Cluster
    tiles: list[Any]
    samples: list[slice]
    homes: Sequence[str | None]  # where each is, unless that died; None where it was not placed

    def each(self, verb: Callable[..., Any], *given: Any) -> list[Any]:
        """Futures of a verb of each tile; lists in ``given`` are one a tile."""
        return [
            self.cluster.submit(
                worker.run, verb, tile, *(p[i] if isinstance(p, list) else p for p in given), home=self.homes[i]
            )
            for i, tile in enumerate(self.tiles)
        ]

    def total(self, verb: Callable[..., Any], *given: Any) -> NDArray[np.float64]:
        """The sum of what a verb returns."""
        return self.cluster.total(self.each(verb, *given))

    def first(self, verb: Callable[..., Any], *given: Any) -> Any:
        """What a verb of the first tile returns."""
        task = self.cluster.submit(worker.run, verb, self.tiles[0], *given, home=self.homes[0])
        return self.cluster.gather([task])[0]

    def cut(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """Rows (n, ...), one part a tile."""
        return [rows[samples] for samples in self.samples]


@final
class DistributedJacobian(JacobianOperator):
    """A `netjac.Jacobian` whose factors are on the workers of a Dask cluster; made by `jacobian` or `evaluator`.

    The verbs are those of `netjac.Jacobian`, with arguments and results on the client. J v, Jᵀ u, Jᵀ J, norms and
    `to_array` are computed where the tiles are, by the threads that Dask gives each worker; ``threads=`` is of `gram`
    alone. `gram`, `lstsq` with fewer rows than columns, and `tiles` bring the factors to the client, tile by tile.

    Parameters
    ----------
    held
        The tiles.
    parameters, output_space, y, coverage, dtype
        As for `netjac.Jacobian`.

    Attributes
    ----------
    shape, dtype, n, l, m, y, parameters, output_space, coverage
        As of `netjac.Jacobian`.
    """

    def __init__(
        self,
        held: Held,
        parameters: ParameterSpace,
        output_space: OutputSpace,
        y: ArrayLike,
        coverage: Coverage,
        dtype: DTypeLike,
    ) -> None:
        super().__init__(parameters, output_space, y, coverage, dtype)
        self._held = held

    def __repr__(self) -> str:
        return (
            f"<DistributedJacobian of {self.n} samples × {self.l} outputs with respect to {self.m} parameters: shape "
            f"{self.shape}, {self.dtype}, {len(self._held.tiles)} tiles>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        raise PicklingError(
            "a DistributedJacobian is made of what a cluster holds and cannot be pickled: save the model and theta, or "
            "an array of it (to_array, to_dask)."
        )

    # ---- tiles

    def _grid(self) -> Sequence[tuple[slice, slice]]:
        return [(samples, slice(0, self.l)) for samples in self._held.samples]

    def _tile(self, samples: slice, outputs: slice) -> Jacobian:
        i = self._held.samples.index(samples)
        task = self._held.cluster.submit(worker.run, worker.jacobian, self._held.tiles[i])
        [found] = self._held.cluster.gather([task])
        tile: Jacobian = found._widened(self.dtype)
        return tile

    def _widened(self, dtype: np.dtype[Any]) -> Self:
        if np.can_cast(dtype, self.dtype):
            return self
        return type(self)(self._held, self.parameters, self.output_space, self.y, self.coverage, dtype)

    # ---- products

    def _add_product(self, v: NDArray[Any], out: NDArray[Any]) -> None:
        sent = self._held.cluster.submit(np.array, v)
        parts = self._held.cluster.gather(self._held.each(worker.product, sent))
        for samples, part in zip(self._held.samples, parts, strict=True):
            out[samples] += part

    def _add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        out += self._held.total(worker.adjoint, self._held.cut(u)).astype(out.dtype)

    def _normal_product(self, v: NDArray[Any], weights: NDArray[Any] | None = None) -> NDArray[Any]:
        rows = None if weights is None else self._held.cut(weights)
        sent = self._held.cluster.submit(np.array, v)
        return self._held.total(worker.normal_product, sent, rows).astype(self.dtype, copy=False)

    def _kronecker(self, weights: NDArray[np.float64] | None = None, limit: int | None = None) -> list[Layer]:
        places = self._held.first(worker.places, limit)
        rows = None if weights is None else self._held.cut(weights)
        return unpacked(self._held.total(worker.layers, rows, tuple(places)), places)

    # ---- the explicit matrix

    def _fill(self, out: NDArray[Any], threads: int) -> None:
        whole = [slice(0, s.stop - s.start) for s in self._held.samples]
        tasks = self._held.each(worker.dense, whole, "n l m", out.dtype)
        for samples, part in zip(self._held.samples, self._held.cluster.gather(tasks), strict=True):
            out[samples] = part

    def to_dask(
        self, layout: str = "(n l) m", *, dtype: DTypeLike | None = None, chunk: float | str = "128 MiB"
    ) -> Any:
        """Return the explicit Jacobian as a Dask array, its axes arranged as asked and computed chunk by chunk.

        Parameters
        ----------
        layout, dtype
            As for `netjac.Jacobian.to_array`.
        chunk : number of bytes or str
            Most that a chunk may take; a sample is never cut.

        Returns
        -------
        dask.array.Array
            Chunked along the samples. A layout in which n does not come first in its group, such as ``"(l n) m"``, is
            rechunked by Dask.

        Raises
        ------
        LayoutError, DtypeError
            As for `netjac.Jacobian.to_array`.
        """
        parsed, kind = parse(layout), arguments.floating(self.dtype if dtype is None else dtype)
        budget, sample_bytes = planning.memory_bytes(chunk), self.l * self.m * kind.itemsize
        cut = all(axis[0] == "n" for axis in parsed.axes if "n" in axis)
        apart = parsed if cut else parse(" ".join(letter for axis in parsed.axes for letter in axis))
        along = next(i for i, axis in enumerate(apart.axes) if "n" in axis)
        run = dask.delayed(worker.run, pure=False)
        parts = []
        for samples, tile in zip(self._held.samples, self._held.tiles, strict=True):
            n = samples.stop - samples.start
            for some in planning.tiles(n, sample_bytes, budget):
                shape = apart.shape(some.stop - some.start, self.l, self.m)
                value = run(worker.dense, tile, some, apart.pattern, kind)
                parts.append(dask.array.from_delayed(value, shape, kind))
        array = dask.array.concatenate(parts, axis=along)
        return array if cut else array.reshape(parsed.shape(self.n, self.l, self.m))

    # ---- algebra

    def _normal(
        self, weights: NDArray[np.float64] | None, dtype: np.dtype[Any], threads: int, work: int
    ) -> NDArray[Any]:
        rows = None if weights is None else self._held.cut(weights)
        return self._held.total(worker.normal, rows, dtype).astype(dtype, copy=False)

    def _row_squares(self) -> NDArray[Any]:
        parts = self._held.cluster.gather(self._held.each(worker.row_squares))
        return np.concatenate(parts).astype(self.dtype, copy=False)

    def _column_squares(self, weights: NDArray[np.float64] | None = None) -> NDArray[Any]:
        rows = None if weights is None else self._held.cut(weights)
        return self._held.total(worker.column_squares, rows).astype(self.dtype, copy=False)

    # ---- parts of it

    def _columns(self, space: ParameterSpace, positions: Sequence[int]) -> DistributedJacobian:
        tiles = self._held.each(worker.columns, tuple(positions))
        held, coverage = replace(self._held, tiles=tiles), self.coverage.of(space.names)
        return DistributedJacobian(held, space, self.output_space, self.y, coverage, self.dtype)

    def _samples(self, index: slice | NDArray[np.intp]) -> DistributedJacobian:
        chosen = np.arange(self.n)[index]
        if not chosen.size:
            raise DataError("a DistributedJacobian of no samples was asked for.")
        borders = [part.stop for part in self._held.samples]
        tiles, ranges, start = [], [], 0
        for tile, run in groupby(chosen, key=lambda i: int(np.searchsorted(borders, i, side="right"))):
            local = np.array(list(run)) - self._held.samples[tile].start
            tiles.append(self._held.cluster.submit(worker.run, worker.take, self._held.tiles[tile], local))
            ranges.append(slice(start, start + len(local)))
            start += len(local)
        held = Held(self._held.cluster, tiles, ranges, [None] * len(tiles))
        return DistributedJacobian(held, self.parameters, self.output_space, self.y[chosen], self.coverage, self.dtype)

    def _scaled(self, b: NDArray[Any], y: NDArray[Any], space: OutputSpace) -> DistributedJacobian:
        tiles = self._held.each(worker.scaled, self._held.cut(b))  # b travels, in tiles
        return DistributedJacobian(replace(self._held, tiles=tiles), self.parameters, space, y, self.coverage, b.dtype)
