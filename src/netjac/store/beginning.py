"""What a save finds at its path, and what it settles before the first tile."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from netjac.errors import StoreError
from netjac.layout import Layout
from netjac.store import chunks, manifest, places
from netjac.store.backend import files
from netjac.store.subject import Subject

# ---- what is there already


def is_there(target: Path, asked: Mapping[str, Any], overwrite: bool) -> bool:
    """Whether what is asked for is there, whole; an error where something else is that must not be replaced."""
    if not target.exists():
        return False
    if not (target / manifest.MANIFEST).exists():
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
            return False
        raise StoreError(f"{target} exists and is no store of netjac's; it is never overwritten. Choose another path.")
    try:
        different = _differences(manifest.read_sealed(target / manifest.MANIFEST), asked)
    except StoreError:
        if overwrite:
            return False
        raise
    if different and not overwrite:
        raise StoreError(
            f"{target} holds another Jacobian ({different}); choose another path, or replace it with overwrite=True."
        )
    if not different:
        places.forget_replaced(target)
    return not different


def begun(partial: Path, asked: Mapping[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """What the store in ``partial`` was begun with, if it can be gone on with; None where to begin anew."""
    known = {manifest.JOURNAL, manifest.START, manifest.START + ".new"}
    for name in (manifest.MANIFEST, manifest.START):
        if (partial / name).exists():
            break
    else:
        strangers = sorted({entry.name for entry in partial.iterdir()} - known)
        if strangers:
            raise StoreError(f"{partial} is where to write, and holds files that are not netjac's: {strangers[:3]}.")
        return None
    try:
        start = manifest.read_sealed(partial / name)
    except StoreError:
        if overwrite:
            return None
        raise
    different = _differences(start, asked)
    if different and not overwrite:
        raise StoreError(
            f"{partial} was begun with another Jacobian ({different}), and is not gone on with; overwrite=True begins "
            "anew."
        )
    return None if different else start


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """What differs, in words; empty where nothing does."""
    words = []
    theirs, ours = found["identity"], asked["identity"]
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key) != ours.get(key):
            words.append(f"{key} changed")
    words += [
        f"{key} {found[key]!r} instead of {asked[key]!r}"
        for key in ("layout", "compression")
        if found[key] != asked[key]
    ]
    return ", ".join(words)


# ---- a new store


def start(subject: Subject, asked: Mapping[str, Any], layout: Layout | None, budget: int) -> dict[str, Any]:
    """All that is settled before the first tile."""
    like = subject.like
    sizes = chunks.by_letter(subject.n, like.l, like.m)
    most = min(chunks.CHUNK_BYTES, max(1, budget // 4))
    if layout is None:
        steps = {"n": _factored_samples(subject, most), "l": subject.tile[1], "m": max(1, like.m)}
    else:
        itemsize = like.dtype.itemsize
        steps = chunks.aligned(layout, sizes, chunks.dense_steps(sizes, subject.tile, itemsize, most))
        chunks.refuse_tiny(layout, sizes, steps, itemsize)
    return {
        **asked,
        "format": manifest.FORMAT,
        "sizes": sizes,
        "steps": steps,
        "dtype": like.dtype.name,
        **manifest.spaces_as_json(like.parameters, like.output_space, like.coverage),
        "versions": {"netjac": _version(), "zarr": files().VERSION, "numpy": np.__version__},
    }


def _factored_samples(subject: Subject, most: int) -> int:
    """Samples whose factors are no more than ``most`` bytes, and no more than a tile's."""
    if not subject.n * subject.like.l:
        return 1
    one = subject.rows(slice(0, 1), slice(0, subject.tile[1]))
    return max(1, min(subject.tile[0], most // max(1, one.nbytes)))


def _version() -> str:
    try:
        return version("netjac")
    except PackageNotFoundError:
        return "unknown"
