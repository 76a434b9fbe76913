"""A least-squares fit by each method: what the solver is handed, and what it tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike
from scipy.optimize import OptimizeResult

from netjac.optimize import callbacks, solvers
from netjac.optimize.callbacks import Told
from netjac.optimize.control import State
from netjac.optimize.evaluations import Evaluated
from netjac.optimize.losses import Vector
from netjac.optimize.watch import Watch


class Evaluation(Evaluated, Protocol):
    """Residual and cost at one θ."""

    @property
    def residual(self) -> Vector:
        """(rows,)."""


@dataclass(frozen=True, eq=False)
class Fitting:
    """One fit of one problem.

    Attributes
    ----------
    start : (M,)
        Where it starts.
    at
        The evaluation at θ, made once.
    residual
        The residual at θ, for a solver that may keep it; not finite where it is not, or an error, as the method needs.
    derivative
        ∂residual/∂θ at an evaluation, in the form that the method takes.
    optimality
        ‖gradient‖_∞ at an evaluation.
    watch
        Told of every iterate.
    told
        The person's callback.
    """

    start: Vector
    at: Callable[[ArrayLike], Evaluation]
    residual: Callable[[ArrayLike], Vector]
    derivative: Callable[[Any], Any]
    optimality: Callable[[Any], float]
    watch: Watch
    told: Told

    def run(self, method: str, own: dict[str, Any], **options: Any) -> OptimizeResult:
        """The solver's result.

        Parameters
        ----------
        method
            "netjac", or one of `scipy.optimize.least_squares`.
        own, options
            Of the method, and of all.
        """
        if method == "netjac":
            return self._netjac(**own, **options)
        if method == "lm":
            return scipy.optimize.least_squares(self.residual, self.start, self._minpacks, method="lm", **options)
        told = None if self.told is None else callbacks.raising(self.told)
        return scipy.optimize.least_squares(
            self.residual, self.start, self._iterate, method=method, callback=told, **own, **options
        )

    def _netjac(self, **options: Any) -> OptimizeResult:
        """`netjac.least_squares`, whose own gradient and damping go into the history."""
        state = None if self.watch.resumed is None else self.watch.resumed.state
        if state is None:
            evaluation = self.at(self.start)
            self.watch.iterate(
                self.start, evaluation.cost, self.optimality(evaluation), nfev=1, state=State(self.start)
            )
            del evaluation  # its factors are not needed for longer than those of other points

        def callback(intermediate_result: OptimizeResult) -> bool:
            now = intermediate_result
            self.watch.iterate(now.x, now.cost, now.optimality, damping=now.damping, nfev=now.nfev, state=now.state)
            return self.told is not None and self.told(now)

        return solvers.least_squares(
            self.residual,
            self.start,
            lambda theta: self.derivative(self.at(theta)),
            callback=callback,
            state=state,
            **options,
        )

    def _iterate(self, theta: Vector) -> Any:
        """SciPy asks for the Jacobian at the start and after every accepted step."""
        evaluation = self.at(theta)
        self._record(evaluation)
        return self.derivative(evaluation)

    def _minpacks(self, theta: Vector) -> Any:
        """As does MINPACK, which calls nobody back: so this does."""
        evaluation = self.at(theta)
        new = self._record(evaluation)
        if new and self.told is not None and not np.array_equal(theta, self.start):
            history = self.watch.history
            x, fun, nfev = evaluation.theta.copy(), evaluation.residual.copy(), int(history.nfev[-1])
            if self.told(OptimizeResult(x=x, fun=fun, cost=evaluation.cost, nit=len(history) - 1, nfev=nfev)):
                raise callbacks.Stopped
        return self.derivative(evaluation)

    def _record(self, evaluation: Evaluation) -> bool:
        return self.watch.iterate(evaluation.theta, evaluation.cost, self.optimality(evaluation))
