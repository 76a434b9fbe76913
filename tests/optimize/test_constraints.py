"""OutputConstraint: values and derivatives against NumPy, and fits that must keep to it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import netjac as nj
from netjac.errors import DataError, ModelError, ShapeError
from netjac.optimize import OptionError
from netjac.optimize.base import violation
from small_fits import difference, formula, network, outputs_of, weights

X = np.linspace(-1, 1, 20)[:, None]
Y = np.sin(3 * X[:, 0])
WHERE = np.array([[-0.8], [0.0], [0.5]])


def squares(y: np.ndarray) -> Any:
    r = y[:, 0] - Y
    return 0.5 * np.sum(r**2), r[:, None], np.ones((20, 1, 1))


def slopes_of(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dy/dx (n,) of the network with three hidden units, in NumPy."""
    w, b, v = theta[:3], theta[3:6], theta[6:9]
    return (1 - np.tanh(x * w + b) ** 2) @ (w * v)


# ---------------------------------------------------------------- value and derivative


@pytest.mark.parametrize("of", ["outputs", "input_jacobian"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_value_and_derivative(of: str, dtype: str) -> None:
    """Also of a float32 model, which is evaluated in float64."""
    model = network(dtype=dtype)
    constraint = nj.OutputConstraint(model, WHERE, -1, 2, of=of, curvature="exact")
    assert isinstance(constraint, scipy.optimize.NonlinearConstraint)
    theta = weights(model).astype(np.float64) + 0.1

    def plain(t: np.ndarray) -> np.ndarray:
        return outputs_of(t, WHERE)[:, 0] if of == "outputs" else slopes_of(t, WHERE)

    np.testing.assert_allclose(constraint.fun(theta), plain(theta), atol=1e-13)
    jacobian = constraint.jac(theta)
    assert isinstance(jacobian, np.ndarray)
    assert jacobian.dtype == np.float64
    np.testing.assert_allclose(jacobian, difference(plain, theta), atol=1e-8)
    v, p = np.array([1.0, -2.0, 0.5]), np.linspace(-1, 1, 10)
    bent = difference(lambda t: constraint.jac(t).T @ v, theta, 1e-5) @ p
    np.testing.assert_allclose(constraint.hess(theta, v) @ p, bent, atol=1e-7)
    np.testing.assert_array_equal(constraint.lb, [-1, -1, -1])
    np.testing.assert_array_equal(constraint.ub, [2, 2, 2])


def test_slopes_of_every_output_by_every_input() -> None:
    model = network(outputs=2, inputs=3)
    points = np.random.default_rng(0).normal(size=(4, 3))
    constraint = nj.OutputConstraint(model, points, 0, None, of="input_jacobian")
    theta = weights(model)

    def plain(t: np.ndarray) -> np.ndarray:
        def at(p: np.ndarray) -> np.ndarray:
            return outputs_of(t, p[None], outputs=2)[0]

        return np.stack([difference(at, p) for p in points]).reshape(-1)

    np.testing.assert_allclose(constraint.fun(theta), plain(theta), atol=1e-8)
    np.testing.assert_allclose(constraint.fun(theta), nj.input_jacobian(model, points).reshape(-1), atol=1e-12)
    np.testing.assert_allclose(constraint.jac(theta), difference(constraint.fun, theta), atol=1e-7)
    # the second input alone
    chosen = nj.OutputConstraint(model, points, [-np.inf, 0, -np.inf], None, of="input_jacobian")
    np.testing.assert_array_equal(chosen.fun(theta), constraint.fun(theta).reshape(4, 2, 3)[:, :, 1].reshape(-1))
    np.testing.assert_array_equal(chosen.jac(theta), constraint.jac(theta).reshape(4, 2, 3, -1)[:, :, 1].reshape(8, -1))


def test_an_input_that_does_not_matter_has_the_slope_zero() -> None:
    w = tf.Variable([[2.0]], dtype="float64")
    constraint = nj.OutputConstraint(
        lambda x: x[:, :1] @ w, np.ones((2, 2)), 0, None, of="input_jacobian", variables=[w]
    )
    np.testing.assert_array_equal(constraint.fun([3.0]), [3, 0, 3, 0])
    np.testing.assert_array_equal(constraint.jac([3.0]), [[1], [0], [1], [0]])


@pytest.mark.parametrize(
    ("lower", "expected"),
    [
        (0.5, [0.5] * 6),
        ([0.5, 1.0], [0.5, 1.0] * 3),
        (np.arange(6.0).reshape(3, 2), np.arange(6.0)),
        (np.arange(6.0), np.arange(6.0)),
        (np.arange(3.0)[:, None], [0, 0, 1, 1, 2, 2]),
    ],
)
def test_limits_are_broadcast(lower: Any, expected: Any) -> None:
    np.testing.assert_array_equal(nj.OutputConstraint(network(outputs=2), WHERE, lower).lb, expected)


def test_limits_of_one_output_a_sample_and_of_some_points() -> None:
    model = network()
    constraint = nj.OutputConstraint(model, WHERE, [0.0, -np.inf, 1.0], [np.inf, np.inf, 1.0])
    np.testing.assert_array_equal(constraint.lb, [0, 1])
    np.testing.assert_array_equal(constraint.ub, [np.inf, 1])
    theta = weights(model)
    np.testing.assert_allclose(constraint.fun(theta), outputs_of(theta, WHERE)[[0, 2], 0])
    assert constraint.jac(theta).shape == (2, 10)


def test_limits_in_the_structure_of_the_outputs() -> None:
    inputs = keras.Input((1,))
    heads = {name: keras.layers.Dense(k)(inputs) for name, k in [("b", 2), ("a", 1)]}
    model = keras.Model(inputs, heads)
    names = list(nj.jacobian(model, WHERE).output_space.names)
    constraint = nj.OutputConstraint(model, WHERE, {"a": np.zeros(3), "b": np.ones((3, 2))})
    order = [0, 1, 1] if names[0].startswith("a") else [1, 1, 0]
    np.testing.assert_array_equal(constraint.lb, order * 3)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, DataError, "nothing is limited"),
        ({"lower": 1, "upper": 0}, DataError, "leave nothing between at entry 0: lower 1.0, upper 0.0"),
        ({"lower": np.nan}, DataError, "leave nothing between"),
        ({"lower": np.zeros(4)}, ShapeError, r"lower must be a number or broadcast to \(3, 1\), and has \(4,\)"),
        ({"lower": 0, "of": "slopes"}, OptionError, "of must be one of 'outputs', 'input_jacobian'"),
        ({"lower": 0, "curvature": "newton"}, OptionError, "curvature must be one of 'none', 'quasi-newton', 'exact'"),
        ({"lower": 0, "problem": 3}, OptionError, "problem must be a LeastSquares or Objective"),
    ],
)
def test_limits_that_do_not_fit(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nj.OutputConstraint(network(), WHERE, **given)


def test_slopes_need_one_input() -> None:
    a, b = keras.Input((1,)), keras.Input((1,))
    model = keras.Model([a, b], keras.layers.Dense(1)(keras.layers.Concatenate()([a, b])))
    with pytest.raises(ModelError, match="one input"):
        nj.OutputConstraint(model, [WHERE, WHERE], 0, of="input_jacobian")


def test_slopes_whose_derivative_tensorflow_gets_wrong_are_refused() -> None:
    """Keras' LayerNormalization stops the gradient of the mean; outputs themselves can be limited."""
    stack = [keras.Input((1,)), keras.layers.Dense(4, "tanh"), keras.layers.LayerNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(stack)
    with pytest.raises(nj.ProbeError, match="its slopes cannot be limited"):
        nj.OutputConstraint(model, WHERE, 0, of="input_jacobian")
    assert nj.OutputConstraint(model, WHERE, 0).jac(nj.parameters(model).ravel()).shape == (3, 21)


def test_slopes_of_kinks_and_in_float32() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(1)])
    constraint = nj.OutputConstraint(model, WHERE, 0, of="input_jacobian")
    theta = nj.parameters(model).ravel(dtype=np.float64) + 0.1
    np.testing.assert_allclose(constraint.jac(theta), difference(constraint.fun, theta), atol=1e-7)
    with pytest.raises(nj.DtypeError, match="use dtype='float64'"):
        nj.OutputConstraint(model, WHERE, 0, of="input_jacobian", dtype=None)


