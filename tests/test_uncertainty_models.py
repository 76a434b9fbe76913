"""Uncertainty of TensorFlow models: NIST's certified standard deviations, and networks against differences."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import scipy.stats

import netjac as nj
import nist

HERE = pytest.mark.skipif(not nist.DIRECTORY.is_dir(), reason="NIST's data files are not beside the repository")


@HERE
@pytest.mark.parametrize("name", nist.FORMULAS)
def test_certified_standard_deviations(name: str) -> None:
    data = nist.load(name)
    f, variables = nist.model(name, data.certified, one_vector=True)
    u = nj.uncertainty(nj.LeastSquares(f, data.x, data.y, variables=variables))
    errors, sigma = u.standard_errors()["b"], u.noise.sigma
    assert u.noise.dof == len(data.y) - len(data.certified)
    if name == "Lanczos1":  # fits to 14 digits: at the certified parameters, of 11, the residual is their rounding
        errors *= np.sqrt(data.residual_sum / u.noise.dof) / sigma
    else:
        np.testing.assert_allclose(u.noise.residual_sum, data.residual_sum, rtol=1e-6)
    np.testing.assert_allclose(errors, data.deviations, rtol=1e-6)


# ---- a network


X = np.linspace(-1, 1, 40)[:, None]
Y = np.sin(3 * X) + 0.1 * np.random.default_rng(0).normal(size=X.shape)
NEW = np.array([[-1.5], [0.1], [1.2]])


def network(dtype: str = "float64") -> keras.Model:
    layers = [keras.layers.Dense(4, "tanh", name="hidden", dtype=dtype), keras.layers.Dense(1, name="out", dtype=dtype)]
    model = keras.Sequential([keras.Input((1,), dtype=dtype), *layers])
    start = [[[3.0, -2.0, 1.0, 2.5]], [0.5, 1.0, -1.5, -1.0], [[0.7], [-0.3], [0.4], [0.5]], [0.1]]
    model.set_weights([np.array(values, dtype) for values in start])
    return model


def differences(f: Callable[[np.ndarray], np.ndarray], theta: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences of f (q,) over θ (M,): (q, M)."""
    columns = [(f(theta + step * e) - f(theta - step * e)) / (2 * step) for e in np.eye(theta.size)]
    return np.stack(columns, axis=1)


def outputs(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The same network in NumPy."""
    W, b, v, c = theta[:4].reshape(1, 4), theta[4:8], theta[8:12].reshape(4, 1), theta[12:]
    return (np.tanh(x @ W + b) @ v + c)[:, 0]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_prediction_band_of_a_network(dtype: str) -> None:
    model = network(dtype)
    prior = {"hidden/*": 2.0, "out/kernel": (3.0, 0.5)}
    problem = nj.LeastSquares(model, X, Y, prior=prior)
    result = problem.solve(max_nfev=30)
    u = nj.uncertainty(problem, result)
    theta = result.x
    J, A = (differences(lambda t, x=x: outputs(t, x), theta) for x in (X, NEW))
    pi = np.r_[np.full(8, 0.5), np.full(4, 1 / 3), 0.0]
    residual = np.r_[outputs(theta, X) - Y[:, 0], theta[:8] / 2, (theta[8:12] - 0.5) / 3]
    dof = 40 - 1  # all but one parameter have a prior
    sigma = np.sqrt(residual @ residual / dof)
    covariance = sigma**2 * np.linalg.inv(J.T @ J + np.diag(pi**2))
    np.testing.assert_allclose(u.noise.sigma, sigma, rtol=1e-6)
    np.testing.assert_allclose(u.covariance(), covariance, rtol=1e-5, atol=1e-8)
    prediction = u.predict(nj.jacobian(model, NEW, dtype="float64"), weights=[1, 2, 3])
    tolerance = 1e-6 if dtype == "float64" else 1e-4  # the fit is in float64, the model holds it in its own type
    np.testing.assert_allclose(prediction.mean[:, 0], outputs(theta, NEW), rtol=tolerance)
    std = np.sqrt(np.einsum("im,mk,ik->i", A, covariance, A))
    np.testing.assert_allclose(prediction.std[:, 0], std, rtol=tolerance)
    low, high = prediction.interval(0.95, observation=True)
    expected = scipy.stats.t.interval(0.95, dof, outputs(theta, NEW), np.sqrt(std**2 + sigma**2 / [1, 2, 3]))
    np.testing.assert_allclose([low[:, 0], high[:, 0]], expected, rtol=10 * tolerance)
    H = np.einsum("im,mk,ik->i", J, covariance / sigma**2, J)
    np.testing.assert_allclose(u.leverage, H, rtol=1e-5)
    np.testing.assert_allclose(u.conditioning.effective, H.sum(), rtol=1e-5)
    singular = np.linalg.svd(J, compute_uv=False)
    np.testing.assert_allclose(u.conditioning.singular_values, singular, atol=1e-9 * singular[0])


def test_frozen_variables_are_constants_and_extra_parameters_are_not_the_models() -> None:
    model = network()

    def residual(values: np.ndarray, extra: dict[str, float]) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        r = extra["gain"] * values - Y
        return r, np.full((40, 1, 1), extra["gain"]), {"gain": np.array(values)}

    problem = nj.LeastSquares(
        model, X, residual=residual, extra={"gain": 1.2}, trainable="out/*", prior={"gain": (0.1, 1.0)}
    )
    result = problem.solve()
    u = nj.uncertainty(problem, result)
    assert list(u.standard_errors()) == [*problem.parameters.names]
    assert u.standard_errors("gain")["gain"].shape == ()
    whole = np.concatenate([np.reshape(w, -1) for w in model.get_weights()])

    def fitted(theta: np.ndarray) -> np.ndarray:
        values = theta[5] * outputs(np.r_[whole[:8], theta[:5]], X) - Y[:, 0]
        return np.r_[values, (theta[5] - 1.0) / 0.1]

    R = differences(fitted, result.x)
    r = fitted(result.x)
    covariance = r @ r / (41 - 6) * np.linalg.inv(R.T @ R)
    np.testing.assert_allclose(u.covariance(), covariance, rtol=1e-4, atol=1e-9)
    A = differences(lambda t: outputs(np.r_[whole[:8], t], NEW), result.x[:5])
    prediction = u.predict(nj.jacobian(model, NEW))
    std = np.sqrt(np.einsum("im,mk,ik->i", A, covariance[:5, :5], A))
    np.testing.assert_allclose(prediction.std[:, 0], std, rtol=1e-4)
    assert prediction.noise_std is None  # the residual is not f(x) − y


def test_joined_problems_share_their_information() -> None:
    model = network()
    halves = [nj.LeastSquares(model, X[i::2], Y[i::2], prior={"*": 2.0} if i else None) for i in range(2)]
    whole = nj.LeastSquares(model, X, Y, prior={"*": 2.0})
    result = whole.solve(max_nfev=5)
    joined, single = nj.uncertainty(nj.LeastSquares.join(halves), result.x), nj.uncertainty(whole, result)
    np.testing.assert_allclose(joined.covariance(), single.covariance(), rtol=1e-9)
    np.testing.assert_allclose(joined.leverage.reshape(2, 20).T.reshape(-1), single.leverage, rtol=1e-9)
    new = nj.jacobian(model, NEW)
    np.testing.assert_allclose(joined.predict(new).std, single.predict(new).std, rtol=1e-9)
