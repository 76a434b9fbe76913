"""A value that code outside TensorFlow computes from a network's outputs, as a function of θ for any optimiser.

With outputs f(x; θ) (n, l), a value v(f) from outside with derivative g (n, l) and, perhaps, second derivative C with
respect to the outputs, and a Gaussian prior of means θ₀ and standard deviations σ,

    F(θ) = v(f(x; θ)) + ½ ‖(θ − θ₀) / σ‖²,
    ∇F = Jᵀ g + (θ − θ₀) / σ²,    ∇²F = Jᵀ C J + Σ g[n, l] ∇²f[n, l] + diag(1 / σ²).

Without the middle term the last is the (generalised) Gauss–Newton Hessian (Schraudolph 2002, "Fast curvature
matrix-vector products for second-order gradient descent"), which the factors multiply without forming anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TextIO, final

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray

from netjac import planning
from netjac.errors import DataError
from netjac.optimize import budget, hessian, methods, names, options
from netjac.optimize.base import Problem, network_evaluator
from netjac.optimize.callbacks import Callback, Stopped, by_result
from netjac.optimize.checkpoint import Fit
from netjac.optimize.description import of_data, of_function
from netjac.optimize.evaluations import EvaluatedJacobian, Evaluator
from netjac.optimize.external import External, ObjectiveAnswer, objective_reader
from netjac.optimize.losses import Vector
from netjac.optimize.options import OptionError
from netjac.optimize.rows import Factors, Rows, rows_of
from netjac.optimize.watch import Watch

CURVATURES = ("auto", *hessian.CURVATURES)


@final
@dataclass(frozen=True, eq=False)
class _Evaluation:
    theta: Vector  # (M,), a copy of ours
    network: EvaluatedJacobian
    m: int
    answer: ObjectiveAnswer | None  # None where the outputs are not finite
    cost: float

    @cached_property
    def rows(self) -> Rows:
        return rows_of(self.network, self.m)

    @cached_property
    def gradient(self) -> Vector:
        """Without the prior's; asked for by the optimiser and by the history."""
        answer = _answer(self)
        return np.concatenate([self.rows.rmatvec(answer.gradient.reshape(-1)), answer.extra])


