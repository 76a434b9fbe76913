"""A network as a nonlinear least-squares problem for an optimiser that knows nothing of networks.

With outputs f(x; θ) (n, l) and targets y (n, l), the residual is r(θ) = f(x; θ) − y, flattened sample-major, and

    cost(θ) = ½ ‖r(θ)‖²,    ∂r/∂θ = J (n·l, m),    gradient = Jᵀ r.

One evaluation at a θ gives both r and (the factors of) J, so whoever asks for the derivative at a point whose value was
asked for before pays nothing more than the form wanted: an array, or an operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self, TextIO

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.linalg import LinearOperator

from netjac.errors import DataError, DtypeError, PicklingError, ShapeError
from netjac.optimize import losses, options, targets
from netjac.optimize.losses import Loss, Vector
from netjac.optimize.monitor import Monitor
from netjac.spaces import OutputSpace, ParameterSpace


class EvaluatedJacobian(Protocol):
    """What a problem needs of a Jacobian: the outputs that came with it, its products, and its array."""

    @property
    def y(self) -> NDArray[Any]:
        """Outputs (n, l)."""

    @property
    def dtype(self) -> Any:
        """Of the factors."""

    def matvec(self, v: NDArray[Any]) -> NDArray[Any]:
        """J v (n*l,)."""

    def rmatvec(self, u: NDArray[Any]) -> NDArray[Any]:
        """Jᵀ u (m,)."""

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


@dataclass(frozen=True, eq=False)
class _Evaluation:
    theta: Vector  # (m,), a copy of ours
    jacobian: EvaluatedJacobian
    residual: Vector  # (n*l,)
    cost: float


class _Float64Operator(LinearOperator):
    """J with float64 in and out, as SciPy's solvers expect.

    The products are taken in the type of the factors: those of a float32 network are wrong in the eighth digit anyway,
    and their products with float64 vectors cost three to five times as much (all of A and D is converted each time).
    About a quarter of SciPy's products are with the zero vector.
    """

    def __init__(self, jacobian: EvaluatedJacobian, shape: tuple[int, int]) -> None:
        super().__init__(np.float64, shape)
        self.jacobian = jacobian

    def _matvec(self, v: NDArray[Any]) -> Vector:
        if not v.any():
            return np.zeros(self.shape[0])
        return self._double(self.jacobian.matvec(self._own(v.reshape(-1))))

    def _rmatvec(self, u: NDArray[Any]) -> Vector:
        if not u.any():
            return np.zeros(self.shape[1])
        return self._double(self.jacobian.rmatvec(self._own(u.reshape(-1))))

    def _matmat(self, V: NDArray[Any]) -> NDArray[np.float64]:
        return self._double(self.jacobian.matmat(self._own(V)))

    def _rmatmat(self, U: NDArray[Any]) -> NDArray[np.float64]:
        return self._double(self.jacobian.rmatmat(self._own(U)))

    def _own(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(self.jacobian.dtype, copy=False)

    def _double(self, array: NDArray[Any]) -> NDArray[np.float64]:
        return array.astype(np.float64, copy=False)


class LeastSquares:
    """Residual f(x) − y of a model and its Jacobian over the trainable parameters, for `scipy.optimize.least_squares`.

    Parameters
    ----------
    model
        Keras model, layer, ``tf.Module``, or a callable together with ``variables``; as for `netjac.jacobian`.
    x
        Inputs, n samples.
    y
        Targets in the structure of the model's outputs: an array (n, ...), or a list or dict of arrays. With one output
        a sample, (n,) will do.
    variables
        The parameters, for a model that is a plain callable.
    jac
        What `jac` returns: "dense", a float64 array (n*l, m); "operator", a float64 `LinearOperator` on the factors;
        "auto", an array up to 64 MiB and an operator beyond.

    Raises
    ------
    ShapeError, DataError, DtypeError
        If y does not fit the model's outputs, has another number of samples than x, or is not finite.
    ModelError
        If the model has nothing to train, or was never built.

    Notes
    -----
    SciPy works in float64. A float32 model evaluates residuals to about 1e-7 of the outputs, so differences of cost
    below that are rounding: tolerances (``ftol``, ``xtol``, ``gtol``) under 1e-7 then end in steps that no longer help,
    and the fit stalls. Build the model in float64 (``keras.config.set_floatx("float64")``, or
    ``dtype="float64"`` on its layers) where SciPy's default of 1e-8 or less is to be reached.

    The last evaluation and the best one are kept. Call `forget` if anything but θ changed in between, such as the
    statistics of a normalisation layer.

    Examples
    --------
    A straight line through three points:

    >>> import numpy as np, scipy.optimize, tensorflow as tf
    >>> from netjac import LeastSquares
    >>> slope, offset = tf.Variable(0.0, dtype="float64"), tf.Variable(0.0, dtype="float64")
    >>> def line(x):
    ...     return slope * x + offset
    >>> x = np.array([[0.0], [1.0], [2.0]])
    >>> problem = LeastSquares(line, x, 3 * x + 1, variables=[slope, offset])
    >>> result = scipy.optimize.least_squares(problem.fun, problem.x0, problem.jac)
    >>> result.x.round(6)
    array([3., 1.])
    """

    def __init__(self, model: Any, x: Any, y: Any, *, variables: Any = None, jac: str = "auto") -> None:
        options.check_form(jac)
        targets.check_values(y)
        n = targets.sample_count(x)
        if n is not None:
            targets.check_count(y, n)
        self._set_up(_tensorflow_evaluator(model, x, variables), y, jac)

    @classmethod
    def from_evaluator(cls, evaluator: Evaluator, y: Any, *, jac: str = "auto") -> Self:
        """A problem on anything that evaluates outputs and Jacobian at a θ, whichever framework it comes from.

        Parameters
        ----------
        evaluator
            See `Evaluator`.
        y, jac
            As for the class.
        """
        options.check_form(jac)
        targets.check_values(y)
        problem = cls.__new__(cls)
        problem._set_up(evaluator, y, jac)
        return problem

    def _set_up(self, evaluator: Evaluator, y: Any, jac: str) -> None:
        self._evaluator = evaluator
        self._targets = targets.flatten(evaluator.output_space, y)
        self._form = jac
        self.shape = (self._targets.size, evaluator.parameters.size)
        if 0 in self.shape:
            raise DataError(f"there is nothing to fit: {self.shape[0]} residuals and {self.shape[1]} parameters.")
        self._loss: Loss = "linear"
        self._f_scale = 1.0
        self._monitor = Monitor()
        self.forget()

    @property
    def parameters(self) -> ParameterSpace:
        """Names and shapes of the parameters; ``parameters.assign(theta)`` writes θ into the model."""
        return self._evaluator.parameters

    @property
    def x0(self) -> Vector:
        """The model's present parameters, a float64 vector (m,) of your own."""
        return np.array(self.parameters.ravel(dtype=np.float64))

    @property
    def best_theta(self) -> Vector | None:
        """The parameters (m,) of least cost evaluated so far, or None before the first evaluation."""
        return None if self._best is None else self._best.theta.copy()

    def forget(self) -> None:
        """Drop the evaluations kept, the best one too."""
        self._last: _Evaluation | None = None
        self._best: _Evaluation | None = None

    def fun(self, theta: ArrayLike) -> Vector:
        """Residual f(x; θ) − y, flattened sample-major.

        Parameters
        ----------
        theta : (m,)
            The parameters; the model's own are left as they are.

        Returns
        -------
        (n*l,) float64, the caller's own.
        """
        return self._evaluate(theta).residual.copy()

    def jac(self, theta: ArrayLike) -> NDArray[np.float64] | LinearOperator:
        """Jacobian of the residual, ∂r/∂θ; costs no second evaluation at the θ `fun` was asked for last.

        Parameters
        ----------
        theta : (m,)
            The parameters.

        Returns
        -------
        (n*l, m) float64, as an array or a `LinearOperator`; see ``jac`` of the class.
        """
        return self._derivative(theta, options.default_form(self._form, self.shape))

    def solve(
        self,
        method: str = "trf",
        *,
        max_nfev: int | None = None,
        ftol: float | None = 1e-8,
        xtol: float | None = 1e-8,
        gtol: float | None = 1e-8,
        x_scale: Any = None,
        loss: Loss = "linear",
        f_scale: float = 1.0,
        bounds: Any = (-np.inf, np.inf),
        jac: str | None = None,
        tr_solver: str | None = None,
        tr_options: dict[str, Any] | None = None,
        callback: Any = None,
        verbose: int = 0,
        progress: bool | TextIO = False,
    ) -> scipy.optimize.OptimizeResult:
        """Fit with `scipy.optimize.least_squares`; afterwards the model holds the best parameters seen.

        Parameters
        ----------
        method : {"trf", "dogbox", "lm"}
            SciPy's method. "lm" needs n*l ≥ m.
        max_nfev, ftol, xtol, gtol, x_scale, loss, f_scale, bounds, tr_solver, tr_options, callback, verbose
            Handed to SciPy as they are. ``bounds`` are over the flat θ. SciPy's remaining options concern finite
            differences and arguments of functions, and do not apply.
        jac : {"auto", "dense", "operator"}, optional
            The form in which SciPy gets the Jacobian; None takes that of the problem. "auto" is an array for "lm", for
            ``tr_solver="exact"``, for ``x_scale="jac"`` and for anything up to 64 MiB, else an operator with
            ``tr_solver="lsmr"``.
        progress
            False; True for one line on the terminal; or a text stream, which gets lines even if it is no terminal.

        Returns
        -------
        scipy.optimize.OptimizeResult
            SciPy's, with a `History` added as ``history``.

        Raises
        ------
        OptionError
            If the options exclude each other; before any work.
        DataError
            If the residual at the start is not finite.

        Notes
        -----
        Whatever ends the fit early (an error, Ctrl-C), the model gets the best parameters seen before the exception
        goes on. A trial point whose residual is not finite is never kept.
        """
        form, tr_solver = options.choose(
            self.shape,
            method=method,
            jac=self._form if jac is None else jac,
            tr_solver=tr_solver,
            x_scale=x_scale,
            loss=loss,
            callback=callback,
        )
        options.check_progress(progress)
        start = self.x0
        self.forget()
        self._loss, self._f_scale = loss, f_scale
        self._monitor = monitor = Monitor(progress, max_nfev)
        try:
            self._check_start(start)
            result = scipy.optimize.least_squares(
                self.fun,
                start,
                jac=lambda theta: self._iterate(theta, form),
                bounds=bounds,
                method=method,
                ftol=ftol,
                xtol=xtol,
                gtol=gtol,
                x_scale=x_scale,
                loss=loss,
                f_scale=f_scale,
                tr_solver=tr_solver,
                tr_options=tr_options,
                max_nfev=max_nfev,
                verbose=verbose,
                callback=callback,
            )
            self._take_best(result, form)
        except BaseException:
            if self._best is not None:
                self.parameters.assign(self._best.theta)
            raise
        finally:
            monitor.close()
            self._loss, self._f_scale, self._monitor = "linear", 1.0, Monitor()
        self.parameters.assign(result.x)
        result.history = monitor.history
        return result

    def _check_start(self, start: Vector) -> None:
        residual = self._evaluate(start).residual
        bad = residual.size - int(np.isfinite(residual).sum())
        if bad:
            raise DataError(
                f"{bad} of {residual.size} residuals are not finite at the present parameters; start the fit from "
                "parameters at which the outputs are."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        raise PicklingError(
            "a LeastSquares problem computes with a live model and cannot be pickled: save theta (best_theta, or x of "
            "the solver's result) and the model (model.save), and make the problem again from what was saved."
        )

    def _evaluate(self, theta: ArrayLike) -> _Evaluation:
        given = self._real(theta)
        vector = given.astype(np.float64, copy=False)
        for known in (self._last, self._best):
            if known is not None and np.array_equal(known.theta, vector):
                return known
        if vector.shape != (self.shape[1],):
            raise ShapeError(
                f"theta must have the shape ({self.shape[1]},), one entry a parameter, and has {vector.shape}."
            )
        vector = vector.copy()
        self._last = None  # a large evaluation is freed before the next one is made
        jacobian = self._evaluator.evaluate(vector)
        if jacobian.y.shape != self._targets.shape:
            raise DataError(f"the model gives outputs (n, l) = {jacobian.y.shape}, and y has {self._targets.shape}.")
        residual = (jacobian.y - self._targets).reshape(-1)  # float64, as the targets are
        evaluation = _Evaluation(vector, jacobian, residual, losses.cost(residual, self._loss, self._f_scale))
        self._monitor.evaluated()
        self._last = evaluation
        # False for NaN: a point without a finite cost is never the best one.
        if np.isfinite(evaluation.cost) and (self._best is None or evaluation.cost < self._best.cost):
            self._best = evaluation
        return evaluation

    def _real(self, theta: ArrayLike) -> NDArray[Any]:
        try:
            given = np.asarray(theta)
        except ValueError as error:
            raise ShapeError(f"theta must have the shape ({self.shape[1]},), and is ragged ({error}).") from None
        if given.dtype.kind not in "fiub":
            hint = "; the Jacobian is problem.jac, not a difference of complex values (jac='cs')"
            raise DtypeError(
                f"theta must be a vector ({self.shape[1]},) of real numbers, one entry a parameter, and has dtype "
                f"{given.dtype}{hint if given.dtype.kind == 'c' else ''}."
            )
        return given

    def _derivative(self, theta: ArrayLike, form: str) -> NDArray[np.float64] | LinearOperator:
        jacobian = self._evaluate(theta).jacobian
        if form == "operator":
            return _Float64Operator(jacobian, self.shape)
        return jacobian.to_array("(n l) m", dtype=np.float64)

    def _iterate(self, theta: ArrayLike, form: str) -> NDArray[np.float64] | LinearOperator:
        evaluation = self._evaluate(theta)
        weighted = losses.weighted(evaluation.residual, self._loss, self._f_scale)
        gradient = _Float64Operator(evaluation.jacobian, self.shape).rmatvec(weighted)
        self._monitor.iterate(evaluation.cost, float(np.abs(gradient).max()))
        return self._derivative(theta, form)

    def _take_best(self, result: scipy.optimize.OptimizeResult, form: str) -> None:
        """Put the best point into the result if the solver ended on another.

        MINPACK rejects a step that lowers the cost by far less than its model predicted, though the point is better;
        and a callback may have written into the vector it was shown.
        """
        best = self._best
        if best is None or not best.cost <= result.cost or np.array_equal(best.theta, result.x):
            return
        weighted = losses.weighted(best.residual, self._loss, self._f_scale)
        result.x, result.fun, result.cost = best.theta.copy(), best.residual.copy(), best.cost
        result.jac = self._derivative(best.theta, form)
        result.grad = np.asarray(best.jacobian.rmatvec(weighted), dtype=np.float64)
        result.optimality = float(np.abs(result.grad).max())


def _tensorflow_evaluator(model: Any, x: Any, variables: Any) -> Evaluator:
    """The evaluator of a TensorFlow model; imported here so that `netjac.optimize` alone loads no TensorFlow."""
    from netjac.tensorflow import evaluator

    return evaluator(model, x, variables=variables)