# ---------------------------------------------------------------- θ of a problem


def total(constraint: Any, theta: np.ndarray) -> np.ndarray:
    """Second derivative of the sum of all rows."""
    return difference(lambda t: constraint.jac(t).sum(axis=0), theta, 1e-5)


@pytest.mark.parametrize("of", ["outputs", "input_jacobian"])
def test_a_model_that_the_problem_does_not_fit_is_refused(of: str) -> None:
    """A copy has variables of its own, whatever they are called."""
    model, other = network(), network(hidden=2)
    problem = nj.LeastSquares(model, X, Y)
    with pytest.raises(
        ModelError, match=r"none of the problem's variables \('hidden/kernel', 'hidden/bias'.*This model"
    ) as e:
        nj.OutputConstraint(other, WHERE, 0, of=of, problem=problem)
    assert "This model has others: 'hidden/kernel', 'hidden/bias', 'out/kernel', 'out/bias'." in str(e.value)
    frozen = nj.Objective(model, X, squares, trainable="out/bias")
    hidden = model.layers[0]
    with pytest.raises(
        ModelError, match=r"none of the problem's variables \('out/bias'\).*hidden/bias'\. Give the model"
    ):
        nj.OutputConstraint(hidden, WHERE, 0, of=of, problem=frozen)
    nj.OutputConstraint(hidden, WHERE, 0, of=of, problem=problem)  # some of them are enough


