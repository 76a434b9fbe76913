"""Time and memory of Jacobians of whole Keras applications: netjac's factors against each way TensorFlow has.

    python -m benchmarks.applications [--only MobileNetV2] [--way samples] [--n 8] [--cap 120] [--results FOLDER]

Every way runs in a process of its own. netjac's process stays, and takes turns with one way after the other.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import memory
from benchmarks.process import Process, WorkerError
from benchmarks.report import machine
from benchmarks.runner import START_SECONDS, relative_errors, say
from benchmarks.task import Task

APPLICATIONS = ("MobileNetV2", "EfficientNetB0", "ResNet50", "DenseNet121", "ConvNeXtTiny", "Xception")
PEERS = {
    "samples": "compiled, one sample after the other, a gradient an output",
    "samples-xla": "the same, XLA",
    "samples-tape": "compiled, one sample after the other, `tape.jacobian`",
    "vectorized": "`vectorized_map` over samples, a gradient an output",
    "vectorized-xla": "the same, XLA",
    "tape": "`tape.jacobian` of the batch",
    "tape-loop": "the same, `experimental_use_pfor=False`",
}
OWN = {"netjac": "netjac, factored", "netjac-dense": "netjac, factored and `to_array`"}
ROUNDS = 3
SLOW_SECONDS = 10.0  # ways whose call takes longer have one round
SLICE_SECONDS = 0.3
WRONG = 1e-2  # error from which a way is no peer: it computed something else


@dataclass
class Row:
    """What one way took; ``status`` says why there is nothing, if there is nothing."""

    label: str
    status: str = ""
    first: float = np.nan
    times: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    first_peak: int | None = None
    peak: int | None = None
    held: int | None = None
    error: float = np.nan
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Median time of a call after the first."""
        return median(self.times) if self.times else np.inf


class Application:
    """One application: its reference, netjac's process, and one peer at a time."""

    def __init__(self, name: str, n: int, ways: Sequence[str], cap: float, threads: int, scratch: Path) -> None:
        self._task = Task(name, n, threads, (n - 1,))
        self._ways = tuple(ways)
        self._cap = cap
        self._scratch = scratch
        self._arrays = scratch / "arrays.npz"
        with self._start("reference") as process:
            process.ask("prepare", START_SECONDS, task=self._task.to_json())
            process.ask("first", START_SECONDS)
            self._reference = self._checked(process)[0]

    def rows(self) -> Iterator[Row]:
        """netjac's row, complete when all have been given, then each other way's; only the first if it fails."""
        own = Row(OWN["netjac"])
        with self._start("netjac") as ours:
            try:
                self._warm_up(ours, own)
            except WorkerError as error:
                own.status = str(error)
            yield own
            for name in () if own.status else ("netjac-dense", *self._ways):
                row = Row({**OWN, **PEERS}[name])
                with self._start(name) as theirs:
                    try:
                        seconds = self._warm_up(theirs, row)
                        for _ in range(ROUNDS if seconds < SLOW_SECONDS else 1):
                            self._turn(ours, own, theirs, row)
                    except WorkerError as error:
                        row.status = str(error)
                yield row

    def _turn(self, ours: Process, own: Row, theirs: Process, row: Row) -> None:
        """Both, one after the other."""
        mine = ours.ask("turn", self._cap, seconds=SLICE_SECONDS)["times"]
        other = theirs.ask("turn", 2 * self._cap, seconds=SLICE_SECONDS)["times"]
        own.times += mine
        row.times += other
        row.ratios.append(median(other) / median(mine))

    def _start(self, name: str) -> Process:
        free = memory.available()
        cap = None if free is None else int(0.7 * free)
        return Process(sys.executable, "applications", name, self._task.threads, self._scratch / f"{name}.log", cap)

    def _warm_up(self, process: Process, row: Row) -> float:
        """First call, comparison, memory of a second call; the seconds of the second."""
        row.versions = process.ask("prepare", START_SECONDS, task=self._task.to_json())["versions"]
        answer = process.ask("first", self._cap)
        row.first, row.first_peak = answer["seconds"], answer["peak"]
        arrays, row.held = self._checked(process)
        row.error = max(relative_errors(arrays, self._reference).values())
        started = time.perf_counter()
        row.peak = process.ask("memory", self._cap)["peak"]
        return time.perf_counter() - started

    def _checked(self, process: Process) -> tuple[dict[str, Any], int]:
        held = process.ask("check", START_SECONDS, path=str(self._arrays))["held"]
        with np.load(self._arrays) as arrays:
            return dict(arrays), held


