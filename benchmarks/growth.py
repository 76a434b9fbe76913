"""Time and memory of netjac as n grows to a million samples, where memory is to stay as it is.

    python -m benchmarks.growth                                     # all, some 15 minutes on two cores
    python -m benchmarks.growth --most 100000                       # without the largest n: 2 minutes
    python -m benchmarks.growth --plot benchmarks/results/….json    # page and plot again, from what was measured

x and u are files that are mapped into memory and read as they are needed. What does not grow with n (tracing, the
probe) is done before the clock starts. Each way has a process for each n; these take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import memory, networks, pictures, report
from benchmarks.process import ROOT, Process, WorkerError
from benchmarks.runner import START_SECONDS, Contender, Outcome, Settings, relative_errors, say
from benchmarks.task import Task

NETWORK = "10-64-32-2"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
DATA = "NETJAC_BENCHMARK_DATA"  # variable with the folder of the files, for the workers
MODULE = "growth_contenders"

# By what is held at the end: the same for every n, one number a row, or all factors.
WAYS = (
    Contender("stream: Jᵀ J and Jᵀ u", "constant", MODULE, "stream-normal"),
    Contender("stream: Jᵀ u", "constant", MODULE, "stream-adjoint"),
    Contender("jacobian(memory=…), J v", "a number a row", MODULE, "budget-jvp"),
    Contender("jacobian(memory=…), Jᵀ u", "a number a row", MODULE, "budget-vjp"),
    Contender("jacobian, held", "all factors", MODULE, "factored"),
)
SLOPE, MEMORY = 1.05, 1.1  # asked: at most


@dataclass
class Measured:
    """What one way took for one n; ``files`` are the pages of mapped files among ``peak``, which can be taken back."""

    n: int
    outcome: Outcome
    files: int | None = None

    @property
    def spent(self) -> float:
        """Seconds spent so far."""
        return sum(map(sum, self.outcome.timing.rounds.values()))

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return {"n": self.n, "file_bytes": self.files, **report.outcome_data(self.outcome)}


class Measurement:
    """The files, the references, and a way's processes."""

    def __init__(self, sizes: Sequence[int], settings: Settings) -> None:
        self._sizes, self._settings = sizes, settings
        network = networks.NETWORKS[NETWORK]
        for n in sizes:
            np.save(settings.scratch / f"x-{n}.npy", networks.inputs(network, n))
            np.save(settings.scratch / f"u-{n}.npy", networks.cotangent(network, n))
        self._references = {n: self._reference(n) for n in sizes}

    def of(self, way: Contender) -> list[Measured]:
        """All n of a way."""
        settings = self._settings
        found = [Measured(n, Outcome(way)) for n in self._sizes]
        with ExitStack() as stack:
            running = {each.n: stack.enter_context(self._start(way.name)) for each in found}
            for turn in range(settings.rounds + 1):  # in the first all are prepared, before any is timed
                for each in found:
                    if each.n not in running or each.spent > settings.budget_seconds:
                        continue
                    try:
                        self._turn(running[each.n], each, turn)
                    except WorkerError as error:
                        each.outcome.status = str(error)
                        running.pop(each.n).close()
        for each in found:
            timing, peak = each.outcome.timing, (each.outcome.peak or 0) / 1e6
            done = f"{timing.best:.4g} s, peak {peak:.0f} MB" if each.outcome.timed else each.outcome.status
            say(f"  {way.label}, n = {each.n:,}: {done}")
        return found

    def _turn(self, process: Process, each: Measured, turn: int) -> None:
        """Prepare, then run again and again; the memory, and the comparison, are of the first run."""
        outcome = each.outcome
        if not turn:
            outcome.versions = process.ask("prepare", START_SECONDS, task=self._task(each.n))["versions"]
            return
        answer = process.ask("first", self._settings.cap_seconds)
        outcome.timing.rounds[turn] = [answer["seconds"]]
        if turn == 1:
            outcome.peak, each.files = answer["peak"], answer["files"]
            outcome.errors = relative_errors(self._checked(process), self._references[each.n])

    def _reference(self, n: int) -> dict[str, NDArray[Any]]:
        with self._start("reference") as process:
            process.ask("prepare", START_SECONDS, task=self._task(n))
            process.ask("first", START_SECONDS)
            return self._checked(process)

    def _checked(self, process: Process) -> dict[str, NDArray[Any]]:
        path = self._settings.scratch / "arrays.npz"
        process.ask("check", START_SECONDS, path=str(path))
        with np.load(path) as arrays:
            return dict(arrays)

    def _start(self, name: str) -> Process:
        settings = self._settings
        log, extra = settings.scratch / f"{name}.log", {DATA: str(settings.scratch)}
        return Process(sys.executable, MODULE, name, settings.threads, log, settings.cap_bytes, extra)

    def _task(self, n: int) -> dict[str, Any]:
        return Task(NETWORK, n, self._settings.threads, ()).to_json()


