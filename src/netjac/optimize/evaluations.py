"""One evaluation a θ, shared by value and derivative; and what a framework provides to make one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from netjac.optimize.losses import Vector
from netjac.sites import Coverage
from netjac.spaces import OutputSpace, ParameterSpace


class EvaluatedJacobian(Protocol):
    """What a problem needs of a Jacobian: the outputs that came with it, its products, and its array."""

    @property
    def y(self) -> NDArray[Any]:
        """Outputs (n, l)."""

    @property
    def dtype(self) -> Any:
        """Of the factors."""

    def matmat(self, V: NDArray[Any]) -> NDArray[Any]:
        """J V (n*l, q)."""

    def rmatmat(self, U: NDArray[Any]) -> NDArray[Any]:
        """Jᵀ U (m, q)."""

    def to_array(self, layout: str = ..., *, dtype: Any = None) -> NDArray[Any]:
        """J as an array."""


class Evaluator(Protocol):
    """What a framework provides: outputs and Jacobian at any θ, the model's own weights left alone."""

    @property
    def parameters(self) -> ParameterSpace:
        """The columns, with the live variables."""

    @property
    def output_space(self) -> OutputSpace:
        """The rows."""

    def evaluate(self, theta: NDArray[Any] | None = None) -> EvaluatedJacobian:
        """Outputs and Jacobian at theta (m,), or at the present weights."""

    def second_product(self, theta: Vector, u: NDArray[np.float64], v: Vector) -> Vector:
        """Σ u[n, l] ∇²y[n, l] v (m,), for u (n, l) and v (m,); needed for ``curvature="exact"`` alone."""


class TracedEvaluator(Evaluator, Protocol):
    """One that knows, before it evaluates, which parameters the outputs depend on."""

    @property
    def coverage(self) -> Coverage:
        """What becomes of each variable."""


class Evaluated(Protocol):
    """What `Evaluations` needs to know of an evaluation."""

    @property
    def theta(self) -> Vector:
        """Where it was made, (M,)."""

    @property
    def cost(self) -> float:
        """What is minimised; NaN or infinite at a point that cannot be kept."""


E = TypeVar("E", bound=Evaluated)


class Evaluations(Generic[E]):
    """The last evaluation and the best one: whoever asks again at either θ pays nothing.

    Parameters
    ----------
    make
        Evaluates at θ (M,), a float64 vector that nobody else writes to.
    allowed
        Whether a point may be the best one: within the bounds, for one.

    Attributes
    ----------
    last, best
        None before there are any.
    count : int
        Evaluations made.
    """

    def __init__(self, make: Callable[[Vector], E], allowed: Callable[[Vector], bool]) -> None:
        self._make, self._allowed = make, allowed
        self.last: E | None = None
        self.best: E | None = None
        self.count = 0

    def at(self, theta: Vector) -> E:
        """The evaluation at θ, kept or made."""
        for known in (self.last, self.best):
            if known is not None and np.array_equal(known.theta, theta):
                return known
        self.last = None  # a large evaluation is freed before the next one is made
        self.count += 1
        evaluation = self._make(theta.copy())
        self.last = evaluation
        # False for NaN: a point without a finite cost is never the best one.
        better = np.isfinite(evaluation.cost) and (self.best is None or evaluation.cost < self.best.cost)
        if better and self._allowed(evaluation.theta):
            self.best = evaluation
        return evaluation

    def forget(self) -> None:
        """Drop both, and count from zero."""
        self.last = self.best = None
        self.count = 0
