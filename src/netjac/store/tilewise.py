"""The tiles of a Jacobian, written one after the other; each is noted in the journal once it is on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.errors import StoreError
from netjac.jacobian import Jacobian
from netjac.layout import parse
from netjac.progress import Progress, Shown
from netjac.store import chunks, manifest, places, records
from netjac.store.backend import files
from netjac.store.subject import Subject, refuse_not_finite


class TileWriter:
    """One run over the tiles that are not on disk yet.

    Parameters
    ----------
    subject
        What to write.
    start
        What `netjac.store.beginning.start` settled, perhaps in an earlier run.
    partial
        Where to write.
    journal
        What is on disk; is added to.
    compressors
        Of the chunks.
    progress
        Where to show how far it is.
    """

    def __init__(
        self,
        subject: Subject,
        start: dict[str, Any],
        partial: Path,
        journal: manifest.Journal,
        compressors: list[Any],
        progress: Shown,
    ) -> None:
        self._subject, self._start, self._partial, self._journal = subject, start, partial, journal
        self._compressors, self._progress = compressors, progress
        self._sizes, self._steps = start["sizes"], start["steps"]
        self._layout = None if start["layout"] == "factored" else parse(start["layout"])
        self._units = chunks.units(self._sizes, self._steps)
        self._files = files()
        self._structures: dict[str, list[dict[str, Any]]] = {}
        self._arrays: dict[str, Any] = {}
        self._on_disk: dict[str, Any] = {}
        self._done: set[int] = set()

    def run(self) -> None:
        """Write what is missing, and then the manifest."""
        self._read_journal()
        self._group, self._recording = self._files.writable(self._partial)
        try:
            self._make_arrays()
            with Progress("save", self._sizes["n"] * self._sizes["l"], self._progress) as shown:
                for i, (samples, outputs) in enumerate(self._units):
                    if i not in self._done:
                        self._write(i, samples, outputs)
                    shown.add((samples.stop - samples.start) * (outputs.stop - outputs.start))
            places.settle(self._partial)
            whole = {"structures": self._structures, "files": self._on_disk}
            manifest.write_sealed(self._partial / manifest.MANIFEST, self._start | whole)
        except BaseException as error:
            error.add_note(
                f"{self._partial} keeps {len(self._done)} of {len(self._units)} tiles; "
                "the same call goes on after them."
            )
            raise

    # ---- what earlier runs left

    def _read_journal(self) -> None:
        """Take over what is noted and there; a file that is missing or cut short takes its tile's note with it."""
        entries = self._journal.entries
        made = [entry for entry in entries if "unit" not in entry]
        if not made or not all(self._is_whole(entry) for entry in made):
            self._journal.clear()
            places.empty(self._partial, manifest.START, manifest.JOURNAL)
            return
        for entry in entries:
            if "unit" not in entry:
                self._structures |= entry["structures"]
            elif self._is_whole(entry):
                self._done.add(entry["unit"])
            else:
                continue
            self._on_disk |= entry["files"]

    def _is_whole(self, entry: Mapping[str, Any]) -> bool:
        for key, (_, size) in entry["files"].items():
            path = self._partial / key
            if not path.exists() or path.stat().st_size != size:
                return False
        return True

    # ---- one step: chunks, then the note of them

    def _note(self, entry: dict[str, Any]) -> None:
        written = self._recording.take()
        for key in written:
            manifest.sync(self._partial / key)
        self._journal.append(entry | {"files": written})
        self._on_disk |= written

    def _make(self, name: str, shape: Any, dtype: Any, steps: Any, axes: Any, **attributes: Any) -> None:
        self._files.make(self._group, name, shape, dtype, steps, axes, self._compressors, attributes)

    def _make_arrays(self) -> None:
        """The arrays that do not depend on how the blocks look."""
        if self._on_disk:
            return
        self._group.require_group(manifest.MANIFEST.partition("/")[0])
        sizes, steps, dtype = self._sizes, self._steps, self._start["dtype"]
        self._make("y", (sizes["n"], sizes["l"]), self._subject.like.y.dtype.str, (steps["n"], steps["l"]), "nl")
        if self._layout is not None:
            self._make(
                "jacobian",
                self._layout.shape(**sizes),
                dtype,
                self._layout.shape(**steps),
                chunks.axis_names(self._layout),
                layout=self._layout.pattern,
                sizes=sizes,
                parameters=self._start["parameters"],
                outputs=self._start["outputs"],
            )
        self._note({"structures": {}})

    def _write(self, i: int, samples: slice, outputs: slice) -> None:
        tile = self._subject.rows(samples, outputs)
        if self._layout is None:
            found = [records.record(block, records.prefix(b)) for b, block in enumerate(tile.blocks)]
            arrays = {name: array for record in found for name, array in record.arrays.items()}
            refuse_not_finite(samples, {"y": tile.y} | arrays)
            place = outputs.start // self._steps["l"]
            self._settle(place, found, outputs.stop - outputs.start)
            for name, array in arrays.items():
                self._put(records.location(place, name), (samples, *[slice(None)] * (array.ndim - 1)), array)
        else:
            self._write_explicit(tile, samples, outputs)
        self._put("y", (samples, outputs), tile.y)
        self._note({"unit": i})
        self._done.add(i)

    def _put(self, name: str, index: Any, values: NDArray[Any]) -> None:
        if name not in self._arrays:
            self._arrays[name] = self._files.array(self._group, name)
        self._arrays[name][index] = values

    def _write_explicit(self, tile: Jacobian, samples: slice, outputs: slice) -> None:
        assert self._layout is not None
        sizes, layout = self._sizes, self._layout
        parts = chunks.ranges(sizes["m"], self._steps["m"])
        explicit = tile.to_array(layout.pattern)
        refuse_not_finite(samples, {"y": tile.y, "the Jacobian": layout.view(explicit, tile.n, tile.l, tile.m)})
        by_letter = layout.view(explicit, tile.n, tile.l, tile.m)
        for part in parts:
            values = explicit
            if len(parts) > 1:
                values = np.empty(layout.shape(tile.n, tile.l, part.stop - part.start), explicit.dtype)
                layout.view(values, tile.n, tile.l, part.stop - part.start)[...] = by_letter[..., part]
            index = chunks.selection(layout, sizes, {"n": samples, "l": outputs, "m": part})
            self._put("jacobian", index, values)

    def _settle(self, place: int, found: list[records.Record], l: int) -> None:
        """The arrays of one range of outputs: made with its first tile; later tiles must look the same."""
        structures = [record.structure for record in found]
        known = self._structures.get(str(place))
        if known is not None:
            if manifest.canonical(known) != manifest.canonical(structures):
                raise StoreError(
                    "the factors of some samples have another form than those of the samples before, and do not fit "
                    'into one array; save the explicit Jacobian instead, layout="n l m".'
                )
            return
        self._recording.take()  # of a tile that was not noted
        for i, record in enumerate(found):
            for name, (axes, shape, dtype) in records.arrays_of(record.structure).items():
                steps = (self._steps["n"], *shape)
                named = [axis if axis in "nl" else f"{axis}_{i}" for axis in axes]
                self._make(records.location(place, name), (self._sizes["n"], *shape), dtype, steps, named)
            for name, array in record.constants.items():
                where = records.location(place, name)
                self._make(where, array.shape, array.dtype.str, array.shape, [name])
                self._put(where, (slice(None),), array)
        self._structures[str(place)] = structures
        self._note({"structures": {str(place): structures}})
