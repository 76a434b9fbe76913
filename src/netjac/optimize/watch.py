"""What looks on while a fit runs, whoever's method it is: the history, the line on the screen, the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

import numpy as np

from netjac.optimize import checkpoint, options
from netjac.optimize.checkpoint import Fit, Snapshot
from netjac.optimize.control import State
from netjac.optimize.losses import Vector
from netjac.optimize.monitor import History, Monitor


class _Best(Protocol):
    @property
    def theta(self) -> Vector: ...

    @property
    def cost(self) -> float: ...


class Watch:
    """Told of each evaluation and each iterate of one fit.

    Parameters
    ----------
    monitor
        Keeps and shows the history.
    best
        Returns the best evaluation so far, or None.

    Attributes
    ----------
    resumed : Snapshot or None
        Where the fit goes on from.
    """

    def __init__(self, monitor: Monitor | None = None, best: Callable[[], _Best | None] = lambda: None) -> None:
        self._monitor = monitor or Monitor()
        self._best = best
        self._path: Path | None = None
        self._every = 0.0
        self._saved = time.monotonic()
        self._fit = Fit({})
        self._last: tuple[Vector, State | None] | None = None
        self.resumed: Snapshot | None = None

    @classmethod
    def opened(
        cls,
        best: Callable[[], _Best | None],
        fit: Callable[[], Fit],
        *,
        progress: bool | TextIO = False,
        max_nfev: int | None = None,
        path: Any = None,
        every: Any = 0.0,
        resume: Any = None,
    ) -> Self:
        """With a checkpoint to write, and one to go on from, checked before any work.

        Parameters
        ----------
        best
            As for the class.
        fit
            Which fit it is; asked for only where there is a checkpoint.
        progress, max_nfev
            See `Monitor`.
        path, every, resume
            ``checkpoint``, ``checkpoint_every`` and ``resume`` of `netjac.LeastSquares.solve`.

        Raises
        ------
        OptionError, CheckpointNotFoundError, DataError
        """
        options.check_progress(progress)
        target, every = checkpoint.check_path(path, "checkpoint"), checkpoint.check_interval(every)
        source = checkpoint.check_path(resume, "checkpoint to resume from")
        described = fit() if target or source else Fit({})
        resumed = None if source is None else checkpoint.load(source, described)
        watch = cls(Monitor(progress, max_nfev, None if resumed is None else resumed.history), best)
        watch._path, watch._every, watch._fit, watch.resumed = target, every, described, resumed
        return watch

    def go_on(self, cost: float) -> None:
        """Continue from the snapshot, if that is of the same data.

        Parameters
        ----------
        cost
            At the snapshot's best point, as it is now.

        Raises
        ------
        DataError
        """
        assert self.resumed is not None
        self.resumed.check_cost(cost)
        self._last = self.resumed.theta, self.resumed.state

    @property
    def history(self) -> History:
        """What was recorded so far."""
        return self._monitor.history

    def evaluated(self) -> None:
        """Count one evaluation of the model."""
        self._monitor.evaluated()

    def iterate(
        self,
        theta: Vector,
        cost: float,
        optimality: float,
        *,
        damping: float = np.nan,
        nfev: int | None = None,
        state: State | None = None,
    ) -> bool:
        """Record an iterate and, if it is time, write the checkpoint; False where it is the last iterate again.

        Parameters
        ----------
        theta : (M,)
            The point the optimiser goes on from.
        cost, optimality, damping, nfev
            See `History`; ``nfev`` where the optimiser counts itself.
        state
            Of netjac's own solver there.
        """
        if self._last is not None and np.array_equal(self._last[0], theta):
            return False
        self._monitor.iterate(cost, optimality, damping, nfev)
        self._last = theta.copy(), state
        if time.monotonic() - self._saved >= self._every:
            self._save()
        return True

    def close(self) -> None:
        """Leave the line standing, and the checkpoint up to date."""
        self._monitor.close()
        self._save()

    def _save(self) -> None:
        if self._path is None or self._last is None:
            return
        (theta, state), best = self._last, self._best()
        point, cost = (theta, float(self.history.cost[-1])) if best is None else (best.theta, best.cost)
        checkpoint.save(self._path, self._fit, Snapshot(theta, point, cost, self.history, state))
        self._saved = time.monotonic()
