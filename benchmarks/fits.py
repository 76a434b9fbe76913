"""``python -m benchmarks.fits``: time to a given loss, netjac's solver beside other ways to fit a network."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from fnmatch import fnmatch
from pathlib import Path

from benchmarks import report
from benchmarks.fitting import page
from benchmarks.fitting.cases import CASES
from benchmarks.fitting.runner import FitCase, FitContender, FitRunner, FitSettings, export
from benchmarks.process import ROOT
from benchmarks.runner import say

PEER_MODULES = ("tensorflow_fits", "torch_fits", "jax_fits")


def parser() -> argparse.ArgumentParser:
    """The options."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    out = argparse.ArgumentParser("python -m benchmarks.fits", description="Time to a given loss, side by side.")
    out.add_argument("--peers-python", default=sys.executable, help="Python with the peers (default: this one)")
    out.add_argument("--only", action="append", metavar="NAME", help="run this case (* and ? allowed); may be repeated")
    out.add_argument("--contender", action="append", metavar="LABEL", help="run these (* and ? allowed), and netjac")
    out.add_argument("--list", action="store_true", help="list the cases and stop")
    out.add_argument("--threads", type=int, default=cores, help="threads and processors of every worker (default: all)")
    out.add_argument("--rounds", type=int, default=5, help="fits of every contender, in alternation (5)")
    out.add_argument("--budget", type=float, default=60.0, help="seconds of fits, then it leaves the rounds (60)")
    out.add_argument("--cap", type=float, default=300.0, help="seconds a fit may take, compiling included (300)")
    out.add_argument("--most-steps", type=int, default=1000, help="steps a fit may take (1000)")
    out.add_argument("--memory-cap", type=float, metavar="GB", help="memory of a worker (default: 0.6 of what is free)")
    out.add_argument(
        "--results", type=Path, metavar="FILE", help="page (default in benchmarks/results; none with --only)"
    )
    out.add_argument("--export", type=Path, metavar="FOLDER", help="write data and start weights as .npz and stop")
    return out


def chosen(only: Sequence[str] | None, contenders: Sequence[str] | None = None) -> list[FitCase]:
    """The cases to run, in their order; SystemExit where a name fits none."""
    for pattern in only or ():
        if not any(fnmatch(case.name, pattern) for case in CASES):
            raise SystemExit(f"no case is called {pattern!r}; the cases are: {', '.join(case.name for case in CASES)}.")
    cases = [case for case in CASES if not only or any(fnmatch(case.name, pattern) for pattern in only)]
    return [_with(case, contenders) for case in cases] if contenders else cases


def _with(case: FitCase, patterns: Sequence[str]) -> FitCase:
    def stays(contender: FitContender) -> bool:
        return any(fnmatch(contender.label, pattern) for pattern in (*patterns, "netjac"))

    return replace(case, contenders=tuple(each for each in case.contenders if stays(each)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 if netjac missed a goal."""
    options = parser().parse_args(arguments)
    cases = chosen(options.only, options.contender)
    if options.list:
        print("\n".join(f"{case.name:15} {case.title}" for case in cases))
        return 0
    if options.export:
        options.export.mkdir(parents=True, exist_ok=True)
        for case in cases:
            export(case, options.export / f"{case.name}.npz")
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="netjac-fits-") as scratch:
        settings = FitSettings(
            pythons={"netjac_fits": sys.executable, **dict.fromkeys(PEER_MODULES, options.peers_python)},
            threads=options.threads,
            rounds=options.rounds,
            budget_seconds=options.budget,
            cap_seconds=options.cap,
            cap_bytes=None if options.memory_cap is None else int(options.memory_cap * 1e9),
            most_steps=options.most_steps,
            scratch=Path(scratch),
            load_before=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        )
        runner = FitRunner(settings)
        results = {case.name: runner.run(case) for case in cases}
    say(f"{time.monotonic() - began:.0f} s in all")
    data = page.as_data(results, settings)
    text = page.as_markdown(results, data)
    print(text)
    folder = ROOT / "benchmarks" / "results"
    default = None if options.only or options.contender else folder / f"{date.today()}-fits-{report.machine().slug}.md"
    written = options.results or default
    if written:
        page.write(written, text, data)
        say(f"written: {written} and {written.with_suffix('.json').name}")
    missed = (o for outcomes in results.values() for o in outcomes if o.contender.role == "netjac" and not o.reached)
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