def test_a_formula_that_no_parameter_changes_is_refused() -> None:
    a, b = tf.Variable([1.0], dtype="float64", name="a"), tf.Variable([1.0], dtype="float64", name="b")
    with pytest.raises(ModelError, match=r"what is limited \(outputs\) depends on none of the variables given \('b'\)"):
        nj.OutputConstraint(lambda x: a * x, WHERE, 0, variables=[b])
    with pytest.raises(ModelError, match=r"\(input_jacobian\) depends on none of the variables given \('b'\)"):
        nj.OutputConstraint(lambda x: x + b, WHERE, 0, variables=[b], of="input_jacobian")  # whose slope is 1
    problem = nj.LeastSquares(lambda x: b * x, X, Y, variables=[b])
    with pytest.raises(ModelError, match=r"none of the problem's variables \('b'\), so that no step .* it\. Give"):
        nj.OutputConstraint(lambda x: a * x, WHERE, 0, problem=problem)


def test_theta_is_the_problems() -> None:
    """A part of the variables, and an extra parameter that the network does not know."""
    model = network()

    def residual(y: np.ndarray, extra: Any) -> Any:
        return extra["k"] * y[:, 0] - Y, np.full((20, 1), extra["k"]), {"k": y[:, 0]}

    problem = nj.LeastSquares(model, X, residual=residual, trainable=["out/*", "hidden/bias"], extra={"k": 1.0})
    for of in ("outputs", "input_jacobian"):
        constraint = nj.OutputConstraint(model, WHERE, 0, of=of, problem=problem, curvature="exact")
        theta = problem.x0 + 0.1
        full = np.r_[weights(model)[:3], theta[:-1]]
        expected = outputs_of(full, WHERE)[:, 0] if of == "outputs" else slopes_of(full, WHERE)
        np.testing.assert_allclose(constraint.fun(theta), expected, atol=1e-13)
        jacobian = constraint.jac(theta)
        np.testing.assert_allclose(jacobian, difference(constraint.fun, theta), atol=1e-8)
        np.testing.assert_array_equal(jacobian[:, -1], 0)
        np.testing.assert_allclose(constraint.hess(theta, np.ones(3)) @ np.eye(8), total(constraint, theta), atol=1e-7)
        with pytest.raises(ShapeError, match=r"theta must have the shape \(8,\), and has \(10,\)"):
            constraint.fun(weights(model))


