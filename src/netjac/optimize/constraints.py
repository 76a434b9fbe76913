"""Limits of a network's outputs, or of their derivatives with respect to the inputs, as a constraint on θ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.linalg import LinearOperator

from netjac.errors import DataError, DtypeError, ModelError, NetjacError, ProbeError, ShapeError
from netjac.optimize import options, targets
from netjac.optimize.base import Problem, network_evaluator
from netjac.optimize.evaluations import EvaluatedJacobian, Evaluator
from netjac.optimize.losses import Vector
from netjac.optimize.options import OptionError
from netjac.sites import Coverage, Treatment
from netjac.spaces import OutputSpace

OF = ("outputs", "input_jacobian")
CURVATURES = ("none", "quasi-newton", "exact")


class _NoCurvature(scipy.optimize.BFGS):
    """A second derivative of zero; of the class that methods which use none do not warn of."""

    def update(self, delta_x: ArrayLike, delta_grad: ArrayLike) -> None:
        pass

    def dot(self, p: ArrayLike) -> Vector:
        return np.zeros_like(np.asarray(p, np.float64))

    def get_matrix(self) -> NDArray[np.float64]:
        return np.zeros((self.n, self.n))


@final
class OutputConstraint(scipy.optimize.NonlinearConstraint):
    """Outputs at chosen points within limits, lower ≤ f(x_c; θ) ≤ upper, or their derivatives with respect to x_c.

    It is a `scipy.optimize.NonlinearConstraint`, for SLSQP, trust-constr, COBYLA and COBYQA. Positive outputs are
    ``lower=0``; values that are known are ``lower=upper``; an output that rises with the input is
    ``of="input_jacobian", lower=0``.

    Parameters
    ----------
    model
        As for `netjac.jacobian`.
    x_c
        Inputs, n_c samples.
    lower, upper
        Numbers, None for no limit, or arrays: in the structure of the outputs, or what broadcasts to their shape
        (n_c, ...); for "input_jacobian", to (n_c, l, *shape of an input). Where both are infinite there is no row.
    of : {"outputs", "input_jacobian"}
        What is limited. The second takes a model of one input.
    problem : LeastSquares or Objective, optional
        Whose θ the constraint is a function of. By default θ holds the model's trainable variables, or ``variables``.
    variables
        The parameters, for a model that is a plain callable.
    curvature : {"none", "quasi-newton", "exact"}
        Second derivatives for trust-constr, the one method that wants them: zero, as those of the network are in the
        Gauss–Newton Hessian of the objective; SciPy's BFGS; or TensorFlow's own through products. SLSQP warns of
        "exact", which it cannot use.
    dtype
        As for `netjac.LeastSquares`.

    Attributes
    ----------
    fun, jac
        θ (M,) → what is limited (rows,), and its derivative, a dense float64 array (rows, M).
    lb, ub : (rows,)

    Raises
    ------
    DataError, ShapeError, OptionError
        If a limit does not fit, a lower one is above its upper one, or nothing is limited.
    ModelError
        If what is limited depends on none of the parameters, as with a model that the problem does not fit.
    ProbeError
        If slopes are limited and TensorFlow's second derivatives of the network are wrong.

    Examples
    --------
    A parabola through noise, which must not be negative at 0:

    >>> import numpy as np, tensorflow as tf
    >>> from netjac import Objective, OutputConstraint
    >>> c = tf.Variable([1.0, 0.0, 1.0], dtype="float64")
    >>> def parabola(x):
    ...     return c[0] + c[1] * x + c[2] * x**2
    >>> x = np.linspace(-1, 1, 9)[:, None]
    >>> def squares(y):
    ...     r = y - (x**2 - 0.1)
    ...     return 0.5 * np.sum(r**2), r
    >>> objective = Objective(parabola, x, squares, variables=[c])
    >>> positive = OutputConstraint(parabola, [[0.0]], 0, None, problem=objective)
    >>> result = objective.minimize("SLSQP", constraints=positive)
    >>> positive.fun(result.x).round(6) + 0.0
    array([0.])
    """

    def __init__(
        self,
        model: Any,
        x_c: Any,
        lower: Any = None,
        upper: Any = None,
        *,
        of: str = "outputs",
        problem: Problem[Any] | None = None,
        variables: Any = None,
        curvature: str = "none",
        dtype: str | None = "float64",
    ) -> None:
        options.one_of("of", of, OF)
        options.one_of("curvature", curvature, CURVATURES)
        self._size: int | None = None  # M, where extra parameters of the problem make it larger than the network's
        if problem is not None:
            if not isinstance(problem, Problem):
                raise OptionError(f"problem must be a LeastSquares or Objective, and is a {type(problem).__name__}.")
            self._size = problem.parameters.size
            variables = problem.network_variables
        given = model
        if of == "input_jacobian":
            _check_one_input(x_c)
            model, variables = _slopes(model, variables)
        self._evaluator = network_evaluator(model, x_c, variables, None, dtype)
        _check_depends(self._evaluator.coverage, of, given, problem)
        if of == "input_jacobian":
            _check_slopes(self._evaluator)
        self._m = self._evaluator.parameters.size
        self._last: tuple[Vector, EvaluatedJacobian] | None = None
        space, n = self._evaluator.output_space, targets.sample_count(x_c)
        if n is None:
            n = len(self._evaluator.evaluate().y)
        lb, ub = _limit(lower, -np.inf, space, n, "lower"), _limit(upper, np.inf, space, n, "upper")
        wrong = ~(lb <= ub)  # True for NaN too
        if wrong.any():
            i = int(np.argmax(wrong))
            raise DataError(f"the limits leave nothing between at entry {i}: lower {lb[i]}, upper {ub[i]}.")
        self._rows = np.flatnonzero(np.isfinite(lb) | np.isfinite(ub))
        if not self._rows.size:
            raise DataError("nothing is limited: give lower or upper.")
        hess = {"none": _NoCurvature(), "quasi-newton": None, "exact": self._curvature}[curvature]
        super().__init__(self._values, lb[self._rows], ub[self._rows], jac=self._derivative, hess=hess)

    def _at(self, theta: ArrayLike) -> EvaluatedJacobian:
        vector = np.asarray(theta, np.float64)
        expected = self._m if self._size is None else self._size
        if vector.shape != (expected,):
            raise ShapeError(f"theta must have the shape ({expected},), and has {vector.shape}.")
        network = vector[: self._m]
        if self._last is None or not np.array_equal(self._last[0], network):
            self._last = network.copy(), self._evaluator.evaluate(network.copy())
        return self._last[1]

    def _values(self, theta: ArrayLike) -> Vector:
        return self._at(theta).y.reshape(-1)[self._rows].astype(np.float64)

    def _derivative(self, theta: ArrayLike) -> NDArray[np.float64]:
        J = self._at(theta).to_array("(n l) m", dtype=np.float64)[self._rows]
        return J if self._size is None else np.pad(J, ((0, 0), (0, self._size - self._m)))

    def _curvature(self, theta: ArrayLike, v: ArrayLike) -> LinearOperator:
        at = np.array(theta, np.float64)
        u = np.zeros(self._at(at).y.shape)
        u.reshape(-1)[self._rows] = v
        padding = at.size - self._m

        def product(p: NDArray[Any]) -> Vector:
            found = self._evaluator.second_product(at[: self._m], u, p.reshape(-1)[: self._m])
            return np.pad(found, (0, padding))

        return LinearOperator((at.size, at.size), matvec=product, rmatvec=product, dtype=np.float64)


def _check_depends(coverage: Coverage, of: str, model: Any, problem: Problem[Any] | None) -> None:
    """Refuse what no parameter changes: all derivatives would be zero, and no step could meet the limits."""
    if any(entry.treatment is not Treatment.UNREACHED for entry in coverage.entries):
        return
    if problem is None:
        whose, own = "the variables given", ""
        names: Iterable[str] = dict.fromkeys(entry.variable for entry in coverage.entries)
    else:
        whose, own = "the problem's variables", _own_names(model)
        names = problem.parameters.names[: len(problem.network_variables)]
    raise ModelError(
        f"what is limited ({of}) depends on none of {whose} ({', '.join(map(repr, names))}), so that no step of the "
        f"optimiser would change it.{own} Give the model that is fitted, or one that shares variables with it."
    )


def _own_names(model: Any) -> str:
    """The variables of a constraint's own model, where it tells."""
    from netjac.tensorflow import parameters

    try:
        names = parameters(model).names
    except NetjacError:  # a plain callable
        return ""
    return f" This model has others: {', '.join(map(repr, names))}."


