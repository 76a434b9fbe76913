"""The only file that imports Zarr: arrays that are made, and stores that take checksums of what goes in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.codec import Codec
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.storage import LocalStore, WrapperStore

from netjac.errors import DataError, StoreError
from netjac.store.manifest import digest

VERSION = zarr.__version__


def codecs(compression: str | None) -> list[Codec]:
    """What a chunk's bytes go through; the checksum at the end is one that every reader of Zarr checks."""
    known: dict[str | None, list[Codec]] = {
        None: [],
        "zstd": [ZstdCodec(level=3)],
        "gzip": [GzipCodec(level=5)],
        "blosc": [BloscCodec(cname="zstd", clevel=5)],
    }
    if compression not in known:
        raise DataError(f"compression must be None, 'zstd', 'gzip' or 'blosc', and is {compression!r}.")
    return [*known[compression], Crc32cCodec()]


class Recording(WrapperStore[LocalStore]):
    """A local store that keeps the checksum and the size of each object given to it, until they are taken."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self._written: dict[str, tuple[str, int]] = {}

    async def set(self, key: str, value: Any) -> None:
        """Store ``value``, and note its checksum."""
        data = value.as_buffer_like()
        found = digest(data), len(data)
        await self._store.set(key, value)
        self._written[key] = found

    def take(self) -> dict[str, tuple[str, int]]:
        """What has been written since the last call, by key."""
        written, self._written = self._written, {}
        return written


class Verified(WrapperStore[LocalStore]):
    """A local store whose objects must be those in ``known`` (key → checksum and size)."""

    def __init__(self, store: LocalStore, known: Mapping[str, Sequence[Any]]) -> None:
        super().__init__(store)
        self._known = known

    def _with_store(self, store: LocalStore) -> Self:
        return type(self)(store, self._known)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """The object whole, checked, whatever part of it is asked for."""
        expected = self._known.get(key)
        if expected is None or byte_range is not None:
            return await self._store.get(key, prototype, byte_range)
        value = await self._store.get(key, prototype)
        if value is None:
            problem = "is missing"
        elif len(value) != expected[1]:
            problem = f"has {len(value)} bytes, and had {expected[1]} when it was written"
        elif digest(value.as_buffer_like()) != expected[0]:
            problem = "has changed since it was written (its checksum differs)"
        else:
            return value
        raise StoreError(
            f"the chunk {key!r} of {self._store.root} {problem}; restore that file from a copy, or save again with "
            "overwrite=True. Nothing was computed from it."
        )


def writable(path: Path) -> tuple[zarr.Group, Recording]:
    """The group at ``path``, made if it is not there, and the store beneath."""
    store = Recording(LocalStore(path))
    return zarr.open_group(store, mode="a", zarr_format=3), store


def readable(path: Path, known: Mapping[str, Sequence[Any]]) -> zarr.Group:
    """The group at ``path``; every chunk is checked when it is read."""
    return zarr.open_group(Verified(LocalStore(path, read_only=True), known), mode="r", zarr_format=3)


def make(
    group: zarr.Group,
    name: str,
    shape: Sequence[int],
    dtype: str,
    chunks: Sequence[int],
    axes: Sequence[str],
    compressors: list[Codec],
    attributes: Mapping[str, Any] | None = None,
) -> zarr.Array[Any]:
    """A new array; what was there under its name is dropped. Chunks not yet written read as NaN, integers as -1."""
    return group.create_array(
        name,
        shape=tuple(shape),
        dtype=dtype,
        chunks=tuple(max(1, min(size, most)) for size, most in zip(chunks, shape, strict=True)),
        compressors=cast(Any, compressors),
        filters=None,
        dimension_names=tuple(axes),
        fill_value=np.nan if np.dtype(dtype).kind == "f" else -1,
        attributes=dict(attributes or {}),
        config={"write_empty_chunks": True},
        overwrite=True,
    )


def array(group: zarr.Group, name: str) -> zarr.Array[Any]:
    """One that is there."""
    found = group[name]
    assert isinstance(found, zarr.Array), name
    return found


def read(source: zarr.Array[Any], index: tuple[Any, ...]) -> NDArray[Any]:
    """Some of an array: ranges, or positions along an axis."""
    if all(isinstance(along, slice) for along in index):
        return np.asarray(source[index])
    return np.asarray(source.oindex[index])
