"""LeastSquares on real networks: the oracles are linear algebra, TensorFlow's own tape, and the live weights."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import netjac as nj
from netjac.diagnostics import check_derivative
from netjac.tensorflow import evaluator

layers = keras.layers


def weights(model: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(w)) for w in model.trainable_weights])


def network(dtype: str = "float64", inputs: int = 2, hidden: int = 5) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((inputs,), dtype=dtype),
            layers.Dense(hidden, "tanh", dtype=dtype),
            layers.Dense(1, dtype=dtype),
        ]
    )


def surface(rng: np.random.Generator, n: int = 80) -> tuple[np.ndarray, np.ndarray]:
    x = rng.uniform(-1, 1, (n, 2))
    return x, np.tanh(x[:, 0] - 2 * x[:, 1]) + 0.1 * x[:, 0] ** 2


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_linear_layer_is_linear_regression(method: str, dtype: str, rng: np.random.Generator) -> None:
    x, noise = rng.normal(size=(50, 3)), rng.normal(size=(50, 2))
    y = x @ [[1.0, 0.0], [2.0, -1.0], [0.5, 3.0]] + [0.3, -0.2] + 0.1 * noise
    model = keras.Sequential([keras.Input((3,), dtype=dtype), layers.Dense(2, dtype=dtype)])
    result = nj.LeastSquares(model, x, y).solve(method)
    oracle = np.linalg.lstsq(np.column_stack([x, np.ones(50)]), y)[0]  # rows of the kernel, then the bias
    tolerance = 1e-9 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(result.x, oracle.ravel(), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(weights(model), result.x, rtol=1e-7)


@pytest.mark.parametrize("form", ["dense", "operator"])
def test_residual_and_derivative_equal_the_tapes(form: str, rng: np.random.Generator) -> None:
    inputs = keras.Input((3,), dtype="float64")
    z = layers.Dense(4, "tanh", dtype="float64")(inputs)
    outputs = {"b": layers.Dense(2, dtype="float64")(z), "a": layers.Dense(1, dtype="float64")(z)}
    model = keras.Model(inputs, outputs)
    x = rng.normal(size=(6, 3))
    y = {"a": rng.normal(size=6), "b": rng.normal(size=(6, 2))}
    problem = nj.LeastSquares(model, x, y, jac=form)
    theta = problem.x0
    with tf.GradientTape(persistent=True) as tape:
        out = model(tf.constant(x))
        space = evaluator(model, x).output_space
        parts = {"a": out["a"] - y["a"][:, None], "b": out["b"] - y["b"]}
        r = tf.reshape(tf.concat([parts[name.split("/")[-1]] for name in space.names], axis=1), [-1])
    np.testing.assert_allclose(problem.fun(theta), r, atol=1e-14)
    plain = tape.jacobian(r, model.trainable_variables, experimental_use_pfor=False, unconnected_gradients="zero")
    plain = np.concatenate([np.reshape(part, (r.shape[0], -1)) for part in plain], axis=1)
    J = problem.jac(theta)
    np.testing.assert_allclose(J @ np.eye(J.shape[1]), plain, atol=1e-13)
    assert check_derivative(problem).passed


@pytest.mark.parametrize(
    "options",
    [
        {"method": "trf"},
        {"method": "trf", "jac": "operator"},
        {"method": "trf", "x_scale": "jac"},
        {"method": "trf", "loss": "soft_l1"},
        {"method": "dogbox"},
        {"method": "dogbox", "tr_solver": "lsmr"},
        {"method": "lm"},
    ],
    ids=str,
)
def test_a_network_is_fitted_and_holds_the_result(options: dict[str, Any], rng: np.random.Generator) -> None:
    x, y = surface(rng)
    model = network()
    problem = nj.LeastSquares(model, x, y)
    start = 0.5 * np.sum(problem.fun(problem.x0) ** 2)
    result = problem.solve(max_nfev=100, **options)
    assert result.cost < 5e-2 * start  # SciPy's dogbox is slow on networks
    np.testing.assert_array_equal(weights(model), result.x)
    np.testing.assert_allclose(np.asarray(model(x))[:, 0] - y, result.fun, atol=1e-12)


def test_float32_gets_as_far_as_its_arithmetic(rng: np.random.Generator) -> None:
    x, y = surface(rng)
    model = network("float32")
    result = nj.LeastSquares(model, x, y).solve("lm", max_nfev=60)
    assert result.fun.dtype == result.jac.dtype == np.float64
    assert np.abs(result.fun).max() < 1e-3  # SciPy sees float64, the network computes in float32
    assert model.trainable_weights[0].dtype == "float32"


def test_float32_by_products_gets_where_the_array_does(rng: np.random.Generator) -> None:
    """The products are taken in float32; SciPy's inner solver must live with that."""
    x, y = surface(rng)
    costs = [
        nj.LeastSquares(network("float32"), x, y).solve(jac=form, max_nfev=200).cost for form in ("dense", "operator")
    ]
    assert max(costs) < 1e-3