def _check_one_input(x: Any) -> None:
    if isinstance(x, Mapping) or sum(1 for _ in targets.leaves(x)) != 1:
        raise ModelError("of='input_jacobian' takes a model of one input: wrap the others into a function of that one.")


def _slopes(model: Any, variables: Any) -> tuple[Any, Any]:
    from netjac.tensorflow import parameters
    from netjac.tensorflow.slopes import InputSlopes

    if variables is None:
        variables = parameters(model).variables
    return InputSlopes(model), variables


def _check_slopes(evaluator: Evaluator) -> None:
    """Compare the derivative of the slopes, a second derivative, with their difference: TensorFlow has wrong ones.

    A little beside the present weights, of which zeros put samples on the kinks of a network.
    """
    rng = np.random.default_rng(0)
    start = evaluator.parameters.ravel(dtype=np.float64)
    theta = start + 0.01 * (1 + np.abs(start)) * rng.normal(size=start.shape)
    v = rng.normal(size=start.shape)
    at = evaluator.evaluate(theta)
    if at.dtype != np.float64:
        raise DtypeError("slopes are limited, and compared with differences, in float64: use dtype='float64'.")
    claimed = at.matmat(v[:, None])[:, 0]
    errors = []
    for step in (1e-5, 1e-7):
        difference = (evaluator.evaluate(theta + step * v).y - evaluator.evaluate(theta - step * v).y) / (2 * step)
        noise = np.finfo(np.float64).eps * float(np.linalg.norm(at.y)) / step
        size = max(float(np.linalg.norm(difference)), float(np.linalg.norm(claimed))) or 1.0
        errors.append(max(float(np.linalg.norm(difference.reshape(-1) - claimed)) - noise, 0.0) / size)
    if min(errors) > 1e-3:
        raise ProbeError(
            f"TensorFlow's second derivatives of this network disagree with a difference by {min(errors):.1e}, as they "
            "do where an operation holds a mean or a variance fixed (LayerNormalization): its slopes cannot be limited."
        )


def _limit(given: Any, otherwise: float, space: OutputSpace, n: int, which: str) -> Vector:
    """A limit of every entry (n*l,)."""
    if given is None:
        return np.full(n * space.size, otherwise)
    if isinstance(given, Mapping) or (len(space.segments) > 1 and isinstance(given, list | tuple)):
        return targets.flatten(space, given, which).reshape(-1)
    array = np.asarray(given, np.float64)
    shape = (n, *space.segments[0].shape) if len(space.segments) == 1 else (n, space.size)
    if array.shape in ((n, space.size), (n * space.size,)):
        return array.reshape(-1)
    try:
        return np.broadcast_to(array, shape).reshape(-1)
    except ValueError:
        raise ShapeError(f"{which} must be a number or broadcast to {shape}, and has {array.shape}.") from None
