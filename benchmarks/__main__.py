"""``python -m benchmarks``: run cases, print the page, write it and its data."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks import report
from benchmarks.cases import CASES, QUICK
from benchmarks.figures import Results
from benchmarks.process import ROOT
from benchmarks.runner import Case, Runner, Settings, say

PEER_MODULES = ("torch_peers", "jax_peers", "torch_libraries", "netket_peers")


def parser() -> argparse.ArgumentParser:
    """The options."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    out = argparse.ArgumentParser("python -m benchmarks", description="Time netjac beside other ways to a Jacobian.")
    out.add_argument(
        "--peers-python", default=sys.executable, help="Python with PyTorch, JAX and others (default: this one)"
    )
    out.add_argument("--tangents-python", help="Python with neural-tangents (default: the peers')")
    out.add_argument("--only", action="append", metavar="NAME", help="run this case (* and ? allowed); may be repeated")
    out.add_argument("--list", action="store_true", help="list the cases and stop")
    out.add_argument("--quick", action="store_true", help="a few small cases in few rounds, to see that all works")
    out.add_argument("--threads", type=int, default=cores, help="threads and processors of every worker (default: all)")
    out.add_argument("--rounds", type=int, help="rounds of the alternation (default 7, quick 3)")
    out.add_argument("--slice", type=float, default=0.1, help="seconds of a contender's turn, at least one call (0.1)")
    out.add_argument("--budget", type=float, default=6.0, help="seconds, then a contender leaves the rounds (6)")
    out.add_argument("--cap", type=float, help="seconds one call may take, compiling included (default 60, quick 20)")
    out.add_argument("--memory-cap", type=float, metavar="GB", help="memory of a worker (default: 0.6 of what is free)")
    out.add_argument("--results", type=Path, help="folder (default benchmarks/results; none with --quick, --only)")
    return out


def chosen(only: Sequence[str] | None, quick: bool) -> list[Case]:
    """The cases to run, in their order; SystemExit where a name fits none."""
    if not only:
        return [case for case in CASES if not quick or case.name in QUICK]
    for pattern in only:
        if not any(fnmatch(case.name, pattern) for case in CASES):
            raise SystemExit(f"no case is called {pattern!r}; the cases are: {', '.join(case.name for case in CASES)}.")
    return [case for case in CASES if any(fnmatch(case.name, pattern) for pattern in only)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 if a contender of netjac failed."""
    options = parser().parse_args(arguments)
    if options.list:
        print("\n".join(f"{case.name:15} {case.title}" for case in CASES))
        return 0
    cases = chosen(options.only, options.quick)
    results: Results = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="netjac-bench-") as scratch:
        settings = Settings(
            pythons={
                **dict.fromkeys(PEER_MODULES, options.peers_python),
                "tangents_peers": options.tangents_python or options.peers_python,
            },
            threads=options.threads,
            rounds=options.rounds or (3 if options.quick else 7),
            slice_seconds=options.slice,
            budget_seconds=options.budget,
            cap_seconds=options.cap or (20.0 if options.quick else 60.0),
            cap_bytes=None if options.memory_cap is None else int(options.memory_cap * 1e9),
            scratch=Path(scratch),
            load_before=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        )
        runner = Runner(settings)
        for case in cases:
            results[case.name] = runner.run(case)
    say(f"{time.monotonic() - began:.0f} s in all")
    folder = options.results or (None if options.quick or options.only else ROOT / "benchmarks" / "results")
    if folder is None:
        where = report.machine()
        print(report.as_markdown(results, report.as_data(results, settings, where)))
    else:
        page, text = report.write(results, settings, folder)
        print(text)
        say(f"written: {page} and {page.with_suffix('.json').name}")
    return int(any(o.contender.role == "netjac" and not o.timed for outcomes in results.values() for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
