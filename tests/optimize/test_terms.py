"""Weights, priors, bounds, constants and several problems in one, against the same written in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import netjac as nj
from netjac.errors import DataError, DtypeError, NameLookupError, ShapeError
from netjac.jacobian import Jacobian
from netjac.optimize import OptionError
from small_fits import difference, formula, network, outputs_of, weights

RNG = np.random.default_rng(11)
T = np.linspace(0, 3, 30)[:, None]
Y = 2.5 * np.exp(-1.3 * T[:, 0]) + 0.05 * np.sin(7 * T[:, 0])
W = RNG.uniform(0, 2, 30)
TIGHT = {"xtol": 1e-13, "ftol": 1e-13, "gtol": 1e-13}


def decay(**given: Any) -> nj.LeastSquares:
    f, variables = formula()
    return nj.LeastSquares(f, T, Y, variables=variables, **given)


def plain(theta: np.ndarray) -> np.ndarray:
    return theta[0] * np.exp(-theta[1] * T[:, 0]) - Y


# ---------------------------------------------------------------- weights


def test_weights_are_those_of_curve_fit() -> None:
    result = decay(weights=1 / (W + 0.1) ** 2).solve(**TIGHT)
    expected = scipy.optimize.curve_fit(
        lambda t, a, b: a * np.exp(-b * t), T[:, 0], Y, [1, 0.2], sigma=W + 0.1, ftol=1e-14, xtol=1e-14
    )[0]
    np.testing.assert_allclose(result.x, expected, rtol=1e-7)


@pytest.mark.parametrize("shape", [(30,), (30, 2), (60,)])
@pytest.mark.parametrize("form", ["dense", "operator"])
@pytest.mark.parametrize("from_outside", [False, True])
def test_weights_multiply_squares(shape: tuple[int, ...], form: str, from_outside: bool) -> None:
    model, y, w = network(outputs=2), RNG.normal(size=(30, 2)), RNG.uniform(0, 2, shape)
    given: Any = {"y": y}
    if from_outside:
        given = {"residual": lambda o: (o - y, np.tile(np.eye(2), (30, 1, 1)))}
    problem = nj.LeastSquares(model, T, weights=w, jac=form, **given)
    each = np.broadcast_to(w[:, None] if shape == (30,) else w.reshape(30, 2), (30, 2))
    theta = problem.x0 + 0.1

    def residual(t: np.ndarray) -> np.ndarray:
        return (np.sqrt(each) * (outputs_of(t, T, outputs=2) - y)).reshape(-1)

    np.testing.assert_allclose(problem.fun(theta), residual(theta), atol=1e-13)
    J = problem.jac(theta)
    np.testing.assert_allclose(J @ np.eye(len(theta)), difference(residual, theta), atol=1e-8)
    if form == "operator":
        assert isinstance(J.data, Jacobian)


def test_weights_of_rows_that_couple_samples() -> None:
    mix = RNG.normal(size=(4, 30))
    w = np.array([1.0, 0.0, 2.0, 3.0])
    given: Any = {"residual": lambda y: (mix @ y[:, 0], mix)}
    problem = nj.LeastSquares(network(), T, weights=w, extra=None, **given)
    r = mix @ outputs_of(problem.x0, T)[:, 0]
    np.testing.assert_allclose(problem.fun(problem.x0), np.sqrt(w) * r)
    np.testing.assert_allclose(problem.grad(problem.x0), difference(problem.cost, problem.x0), atol=1e-6)
    with pytest.raises(ShapeError, match=r"weights must have 4 entries, one a residual and have \(30,\)"):
        nj.LeastSquares(network(), T, weights=np.ones(30), **given).fun(problem.x0)


@pytest.mark.parametrize("form", ["blocks", "matrix"])
def test_weights_multiply_derivatives_over_extra_parameters_too(form: str) -> None:
    def residual(y: np.ndarray, extra: dict[str, Any]) -> Any:
        k = extra["k"]
        dr = np.full((30, 1), k) if form == "blocks" else k * np.eye(30)
        return k * y[:, 0] - Y, dr, {"k": y[:, 0]}

    problem = nj.LeastSquares(network(), T, residual=residual, extra={"k": 2.0}, weights=W, prior={"k": 0.5})
    theta = problem.x0
    plain = np.r_[np.sqrt(W) * (2 * outputs_of(theta[:-1], T)[:, 0] - Y), 2 / 0.5]
    np.testing.assert_allclose(problem.fun(theta), plain, atol=1e-13)
    np.testing.assert_allclose(problem.jac(theta), difference(problem.fun, theta), atol=1e-7)


@pytest.mark.parametrize(
    ("w", "error", "message"),
    [
        (np.ones(29), ShapeError, r"30 entries, one a residual or \(30,\), one a sample, and have \(29,\)"),
        (-W, DataError, "finite and not negative"),
        (W * np.nan, DataError, "finite and not negative"),
        (["a"], DtypeError, "real numbers"),
    ],
)
def test_weights_that_do_not_fit(w: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decay(weights=w)


# ---------------------------------------------------------------- priors


PRIOR = {"a": (0.5, 2.0), "b": 0.1}


def with_prior(theta: np.ndarray) -> np.ndarray:
    return np.concatenate([plain(theta), [(theta[0] - 2.0) / 0.5, theta[1] / 0.1]])


@pytest.mark.parametrize("form", ["dense", "operator"])
def test_priors_are_rows_at_the_end(form: str) -> None:
    problem = decay(prior=PRIOR, jac=form)
    theta = np.array([1.7, 0.4])
    assert problem.shape == (32, 2)
    np.testing.assert_allclose(problem.fun(theta), with_prior(theta), atol=1e-14)
    J = difference(with_prior, theta)
    np.testing.assert_allclose(problem.jac(theta) @ np.eye(2), J, atol=1e-8)
    np.testing.assert_allclose(problem.grad(theta), J.T @ with_prior(theta), atol=1e-6)
    np.testing.assert_allclose(problem.hess(theta), J.T @ J, atol=1e-6)
    np.testing.assert_allclose(problem.hessp(theta, [1.0, 2.0]), J.T @ J @ [1, 2], atol=1e-6)


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm", "netjac"])
def test_the_fit_weighs_data_and_prior(method: str) -> None:
    result = decay(prior=PRIOR).solve(method, **TIGHT)
    oracle = scipy.optimize.least_squares(with_prior, [1, 0.2], jac="3-point", **TIGHT)
    np.testing.assert_allclose(result.x, oracle.x, rtol=1e-7)


def test_ridge_regression() -> None:
    """A linear layer with σ on its kernel alone is ridge regression with λ = 1 / σ²."""
    import keras

    x, y = RNG.normal(size=(20, 3)), RNG.normal(size=20)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    nj.LeastSquares(model, x, y, prior={"kernel": 0.5}).solve(**TIGHT)
    A = np.column_stack([x, np.ones(20)])
    expected = np.linalg.solve(A.T @ A + np.diag([4, 4, 4, 0]), A.T @ y)
    np.testing.assert_allclose(weights(model), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ["huber", "soft_l1", "cauchy", "arctan", "callable"])
@pytest.mark.parametrize(("method", "form"), [("trf", "dense"), ("dogbox", "operator"), ("netjac", "auto")])
def test_a_robust_loss_is_of_the_data_alone(loss: str, method: str, form: str) -> None:
    given: Any = (lambda z: np.stack([np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2])) if loss == "callable" else loss
    result = decay(prior=PRIOR).solve(method, jac=form, loss=given, f_scale=0.1, **TIGHT)

    def cost(theta: np.ndarray) -> float:
        z = (plain(theta) / 0.1) ** 2
        rho = {
            "huber": np.where(z <= 1, z, 2 * np.sqrt(np.maximum(z, 1)) - 1),
            "soft_l1": 2 * (np.sqrt(1 + z) - 1),
            "arctan": np.arctan(z),
        }.get(loss, np.log1p(z))
        return 0.5 * 0.01 * np.sum(rho) + 0.5 * np.sum(with_prior(theta)[30:] ** 2)

    assert result.cost == pytest.approx(cost(result.x), rel=1e-12)
    np.testing.assert_allclose(difference(cost, result.x), 0, atol=1e-5)


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("method", ["trf", "dogbox", "netjac"])
@pytest.mark.parametrize("form", ["dense", "operator"])
def test_bounds_by_name_are_kept(method: str, form: str) -> None:
    problem = decay(bounds={"a": (None, 2.0), "b": (0, None)})
    result = problem.solve(method, jac=form, **TIGHT)
    oracle = scipy.optimize.least_squares(plain, [1, 0.2], bounds=([-np.inf, 0], [2, np.inf]), jac="3-point", **TIGHT)
    np.testing.assert_allclose(result.x, oracle.x, rtol=1e-5)
    assert result.x[0] <= 2
    literal = scipy.optimize.least_squares(problem.fun, problem.x0, problem.jac, bounds=problem.bounds, **TIGHT)
    np.testing.assert_allclose(literal.x, oracle.x, rtol=1e-5)


@pytest.mark.parametrize("method", ["trf", "dogbox", "netjac"])
def test_a_start_outside_the_bounds_is_moved_into_them(method: str) -> None:
    model = network()
    problem = nj.LeastSquares(model, T, Y, bounds={"hidden/kernel": (0, None), "out/*": (-2, 2)})
    assert np.any(weights(model) < 0)
    assert np.all(problem.x0 >= problem.bounds.lb)
    result = problem.solve(method, max_nfev=50)
    assert np.all((result.x >= problem.bounds.lb) & (result.x <= problem.bounds.ub))
    assert np.all(np.asarray(model.layers[0].kernel) >= 0)
    assert result.cost < {"dogbox": 1.0}.get(method, 0.5)  # slow on networks


def test_bounds_of_one_fit() -> None:
    problem = decay()
    assert problem.solve(bounds={"a": (None, 2.0)}).x[0] == pytest.approx(2, abs=1e-6)
    assert problem.solve().x[0] > 2.3


def test_bounds_that_cannot_be_kept_are_refused() -> None:
    problem = decay(bounds={"a": (None, 2.0)})
    with pytest.raises(OptionError, match="method 'lm' knows no bounds, and 1 parameters have one"):
        problem.solve("lm")
    with pytest.raises(OptionError, match="leave constants out of the fit with trainable="):
        decay(bounds={"a": (2, 2)}).solve()
    with pytest.raises(NameLookupError, match="'c' fits no parameter; they are called 'a', 'b'"):
        decay(bounds={"c": (0, 1)})


# ---------------------------------------------------------------- constants


def test_only_what_is_trainable_moves() -> None:
    model = network()
    before = [np.asarray(w).copy() for w in model.trainable_weights]
    problem = nj.LeastSquares(model, T, Y, trainable=["out/*", "hidden/bias"], bounds={"bias": (-3, 3)})
    assert problem.parameters.names == ("hidden/bias", "out/kernel", "out/bias")
    full = weights(model)
    theta = problem.x0 + 0.1
    np.testing.assert_allclose(problem.fun(theta), outputs_of(np.r_[full[:3], theta], T)[:, 0] - Y, atol=1e-14)
    result = problem.solve(max_nfev=50)
    after = [np.asarray(w).copy() for w in model.trainable_weights]
    np.testing.assert_array_equal(after[0], before[0])
    assert all(np.any(a != b) for a, b in zip(after[1:], before[1:], strict=True))
    np.testing.assert_array_equal(weights(model)[3:], result.x)


def test_variables_of_a_callable_by_name() -> None:
    result = decay(trainable="b").solve(**TIGHT)
    expected = scipy.optimize.curve_fit(lambda t, b: np.exp(-b * t), T[:, 0], Y, [0.2], ftol=1e-14, xtol=1e-14)[0]
    np.testing.assert_allclose(result.x, expected, rtol=1e-6)
    with pytest.raises(NameLookupError, match="'c' fits no parameter; they are called 'a', 'b'"):
        decay(trainable=["b", "c"])


def test_names_are_the_same_for_a_part_of_a_nested_model() -> None:
    import keras

    inner = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, "tanh", name="d")], name="encoder")
    model = keras.Sequential([keras.Input((1,)), inner, keras.layers.Dense(1, name="head")])
    full = nj.parameters(model).names
    problem = nj.LeastSquares(model, T, Y, trainable=["d/kernel", "head/*"], prior={"d/kernel": 1.0})
    assert set(problem.parameters.names) <= set(full)
    assert len(problem.parameters) == 3


# ---------------------------------------------------------------- several problems in one


def test_two_datasets_of_one_model() -> None:
    model = network()
    first, second = (
        nj.LeastSquares(model, T[:20], Y[:20]),
        nj.LeastSquares(model, T[20:], Y[20:], weights=np.full(10, 4)),
    )
    both = nj.LeastSquares.join([first, second])
    theta = both.x0 + 0.1
    root = np.where(np.arange(30) < 20, 1.0, 2.0)
    np.testing.assert_allclose(both.fun(theta), root * (outputs_of(theta, T)[:, 0] - Y), atol=1e-13)
    whole = nj.LeastSquares(network(), T, Y, weights=root**2)
    np.testing.assert_allclose(both.jac(theta), whole.jac(theta), atol=1e-13)
    a, b = both.solve(max_nfev=40), whole.solve(max_nfev=40)
    assert a.cost == pytest.approx(b.cost, rel=1e-6)
    np.testing.assert_array_equal(weights(model), a.x)


@pytest.mark.parametrize("method", ["trf", "netjac"])
def test_two_models_that_share_a_variable(method: str) -> None:
    """a exp(-b t) and a t + c, with one a: in NumPy beside it."""
    a, b, c = (tf.Variable(v, dtype="float64", name=n) for v, n in [(1.0, "a"), (0.2, "b"), (0.0, "c")])
    line = 2.0 * T[:, 0] + 0.7
    first = nj.LeastSquares(lambda x: a * tf.exp(-b * x), T, Y, variables=[a, b], prior={"b": (0.5, 1.0)})
    second = nj.LeastSquares(lambda x: c + a * x, T, line, variables=[c, a], bounds={"a": (0, 2.2), "c": (0, None)})
    both = nj.LeastSquares.join([first, second], jac="dense")
    assert both.parameters.names == ("a", "b", "c")
    np.testing.assert_array_equal(both.bounds.ub, [2.2, np.inf, np.inf])
    assert both.shape == (61, 3)

    def residual(t: np.ndarray) -> np.ndarray:
        return np.concatenate([plain(t), t[2] + t[0] * T[:, 0] - line, [(t[1] - 1) / 0.5]])

    theta = np.array([1.5, 0.7, 0.3])
    np.testing.assert_allclose(both.fun(theta), residual(theta), atol=1e-14)
    np.testing.assert_allclose(both.jac(theta), difference(residual, theta), atol=1e-7)
    result = both.solve(method, **TIGHT)
    oracle = scipy.optimize.least_squares(
        residual, [1, 0.2, 0], bounds=([0, -np.inf, 0], [2.2, np.inf, np.inf]), jac="3-point", **TIGHT
    )
    np.testing.assert_allclose(result.x, oracle.x, rtol=1e-5)
    assert [float(v) for v in (a, b, c)] == list(result.x)
    for unit in np.eye(3):
        gauss = difference(residual, theta)
        np.testing.assert_allclose(both.hessp(theta, unit), gauss.T @ gauss @ unit, atol=1e-6)


def test_extra_parameters_of_one_name_are_one() -> None:
    def scaled(y: np.ndarray, extra: dict[str, Any]) -> Any:
        k = extra["k"]
        return k * y[:, 0] - Y[:15], np.full((15, 1), k), {"k": y[:, 0]}

    model, other = network(), network(seed=2)
    parts = [
        nj.LeastSquares(m, T[:15], residual=scaled, extra={"k": 2.0}, prior=p)
        for m, p in ((model, {"k": (0.1, 3.0)}), (other, None))
    ]
    both = nj.LeastSquares.join(parts)
    assert both.shape == (31, 21)
    theta = both.x0
    np.testing.assert_array_equal(theta, np.r_[weights(model), weights(other), 2.0])
    np.testing.assert_allclose(both.grad(theta), difference(both.cost, theta), atol=1e-6)
    result = both.solve(max_nfev=30)
    assert parts[0].extra["k"] == parts[1].extra["k"] == both.extra["k"] == result.x[-1]
    np.testing.assert_array_equal(np.r_[weights(model), weights(other)], result.x[:-1])


def test_a_failure_in_one_of_the_problems_ends_the_fit() -> None:
    calls: list[int] = []

    def residual(y: np.ndarray) -> Any:
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("diverged")
        return y[:, 0] - Y, np.ones((30, 1))

    model = network()
    both = nj.LeastSquares.join([nj.LeastSquares(model, T, Y), nj.LeastSquares(model, T, residual=residual)])
    result = both.solve()
    assert result.status == -4
    assert "diverged" in result.message
    np.testing.assert_array_equal(weights(model), result.x)


def test_problems_that_cannot_be_joined() -> None:
    a, b = decay(prior={"a": 1.0}), decay()
    f, variables = formula()
    given: Any = {"variables": variables}
    one = nj.LeastSquares(f, T, Y, prior={"a": 1.0}, **given)
    two = nj.LeastSquares(f, T, Y, prior={"a": 2.0}, **given)
    with pytest.raises(OptionError, match="two of the problems have a prior on 'a'"):
        nj.LeastSquares.join([one, two])
    low = nj.LeastSquares(f, T, Y, bounds={"b": (None, 1)}, **given)
    high = nj.LeastSquares(f, T, Y, bounds={"b": (2, None)}, **given)
    with pytest.raises(DataError, match=r"'b'\[0\] leave nothing"):
        nj.LeastSquares.join([low, high])
    for nothing in ((), ([],)):
        with pytest.raises(OptionError, match=r"join\(p, q\) or join\(\[p, q\]\), at least one, and it got none"):
            nj.LeastSquares.join(*nothing)
    for wrong in ([a, 3], (a, 3), (3,), ([[a, b], 3],)):
        with pytest.raises(OptionError, match=r"at least one, and a (int|list) is among"):
            nj.LeastSquares.join(*wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="agree on their curvature"):
        nj.LeastSquares.join([b, decay(curvature="exact")])
    starts = [
        nj.LeastSquares(f, T, residual=lambda y, e: (y, y, y), extra={"k": k}, **given) for k in (1.0, 2.0)
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"'k', and start it from 1\.0 and 2\.0"):
        nj.LeastSquares.join(starts)


def test_join_of_one_is_that_one() -> None:
    one = decay(prior=PRIOR, bounds={"a": (0, 5)}, weights=W)
    theta = np.array([1.7, 0.4])
    for same in (nj.LeastSquares.join([one]), nj.LeastSquares.join(one)):
        np.testing.assert_array_equal(same.fun(theta), one.fun(theta))
        np.testing.assert_allclose(same.jac(theta), one.jac(theta), rtol=1e-14)
        np.testing.assert_array_equal(same.bounds.ub, one.bounds.ub)


def test_problems_one_by_one_in_a_list_or_from_a_generator() -> None:
    """Formulas, whose solver scales parameters by the columns of J; with one scale for all the steps are others."""
    parts = [decay(), decay(weights=W)]
    joined = [nj.LeastSquares.join(*parts), nj.LeastSquares.join(parts), nj.LeastSquares.join(part for part in parts)]
    theta = np.array([0.1, 3.0])  # from where steps are damped
    expected = np.concatenate([part.fun(theta) for part in parts])
    found = []
    for problem in joined:
        np.testing.assert_array_equal(problem.fun(theta), expected)
        found.append(problem.solve("netjac", x0=theta, max_nfev=4).x)
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
    assert not np.array_equal(joined[0].solve("netjac", x0=theta, max_nfev=4, x_scale=1.0).x, found[0])


# ---------------------------------------------------------------- precision and curvature


def test_a_float32_network_is_fitted_in_float64() -> None:
    model, narrow = network(dtype="float32"), network(dtype="float32")
    y = np.sin(2 * T[:, 0])
    wide = nj.LeastSquares(model, T, y)
    theta = wide.x0 + 1e-9 * RNG.normal(size=10)
    np.testing.assert_allclose(wide.fun(theta), outputs_of(theta, T)[:, 0] - y, atol=1e-13)
    own = nj.LeastSquares(narrow, T, y, dtype=None)
    assert np.abs(own.fun(theta) - wide.fun(theta)).max() > 1e-9
    result = wide.solve("lm", max_nfev=200)
    np.testing.assert_array_equal(weights(model), result.x.astype(np.float32))
    assert model.trainable_weights[0].dtype == "float32"


@pytest.mark.parametrize("curvature", ["difference", "exact"])
def test_the_whole_hessian_on_request(curvature: str) -> None:
    w = RNG.uniform(0.5, 2, 30)
    problem = nj.LeastSquares(network(), T, Y, curvature=curvature, weights=w, prior={"kernel": 2.0})
    theta = problem.x0 + 0.2
    expected = difference(problem.grad, theta, 1e-5)
    tolerance = 1e-7 if curvature == "difference" else 1e-8
    v = RNG.normal(size=10)
    np.testing.assert_allclose(problem.hessp(theta, v), expected @ v, atol=tolerance * 100)
    np.testing.assert_allclose(problem.hess(theta), expected, atol=tolerance * 100)
    gauss = nj.LeastSquares(network(), T, Y, weights=w, prior={"kernel": 2.0}).hess(theta)
    assert np.abs(gauss - expected).max() > 1e-2


def test_exact_second_derivatives_are_tensorflows() -> None:
    model = network()
    problem = nj.LeastSquares(model, T, Y, curvature="exact")
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            value = 0.5 * tf.reduce_sum((model(T)[:, 0] - Y) ** 2)
        gradient = tf.concat([tf.reshape(g, [-1]) for g in inner.gradient(value, model.trainable_variables)], 0)
    parts = outer.jacobian(gradient, model.trainable_variables)
    hessian = np.concatenate([np.reshape(part, (10, -1)) for part in parts], axis=1)
    np.testing.assert_allclose(problem.hess(problem.x0), hessian, atol=1e-12)


def test_exact_curvature_of_a_residual_from_outside_is_not_known() -> None:
    given: Any = {"residual": lambda y: (y, np.ones((30, 1, 1)))}
    with pytest.raises(OptionError, match="use curvature='difference'"):
        nj.LeastSquares(network(), T, curvature="exact", **given).hessp(np.ones(10), np.ones(10))
    with pytest.raises(OptionError, match="curvature must be one of"):
        nj.LeastSquares(network(), T, curvature="newton", **given)
    problem = nj.LeastSquares(network(), T, curvature="difference", **given)
    theta = problem.x0
    np.testing.assert_allclose(problem.hess(theta), difference(problem.grad, theta, 1e-5), atol=1e-5)


def test_second_derivatives_that_tensorflow_gets_wrong_are_refused() -> None:
    """Keras' LayerNormalization stops the gradient of the mean, so its second derivatives are not the function's."""
    import keras

    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(4, "tanh"), keras.layers.LayerNormalization(), keras.layers.Dense(1)]
    )
    problem = nj.LeastSquares(model, T, Y, curvature="exact")
    with pytest.raises(nj.ProbeError, match=r"second derivatives .* use curvature='difference'"):
        problem.hessp(problem.x0, problem.x0)
    by_difference = nj.LeastSquares(model, T, Y, curvature="difference")
    theta = by_difference.x0 + 0.1
    np.testing.assert_allclose(by_difference.hess(theta), difference(by_difference.grad, theta, 1e-5), atol=1e-3)


@pytest.mark.parametrize("activation", ["relu", "gelu", "softplus"])
def test_second_derivatives_of_kinks_and_of_float32_networks(activation: str) -> None:
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(20, activation), keras.layers.Dense(1)])
    problem = nj.LeastSquares(model, T, Y, curvature="exact")
    assert problem.hess(problem.x0).shape == (61, 61)  # biases of zero: samples lie on kinks
    theta = problem.x0 + 0.01 * RNG.normal(size=61)
    np.testing.assert_allclose(problem.hess(theta), difference(problem.grad, theta, 1e-7), atol=1e-4)
    narrow = nj.LeastSquares(model, T, Y, curvature="exact", dtype=None)
    with pytest.raises(DtypeError, match="use dtype='float64'"):
        narrow.hessp(theta, theta)