def test_interrupted_fit_leaves_the_best_weights(rng: np.random.Generator) -> None:
    x, y = surface(rng)
    model = network()
    problem = nj.LeastSquares(model, x, y)
    seen = []

    def interrupt(intermediate_result: Any) -> None:
        seen.append(intermediate_result.x.copy())
        if len(seen) == 3:
            raise KeyboardInterrupt

    result = problem.solve(callback=interrupt)
    assert result.status == -3
    np.testing.assert_array_equal(result.x, seen[-1])
    np.testing.assert_array_equal(weights(model), seen[-1])


def test_callable_with_variables_and_inputs_in_a_dict(rng: np.random.Generator) -> None:
    a, b = tf.Variable(0.5, dtype="float64"), tf.Variable([0.1, 0.2], dtype="float64")

    def f(x: dict[str, Any]) -> Any:
        return a * x["t"] + tf.linalg.matvec(x["u"], b)

    t, u = rng.normal(size=12), rng.normal(size=(12, 2))
    problem = nj.LeastSquares(f, {"t": t, "u": u}, 2 * t + u @ [3.0, -1.0], variables=[a, b])
    result = scipy.optimize.least_squares(problem.fun, problem.x0, problem.jac)
    np.testing.assert_allclose(result.x, [2, 3, -1], atol=1e-9)
    assert a.numpy() == 0.5
    problem.parameters.assign(result.x)
    np.testing.assert_allclose(b.numpy(), [3, -1], atol=1e-9)


def test_y_that_does_not_fit_the_network(rng: np.random.Generator) -> None:
    x, y = surface(rng)
    with pytest.raises(nj.DataError, match="x has 80 samples and y has 79"):
        nj.LeastSquares(network(), x, y[:-1])
    with pytest.raises(nj.ShapeError, match=r"\(n, 1\) or \(n,\)"):
        nj.LeastSquares(network(), x, np.stack([y, y], axis=1))
    with pytest.raises(nj.DataError, match="not finite"):
        nj.LeastSquares(network(), x, np.where(y > 0, np.nan, y))


def test_x_that_does_not_fit_the_network(rng: np.random.Generator) -> None:
    x, y = surface(rng)
    with pytest.raises(nj.NetjacError):
        nj.LeastSquares(network(), x[:, :1], y)
    with pytest.raises(nj.DataError):
        nj.LeastSquares(network(), np.where(x > 0.9, np.nan, x), y)


def test_a_network_with_nothing_to_train(rng: np.random.Generator) -> None:
    x, y = surface(rng)
    model = network()
    model.trainable = False
    with pytest.raises(nj.ModelError):
        nj.LeastSquares(model, x, y)


def test_complex_steps_are_refused_and_not_answered_with_zeros(rng: np.random.Generator) -> None:
    x, y = surface(rng, 20)
    problem = nj.LeastSquares(network(), x, y)
    with pytest.raises(nj.errors.DtypeError, match="real numbers"):
        scipy.optimize.least_squares(problem.fun, problem.x0, jac="cs")


def test_what_the_caller_does_to_y_later_changes_nothing(rng: np.random.Generator) -> None:
    x, y = surface(rng, 20)
    problem = nj.LeastSquares(network(), x, y)
    before = problem.fun(problem.x0)
    y[:] = 0.0
    problem.forget()
    np.testing.assert_array_equal(problem.fun(problem.x0), before)


def test_a_callback_that_writes_into_its_vector_does_not_reach_the_model(rng: np.random.Generator) -> None:
    x, y = surface(rng)
    model = network()

    def vandal(intermediate_result: Any) -> None:
        intermediate_result.x[:] = 0.0
        raise StopIteration

    problem = nj.LeastSquares(model, x, y)
    result = problem.solve("trf", callback=vandal)
    np.testing.assert_allclose(0.5 * np.sum(problem.fun(weights(model)) ** 2), result.cost, rtol=1e-12)
    np.testing.assert_array_equal(weights(model), result.x)


def test_the_scale_is_one_for_networks_and_that_of_the_columns_for_formulas() -> None:
    x = np.linspace(-1, 1, 9)[:, None]
    network = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)])
    c = tf.Variable([1.0, 2.0], dtype="float64")

    def formula(x: Any) -> Any:
        return c[0] * tf.exp(c[1] * x)

    for problem, natural, other in (
        (nj.LeastSquares(network, x, x), 1.0, "jac"),
        (nj.LeastSquares(formula, x, x, variables=[c]), "jac", 1.0),
    ):
        start = problem.x0
        ends = [
            problem.solve("netjac", x_scale=scale, linear_solver="normal", max_nfev=4, x0=start).x
            for scale in (None, natural, other)
        ]
        np.testing.assert_array_equal(ends[0], ends[1])
        assert not np.array_equal(ends[0], ends[2])