def table(rows: list[Row]) -> str:
    """The rows of one application in Markdown; ratios are how many times longer than netjac in the same round."""
    lines = [
        "| way | first call, s | later, s | against netjac | peak of first, MB | of later, MB | result, MB | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.status:
            first = "" if np.isnan(row.first) else f"{row.first:.1f}"
            lines.append(f"| {row.label} | {first} | {row.status} | | | | | |")
            continue
        ratio = f"{median(row.ratios):.3g} ×" if row.ratios else ""
        cells = [f"{row.first:.1f}", f"{row.seconds:.3g}", ratio]
        cells += [_megabytes(row.first_peak), _megabytes(row.peak), _megabytes(row.held), f"{row.error:.0e}"]
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(name: str, rows: list[Row]) -> str:
    """netjac against the fastest of TensorFlow's ways that are right, in one line."""
    own, peers = rows[0], [row for row in rows if row.label in PEERS.values() and row.times and row.error < WRONG]
    if own.status or not peers:
        return f"| {name} | {own.status or 'no way of TensorFlow finished'} | | | | | |"
    peer = min(peers, key=lambda row: row.seconds)
    saved = f"1/{peer.held / own.held:.3g}" if own.held and peer.held else ""
    cells = [f"{own.first:.1f}", f"{own.seconds:.3g}", f"{peer.seconds:.3g}", f"{median(peer.ratios):.3g} ×", saved]
    return f"| {name} | {' | '.join(cells)} | {peer.label} |"


def page(results: dict[str, list[Row]], n: int, cap: float, threads: int, load: float) -> str:
    """The whole page."""
    where = machine()
    versions: dict[str, str] = {}
    for rows in results.values():
        for row in rows:
            versions |= row.versions
    parts = [
        f"# Jacobians of whole Keras applications, {date.today()}",
        f"{where.processor}, {where.cores} cores, {where.memory_gb} GB; {where.system}; Python {where.python}; "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + f". {threads} threads; load of the machine before the run: {load:.2f}.",
        f"No pretrained weights, 32 × 32 images (Xception 71 × 71), three outputs, inference mode, n = {n}, float32. "
        "Each way in a process of its own; times are medians, ratios medians over rounds in which netjac and the other "
        f"way took turns. A call over {cap:.0f} s was stopped. The error is the largest difference of outputs, or of "
        "the Jacobian of the last sample, from a float64 reference over the reference's largest entry. Peaks are "
        "growths of resident memory. The first row of netjac holds the Jacobian as factors; all other ways make every "
        "entry. Where calls were stopped, a faster way may be among them. Ways that are wrong (an error over "
        f"{WRONG:g}) are no peers.",
        "| application | netjac first call, s | netjac later, s | fastest right way of TensorFlow, s | ratio | "
        "memory of the result | fastest way |\n|---|---|---|---|---|---|---|\n"
        + "\n".join(verdict(name, rows) for name, rows in results.items()),
    ]
    parts += [f"## {name}\n\n{table(rows)}" for name, rows in results.items()]
    return "\n\n".join(parts) + "\n"


def _megabytes(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e6:.0f}"


def main() -> None:
    """Measure, and write the page anew after each application."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=APPLICATIONS, help="may be given several times")
    parser.add_argument("--way", action="append", choices=PEERS, help="of TensorFlow; may be given several times")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--cap", type=float, default=120.0, help="seconds a call may take")
    parser.add_argument("--threads", type=int, default=machine().cores)
    parser.add_argument("--results", type=Path, help="folder to write the page to, instead of printing it")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    results: dict[str, list[Row]] = {}
    for name in given.only or APPLICATIONS:
        say(name)
        with tempfile.TemporaryDirectory() as scratch:
            rows = results[name] = []
            try:
                for row in Application(
                    name, given.n, given.way or PEERS, given.cap, given.threads, Path(scratch)
                ).rows():
                    rows.append(row)
                    say(f"  {row.label}: {row.status or f'first {row.first:.1f} s, error {row.error:.0e}'}")
            except WorkerError as error:
                rows.append(Row(OWN["netjac"], f"no reference: {error}"))
        text = page(results, given.n, given.cap, given.threads, load)
        if given.results:
            given.results.mkdir(parents=True, exist_ok=True)
            (given.results / f"{date.today()}-applications.md").write_text(text, encoding="utf-8")
    if not given.results:
        print(text)


if __name__ == "__main__":
    main()
