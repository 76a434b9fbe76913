"""Where a store is written, and how it takes its place: under another name until it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from netjac.errors import DataError, DtypeError, StoreError
from netjac.store import manifest

_ROOT = "zarr.json"


def local(path: str | PathLike[str]) -> Path:
    """The path of a folder, absolute.

    Raises
    ------
    DtypeError
        It is no path.
    DataError
        It is an address on a network: renaming, locking and bringing to the disk are what a file system does.
    """
    if not isinstance(path, str | PathLike):
        raise DtypeError(f"the path of a store must be a str or a pathlib.Path, and is a {type(path).__name__}.")
    if "://" in str(path):
        raise DataError(
            f"a store is a folder of a file system, and {str(path)!r} is none; copy it there when it is whole."
        )
    return Path(path).absolute()


@contextmanager
def left_clean(partial: Path) -> Iterator[None]:
    """Remove the folder on an error before anything was begun in it; whoever calls holds the journal's lock."""
    try:
        yield
    except BaseException:
        if {entry.name for entry in partial.iterdir()} == {manifest.JOURNAL}:
            with suppress(OSError):  # where an open file cannot be removed it stays, and does no harm
                (partial / manifest.JOURNAL).unlink()
                partial.rmdir()
        raise


def partial_of(target: Path) -> Path:
    """Where what is to be ``target`` is written."""
    return target.with_name(target.name + ".partial")


def replaced_by(target: Path) -> Path:
    """Where the store that ``target`` replaces is for a moment."""
    return target.with_name(target.name + ".replaced")


def take_its_place(target: Path) -> None:
    """Rename the whole store beside ``target`` to ``target``; an older one there is removed after that."""
    if target.exists():
        forget_replaced(target)
        target.rename(replaced_by(target))
    partial_of(target).rename(target)
    manifest.sync(target.parent)
    forget_replaced(target)


def forget_replaced(target: Path) -> None:
    """Remove the store that ``target`` replaced, or what a crash left of it."""
    old = replaced_by(target)
    if not old.exists():
        return
    if any(old.iterdir()) and not (old / _ROOT).exists():
        raise StoreError(f"{old} is where the store that is replaced goes for a moment, and holds something else.")
    empty(old, _ROOT)  # so that it is known for a store's as long as anything is left
    shutil.rmtree(old)


def empty(path: Path, *but: str) -> None:
    """Delete all that a folder holds, but for the files called ``but``."""
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name not in but:
            entry.unlink()


def settle(path: Path) -> None:
    """Delete the halves of files that crashes left below ``path``, and let all names there reach the disk."""
    for half in path.rglob("*.partial"):  # Zarr's name for a file that is being written
        half.unlink()
    for folder in [path, *(inner for inner in path.rglob("*") if inner.is_dir())]:
        manifest.sync(folder)
