"""A store as a Jacobian: every verb over tiles that are read from disk, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from netjac.blocks.base import Block, Placement
from netjac.blocks.dense import DenseBlock
from netjac.errors import StoreError
from netjac.jacobian import Jacobian
from netjac.layout import parse
from netjac.operator import JacobianOperator
from netjac.sites import Coverage
from netjac.spaces import OutputSpace, ParameterSpace
from netjac.store import chunks, manifest, records
from netjac.store.backend import files
from netjac.store.places import local, partial_of


class Reader:
    """The blocks of some samples and outputs of a whole store.

    Parameters
    ----------
    path
        Of the store.
    checksum : str, optional
        What that of its manifest must be: how a Jacobian that was pickled knows the store for the same.

    Raises
    ------
    StoreError
        There is no whole store at ``path``, or its manifest is damaged, or it is another store than it was.
    """

    def __init__(self, path: Path, checksum: str | None = None) -> None:
        zarr_files = files()
        if not (path / manifest.MANIFEST).exists():
            raise StoreError(_absence(path))
        self.path = path
        self.content = manifest.read_sealed(path / manifest.MANIFEST)
        self.checksum = manifest.digest(manifest.canonical(self.content).encode())
        if checksum not in (None, self.checksum):
            raise StoreError(f"{path} holds another Jacobian than it did; open it again with netjac.open.")
        self._files = zarr_files
        self._group = zarr_files.readable(path, self.content["files"])
        self.sizes: dict[str, int] = self.content["sizes"]
        self.steps: dict[str, int] = self.content["steps"]
        self.output_ranges = chunks.ranges(self.sizes["l"], self.steps["l"])
        self._constants: dict[str, NDArray[Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, (self.path, self.checksum)

    def spaces(self) -> tuple[ParameterSpace, OutputSpace, Coverage]:
        """What columns and rows are called, and what became of each variable."""
        return manifest.spaces_from_json(self.content)

    def y(self) -> NDArray[Any]:
        """All outputs (n, l)."""
        return self._read("y", (slice(None), slice(None)))

    def blocks(self, samples: NDArray[np.intp], outputs: slice) -> tuple[Block, ...]:
        """The blocks of some samples, and of one of the `output_ranges`."""
        rows = chunks.as_range(samples)
        if self.content["layout"] != "factored":
            return (self._explicit(rows, outputs),)
        place = self.output_ranges.index(outputs)
        found = []
        for i, structure in enumerate(self.content["structures"][str(place)]):
            arrays = {name: self._constant(records.location(place, name)) for name in records.constants_of(structure)}
            for name, (axes, _, _) in records.arrays_of(structure).items():
                arrays[name] = self._read(records.location(place, name), (rows, *[slice(None)] * (len(axes) - 1)))
            found.append(records.rebuild(structure, arrays, records.prefix(i)))
        return tuple(found)

    def _explicit(self, rows: slice | NDArray[np.intp], outputs: slice) -> DenseBlock:
        layout, m = parse(self.content["layout"]), self.sizes["m"]
        index = chunks.selection(layout, self.sizes, {"n": rows, "l": outputs, "m": slice(0, m)})
        n = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        values = layout.view(self._read("jacobian", index), n, outputs.stop - outputs.start, m)
        return DenseBlock(np.ascontiguousarray(values), Placement((1, m, 1), (m, 1, 1), 0, (1, m, 1)))

    def _read(self, name: str, index: tuple[Any, ...]) -> NDArray[Any]:
        array: NDArray[Any] = self._files.read(self._files.array(self._group, name), index)
        return array

    def _constant(self, name: str) -> NDArray[Any]:
        if name not in self._constants:
            self._constants[name] = self._read(name, (slice(None),))
        return self._constants[name]


def _absence(path: Path) -> str:
    if partial_of(path).exists() and not path.exists():
        return (
            f"{path} was never finished: {partial_of(path)} holds what has been written. The netjac.save that wrote "
            "it, called again, goes on from there."
        )
    if path.exists():
        return f"{path} is no store of netjac.save: it has no {manifest.MANIFEST}."
    return f"there is no store at {path}."


@final
class StoredJacobian(JacobianOperator):
    """A `netjac.Jacobian` on disk: the same verbs, each reading the store tile by tile.

    Made by `netjac.open`. One tile is in memory at a time (`gram`: two), and the outputs ``y``. Each chunk's checksum
    is compared when it is read. A tile's rows cost a pass over the disk, so that several vectors are best multiplied
    as one matrix, and ``J[samples]``, which is held in memory where it is no more than a tile, is best kept.

    It pickles as the path of the store and the checksum of its manifest.

    Parameters
    ----------
    reader
        Of the store.
    output_space, y
        As for `netjac.Jacobian`.
    samples : (n,) integers, optional
        Which of the store's samples; by default all.
    combinations : (n, q, l), optional
        What the rows are made of, where they are not the outputs themselves.
    names : sequence of str, optional
        The variables, by their full names, where not all are columns.
    dtype
        By default that of the store.

    Attributes
    ----------
    shape, dtype, n, l, m, y, parameters, output_space, coverage
        As of `netjac.Jacobian`.
    path : Path
        Of the store.

    Raises
    ------
    StoreError
        By every verb: a chunk it needs is missing or has changed; the message names it.
    """

    def __init__(
        self,
        reader: Reader,
        output_space: OutputSpace,
        y: ArrayLike,
        samples: NDArray[np.intp] | None = None,
        combinations: NDArray[Any] | None = None,
        names: Sequence[str] | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        self._whole, _, self._coverage = reader.spaces()
        chosen = self._whole if names is None else self._whole.select(names)[0]
        coverage = self._coverage if names is None else self._coverage.of(names)
        super().__init__(
            chosen, output_space, y, coverage, np.dtype(reader.content["dtype"]) if dtype is None else dtype
        )
        self._reader = reader
        self._sample = np.arange(self.n) if samples is None else samples
        self._combinations = combinations
        self._names = names

    @property
    def path(self) -> Path:
        """Where the store is."""
        return self._reader.path

    def _arguments(self) -> dict[str, Any]:
        return {
            "reader": self._reader,
            "output_space": self.output_space,
            "y": self.y,
            "samples": self._sample,
            "combinations": self._combinations,
            "names": self._names,
            "dtype": self.dtype,
        }

    def _with(self, **changes: Any) -> StoredJacobian:
        return StoredJacobian(**(self._arguments() | changes))

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredJacobian, tuple(self._arguments().values())

    def __repr__(self) -> str:
        return (
            f"<StoredJacobian of {self.n} samples × {self.l} outputs with respect to {self.m} parameters: "
            f"shape {self.shape}, {self.dtype}, {len(self._tiling)} tiles in {self.path}, "
            f"layout {self._reader.content['layout']!r}>"
        )

    @cached_property
    def _tiling(self) -> list[tuple[slice, slice]]:
        outputs = self._reader.output_ranges if self._combinations is None else [slice(0, self.l)]
        return list(product(chunks.ranges(self.n, self._reader.steps["n"]), outputs))

    def _grid(self) -> Sequence[tuple[slice, slice]]:
        return self._tiling

    def _tile(self, samples: slice, outputs: slice) -> Jacobian:
        y, reader = self.y[samples, outputs], self._reader
        whole = outputs == slice(0, self.l)
        space = self.output_space if whole else OutputSpace.flat(y.shape[1], y.dtype.name)
        blocks: list[Block] = []
        combinations = self._combinations
        if y.size and combinations is None:
            blocks += reader.blocks(self._sample[samples], outputs)
        elif y.size and combinations is not None:
            b = combinations[samples]
            for some in reader.output_ranges:
                blocks += [block.scaled(b[:, :, some]) for block in reader.blocks(self._sample[samples], some)]
        tile = Jacobian(self._whole, space, y, blocks, self._coverage, reader.content["dtype"])
        return (tile if self._names is None else tile.columns(self._names))._widened(self.dtype)

    def _held(self) -> Jacobian | StoredJacobian:
        """In memory where it is one tile."""
        one = len(self._tiling) <= 1 or not self.l
        return self._tile(slice(0, self.n), slice(0, self.l)) if one else self

    def _widened(self, dtype: np.dtype[Any]) -> StoredJacobian:
        return self if np.can_cast(dtype, self.dtype) else self._with(dtype=dtype)

    def _columns(self, space: ParameterSpace, positions: Sequence[int]) -> StoredJacobian:
        return self._with(names=space.names)

    def _samples(self, index: slice | NDArray[np.intp]) -> Jacobian | StoredJacobian:
        B = self._combinations
        part = self._with(y=self.y[index], samples=self._sample[index], combinations=None if B is None else B[index])
        return part._held()

    def _scaled(self, b: NDArray[Any], y: NDArray[Any], space: OutputSpace) -> Jacobian | StoredJacobian:
        if self._combinations is not None:
            b = b @ self._combinations.astype(b.dtype, copy=False)
        return self._with(y=y, output_space=space, dtype=b.dtype, combinations=b)._held()


def open(path: str | PathLike[str]) -> StoredJacobian:
    """Open a Jacobian that `netjac.save` wrote; nothing but its manifest and its outputs is read yet.

    Parameters
    ----------
    path
        Of the store. It may have been moved since it was written.

    Returns
    -------
    StoredJacobian
        With every verb of a `Jacobian`. Its parameters are not live: they have names and shapes, and no values.

    Raises
    ------
    StoreError
        There is no store, it was never finished, or its manifest or its outputs are damaged.
    ImportError
        Zarr is not installed.

    Examples
    --------
    ::

        J = nj.open("jac.zarr")
        step = J.lstsq(-residual, damping=1e-3)
    """
    reader = Reader(local(path))
    return StoredJacobian(reader, reader.spaces()[1], reader.y())
