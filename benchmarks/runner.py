"""Runs one case: every contender in a process of its own, compared with the reference, then timed in alternation."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import memory
from benchmarks.networks import NETWORKS, Network, specs
from benchmarks.process import OverCap, Process, WorkerError
from benchmarks.task import Task, compared_samples

SETTLE_SECONDS = 0.03  # between two contenders: threads that spin after their last work have stopped by then
START_SECONDS = 180.0  # to import a framework and build a network, before any cap counts
OUTPUT_TOLERANCE = 1e-5  # outputs of all frameworks agree to this before anything is timed


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case.

    Attributes
    ----------
    role
        ``"netjac"``, ``"peer"`` or ``"yardstick"``.
    module, name
        Which function of which module in `benchmarks.frameworks`.
    network, n, layout
        Where they differ from the case's.
    environment
        Variables set for its process.
    dense
        Whether it makes the whole matrix.
    work
        What it computes, in a case where that differs: those of the same work take turns.
    patience
        Where it is not 1, the first call may take this many times the time cap, and is the only one that is timed.
    """

    label: str
    role: str
    module: str
    name: str
    network: str | None = None
    n: int | None = None
    layout: str = "(n l) m"
    environment: tuple[tuple[str, str], ...] = ()
    dense: bool = True
    work: str = ""
    patience: float = 1.0


@dataclass(frozen=True)
class Case:
    """Contenders that do comparable work.

    Attributes
    ----------
    reference
        Contender of `benchmarks.frameworks.reference` to compare with.
    fresh
        Number of fresh processes in which first calls are timed instead of alternating; 0 to alternate.
    compared
        Samples that are compared with the reference, spread over the batch; 0 for as many as the size of J allows.
    """

    name: str
    title: str
    network: str
    n: int
    contenders: tuple[Contender, ...]
    reference: str = "jacobian"
    fresh: int = 0
    compared: int = 0


@dataclass(frozen=True)
class Settings:
    """How long and how carefully; see ``python -m benchmarks --help``.

    ``load_before`` is the machine's load (processes at work) before the first case: above a few tenths, something else
    was running and the times are not to be trusted.
    """

    pythons: dict[str, str]
    threads: int
    rounds: int
    slice_seconds: float
    budget_seconds: float
    cap_seconds: float
    cap_bytes: int | None
    scratch: Path
    load_before: float = 0.0


@dataclass
class Timing:
    """Times of one contender: by the number of the round, the calls of its turn."""

    rounds: dict[int, list[float]] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """Calls timed."""
        return sum(map(len, self.rounds.values()))

    @property
    def best(self) -> float:
        """Shortest call."""
        return min(map(min, self.rounds.values()))

    @property
    def median(self) -> float:
        """Median over the rounds of the median call, so that a round with many calls counts once."""
        return median(map(median, self.rounds.values()))


def paired_ratio(a: Timing, b: Timing) -> float:
    """Median over rounds of a's time over b's in the same round: what slows the whole machine down for a while cancels.

    Where they share no round, the ratio of their medians.
    """
    ratios = [median(calls) / median(b.rounds[turn]) for turn, calls in a.rounds.items() if turn in b.rounds]
    return median(ratios) if ratios else a.median / b.median


@dataclass
class Outcome:
    """What became of one contender in one case; ``status`` is "ok" or why there are no times.

    ``first`` is the first call, with tracing and compiling, in seconds; ``peak`` the growth of resident memory in one
    later call, ``first_peak`` in the first; ``held`` the bytes of the value returned; ``errors`` by array the largest
    difference from the reference over the reference's largest entry; ``alone`` that it was not timed in alternation;
    ``least`` the time cap at which it was stopped.
    """

    contender: Contender
    status: str = "ok"
    alone: bool = False
    timing: Timing = field(default_factory=Timing)
    first: float | None = None
    first_peak: int | None = None
    peak: int | None = None
    held: int | None = None
    least: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """Whether there are times."""
        return self.timing.runs > 0

    @property
    def error(self) -> float | None:
        """Largest error of what the contender is there to compute (outputs are compared apart)."""
        errors = [value for name, value in self.errors.items() if name != "y"] or list(self.errors.values())
        return max(errors, default=None)


