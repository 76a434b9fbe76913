"""What cannot be meant is refused with a message, and never counted as something else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

import netjac as nj
from netjac.optimize import OptionError
from netjac.optimize.methods import METHODS, ROOT

N = 12
X = np.linspace(-1, 1, N)[:, None]
Y = np.sin(2 * X) + 0.3


def formula() -> tuple[Callable[[Any], Any], list[Any]]:
    c = tf.Variable([0.1, 0.2, -0.1, 0.05], dtype="float64", name="c")
    d = tf.Variable(0.3, dtype="float64", name="d")
    return lambda x: c[0] + c[1] * x + c[2] * x**2 + c[3] * x**3 + tf.exp(d * x), [c, d]


def squares_problem(y: Any = None, **options: Any) -> nj.LeastSquares:
    f, variables = formula()
    if y is None and "residual" not in options:
        y = Y
    return nj.LeastSquares(f, X, y, variables=variables, **options)


def value_problem(external: Callable[..., Any], **options: Any) -> nj.Objective:
    f, variables = formula()
    return nj.Objective(f, X, external, variables=variables, **options)


def half_squares(outputs: Any) -> tuple[float, Any]:
    r = outputs - Y
    return 0.5 * float(np.sum(r**2)), r


ONES = np.ones((N, 1, 1))


# ---- arrays


def masked(given: Any) -> Any:
    return np.ma.masked_array(given, mask=np.arange(given.size).reshape(given.shape) == 3)


@pytest.mark.parametrize(
    "fit",
    [
        lambda: squares_problem(masked(Y)),
        lambda: squares_problem(weights=masked(np.ones(N))),
        lambda: squares_problem(residual=lambda o: (masked(o - Y), ONES)).solve(),
        lambda: squares_problem(residual=lambda o: (o - Y, masked(ONES))).solve(),
        lambda: value_problem(lambda o: (half_squares(o)[0], masked(o - Y))).minimize(),
    ],
    ids=["y", "weights", "residual", "derivative", "gradient"],
)
def test_masks_are_never_ignored(fit: Callable[[], Any]) -> None:
    with pytest.raises(nj.DataError, match="1 masked entries"):
        fit()


def test_a_mask_that_hides_nothing_is_an_array() -> None:
    problem = squares_problem(np.ma.masked_array(Y, mask=False))
    np.testing.assert_array_equal(problem.fun(problem.x0), squares_problem().fun(problem.x0))


def test_transposed_weights() -> None:
    c = tf.Variable([1.0, 2.0], dtype="float64")
    with pytest.raises(nj.ShapeError, match=r"\(2, 12\)"):
        nj.LeastSquares(lambda x: c * x, X, np.hstack([Y, Y]), variables=[c], weights=np.ones((2, N)))


def test_weights_that_are_all_zero() -> None:
    with pytest.raises(nj.DataError, match="nothing to fit"):
        squares_problem(weights=np.zeros(N))


def test_an_operator_without_its_transpose() -> None:
    forward = LinearOperator((N, N), matvec=lambda v: v, dtype="float64")
    with pytest.raises(nj.DtypeError, match="rmatvec"):
        squares_problem(residual=lambda o: (o - Y, forward)).solve()


def test_a_residual_that_changes_its_size_during_the_comparison() -> None:
    calls = []

    def residual(outputs: Any) -> Any:
        calls.append(0)
        r = (outputs - Y)[: N - (len(calls) > 1), 0]
        return r, np.eye(N)[: r.size]

    with pytest.raises(nj.ShapeError, match="12 residuals at other parameters, and now 11"):
        squares_problem(residual=residual).solve()


@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array, scipy.sparse.csr_matrix])
def test_curvature_that_is_not_symmetric(kind: Callable[[Any], Any]) -> None:
    objective = value_problem(lambda o: (*half_squares(o), kind(np.triu(np.ones((N, N))))))
    with pytest.raises(nj.DataError, match="symmetric"):
        objective.minimize("trust-ncg")
    symmetric = value_problem(lambda o: (*half_squares(o), kind(np.eye(N))))
    H = symmetric.hess(symmetric.x0)
    np.testing.assert_allclose(H, squares_problem().hess(symmetric.x0), rtol=1e-12, atol=1e-12)


# ---- batches


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)


@pytest.mark.parametrize(
    "make", [batches, lambda: iter(batches()), lambda: batches], ids=["set", "iterator", "function"]
)
def test_batches_are_no_arrays(make: Callable[[], Any]) -> None:
    f, variables = formula()
    problems: list[tuple[str, Callable[[], Any]]] = [
        ("x", lambda: nj.LeastSquares(f, make(), variables=variables)),
        ("x", lambda: nj.LeastSquares(f, make(), Y, variables=variables)),
        ("x", lambda: nj.Objective(f, make(), half_squares, variables=variables)),
        ("x", lambda: nj.OutputConstraint(f, make(), 0, variables=variables)),
        ("x", lambda: nj.jacobian(f, make(), variables=variables)),
        ("x", lambda: nj.input_jacobian(f, make())),
    ]
    for name, problem in problems:
        with pytest.raises(
            nj.DtypeError, match=rf"{name} must be an array of all samples.*netjac\.stream\(model, batches"
        ):
            problem()
    with pytest.raises((nj.DtypeError, OptionError), match=r"^y must be "):
        squares_problem(make())
    x, y = map(np.concatenate, zip(*batches(), strict=True))
    np.testing.assert_array_equal(
        nj.LeastSquares(f, x, y, variables=variables).fun(np.ones(5)), squares_problem().fun(np.ones(5))
    )


def test_a_function_in_place_of_targets() -> None:
    with pytest.raises(OptionError, match=r"y must be targets, and is a function: .* is residual="):
        squares_problem(lambda outputs: (outputs - Y, ONES))


# ---- names and bounds


@pytest.mark.parametrize("name", ["", "*", "ga?n", "a[b]", 3])
def test_extra_names_that_patterns_would_not_find(name: Any) -> None:
    with pytest.raises(OptionError, match="needs a name"):
        squares_problem(residual=lambda o, e: (o - Y, ONES, {name: 0 * o}), extra={name: 1.0})


@pytest.mark.parametrize("limits", [(np.inf, None), (None, -np.inf)])
def test_bounds_at_the_wrong_infinity(limits: tuple[Any, Any]) -> None:
    with pytest.raises(nj.DataError, match="leave nothing between"):
        squares_problem(bounds={"c": limits})


def test_a_list_of_two_pairs_for_two_parameters_is_ambiguous() -> None:
    c = tf.Variable([0.5, 2.0], dtype="float64")

    def made(bounds: Any) -> scipy.optimize.Bounds:
        return nj.LeastSquares(lambda x: c[0] * x + c[1], X, Y, variables=[c], bounds=bounds).bounds

    with pytest.raises(OptionError, match="a pair for each"):
        made([(0, 1), (2, 3)])
    np.testing.assert_array_equal(made(([0, 2], [1, 3])).ub, [1, 3])


# ---- options


@pytest.mark.parametrize("method", ["trf", "lm", "netjac"])
@pytest.mark.parametrize(
    "options",
    [
        {"f_scale": 0},
        {"f_scale": -1.0},
        {"f_scale": np.nan},
        {"f_scale": np.ones(N)},
        {"max_nfev": 0},
        {"max_nfev": 2.5},
        {"ftol": np.nan},
        {"gtol": "small"},
    ],
    ids=str,
)
def test_numbers_that_are_none(method: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        squares_problem().solve(method, **options)


@pytest.mark.parametrize("f_scale", [0, -1.0, np.nan])
def test_the_scale_of_a_loss_after_the_fit_and_without_a_model(f_scale: float) -> None:
    with pytest.raises(OptionError, match="f_scale"):
        nj.uncertainty(squares_problem(), loss="huber", f_scale=f_scale)
    with pytest.raises(OptionError, match="f_scale"):
        nj.least_squares(lambda x: x - 1, [0.0], loss="huber", f_scale=f_scale)


@pytest.mark.parametrize("method", ["trf", "dogbox", "netjac"])
@pytest.mark.parametrize(
    ("loss", "error", "said"),
    [
        (lambda z: np.zeros(3), nj.ShapeError, r"\(3, 12\)"),
        (lambda z: z, nj.ShapeError, r"\(3, 12\)"),
        (lambda z: np.stack([z, 1 + 0 * z]), nj.ShapeError, r"\(2, 12\)"),
        (lambda z: None, nj.ShapeError, r"\(\)"),
        (lambda z: "rho", nj.DtypeError, "'rho'"),
    ],
)
def test_losses_of_the_wrong_shape(method: str, loss: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        squares_problem().solve(method, loss=loss)


@pytest.mark.parametrize("method", ["trf", "dogbox", "netjac"])
def test_a_loss_may_return_a_list(method: str) -> None:
    plain = squares_problem().solve(method)
    listed = squares_problem().solve(method, loss=lambda z: [z, np.ones_like(z), np.zeros_like(z)])
    assert abs(listed.cost - plain.cost) < 1e-9


@pytest.mark.parametrize("method", ["trf", "lm", "netjac"])
def test_a_cost_that_overflows_at_the_start(method: str) -> None:
    with pytest.raises(nj.DataError, match="cost is inf"):
        squares_problem(prior={"*": 1e-200}).solve(method)


def test_a_cost_that_overflows_at_the_start_without_a_model() -> None:
    with pytest.raises(nj.DataError, match="cost is inf"):
        nj.least_squares(lambda x: 1e200 * (x - 1), [0.0], lambda x: np.array([[1e200]]))


def test_constraints_and_options_of_other_kinds() -> None:
    objective = value_problem(half_squares)
    with pytest.raises(OptionError, match="a constraint is"):
        objective.minimize("SLSQP", constraints=[3])
    with pytest.raises(OptionError, match="options must be a dict"):
        objective.minimize("BFGS", options=3)
    with pytest.raises(OptionError, match="NoneType"):
        objective.minimize(lambda fun, x0, **_: None)


CALL = re.compile(r"call (scipy\.optimize\..*); problem")


@pytest.mark.parametrize("method", [*METHODS, "l-bfgs-b"])
def test_a_method_for_values_says_how_it_is_called(method: str) -> None:
    """And the call that the message shows works, without a warning."""
    problem = squares_problem()
    with pytest.raises(OptionError, match=r"is '.*'\. scipy.optimize.minimize has that one, for values") as caught:
        problem.solve(method)
    [call] = CALL.findall(str(caught.value))
    result = eval(call, {"scipy": scipy, "problem": problem})
    assert result.fun < problem.cost(problem.x0) / 10


@pytest.mark.parametrize("method", ["hybr", "krylov", "anderson", "broyden1", "df-sane"])
def test_a_method_for_roots_says_how_it_is_called(method: str) -> None:
    c = tf.Variable([0.5, 0.5], dtype="float64")
    at, y = np.array([[0.5], [1.0]]), np.array([1.5, 2.0])
    problem = nj.LeastSquares(lambda x: c[0] + c[1] * x + 0.1 * c[0] * c[1], at, y, variables=[c])
    with pytest.raises(OptionError, match=r"scipy.optimize.root has that one, for as many residuals") as caught:
        problem.solve(method)
    [call] = CALL.findall(str(caught.value))
    result = eval(call, {"scipy": scipy, "problem": problem})
    assert result.success
    np.testing.assert_allclose(problem.fun(result.x), 0, atol=1e-4)


def test_all_methods_for_roots_are_known() -> None:
    known = set(re.findall(r"- '([\w-]+)'", scipy.optimize.root.__doc__ or ""))
    assert known == {*ROOT, "lm"}


@pytest.mark.parametrize("method", ["steepest", 3, None, ["trf"], "TRF"])
def test_what_is_no_method(method: Any) -> None:
    with pytest.raises(OptionError, match=r"method must be one of 'trf', 'dogbox', 'lm', 'netjac', and is .*\.$"):
        squares_problem().solve(method)


@pytest.mark.parametrize("method", ["trf", "lm", "netjac"])
def test_a_method_for_residuals_is_none_for_values(method: str) -> None:
    with pytest.raises(OptionError, match=rf"LeastSquares, with y or with residual=, has solve\('{method}'\)"):
        value_problem(half_squares).minimize(method)


# ---- what a callback is shown


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm", "netjac"])
def test_a_callback_that_writes_into_the_result_changes_nothing(method: str) -> None:
    def scribble(intermediate_result: Any) -> None:
        intermediate_result.x[:] = 0

    plain, scribbled = squares_problem().solve(method), squares_problem().solve(method, callback=scribble)
    np.testing.assert_array_equal(scribbled.x, plain.x)
    assert scribbled.nfev == plain.nfev


# ---- x0


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm", "netjac"])
def test_a_fit_starts_at_x0(method: str) -> None:
    start = np.array([0.5, -0.5, 0.25, 1.0, -0.2])
    problem, moved = squares_problem(), squares_problem()
    moved.parameters.assign(start)
    there, here = problem.solve(method, x0=start.tolist()), moved.solve(method)
    np.testing.assert_array_equal(there.x, here.x)
    np.testing.assert_array_equal(problem.parameters.ravel(), there.x)
    np.testing.assert_array_equal(there.history.cost, here.history.cost)


@pytest.mark.parametrize("method", ["L-BFGS-B", "TNC", "COBYQA"])
def test_a_minimisation_starts_at_x0(method: str) -> None:
    start = np.array([0.5, -0.5, 0.25, 1.0, -0.2])
    asked: list[Any] = []

    def external(outputs: Any) -> Any:
        asked.append(np.array(outputs))
        return half_squares(outputs)

    problem = value_problem(external, check=False)
    problem.minimize(method, x0=start)
    by_hand = start[0] + start[1] * X + start[2] * X**2 + start[3] * X**3 + np.exp(start[4] * X)
    np.testing.assert_allclose(asked[0], by_hand, rtol=1e-12)


def test_x0_is_moved_into_the_bounds_and_checked() -> None:
    problem = squares_problem(bounds={"d": (0, 1)})
    problem.solve("netjac", x0=np.full(5, -3.0), max_nfev=1)
    kept = problem.parameters.ravel()
    np.testing.assert_array_equal(kept, [-3, -3, -3, -3, 0])
    with pytest.raises(nj.ShapeError, match=r"x0 must have the shape \(5,\)"):
        problem.solve(x0=np.zeros(4))
    with pytest.raises(nj.DataError, match=r"'c'\[2\]"):
        problem.solve(x0=[0, 0, np.nan, 0, 0])
    with pytest.raises(nj.DtypeError):
        problem.solve(x0="start")
    with pytest.raises(OptionError, match="either x0 or resume"):
        problem.solve(x0=np.zeros(5), resume="nowhere")
    np.testing.assert_array_equal(problem.parameters.ravel(), kept)
