"""`netjac.least_squares`: against SciPy, against itself by other linear algebra, at its edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult
from scipy.sparse.linalg import LinearOperator, aslinearoperator

import netjac as nj
from netjac.errors import DataError, DtypeError, ShapeError
from netjac.optimize import differences
from netjac.optimize.options import OptionError
from netjac.optimize.routes import LINEAR_SOLVERS

Array = NDArray[np.float64]


class TwoLayers:
    """A network 2-h-1 in NumPy, its residual on random data, and its derivative; m = 4 h + 1."""

    def __init__(self, hidden: int = 4, n: int = 30, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.h, self.x = hidden, rng.normal(size=(n, 2))
        self.y = np.zeros(n)
        truth = rng.normal(size=4 * hidden + 1)
        self.y = self.fun(truth) + 0.05 * rng.normal(size=n)
        self.x0 = truth + 0.5 * rng.normal(size=truth.size)

    def parts(self, theta: Array) -> tuple[Array, Array, Array, Array]:
        h = self.h
        W, b, v = theta[: 2 * h].reshape(2, h), theta[2 * h : 3 * h], theta[3 * h : 4 * h]
        return W, b, v, np.tanh(self.x @ W + b)

    def fun(self, theta: Array) -> Array:
        _, _, v, z = self.parts(theta)
        return z @ v + theta[-1] - self.y

    def jac(self, theta: Array) -> Array:
        _, _, v, z = self.parts(theta)
        d = (1 - z**2) * v
        kernel = (self.x[:, :, None] * d[:, None, :]).reshape(len(z), -1)
        return np.concatenate([kernel, d, z, np.ones((len(z), 1))], axis=1)


class Verbs(LinearOperator):
    """An array that pretends to be a Jacobian kept as factors."""

    def __init__(self, J: Array) -> None:
        super().__init__(np.float64, J.shape)
        self.J = J

    def _matmat(self, V: Array) -> Array:
        return self.J @ V

    def _rmatmat(self, U: Array) -> Array:
        return self.J.T @ U

    def to_array(self, dtype: Any = None) -> Array:
        return self.J

    def gram(self, dtype: Any = None) -> Array:
        return self.J @ self.J.T

    def normal(self, weights: Any = None, dtype: Any = None) -> Array:
        return self.J.T @ self.J

    def column_norms(self, squared: bool = False) -> Array:
        return np.sum(self.J**2, axis=0) ** (1.0 if squared else 0.5)

    def scaled_rows(self, w: Array) -> Verbs:
        return Verbs(w[:, None] * self.J)


FORMS: dict[str, Callable[[Array], Any]] = {
    "array": lambda J: J,
    "sparse": scipy.sparse.csr_array,
    "operator": aslinearoperator,
    "verbs": Verbs,
}


def test_the_derivative_of_the_test_network_is_right() -> None:
    net = TwoLayers()
    assert (
        scipy.optimize.check_grad(lambda t: 0.5 * np.sum(net.fun(t) ** 2), lambda t: net.jac(t).T @ net.fun(t), net.x0)
        < 1e-5
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hidden", [3, 12])  # fewer and more parameters than residuals
@pytest.mark.parametrize("solver", LINEAR_SOLVERS)
def test_every_linear_algebra_ends_at_a_minimum(form: str, hidden: int, solver: str) -> None:
    net = TwoLayers(hidden)
    if form == "operator" and solver not in ("auto", "products"):
        with pytest.raises(OptionError, match="products"):
            nj.least_squares(net.fun, net.x0, lambda t: FORMS[form](net.jac(t)), linear_solver=solver)
        return
    tight: dict[str, Any] = {"max_nfev": 500, "ftol": 1e-10, "xtol": 1e-10}
    result = nj.least_squares(net.fun, net.x0, lambda t: FORMS[form](net.jac(t)), linear_solver=solver, **tight)
    scipys = scipy.optimize.least_squares(net.fun, net.x0, net.jac, **tight)
    assert result.cost <= 1.01 * scipys.cost + 1e-12
    np.testing.assert_allclose(result.grad, net.jac(result.x).T @ net.fun(result.x), rtol=1e-6, atol=1e-12)
    assert result.linear_solver == (result.linear_solver if solver == "auto" else solver)
    assert f"{30} residuals" in result.reason


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 12),
    m=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([None, "jac", 2.0]),
    solver=st.sampled_from(LINEAR_SOLVERS),
)
def test_linear_problems_of_any_shape_are_solved(rows: int, m: int, seed: int, scale: Any, solver: str) -> None:
    rng = np.random.default_rng(seed)
    A, b = rng.normal(size=(rows, m)), rng.normal(size=rows)
    result = nj.least_squares(
        lambda x: A @ x - b, np.zeros(m), lambda x: A, x_scale=scale, linear_solver=solver, xtol=1e-14, ftol=1e-14
    )
    best = np.linalg.lstsq(A, b, rcond=None)[0]
    assert result.cost <= 0.5 * np.sum((A @ best - b) ** 2) + 1e-8 * (b @ b)


# ---- bounds


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), m=st.integers(1, 8), rows=st.integers(1, 12))
def test_bounded_linear_problems_end_where_scipys_solver_for_them_does(seed: int, m: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    A, b = rng.normal(size=(rows, m)), 3 * rng.normal(size=rows)
    low = -rng.uniform(0.1, 1, m)
    high = rng.uniform(0.1, 1, m)
    result = nj.least_squares(lambda x: A @ x - b, np.zeros(m), lambda x: A, bounds=(low, high), xtol=1e-13, ftol=1e-13)
    best = scipy.optimize.lsq_linear(A, b, (low, high), tol=1e-12)
    assert np.all((result.x >= low) & (result.x <= high))
    assert result.cost <= best.cost * (1 + 1e-6) + 1e-9
    np.testing.assert_array_equal(result.active_mask, np.where(result.x == low, -1, np.where(result.x == high, 1, 0)))


@pytest.mark.parametrize("solver", ["svd", "normal", "gram", "products"])
def test_a_bounded_network_fit_is_as_good_as_scipys(solver: str) -> None:
    net = TwoLayers(5)
    bounds = (-0.8, np.where(np.arange(len(net.x0)) % 2, 0.8, np.inf))
    start = np.clip(net.x0, *bounds)
    tight: dict[str, Any] = {"bounds": bounds, "max_nfev": 2000, "ftol": 1e-13, "xtol": 1e-13}
    ours = nj.least_squares(net.fun, start, net.jac, linear_solver=solver, **tight)
    scipys = scipy.optimize.least_squares(net.fun, start, net.jac, **tight)
    assert np.all((ours.x >= bounds[0]) & (ours.x <= bounds[1]))
    assert np.any(ours.active_mask)
    assert ours.cost <= scipys.cost * 1.2
    g, at_low, at_high = ours.grad, ours.active_mask < 0, ours.active_mask > 0
    assert np.all(g[at_low] > -1e-3)
    assert np.all(g[at_high] < 1e-3)
    assert ours.optimality == np.abs(g[~((at_low & (g > 0)) | (at_high & (g < 0)))]).max()


def test_no_trial_point_is_outside_the_bounds() -> None:
    net = TwoLayers(5)
    seen = []

    def fun(theta: Array) -> Array:
        seen.append(theta)
        return net.fun(theta)

    nj.least_squares(fun, np.clip(net.x0, -0.5, 0.5), "3-point", bounds=(-0.5, 0.5), max_nfev=30)
    assert np.abs(seen).max() <= 0.5


# ---- losses


@pytest.mark.parametrize("form", ["array", "verbs", "operator", "sparse"])
@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan"])
def test_robust_losses_end_where_scipy_does(loss: str, form: str) -> None:
    rng = np.random.default_rng(0)
    t = np.linspace(0, 4, 60)
    y = 2.5 * np.exp(-0.8 * t) + 0.3 + 0.02 * rng.normal(size=60)
    y[::9] += 3

    def fun(x: Array) -> Array:
        with np.errstate(over="ignore"):  # far out, at a trial point: a rejected step
            return x[0] * np.exp(-x[1] * t) + x[2] - y

    def jac(x: Array) -> Any:
        e = np.exp(-x[1] * t)
        return np.stack([e, -x[0] * t * e, np.ones_like(t)], axis=1)

    options: dict[str, Any] = {"loss": loss, "f_scale": 0.1, "xtol": 1e-12, "ftol": 1e-12, "max_nfev": 1000}
    start = [2.0, 1.0, 0.2]
    ours = nj.least_squares(fun, start, lambda x: FORMS[form](jac(x)), **options)
    scipys = scipy.optimize.least_squares(fun, start, jac, **options)
    assert ours.cost == pytest.approx(scipys.cost, rel=1e-6)
    np.testing.assert_allclose(ours.x, scipys.x, rtol=1e-4)


def test_a_loss_of_ones_own_is_used() -> None:
    def rho(z: Array) -> Array:
        return np.stack([np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2])

    net = TwoLayers()
    one = nj.least_squares(net.fun, net.x0, net.jac, loss=rho, f_scale=0.3)
    two = nj.least_squares(net.fun, net.x0, net.jac, loss="cauchy", f_scale=0.3)
    np.testing.assert_allclose(one.x, two.x)


# ---- how it ends


def test_termination_codes_and_what_was_done() -> None:
    net = TwoLayers()
    tests: dict[int, dict[str, Any]] = {
        0: {"max_nfev": 3},
        1: {"gtol": 1e3},
        2: {"ftol": 0.5, "xtol": None, "gtol": None},
        3: {"xtol": 10.0, "ftol": None, "gtol": None},
        4: {"xtol": 10.0, "ftol": 10.0, "gtol": None, "x_scale": 1e-4},
    }
    for status, options in tests.items():
        result = nj.least_squares(net.fun, net.x0, net.jac, **options)
        assert result.status == status
        assert result.success == (status > 0)
        assert result.message


def test_evaluations_are_counted() -> None:
    net, calls = TwoLayers(), {"fun": 0, "jac": 0}

    def fun(theta: Array) -> Array:
        calls["fun"] += 1
        return net.fun(theta)

    def jac(theta: Array) -> Array:
        calls["jac"] += 1
        return net.jac(theta)

    result = nj.least_squares(fun, net.x0, jac, max_nfev=17)
    assert (result.nfev, result.njev) == (calls["fun"], calls["jac"])
    assert result.nfev <= 17
    assert result.nit == result.njev - 1


@pytest.mark.parametrize("solver", ["svd", "normal", "gram", "products"])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_state_goes_on_exactly(solver: str, bounded: bool) -> None:
    net = TwoLayers(5)
    start = np.clip(net.x0, -0.9, 0.9)
    options: dict[str, Any] = {"linear_solver": solver, "bounds": (-1, 1) if bounded else (-np.inf, np.inf)}
    states = []

    def watch(intermediate_result: OptimizeResult) -> None:
        states.append(intermediate_result.state)

    whole = nj.least_squares(net.fun, start, net.jac, max_nfev=40, callback=watch, **options)
    middle = states[len(states) // 2]
    # The derivative at the state's own point is taken again; nothing else is.
    rest = nj.least_squares(net.fun, start, net.jac, max_nfev=40, state=replace(middle, njev=middle.njev), **options)
    np.testing.assert_array_equal(rest.x, whole.x)
    assert (rest.cost, rest.nfev, rest.nit, rest.status) == (whole.cost, whole.nfev, whole.nit, whole.status)
    with pytest.raises(ShapeError, match="state"):
        nj.least_squares(lambda x: x, np.ones(2), lambda x: np.eye(2), state=middle)


def test_ctrl_c_gives_the_best_point() -> None:
    net, calls = TwoLayers(), []

    def fun(theta: Array) -> Array:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return net.fun(theta)

    result = nj.least_squares(fun, net.x0, net.jac)
    assert result.status == -3
    assert not result.success
    assert result.cost < 0.5 * np.sum(net.fun(net.x0) ** 2)
    np.testing.assert_array_equal(result.fun, net.fun(result.x))


def test_callbacks_stop_by_raising_or_by_true() -> None:
    net = TwoLayers()

    def stop(x: Array) -> bool:
        assert x.shape == net.x0.shape
        x[:] = np.nan  # one's own copy
        return True

    result = nj.least_squares(net.fun, net.x0, net.jac, callback=stop)
    assert (result.status, result.nit) == (-2, 1)
    assert np.all(np.isfinite(result.x))


@pytest.mark.parametrize("solver", ["svd", "normal", "gram", "products"])
def test_points_that_are_not_finite_are_stepped_back_from(solver: str) -> None:
    def fun(x: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return np.log(x) - np.log([0.1, 0.2])

    result = nj.least_squares(fun, [5.0, 7.0], lambda x: np.diag(1 / x), linear_solver=solver)
    np.testing.assert_allclose(result.x, [0.1, 0.2], rtol=1e-6)


def test_a_residual_that_is_nan_everywhere_but_at_the_start_ends() -> None:
    def fun(x: Array) -> Array:
        return x + 1 if np.array_equal(x, [1.0, 2.0]) else np.full(2, np.nan)

    result = nj.least_squares(fun, [1.0, 2.0], lambda x: np.eye(2))
    np.testing.assert_array_equal(result.x, [1.0, 2.0])


def test_at_the_solution_nothing_is_done() -> None:
    result = nj.least_squares(lambda x: x - 3, [3.0], lambda x: np.eye(1))
    assert (result.nfev, result.nit, result.status) == (1, 0, 1)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"jac": "forward"}, OptionError, "'2-point'"),
        ({"linear_solver": "qr"}, OptionError, "'products'"),
        ({"loss": "l1"}, OptionError, "'huber'"),
        ({"x_scale": -1}, OptionError, "positive"),
        ({"x_scale": "big"}, OptionError, "positive"),
        ({"x_scale": np.ones(3)}, ShapeError, r"\(2,\)"),
        ({"max_nfev": 0}, OptionError, "max_nfev"),
        ({"verbose": 3}, OptionError, "verbose"),
        ({"bounds": 3.0}, OptionError, "lower, upper"),
        ({"bounds": (np.zeros(3), 1)}, ShapeError, r"\(2,\)"),
        ({"bounds": (0, np.nan)}, OptionError, "less than"),
        ({"bounds": (2, 3)}, DataError, r"at 2 of 2 entries, the first at 0: 1.0 is not in \[2.0, 3.0\]"),
        ({"ftol": None, "xtol": 0, "gtol": None}, OptionError, "machine precision"),
        ({"x0": [1j, 0]}, OptionError, "real"),
        ({"x0": np.ones((2, 2))}, ShapeError, "vector"),
        ({"fun": lambda x: np.ones((2, 2))}, ShapeError, "vector"),
        ({"fun": lambda x: x * 1j}, DtypeError, "complex"),
        ({"fun": lambda x: x * np.nan}, DataError, "2 of 2 residuals"),
        ({"jac": lambda x: np.ones((2, 3))}, ShapeError, r"\(2, 2\)"),
        ({"jac": lambda x: np.full((2, 2), np.nan)}, DataError, "derivative"),
    ],
)
def test_bad_arguments_say_what_was_expected(options: dict[str, Any], error: type[Exception], said: str) -> None:
    arguments: dict[str, Any] = {"fun": lambda x: x - 3, "x0": [1.0, 1.0], "jac": lambda x: np.eye(2)} | options
    with pytest.raises(error, match=said):
        nj.least_squares(**arguments)


# ---- finite differences


@pytest.mark.parametrize("scheme", differences.SCHEMES)
@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), (0.0, 0.5), (0.5, 1.0), (0.5 - 1e-9, 0.5 + 1e-9)])
def test_differences_are_the_derivative_within_the_bounds(scheme: str, bounds: tuple[float, float]) -> None:
    x = np.array([0.5, 0.5, 0.5])

    def fun(x: Any) -> Any:
        if not np.iscomplexobj(x):
            assert np.all((x >= bounds[0]) & (x <= bounds[1]))
        return np.array([np.sin(x[0]) * x[1], x[2] ** 3])

    sides = np.full(3, bounds[0]), np.full(3, bounds[1])
    got = differences.jacobian(fun, x, fun(x), scheme, sides)
    exact = np.array([[np.cos(0.5) * 0.5, np.sin(0.5), 0], [0, 0, 0.75]])
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-6)


def test_verbose_prints_the_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    net = TwoLayers()
    result = nj.least_squares(net.fun, net.x0, net.jac, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert "damping" in lines[0]
    assert len(lines) == 1 + result.njev + 2
    assert result.linear_solver in lines[-1]


@pytest.mark.parametrize("solver", ["svd", "normal"])
def test_columns_that_a_robust_loss_makes_tiny_do_not_end_the_fit(solver: str) -> None:
    """At the start the loss weighs all rows to almost nothing, and with them the columns that are the scale."""
    x = np.linspace(-1, 1, 12)
    y = np.sin(2 * x) + 0.3
    y[5] += 3
    powers = np.stack([np.ones_like(x), x, x**2, x**3], axis=1)

    def fun(c: Array) -> Array:
        return powers @ c[:4] + np.exp(c[4] * x) - y

    def jac(c: Array) -> Array:
        return np.concatenate([powers, (x * np.exp(c[4] * x))[:, None]], axis=1)

    start = [0.1, 0.2, -0.1, 0.05, 0.3]
    options: dict[str, Any] = {"loss": "cauchy", "f_scale": 0.1}
    result = nj.least_squares(fun, start, jac, linear_solver=solver, **options)
    assert result.cost <= scipy.optimize.least_squares(fun, start, jac, **options).cost * 1.01
    assert result.optimality < 1e-3
