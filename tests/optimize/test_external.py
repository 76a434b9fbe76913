"""Functions from outside: what they may return, what is checked, and fits against NumPy and SciPy alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.sparse
from scipy.sparse.linalg import aslinearoperator

import netjac as nj
from netjac.errors import DataError, DerivativeError, DtypeError, ShapeError
from netjac.jacobian import Jacobian
from netjac.optimize import OptionError, external
from netjac.spaces import OutputSpace, lay_out
from small_fits import difference, formula, network, outputs_of, weights

RNG = np.random.default_rng(7)
X = np.linspace(-1, 1, 12)[:, None]
Y = np.sin(2 * X[:, 0])
MIX = RNG.normal(size=(5, 24)) / 5


def by_sample(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two residuals of two outputs, each of one sample: the product, and a sum of squares."""
    u, v = outputs.T
    r = np.stack([u * v - Y, u**2 + v - 1], axis=1)
    return r, np.stack([np.stack([v, u], axis=1), np.stack([2 * u, np.ones(12)], axis=1)], axis=1)


def coupled(form: Any = np.asarray) -> Any:
    """Five residuals of all 24 outputs."""

    def residual(outputs: np.ndarray) -> tuple[np.ndarray, Any]:
        flat = outputs.reshape(-1)
        return MIX @ np.sin(flat) - 0.1, form(MIX * np.cos(flat))

    return residual


RESIDUALS = {
    "blocks": by_sample,
    "matrix": coupled(),
    "sparse": coupled(scipy.sparse.csr_matrix),
    "sparse array": coupled(scipy.sparse.coo_array),
    "operator": coupled(aslinearoperator),
}


def in_numpy(residual: Any, theta: np.ndarray) -> np.ndarray:
    return residual(outputs_of(theta, X, outputs=2))[0].reshape(-1)


@pytest.mark.parametrize("name", RESIDUALS)
@pytest.mark.parametrize("form", ["dense", "operator"])
def test_value_and_derivative(name: str, form: str) -> None:
    residual = RESIDUALS[name]
    problem = nj.LeastSquares(network(outputs=2), X, residual=residual, jac=form)
    theta = problem.x0 + 0.1
    r, J = problem.fun(theta), problem.jac(theta)
    np.testing.assert_allclose(r, in_numpy(residual, theta), atol=1e-14)
    expected = difference(lambda t: in_numpy(residual, t), theta)
    np.testing.assert_allclose(J @ np.eye(problem.shape[1]), expected, atol=1e-8)
    assert problem.shape == J.shape == expected.shape
    np.testing.assert_allclose(problem.grad(theta), expected.T @ r, atol=1e-7)
    v = RNG.normal(size=theta.size)
    np.testing.assert_allclose(problem.hessp(theta, v), expected.T @ (expected @ v), atol=1e-7)
    np.testing.assert_allclose(problem.hess(theta), expected.T @ expected, atol=1e-7)
    assert problem.cost(theta) == pytest.approx(0.5 * r @ r)


def test_blocks_stay_factored_and_a_coupling_does_not_form_j() -> None:
    problem = nj.LeastSquares(network(outputs=2), X, residual=by_sample, jac="operator")
    assert isinstance(problem.jac(problem.x0).data, Jacobian)


MIXING = np.sin(np.arange(36.0))


def test_a_coupling_may_have_an_axis_of_samples_and_one_of_outputs() -> None:
    """Two outputs: the last two axes of dr are those of the outputs, in the order of rows."""
    C = RNG.normal(size=(3, 12, 2))
    for shape in ((3, 24), (3, 12, 2)):
        problem = nj.LeastSquares(
            network(outputs=2), X, residual=lambda y, s=shape: (np.einsum("dnl,nl->d", C, y), C.reshape(s))
        )
        theta = problem.x0
        expected = difference(lambda t: np.einsum("dnl,nl->d", C, outputs_of(t, X, outputs=2)), theta)
        np.testing.assert_allclose(problem.jac(theta), expected, atol=1e-8)


