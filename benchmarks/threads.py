"""What a second thread gains, beside what it gains in filling memory; and that no verb takes more than it is given.

    python -m benchmarks.threads                     # all, some 3 minutes on two cores
    python -m benchmarks.threads --only 'to_array*'  # some verbs, printed

Each verb has a process, in which calls with one thread and with two take turns. The gain is the median over turns of
one time over the other. Beside it stands what runs meanwhile: processors in use, and threads that wait for one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.cases import LAYOUTS
from benchmarks.process import ROOT, Process
from benchmarks.runner import START_SECONDS, Contender, Outcome, Settings, say
from benchmarks.task import Task

MODULE, WORKER = "threads_contenders", "benchmarks.threads_worker"
THREADS = (1, 2)
GAIN = 1.7  # asked of dense layouts: at least


@dataclass(frozen=True)
class Verb:
    """A contender on a network; ``buffered`` if it takes a buffer, ``told`` if it takes a number of threads."""

    label: str
    name: str
    network: str
    n: int
    layout: str = "(n l) m"
    buffered: bool = False
    told: bool = True


DENSE, DENSE_N = "50-256-256-5", 200  # 320 MB
VERBS = (
    Verb("filling memory", "fill", DENSE, DENSE_N, buffered=True),
    *(Verb(f"to_array({layout!r})", "to_array", DENSE, DENSE_N, layout, buffered=True) for layout in LAYOUTS),
    Verb("gram, 784-1024-1024-10, n = 256", "gram", "784-1024-1024-10", 256, buffered=True),
    Verb("normal, 10-64-32-2, n = 2000", "normal", "10-64-32-2", 2000),
    Verb("stream, 10-64-32-2, n = 4000", "stream", "10-64-32-2", 4000),
    Verb("jacobian, 50-256-256-5, n = 2000", "jacobian", DENSE, 2000, told=False),
    Verb("lstsq, 10-64-32-2, n = 1000", "lstsq", "10-64-32-2", 1000, told=False),
    Verb("solve, five steps, 1-20-1, n = 1000", "fit", "1-20-1", 1000, told=False),
    Verb("solve, five steps, 10-64-32-2, n = 1000", "fit", "10-64-32-2", 1000, told=False),
    Verb("solve, five steps, 50-256-256-5, n = 200", "fit", DENSE, 200, told=False),
)


@dataclass(frozen=True)
class Gain:
    """Median seconds with each number of threads, and the gain: the median over turns of their ratio."""

    verb: str
    buffer: str
    seconds: tuple[float, ...]
    gain: float
    turns: int
    difference: float


@dataclass(frozen=True)
class Usage:
    """Processors in use, and threads that wait for one, on average; ``threads`` None where the verb takes no number."""

    verb: str
    threads: int | None
    running: float
    waiting: float


def measure(verb: Verb, settings: Settings) -> tuple[list[Gain], list[Usage], dict[str, str]]:
    """Gains and use of processors of one verb."""
    gains, usages = [], []
    log, task = settings.scratch / "log", Task(verb.network, verb.n, settings.threads, (), verb.layout)
    with Process(sys.executable, MODULE, verb.name, settings.threads, log, worker=WORKER) as process:
        versions = process.ask("prepare", START_SECONDS, task=task.to_json())["versions"]
        for again in ((False, True) if verb.buffered else (False,)) if verb.told else ():
            answer = process.ask(
                "alternate", settings.cap_seconds, threads=THREADS, again=again, seconds=settings.slice_seconds, least=5
            )
            one, two = answer["times"]
            gains.append(
                Gain(
                    verb.label,
                    "the same" if again else "new",
                    (median(one), median(two)),
                    median(a / b for a, b in zip(one, two, strict=True)),
                    len(one),
                    answer["difference"],
                )
            )
            say(f"  {verb.label}, {gains[-1].buffer} buffer: {gains[-1].gain:.2f} ×")
        for count in THREADS if verb.told else (settings.threads,):
            found = process.ask("usage", settings.cap_seconds, threads=count, seconds=settings.slice_seconds)
            usages.append(Usage(verb.label, count if verb.told else None, found["running"], found["waiting"]))
            say(f"  {verb.label}: {found['running']:.2f} processors in use, {found['waiting']:.2f} threads waiting")
    return gains, usages, versions


def as_markdown(data: dict[str, Any]) -> str:
    """The page to read."""
    gains = [
        (
            row["verb"],
            row["buffer"],
            *(f"{seconds * 1e3:.4g}" for seconds in row["seconds"]),
            f"{row['gain']:.2f}",
            str(row["turns"]),
            f"{row['difference']:.0e}" if row["difference"] else "none",
        )
        for row in data["gains"]
    ]
    usages = [
        (
            row["verb"],
            "its own choice" if row["threads"] is None else str(row["threads"]),
            f"{row['running']:.2f}",
            f"{row['waiting']:.2f}",
            f"{row['running'] + row['waiting']:.2f}",
        )
        for row in data["usages"]
    ]
    return (
        "\n\n".join(
            [
                f"# One thread and two, {data['date']}, commit {data['commit']}",
                *report.preamble(data),
                f"Gain: median over turns of the time with one thread over that with two; ≥ {GAIN} is asked of dense "
                "layouts, as far as filling memory gains as much. Difference: between what both gave, over the "
                "largest entry.",
                report.table(("verb", "buffer", "1 thread, ms", "2, ms", "gain", "turns", "difference"), gains),
                "What runs meanwhile, on average: processors in use, threads that are ready and wait for one, and both "
                "together, which are not to be more than the number of threads, whatever else the machine does.",
                report.table(("verb", "threads", "in use", "waiting", "together"), usages),
            ]
        )
        + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the page, write it with its data."""
    out = argparse.ArgumentParser("python -m benchmarks.threads", description=__doc__.split("\n")[0])
    out.add_argument("--only", action="append", metavar="NAME", help="run this verb (* and ? allowed); may be repeated")
    out.add_argument("--seconds", type=float, default=1.5, help="of each measurement (1.5)")
    out.add_argument("--results", type=Path, help="folder (default benchmarks/results; none with --only)")
    options = out.parse_args(arguments)
    verbs = [v for v in VERBS if not options.only or any(fnmatch(v.label, pattern) for pattern in options.only)]
    gains: list[Gain] = []
    usages: list[Usage] = []
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="netjac-threads-") as scratch:
        settings = Settings(
            pythons={},
            threads=max(THREADS),
            rounds=1,
            slice_seconds=options.seconds,
            budget_seconds=options.seconds,
            cap_seconds=120.0,
            cap_bytes=None,
            scratch=Path(scratch),
            load_before=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        )
        for verb in verbs:
            gained, used, versions = measure(verb, settings)
            gains += gained
            usages += used
            outcomes.append(Outcome(Contender(verb.label, "netjac", MODULE, verb.name), versions=versions))
    say(f"{time.monotonic() - began:.0f} s in all")
    data = report.circumstances(outcomes, settings, report.machine()) | {
        "gains": [asdict(gain) for gain in gains],
        "usages": [asdict(usage) for usage in usages],
    }
    print(as_markdown(data))
    folder = options.results or (None if options.only else ROOT / "benchmarks" / "results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{data['date']}-{report.machine().slug}-threads.json"
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(as_markdown(data), encoding="utf-8")
        say(f"written: {path} and the page beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