def test_one_model_of_a_joined_problem() -> None:
    one, two = network(), network(seed=2)
    both = nj.LeastSquares.join([nj.LeastSquares(one, X, Y), nj.LeastSquares(two, X, -Y)])
    constraint = nj.OutputConstraint(two, WHERE, 0, problem=both)
    theta = both.x0 + 0.1
    np.testing.assert_allclose(constraint.fun(theta), outputs_of(theta[10:], WHERE)[:, 0], atol=1e-13)
    np.testing.assert_allclose(constraint.jac(theta), difference(constraint.fun, theta), atol=1e-8)


# ---------------------------------------------------------------- fits


METHODS = ["SLSQP", "trust-constr", "COBYQA", "COBYLA"]


def curvature_for(method: str) -> str:
    return "exact" if method == "trust-constr" else "none"


@pytest.mark.parametrize("method", METHODS)
def test_the_optimum_under_a_limit_is_the_known_one(method: str) -> None:
    """A straight line through (−1, 0), (0, 0), (1, 3), at most 1 at x = 1: a quadratic programme solved by hand."""
    w = tf.Variable([0.0, 0.0], dtype="float64", name="w")
    points, y = np.array([[-1.0], [0.0], [1.0]]), np.array([0.0, 0.0, 3.0])

    def line(x: Any) -> Any:
        return w[0] + w[1] * x

    objective = nj.Objective(
        line, points, lambda o: (0.5 * np.sum((o[:, 0] - y) ** 2), o - y[:, None], np.ones((3, 1, 1))), variables=[w]
    )
    constraint = nj.OutputConstraint(line, [[1.0]], None, 1.0, problem=objective, curvature=curvature_for(method))
    result = objective.minimize(method, constraints=constraint)
    # offset 1 − s on the limit: minimise over s ½[(1 − 2s)² + (1 − s)²] → s = 3/5
    tolerance = {"trust-constr": 1e-3, "COBYLA": 1e-3}.get(method, 1e-5)
    np.testing.assert_allclose(result.x, [0.4, 0.6], atol=tolerance)
    np.testing.assert_array_equal(np.asarray(w), result.x)


