"""A network and its data on a cluster: pickled once, cut into tiles, each tile with a home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import dask.array
import numpy as np
from numpy.typing import ArrayLike

from netjac import api, data, planning
from netjac.distributed import worker
from netjac.distributed.cluster import Cluster, Homes
from netjac.distributed.tiles import Held
from netjac.errors import DataError, DtypeError, ModelError
from netjac.jacobian import Jacobian
from netjac.optimize import names
from netjac.optimize.options import OptionError
from netjac.spaces import ParameterSpace

TILE_BYTES = "256 MiB"
"""Most bytes of a tile's factors, unless told otherwise."""

LOOK = 16
"""Samples that are looked at before the data are cut."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A network and its data on a cluster."""

    cluster: Cluster
    homes: Homes
    network: Any  # a future
    parameters: ParameterSpace
    look: Jacobian  # of a few samples
    samples: list[slice]
    x: list[Any]  # futures
    given: list[Any] | None  # likewise: what came beside x

    @property
    def n(self) -> int:
        """Samples."""
        return self.samples[-1].stop

    def each(self, function: Callable[..., Any], *given: Any) -> Held:
        """``function(network, x, *given, samples)`` of each tile; lists in ``given`` are one a tile."""
        homes = self.homes.now()
        tiles = [
            self.cluster.submit(
                function,
                self.network,
                self.x[i],
                *(part[i] if isinstance(part, list) else part for part in given),
                samples,
                home=homes[i],
            )
            for i, samples in enumerate(self.samples)
        ]
        return Held(self.cluster, tiles, list(self.samples), homes)

    def vector(self, values: ArrayLike) -> Any:
        """A vector on the workers, by a task, so that it outlives the one it is on."""
        return self.cluster.submit(np.array, np.array(values))


