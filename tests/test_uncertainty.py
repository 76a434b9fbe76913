"""Standard errors, covariances, intervals and leverage against dense algebra, `curve_fit`, NIST, and simulation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.stats

from formulas import Plain, Variable
from netjac import factor, information
from netjac.errors import DataError, DtypeError, MemoryBudgetError, NameLookupError, ShapeError
from netjac.examples import linear_layer
from netjac.jacobian import Jacobian
from netjac.noise import Noise
from netjac.optimize import LeastSquares, OptionError
from netjac.optimize.residual import ResidualJacobian
from netjac.optimize.rows import Factors, rows_of
from netjac.sites import Coverage, SiteForm, SiteValues, UseSite
from netjac.spaces import OutputSpace, ParameterSpace, lay_out
from netjac.uncertainty import Uncertainty, uncertainty

RNG = np.random.default_rng(1)


def plain(array: np.ndarray, prior: np.ndarray | None = None) -> ResidualJacobian:
    d, m = array.shape
    return ResidualJacobian(rows_of(Plain(array, np.zeros((d, 1))), m), prior)


class Curve:
    """y = f(x, *θ), θ three scalars, with the derivative by the complex step, as an evaluator."""

    def __init__(self, f: Callable[..., Any], x: np.ndarray, start: list[float]) -> None:
        names = ["a", "b", "c"]
        self.variables = [Variable(value) for value in start]
        self.parameters = ParameterSpace(lay_out(names, [()] * 3, ["float64"] * 3), self.variables)
        self.output_space = OutputSpace.flat(1, "float64")
        self._f, self._x = f, x

    def evaluate(self, theta: Any = None) -> Plain:
        theta = self.parameters.ravel() if theta is None else theta
        steps = theta[:, None] + 1e-30j * np.eye(3)
        J = np.stack([self._f(self._x, *step).imag / 1e-30 for step in steps.T], axis=1)
        return Plain(J, self._f(self._x, *theta)[:, None])


def decay(x: Any, a: Any, b: Any, c: Any) -> Any:
    return a * np.exp(-b * x) + c


X = np.linspace(0, 4, 30)
SIGMA = 0.05 + 0.1 * X
Y = decay(X, 2.5, 1.3, 0.5) + SIGMA * np.random.default_rng(7).normal(size=30)


def problem(y: np.ndarray = Y, **options: Any) -> LeastSquares:
    return LeastSquares.from_evaluator(Curve(decay, X, [2.0, 1.0, 0.3]), y, **options)


TIGHT = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15}


# ---- the inverse, in every form, against dense algebra


def dense(R: ResidualJacobian) -> tuple[np.ndarray, np.ndarray]:
    """A generalised inverse of F, and the projector onto what it leaves undetermined."""
    explicit = R.to_array()
    scale = np.maximum(np.linalg.norm(explicit, axis=0), 1e-12)
    scaled = explicit / scale
    _, s, Vt = np.linalg.svd(scaled)
    rank = int(np.sum(s > 1e-10 * s[0]))
    inverse = np.linalg.pinv(scaled.T @ scaled, rcond=1e-12, hermitian=True)
    return inverse / np.outer(scale, scale), Vt[rank:].T @ (Vt[rank:] / scale)


def expected_variances(R: ResidualJacobian, A: np.ndarray) -> np.ndarray:
    inverse, null = dense(R)
    value = np.einsum("iq,ij,jq->q", A, inverse, A)
    return np.where(np.linalg.norm(null @ A, axis=0) > 1e-8 * np.linalg.norm(A, axis=0), np.inf, value)


def some_prior(m: int, free: int) -> np.ndarray:
    prior = np.linspace(0.5, 2.0, m)
    prior[::-1][:free] = 0
    return prior


def deficient(d: int, m: int, rank: int) -> np.ndarray:
    return RNG.normal(size=(d, rank)) @ RNG.normal(size=(rank, m))


def with_dead_parameter() -> np.ndarray:
    A = RNG.normal(size=(9, 5))
    A[:, 2] = 0
    return A


CASES: dict[str, Callable[[], ResidualJacobian]] = {
    "tall": lambda: plain(RNG.normal(size=(14, 5))),
    "tall, badly scaled": lambda: plain(RNG.normal(size=(14, 5)) * [1e-6, 1, 1e5, 1, 1e8]),
    "tall, prior": lambda: plain(RNG.normal(size=(14, 5)), some_prior(5, 0)),
    "tall, prior on some": lambda: plain(RNG.normal(size=(14, 5)), some_prior(5, 3)),
    "tall, deficient": lambda: plain(deficient(14, 6, 4)),
    "tall, deficient, prior on some": lambda: plain(deficient(14, 6, 3), some_prior(6, 5)),
    "dead parameter": lambda: plain(with_dead_parameter()),
    "wide": lambda: plain(RNG.normal(size=(4, 9))),
    "wide, deficient": lambda: plain(deficient(5, 9, 2)),
    "wide, one prior": lambda: plain(RNG.normal(size=(4, 9)), np.full(9, 0.7)),
    "wide, prior": lambda: plain(RNG.normal(size=(4, 9)), some_prior(9, 0)),
    "wide, prior on most": lambda: plain(RNG.normal(size=(4, 9)), some_prior(9, 2)),
    "wide, prior on some": lambda: plain(RNG.normal(size=(4, 9)), some_prior(9, 7)),
    "wide, prior on what is dead": lambda: plain(np.eye(3, 8), np.r_[0.0, 0, 0, 2, 2, 2, 2, 2]),
    "factors": lambda: ResidualJacobian(Factors(linear_layer(7))),
    "few factors, prior by variable": lambda: ResidualJacobian(Factors(linear_layer(2)), np.repeat([0.3, 2.0], [6, 2])),
    "few factors, prior on the kernel": lambda: ResidualJacobian(Factors(linear_layer(2)), np.repeat([0.3, 0], [6, 2])),
}


@pytest.fixture(params=CASES)
def R(request: Any) -> ResidualJacobian:
    return CASES[request.param]()


@pytest.fixture(params=["small", "large"])
def inverse(request: Any, R: ResidualJacobian, monkeypatch: pytest.MonkeyPatch) -> information.Inverse:
    if request.param == "large":
        monkeypatch.setattr(information, "EXPLICIT_BYTES", 0)
        monkeypatch.setattr(information, "CHUNK_BYTES", 8 * 2 * R.shape[1])  # two vectors at once
    found = information.inverse_of(R)
    form = "singular values" if request.param == "small" else ["Jᵀ J", "J Jᵀ"][R.data_rows < R.shape[1]]
    assert form in found.route
    return found


def test_variances_of_any_combination(R: ResidualJacobian, inverse: information.Inverse) -> None:
    rows, units = R.to_array().T, np.eye(R.shape[1])
    mixed = rows @ RNG.normal(size=(len(rows[0]), 3))
    for A in (rows, units, mixed, rows + 0.01):
        np.testing.assert_allclose(inverse.variances(A), expected_variances(R, A), rtol=1e-9)


def test_diagonal_is_the_variance_of_units(R: ResidualJacobian, inverse: information.Inverse) -> None:
    expected = expected_variances(R, np.eye(R.shape[1]))
    for positions in (np.arange(R.shape[1]), np.array([3, 0])):
        np.testing.assert_allclose(inverse.diagonal(positions), expected[positions], rtol=1e-9)


def test_block_of_the_inverse(R: ResidualJacobian, inverse: information.Inverse) -> None:
    positions = np.array([4, 0, 3, 1])
    variances = expected_variances(R, np.eye(R.shape[1]))[positions]
    expected = dense(R)[0][np.ix_(positions, positions)]
    lost = np.isinf(variances)
    expected[lost] = expected[:, lost] = np.nan
    expected[np.diag_indices(4)] = variances
    length = np.sqrt(np.where(lost, 1.0, variances))
    size = np.outer(length, length)
    np.testing.assert_allclose(inverse.block(positions) / size, expected / size, atol=1e-9, equal_nan=True)


def test_leverage_rank_and_freedom(R: ResidualJacobian, inverse: information.Inverse) -> None:
    data, explicit = R.rows.to_array(), R.to_array()
    expected = np.einsum("ij,jk,ik->i", data, dense(R)[0], data)
    np.testing.assert_allclose(inverse.leverage(), expected, rtol=1e-8, atol=1e-12)
    assert inverse.rank == np.linalg.matrix_rank(explicit / np.maximum(np.linalg.norm(explicit, axis=0), 1e-300))
    free = np.ones(R.shape[1], bool) if R.prior is None else R.prior == 0
    scaled = data[:, free] / np.maximum(np.linalg.norm(data[:, free], axis=0), 1e-300)
    assert inverse.spent == (np.linalg.matrix_rank(scaled) if scaled.size else 0)
    assert inverse.spent == inverse.rank - (0 if R.prior is None else np.count_nonzero(R.prior))


def test_singular_values(R: ResidualJacobian, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = np.linalg.svd(R.rows.to_array(), compute_uv=False)
    np.testing.assert_allclose(information.singular_values(R), expected, rtol=1e-9, atol=1e-13 * expected[0])
    monkeypatch.setattr(information, "EXPLICIT_BYTES", 0)
    found = information.singular_values(R)
    np.testing.assert_allclose(found, expected, atol=2e-8 * expected[0])
    assert np.sum(found > 0) <= np.linalg.matrix_rank(R.rows.to_array())


def test_both_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(information, "EXPLICIT_BYTES", 0)
    monkeypatch.setattr(information, "LARGEST", 4)
    with pytest.raises(MemoryBudgetError, match="14 data rows and 5 parameters") as caught:
        information.inverse_of(plain(np.ones((14, 5))))
    assert caught.value.least == 8 * 25


@pytest.mark.parametrize("w", [np.full(8, 0.5), np.repeat([0.5, 0], [6, 2]), np.arange(8.0)])
def test_weighted_gram_of_factors(w: np.ndarray) -> None:
    J = linear_layer(3)
    explicit = np.asarray(J)
    expected = explicit @ np.diag(w) @ explicit.T
    np.testing.assert_allclose(information.weighted_gram(ResidualJacobian(Factors(J)), w), expected, rtol=1e-12)


# ---- against curve_fit


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_covariance_is_that_of_curve_fit(absolute: bool, weighted: bool) -> None:
    p = problem(weights=1 / SIGMA**2 if weighted else None)
    u = uncertainty(p, p.solve(**TIGHT), absolute_sigma=absolute)
    sigma = SIGMA if weighted else None
    best, covariance = scipy.optimize.curve_fit(
        decay, X, Y, [2.0, 1.0, 0.3], sigma, absolute, jac=lambda x, *t: Curve(decay, x, [1.0] * 3).evaluate(
            np.array(t)).array, **TIGHT
    )  # fmt: skip
    np.testing.assert_allclose(u.theta, best, rtol=1e-7)
    np.testing.assert_allclose(u.covariance(), covariance, rtol=1e-6)
    errors = u.standard_errors()
    np.testing.assert_allclose([errors[name] for name in "abc"], np.sqrt(np.diag(covariance)), rtol=1e-6)
    assert all(error.shape == () for error in errors.values())


def test_no_freedom_left_is_infinite_as_in_curve_fit() -> None:
    x = X[:3]
    p = LeastSquares.from_evaluator(Curve(decay, x, [2.0, 1.0, 0.3]), Y[:3])
    with pytest.warns(scipy.optimize.OptimizeWarning, match="noise cannot be estimated"):
        u = uncertainty(p, p.solve())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.optimize.OptimizeWarning)
        _, covariance = scipy.optimize.curve_fit(decay, x, Y[:3], [2.0, 1.0, 0.3])
    assert np.isinf(covariance).all()
    assert np.isinf([*u.standard_errors().values()]).all()
    low, high = u.summary().lower["a"], u.summary().upper["a"]
    assert (low, high) == (-np.inf, np.inf)
    known = uncertainty(p, p.best_theta, absolute_sigma=True)  # no warning
    assert np.isfinite([*known.standard_errors().values()]).all()


def test_rows_of_weight_zero_are_no_observations() -> None:
    weights = np.where(np.arange(30) % 3 == 0, 0.0, 2.0)
    p = problem(weights=weights)
    u = uncertainty(p, p.solve(**TIGHT))
    kept = weights > 0
    _, covariance = scipy.optimize.curve_fit(decay, X[kept], Y[kept], [2.0, 1.0, 0.3], **TIGHT)
    assert u.noise.dof == kept.sum() - 3
    np.testing.assert_allclose(u.covariance(), covariance, rtol=1e-5)
    np.testing.assert_allclose(u.leverage[~kept], 0, atol=1e-25)


def test_a_prior_is_an_observation_of_its_parameter() -> None:
    prior = {"b": (0.02, 1.2), "c": (0.1, 0.4)}
    p = problem(prior=prior)
    u = uncertainty(p, p.solve(**TIGHT))

    def rows(x: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
        return np.concatenate([decay(X, a, b, c), [b, c]])

    sigma = np.concatenate([np.ones(30), [0.02, 0.1]])
    data = np.concatenate([Y, [1.2, 0.4]])
    _, covariance = scipy.optimize.curve_fit(rows, np.arange(32), data, [2.0, 1.0, 0.3], sigma, **TIGHT)
    np.testing.assert_allclose(u.covariance(), covariance, rtol=1e-5)
    assert u.noise.dof == 29  # one parameter without a prior


# ---- prediction


def layer(variables: bool = True, n: int = 12) -> tuple[Jacobian, np.ndarray, Uncertainty]:
    """A linear layer, its dense Jacobian, and the uncertainty of some fit of it."""
    J = linear_layer(n)
    live = [Variable(np.arange(6.0).reshape(3, 2)), Variable([1.0, 2.0])] if variables else None
    J = Jacobian(ParameterSpace(J.parameters, live), J.output_space, J.y, J.blocks, J.coverage)
    theta = np.array([0, 1, 2, 3, 4, 5, 1, 2.0])
    residual = np.random.default_rng(2).normal(size=J.shape[0])
    return J, np.asarray(J), Uncertainty(J.parameters, theta, residual, ResidualJacobian(Factors(J)))


def test_prediction_is_the_delta_method() -> None:
    J, dense, u = layer()
    sigma = u.noise.sigma
    covariance = sigma**2 * np.linalg.inv(dense.T @ dense)
    new = J[[1, 4, 5]]
    A = np.asarray(new)
    std = np.sqrt(np.diag(A @ covariance @ A.T)).reshape(3, 2)
    prediction = u.predict(new, weights=[1.0, 4.0, 0.25])
    np.testing.assert_array_equal(prediction.mean, new.y)
    np.testing.assert_allclose(prediction.std, std, rtol=1e-10)
    np.testing.assert_allclose(u.propagate(A), std.reshape(-1), rtol=1e-10)
    t = scipy.stats.t.ppf(0.95, 24 - 8)
    low, high = prediction.interval(0.9)
    np.testing.assert_allclose([low, high], [new.y - t * std, new.y + t * std], rtol=1e-10)
    noise = sigma / np.array([[1.0], [2.0], [0.5]])
    low, high = prediction.interval(0.9, observation=True)
    np.testing.assert_allclose(high - low, 2 * t * np.sqrt(std**2 + noise**2), rtol=1e-10)


def test_prediction_of_functions_of_the_outputs_and_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    J, dense, u = layer()
    B = RNG.normal(size=(12, 1, 2))
    whole = u.predict(J.scaled(B)).std
    rows = np.einsum("nql,nlm->nqm", B, dense.reshape(12, 2, 8))[:, 0]
    expected = u.noise.sigma * np.sqrt(np.einsum("im,mk,ik->i", rows, np.linalg.inv(dense.T @ dense), rows))
    np.testing.assert_allclose(whole[:, 0], expected, rtol=1e-10)
    monkeypatch.setattr(information, "CHUNK_BYTES", 1)
    np.testing.assert_allclose(u.predict(J.scaled(B)).std, whole, rtol=1e-12)


def test_variables_are_matched_and_constants_left_out() -> None:
    J, dense, _ = layer()
    fitted = J.columns("bias")
    u = Uncertainty(fitted.parameters, np.array([1.0, 2.0]), np.ones(24) * 0.1, ResidualJacobian(Factors(fitted)))
    expected = u.propagate(dense[:, 6:]).reshape(12, 2)
    np.testing.assert_allclose(u.predict(J).std, expected, rtol=1e-12)  # kernel: a constant of the fit
    swapped = J.columns(["bias", "kernel"])
    _, _, whole = layer()
    own = Uncertainty(J.parameters, whole.theta, np.ones(24) * 0.1, ResidualJacobian(Factors(J)))
    np.testing.assert_allclose(own.predict(swapped).std, own.predict(J).std, rtol=1e-12)
    with pytest.raises(NameLookupError, match="none of the Jacobian's variables was fitted: it has 'dense/kernel'"):
        u.predict(J.columns("kernel"))


def test_a_copy_of_the_model_is_another_model() -> None:
    J, _, u = layer()
    other, _, _ = layer()  # the same names, shapes and values, and variables of its own
    np.testing.assert_array_equal(other.parameters.ravel(), J.parameters.ravel())
    with pytest.raises(
        NameLookupError, match=r"another model than the fitted one.*'dense/kernel'.* not the same objects"
    ):
        u.predict(other)
    with pytest.raises(NameLookupError, match="another model than the fitted one"):
        u.predict(other.columns("bias"))
    other.parameters.segments = lay_out(["a", "b"], other.parameters.shapes, ["float64"] * 2)
    with pytest.raises(NameLookupError, match="was fitted: it has 'a', 'b', and the fit 'dense/kernel', 'dense/bias'"):
        u.predict(other)


def test_a_model_that_was_trained_on_is_noticed() -> None:
    J, _, u = layer()
    u.predict(J)
    J.parameters.variables[1].assign([1.0, 2.5])
    with pytest.raises(DataError, match="'dense/bias' no longer holds the fitted values"):
        u.predict(J)
    J, _, u = layer(variables=False)  # out of a pickle: matched by name, nothing to compare
    u.predict(J)


def test_what_data_leave_undetermined_is_infinite_and_the_rest_is_not() -> None:
    J = linear_layer(2)  # four rows, eight parameters
    with pytest.warns(scipy.optimize.OptimizeWarning, match="4 of 8 directions"):
        u = Uncertainty(J.parameters, np.zeros(8), np.zeros(4), ResidualJacobian(Factors(J)), absolute_sigma=True)
    assert np.isinf(u.standard_errors()["dense/kernel"]).all()
    np.testing.assert_allclose(u.predict(J).std, 1, rtol=1e-12)  # as noisy as the one observation of each
    assert np.isinf(u.predict(linear_layer(3)).std[2]).all()
    assert np.isinf(u.predict(linear_layer(3)).interval()[1][2]).all()
    assert u.conditioning.rank == 4


# ---- robust losses


def test_a_robust_loss_is_hubers_covariance() -> None:
    y = Y.copy()
    y[[3, 11]] += 2.0
    p = problem(y)
    result = p.solve(loss="huber", f_scale=0.2, **TIGHT)
    u = uncertainty(p, result, loss="huber", f_scale=0.2)
    J = Curve(decay, X, [1.0] * 3).evaluate(result.x).array
    r = decay(X, *result.x) - y
    psi, bend = np.clip(r, -0.2, 0.2), (np.abs(r) <= 0.2).astype(float)
    K = 1 + 3 / 30 * bend.var() / bend.mean() ** 2
    expected = K**2 * (np.sum(psi**2) / 27) / bend.mean() ** 2 * np.linalg.inv(J.T @ J)
    np.testing.assert_allclose(u.covariance(), expected, rtol=1e-9)
    with pytest.raises(OptionError, match="noise of a new observation is unknown"):
        u.predict(_as_jacobian(J, u)).interval(observation=True)
    with pytest.raises(OptionError, match="give the loss and the f_scale of the fit"):
        uncertainty(p, result)
    with pytest.raises(OptionError, match=r"with loss='huber' and f_scale=0\.3 its residuals would have"):
        uncertainty(p, result, loss="huber", f_scale=0.3)
    with pytest.raises(OptionError, match="absolute_sigma=True"):
        uncertainty(p, result, loss="huber", f_scale=0.2, absolute_sigma=True)


def test_a_robust_loss_and_a_prior() -> None:
    y = Y.copy()
    y[[3, 11]] += 2.0
    p = problem(y, prior={"b": (0.3, 1.0), "c": 0.8})
    result = p.solve(loss="soft_l1", f_scale=0.2, **TIGHT)
    u = uncertainty(p, result, loss="soft_l1", f_scale=0.2)
    J = Curve(decay, X, [1.0] * 3).evaluate(result.x).array
    r, below = np.split(result.fun, [30])
    np.testing.assert_allclose(below, [(result.x[1] - 1) / 0.3, result.x[2] / 0.8])
    root = np.sqrt(1 + (r / 0.2) ** 2)
    psi, bend = r / root, root**-3  # d/dr of C² (√(1 + (r/C)²) − 1), and again
    mean = bend.mean()
    K = 1 + 1 / 30 * bend.var() / mean**2
    sigma2 = K**2 * (np.sum((psi / mean) ** 2) + np.sum(below**2) / mean) / 29
    F = J.T @ J + np.diag([0, 1 / 0.3**2, 1 / 0.8**2]) / mean
    np.testing.assert_allclose(u.covariance(), sigma2 * np.linalg.inv(F), rtol=1e-9)


def test_a_loss_that_changes_nothing_gives_the_same_errors() -> None:
    p = problem(prior={"c": (0.2, 0.4)})
    result = p.solve(**TIGHT)
    plain, robust = uncertainty(p, result), uncertainty(p, result.x, loss="huber", f_scale=1e3)
    np.testing.assert_allclose(robust.covariance(), plain.covariance(), rtol=1e-10)
    own = uncertainty(p, result.x, loss=lambda z: np.stack([z, np.ones_like(z), 0 * z]))
    np.testing.assert_allclose(own.covariance(), plain.covariance(), rtol=1e-12)


def test_a_loss_that_is_not_convex() -> None:
    p = problem(Y + np.where(np.arange(30) % 2, 50.0, -50.0))
    with pytest.raises(DataError, match="not convex"):
        uncertainty(p, loss="cauchy", f_scale=0.1)


def test_errors_of_many_fits_scatter_as_predicted() -> None:
    """Least squares and Huber's estimate over 200 samples of noise: their scatter is the standard error."""
    rng = np.random.default_rng(3)
    truth = decay(X, 2.5, 1.3, 0.5)
    for loss, noise in (("linear", rng.normal(size=(200, 30))), ("huber", rng.standard_t(4, size=(200, 30)))):
        found, errors = [], []
        for row in noise:
            p = problem(truth + 0.05 * row)
            result = p.solve(loss=loss, f_scale=0.06)
            u = uncertainty(p, result, loss=loss, f_scale=0.06)
            found.append(result.x)
            errors.append([*u.standard_errors().values()])
        scatter = np.std(found, axis=0)
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(errors), axis=0)), scatter, rtol=0.15)