@final
class Objective(Problem[_Evaluation]):
    """A function from outside of a model's outputs, and its derivatives over θ, for `scipy.optimize.minimize`.

    θ (M,) holds the model's parameters and then the extra ones.

    Parameters
    ----------
    model, x, variables
        As for `netjac.LeastSquares`.
    external
        ``external(outputs) → (value, gradient)`` or ``(value, gradient, curvature)``: the outputs come as float64
        arrays that cannot be written to, in the model's own structure; the gradient with respect to them has that
        structure too, or is (n, l); curvature, their second derivative or something positive that stands for it, is
        (n, l, l) where samples do not interact, else (n*l, n*l) as an array, a sparse matrix or a LinearOperator, or
        None. With ``extra``: ``external(outputs, extra) → (value, gradient, d_extra)``.
    trainable, prior, bounds, extra, dtype
        As for `netjac.LeastSquares`.
    curvature : {"auto", "gauss-newton", "difference", "exact"}
        What `hessp` and `hess` return: Jᵀ C J with the curvature C from outside; central differences of the gradient;
        or Jᵀ C J and the network's own second derivatives through TensorFlow. "auto" is the first where there is a
        curvature from outside, else the second.
    check
        Whether the gradient from outside is compared with central differences of the value at the first call.
    memory : number of bytes or str, optional
        Most that the factors at the best point and at a trial point may take; where they do not fit they are computed
        tile by tile. By default half of what the system has free. What the method of SciPy takes comes on top.

    Raises
    ------
    ShapeError, DataError, DtypeError, OptionError, NameLookupError
        If a name fits no parameter, or what is given for it does not fit.
    DerivativeError
        At the first evaluation, if the gradient from outside disagrees with the difference.
    ModelError
        If the model has nothing to train, or was never built.

    Examples
    --------
    The logarithm of a Poisson likelihood, written in NumPy:

    >>> import numpy as np, scipy.optimize, tensorflow as tf
    >>> from netjac import Objective
    >>> rate = tf.Variable(0.0, dtype="float64")
    >>> counts = np.array([[3.0], [5.0], [4.0]])
    >>> def likelihood(logs):
    ...     expected = np.exp(logs)
    ...     return np.sum(expected - counts * logs), expected - counts, expected[:, :, None]
    >>> objective = Objective(lambda x: rate + 0 * x, np.zeros((3, 1)), likelihood, variables=[rate])
    >>> result = scipy.optimize.minimize(
    ...     objective.fun, objective.x0, jac=objective.grad, hessp=objective.hessp, method="trust-ncg"
    ... )
    >>> np.exp(result.x).round(3)
    array([4.])
    """

    def __init__(
        self,
        model: Any,
        x: Any,
        external: Callable[..., Any],
        *,
        variables: Any = None,
        trainable: str | Sequence[str] | None = None,
        prior: dict[str, Any] | None = None,
        bounds: Any = None,
        extra: dict[str, Any] | None = None,
        curvature: str = "auto",
        dtype: str | None = "float64",
        check: bool = True,
        memory: float | str | None = None,
    ) -> None:
        options.one_of("curvature", curvature, CURVATURES)
        evaluator = network_evaluator(model, x, variables, trainable, dtype)
        self._set_up(evaluator, external, prior, bounds, extra, curvature, check, memory)

    @classmethod
    def from_evaluator(
        cls,
        evaluator: Evaluator,
        external: Callable[..., Any],
        *,
        prior: dict[str, Any] | None = None,
        bounds: Any = None,
        extra: dict[str, Any] | None = None,
        curvature: str = "auto",
        check: bool = True,
        memory: float | str | None = None,
    ) -> Self:
        """An objective on anything that evaluates outputs and Jacobian at a θ, whichever framework it comes from.

        Parameters
        ----------
        evaluator
            See `netjac.optimize.evaluations.Evaluator`.
        external, prior, bounds, extra, curvature, check, memory
            As for the class.
        """
        options.one_of("curvature", curvature, CURVATURES)
        objective = cls.__new__(cls)
        objective._set_up(evaluator, external, prior, bounds, extra, curvature, check, memory)
        return objective

    def _set_up(
        self,
        evaluator: Evaluator,
        external: Any,
        prior: Any,
        bounds: Any,
        extra: Any,
        curvature: str,
        check: bool,
        memory: float | str | None,
    ) -> None:
        self._evaluator, self._curvature = evaluator, curvature
        self._m = evaluator.parameters.size
        self._stop: BaseException | None = None
        own = names.extras(extra)
        space = evaluator.output_space
        self._external = External(external, objective_reader(space), space, own, check)
        self._prepare(names.together(evaluator.parameters, own), own, bounds, prior)
        limit = None if memory is None else planning.memory_bytes(memory)
        self._factors = budget.of_factors(limit, budget.need_of(evaluator, 0, 0), self._space.size)

    def _described(self) -> tuple[str, list[str]]:
        return "a value from outside", [of_data(self._evaluator, of_function(self._external.function))]

    # ---- value and derivatives

    def fun(self, theta: ArrayLike) -> float:
        """The value F(θ), for θ (M,); the model's own parameters are left as they are."""
        return self._at(theta).cost

    def grad(self, theta: ArrayLike) -> Vector:
        """The gradient ∇F(θ) (M,); costs no second evaluation at the θ `fun` was asked for last."""
        return self._gradient(self._at(theta))

    def fun_and_grad(self, theta: ArrayLike) -> tuple[float, Vector]:
        """Both, for ``scipy.optimize.minimize(objective.fun_and_grad, objective.x0, jac=True)``."""
        return self.fun(theta), self.grad(theta)

    def hessp(self, theta: ArrayLike, v: ArrayLike) -> Vector:
        """The Hessian at θ times v (M,), or what stands for it; see ``curvature`` of the class."""
        evaluation, vector = self._at(theta), np.asarray(v, np.float64).reshape(-1)
        if not self._by_factors(evaluation):
            return hessian.by_difference(lambda t: self._gradient(self._make(t)), evaluation.theta, vector)
        answer, m = _answer(evaluation), self._m
        product = np.zeros(self._space.size)
        product[:m] = evaluation.rows.rmatvec(_curved(answer.curvature, evaluation.rows.matvec(vector[:m])))
        if self._curvature == "exact":
            product[:m] += self._evaluator.second_product(evaluation.theta[:m], answer.gradient, vector[:m])
        return product if self._prior is None else product + self._prior**2 * vector

    def hess(self, theta: ArrayLike) -> NDArray[np.float64]:
        """The same as an array (M, M)."""
        evaluation = self._at(theta)
        if self._curvature == "exact" or not self._by_factors(evaluation):
            return hessian.explicit(lambda v: self.hessp(theta, v), self._space.size)
        matrix = _curvature_matrix(evaluation.rows, _answer(evaluation).curvature)
        if self._prior is not None:
            matrix[np.diag_indices(len(matrix))] += self._prior**2
        return matrix

    def _by_factors(self, evaluation: _Evaluation) -> bool:
        if self._curvature == "difference":
            return False
        if _answer(evaluation).curvature is not None:
            return True
        if self._curvature == "auto":
            return False
        raise OptionError(
            f"curvature={self._curvature!r} needs the second derivative with respect to the outputs as a third result "
            "of the function from outside, and no extra parameters; else use curvature='difference'."
        )

    # ---- the fit

    def minimize(
        self,
        method: Any = "L-BFGS-B",
        *,
        x0: ArrayLike | None = None,
        constraints: Any = (),
        bounds: Any = None,
        tol: float | None = None,
        callback: Any = None,
        options: dict[str, Any] | None = None,
        progress: bool | TextIO = False,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: float = 10.0,
        resume: str | os.PathLike[str] | None = None,
    ) -> scipy.optimize.OptimizeResult:
        """Minimise with `scipy.optimize.minimize`; afterwards the model holds the best parameters seen.

        Parameters
        ----------
        method
            Any method of SciPy, or a callable of your own; each gets the derivatives that it takes.
        x0 : (M,), optional
            The start, moved into the bounds; by default the model's present parameters.
        constraints
            `netjac.OutputConstraint`, or any constraint of SciPy's, or a list of them.
        bounds
            Instead of the objective's own, in the same forms. The start is moved into them.
        tol, options
            Handed to SciPy as they are.
        callback
            Called after every iteration, in the signatures that SciPy has for the method: ``intermediate_result`` (of
            TNC too, with x and fun), or under any other name x, for trust-constr (x, state). StopIteration ends the
            fit, and so does returning True where SciPy has it so (trust-constr).
        progress, checkpoint, checkpoint_every
            As for `netjac.LeastSquares.solve`.
        resume
            A checkpoint to go on from, of the same fit: the method starts anew from the best point.

        Returns
        -------
        scipy.optimize.OptimizeResult
            SciPy's, with a `History` added as ``history``. After Ctrl-C: ``success`` is False, ``status`` -3, and x the
            best point. If the code from outside raises or returns NaN, the fit stops: ``success`` is False, ``status``
            -4, ``error`` the exception, and x the best point before. With constraints, the best point is one that
            violates none by more than 1e-6.

        Raises
        ------
        OptionError, ShapeError
            If there is no such method, it cannot honour the bounds or the constraints, or x0 is of another size; before
            any work.
        DataError, CheckpointNotFoundError
            If x0 is not finite; if the checkpoint is damaged or of another fit; if there is none, or no folder for it.

        Notes
        -----
        What the code from outside raises at the start goes on, and so do Ctrl-C before there is a best point, and every
        other exception; the model then holds the best point, if there was one.
        """
        limits = self._bounds if bounds is None else names.bounds(self._space, bounds)
        kind = methods.choose(method, limits, constraints)
        methods.check(constraints, options)
        given = self._given(x0, resume)
        bounded = bool(np.any(np.isfinite(limits.lb) | np.isfinite(limits.ub)))
        told = None if callback is None else by_result(callback, with_state=kind is methods.METHODS["trust-constr"])
        watch = Watch.opened(
            lambda: self._evaluations.best,
            lambda: Fit(self._identity(method, limits) | {"constraints": len(_listed(constraints))}),
            progress=progress,
            path=checkpoint,
            every=checkpoint_every,
            resume=resume,
        )
        self.forget()
        self._limits, self._constraints, self._watch = limits, _listed(constraints), watch
        try:
            start = self._start(limits, given)
            self._seen(start, self._finite_fun(start), kind.gradient)
            result = scipy.optimize.minimize(
                self._finite_fun,
                start,
                method=method,
                jac=self.grad if kind.gradient else None,
                hess=self.hess if kind.hessian == "matrix" else None,
                hessp=self.hessp if kind.hessian == "product" else None,
                bounds=limits if bounded else None,
                constraints=constraints,
                tol=tol,
                callback=self._watched(told, kind.gradient),
                options=options,
            )
            if not isinstance(result, scipy.optimize.OptimizeResult):
                raise OptionError(f"method must return an OptimizeResult, and returned a {type(result).__name__}.")
            self._take_best(result)
            self._space.assign(result.x)
        except BaseException as error:
            self._keep_best()
            ended = self._ended(error, (99, "`callback` raised `StopIteration`."))  # as SciPy says it
            if ended is None:
                raise
            result = self._complete(ended)
        finally:
            self._limits, self._constraints, self._watch, self._stop = self._bounds, (), Watch(), None
            watch.close()
        result.history = watch.history
        return result

    def _seen(self, theta: Vector, value: float, gradient: bool) -> None:
        """An iterate, for the history; its gradient only where the method takes one."""
        optimality = self._largest(theta, self._gradient(self._at(theta))) if gradient else np.nan
        self._watch.iterate(theta, value, optimality)

    def _watched(self, told: Callback | None, gradient: bool) -> Callable[[Any], Any]:
        """The callback that SciPy gets, for which every method has a place."""

        def call(intermediate_result: Any) -> Any:
            result = intermediate_result
            if not isinstance(result, scipy.optimize.OptimizeResult):  # TNC shows x alone
                result = scipy.optimize.OptimizeResult(x=np.array(result, np.float64))
            theta = np.array(result.x, np.float64)
            if "fun" not in result:
                result.fun = self.fun(theta)
            self._seen(theta, float(result.fun), gradient)
            try:
                return None if told is None else told(result)
            except StopIteration:
                raise Stopped from None

        return call

    def _finite_fun(self, theta: ArrayLike) -> float:
        value = self.fun(theta)
        if not np.isfinite(value):
            self._stop = DataError(f"the value is {value} at a point that the optimiser asked for.")
            raise self._stop
        return value

    def _take_best(self, result: scipy.optimize.OptimizeResult) -> None:
        """Put the best point into the result if the optimiser ended on another; not where a constraint decides."""
        best = self._evaluations.best
        if best is not None and not self._constraints and best.cost <= result.fun:
            self._complete(result)

    def _complete(self, result: scipy.optimize.OptimizeResult) -> scipy.optimize.OptimizeResult:
        best = self._evaluations.best
        assert best is not None
        if not np.array_equal(best.theta, result.x) or "fun" not in result:
            result.x, result.fun, result.jac = best.theta.copy(), best.cost, self._gradient(best)
        return result

    # ---- evaluation

    @property
    def _failure(self) -> BaseException | None:
        return self._stop or self._external.failure

    def _make(self, theta: Vector) -> _Evaluation:
        self._watch.evaluated()
        network = budget.evaluated(self._evaluator, theta[: self._m], self._factors)
        if not np.all(np.isfinite(network.y)):  # a trial point too far away; the function need not see that
            return _Evaluation(theta, network, self._m, None, float("nan"))
        answer = self._external(network.y, theta[self._m :])
        cost = float(answer.values[0]) + 0.5 * float(np.sum(self._prior_residual(theta) ** 2))
        return _Evaluation(theta, network, self._m, answer, cost)

    def _gradient(self, evaluation: _Evaluation) -> Vector:
        if self._prior is None:
            return evaluation.gradient.copy()
        return evaluation.gradient + self._prior**2 * (evaluation.theta - self._mean)