@pytest.mark.parametrize(
    ("r", "dr", "accepted"),
    [
        (
            np.zeros(12),
            np.zeros((12, 3)),
            r"\(12, 1, 1\), blocks .* one sample each; or \(12, 12\) or \(12, 12, 1\), over",
        ),
        (np.zeros(5), np.zeros((12, 5)), r"dr must have the shape \(5, 12\) or \(5, 12, 1\), over all outputs"),
        (
            0.0,
            np.zeros((2, 12)),
            r"dr must have the shape \(1, 12\) or \(1, 12, 1\), or \(12, 1\) for the one residual",
        ),
        (np.zeros(12), scipy.sparse.eye_array(11), r"\(12, 12\) or .*; it has \(11, 11\)"),
    ],
)
def test_a_derivative_of_the_wrong_shape_is_told_the_right_ones(r: Any, dr: Any, accepted: str) -> None:
    problem = nj.LeastSquares(network(), X, residual=lambda y: (r, dr), check=False)
    with pytest.raises(nj.ShapeError, match=accepted):
        problem.fun(problem.x0)


@pytest.mark.parametrize(
    ("r", "dr"),
    [
        (lambda y: y[:, 0], lambda y: np.ones((12, 1))),
        (lambda y: y[:, 0], lambda y: np.ones((12, 1, 1))),
        (lambda y: y[:, 0], lambda y: np.eye(12)),
        (lambda y: y, lambda y: np.ones((12, 1, 1))),
        (lambda y: y.reshape(3, 4), lambda y: np.eye(12)),
        (lambda y: np.stack([y, 2 * y], axis=2), lambda y: np.ones((12, 1, 2, 1)) * [[[[1.0], [2.0]]]]),
        (lambda y: np.hstack([y, 2 * y]).reshape(-1), lambda y: np.ones((12, 2, 1)) * [[[1.0], [2.0]]]),
        (lambda y: np.sum(y), lambda y: np.ones((1, 12))),
        (lambda y: np.sum(y), lambda y: np.ones((12, 1))),
        (lambda y: np.sum(y), lambda y: np.ones(12)),
        (lambda y: np.sum(y, keepdims=True), lambda y: np.ones((1, 1, 12, 1))),
        (lambda y: np.array([np.sum(y)]), lambda y: np.ones((12, 1))),
        (lambda y: y.reshape(3, 4), lambda y: np.eye(12).reshape(3, 4, 12, 1)),
        (lambda y: y.reshape(3, 4), lambda y: np.eye(12).reshape(12, 12, 1)),
        (lambda y: y[:, 0], lambda y: np.eye(12)[:, :, None]),
        (lambda y: MIXING.reshape(3, 12) @ y[:, 0], lambda y: MIXING.reshape(3, 12, 1)),
    ],
)
def test_every_shape_of_a_residual(r: Any, dr: Any) -> None:
    """All of these are linear in the outputs: r is what it was, and so is its derivative."""
    problem = nj.LeastSquares(network(), X, residual=lambda y: (r(y), dr(y)))
    theta = problem.x0
    np.testing.assert_allclose(problem.fun(theta), np.ravel(r(outputs_of(theta, X))))
    expected = difference(lambda t: np.ravel(r(outputs_of(t, X))), theta)
    np.testing.assert_allclose(problem.jac(theta), expected, atol=1e-8)


def test_outputs_come_in_the_models_structure_in_double_precision_and_read_only() -> None:
    import keras

    inputs = keras.Input((1,))
    hidden = keras.layers.Dense(2, "tanh")(inputs)
    a, b = keras.layers.Dense(2)(hidden), keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, {"a": keras.layers.Reshape((2, 1))(a), "b": b})
    seen: list[Any] = []

    def residual(outputs: Any) -> Any:
        seen.append(outputs)
        return outputs["b"][:, 0] - Y, np.tile([0.0, 0.0, 1.0], (12, 1))

    for dtype in ("float64", None):
        problem = nj.LeastSquares(model, X, residual=residual, dtype=dtype)
        problem.fun(problem.x0)
    for outputs in seen:
        assert outputs["a"].shape == (12, 2, 1)
        assert outputs["a"].dtype == outputs["b"].dtype == np.float64
        with pytest.raises(ValueError, match="read-only"):
            outputs["b"][0] = 1