def place(
    model: Any,
    x: Any,
    given: Any,
    client: Any,
    tiles: int | None,
    memory: float | str,
    variables: Any,
    trainable: Any,
    dtype: str | None,
    build: Callable[[], Any] | None,
) -> Placed:
    """Send a network and its data to a cluster; arguments as of `netjac.distributed.jacobian`.

    ``given`` is None or a tuple of more arrays (n, ...), cut as x is.
    """
    if tiles is not None and (isinstance(tiles, bool) or not isinstance(tiles, int | np.integer) or tiles < 1):
        raise OptionError(f"tiles must be a positive whole number or None, and is {tiles!r}.")
    budget = planning.memory_bytes(memory)
    cluster = Cluster(client)
    network = _pickled(model, variables, trainable, dtype, build)
    if model is None:
        assert build is not None
        model, variables = worker.made_by(build)
    own = api.parameters(model, variables)
    x = data.mapped(_leaf, x)
    given = None if given is None else tuple(data.mapped(_leaf, part) for part in given)
    n = data.sample_count(x)
    if n == 0:
        raise DataError("x holds no samples.")
    for leaf in data.leaves(given):
        if leaf is not None and (not leaf.shape or leaf.shape[0] != n):
            raise DataError(f"x has {n} samples, and y or weights have the shape {tuple(leaf.shape)}.")

    shipped = cluster.submit(worker.Network, network.pickled, network.built, network.trainable, network.dtype)
    some = slice(0, min(n, LOOK))
    look = cluster.client.gather(cluster.submit(worker.first_look, shipped, _cut(cluster, x, [some], [None])[0]))
    samples = _tiles(n, x, tiles, max(1, look.nbytes // look.n), budget, len(cluster.slots()))
    homes = Homes(cluster, len(samples))
    places: Sequence[str | None] = homes.now()
    return Placed(
        cluster,
        homes,
        shipped,
        _live(own, look.parameters, trainable),
        look,
        samples,
        _cut(cluster, x, samples, places),
        None if given is None else _cut(cluster, given, samples, places),
    )


def _pickled(model: Any, variables: Any, trainable: Any, dtype: str | None, build: Any) -> worker.Network:
    if model is None and build is None:
        raise OptionError("give a model, or build=, a function that returns one.")
    try:
        content = cloudpickle.dumps((model, variables) if build is None else (build, None))
    except Exception as error:  # whatever an object's own pickling raises
        what = "the model" if build is None else "the function build"
        raise ModelError(
            f"{what} cannot travel to the workers, for pickling it fails ({type(error).__name__}: {error}). Give "
            "build=, a function without arguments that makes the model on each worker and refers to nothing that "
            "cannot be pickled."
        ) from error
    return worker.Network(content, build is not None, trainable, dtype)


def _live(own: ParameterSpace, found: ParameterSpace, trainable: Any) -> ParameterSpace:
    """The model's variables here, as the columns of what the workers compute."""
    if trainable is not None:
        own, _ = own.select([own.names[i] for i in names.chosen(own, trainable)])
    if own.shapes != found.shapes:
        raise ModelError(
            f"the model on the workers has parameters of shapes {found.shapes}, and the one here {own.shapes}: build= "
            "must make the same model each time."
        )
    segments = [replace(a, dtype=b.dtype) for a, b in zip(own.segments, found.segments, strict=True)]
    return ParameterSpace(segments, own.variables)


# ---- data


def _leaf(value: Any) -> Any:
    """An array in a form whose slices can travel."""
    if isinstance(value, str | Path):
        value = _opened(Path(value))
    if isinstance(value, np.memmap) and value.flags.c_contiguous and value.filename is not None:
        whole = value
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        offset = whole.offset + value.ctypes.data - whole.ctypes.data
        return worker.MappedFile(str(Path(value.filename).absolute()), value.dtype, value.shape, offset)
    if isinstance(value, dask.array.Array) and value.ndim and np.isnan(value.shape[0]):
        raise DataError("a Dask array of unknown length was given: call its compute_chunk_sizes() first.")
    if isinstance(value, np.ndarray | dask.array.Array):
        return value
    if hasattr(value, "shape") and hasattr(value, "__getitem__") and not hasattr(value, "numpy"):
        return _reference(worker.Stored(value, slice(0, int(value.shape[0]))))
    return np.asarray(value)


def _reference(stored: worker.Stored) -> worker.Stored:
    try:
        cloudpickle.dumps(stored)
    except Exception as error:  # whatever an object's own pickling raises
        raise DtypeError(
            f"a {type(stored.array).__name__} cannot travel to the workers ({type(error).__name__}: {error}). Give a "
            "NumPy or Dask array, or the path of a .npy file or of a Zarr array."
        ) from error
    return stored


def _opened(path: Path) -> Any:
    if not path.exists():
        raise DataError(f"there is no file or folder {path}; its path must be the same here and on the workers.")
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r")
    if path.is_dir():
        import zarr

        found = zarr.open(str(path.absolute()), mode="r")
        if hasattr(found, "shape"):
            return found
    raise DtypeError(f"{path} is neither a .npy file nor the folder of a Zarr array.")


def _cut(cluster: Cluster, structure: Any, samples: Sequence[slice], homes: Sequence[str | None]) -> list[Any]:
    """The samples of each tile as futures, read or computed on the workers."""
    computed: dict[int, list[Any]] = {}  # all tiles of a Dask array at once: a chunk that two tiles share is one task
    for leaf in data.leaves(structure):
        if isinstance(leaf, dask.array.Array):
            computed[id(leaf)] = cluster.client.compute([leaf[tile] for tile in samples])

    def parts(i: int) -> Any:
        return data.mapped(
            lambda leaf: computed[id(leaf)][i] if id(leaf) in computed else _part(leaf, samples[i]), structure
        )

    return [cluster.submit(worker.read, parts(i), samples[i], home=home) for i, home in enumerate(homes)]


def _part(leaf: Any, samples: slice) -> Any:
    return np.ascontiguousarray(leaf[samples]) if isinstance(leaf, np.ndarray) else leaf[samples]


def _tiles(n: int, x: Any, count: int | None, sample_bytes: int, budget: int, slots: int) -> list[slice]:
    if count is not None:
        return planning.row_tiles(n, int(count))
    first = data.leaves(x)[0]
    if isinstance(first, dask.array.Array):
        borders = np.cumsum([0, *(size for size in first.chunks[0] if size)])
        return [slice(int(a), int(b)) for a, b in pairwise(borders)]
    return planning.tiles(n, sample_bytes, budget, at_least=slots)
