"""How long a step may be: by a trust region where a damping costs one factorisation, else by the damping itself.

`Region` keeps ‖s / d‖ within a radius; the damping λ that does is found by Newton's method on 1 / ‖s(λ) / d‖, which is
nearly linear in λ (Hebden 1973; Moré 1978, "The Levenberg–Marquardt algorithm: implementation and theory", §§4–5).
Steps inside the region are those of Gauss and Newton, so convergence is quadratic where the residual vanishes.

`Damped` adapts λ by the gain ratio (Nielsen 1999, "Damping parameter in Marquardt's method"; Madsen, Nielsen and
Tingleff 2004, "Methods for non-linear least squares problems", algorithm 3.16): one solve a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from netjac.optimize.linear import System, Trial
from netjac.optimize.losses import Vector


@dataclass(frozen=True, eq=False)
class State:
    """Where an iteration stands: all that another run needs to go on exactly like this one.

    Attributes
    ----------
    x : (m,) float64
        The accepted point.
    damping : float
        λ of the last step, 0 before the first.
    growth : float
        Factor of λ at the next rejected step, where λ is what is controlled.
    radius : float
        Of the trust region, where that is; 0 before the first step.
    floor : float
        λ below which the linear systems would be singular to working precision.
    gradient : float
        Norm of the gradient at the start.
    norms : (m,) float64, or None
        Largest column norms so far, where those are the scale.
    nfev, njev, nit : int
        Evaluations of the residual and of its derivative, and accepted steps.
    met : int, or None
        Code of the test that the last accepted step met: the run ends at its point.
    """

    x: Vector
    damping: float = 0.0
    growth: float = 2.0
    radius: float = 0.0
    floor: float = 0.0
    gradient: float = 0.0
    norms: Vector | None = None
    nfev: int = 0
    njev: int = 0
    nit: int = 0
    met: int | None = None


Solve = Callable[[float], Trial | None]
"""Damping → step, or None where it cannot be computed."""


class Control(ABC):
    """How the length of steps is chosen and adapted."""

    @abstractmethod
    def start(self, state: State, scale: Vector, largest: float) -> State:
        """Set before the first step; ``largest`` is the largest diagonal entry of the scaled Jᵀ J."""

    @abstractmethod
    def step(self, system: System, solve: Solve, state: State) -> tuple[Vector | None, State]:
        """A step, and the state with its damping; None where none can be computed."""

    @abstractmethod
    def accepted(self, state: State, gain: float, length: float) -> State:
        """After a step of scaled length ‖s / d‖ that reduced the cost by ``gain`` times what was predicted."""

    def widens(self, state: State, gain: float, length: float) -> bool:
        """Whether the length of an accepted step was the border's and not the problem's, and the next may be longer."""
        return False

    @abstractmethod
    def rejected(self, state: State, length: float) -> State:
        """After a step that was not taken, or could not be computed (length 0)."""


class Damped(Control):
    """λ by the gain ratio."""

    _START = 1e-3  # relative to the largest diagonal entry of the scaled Jᵀ J

    def start(self, state: State, scale: Vector, largest: float) -> State:
        return replace(state, damping=self._START * largest)

    def step(self, system: System, solve: Solve, state: State) -> tuple[Vector | None, State]:
        trial = solve(state.damping)
        return None if trial is None else trial.step(), state

    def accepted(self, state: State, gain: float, length: float) -> State:
        # A step that went as predicted allows a bolder one, so that the end is not reached at the pace of λ alone.
        factor = 0.1 if abs(gain - 1) < 0.1 else max(1 / 3, 1 - (2 * gain - 1) ** 3)
        damping = state.damping * factor
        return replace(state, damping=max(damping, float(np.finfo(np.float64).tiny)), growth=2.0)

    def rejected(self, state: State, length: float) -> State:
        return replace(state, damping=state.damping * state.growth, growth=2 * state.growth)


class Region(Control):
    """‖s / d‖ within a radius."""

    _FLOOR = 1e-12  # least λ, relative to the largest diagonal entry of the scaled Jᵀ J
    _TRIES = 10
    _TOLERANCE = 0.1  # of the length of a step on the border

    def start(self, state: State, scale: Vector, largest: float) -> State:
        radius = float(np.linalg.norm(state.x / scale))
        return replace(state, radius=radius or 1.0, floor=self._FLOOR * largest)

    def step(self, system: System, solve: Solve, state: State) -> tuple[Vector | None, State]:
        radius, floor = state.radius, 0.0 if system.any_damping else state.floor
        low, high = floor, np.inf  # the damping looked for lies between
        damping = max(state.damping, floor)
        trial: Trial | None = None
        for _ in range(self._TRIES):
            trial = None  # what it holds is freed before the next is made
            trial = solve(damping)
            if trial is None:  # the matrix is singular to working precision: that much damping is the least
                damping = floor = low = 10 * max(damping, state.floor)
                continue
            inside = damping <= floor and trial.length <= radius * (1 + self._TOLERANCE)
            if inside or abs(trial.length - radius) <= self._TOLERANCE * radius:
                break
            low, high = (max(low, damping), high) if trial.length > radius else (low, min(high, damping))
            damping = _newton(trial, damping, radius, low, high) if low < high else high
        if trial is None:
            return None, replace(state, damping=damping)
        step = trial.step()
        if trial.length and (trial.length > radius or damping > floor):  # on the border: exactly
            step = step * (radius / trial.length)
        return step, replace(state, damping=damping)

    def widens(self, state: State, gain: float, length: float) -> bool:
        return gain > 0.75 and length > 0.95 * state.radius

    def accepted(self, state: State, gain: float, length: float) -> State:
        if gain < 0.25:
            return self._resized(state, 0.25 * length)
        if self.widens(state, gain, length):
            return self._resized(state, 2 * state.radius)
        return state

    def rejected(self, state: State, length: float) -> State:
        return self._resized(state, 0.25 * (min(length, state.radius) or state.radius))

    def _resized(self, state: State, radius: float) -> State:
        return replace(state, radius=radius, damping=state.damping * state.radius / radius if radius else np.inf)


def _newton(trial: Trial, damping: float, radius: float, low: float, high: float) -> float:
    """The next damping to try: of Newton's method, or where that leaves the bracket, inside it."""
    length, slope = trial.length, trial.slope()
    new = damping + (length - radius) / radius * length / slope if slope > 0 else np.nan
    if low < new < high:
        return new
    if length < radius and not new > low:  # less damping than the least that is allowed, or known to be too little
        return low if damping > 2 * low else float(np.sqrt(low * damping))
    return float(np.sqrt(max(low, 1e-3 * high) * high)) if high < np.inf else 10 * max(damping, low)
