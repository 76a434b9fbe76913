"""How time and memory of the whole Jacobian grow with n, with l and with m, for netjac and for its peers.

    python -m benchmarks.scaling --peers-python .venv-peers/bin/python   # all, some 12 minutes on two cores
    python -m benchmarks.scaling --only n --points 3                     # the first points of one sweep, printed
    python -m benchmarks.scaling --plot benchmarks/results/….json        # page and plots again, from what was measured

At every point all contenders take turns, as in ``python -m benchmarks``. One that goes over a cap, or fails, has no
later points in that sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks import pictures, report
from benchmarks.__main__ import PEER_MODULES
from benchmarks.cases import DENSE, FACTORED
from benchmarks.networks import NETWORKS, specs
from benchmarks.process import ROOT
from benchmarks.runner import Case, Contender, Outcome, Runner, Settings, say

# Each peer once, in the form that is the fastest for most of the points.
CONTENDERS = (
    FACTORED,
    DENSE,
    Contender("tape.jacobian", "peer", "tensorflow_peers", "tape"),
    Contender("vectorized_map of tape.jacobian", "peer", "tensorflow_peers", "vectorized-nested"),
    Contender("vectorized_map of tape.jacobian, XLA", "peer", "tensorflow_peers", "xla-nested"),
    Contender("torch.func", "peer", "torch_peers", "jacobian"),
    Contender("JAX jit", "peer", "jax_peers", "jacobian"),
    Contender("BackPACK", "peer", "torch_libraries", "backpack-jacobian"),
)


@dataclass(frozen=True)
class Point:
    """A network and a number of samples."""

    network: str
    n: int

    @property
    def sizes(self) -> dict[str, int]:
        """The values of n, l and m."""
        network = NETWORKS[self.network]
        return {"n": self.n, "l": network.outputs, "m": sum(prod(shape) for _, shape in specs(network))}


@dataclass(frozen=True)
class Sweep:
    """Points along which one of n, l and m grows."""

    axis: str
    title: str
    points: tuple[Point, ...]


SWEEPS = (
    Sweep("n", "samples n (50-256-256-5)", tuple(Point("50-256-256-5", 4**i) for i in range(7))),
    Sweep("l", "outputs l (50-64-64-l, n = 64)", tuple(Point(f"50-64-64-{4**i}", 64) for i in range(6))),
    Sweep(
        "m",
        "parameters m (10-w-w-3, n = 64)",
        tuple(Point(f"10-{w}-{w}-3", 64) for w in (5, 25, 93, 309, 993, 1993)),
    ),
)

Results = list[tuple[Point, list[Outcome]]]


def measure(sweep: Sweep, settings: Settings) -> Results:
    """Every point of a sweep, with the contenders that are still in it."""
    contenders: tuple[Contender, ...] = CONTENDERS
    results: Results = []
    for point in sweep.points:
        title = ", ".join(f"{name} = {size}" for name, size in point.sizes.items())
        case = Case(f"{sweep.axis} = {point.sizes[sweep.axis]}", title, point.network, point.n, contenders)
        outcomes = Runner(settings).run(case)  # a new one each time, because it keeps the references
        results.append((point, outcomes))
        contenders = tuple(outcome.contender for outcome in outcomes if outcome.timed and outcome.status == "ok")
    return results


def as_data(results: dict[str, Results], settings: Settings) -> dict[str, Any]:
    """Everything, as plain data."""
    every = [outcome for points in results.values() for _, outcomes in points for outcome in outcomes]
    return report.circumstances(every, settings, report.machine()) | {
        "sweeps": [
            {
                "axis": sweep.axis,
                "title": sweep.title,
                "points": [
                    {"network": point.network, **point.sizes, "contenders": list(map(report.outcome_data, outcomes))}
                    for point, outcomes in results[sweep.axis]
                ],
            }
            for sweep in SWEEPS
            if sweep.axis in results
        ]
    }


# ---- the page

QUANTITIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "Median time of a call, ms": lambda row: f"{row['median_seconds'] * 1e3:.3g}",
    "Peak memory of the first call, MB": lambda row: _megabytes(row["first_call_peak_bytes"]),
    "Bytes of the value returned, MB": lambda row: _megabytes(row["held_bytes"]),
    "Largest difference from the float64 reference, over its largest entry": lambda row: f"{_error(row):.0e}",
}


def as_markdown(data: dict[str, Any]) -> str:
    """The page to read."""
    parts = [
        f"# Growth with n, l and m, {data['date']}, commit {data['commit']}",
        *report.preamble(data),
        "Contenders as in the other benchmarks. One that went over a cap, or failed, has no later points.",
    ]
    for sweep in data["sweeps"]:
        parts.append(f"## {sweep['title']}")
        parts += [f"{title}:\n\n{_table(sweep, quantity)}" for title, quantity in QUANTITIES.items()]
        parts.append(f"The fastest peer's time over netjac's:\n\n{_ratios(sweep)}")
        stopped = _stopped(sweep)
        if stopped:
            parts.append("\n".join(f"- {line}" for line in stopped))
    return "\n\n".join(parts) + "\n"


def _table(sweep: dict[str, Any], quantity: Callable[[dict[str, Any]], str]) -> str:
    """One quantity: contenders down, points across."""
    found = [{row["contender"]: row for row in point["contenders"] if _timed(row)} for point in sweep["points"]]
    labels = [row["contender"] for row in sweep["points"][0]["contenders"]]
    rows = [(label, *(quantity(rows[label]) if label in rows else "" for rows in found)) for label in labels]
    return report.table(_header(sweep), rows)


def _ratios(sweep: dict[str, Any]) -> str:
    labels = [row["contender"] for row in sweep["points"][0]["contenders"] if row["role"] == "netjac"]
    rows = [(label, *(_ratio(point, label) for point in sweep["points"])) for label in labels]
    return report.table(_header(sweep), rows)


def _header(sweep: dict[str, Any]) -> tuple[str, ...]:
    return (sweep["axis"], *(f"{point[sweep['axis']]:,}" for point in sweep["points"]))


def _timed(row: dict[str, Any]) -> bool:
    return row["median_seconds"] is not None


def _ratio(point: dict[str, Any], label: str) -> str:
    peers = [row["median_seconds"] for row in point["contenders"] if row["role"] == "peer" and _timed(row)]
    own = [row["median_seconds"] for row in point["contenders"] if row["contender"] == label and _timed(row)]
    return f"{min(peers) / own[0]:.3g}" if peers and own else ""


def _stopped(sweep: dict[str, Any]) -> list[str]:
    """Who did not get to the end, and why."""
    return [
        f"{row['contender']}, {sweep['axis']} = {point[sweep['axis']]:,}: {row['status']}"
        for point in sweep["points"]
        for row in point["contenders"]
        if row["status"] != "ok"
    ]


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.3g}"


def _error(row: dict[str, Any]) -> float:
    return max(row["relative_errors"].values())


# ---- the command


def parser() -> argparse.ArgumentParser:
    """The options."""
    out = argparse.ArgumentParser("python -m benchmarks.scaling", description=__doc__.split("\n")[0])
    out.add_argument("--peers-python", default=sys.executable, help="Python with PyTorch and JAX (default: this one)")
    out.add_argument("--only", action="append", choices=[sweep.axis for sweep in SWEEPS], help="may be repeated")
    out.add_argument("--points", type=int, metavar="COUNT", help="the first points of each sweep alone")
    out.add_argument("--threads", type=int, default=report.machine().cores, help="of every worker (default: all)")
    out.add_argument("--rounds", type=int, default=3, help="of the alternation (3)")
    out.add_argument("--slice", type=float, default=0.1, help="seconds of a contender's turn, at least one call (0.1)")
    out.add_argument("--budget", type=float, default=2.0, help="seconds, then a contender leaves the rounds (2)")
    out.add_argument("--cap", type=float, default=10.0, help="seconds one call may take, compiling included (10)")
    out.add_argument("--memory-cap", type=float, metavar="GB", help="memory of a worker (default: 0.6 of what is free)")
    out.add_argument("--results", type=Path, help="folder (default benchmarks/results; none with --only, --points)")
    out.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="folder of the plots")
    out.add_argument("--plot", type=Path, metavar="JSON", help="measure nothing; write the page and the plots of this")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the page, write it with its data and its plots; 1 if netjac failed anywhere."""
    options = parser().parse_args(arguments)
    if options.plot:
        data = json.loads(options.plot.read_text(encoding="utf-8"))
        options.plot.with_suffix(".md").write_text(as_markdown(data), encoding="utf-8")
        pictures.scaling(data, options.images)
        return 0
    results: dict[str, Results] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="netjac-scaling-") as scratch:
        settings = Settings(
            pythons=dict.fromkeys(PEER_MODULES, options.peers_python),
            threads=options.threads,
            rounds=options.rounds,
            slice_seconds=options.slice,
            budget_seconds=options.budget,
            cap_seconds=options.cap,
            cap_bytes=None if options.memory_cap is None else int(options.memory_cap * 1e9),
            scratch=Path(scratch),
            load_before=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        )
        for sweep in SWEEPS:
            if not options.only or sweep.axis in options.only:
                shortened = Sweep(sweep.axis, sweep.title, sweep.points[: options.points])
                results[sweep.axis] = measure(shortened, settings)
    say(f"{time.monotonic() - began:.0f} s in all")
    data = as_data(results, settings)
    print(as_markdown(data))
    folder = options.results or (None if options.only or options.points else ROOT / "benchmarks" / "results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{data['date']}-{report.machine().slug}-scaling.json"
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(as_markdown(data), encoding="utf-8")
        pictures.scaling(data, options.images)
        say(f"written: {path}, the page beside it, and the plots in {options.images}")
    failed = [o for points in results.values() for _, outcomes in points for o in outcomes if _failed(o)]
    return int(any(outcome.contender.role == "netjac" for outcome in failed))


def _failed(outcome: Outcome) -> bool:
    return outcome.status.startswith("failed")


if __name__ == "__main__":
    sys.exit(main())
