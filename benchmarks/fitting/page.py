"""What a run leaves: a Markdown page to read, and a JSON file with everything."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.fitting.cases import BASE, CASES, DTYPES, MILLION
from benchmarks.fitting.runner import FitOutcome, FitSettings, paired_ratio

Results = dict[str, list[FitOutcome]]


def base(outcomes: list[FitOutcome], dtype: str = BASE.dtype) -> FitOutcome | None:
    """netjac in one precision, if it fitted at all."""
    ours = (each for each in outcomes if each.contender.role == BASE.role and each.contender.dtype == dtype)
    return next((each for each in ours if each.fits), None)


def fastest(outcomes: list[FitOutcome]) -> FitOutcome | None:
    """The peer that reached the goal in the shortest time."""
    peers = [each for each in outcomes if each.contender.role == "peer" and each.reached]
    return min(peers, key=lambda each: each.seconds, default=None)


def figures(results: Results) -> list[tuple[str, ...]]:
    """Rows of: what, asked, reached, verdict, against."""
    rows = []
    for name, outcomes in results.items():
        for dtype in DTYPES:
            ours = base(outcomes, dtype)
            peer = fastest(outcomes)
            if ours is None or not ours.reached:
                continue
            what = f"{name}, netjac in {dtype}: "
            if peer is None:
                rows.append((what + "time to the goal", "≥ 10 × faster", "", "", "no peer reached the goal"))
            else:
                ratio = paired_ratio(peer, ours)
                rows.append((what + "time to the goal", "≥ 10 × faster", *_verdict(ratio, 10), _named(peer)))
            if name == MILLION:
                rows += _million(what, ours, outcomes)
    return rows


def _million(what: str, ours: FitOutcome, outcomes: list[FitOutcome]) -> list[tuple[str, ...]]:
    """A step, and the memory, against any peer that got as far as one step."""
    rows = []
    peers = [each for each in outcomes if each.contender.role == "peer" and each.fits]
    if peers:
        peer = min(peers, key=lambda each: each.step_seconds)
        ratio = peer.step_seconds / ours.step_seconds
        rows.append((what + "time of a step", "≥ 100 × faster", *_verdict(ratio, 100), _named(peer)))
    known = [each for each in peers if each.peak]
    if known and ours.peak:
        peer = min(known, key=lambda each: each.peak or 0)
        share = (peer.peak or 0) / ours.peak
        reached = f"1/{share:.3g}", "reached" if share >= 10 else "not reached"
        rows.append((what + "peak memory", "≤ 1/10", *reached, f"{_named(peer)}, {_megabytes(peer.peak)} MB"))
    return rows


def _verdict(ratio: float, asked: float) -> tuple[str, str]:
    return f"{ratio:.3g} ×", "reached" if ratio >= asked else "not reached"


def _named(outcome: FitOutcome) -> str:
    return f"{outcome.contender.label}, {outcome.contender.dtype}"


def as_data(results: Results, settings: FitSettings) -> dict[str, Any]:
    """Everything, as plain data."""
    versions: dict[str, str] = {}
    for outcomes in results.values():
        for outcome in outcomes:
            versions |= outcome.versions
    return {
        "date": date.today().isoformat(),
        "commit": report.commit(),
        "machine": asdict(report.machine()),
        "versions": dict(sorted(versions.items())),
        "settings": {
            "threads": settings.threads,
            "rounds": settings.rounds,
            "seconds of fits, after which a contender leaves the rounds": settings.budget_seconds,
            "time cap of one fit in seconds": settings.cap_seconds,
            "memory cap in bytes": settings.cap_bytes or "0.6 of what is free",
            "most steps": settings.most_steps,
            "load of the machine before": round(settings.load_before, 2),
        },
        "figures": figures(results),
        "cases": {name: [_outcome(outcome) for outcome in outcomes] for name, outcomes in results.items()},
    }


def _outcome(outcome: FitOutcome) -> dict[str, Any]:
    return {
        "contender": outcome.contender.label,
        "precision": outcome.contender.dtype,
        "role": outcome.contender.role,
        "status": outcome.status,
        "first_step_seconds": outcome.first,
        "peak_bytes": outcome.peak,
        "outside_bounds": outcome.excess,
        "fits": [asdict(fit) for fit in outcome.fits.values()],
    }


def as_markdown(results: Results, data: dict[str, Any]) -> str:
    """The page to read."""
    where, settings = data["machine"], data["settings"]
    titles = {case.name: case.title for case in CASES}
    parts = [
        f"# Fits to a given loss, {data['date']}, commit {data['commit']}",
        f"{where['processor']}, {where['cores']} cores, {where['memory_gb']} GB; {where['system']}; "
        f"Python {where['python']}. Load of the machine before the run: {settings['load of the machine before']}.",
        ", ".join(f"{name} {version}" for name, version in data["versions"].items()) + ".",
        f"One process a contender, {settings['threads']} threads, one working at a time, up to {settings['rounds']} "
        f"fits each, in alternation; a fit ends after {settings['time cap of one fit in seconds']:.0f} s or "
        f"{settings['most steps']:,} steps.",
        "Time: from the start weights to the first loss at or below the goal, median over the rounds; × netjac: median "
        "over rounds of its ratio to netjac in float64, in brackets where the goal was not reached. First step: a fit "
        "of one step before all others, with tracing and compiling, which no other time holds. Steps: derivatives; "
        "evaluations: of the residual. Peak: largest growth of resident memory from before the first step. Final mse: "
        "of the weights at the end, in NumPy and float64, whatever the contender computed in.",
        "## Figures asked and reached\n\n"
        + report.table(("what", "asked", "reached", "", "against"), [tuple(row) for row in data["figures"]]),
    ]
    parts += [f"## {name}: {titles[name]}\n\n{case_table(outcomes)}" for name, outcomes in results.items()]
    return "\n\n".join(parts) + "\n"


HEADER = (
    "",
    "precision",
    "outcome",
    "time s",
    "× netjac",
    "ms a step",
    "steps",
    "evaluations",
    "first step s",
    "peak MB",
    "final mse",
)


def case_table(outcomes: list[FitOutcome]) -> str:
    """The contenders of one problem."""
    ours = base(outcomes)
    return report.table(HEADER, [_row(outcome, ours) for outcome in outcomes])


def _row(outcome: FitOutcome, ours: FitOutcome | None) -> tuple[str, ...]:
    fitted: tuple[str, ...] = ("", "", "", "", "")
    mse = ""
    if outcome.fits:
        fit = outcome.last
        ratio = "" if ours is None else f"{paired_ratio(outcome, ours):.3g}"
        shown = ratio if outcome.reached or not ratio else f"({ratio})"
        step = f"{outcome.step_seconds * 1e3:.4g}"
        fitted = (f"{outcome.seconds:.4g}", shown, step, str(fit.steps), str(fit.evaluations))
        mse = f"{fit.mse:.2e}"
    status = outcome.status if len(outcome.status) <= 90 else outcome.status[:87] + "…"
    first = "" if outcome.first is None else f"{outcome.first:.3g}"
    contender = outcome.contender
    return (contender.label, contender.dtype, status, *fitted, first, _megabytes(outcome.peak), mse)


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.0f}"


def write(page: Path, text: str, data: dict[str, Any]) -> None:
    """Write the page, and the data beside it."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