def _answer(evaluation: _Evaluation) -> ObjectiveAnswer:
    if evaluation.answer is None:
        raise DataError("the outputs are not finite at these parameters, so there is no derivative.")
    return evaluation.answer


def _curved(curvature: Any, v: Vector) -> Vector:
    """C v (n*l,)."""
    if isinstance(curvature, np.ndarray) and curvature.ndim == 3:
        n, l, _ = curvature.shape
        return np.matmul(curvature, v.reshape(n, l, 1)).reshape(-1)
    return np.asarray(curvature @ v, np.float64)


def _curvature_matrix(rows: Rows, curvature: Any) -> NDArray[np.float64]:
    """Jᵀ C J (m, m); blocks of C are folded into the factors by their eigenvectors, C = V diag(λ) Vᵀ."""
    if isinstance(rows, Factors) and isinstance(curvature, np.ndarray) and curvature.ndim == 3:
        values, vectors = np.linalg.eigh(curvature)
        turned = Factors(rows.jacobian.scaled(vectors.transpose(0, 2, 1).astype(rows.jacobian.dtype)))
        return turned.normal(values.reshape(-1))
    A = rows.to_array()
    CA = np.stack([_curved(curvature, column) for column in A.T], axis=1)
    return 0.5 * (A.T @ CA + CA.T @ A)


def _listed(constraints: Any) -> Sequence[Any]:
    if constraints is None:
        return ()
    return tuple(constraints) if isinstance(constraints, list | tuple) else (constraints,)
