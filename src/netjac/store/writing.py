"""Saving a Jacobian: written beside its place tile by tile, resumed if need be, and renamed when it is whole."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, overload

from netjac import planning
from netjac.errors import DtypeError
from netjac.layout import Layout, parse
from netjac.operator import JacobianOperator
from netjac.store import beginning, identity, manifest, places
from netjac.store.backend import files
from netjac.store.tilewise import TileWriter

MEMORY = "512 MiB"
"""What the factors of a model's Jacobian may take while it is saved, where nothing is said."""


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
    progress: bool = False,
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
    progress: bool = False,
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
    progress: bool = False,
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
        The model's inputs, as for `netjac.jacobian`. Left out for a Jacobian: ``save(J, path)``.
    path
        Of the store, a folder; usually called ``*.zarr``.
    layout : str
        ``"factored"``: the factors of each layer, small, and all that the verbs need. Or letters n, l and m as for
        `Jacobian.to_array`: the explicit array, called ``jacobian`` in the store, for any reader of Zarr.
    memory : number of bytes or str, optional
        Most memory for the factors while a model's Jacobian is computed; by default 512 MiB. No chunk is larger than a
        quarter of it, or than 16 MiB.
    compression : {"zstd", "gzip", "blosc"}, optional
        By default none: random-looking numbers hardly shrink.
    overwrite : bool
        Whether a store at ``path`` that holds something else is replaced (it stays until the new one is whole), and
        one begun for something else is begun anew.
    progress : bool
        Whether to show a bar (tqdm) where standard error is a terminal.

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
    budget = planning.memory_bytes(MEMORY if memory is None else memory)
    compressors = files().codecs(compression)  # refused before any work
    arrangement = None if layout == "factored" else parse(layout)
    asked = {
        "identity": identity.of(source, data),
        "layout": layout if arrangement is None else _pattern(arrangement),
        "compression": compression,
    }
    target = Path(path).absolute()
    if beginning.is_there(target, asked, overwrite):
        return
    partial = places.partial_of(target)
    partial.mkdir(parents=True, exist_ok=True)
    with manifest.Journal(partial / manifest.JOURNAL) as journal:
        start = beginning.begun(partial, asked, overwrite)
        if start is None:
            journal.clear()
            places.empty(partial, manifest.JOURNAL)
        if not (partial / manifest.MANIFEST).exists():
            if isinstance(source, JacobianOperator):
                J = source
            else:
                J = identity.jacobian(source, data, budget)
            if start is None:
                manifest.write_sealed(partial / manifest.START, beginning.start(J, asked, arrangement, budget))
                start = manifest.read_sealed(partial / manifest.START)  # as a later run will find it
            TileWriter(J, start, partial, journal, compressors, progress).run()
    for name in (manifest.START, manifest.JOURNAL):
        (partial / name).unlink(missing_ok=True)
    places.take_its_place(target)


def _pattern(layout: Layout) -> str:
    return " ".join(axis[0] if len(axis) == 1 else f"({' '.join(axis)})" for axis in layout.axes)