# ---- a large case


def wide_layer(n: int = 200, k: int = 499, c: int = 400) -> tuple[Jacobian, np.ndarray, np.ndarray]:
    """A hidden layer of k·c + c = 200,000 parameters seen through one output: J[n, (k, c)] = a[n, k] d[n, c]."""
    rng = np.random.default_rng(5)
    parameters = ParameterSpace(lay_out(["kernel", "bias"], [(k, c), (c,)], ["float64"] * 2))
    sites = [
        UseSite(0, "kernel", SiteForm.OUTER, np.arange(k * c).reshape(1, k, c), 0),
        UseSite(1, "bias", SiteForm.OUTER, np.arange(c).reshape(1, 1, c), 0),
    ]
    a, d = rng.normal(size=(n, k)) / k**0.5, rng.normal(size=(n, c)) / c**0.5
    D = d[:, None, None, :]
    blocks = factor.plan(sites, parameters).build([SiteValues(A=a[:, None, None, :], D=D), SiteValues(D=D)])
    return Jacobian(parameters, OutputSpace.flat(1, "float64"), np.zeros((n, 1)), blocks, Coverage()), a, d


@pytest.mark.parametrize("sigmas", [(0.5, 3.0), (0.5, np.inf)])
def test_two_hundred_thousand_parameters(sigmas: tuple[float, float]) -> None:
    J, a, d = wide_layer()
    n, m = J.shape
    assert (n, m) == (200, 200_000)
    w = np.square(sigmas)
    size = np.array([499 * 400, 400])
    prior = np.repeat(1 / np.array(sigmas), size)
    R = ResidualJacobian(Factors(J), prior)
    held = np.count_nonzero(prior)
    residual = np.concatenate([np.random.default_rng(0).normal(size=n), np.zeros(held)])
    # By hand, over (200, 200) matrices: the kernel's part of J Jᵀ is (a aᵀ) ∘ (d dᵀ), the bias's is d dᵀ.
    kernel, bias = (a @ a.T) * (d @ d.T), d @ d.T
    if np.isinf(sigmas[1]):  # 400 parameters without a prior and 200 rows
        with pytest.warns(scipy.optimize.OptimizeWarning):
            u = Uncertainty(J.parameters, np.zeros(m), residual, R, absolute_sigma=True)
        assert u._inverse.spent == n
        errors = u.standard_errors()
        assert np.isinf(errors["bias"]).all()
        # The free bias fits everything: the kernel is as uncertain as its prior.
        np.testing.assert_allclose(errors["kernel"], 0.5, rtol=1e-9)
        np.testing.assert_allclose(u.leverage, 1, rtol=1e-9)
        return
    u = Uncertainty(J.parameters, np.zeros(m), residual, R)
    C = np.eye(n) + w[0] * kernel + w[1] * bias
    assert u.noise.dof == n
    variance = {name: error**2 / u.noise.sigma**2 for name, error in u.standard_errors().items()}
    # Some entries, and the sum over each variable, which is a trace over the small side.
    for i, j in ((0, 0), (498, 399), (17, 203)):
        column = a[:, i] * d[:, j]
        expected = w[0] - w[0] ** 2 * column @ np.linalg.solve(C, column)
        np.testing.assert_allclose(variance["kernel"][i, j], expected, rtol=1e-10)
    for name, part, which in (("kernel", kernel, 0), ("bias", bias, 1)):
        expected = w[which] * size[which] - w[which] ** 2 * np.trace(np.linalg.solve(C, part))
        np.testing.assert_allclose(variance[name].sum(), expected, rtol=1e-10)
    positions = [3, m - 1, 70_000]
    flat = np.concatenate([error.reshape(-1) for error in u.standard_errors().values()])
    np.testing.assert_allclose(np.diag(u.covariance(positions)), flat[positions] ** 2, rtol=1e-10)
    np.testing.assert_allclose(u.standard_errors("bias")["bias"] ** 2, u.noise.sigma**2 * variance["bias"], rtol=1e-9)
    hat = np.eye(n) - np.linalg.inv(C)
    np.testing.assert_allclose(u.leverage, np.diag(hat), rtol=1e-9)
    np.testing.assert_allclose(u.conditioning.effective, np.trace(hat), rtol=1e-9)
    np.testing.assert_allclose(u.conditioning.condition, np.linalg.cond(kernel + bias) ** 0.5, rtol=1e-6)
    # F times what is claimed to be F⁻¹, along a random direction.
    v = np.random.default_rng(9).normal(size=m)
    F = J.T @ (J @ v) + prior**2 * v
    np.testing.assert_allclose(u.propagate(F[None]) / u.noise.sigma, np.sqrt(v @ F), rtol=1e-9)
    # Predictions at the data: σ² H.
    np.testing.assert_allclose(u.predict(J[:7]).std[:, 0] ** 2, u.noise.sigma**2 * np.diag(hat)[:7], rtol=1e-8)
    with pytest.raises(MemoryBudgetError, match="covariance of 200000 parameters"):
        u.covariance()