def relative_errors(arrays: dict[str, NDArray[Any]], reference: dict[str, NDArray[Any]]) -> dict[str, float]:
    """By array: max |a − r| / max |r|; infinite where shapes differ or entries are not finite."""
    errors = {}
    for name, array in arrays.items():
        expected = reference[name]
        difference = np.abs(array - expected).max(initial=0.0) if array.shape == expected.shape else np.inf
        scale = np.abs(expected).max(initial=0.0)
        errors[name] = 0.0 if difference == 0 else float(difference / scale) if np.isfinite(difference) else np.inf
    return errors


def _parameters(network: Network) -> int:
    return sum(prod(shape) for _, shape in specs(network))


def say(text: str) -> None:
    """Progress, on the error stream."""
    print(text, file=sys.stderr, flush=True)


class Runner:
    """Runs cases; references are computed once for each network and n."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._references: dict[tuple[str, int, str], dict[str, NDArray[Any]]] = {}
        self._started = 0
        self._round = 0  # over all cases, so that contenders share a round only where they took turns

    def run(self, case: Case) -> list[Outcome]:
        """All contenders of ``case``, in its order."""
        say(f"{case.name}: {case.title}")
        outcomes = [Outcome(contender) for contender in case.contenders]
        try:
            references = [self._reference(case, contender) for contender in case.contenders]
            if case.fresh:
                for outcome, reference in zip(outcomes, references, strict=True):
                    self._first_calls(case, outcome, reference)
            elif self._fits(case):
                for work in dict.fromkeys(contender.work for contender in case.contenders):
                    these = [i for i, contender in enumerate(case.contenders) if contender.work == work]
                    self._alternate(case, [outcomes[i] for i in these], [references[i] for i in these])
            else:
                say("  one contender after the other: side by side they would need too much memory")
                for outcome, reference in zip(outcomes, references, strict=True):
                    outcome.alone = True
                    self._alternate(case, [outcome], [reference])
        except WorkerError as error:  # of the reference
            for outcome in outcomes:
                outcome.status = f"no reference: {error}"
        return outcomes

    def _fits(self, case: Case) -> bool:
        """Whether all contenders can be kept alive: some frameworks hold on to memory between their turns."""
        free = memory.available()
        needed = 0
        for contender in case.contenders:
            network = NETWORKS[contender.network or case.network]
            if contender.dense:
                needed += 2 * 4 * (contender.n or case.n) * network.outputs * _parameters(network)
        return free is None or needed < 0.6 * free

    def _task(self, case: Case, contender: Contender) -> Task:
        network = NETWORKS[contender.network or case.network]
        n = contender.n or case.n
        if case.compared:
            samples = tuple(int(i) for i in np.linspace(0, n - 1, min(n, case.compared)).round())
        else:
            samples = compared_samples(n, network.outputs * _parameters(network))
        return Task(network.name, n, self._settings.threads, samples, contender.layout)

    def _start(self, module: str, name: str, extra: tuple[tuple[str, str], ...] = ()) -> Process:
        settings = self._settings
        self._started += 1
        log = settings.scratch / f"{self._started:03d}-{module}-{name}.log"
        free = memory.available()
        byte_cap = settings.cap_bytes or (int(0.6 * free) if free else None)
        python = settings.pythons.get(module, sys.executable)
        return Process(python, module, name, settings.threads, log, byte_cap, dict(extra))

    def _start_contender(self, contender: Contender) -> Process:
        return self._start(contender.module, contender.name, contender.environment)

    def _reference(self, case: Case, contender: Contender) -> dict[str, NDArray[Any]]:
        task = self._task(case, contender)
        key = (task.network_name, task.n, case.reference)
        if key not in self._references:
            path = self._settings.scratch / "reference.npz"
            with self._start("reference", case.reference) as process:
                process.ask("prepare", START_SECONDS, task=task.to_json())
                process.ask("first", START_SECONDS)
                process.ask("check", START_SECONDS, path=str(path))
            with np.load(path) as arrays:
                self._references[key] = dict(arrays)
        return self._references[key]

    def _compare(self, process: Process, outcome: Outcome, reference: dict[str, NDArray[Any]]) -> None:
        """Errors of what the first call gave; outputs that differ end the contender here."""
        path = self._settings.scratch / "arrays.npz"
        outcome.held = process.ask("check", START_SECONDS, path=str(path))["held"]
        with np.load(path) as arrays:
            outcome.errors = relative_errors(dict(arrays), reference)
        if outcome.errors.get("y", 0.0) > OUTPUT_TOLERANCE:
            raise WorkerError(f"outputs differ from the reference by {outcome.errors['y']:.1e}: not the same network")

    def _warm_up(self, process: Process, outcome: Outcome, reference: dict[str, NDArray[Any]]) -> bool:
        """First call, comparison, memory of a second call; whether the contender is to take turns.

        It does not where that second call took more than a contender's whole budget, or where the first is to be the
        only one: that call is then its time.
        """
        settings, patience = self._settings, outcome.contender.patience
        answer = process.ask("first", settings.cap_seconds * patience)
        outcome.first, outcome.first_peak = answer["seconds"], answer["peak"]
        self._compare(process, outcome, reference)
        if patience == 1:
            answer = process.ask("memory", settings.cap_seconds)
            outcome.peak = answer["peak"]
            if answer["seconds"] < settings.budget_seconds:
                return True
        self._round += 1
        outcome.timing.rounds[self._round] = [answer["seconds"]]
        return False

    def _alternate(
        self, case: Case, outcomes: Sequence[Outcome], references: Sequence[dict[str, NDArray[Any]]]
    ) -> None:
        settings = self._settings
        with ExitStack() as stack:
            running: dict[int, Process] = {}
            for i, outcome in enumerate(outcomes):  # imports, side by side: nothing is timed yet
                process = stack.enter_context(self._start_contender(outcome.contender))
                process.send("prepare", task=self._task(case, outcome.contender).to_json())
                running[i] = process
            for i, outcome in enumerate(outcomes):
                try:
                    outcome.versions = running[i].receive(START_SECONDS)["versions"]
                except WorkerError as error:
                    self._drop(running, i, outcome, error)
            for i in list(running):
                time.sleep(SETTLE_SECONDS)
                try:
                    if not self._warm_up(running[i], outcomes[i], references[i]):
                        running.pop(i).close()
                except WorkerError as error:
                    self._drop(running, i, outcomes[i], error)
            spent = dict.fromkeys(running, 0.0)
            for turn in range(settings.rounds):
                self._round += 1
                for i in list(running):
                    if turn >= 2 and spent[i] >= settings.budget_seconds:
                        continue
                    time.sleep(SETTLE_SECONDS)
                    try:
                        answer = running[i].ask("turn", settings.cap_seconds, seconds=settings.slice_seconds)
                    except WorkerError as error:
                        self._drop(running, i, outcomes[i], error)
                        continue
                    spent[i] += sum(answer["times"]) + answer["times"][0]  # one call goes before, untimed
                    outcomes[i].timing.rounds[self._round] = answer["times"]
        for outcome in outcomes:
            say(f"  {outcome.contender.label}: {_summary(outcome)}")

    def _first_calls(self, case: Case, outcome: Outcome, reference: dict[str, NDArray[Any]]) -> None:
        """The first call, and the second for comparison, in fresh processes one after the other."""
        contender, cap = outcome.contender, self._settings.cap_seconds
        try:
            for turn in range(case.fresh):
                with self._start_contender(contender) as process:
                    prepared = process.ask("prepare", START_SECONDS, task=self._task(case, contender).to_json())
                    outcome.versions = prepared["versions"]
                    answer = process.ask("first", cap)
                    self._round += 1
                    outcome.timing.rounds[self._round] = [answer["seconds"]]
                    if turn == 0:
                        outcome.first_peak = answer["peak"]
                        self._compare(process, outcome, reference)
                        outcome.peak = process.ask("memory", cap)["peak"]
        except WorkerError as error:
            outcome.status = str(error)
        say(f"  {contender.label}: {_summary(outcome)}")

    @staticmethod
    def _drop(running: dict[int, Process], i: int, outcome: Outcome, error: WorkerError) -> None:
        running.pop(i).close()
        outcome.status = f"failed: {error}"
        if isinstance(error, OverCap):
            outcome.status, outcome.least = str(error), error.seconds


def _summary(outcome: Outcome) -> str:
    if not outcome.timed:
        return outcome.status
    timing, error = outcome.timing, outcome.error
    note = "" if outcome.status == "ok" else f"; {outcome.status}"
    accuracy = "" if error is None else f", error {error:.1e}"
    return f"median {timing.median * 1e3:.3f} ms, best {timing.best * 1e3:.3f} ms, {timing.runs} runs{accuracy}{note}"
