"""Where the time goes: a Jacobian, its verbs and a step of a fit taken apart: a small, a middle and a large network.

    python -m benchmarks.hotpaths [--only small] [--results FOLDER]

The functions that the stages are named after are wrapped by timers; what a stage calls that is a stage itself is not
counted twice. A timer costs about a microsecond. Figures are medians over calls in microseconds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks import networks
from benchmarks.networks import mlp
from benchmarks.report import commit, machine, table

SECONDS = 1.0  # of calls, at least
LEAST_CALLS = 5
REST = "all else"


@dataclass(frozen=True)
class Size:
    """A network, the number of its samples, and evaluations of a fit: enough for its start not to count."""

    network: networks.Network
    n: int
    evaluations: int


SIZES = {
    "small": Size(mlp(1, 20, 1), 100, 100),
    "middle": Size(mlp(50, 256, 256, 5), 200, 20),
    "large": Size(mlp(100, 1024, 1024, 1), 1000, 6),
}


def _stages() -> list[tuple[Any, str, str]]:
    """Owner, attribute and name of what is timed."""
    from netjac import factor, materialise, spaces
    from netjac.jacobian import Jacobian
    from netjac.optimize import direct, linear, minimand
    from netjac.optimize.minimand import Minimand
    from netjac.tensorflow import evaluate, extractor

    evaluator = import_module("netjac.tensorflow.evaluator")  # the package has a function of that name

    return [
        (spaces.ParameterSpace, "ravel", "reading the weights"),
        (evaluator, "fingerprint", "is the trace still that of the model"),
        (evaluator, "signature_of", "checks of x"),
        (evaluate.CompiledSites, "__call__", "TensorFlow: outputs and factors"),
        (evaluate.CompiledSites, "outputs", "TensorFlow: outputs"),
        (factor.FactorPlan, "build", "blocks of the factors"),
        (extractor.Extractor, "evaluate", "making the Jacobian of them"),
        (Minimand, "evaluate", "residual and cost"),
        (Minimand, "linearise", "gradient Jᵀ r, and weights of the loss"),
        (Jacobian, "gram", "J Jᵀ"),
        (Jacobian, "normal", "Jᵀ J"),
        (minimand, "explicit", "J as an array"),
        (linear, "explicit", "J as an array"),
        (materialise, "fill", "J as an array"),
        (direct, "_columns_gram", "Jᵀ J"),
        (direct, "_rows_gram", "J Jᵀ"),
        (direct, "_singular", "singular values"),
        (direct, "_cholesky", "Cholesky"),
        (direct, "_solved", "triangular solves"),
        (linear.Linearisation, "adjoint", "products with J and Jᵀ"),
        (linear.Linearisation, "apply", "products with J and Jᵀ"),
        (linear.Linearisation, "curvature", "products with J and Jᵀ"),
    ]


class Clock:
    """Seconds spent in each stage, without those of the stages called from it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._running: list[float] = []  # of each stage on the stack, seconds of the stages that it called

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Time the stages, as long as this lasts."""
        with ExitStack() as stack:
            for owner, attribute, name in _stages():
                stack.enter_context(mock.patch.object(owner, attribute, self._timed(getattr(owner, attribute), name)))
            yield

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self._running.append(0.0)
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.perf_counter() - began
                self.spent[name] += seconds - self._running.pop()
                if self._running:
                    self._running[-1] += seconds

        return run


def profile(work: Callable[[], int]) -> list[tuple[str, float]]:
    """Stages and their seconds for one of the pieces that ``work`` does (and counts), the whole first."""
    work()
    clock, calls = Clock(), []
    with clock.wrapped():
        ended = time.perf_counter() + SECONDS
        while len(calls) < LEAST_CALLS or time.perf_counter() < ended:
            clock.spent.clear()
            began = time.perf_counter()
            pieces = work()
            whole = time.perf_counter() - began
            calls.append({name: seconds / pieces for name, seconds in (("whole", whole), *clock.spent.items())})
    names = list(dict.fromkeys(name for call in calls for name in call))
    found = {name: median(call.get(name, 0.0) for call in calls) for name in names}
    whole = found.pop("whole")
    rest = max(0.0, whole - sum(found.values()))
    ordered = sorted(found.items(), key=lambda pair: -pair[1])
    return [("whole", whole), *ordered, (REST, rest)]


def works(size: Size) -> dict[str, Callable[[], int]]:
    """What is profiled, by its name; each returns how many pieces of it one call did."""
    import netjac as nj
    from benchmarks.frameworks.keras_models import build

    network, n = size.network, size.n
    model, x = build(network), networks.inputs(network, n)
    problem = nj.LeastSquares(build(network), x, networks.targets(network, n))
    start, kept = problem.x0, nj.jacobian(model, x)
    v, u = networks.direction(kept.m), networks.cotangent(network, n).ravel()

    def once(work: Callable[[], Any]) -> Callable[[], int]:
        def run() -> int:
            work()
            return 1

        return run

    def fit() -> int:
        result = problem.solve("netjac", x0=start, max_nfev=size.evaluations, ftol=None, xtol=None, gtol=1e-15)
        return int(result.nfev)

    found = {
        "`nj.jacobian(model, x)`": once(lambda: nj.jacobian(model, x)),
        "`J @ v`": once(lambda: kept @ v),
        "`J.T @ u`": once(lambda: kept.T @ u),
        "`J.gram()`": once(kept.gram),
        'an evaluation of `problem.solve("netjac")`': fit,
    }
    if kept.n * kept.l * kept.m < 10**8:
        found["`J.to_array()`"] = once(kept.to_array)
    return found


def page(names: Sequence[str]) -> str:
    """The page to read."""
    where = machine()
    parts = [
        f"# Where the time goes, {date.today()}, commit {commit()}",
        f"{where.processor}, {where.cores} cores; Python {where.python}; load before: {os.getloadavg()[0]:.2f}. "
        "Medians over calls, in microseconds; stages do not count what other stages in them take.",
    ]
    for name in names:
        size = SIZES[name]
        parts.append(f"## {name}: {size.network.name}, n = {size.n}")
        for what, work in works(size).items():
            found = profile(work)
            whole = found[0][1]
            rows = [(stage, f"{1e6 * s:.0f}", f"{100 * s / whole:.0f} %") for stage, s in found if s > 0.01 * whole]
            parts.append(table((what, "µs", "share"), rows))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Profile, and print the page or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SIZES, help="may be given several times")
    parser.add_argument("--results", type=Path, help="folder to write the page to, instead of printing it")
    given = parser.parse_args()
    text = page(given.only or list(SIZES))
    if given.results:
        given.results.mkdir(parents=True, exist_ok=True)
        (given.results / f"{date.today()}-hotpaths.md").write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
