"""Saving a Jacobian: written beside its place tile by tile, resumed if need be, and renamed when it is whole."""

from __future__ import annotations

from os import PathLike
from typing import Any, overload

from netjac import api, planning
from netjac.data import Sliced
from netjac.data import source as data_set
from netjac.errors import DtypeError
from netjac.layout import Layout, parse
from netjac.operator import JacobianOperator
from netjac.progress import Shown, hidden
from netjac.store import beginning, identity, manifest, places, subject
from netjac.store.backend import files
from netjac.store.tilewise import TileWriter

MEMORY = "256 MiB"
"""What the factors of a model's Jacobian may take while it is saved, where nothing is said."""


FEW = 4
"""Samples at which a network is traced."""


@overload
def save(
    source: JacobianOperator,
    data: str | PathLike[str],
    path: None = None,
    *,
    layout: str = "factored",
    memory: float | str | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    progress: Shown = None,
) -> None: ...


@overload
def save(
    source: Any,
    data: Any = None,
    path: str | PathLike[str] | None = None,
    *,
    layout: str = "factored",
    memory: float | str | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    progress: Shown = None,
) -> None: ...


def save(
    source: Any,
    data: Any = None,
    path: Any = None,
    *,
    layout: str = "factored",
    memory: float | str | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    progress: Shown = None,
) -> None:
    """Write a Jacobian to disk, as a Zarr store that `netjac.open` turns into a Jacobian again.

    It is written tile by tile into ``<path>.partial`` and renamed to ``path`` when it is whole. Interrupted in any way,
    the same call goes on after the last tile that is on disk; called once more when all is done, it does nothing.

    Parameters
    ----------
    source
        A model, as for `netjac.jacobian`; or a Jacobian (of `netjac.jacobian` with options of its own, or of
        `netjac.open`, to write it in another layout).
    data
        The model's inputs, as for `netjac.jacobian`, of any size: arrays with a shape and slices (NumPy's, memory maps,
        of Zarr or HDF5), or a dict, list or tuple of them, read slice by slice. Left out for a Jacobian:
        ``save(J, path)``.
    path
        Of the store, a folder; usually called ``*.zarr``.
    layout : str
        ``"factored"``: the factors of each layer, small, and all that the verbs need. Or letters n, l and m as for
        `Jacobian.to_array`: the explicit array, called ``jacobian`` in the store, for any reader of Zarr.
    memory : number of bytes or str, optional
        Most memory for the factors while a model's Jacobian is computed; by default 256 MiB. No chunk is larger than a
        quarter of it, or than 16 MiB.
    compression : {"zstd", "gzip", "blosc"}, optional
        By default none: random-looking numbers hardly shrink.
    overwrite : bool
        Whether a store at ``path`` that holds something else is replaced (it stays until the new one is whole), and
        one begun for something else is begun anew.
    progress : bool or text stream, optional
        Where to show how far it is, once it has taken a second: by default on standard error if that is a terminal;
        False, nowhere; True, whatever standard error is.

    Raises
    ------
    StoreError
        ``path`` holds another Jacobian, or one begun there is of another model, other data or another layout; it is
        being written by another process; it is no store of netjac's (never overwritten); or it is damaged.
    DataError
        Values that are not finite; the message says in which samples. Or ``compression`` is not known.
    OSError
        The disk is full, or the like. What is on disk is kept.
    LayoutError, DtypeError, MemoryBudgetError
        A layout that is none, or for which chunks would be tiny; arguments that do not belong together; too little
        memory for one row.
    ImportError
        Zarr is not installed.

    Examples
    --------
    ::

        nj.save(model, x, "jac.zarr", layout="(l m) n", memory="2 GiB")
        J = nj.open("jac.zarr")
        zarr.open("jac.zarr")["jacobian"]  # (l*m, n), one column a sample
    """
    if isinstance(source, JacobianOperator) and path is None:
        data, path = None, data
    if not isinstance(path, str | PathLike):
        raise DtypeError(f"netjac.save needs the path of the store, and got {type(path).__name__}.")
    if isinstance(source, JacobianOperator) and data is not None:
        raise DtypeError("a Jacobian has its data already: netjac.save(J, path), or netjac.save(model, data, path).")
    target = places.local(path)
    hidden(progress)  # refused before any work, as is all that follows here
    budget = planning.memory_bytes(MEMORY if memory is None else memory)
    compressors = files().codecs(compression)
    arrangement = None if layout == "factored" else parse(layout)
    given = None if isinstance(source, JacobianOperator) else _sliced(data)
    asked = {
        "identity": _identity(source, given),
        "layout": layout if arrangement is None else _pattern(arrangement),
        "compression": compression,
    }
    if beginning.is_there(target, asked, overwrite):
        return
    partial = places.partial_of(target)
    partial.mkdir(parents=True, exist_ok=True)
    with manifest.Journal(partial / manifest.JOURNAL) as journal, places.left_clean(partial):
        start = beginning.begun(partial, asked, overwrite)
        if start is None:
            journal.clear()
            places.empty(partial, manifest.JOURNAL)
        if not (partial / manifest.MANIFEST).exists():
            rows = subject.of_jacobian(source) if given is None else subject.of_model(source, given, budget)
            if start is None:
                manifest.write_sealed(partial / manifest.START, beginning.start(rows, asked, arrangement, budget))
                start = manifest.read_sealed(partial / manifest.START)  # as a later run will find it
            TileWriter(rows, start, partial, journal, compressors, progress).run()
    for name in (manifest.START, manifest.JOURNAL):
        (partial / name).unlink(missing_ok=True)
    places.take_its_place(target)


def _sliced(data: Any) -> Sliced:
    given = data_set(data)
    if not isinstance(given, Sliced):
        raise DtypeError(
            "netjac.save goes on after an interruption, so it needs data of which it can read any part: arrays with a "
            f"shape and slices, or a structure of them, and got {type(data).__name__}. Write batches to an array on "
            "disk first, with numpy.lib.format.open_memmap or zarr.create_array."
        )
    return given


def _identity(source: Any, data: Sliced | None) -> dict[str, str]:
    if data is None:
        return {"jacobian": identity.of_jacobian(source)}
    model = api._tensorflow().model_checksum(source, data[slice(0, FEW)].x)
    return {"model": model, "data": identity.of_data(data)}


def _pattern(layout: Layout) -> str:
    return " ".join(axis[0] if len(axis) == 1 else f"({' '.join(axis)})" for axis in layout.axes)