# ---- what is given wrongly, and how it prints


def test_names_and_positions() -> None:
    _, dense, u = layer()
    covariance = u.noise.sigma**2 * np.linalg.inv(dense.T @ dense)
    np.testing.assert_allclose(u.covariance("bias"), covariance[6:, 6:], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(u.covariance(["dense/*"]), covariance, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(u.covariance([5, -1]), covariance[np.ix_([5, 7], [5, 7])], rtol=1e-9, atol=1e-12)
    assert list(u.standard_errors("kernel")) == ["dense/kernel"]
    assert u.standard_errors("kernel")["dense/kernel"].shape == (3, 2)
    with pytest.raises(NameLookupError, match="fits no parameter"):
        u.standard_errors("embedding")
    with pytest.raises(DtypeError, match="integer positions"):
        u.covariance([0.5])
    with pytest.raises(DataError, match="positions in theta are below 8"):
        u.covariance([8])
    with pytest.raises(ShapeError, match=r"shape \(q, 8\)"):
        u.propagate(np.ones(8))
    with pytest.raises(OptionError, match="between 0 and 1"):
        u.summary(level=95)


def test_predict_says_what_is_wrong() -> None:
    J, dense, u = layer()
    with pytest.raises(DtypeError, match="takes a Jacobian"):
        u.predict(dense)
    with pytest.raises(ShapeError, match=r"shape \(12,\) or \(12, 2\)"):
        u.predict(J, weights=np.ones(3))
    with pytest.raises(DataError, match="infinite noise"):
        u.predict(J, weights=np.zeros(12))


def test_only_least_squares_has_residuals() -> None:
    with pytest.raises(OptionError, match="a str has no residuals"):
        uncertainty("problem")
    p = problem()
    with pytest.raises(DataError, match="not finite"):
        uncertainty(p, [np.nan, 1.0, 1.0])


def test_a_residual_from_outside_predicts_the_mean_alone() -> None:
    def residual(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return 2 * (outputs - Y[:, None]), np.full((30, 1, 1), 2.0)

    evaluator = Curve(decay, X, [2.0, 1.0, 0.3])
    p = LeastSquares.from_evaluator(evaluator, residual=residual)
    u = uncertainty(p, p.solve(**TIGHT))
    q = problem()
    expected = uncertainty(q, q.solve(**TIGHT))
    np.testing.assert_allclose(u.covariance(), expected.covariance(), rtol=1e-6)
    assert u.predict(_as_jacobian(np.eye(3), u)).noise_std is None


def test_it_prints() -> None:
    p = problem()
    text = str(uncertainty(p, p.solve()).summary(level=0.9))
    header, first, *_, last = text.splitlines()
    assert header.split() == ["parameter", "estimate", "std.", "error", "90", "%", "interval"]
    name, estimate, error, low, high = first.replace("[", "").replace("]", "").replace(",", "").split()
    assert name == "a"
    t = scipy.stats.t.ppf(0.95, 27)
    np.testing.assert_allclose(
        [float(low), float(high)], float(estimate) + t * float(error) * np.array([-1, 1]), rtol=1e-2
    )
    assert last.endswith("(27 degrees of freedom)")
    J, _, u = layer(n=40)
    assert "dense/kernel[2, 1]" in str(u.summary())
    assert "12 parameters" not in repr(u)
    assert "8 parameters from 80 residuals" in repr(u)
    assert "least, median, largest" in str(u.predict(J))
    assert "the data see 8 combinations" in str(u.conditioning)
    assert str(Noise(1.0, np.inf, 0.0, True)) == "σ = 1 (known)"
    big, *_ = wide_layer(30, 9, 4)
    R = ResidualJacobian(Factors(big), np.ones(40))
    assert "kernel  9 × 4" in str(Uncertainty(big.parameters, np.zeros(40), np.ones(70), R).summary())


def _as_jacobian(A: np.ndarray, u: Uncertainty) -> Jacobian:
    """Rows A (q, 3) over the scalars a, b, c."""
    n = len(A)
    sites = [UseSite(i, name, SiteForm.OUTER, np.array([[[0]]]), 0) for i, name in enumerate("abc")]
    values = [SiteValues(D=A[:, i].reshape(n, 1, 1, 1)) for i in range(3)]
    blocks = factor.plan(sites, u.parameters).build(values)
    return Jacobian(u.parameters, OutputSpace.flat(1, "float64"), np.zeros((n, 1)), blocks, Coverage())
