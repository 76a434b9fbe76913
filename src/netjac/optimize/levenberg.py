"""The iteration of Levenberg and Marquardt: damping, gain ratio, bounds, termination.

The damping is adapted by the gain ratio as in Nielsen (1999), "Damping parameter in Marquardt's method", in the form of
Madsen, Nielsen and Tingleff (2004), "Methods for non-linear least squares problems", algorithm 3.16; the scaling with
the largest column norms seen is that of Moré (1978), "The Levenberg–Marquardt algorithm: implementation and theory".
Bounds are kept by projection: the parameters that a step would carry across are fixed at their bound and the step is
solved again (after Kanzow, Yamashita and Fukushima 2004, "Levenberg–Marquardt methods with strong local convergence
properties for solving nonlinear equations with convex constraints").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult

from netjac.allocation import warn
from netjac.errors import DataError, ShapeError
from netjac.optimize import budget, routes
from netjac.optimize.control import State
from netjac.optimize.linear import Linearisation, Mask, System
from netjac.optimize.losses import Vector
from netjac.optimize.minimand import Minimand, Point
from netjac.optimize.routes import Route, choose_route, column_norms, small_libraries
from netjac.pools import one_thread

MESSAGES = {
    -3: "Interrupted; the result is the best point so far.",
    -2: "Stopped because `callback` raised `StopIteration` or returned `True`.",
    0: "The maximum number of function evaluations is exceeded.",
    1: "`gtol` termination condition is satisfied.",
    2: "`ftol` termination condition is satisfied.",
    3: "`xtol` termination condition is satisfied.",
    4: "Both `ftol` and `xtol` termination conditions are satisfied.",
}
"""SciPy's termination codes, and -3 for Ctrl-C."""

_LEAST_GAIN = 1e-4
"""Ratio of actual to predicted reduction from which a step is taken."""

_HOPELESS = 1e100
"""Damping at which the step is zero by any measure."""

_INNER = 10
"""Times a step is solved again with more parameters fixed at their bounds."""