def test_buffers_of_the_function_may_be_used_again() -> None:
    buffer, derivative = np.empty(12), np.ones((12, 1))

    def residual(outputs: np.ndarray) -> Any:
        buffer[:] = outputs[:, 0] - Y
        return buffer, derivative

    problem = nj.LeastSquares(network(), X, residual=residual, check=False)
    theta = problem.x0
    before = problem.fun(theta)
    buffer[:] = 0
    derivative[:] = 0
    np.testing.assert_array_equal(problem.fun(theta), before)
    assert np.asarray(problem.jac(theta)).any()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda y: y[:, 0], ShapeError, r"must return \(r, dr\), and returned a ndarray"),
        (lambda y: (y, y, y), ShapeError, "returned 3 items"),
        (
            lambda y: (y[:, 0], np.ones((11, 1))),
            ShapeError,
            r"shape \(12, 1, 2\), blocks .* or \(12, 24\).*has \(11, 1\)",
        ),
        (lambda y: (y, np.ones((12, 2))), ShapeError, r"\(12, 2, 2\), blocks.*or \(24, 24\)"),
        (lambda y: (y[:5, 0], np.ones((5, 12))), ShapeError, r"the shape \(5, 24\) or .*has \(5, 12\)"),
        (lambda y: (y, scipy.sparse.eye_array(12)), ShapeError, r"has \(12, 12\)"),
        (lambda y: (y.astype(complex), y), DtypeError, "residual r must be an array of real numbers"),
        (lambda y: (y, "steep"), DtypeError, "derivative dr"),
        (lambda y: (y, [[1.0], [1.0, 2.0]]), ShapeError, "ragged"),
        (lambda y: (y, np.full((12, 2, 2), np.nan)), DataError, "finite, and its derivative is not: 48 of its 48"),
    ],
)
def test_answers_that_do_not_fit(answer: Any, error: type[Exception], message: str) -> None:
    problem = nj.LeastSquares(network(outputs=2), X, residual=answer)
    with pytest.raises(error, match=message):
        problem.fun(problem.x0)
    with pytest.raises(error, match=message):
        problem.solve()


