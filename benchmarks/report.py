"""What a run leaves: a JSON file with everything, and a Markdown page to read."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import memory
from benchmarks.cases import CASES
from benchmarks.figures import Results, fastest, figures
from benchmarks.process import DROPPED_VARIABLES, ROOT, THREAD_VARIABLES
from benchmarks.runner import Outcome, Settings, paired_ratio


@dataclass(frozen=True)
class Machine:
    """What the times depend on."""

    processor: str
    cores: int
    memory_gb: float | None
    system: str
    huge_pages: str
    python: str

    @property
    def slug(self) -> str:
        """Short name for a file."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.processor} {self.cores} cores".lower()).strip("-")


def machine() -> Machine:
    """This machine."""
    total = memory.total()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        processor=_processor(),
        cores=cores,
        memory_gb=None if total is None else round(total / 1e9, 1),
        system=f"{platform.system()} {platform.machine()}",
        huge_pages=_huge_pages(),
        python=platform.python_version(),
    )


def _processor() -> str:
    try:
        fields = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    except OSError:
        return platform.processor() or "unknown processor"
    found = {name.strip(): value.strip() for name, value in reversed(fields)}
    details = [f"{name.removeprefix('cpu ')} {found[name]}" for name in ("cpu family", "model") if name in found]
    return found.get("model name", "unknown processor") + (f" ({', '.join(details)})" if details else "")


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen.group(1) if chosen else "unknown"


def commit() -> str:
    """The commit, with "-dirty" where files differ from it."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def circumstances(outcomes: Iterable[Outcome], settings: Settings, where: Machine) -> dict[str, Any]:
    """When, where, with what and how the outcomes were measured, as plain data."""
    versions: dict[str, str] = {}
    for outcome in outcomes:
        versions |= outcome.versions
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": asdict(where),
        "versions": dict(sorted(versions.items())),
        "settings": {
            "threads": settings.threads,
            "set to that number": list(THREAD_VARIABLES),
            "processors": "every worker is kept to that many processors",
            "removed from the workers' environment": list(DROPPED_VARIABLES),
            "load of the machine before": round(settings.load_before, 2),
            "rounds": settings.rounds,
            "seconds a turn": settings.slice_seconds,
            "seconds a contender, after which it leaves the rounds": settings.budget_seconds,
            "time cap of one call in seconds": settings.cap_seconds,
        },
    }


def as_data(results: Results, settings: Settings, where: Machine) -> dict[str, Any]:
    """Everything, as plain data."""
    every = [outcome for outcomes in results.values() for outcome in outcomes]
    return {
        **circumstances(every, settings, where),
        "figures": [asdict(figure) for figure in figures(results)],
        "cases": {name: [outcome_data(outcome) for outcome in outcomes] for name, outcomes in results.items()},
    }


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """One contender's row, as plain data."""
    timing = outcome.timing
    return {
        "contender": outcome.contender.label,
        "role": outcome.contender.role,
        "status": outcome.status,
        "median_seconds": timing.median if outcome.timed else None,
        "best_seconds": timing.best if outcome.timed else None,
        "runs": timing.runs,
        "alternated": not outcome.alone,
        "round_medians_seconds": [median(calls) for calls in timing.rounds.values()],
        "first_call_seconds": outcome.first,
        "peak_bytes": outcome.peak,
        "first_call_peak_bytes": outcome.first_peak,
        "held_bytes": outcome.held,
        "relative_errors": {name: value for name, value in outcome.errors.items()},
    }


def preamble(data: dict[str, Any]) -> list[str]:
    """What `circumstances` says, in words."""
    where, settings = data["machine"], data["settings"]
    return [
        f"{where['processor']}, {where['cores']} cores, {where['memory_gb']} GB; {where['system']}; "
        f"Python {where['python']}; transparent huge pages: {where['huge_pages']}.",
        ", ".join(f"{name} {version}" for name, version in data["versions"].items()) + ".",
        f"{settings['threads']} threads: {', '.join(THREAD_VARIABLES)} set to that number, and every worker kept to "
        f"that many processors. {' and '.join(DROPPED_VARIABLES)} removed from the workers' environment. One process "
        f"a contender, one working at a time, {settings['rounds']} rounds in alternation; no single call over "
        f"{settings['time cap of one call in seconds']:.0f} s. Load of the machine before the run: "
        f"{settings['load of the machine before']}.",
    ]


def as_markdown(results: Results, data: dict[str, Any]) -> str:
    """The page to read."""
    titles = {case.name: case.title for case in CASES}
    parts = [
        f"# Benchmarks, {data['date']}, commit {data['commit']}",
        *preamble(data),
        "## Figures asked and reached\n\n"
        + table(
            ("what", "asked", "reached", "", "against"),
            [(f["what"], f["asked"], f["reached"], _VERDICT[f["met"]], f["against"]) for f in data["figures"]],
        ),
        "Time: the median over rounds; a ratio is the median over rounds of the ratio within a round. First call: with "
        "tracing and compiling. Value: bytes of what a call returns. Peak: growth of resident memory during the first "
        "call, and during one later call; memory that a framework keeps for itself between calls does not show in the "
        "latter. Error: largest difference from a float64 loop of `tape.jacobian` over single samples, over the "
        "largest entry.",
    ]
    parts += [f"## {titles[name]}\n\n{case_table(outcomes)}" for name, outcomes in results.items()]
    return "\n\n".join(parts) + "\n"


_VERDICT = {True: "reached", False: "not reached", None: ""}


def case_table(outcomes: list[Outcome]) -> str:
    """The contenders of one case, in a table for each work that they do."""
    works = dict.fromkeys(outcome.contender.work for outcome in outcomes)
    tables = [_work_table([outcome for outcome in outcomes if outcome.contender.work == work]) for work in works]
    note = "One contender after the other: side by side they would need too much memory.\n\n"
    return (note if any(outcome.alone for outcome in outcomes) else "") + "\n\n".join(tables)


def _work_table(outcomes: list[Outcome]) -> str:
    peer = fastest(outcomes)
    rows = []
    for outcome in outcomes:
        timed = outcome.timed
        ratio = paired_ratio(outcome.timing, peer.timing) if peer and timed else None
        rows.append(
            (
                outcome.contender.label,
                _milliseconds(outcome.timing.median) if timed else _short(outcome.status),
                _milliseconds(outcome.timing.best) if timed else "",
                "" if ratio is None else f"{ratio:.3g}",
                str(outcome.timing.runs) if timed else "",
                "" if outcome.first is None else _milliseconds(outcome.first),
                _megabytes(outcome.held) if outcome.held else "",
                _megabytes(outcome.first_peak),
                _megabytes(outcome.peak),
                "" if outcome.error is None else f"{outcome.error:.1e}",
            )
        )
    name = f"× {peer.contender.label}" if peer else "×"
    header = ("", "median ms", "best ms", name, "runs", "first ms", "value MB", "first peak MB", "peak MB", "error")
    return table(header, rows)


def _short(text: str) -> str:
    return text if len(text) <= 90 else text[:87] + "…"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f}"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table, its columns padded so that it reads as text too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def write(results: Results, settings: Settings, folder: Path) -> tuple[Path, str]:
    """Write both files; the page's path and text."""
    where = machine()
    data = as_data(results, settings, where)
    text = as_markdown(results, data)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{data['date']}-{where.slug}.md"
    page.write_text(text, encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return page, text