@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.parametrize("form", ["one", "list"])
def test_an_equality_is_met(method: str, form: str) -> None:
    model = network()
    objective = nj.Objective(model, X, squares)
    fixed = nj.OutputConstraint(model, [[0.0], [1.0]], [0.25, 0.0], [0.25, 0.0], problem=objective)
    result = objective.minimize(method, constraints=fixed if form == "one" else [fixed], options={"maxiter": 300})
    np.testing.assert_allclose(outputs_of(weights(model), np.array([[0.0], [1.0]]))[:, 0], [0.25, 0], atol=1e-4)
    assert result.fun < 0.5 * squares(0 * X)[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_network_becomes_monotone(method: str) -> None:
    """The data falls at both ends; the network may not."""
    model = network()
    points = np.linspace(-1, 1, 7)[:, None]
    objective = nj.Objective(model, X, squares, prior={"*": 5.0})
    constraint = nj.OutputConstraint(model, points, 0, None, of="input_jacobian", problem=objective)
    free = objective.minimize("L-BFGS-B")
    assert constraint.fun(free.x).min() < -0.1
    start = np.asarray(free.x) * 0.1
    objective.parameters.assign(start)
    result = objective.minimize(method, constraints=[constraint], options={"maxiter": 120})
    assert slopes_of(weights(model), points).min() > -1e-3
    assert objective.fun(result.x) > free.fun
    assert objective.fun(result.x) < objective.fun(start)


def test_bounds_and_constraints_together() -> None:
    model = network()
    objective = nj.Objective(model, X, squares, bounds={"kernel": (-2, 2)})
    positive = nj.OutputConstraint(model, X, 0, None, problem=objective)
    result = objective.minimize("SLSQP", constraints=positive, options={"maxiter": 300})
    assert outputs_of(weights(model), X).min() > -1e-6
    assert np.all((result.x >= objective.bounds.lb) & (result.x <= objective.bounds.ub))


def test_least_squares_under_a_constraint_by_its_cost() -> None:
    model = network()
    problem = nj.LeastSquares(model, X, Y)
    positive = nj.OutputConstraint(model, X, 0, None, problem=problem)
    result = scipy.optimize.minimize(
        problem.cost, problem.x0, jac=problem.grad, method="SLSQP", constraints=[positive], options={"maxiter": 200}
    )
    assert outputs_of(result.x, X).min() > -1e-6


def test_a_fit_that_fails_ends_at_the_best_point_that_keeps_to_the_constraint() -> None:
    model = network()
    seen: list[np.ndarray] = []

    def external(y: np.ndarray) -> Any:
        if len(seen) == 25:
            raise RuntimeError("no convergence")
        seen.append(y.copy())
        return squares(y)

    objective = nj.Objective(model, X, external, check=False)
    positive = nj.OutputConstraint(model, X, 0, None, problem=objective)
    objective.parameters.assign(np.r_[weights(model)[:-1], 2.0])  # starts within
    result = objective.minimize("SLSQP", constraints=positive)
    assert result.status == -4
    feasible = [squares(y)[0] for y in seen if y.min() >= -1e-6]
    assert len(feasible) < len(seen)
    assert result.fun == pytest.approx(min(feasible), rel=1e-9)
    assert outputs_of(result.x, X).min() >= -2e-6


# ---------------------------------------------------------------- how much a constraint is violated


def test_violation_of_every_kind_of_constraint() -> None:
    theta = np.array([3.0, 4.0])
    nonlinear = scipy.optimize.NonlinearConstraint(lambda t: [t @ t, t[0]], [0, 5], [20, np.inf])
    assert violation(nonlinear, theta) == 5
    assert violation(scipy.optimize.LinearConstraint([[1, 1]], 0, 6.5), theta) == 0.5
    assert violation(scipy.optimize.LinearConstraint([[1, 1]], 0, 7), theta) == 0
    assert violation({"type": "eq", "fun": lambda t: t[0] - 1}, theta) == 2
    assert violation({"type": "ineq", "fun": lambda t, a: [t[0] - a, 1.0], "args": (4.5,)}, theta) == 1.5
    assert violation({"type": "ineq", "fun": lambda t: t[0]}, theta) == 0


def test_a_formula_and_its_slope() -> None:
    """d/dx of a exp(−b x) is −b y."""
    f, variables = formula()
    constraint = nj.OutputConstraint(f, WHERE, None, 0, of="input_jacobian", variables=variables)
    a, b = 2.0, 0.7
    np.testing.assert_allclose(constraint.fun([a, b]), -a * b * np.exp(-b * WHERE[:, 0]), rtol=1e-13)


@pytest.mark.parametrize("curvature", ["none", "exact"])
def test_trust_constr_ends_at_the_bound_with_and_without_curvature(curvature: str) -> None:
    c = tf.Variable([1.0, 0.5, 1.0], dtype="float64")

    def parabola(x: Any) -> Any:
        return tf.exp(c[0]) + c[1] * x + c[2] * x**2

    x = np.linspace(-1, 1, 9)[:, None]
    objective = nj.Objective(parabola, x, lambda y: (0.5 * np.sum((y - x**2) ** 2), y - x**2), variables=[c])
    constraint = nj.OutputConstraint(parabola, [[0.0]], 0.3, None, problem=objective, curvature=curvature)
    result = objective.minimize("trust-constr", constraints=constraint, options={"gtol": 1e-8, "xtol": 1e-10})
    np.testing.assert_allclose(constraint.fun(result.x), [0.3], atol=1e-5)
