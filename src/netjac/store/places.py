"""Where a store is written, and how it takes its place: under another name until it is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from netjac.store import manifest


def partial_of(target: Path) -> Path:
    """Where what is to be ``target`` is written."""
    return target.with_name(target.name + ".partial")


def replaced_by(target: Path) -> Path:
    """Where the store that ``target`` replaces is for a moment."""
    return target.with_name(target.name + ".replaced")


def take_its_place(target: Path) -> None:
    """Rename the whole store beside ``target`` to ``target``; an older one there is removed after that."""
    old = replaced_by(target)
    if target.exists():
        remove(old)
        target.rename(old)
    partial_of(target).rename(target)
    manifest.sync(target.parent)
    remove(old)


def remove(path: Path) -> None:
    """Delete a folder, if it is there."""
    if path.exists():
        shutil.rmtree(path)


def sync_folders(path: Path) -> None:
    """Let the names of all files below ``path`` reach the disk."""
    for folder in [path, *(inner for inner in path.rglob("*") if inner.is_dir())]:
        manifest.sync(folder)