def test_another_number_of_residuals_at_another_point() -> None:
    calls: list[int] = []

    def residual(y: np.ndarray) -> Any:
        calls.append(1)
        k = 12 if len(calls) == 1 else 11
        return y[:k, 0], np.eye(12)[:k]

    problem = nj.LeastSquares(network(), X, residual=residual, check=False)
    problem.fun(problem.x0)
    with pytest.raises(ShapeError, match="12 residuals at other parameters, and now 11"):
        problem.fun(problem.x0 + 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"y": Y, "residual": by_sample}, "not both"),
        ({}, "not none"),
        ({"y": Y, "extra": {"k": 1.0}}, "belong to a function from outside"),
    ],
)
def test_what_excludes_each_other(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        nj.LeastSquares(network(), X, **wrong)
    with pytest.raises(DtypeError, match="must be callable, and is int 3"):
        nj.LeastSquares(network(), X, residual=3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the derivative at the first call


WRONG = {
    "twice": lambda y, dr: 2 * dr,
    "sign": lambda y, dr: -dr,
    "transposed": lambda y, dr: dr.transpose(0, 2, 1),
    "one entry": lambda y, dr: dr + 0.02 * (np.arange(48).reshape(12, 2, 2) == 17),
    "zero": lambda y, dr: 0 * dr,
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_derivative_is_shown_beside_the_difference(how: str) -> None:
    calls: list[int] = []

    def residual(y: np.ndarray) -> Any:
        calls.append(1)
        r, dr = by_sample(y)
        return r, WRONG[how](y, dr)

    problem = nj.LeastSquares(network(outputs=2), X, residual=residual)
    with pytest.raises(DerivativeError, match=r"Row \d+: the derivative says .*e.*, the difference .*relative error"):
        problem.fun(problem.x0)
    assert len(calls) <= 9
    with pytest.raises(DerivativeError):
        problem.solve()
    unchecked = nj.LeastSquares(network(outputs=2), X, residual=residual, check=False)
    assert unchecked.fun(unchecked.x0).shape == (24,)


def test_the_numbers_shown_are_the_derivative_and_the_difference() -> None:
    """For one output: r = 3 y, said to have the derivative 2; along any d, 3 d against 2 d."""
    problem = nj.LeastSquares(network(), X[:1], residual=lambda y: (3 * y, np.full((1, 1, 1), 2.0)))
    with pytest.raises(DerivativeError) as raised:
        problem.fun(problem.x0)
    words = str(raised.value).split("says ")[1].split(" (")[0].replace(",", "").split()
    claimed, found = float(words[0]), float(words[-1])
    assert claimed / found == pytest.approx(2 / 3, rel=1e-5)


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array, aslinearoperator])
def test_a_wrong_coupling_is_found(form: Any) -> None:
    def residual(y: np.ndarray) -> Any:
        r, dr = coupled()(y)
        dr[2] *= 1.01
        return r, form(dr)

    problem = nj.LeastSquares(network(outputs=2), X, residual=residual)
    with pytest.raises(DerivativeError, match=r"in 1 of 5 rows\. Row 2"):
        problem.fun(problem.x0)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("function", [np.exp, np.abs, lambda y: np.maximum(y, 0), lambda y: y + 1e-7 * np.sin(1e9 * y)])
def test_right_derivatives_pass_at_every_scale(scale: float, function: Any) -> None:
    """Kinks and a little noise are no errors; what is small is compared as what it is."""
    y = RNG.normal(size=(40, 2)) * scale
    slopes = {np.exp: np.exp, np.abs: np.sign}.get(function)
    if slopes is None:
        slopes = (lambda z: (z > 0) * 1.0) if function(np.array(-1.0)) == 0 else np.ones_like

    def ask(outputs: np.ndarray) -> Any:
        z = outputs / scale
        return function(z), np.einsum("nl,lk->nlk", slopes(z) / scale, np.eye(2))

    space = OutputSpace(lay_out(["y"], [(2,)], ["float64"]))
    asked = external.External(ask, external.read_residual, space, nj.optimize.names.extras(None), True)
    asked(y, np.zeros(0))
    doubled = external.External(
        lambda o: (ask(o)[0], 1.01 * ask(o)[1]), external.read_residual, space, nj.optimize.names.extras(None), True
    )
    with pytest.raises(DerivativeError):
        doubled(y, np.zeros(0))


def test_a_function_that_is_not_defined_beside_the_point_is_not_called_wrong() -> None:
    start = network()
    here = outputs_of(weights(start), X)

    def residual(y: np.ndarray) -> Any:
        if not np.allclose(y, here, atol=1e-12):
            raise ValueError("outside of what was tabulated")
        return y[:, 0] - Y, np.ones((12, 1))

    problem = nj.LeastSquares(start, X, residual=residual)
    np.testing.assert_allclose(problem.fun(problem.x0), here[:, 0] - Y)


def test_the_derivative_is_compared_once() -> None:
    calls: list[int] = []

    def residual(y: np.ndarray) -> Any:
        calls.append(1)
        return y[:, 0] - Y, np.ones((12, 1))

    problem = nj.LeastSquares(network(), X, residual=residual)
    problem.fun(problem.x0)
    assert len(calls) == 3
    problem.fun(problem.x0 + 1)
    problem.jac(problem.x0 + 1)
    assert len(calls) == 4


# ---------------------------------------------------------------- fits


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm", "netjac"])
def test_f_minus_y_from_outside_is_the_plain_fit(method: str) -> None:
    model, plain = network(), network()
    given = {"xtol": 1e-12, "ftol": 1e-12, "gtol": 1e-12, "max_nfev": 30}
    result = nj.LeastSquares(model, X, residual=lambda y: (y[:, 0] - Y, np.ones((12, 1)))).solve(method, **given)
    expected = nj.LeastSquares(plain, X, Y).solve(method, **given)
    np.testing.assert_allclose(result.x, expected.x, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(weights(model), result.x)


@pytest.mark.parametrize("name", RESIDUALS)
@pytest.mark.parametrize("form", ["dense", "operator"])
def test_fits_get_where_scipy_gets_by_itself(name: str, form: str) -> None:
    residual = RESIDUALS[name]
    model = network(outputs=2)
    start = weights(model)
    result = nj.LeastSquares(model, X, residual=residual, jac=form).solve(max_nfev=300)
    oracle = scipy.optimize.least_squares(lambda t: in_numpy(residual, t), start, max_nfev=300)
    assert result.cost <= 1.05 * oracle.cost + 1e-10
    np.testing.assert_array_equal(weights(model), result.x)


def test_rosenbrock_of_the_outputs() -> None:
    """The network's outputs are the unknowns of a system with a known root."""

    def residual(y: np.ndarray) -> Any:
        u, v = y.T
        r = np.stack([10 * (v - u**2), 1 - u], axis=1)
        return r, np.stack([np.stack([-20 * u, 10 + 0 * u], 1), np.stack([-1 + 0 * u, 0 * u], 1)], axis=1)

    model = network(outputs=2)
    nj.LeastSquares(model, X, residual=residual).solve(xtol=1e-12, ftol=1e-12, gtol=1e-12, max_nfev=200)
    np.testing.assert_allclose(outputs_of(weights(model), X, outputs=2), 1, atol=1e-5)


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm", "netjac"])
def test_a_fit_calls_the_function_once_a_point(method: str) -> None:
    """And twice more at the first, to compare its derivative."""
    seen: list[np.ndarray] = []

    def residual(y: np.ndarray) -> Any:
        seen.append(y)
        return y[:, 0] - Y, np.ones((12, 1))

    result = nj.LeastSquares(network(), X, residual=residual).solve(method, max_nfev=20)
    assert len(seen) == result.nfev + 2
    assert len(np.unique(seen, axis=0)) == len(seen)


# ---------------------------------------------------------------- extra parameters


def exponentials(y: np.ndarray, extra: dict[str, Any]) -> Any:
    """y is unused but for its first entry: r = k0 exp(-k1 t) + c y - data, with t the inputs."""
    t, k, c = X[:, 0] + 1, extra["k"], extra["c"]
    e = np.exp(-k[1] * t)
    r = k[0] * e + c * y[:, 0] - Y
    return r, np.full((12, 1), c), {"k": np.stack([e, -k[0] * t * e], axis=1), "c": y[:, 0]}


def test_extra_parameters_are_fitted_beside_the_networks() -> None:
    model = network()
    problem = nj.LeastSquares(model, X, residual=exponentials, extra={"k": [1.0, 0.5], "c": 0.7})
    assert problem.parameters.names[-2:] == ("k", "c")
    theta = problem.x0
    np.testing.assert_array_equal(theta[-3:], [1.0, 0.5, 0.7])

    def plain(t: np.ndarray) -> np.ndarray:
        return exponentials(outputs_of(t[:-3], X), {"k": t[-3:-1], "c": t[-1]})[0]

    np.testing.assert_allclose(problem.fun(theta + 0.1), plain(theta + 0.1), atol=1e-14)
    np.testing.assert_allclose(problem.jac(theta + 0.1), difference(plain, theta + 0.1), atol=1e-8)
    result = problem.solve(max_nfev=200)
    oracle = scipy.optimize.least_squares(plain, theta, max_nfev=200)
    assert result.cost <= 1.05 * oracle.cost + 1e-8
    assert problem.extra["c"] == result.x[-1]
    np.testing.assert_array_equal(problem.extra["k"], result.x[-3:-1])
    np.testing.assert_array_equal(weights(model), result.x[:-3])
    np.testing.assert_array_equal(problem.x0, result.x)  # a second fit goes on from there


def test_extra_parameters_take_bounds_and_priors_by_name() -> None:
    problem = nj.LeastSquares(
        network(), X, residual=exponentials, extra={"k": [1.0, 0.5], "c": 0.7}, bounds={"c": (0.6, 0.8)},
        prior={"k": (0.01, [1.0, 0.5])},
    )  # fmt: skip
    result = problem.solve(max_nfev=50)
    assert 0.6 <= problem.extra["c"] <= 0.8
    np.testing.assert_allclose(problem.extra["k"], [1.0, 0.5], atol=0.05)
    np.testing.assert_allclose(result.fun[-2:], (result.x[-3:-1] - [1.0, 0.5]) / 0.01)


@pytest.mark.parametrize(
    ("d_extra", "message"),
    [
        ({"k": np.zeros((12, 2))}, r"must have the keys \['c', 'k'\], and has \['k'\]"),
        (
            {"k": np.zeros((12, 3)), "c": np.zeros(12)},
            r"d_extra\['k'\] must have the shape \(12, 2\), and has \(12, 3\)",
        ),
        (np.zeros((12, 2)), r"have the shape \(12, 3\); it has \(12, 2\)"),
    ],
)
def test_derivatives_over_extra_parameters_that_do_not_fit(d_extra: Any, message: str) -> None:
    problem = nj.LeastSquares(
        network(), X, residual=lambda y, e: (*exponentials(y, e)[:2], d_extra), extra={"k": [1.0, 0.5], "c": 0.7}
    )
    with pytest.raises(ShapeError, match=message):
        problem.fun(problem.x0)


def test_one_array_of_derivatives_over_extra_parameters() -> None:
    def residual(y: np.ndarray, extra: Any) -> Any:
        r, dr, d = exponentials(y, extra)
        return r, dr, np.column_stack([d["k"], d["c"]])

    given = {"extra": {"k": [1.0, 0.5], "c": 0.7}}
    one = nj.LeastSquares(network(), X, residual=residual, **given)
    other = nj.LeastSquares(network(), X, residual=exponentials, **given)
    np.testing.assert_array_equal(one.jac(one.x0), other.jac(other.x0))


def test_a_wrong_derivative_over_extra_parameters_is_found() -> None:
    def residual(y: np.ndarray, extra: Any) -> Any:
        r, dr, d = exponentials(y, extra)
        return r, dr, {"k": d["k"], "c": 1.1 * d["c"]}

    problem = nj.LeastSquares(network(), X, residual=residual, extra={"k": [1.0, 0.5], "c": 0.7})
    with pytest.raises(DerivativeError, match="with respect to the extra parameters disagrees"):
        problem.fun(problem.x0)


def test_a_simulator_with_its_own_error_and_a_rate_of_its_own() -> None:
    """u' = -k u + f, integrated with loose tolerances and its sensitivities; the network gives f at each sample."""

    def simulate(y: np.ndarray, extra: dict[str, Any]) -> Any:
        k, f = extra["k"], y[:, 0]

        def slope(t: float, z: np.ndarray) -> np.ndarray:
            u, du_df, du_dk = np.split(z, 3)
            return np.concatenate([-k * u + f, -k * du_df + 1, -k * du_dk - u])

        z = scipy.integrate.solve_ivp(slope, (0, 1), np.zeros(36), rtol=1e-6, atol=1e-9).y[:, -1]
        u, du_df, du_dk = np.split(z, 3)
        return u - 0.4, du_df[:, None], {"k": du_dk}

    model = network()
    problem = nj.LeastSquares(model, X, residual=simulate, extra={"k": 1.0}, prior={"k": (0.1, 2.0)})
    result = problem.solve(max_nfev=50)
    k = problem.extra["k"]
    closed = outputs_of(weights(model), X)[:, 0] * (1 - np.exp(-k)) / k
    np.testing.assert_allclose(closed, 0.4, atol=1e-4)
    np.testing.assert_allclose(k, 2, atol=1e-3)  # the network can do the rest, so the prior decides
    assert result.success


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm", "netjac"])
@pytest.mark.parametrize("how", ["raises", "bad derivative", "bad shape"])
def test_a_function_that_fails_ends_the_fit_at_the_best_point(method: str, how: str) -> None:
    model = network()
    costs: list[float] = []
    broken = RuntimeError("the solver diverged")

    def residual(y: np.ndarray) -> Any:
        r = y[:, 0] - Y
        costs.append(0.5 * float(r @ r))
        if len(costs) == 9 and how == "raises":
            raise broken
        derivative = np.ones((12, 1))
        if len(costs) >= 9 and how == "bad derivative":
            derivative[3] = np.nan
        return r, derivative if len(costs) < 9 or how != "bad shape" else derivative[:5]

    problem = nj.LeastSquares(model, X, residual=residual)
    result = problem.solve(method)
    assert not result.success
    assert result.status == -4
    assert {"raises": "RuntimeError: the solver diverged", "bad shape": "ShapeError", "bad derivative": "DataError"}[
        how
    ] in result.message
    if how == "raises":
        assert result.error is broken
    assert len(costs) == 9
    assert result.nfev == 7
    best = min(costs[0], *costs[3:8])  # two calls are of the comparison with differences
    assert result.cost == pytest.approx(best, rel=1e-12)
    np.testing.assert_array_equal(weights(model), result.x)
    np.testing.assert_allclose(result.fun, outputs_of(result.x, X)[:, 0] - Y, atol=1e-12)
    plain = difference(lambda t: 0.5 * np.sum((outputs_of(t, X)[:, 0] - Y) ** 2), result.x)
    np.testing.assert_allclose(result.grad, plain, atol=1e-7)
    assert len(result.history) >= 1


def test_a_function_that_fails_at_once_is_not_a_result() -> None:
    model = network()
    before = weights(model)

    def residual(y: np.ndarray) -> Any:
        raise RuntimeError("no licence")

    with pytest.raises(RuntimeError, match="no licence"):
        nj.LeastSquares(model, X, residual=residual).solve()
    np.testing.assert_array_equal(weights(model), before)


@pytest.mark.parametrize("method", ["trf", "dogbox", "netjac"])
def test_nan_from_outside_is_a_rejected_step(method: str) -> None:
    model = network()
    seen: list[bool] = []

    def residual(y: np.ndarray) -> Any:
        bad = len(seen) in (5, 6)  # the second step after the start and its comparison
        seen.append(bad)
        return (np.full(12, np.nan) if bad else y[:, 0] - Y), np.ones((12, 1))

    result = nj.LeastSquares(model, X, residual=residual).solve(method, max_nfev=60)
    assert any(seen)
    assert result.status >= 0
    assert result.cost < 0.05
    np.testing.assert_array_equal(weights(model), result.x)


def test_lm_cannot_step_back_from_nan_and_says_so() -> None:
    model = network()
    calls: list[int] = []

    def residual(y: np.ndarray) -> Any:
        calls.append(1)
        return (np.full(12, np.nan) if len(calls) == 6 else y[:, 0] - Y), np.ones((12, 1))

    result = nj.LeastSquares(model, X, residual=residual).solve("lm")
    assert len(calls) == 6
    assert not result.success
    assert "cannot step back" in result.message
    assert np.isfinite(result.cost)
    np.testing.assert_array_equal(weights(model), result.x)


def test_outputs_that_are_not_finite_do_not_reach_the_function() -> None:
    f, variables = formula()
    asked: list[np.ndarray] = []

    def residual(y: np.ndarray) -> Any:
        asked.append(y)
        return y[:, 0] - Y, np.ones((12, 1))

    problem = nj.LeastSquares(f, X, residual=residual, variables=variables)
    with pytest.raises(DataError, match="the outputs are not finite"):
        problem.fun([1.0, 1e6])
    problem.fun(problem.x0)
    assert np.all(np.isnan(problem.fun([1.0, 1e6])))
    with pytest.raises(DataError, match="no derivative"):
        problem.jac([1.0, 1e6])
    assert all(np.all(np.isfinite(y)) for y in asked)
