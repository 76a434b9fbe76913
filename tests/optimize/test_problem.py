"""LeastSquares against closed forms, SciPy itself and a NumPy model; the TensorFlow side has its tests elsewhere."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator

from netjac.errors import DataError, DtypeError, NetjacError, PicklingError, ShapeError
from netjac.optimize import LeastSquares, OptionError, losses, options, targets
from netjac.optimize.monitor import Monitor
from netjac.spaces import OutputSpace, ParameterSpace, lay_out


class Variable:
    """A live variable as far as ParameterSpace can tell."""

    def __init__(self, value: Any, dtype: str = "float64") -> None:
        self.value = np.array(value, dtype=dtype)

    def assign(self, value: Any) -> None:
        self.value = np.array(value, dtype=self.value.dtype).reshape(self.value.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.value.astype(dtype or self.value.dtype)


@dataclass
class Evaluated:
    """A dense Jacobian with its outputs."""

    J: np.ndarray
    y: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        return self.J.dtype

    def matvec(self, v: np.ndarray) -> np.ndarray:
        assert v.any(), "products with zero are SciPy's waste, and need not reach the factors"
        return self.J @ v

    def rmatvec(self, u: np.ndarray) -> np.ndarray:
        return self.J.T @ u

    def matmat(self, V: np.ndarray) -> np.ndarray:
        return self.J @ V

    def rmatmat(self, U: np.ndarray) -> np.ndarray:
        return self.J.T @ U

    def to_array(self, layout: str = "(n l) m", *, dtype: Any = None) -> np.ndarray:
        assert layout == "(n l) m"
        return self.J.astype(dtype)


@dataclass
class Decay:
    """y = a exp(-b t), written out by hand in NumPy: the evaluator protocol with nothing behind it."""

    t: np.ndarray
    start: tuple[float, float] = (1.0, 0.2)
    dtype: str = "float64"
    calls: list[np.ndarray] = field(default_factory=list)
    fail_after: int | None = None
    error: type[BaseException] = RuntimeError
    nan_when: Any = None

    def __post_init__(self) -> None:
        segments = lay_out(["a", "b"], [(), (1,)], [self.dtype] * 2)
        self.variables = [Variable(self.start[0], self.dtype), Variable([self.start[1]], self.dtype)]
        self.parameters = ParameterSpace(segments, self.variables)
        self.output_space = OutputSpace(lay_out(["y"], [(1,)], [self.dtype]))

    def evaluate(self, theta: np.ndarray | None = None) -> Evaluated:
        theta = self.parameters.ravel() if theta is None else theta
        if self.fail_after is not None and len(self.calls) >= self.fail_after:
            raise self.error("the model broke")
        self.calls.append(theta.copy())
        a, b = theta.astype(self.dtype)
        with np.errstate(over="ignore"):
            e = np.exp(-b * self.t.astype(self.dtype))
            y, J = a * e, np.stack([e, -a * self.t.astype(self.dtype) * e], axis=1)
        if self.nan_when is not None and self.nan_when(theta):
            y = np.full_like(y, np.nan)
        return Evaluated(J, y[:, None])


T = np.linspace(0, 3, 30)
TRUTH = np.array([2.5, 1.3])
Y = TRUTH[0] * np.exp(-TRUTH[1] * T) + 0.05 * np.sin(7 * T)  # what the model cannot fit is there too


def decay(**options: Any) -> tuple[Decay, LeastSquares]:
    model = Decay(T, **options)
    return model, LeastSquares.from_evaluator(model, Y)


def reference() -> np.ndarray:
    """The optimum from curve_fit, which knows nothing of this package."""
    return scipy.optimize.curve_fit(lambda t, a, b: a * np.exp(-b * t), T, Y, p0=[1, 0.2], ftol=1e-15, xtol=1e-15)[0]


# ---------------------------------------------------------------- value and derivative


def test_residual_and_derivative_are_those_of_the_formula() -> None:
    _, problem = decay()
    theta = np.array([1.7, 0.4])
    r, J = problem.fun(theta), problem.jac(theta)
    assert r.dtype == J.dtype == np.float64
    assert r.shape == (30,)
    assert J.shape == problem.shape == (30, 2)
    np.testing.assert_allclose(r, 1.7 * np.exp(-0.4 * T) - Y, rtol=1e-15)
    h = 1e-6
    for j in range(2):
        step = h * np.eye(2)[j]
        difference = (problem.fun(theta + step) - problem.fun(theta - step)) / (2 * h)
        np.testing.assert_allclose(J[:, j], difference, atol=1e-8)


def test_one_evaluation_serves_value_and_derivative() -> None:
    model, problem = decay()
    theta = problem.x0
    problem.fun(theta), problem.jac(theta), problem.fun(theta.copy()), problem.jac(list(theta))
    assert len(model.calls) == 1
    problem.fun(theta + 1)
    assert len(model.calls) == 2


def test_the_best_evaluation_is_kept_beside_the_last() -> None:
    model, problem = decay()
    problem.fun(TRUTH)
    problem.fun(TRUTH + 5)
    problem.fun(TRUTH + 5)
    problem.fun(TRUTH)
    problem.jac(TRUTH)
    assert len(model.calls) == 2
    np.testing.assert_array_equal(problem.best_theta, TRUTH)
    problem.forget()
    assert problem.best_theta is None
    problem.fun(TRUTH)
    assert len(model.calls) == 3


def test_what_is_returned_belongs_to_the_caller() -> None:
    """SciPy scales residual and Jacobian in place for robust losses."""
    _, problem = decay()
    theta = problem.x0
    r, J = problem.fun(theta), problem.jac(theta)
    kept = r.copy(), J.copy()
    r *= 0
    J *= 0
    np.testing.assert_array_equal(problem.fun(theta), kept[0])
    np.testing.assert_array_equal(problem.jac(theta), kept[1])
    theta[:] = 9  # nor may the key of the cache change with the caller's vector
    np.testing.assert_array_equal(problem.fun(problem.x0), kept[0])


def test_evaluating_leaves_the_model_alone() -> None:
    model, problem = decay()
    problem.fun(TRUTH)
    problem.jac(TRUTH)
    np.testing.assert_array_equal(model.parameters.ravel(), [1.0, 0.2])
    np.testing.assert_array_equal(problem.x0, [1.0, 0.2])


def test_x0_is_a_float64_copy_of_the_present_weights() -> None:
    model, problem = decay(dtype="float32")
    x0 = problem.x0
    assert x0.dtype == np.float64
    x0 += 1
    np.testing.assert_array_equal(model.parameters.ravel(), np.float32([1.0, 0.2]))
    model.parameters.assign(TRUTH)
    np.testing.assert_allclose(problem.x0, TRUTH, rtol=1e-7)


def test_float32_model_hands_out_float64() -> None:
    model = Decay(T, dtype="float32")
    for form in ("dense", "operator"):
        problem = LeastSquares.from_evaluator(model, Y, jac=form)
        J = problem.jac(problem.x0)
        assert problem.fun(problem.x0).dtype == np.float64
        assert J.dtype == np.float64
        assert (J @ np.array([1.0, 2.0])).dtype == np.float64


def test_operator_agrees_with_array() -> None:
    model = Decay(T)
    theta = np.array([1.7, 0.4])
    J = LeastSquares.from_evaluator(model, Y, jac="dense").jac(theta)
    operator = LeastSquares.from_evaluator(model, Y, jac="operator").jac(theta)
    assert isinstance(operator, LinearOperator)
    rng = np.random.default_rng(1)
    v, u, V, U = rng.normal(size=2), rng.normal(size=30), rng.normal(size=(2, 3)), rng.normal(size=(30, 3))
    np.testing.assert_allclose(operator @ v, J @ v)
    np.testing.assert_allclose(operator.T @ u, J.T @ u)
    np.testing.assert_allclose(operator @ V, J @ V)
    np.testing.assert_allclose(operator.T @ U, J.T @ U)
    np.testing.assert_array_equal(operator @ np.zeros(2), np.zeros(30))
    np.testing.assert_array_equal(operator.T @ np.zeros(30), np.zeros(2))


# ---------------------------------------------------------------- fits


@pytest.mark.parametrize(
    ("method", "form"),
    [("trf", "dense"), ("trf", "operator"), ("dogbox", "dense"), ("dogbox", "operator"), ("lm", "dense")],
)
def test_every_method_reaches_the_optimum_and_leaves_it_in_the_model(method: str, form: str) -> None:
    model, problem = decay()
    result = problem.solve(method, jac=form, ftol=1e-12, xtol=1e-12, gtol=1e-12)
    assert result.success
    np.testing.assert_allclose(result.x, reference(), rtol=1e-7)
    np.testing.assert_array_equal(model.parameters.ravel(), result.x)
    np.testing.assert_array_equal(result.fun, problem.fun(result.x))
    assert result.cost == pytest.approx(0.5 * np.sum(result.fun**2))
    assert isinstance(result.jac, np.ndarray if form == "dense" else LinearOperator)


def test_literal_scipy_call() -> None:
    model, problem = decay()
    result = scipy.optimize.least_squares(problem.fun, problem.x0, problem.jac, xtol=1e-12)
    np.testing.assert_allclose(result.x, reference(), rtol=1e-6)
    np.testing.assert_array_equal(problem.best_theta, result.x)
    np.testing.assert_array_equal(model.parameters.ravel(), [1.0, 0.2])  # solve() moves the model, fun and jac do not
    assert result.nfev == len(model.calls)


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm"])
def test_evaluations_are_those_scipy_counts(method: str) -> None:
    model, problem = decay()
    result = problem.solve(method)
    assert len(model.calls) == result.nfev == result.history.nfev[-1]
    assert len(np.unique(model.calls, axis=0)) == len(model.calls)


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan", "callable"])
@pytest.mark.parametrize("form", ["dense", "operator"])
def test_robust_losses(loss: str, form: str) -> None:
    """Same result as SciPy on plain functions, and the history tells the cost that is minimised."""
    given_loss: Any = (
        (lambda z: np.stack([np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2])) if loss == "callable" else loss
    )
    y = Y.copy()
    y[5] += 4
    model = Decay(T)
    problem = LeastSquares.from_evaluator(model, y)
    result = problem.solve(loss=given_loss, f_scale=0.1, jac=form, ftol=1e-13, xtol=1e-13, gtol=1e-13)
    oracle = scipy.optimize.least_squares(
        lambda p: p[0] * np.exp(-p[1] * T) - y,
        [1, 0.2],
        loss=given_loss,
        f_scale=0.1,
        xtol=1e-13,
        ftol=1e-13,
        jac="3-point",
    )
    np.testing.assert_allclose(result.x, oracle.x, rtol=1e-5)
    assert result.history.cost[-1] == pytest.approx(result.cost, rel=1e-12)
    np.testing.assert_array_equal(model.parameters.ravel(), result.x)


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8),
    st.sampled_from(["linear", "soft_l1", "huber", "cauchy", "arctan"]),
    st.floats(0.01, 10),
)
def test_cost_and_gradient_are_scipys(residual: list[float], loss: str, f_scale: float) -> None:
    """On r(θ) = θ the result at the start holds SciPy's cost, and its gradient is ρ' ∘ r."""
    r = np.array(residual)
    result = scipy.optimize.least_squares(
        lambda t: t, r, lambda t: np.eye(t.size), loss=loss, f_scale=f_scale, max_nfev=1, method="dogbox"
    )
    assert losses.cost(r, loss, f_scale) == pytest.approx(result.cost, rel=1e-12, abs=1e-300)
    np.testing.assert_allclose(losses.weighted(r, loss, f_scale), result.grad, rtol=1e-9, atol=1e-12)


def test_bounds_over_theta() -> None:
    model, problem = decay()
    result = problem.solve(bounds=([0, 0], [2.0, np.inf]))
    oracle = scipy.optimize.least_squares(
        lambda p: p[0] * np.exp(-p[1] * T) - Y, [1, 0.2], bounds=([0, 0], [2.0, np.inf]), jac="3-point"
    )
    np.testing.assert_allclose(result.x, oracle.x, rtol=1e-5)
    assert result.x[0] <= 2.0
    np.testing.assert_array_equal(model.parameters.ravel(), result.x)


def test_history_and_callback() -> None:
    seen: list[float] = []
    _, problem = decay()
    result = problem.solve(callback=lambda intermediate_result: seen.append(intermediate_result.cost))
    history = result.history
    assert len(history) == result.njev
    assert np.all(np.diff(history.cost) < 0)
    assert np.all(np.diff(history.nfev) > 0)
    assert np.all(np.diff(history.time) >= 0)
    np.testing.assert_allclose(history.cost[1:], seen, rtol=1e-12)
    assert history.cost[0] == pytest.approx(0.5 * np.sum((np.exp(-0.2 * T) - Y) ** 2))
    assert history.optimality[-1] == pytest.approx(result.optimality, rel=1e-6, abs=1e-12)


def test_callback_stops_the_fit() -> None:
    def stop(intermediate_result: Any) -> None:
        raise StopIteration

    model, problem = decay()
    result = problem.solve(callback=stop)
    assert result.status == -2
    np.testing.assert_array_equal(model.parameters.ravel(), result.x)


def test_a_second_solve_goes_on_from_the_first() -> None:
    _, problem = decay()
    problem.solve(max_nfev=3)
    second = problem.solve()
    assert second.history.cost[0] < 0.5 * np.sum((np.exp(-0.2 * T) - Y) ** 2)
    np.testing.assert_allclose(second.x, reference(), rtol=1e-5)


# ---------------------------------------------------------------- when things go wrong


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm", "netjac"])
def test_a_broken_fit_leaves_the_best_theta_in_the_model(method: str) -> None:
    model, problem = decay(fail_after=4)
    with pytest.raises(RuntimeError, match="the model broke"):
        problem.solve(method)
    costs = [np.sum((t[0] * np.exp(-t[1] * T) - Y) ** 2) for t in model.calls]
    best = int(np.argmin(costs))
    assert best > 0
    np.testing.assert_array_equal(model.parameters.ravel(), model.calls[best])
    np.testing.assert_array_equal(problem.best_theta, model.calls[best])


def test_a_fit_that_breaks_at_once_leaves_the_model_as_it_was() -> None:
    model, problem = decay(fail_after=0)
    with pytest.raises(RuntimeError, match="the model broke"):
        problem.solve()
    np.testing.assert_array_equal(model.parameters.ravel(), [1.0, 0.2])


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm"])
def test_a_trial_point_without_a_finite_residual_is_never_the_best(method: str) -> None:
    model, problem = decay(nan_when=lambda theta: theta[0] > 1.5)
    result = problem.solve(method, max_nfev=30)
    assert any(theta[0] > 1.5 for theta in model.calls)
    assert np.isfinite(result.cost)
    assert result.x[0] <= 1.5
    assert result.cost <= 0.5 * np.sum((np.exp(-0.2 * T) - Y) ** 2)
    np.testing.assert_array_equal(model.parameters.ravel(), result.x)


def test_start_without_finite_residual() -> None:
    model, problem = decay(nan_when=lambda theta: True)
    with pytest.raises(DataError, match="30 of 30 residuals are not finite at the start"):
        problem.solve()
    np.testing.assert_array_equal(model.parameters.ravel(), [1.0, 0.2])


def test_a_better_point_that_the_solver_rejected_is_taken() -> None:
    _, problem = decay()
    result = scipy.optimize.OptimizeResult(x=np.array([1.0, 0.2]), cost=100.0)
    problem.fun(TRUTH)
    problem._take_best(result, "dense")
    np.testing.assert_array_equal(result.x, TRUTH)
    np.testing.assert_array_equal(result.fun, problem.fun(TRUTH))
    np.testing.assert_array_equal(result.jac, problem.jac(TRUTH))
    np.testing.assert_allclose(result.grad, result.jac.T @ result.fun)
    assert result.cost == pytest.approx(0.5 * np.sum(result.fun**2))
    assert result.optimality == np.abs(result.grad).max()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "netjack"}, "method must be one of 'trf', 'dogbox', 'lm'"),
        ({"jac": "2-point"}, "jac must be one of"),
        ({"loss": "absolute"}, "loss must be one of"),
        ({"tr_solver": "qr"}, "tr_solver must be one of"),
        ({"x_scale": "auto"}, "x_scale must be one of 'jac'"),
        ({"method": "lm", "jac": "operator"}, "method 'lm' needs the Jacobian as an array"),
        ({"method": "lm", "loss": "huber"}, "plain sum of squares"),
        ({"method": "lm", "tr_solver": "lsmr"}, "no tr_solver"),
        ({"method": "lm", "linear_solver": "svd"}, "linear_solver is of method 'netjac'"),
        ({"method": "netjac", "tr_solver": "lsmr"}, "method 'netjac' has no tr_solver"),
        ({"method": "netjac", "tr_options": {"maxiter": 3}}, r"takes no tr_options, and \['maxiter'\] were given"),
        ({"method": "lm", "tr_options": {"maxiter": 3}}, "method 'lm' takes no tr_options"),
        ({"jac": "operator", "x_scale": "jac"}, "x_scale='jac' needs the Jacobian as an array"),
        ({"jac": "operator", "tr_solver": "exact"}, "tr_solver='exact' needs the Jacobian as an array"),
        ({"progress": "x"}, "progress must be True, False or a text stream such as sys.stdout, and is 'x'"),
        ({"progress": 3}, "progress must be True, False or a text stream"),
        ({"progress": b""}, "progress must be True, False or a text stream"),
    ],
)
def test_impossible_combinations(wrong: dict[str, Any], message: str) -> None:
    model, problem = decay()
    with pytest.raises(OptionError, match=message) as caught:
        problem.solve(**wrong)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NetjacError)
    assert not model.calls, "refused before any work"


def test_lm_needs_as_many_residuals_as_parameters() -> None:
    model = Decay(T[:1])
    with pytest.raises(OptionError, match="there are 1 residuals and 2 parameters"):
        LeastSquares.from_evaluator(model, Y[:1]).solve("lm")
    assert not model.calls


@pytest.mark.parametrize(
    ("given_options", "expected"),
    [
        ({}, ("dense", "exact")),
        ({"shape": (3000, 3000)}, ("operator", "lsmr")),
        ({"shape": (3000, 3000), "tr_solver": "exact"}, ("dense", "exact")),
        ({"shape": (3000, 3000), "x_scale": "jac"}, ("dense", "exact")),
        ({"shape": (3000, 3000), "method": "lm"}, ("dense", None)),
        ({"shape": (3000, 3000), "jac": "dense"}, ("dense", "exact")),
        ({"tr_solver": "lsmr"}, ("operator", "lsmr")),
        ({"tr_solver": "lsmr", "jac": "dense"}, ("dense", "lsmr")),
        ({"tr_solver": "lsmr", "x_scale": "jac"}, ("dense", "lsmr")),
        ({"jac": "operator"}, ("operator", "lsmr")),
        ({"method": "netjac"}, ("operator", None)),
        ({"method": "netjac", "jac": "dense"}, ("dense", None)),
        ({"method": "dogbox", "shape": (3000, 3000)}, ("operator", "lsmr")),
    ],
)
def test_choice_of_the_jacobian(given_options: dict[str, Any], expected: tuple[str, str | None]) -> None:
    defaults = {"method": "trf", "jac": "auto", "tr_solver": None, "x_scale": None, "loss": "linear"}
    arguments = {"shape": (30, 2), **defaults, **given_options}
    assert options.choose(arguments.pop("shape"), **arguments) == expected


def test_wrong_theta() -> None:
    _, problem = decay()
    with pytest.raises(ShapeError, match=r"theta must have the shape \(2,\).*has \(3,\)"):
        problem.fun(np.zeros(3))


@pytest.mark.parametrize("theta", ["a", None, ["a", "b"], object(), b""])
@pytest.mark.parametrize("verb", ["fun", "jac"])
def test_theta_that_is_no_vector_of_numbers(theta: Any, verb: str) -> None:
    _, problem = decay()
    with pytest.raises(DtypeError, match=r"theta must be a vector \(2,\) of real numbers.* has dtype [^;]*\.$"):
        getattr(problem, verb)(theta)
    with pytest.raises(DtypeError, match=r"has dtype complex128; the Jacobian is problem\.jac"):
        getattr(problem, verb)(np.ones(2, complex))
    with pytest.raises(ShapeError, match=r"theta must have the shape \(2,\), and is ragged"):
        getattr(problem, verb)([[1.0, 2.0], [3.0]])


def test_a_problem_says_what_to_save_instead_of_itself() -> None:
    _, problem = decay()
    for give in (pickle.dumps, copy.deepcopy):
        with pytest.raises(PicklingError, match=r"save theta .* and the model") as raised:
            give(problem)
        assert isinstance(raised.value, TypeError)


def test_outputs_of_another_size_than_y() -> None:
    problem = LeastSquares.from_evaluator(Decay(T), Y[:-1])
    with pytest.raises(DataError, match=r"\(30, 1\), and y has \(29, 1\)"):
        problem.fun(problem.x0)


# ---------------------------------------------------------------- targets


SPACE = OutputSpace(lay_out(["mean", "spread", "angle"], [(2, 3), (1,), ()], ["float32"] * 3), {"a": [0, 1], "b": 2})


def test_targets_follow_the_models_structure() -> None:
    rng = np.random.default_rng(0)
    mean, spread, angle = rng.normal(size=(5, 2, 3)), rng.normal(size=(5, 1)), rng.normal(size=5)
    flat = targets.flatten(SPACE, {"b": angle, "a": [mean, spread[:, 0]]})
    assert flat.dtype == np.float64
    assert flat.flags.c_contiguous
    for i in range(5):
        assert list(flat[i]) == [*mean[i].ravel(), spread[i, 0], angle[i]]
    packed = SPACE.pack(flat)
    np.testing.assert_array_equal(packed["a"][0], mean)
    np.testing.assert_array_equal(packed["a"][1], spread)
    np.testing.assert_array_equal(packed["b"], angle)


@pytest.mark.parametrize("y", [np.zeros(4), np.zeros((4, 1)), [0, 0, 0, 0], [[0.0]] * 4, np.zeros(4, bool)])
def test_one_number_a_sample_in_every_spelling(y: Any) -> None:
    for shape in [(), (1,)]:
        flat = targets.flatten(OutputSpace(lay_out(["y"], [shape], ["float32"])), y)
        assert flat.shape == (4, 1)
        assert flat.dtype == np.float64


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.zeros((5, 9)), r"y must be a dict with the keys \['a', 'b'\], and is a ndarray"),
        ({"a": [np.zeros((5, 2, 3)), np.zeros(5)]}, r"and is a dict with the keys \['a'\]"),
        ({"a": np.zeros((5, 7)), "b": np.zeros(5)}, r"y\['a'\] must be a list of 2 arrays.*and is a ndarray"),
        ({"a": [np.zeros((5, 2, 3))], "b": np.zeros(5)}, r"and is 1 items"),
        ({"a": [np.zeros((5, 6)), np.zeros(5)], "b": np.zeros(5)}, r"y\['a'\]\[0\] must have the shape \(n, 2, 3\)"),
        (
            {"a": [np.zeros((5, 2, 3)), np.zeros((5, 2))], "b": np.zeros(5)},
            r"\(n, 1\) or \(n,\) of the output 'spread'",
        ),
        ({"a": [np.zeros((5, 2, 3)), np.zeros(5)], "b": 1.0}, r"shape \(n,\) of the output 'angle', and has \(\)"),
        ({"a": [np.zeros((5, 2, 3)), np.zeros(4)], "b": np.zeros(5)}, r"different numbers of samples: \[4, 5\]"),
    ],
)
def test_targets_that_do_not_fit(y: Any, message: str) -> None:
    with pytest.raises((ShapeError, DataError), match=message):
        targets.flatten(SPACE, y)


def test_a_dict_for_a_model_with_one_output() -> None:
    with pytest.raises(ShapeError, match="the model has one output there"):
        targets.flatten(OutputSpace.flat(1), {"y": np.zeros(3)})


def test_y_without_columns_is_not_broadcast() -> None:
    """(n,) against (n, l): NumPy would subtract it from every row if n == l."""
    with pytest.raises(ShapeError, match=r"\(n, 3\)"):
        targets.flatten(OutputSpace.flat(3), np.zeros(3))


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        ([1.0, np.nan], DataError, r"1 values that are not finite, the first at \(1,\)"),
        ({"a": np.zeros(2), "b": np.array([[0.0], [np.inf]])}, DataError, r"the first at \(1, 0\)"),
        (np.zeros(3, complex), DtypeError, "complex128"),
        (["a", "b"], DtypeError, "real numbers"),
        ([[1.0], [1.0, 2.0]], ShapeError, "ragged"),
    ],
)
def test_values_that_cannot_be_targets(y: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LeastSquares(None, np.zeros((2, 1)), y)  # no model is looked at before y is


def test_x_and_y_of_different_length_are_refused_before_the_model_is_built() -> None:
    for x in (
        np.zeros((3, 2)),
        [np.zeros((3, 2)), np.zeros((3, 1))],
        {"a": np.zeros((3, 2))},
        [[1, 2], [3, 4], [5, 6]],
    ):
        with pytest.raises(DataError, match=r"x has 3 samples and y has 2"):
            LeastSquares(None, x, np.zeros(2))
    with pytest.raises(ShapeError, match="single number"):
        LeastSquares(None, np.zeros((3, 2)), 1.0)


def test_nothing_to_fit() -> None:
    with pytest.raises(DataError, match="0 residuals and 2 parameters"):
        LeastSquares.from_evaluator(Decay(T[:0]), np.zeros(0))


# ---------------------------------------------------------------- progress


def test_progress_into_a_stream() -> None:
    stream = io.StringIO()
    _, problem = decay()
    result = problem.solve(progress=stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(result.history)
    assert lines[0].startswith("iteration   0  evaluations   1  cost ")


def test_no_progress_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    _, problem = decay()
    problem.solve()
    problem.solve(progress=True)  # standard error is no terminal under pytest
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_progress_on_a_terminal(with_tqdm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    terminal = Terminal()
    monitor = Monitor(terminal, max_nfev=10)
    monitor.evaluated()
    monitor.iterate(12.5, 0.25)
    monitor.close()
    assert "cost 1.250000e+01" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")
    assert terminal.getvalue().count("\n") == 1


def test_importing_the_problem_loads_no_framework() -> None:
    heavy = "tensorflow", "keras", "matplotlib", "tqdm"
    code = f"import sys, netjac.optimize; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
