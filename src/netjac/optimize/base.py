"""What the problems have in common: θ and its names, bounds and prior, the evaluations kept, and how a fit may end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray

from netjac.errors import DataError, DtypeError, PicklingError, ShapeError
from netjac.optimize import description, names, targets
from netjac.optimize.callbacks import Stopped
from netjac.optimize.evaluations import Evaluated, Evaluations, TracedEvaluator
from netjac.optimize.identity import by_variable, named
from netjac.optimize.losses import Vector
from netjac.optimize.options import OptionError
from netjac.optimize.watch import Watch
from netjac.spaces import ParameterSpace

INTERRUPTED = -3
"""Status of a fit that ended by Ctrl-C."""

FAILED = -4
"""Status of a fit that ended because the code from outside failed."""

FEASIBLE = 1e-6
"""By how much a point may violate a constraint and still be the best one."""

E = TypeVar("E", bound=Evaluated)


class Problem(ABC, Generic[E]):
    """A network, data, and something to minimise over θ (M,) = [the network's parameters, extra ones]."""

    def _prepare(self, space: ParameterSpace, extra: ParameterSpace, bounds: Any, prior: Any) -> None:
        self._space, self._extra = space, extra
        self._bounds = names.bounds(space, bounds)
        self._limits = self._bounds  # those of the fit that is running
        self._constraints: Sequence[Any] = ()  # of SciPy's kinds, of the fit that is running
        self._watch = Watch()  # of the fit that is running
        found = names.prior(space, prior)
        self._prior: Vector | None = None if found is None else found[0]
        self._mean: Vector = np.zeros(space.size) if found is None else found[1]
        self._evaluations: Evaluations[E] = Evaluations(self._make, self._allowed)

    @abstractmethod
    def _make(self, theta: Vector) -> E:
        """The evaluation at θ."""

    @property
    @abstractmethod
    def _failure(self) -> BaseException | None:
        """What the code from outside raised at its last call."""

    @abstractmethod
    def _described(self) -> tuple[str, list[str]]:
        """What is minimised, and a line for each network and its data."""

    def __repr__(self) -> str:
        value, data = self._described()
        held = {"bounds": np.isfinite(self._bounds.lb) | np.isfinite(self._bounds.ub)}
        if self._prior is not None:
            held["prior"] = self._prior > 0
        return description.of_problem(type(self).__name__, value, data, self._space, len(self._extra), held)

    # ---- θ

    @property
    def parameters(self) -> ParameterSpace:
        """Names and shapes of the parameters, extra ones last; ``parameters.assign(theta)`` writes θ into the model."""
        return self._space

    @property
    def network_variables(self) -> tuple[Any, ...]:
        """The live variables of the network among the parameters, which come first; extra ones are not."""
        variables = self._space.variables or ()
        return variables[: len(variables) - len(self._extra)]

    @property
    def x0(self) -> Vector:
        """The present parameters moved into the bounds, a float64 vector (M,) of your own."""
        return np.clip(self._space.ravel(dtype=np.float64), self._bounds.lb, self._bounds.ub)

    @property
    def bounds(self) -> scipy.optimize.Bounds:
        """Bounds over θ, infinite where there are none; a copy of your own."""
        return scipy.optimize.Bounds(self._bounds.lb.copy(), self._bounds.ub.copy())

    @property
    def extra(self) -> dict[str, Any]:
        """The extra parameters as they are now, by name: after a fit, the best ones."""
        return names.values(self._extra, self._extra.ravel(dtype=np.float64))

    @property
    def best_theta(self) -> Vector | None:
        """The parameters (M,) of least cost evaluated so far within the bounds, or None before there are any."""
        return None if self._evaluations.best is None else self._evaluations.best.theta.copy()

    def forget(self) -> None:
        """Drop the evaluations kept, the best one too."""
        self._evaluations.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        raise PicklingError(
            f"{type(self).__name__} computes with a live model and cannot be pickled: save theta "
            "(best_theta, or x of the solver's result) and the model (model.save), and make the problem again from "
            "what was saved."
        )

    # ---- for those who inherit

    def _at(self, theta: ArrayLike) -> E:
        vector = self._vector(theta).astype(np.float64, copy=False)
        if vector.shape != (self._space.size,):
            raise ShapeError(
                f"theta must have the shape ({self._space.size},), one entry a parameter, and has {vector.shape}."
            )
        return self._evaluations.at(vector)

    def _vector(self, theta: ArrayLike) -> NDArray[Any]:
        size = self._space.size
        try:
            given = np.asarray(theta)
        except ValueError as error:
            raise ShapeError(f"theta must have the shape ({size},), and is ragged ({error}).") from None
        if given.dtype.kind not in "fiub":
            hint = "; the Jacobian is problem.jac, not a difference of complex values (jac='cs')"
            raise DtypeError(
                f"theta must be a vector ({size},) of real numbers, one entry a parameter, and has dtype "
                f"{given.dtype}{hint if given.dtype.kind == 'c' else ''}."
            )
        return given

    def _allowed(self, theta: Vector) -> bool:
        within = bool(np.all((theta >= self._limits.lb) & (theta <= self._limits.ub)))
        return within and all(violation(constraint, theta) <= FEASIBLE for constraint in self._constraints)

    def _prior_residual(self, theta: Vector) -> Vector:
        """(θ − θ₀) / σ of the parameters that have a prior."""
        if self._prior is None:
            return np.zeros(0)
        held = np.flatnonzero(self._prior)
        return self._prior[held] * (theta - self._mean)[held]

    def _keep_best(self) -> None:
        """Write the best θ into the model, if there is one."""
        if self._evaluations.best is not None:
            self._space.assign(self._evaluations.best.theta)

    def _ended(self, error: BaseException, stopped: tuple[int, str]) -> scipy.optimize.OptimizeResult | None:
        """The result of a fit that Ctrl-C, a callback or a failure of the code from outside ended; else None.

        Parameters
        ----------
        error
            What was raised.
        stopped
            Status and message where a callback did.
        """
        best = self._evaluations.best
        if best is None:
            return None
        result = scipy.optimize.OptimizeResult(x=best.theta.copy(), nfev=self._evaluations.count, success=False)
        if isinstance(error, KeyboardInterrupt):
            result.update(status=INTERRUPTED, message="Interrupted; the result is the best point so far.")
        elif isinstance(error, Stopped):
            result.update(status=stopped[0], message=stopped[1])
        elif error is self._failure:
            said = f"{type(error).__name__}: {error}"
            message = f"The external code failed, and x is the best point before that. {said}"
            result.update(status=FAILED, message=message, error=error)
        else:
            return None
        return result

    def _largest(self, theta: Vector, gradient: Vector) -> float:
        """‖gradient‖_∞ without the entries that push a parameter against its bound."""
        pushing = ((theta <= self._limits.lb) & (gradient > 0)) | ((theta >= self._limits.ub) & (gradient < 0))
        return float(np.max(np.abs(gradient[~pushing]), initial=0.0))

    def _identity(self, method: Any, limits: scipy.optimize.Bounds) -> dict[str, Any]:
        """What a checkpoint of a fit must agree in, as JSON holds it."""
        return {
            "problem": type(self).__name__,
            "method": named(method),
            "parameters": [[segment.name, list(segment.shape)] for segment in self._space],
            "bounds": by_variable(self._space, np.isfinite(limits.lb) | np.isfinite(limits.ub), limits.lb, limits.ub),
            "prior": {} if self._prior is None else by_variable(self._space, self._prior > 0, self._prior, self._mean),
        }

    def _given(self, x0: ArrayLike | None, resume: Any) -> Vector | None:
        """The start that a person gave, checked: (M,), or None."""
        if x0 is None:
            return None
        if resume is not None:
            raise OptionError("give either x0 or resume: a fit that is resumed starts where it stood.")
        start = self._vector(x0).astype(np.float64)
        if start.shape != (self._space.size,):
            raise ShapeError(
                f"x0 must have the shape ({self._space.size},), one entry a parameter, and has {start.shape}."
            )
        wrong = ~np.isfinite(start)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise DataError(f"x0 must be finite, and is {start[i]} for {names.entry(self._space, i)}.")
        return start

    def _start(self, limits: scipy.optimize.Bounds, x0: Vector | None) -> Vector:
        """Where a fit starts: at x0, else at the present parameters, or where the one that it continues stood."""
        resumed = self._watch.resumed
        if resumed is None:
            return np.clip(self._space.ravel(dtype=np.float64) if x0 is None else x0, limits.lb, limits.ub)
        self._watch.go_on(self._at(resumed.best).cost)
        return (resumed.best if resumed.state is None else resumed.state.x).copy()


def violation(constraint: Any, theta: Vector) -> float:
    """By how much θ violates a constraint in any of SciPy's forms; 0 where it does not."""
    if isinstance(constraint, Mapping):
        value = np.atleast_1d(constraint["fun"](theta, *constraint.get("args", ())))
        excess = np.abs(value) if constraint["type"] == "eq" else -value
    else:
        linear = isinstance(constraint, scipy.optimize.LinearConstraint)
        value = np.atleast_1d(constraint.A @ theta if linear else constraint.fun(theta))
        excess = np.maximum(constraint.lb - value, value - constraint.ub)
    return float(np.max(excess, initial=0.0))


def network_evaluator(model: Any, x: Any, variables: Any, trainable: Any, dtype: str | None) -> TracedEvaluator:
    """The evaluator of a TensorFlow model; imported here so that `netjac.optimize` alone loads no TensorFlow."""
    targets.check_arrays(x, "x")
    from netjac.tensorflow import evaluator, parameters

    if trainable is not None:
        space = parameters(model, variables)
        assert space.variables is not None
        variables = [space.variables[i] for i in names.chosen(space, trainable)]
    return evaluator(model, x, variables=variables, dtype=dtype)
