"""Runs one problem: every contender in a process of its own, checked at the start and at the end, fitting in turns."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import memory
from benchmarks.fitting import problems
from benchmarks.fitting.task import FitTask, Goal, save
from benchmarks.networks import mlp
from benchmarks.process import OverCap, Process, WorkerError
from benchmarks.runner import SETTLE_SECONDS, START_SECONDS, relative_errors, say

OUTPUT_TOLERANCE = 1e-5  # outputs at the start agree to this with NumPy's before anything is timed
GOAL_TOLERANCE = 1.01  # a loss counts as reached where NumPy, in float64, finds no more than this times the goal
BOUND_TOLERANCE = 1e-6  # a parameter in float32 may lie that far outside its bound


@dataclass(frozen=True)
class FitContender:
    """One way to fit.

    Attributes
    ----------
    role
        ``"netjac"`` or ``"peer"``.
    module, name
        Which function of which module in `benchmarks.fitting.frameworks`.
    excluded
        Why it cannot do this problem; it is not started then.
    """

    label: str
    role: str
    module: str
    name: str
    dtype: str = "float64"
    excluded: str = ""


@dataclass(frozen=True)
class FitCase:
    """One problem.

    Attributes
    ----------
    goal
        Mean squared error to reach.
    bound
        Every parameter lies within ± this, a number that float32 holds exactly; None for no bounds.
    alone
        One contender after the other, for those that could not be held in memory side by side.
    """

    name: str
    title: str
    sizes: tuple[int, ...]
    n: int
    goal: float
    contenders: tuple[FitContender, ...]
    bound: float | None = None
    alone: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Residuals and parameters."""
        return self.n * self.sizes[-1], sum((a + 1) * b for a, b in zip(self.sizes[:-1], self.sizes[1:], strict=True))


@dataclass(frozen=True)
class FitSettings:
    """How long and how carefully; see ``python -m benchmarks.fits --help``."""

    pythons: dict[str, str]
    threads: int
    rounds: int
    budget_seconds: float
    cap_seconds: float
    cap_bytes: int | None
    most_steps: int
    scratch: Path
    load_before: float = 0.0


@dataclass(frozen=True)
class Fit:
    """One fit: what the worker told of it, and the loss in NumPy, float64, of the weights it ended with."""

    seconds: float
    steps: int
    evaluations: int
    ended: str
    note: str
    peak: int | None
    mse: float


@dataclass
class FitOutcome:
    """What became of one contender.

    Attributes
    ----------
    status
        "reached", or why not.
    first, first_peak
        Seconds and growth of resident memory of the first fit, of one step: with tracing and compiling.
    fits
        By the number of the round, the whole fits; an end short of the goal is not repeated.
    excess
        By how much the worst parameter lies outside its bounds.
    """

    contender: FitContender
    status: str = ""
    first: float | None = None
    first_peak: int | None = None
    fits: dict[int, Fit] = field(default_factory=dict)
    excess: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        """Whether the goal was reached, within the bounds."""
        return self.status == "reached"

    @property
    def seconds(self) -> float:
        """Of a fit, median."""
        return median(fit.seconds for fit in self.fits.values())

    @property
    def step_seconds(self) -> float:
        """Of a step, median over the fits of their mean."""
        return median(fit.seconds / max(fit.steps, 1) for fit in self.fits.values())

    @property
    def last(self) -> Fit:
        """The last fit; all are alike but for the time."""
        return self.fits[max(self.fits)]

    @property
    def peak(self) -> int | None:
        """Bytes: the largest growth of resident memory in any fit, the first of one step included."""
        peaks = [self.first_peak, *(fit.peak for fit in self.fits.values())]
        return max((peak for peak in peaks if peak is not None), default=None)


def paired_ratio(a: FitOutcome, b: FitOutcome) -> float:
    """Median over rounds of a's time over b's in the same round; where they share none, the ratio of their medians."""
    ratios = [fit.seconds / b.fits[turn].seconds for turn, fit in a.fits.items() if turn in b.fits]
    return median(ratios) if ratios else a.seconds / b.seconds


class FitRunner:
    """Runs problems."""

    def __init__(self, settings: FitSettings) -> None:
        self._settings = settings
        self._started = 0

    def run(self, case: FitCase) -> list[FitOutcome]:
        """All contenders of ``case``, in its order."""
        say(f"{case.name}: {case.title}")
        outcomes = [FitOutcome(contender, contender.excluded) for contender in case.contenders]
        entered = [outcome for outcome in outcomes if not outcome.status]
        path = self._settings.scratch / f"{case.name}.npz"
        export(case, path)
        for group in [[outcome] for outcome in entered] if case.alone else [entered]:
            _Turns(self._settings, case, path, group, self._start).run()
        return outcomes

    def _start(self, contender: FitContender) -> Process:
        settings = self._settings
        self._started += 1
        log = settings.scratch / f"{self._started:03d}-{contender.module}-{contender.name}.log"
        free = memory.available()
        byte_cap = settings.cap_bytes or (int(0.6 * free) if free else None)
        python = settings.pythons[contender.module]
        worker = "benchmarks.fitting.worker"
        return Process(python, contender.module, contender.name, settings.threads, log, byte_cap, worker=worker)