@dataclass(eq=False)
class Iteration:
    """One run: from a state to a result."""

    problem: Minimand
    tolerances: tuple[float, float, float]
    x_scale: Vector | str | None
    max_nfev: int
    linear_solver: str
    callback: Callable[[OptimizeResult], bool] | None
    verbose: int
    memory: int | None = None

    def run(self, state: State) -> OptimizeResult:
        """Iterate from a state to the end; a result even when interrupted."""
        if state.x.shape != self.problem.x0.shape:
            raise ShapeError(f"the state is of {state.x.shape} parameters, and x0 of {self.problem.x0.shape}.")
        self.point = self.problem.evaluate(state.x)
        if not np.isfinite(self.point.cost):
            residual = self.point.residual
            bad = int(np.count_nonzero(~np.isfinite(residual)))
            if bad:
                raise DataError(f"{bad} of {residual.size} residuals are not finite in the initial point.")
            raise DataError(
                f"the cost is {self.point.cost} in the initial point, though its residuals are finite (the largest is "
                f"{np.abs(residual).max(initial=0.0):.1e}): scale them so that squares do not overflow."
            )
        self.state = state if state.nfev else replace(state, nfev=1)
        self.model: Linearisation | None = None
        self.route: Route | None = None
        try:
            status = self._iterate()
        except KeyboardInterrupt:
            if self.model is None:
                raise
            status = -3
        return self._result(status)

    def _iterate(self) -> int:
        """Steps until something ends them: its code."""
        status = self.state.met
        shown = _Shown(self.verbose == 2)
        taken: _Step | None = None
        while True:
            model = self._linearise()
            optimality = self._optimality()
            shown.line(self.state, self.point.cost, taken, optimality)
            if taken is not None and self.callback is not None and self.callback(self._intermediate(optimality)):
                return -2
            if status is None and optimality < self.tolerances[2]:
                status = 1
            if status is None and self.state.nfev >= self.max_nfev:
                status = 0
            if status is not None:
                return status
            taken, status = self._take_step(model)
            if taken is None:
                assert status is not None
                return status
            self.point = taken.point

    def _linearise(self) -> Linearisation:
        """The model at the present point, which becomes ``self.model``; and how its steps are to be computed."""
        self.model = None  # freed before the next one is made
        J = self.problem.derivative(self.point)
        with one_thread(*small_libraries(J.shape)):
            return self._model_of(J)

    def _model_of(self, J: Any) -> Linearisation:
        if self.route is None and self.memory is None:
            rows, m = J.shape
            self.memory = budget.default(None, rows, m, routes.ways(rows, m))
        model = self.problem.linearise(self.point, J, self.memory)
        if not np.all(np.isfinite(model.g)):
            raise DataError(
                "the derivative holds values that are not finite, at a point where the residuals are finite."
            )
        if self.route is None:
            bounded = self.problem.bounded
            self.route = choose_route(
                model, self.linear_solver, x_scale=self.x_scale, bounded=bounded, memory=self.memory
            )
        state = replace(self.state, njev=self.state.njev + 1)
        first = state.njev == 1
        if self._by_columns or first:
            norms = column_norms(Linearisation(J, model.r, model.g))
            if self._by_columns:
                state = replace(state, norms=norms if state.norms is None else np.maximum(state.norms, norms))
            if first:
                scale = self._scale(state)
                state = replace(state, gradient=float(np.linalg.norm(model.g)))
                state = self.route.control.start(state, scale, float(np.max((norms * scale) ** 2, initial=0.0)) or 1.0)
        self.model, self.state = model, state
        return model

    @property
    def _by_columns(self) -> bool:
        """Whether the scale is that of the columns of J."""
        assert self.route is not None
        return isinstance(self.x_scale, str) or (self.x_scale is None and self.route.by_columns)

    def _scale(self, state: State) -> Vector:
        if self._by_columns:
            norms = state.norms
            assert norms is not None
            return 1 / np.where(norms > 0, norms, 1.0)
        return np.ones_like(state.x) if self.x_scale is None else np.asarray(self.x_scale)

    def _take_step(self, model: Linearisation) -> tuple[_Step | None, int | None]:
        """The next accepted step, or None where there is none; and the code of a test that is met."""
        ftol, xtol, _ = self.tolerances
        x, cost = self.point.x, self.point.cost
        assert self.route is not None
        few = small_libraries(model.shape)
        system: System | None = None
        rejected = False
        while True:
            try:
                with one_thread(*few):
                    if system is None:
                        system = self.route.system(model, self._scale(self.state), self.state)
                    step = self._step(system, model)
            except MemoryError:
                if self.linear_solver != "auto" or self.route.name == "products":
                    raise
                system = None  # freed before anything else
                self._go_on_by_products(model)
                continue
            control = self.route.control
            if step is None:
                self.state = control.rejected(self.state, 0.0)
            else:
                new = self.problem.evaluate(self._projected(x + step))
                step = new.x - x
                length, scaled = float(np.linalg.norm(step)), float(np.linalg.norm(step / system.scale))
                reduction = cost - new.cost
                with one_thread(*few):
                    predicted = -float(model.g @ step) - 0.5 * model.curvature(step)
                gain = reduction / predicted if predicted > 0 and np.isfinite(new.cost) else -1.0
                self.state = replace(self.state, nfev=self.state.nfev + 1)
                # A step made short by rejections says nothing about convergence in the cost.
                # Nor does one that was held on the border of a region which it now widens.
                held = control.widens(self.state, gain, scaled) and reduction > 0
                by_f = abs(reduction) < ftol * cost and gain > 0.25 and not (rejected or held)
                by_x = not held and length < xtol * (xtol + float(np.linalg.norm(x)))
                status = 4 if by_f and by_x else 2 if by_f else 3 if by_x else None
                if gain > _LEAST_GAIN and reduction > 0:
                    state = control.accepted(self.state, gain, scaled)
                    self.state = replace(state, x=new.x, nit=state.nit + 1, met=status)
                    return _Step(new, reduction, length), status
                if status is not None:
                    return None, status
                if self.state.nfev >= self.max_nfev:
                    return None, 0
                self.state = control.rejected(self.state, scaled)
            rejected = True
            if not (np.isfinite(self.state.damping) and self.state.damping < _HOPELESS):
                return None, 3

    def _go_on_by_products(self, model: Linearisation) -> None:
        """A matrix could not be allocated: this step and those after it come from products."""
        assert self.route is not None
        warn(f"a matrix for steps by {self.route.name!r} could not be allocated, and products are used instead")
        other = choose_route(model, "products", x_scale=self.x_scale, bounded=self.problem.bounded)
        self.route = replace(other, by_columns=self.route.by_columns, reason=f"memory ran out; {other.reason}")
        scale = self._scale(self.state)
        largest = float(np.max((column_norms(model) * scale) ** 2, initial=0.0)) or 1.0
        self.state = self.route.control.start(self.state, scale, largest)

    def _step(self, system: System, model: Linearisation) -> Vector | None:
        """The step that the control allows, those parameters held at a bound that it would carry across."""
        assert self.route is not None
        control = self.route.control
        if not self.problem.bounded:
            step, self.state = control.step(system, system.solve, self.state)
            return step
        x, lower, upper = self.point.x, self.problem.lower, self.problem.upper
        free: Mask = ~self._pushing(model.g)
        step, self.state = control.step(system, lambda damping: system.solve(damping, free), self.state)
        shift = np.zeros_like(x)
        for _ in range(_INNER):
            if step is None:
                return None
            trial = x + step + shift
            across = free & ((trial < lower) | (trial > upper))
            if not across.any():
                break
            shift[across] = self._projected(trial)[across] - x[across]
            free = free & ~across
            step = system.step(self.state.damping, free, shift)
        return None if step is None else self._projected(x + step + shift) - x

    def _projected(self, x: Vector) -> Vector:
        return np.clip(x, self.problem.lower, self.problem.upper)

    def _pushing(self, g: Vector) -> Mask:
        """Which parameters are at a bound that the gradient pushes them against."""
        x = self.point.x
        return ((x <= self.problem.lower) & (g > 0)) | ((x >= self.problem.upper) & (g < 0))

    def _optimality(self) -> float:
        assert self.model is not None
        g = self.model.g
        return float(np.max(np.abs(g[~self._pushing(g)]), initial=0.0))

    # ---- what is told

    def _intermediate(self, optimality: float) -> OptimizeResult:
        assert self.model is not None
        return OptimizeResult(
            x=self.point.x.copy(),
            fun=self.point.residual.copy(),
            cost=np.float64(self.point.cost),
            grad=self.model.g.copy(),
            optimality=optimality,
            nit=self.state.nit,
            nfev=self.state.nfev,
            njev=self.state.njev,
            damping=self.state.damping,
            state=self.state,
        )

    def _result(self, status: int) -> OptimizeResult:
        assert self.model is not None
        assert self.route is not None
        x, lower, upper = self.point.x, self.problem.lower, self.problem.upper
        result = self._intermediate(self._optimality())
        result.update(
            jac=self.model.J,
            active_mask=np.where(x <= lower, -1, np.where(x >= upper, 1, 0)),
            status=status,
            message=MESSAGES[status],
            success=status > 0,
            linear_solver=self.route.name,
            reason=self.route.reason,
        )
        if self.verbose:
            print(result.message)
            print(
                f"Function evaluations {result.nfev}, final cost {result.cost:.4e}, first-order optimality "
                f"{result.optimality:.2e}; steps by {self.route.name}: {self.route.reason}"
            )
        return result


@dataclass(frozen=True, eq=False)
class _Step:
    point: Point
    reduction: float
    length: float


class _Shown:
    """A table of the iteration on standard output."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        if shown:
            made = f"{'reduction':>11} {'step':>10}"
            print(f"{'iteration':>9} {'nfev':>6} {'cost':>14} {made} {'optimality':>11} {'damping':>9}")

    def line(self, state: State, cost: float, taken: _Step | None, optimality: float) -> None:
        """One accepted point."""
        if self.shown:
            made = f"{taken.reduction:11.2e} {taken.length:10.2e}" if taken else " " * 22
            print(f"{state.nit:9d} {state.nfev:6d} {cost:14.6e} {made} {optimality:11.2e} {state.damping:9.1e}")