def as_data(results: dict[str, list[Measured]], settings: Settings) -> dict[str, Any]:
    """Everything, as plain data."""
    every = [each.outcome for found in results.values() for each in found]
    ways = {way.label: way.role for way in WAYS}
    return report.circumstances(every, settings, report.machine()) | {
        "network": NETWORK,
        "ways": [
            {"way": label, "held": ways[label], "points": [each.data() for each in found]}
            for label, found in results.items()
        ],
    }


def slope(points: list[dict[str, Any]]) -> float:
    """Of log time over log n, by least squares."""
    timed = [(point["n"], point["median_seconds"]) for point in points if point["median_seconds"]]
    if len(timed) < 2:
        return float("nan")
    n, seconds = np.log(np.array(timed)).T
    return float(np.polyfit(n, seconds, 1)[0])


def memory_ratio(points: list[dict[str, Any]], without_files: bool = False) -> float:
    """Peak at the largest n over that at the one before."""
    peaks = [p["peak_bytes"] - (p["file_bytes"] if without_files else 0) for p in points if p["peak_bytes"]]
    return peaks[-1] / peaks[-2] if len(peaks) > 1 else float("nan")


def as_markdown(data: dict[str, Any]) -> str:
    """The page to read."""
    header = ("way", "n", "seconds", "runs", "samples a second", "peak MB", "of it mapped files, MB", "error")
    rows, figures = [], []
    for way in data["ways"]:
        points = way["points"]
        for point in points:
            seconds = point["median_seconds"]
            done = (f"{seconds:.4g}", str(point["runs"]), f"{point['n'] / seconds:,.0f}") if seconds else ("", "", "")
            error = max(point["relative_errors"].values(), default=float("nan"))
            sizes = (_megabytes(point["peak_bytes"]), _megabytes(point["file_bytes"]))
            status = f"{error:.0e}" if point["status"] == "ok" else point["status"]
            rows.append((way["way"], f"{point['n']:,}", *done, *sizes, status))
        constant = way["held"] == "constant"
        figures.append(
            (
                way["way"],
                way["held"],
                f"{slope(points):.3f}" + (f" (asked ≤ {SLOPE})" if constant else ""),
                f"{memory_ratio(points):.3g}" + (f" (asked ≤ {MEMORY})" if constant else ""),
                f"{memory_ratio(points, without_files=True):.3g}",
            )
        )
    names = ("way", "held at the end", "slope", "peak, last over the one before", "the same without mapped files")
    return (
        "\n\n".join(
            [
                f"# Growth to a million samples, {data['network']}, {data['date']}, commit {data['commit']}",
                *report.preamble(data),
                "Slope: of log time over log n, by least squares. Peak: growth of resident memory in the first run.",
                report.table(names, figures),
                report.table(header, rows),
            ]
        )
        + "\n"
    )


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the page, write it with its data and its plot; 1 if a way failed."""
    out = argparse.ArgumentParser("python -m benchmarks.growth", description=__doc__.split("\n")[0])
    out.add_argument("--most", type=int, default=SIZES[-1], metavar="N", help="leave out larger n")
    out.add_argument("--way", action="append", choices=[way.name for way in WAYS], help="may be repeated")
    out.add_argument("--threads", type=int, default=report.machine().cores, help="of every worker (default: all)")
    out.add_argument("--rounds", type=int, default=3, help="runs of each way and n (3)")
    out.add_argument("--budget", type=float, default=60.0, help="seconds, then a way and n leave the rounds (60)")
    out.add_argument("--cap", type=float, default=900.0, help="seconds one run may take (900)")
    out.add_argument("--results", type=Path, help="folder (default benchmarks/results; none with --most, --way)")
    out.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="folder of the plot")
    out.add_argument("--plot", type=Path, metavar="JSON", help="measure nothing; write the page and the plot of this")
    options = out.parse_args(arguments)
    if options.plot:
        data = json.loads(options.plot.read_text(encoding="utf-8"))
        options.plot.with_suffix(".md").write_text(as_markdown(data), encoding="utf-8")
        pictures.growth(data, options.images)
        return 0
    began, free = time.monotonic(), memory.available()
    with tempfile.TemporaryDirectory(prefix="netjac-growth-") as scratch:
        settings = Settings(
            pythons={},
            threads=options.threads,
            rounds=options.rounds,
            slice_seconds=0.0,
            budget_seconds=options.budget,
            cap_seconds=options.cap,
            cap_bytes=None if free is None else int(0.6 * free),
            scratch=Path(scratch),
            load_before=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        )
        measurement = Measurement([n for n in SIZES if n <= options.most], settings)
        ways = [way for way in WAYS if not options.way or way.name in options.way]
        data = as_data({way.label: measurement.of(way) for way in ways}, settings)
    say(f"{time.monotonic() - began:.0f} s in all")
    print(as_markdown(data))
    whole = not options.way and options.most >= SIZES[-1]
    folder = options.results or (ROOT / "benchmarks" / "results" if whole else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{data['date']}-{report.machine().slug}-growth.json"
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(as_markdown(data), encoding="utf-8")
        pictures.growth(data, options.images)
        say(f"written: {path}, the page beside it, and the plot in {options.images}")
    return int(any(point["status"] != "ok" for way in data["ways"] for point in way["points"]))


if __name__ == "__main__":
    sys.exit(main())