def export(case: FitCase, path: Path) -> None:
    """Write the data and the start weights of a problem as .npz."""
    network = mlp(*case.sizes)
    save(path, *problems.data(network, case.n), problems.start(network, case.bound))


class _Turns:
    """Contenders of one case that are alive side by side."""

    def __init__(
        self, settings: FitSettings, case: FitCase, path: Path, outcomes: list[FitOutcome], start: Any
    ) -> None:
        self._settings, self._case, self._path, self._outcomes, self._start = settings, case, path, outcomes, start
        x, y, self._weights = FitTask(case.sizes, str(path), "float32", settings.threads).load()
        self._x, self._y = x, y
        self._saved = settings.scratch / "ended.npz"

    def run(self) -> None:
        """Start all, check all, warm all up, then fit in turns."""
        settings = self._settings
        with ExitStack() as stack:
            running: list[tuple[FitOutcome, Process]] = []
            for outcome in self._outcomes:  # imports, side by side: nothing is timed yet
                process = stack.enter_context(self._start(outcome.contender))
                process.send("prepare", task=self._task(outcome.contender).to_json())
                running.append((outcome, process))
            running = [pair for pair in running if self._tried(*pair, self._check)]
            running = [pair for pair in running if self._tried(*pair, self._warm_up)]
            for turn in range(settings.rounds):
                running = [pair for pair in running if self._tried(*pair, lambda *each, t=turn: self._fit(*each, t))]
        for outcome in self._outcomes:
            say(f"  {outcome.contender.label}, {outcome.contender.dtype}: {_summary(outcome)}")

    def _task(self, contender: FitContender) -> FitTask:
        case = self._case
        return FitTask(case.sizes, str(self._path), contender.dtype, self._settings.threads, case.bound)

    def _tried(self, outcome: FitOutcome, process: Process, stage: Any) -> bool:
        """Whether the contender stays."""
        time.sleep(SETTLE_SECONDS)
        try:
            stays: bool = stage(outcome, process)
        except WorkerError as error:
            outcome.status = str(error) if isinstance(error, OverCap) else f"failed: {error}"
            stays = False
        if not stays:
            process.close()
        return stays

    def _check(self, outcome: FitOutcome, process: Process) -> bool:
        """The start is the same for all."""
        outcome.versions = process.receive(START_SECONDS)["versions"]
        process.ask("outputs", START_SECONDS, path=str(self._saved))
        with np.load(self._saved) as arrays:
            found = arrays["y"]
        error = relative_errors({"y": found}, {"y": problems.outputs(self._weights, self._x)})["y"]
        if error > OUTPUT_TOLERANCE:
            raise WorkerError(f"outputs at the start differ from NumPy's by {error:.1e}: not the same network")
        return True

    def _warm_up(self, outcome: FitOutcome, process: Process) -> bool:
        """A fit of one step: traces, compiles."""
        first = self._ask(process, steps=1)
        outcome.first, outcome.first_peak = first.seconds, first.peak
        return True

    def _fit(self, outcome: FitOutcome, process: Process, turn: int) -> bool:
        """A whole fit; whether another one is worth its time."""
        settings = self._settings
        fit = self._ask(process, settings.most_steps)
        outcome.fits[turn] = fit
        if self._case.bound is not None:
            outcome.excess = problems.excess(self._ended(), self._case.bound)
        outcome.status = fit.ended
        if fit.ended == "reached" and fit.mse > GOAL_TOLERANCE * self._case.goal:
            outcome.status = f"reached by its own account, with {fit.mse:.2e} in truth"
        if outcome.excess > BOUND_TOLERANCE:
            outcome.status = f"outside the bounds by {outcome.excess:.1e}"
        spent = sum(each.seconds for each in outcome.fits.values())
        return outcome.reached and spent < settings.budget_seconds

    def _ask(self, process: Process, steps: int) -> Fit:
        cap = self._settings.cap_seconds
        goal = Goal(self._case.goal, steps, cap)
        # The contender looks at the time between steps; what it does not come back from is stopped at twice the cap.
        answer = process.ask("fit", 2 * cap, goal=asdict(goal), path=str(self._saved))
        return Fit(**answer, mse=problems.mse(self._ended(), self._x, self._y))

    def _ended(self) -> problems.Weights:
        with np.load(self._saved) as arrays:
            return {name: arrays[name] for name in self._weights}


def _summary(outcome: FitOutcome) -> str:
    if not outcome.fits:
        return outcome.status
    fit = outcome.last
    work = f"{fit.steps} steps, {fit.evaluations} evaluations, mse {fit.mse:.2e}"
    return f"{outcome.status}; {outcome.seconds:.4g} s, {work}"
