"""What a store says about itself: JSON with a checksum, written whole or not at all, and the journal of a save."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from netjac.errors import StoreError
from netjac.sites import Coverage, CoverageEntry, Treatment
from netjac.spaces import OutputSpace, ParameterSpace, Segment

FORMAT = 1
"""Of the files; raised when older stores can no longer be read."""

MANIFEST = "netjac/manifest.json"
"""Present in whole stores only; in a group of its own, because readers of Zarr wonder about files beside arrays."""

START = "netjac-start.json"
JOURNAL = "netjac-journal.txt"


def digest(data: Any) -> str:
    """Checksum of bytes, or of an array in C order: BLAKE2b, 128 bits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def canonical(content: Any) -> str:
    """JSON that is the same text for the same content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


# ---- files written whole


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` with its checksum: after a crash the file is there whole, or as it was before."""
    sealed = {"checksum": digest(canonical(content).encode()), "content": content}
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(json.dumps(sealed, indent=1, sort_keys=True))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync(path.parent)


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote.

    Raises
    ------
    StoreError
        The file is truncated or changed, or of a later format.
    """
    try:
        sealed = json.loads(path.read_text(encoding="utf-8"))
        content: dict[str, Any] = sealed["content"]
        damaged = sealed["checksum"] != digest(canonical(content).encode())
    except (ValueError, KeyError, TypeError):
        damaged = True
    if damaged:
        raise StoreError(
            f"{path} is truncated or damaged, so that nothing is known of the store it describes; restore it from a "
            "copy, or save again with overwrite=True."
        )
    if content.get("format") != FORMAT:
        raise StoreError(
            f"{path} is of format {content.get('format')}, and this netjac reads format {FORMAT}; "
            "read it with the netjac that wrote it."
        )
    return content


def sync(path: Path) -> None:
    """Let a file or a folder reach the disk."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Journal:
    """Which tiles have been written: one line each, added after the tile's chunks have reached the disk.

    A line that a crash cut short fails its checksum, and is dropped with all that follows it. The file is locked as
    long as it is open; the lock goes with the process, however that ends.

    Parameters
    ----------
    path
        Made if it is not there.

    Attributes
    ----------
    entries : list of dict
        What was there when it was opened.

    Raises
    ------
    StoreError
        Another process is writing the store.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        try:
            _lock(self._file)
        except OSError as error:
            self._file.close()
            raise StoreError(f"{path.parent} is being written by another process; wait for it, or end it.") from error
        self._file.seek(0)
        self.entries: list[dict[str, Any]] = []
        good = 0
        for line in self._file:
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum.decode("latin-1") != digest(text):
                break
            self.entries.append(json.loads(text))
            good += len(line)
        self._file.truncate(good)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line; on disk when this returns."""
        text = canonical(entry).encode()
        self._file.write(digest(text).encode() + b" " + text + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def clear(self) -> None:
        """Forget all lines."""
        self._file.truncate(0)
        self.entries = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _lock(file: Any) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- spaces and coverage as JSON


def spaces_as_json(parameters: ParameterSpace, outputs: OutputSpace, coverage: Coverage) -> dict[str, Any]:
    """Names, shapes and types of columns and rows, and what became of each variable."""
    return {
        "parameters": _segments_as_json(parameters.segments),
        "outputs": _segments_as_json(outputs.segments),
        "output_structure": _template_as_json(outputs.template),
        "coverage": [
            [e.variable, list(e.shape), e.treatment.value, e.operation, e.operation_type, e.reason]
            for e in coverage.entries
        ],
        "notes": list(coverage.notes),
    }


def spaces_from_json(content: Mapping[str, Any]) -> tuple[ParameterSpace, OutputSpace, Coverage]:
    """What `spaces_as_json` was given; the parameters are not live, and a named tuple of outputs is a plain tuple."""
    entries = tuple(
        CoverageEntry(variable, tuple(shape), Treatment(treatment), operation, kind, reason)
        for variable, shape, treatment, operation, kind, reason in content["coverage"]
    )
    return (
        ParameterSpace(_segments_from_json(content["parameters"])),
        OutputSpace(_segments_from_json(content["outputs"]), _template_from_json(content["output_structure"])),
        Coverage(entries, tuple(content["notes"])),
    )


def _segments_as_json(segments: tuple[Segment, ...]) -> list[dict[str, Any]]:
    return [{"name": s.name, "shape": list(s.shape), "start": s.start, "dtype": s.dtype} for s in segments]


def _segments_from_json(content: list[dict[str, Any]]) -> list[Segment]:
    return [Segment(s["name"], tuple(s["shape"]), s["start"], s["dtype"]) for s in content]


def _template_as_json(template: Any) -> Any:
    if isinstance(template, Mapping):
        return {"dict": [[key, _template_as_json(value)] for key, value in template.items()]}
    if isinstance(template, tuple | list):
        kind = "tuple" if isinstance(template, tuple) else "list"
        return {kind: [_template_as_json(value) for value in template]}
    return template


def _template_from_json(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    [(kind, values)] = content.items()
    if kind == "dict":
        return {key: _template_from_json(value) for key, value in values}
    entries = [_template_from_json(value) for value in values]
    return tuple(entries) if kind == "tuple" else entries
