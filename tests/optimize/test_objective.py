"""Objective: value, gradient and Hessian against differences and NumPy; minimize by every method; failures."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.sparse
from scipy.sparse.linalg import aslinearoperator

import netjac as nj
from netjac.errors import DataError, DerivativeError, DtypeError, NameLookupError, PicklingError, ShapeError
from netjac.jacobian import Jacobian
from netjac.optimize import OptionError, methods
from small_fits import difference, formula, network, outputs_of, weights

RNG = np.random.default_rng(5)
X = np.linspace(-1, 1, 15)[:, None]
COUNTS = RNG.poisson(3.0, (15, 2)).astype(float)
MIX = RNG.normal(size=(30, 30))
MIX = MIX @ MIX.T / 30 + np.eye(30)


def poisson(y: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Negative log-likelihood of counts with expectations exp(y), with its exact Hessian, diagonal."""
    e = np.exp(y)
    return float(np.sum(e - COUNTS * y)), e - COUNTS, np.einsum("nl,lk->nlk", e, np.eye(2))


def coupled(y: np.ndarray, form: Any = np.asarray) -> tuple[float, np.ndarray, Any]:
    """½ (y − counts)ᵀ MIX (y − counts): all outputs together."""
    r = (y - COUNTS).reshape(-1)
    return float(0.5 * r @ MIX @ r), (MIX @ r).reshape(15, 2), form(MIX)


def indefinite(y: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Σ u v + cos u: the Hessian with respect to one sample's outputs is dense and indefinite."""
    u, v = y.T
    C = np.stack([np.stack([-np.cos(u), np.ones(15)], 1), np.stack([np.ones(15), np.zeros(15)], 1)], 1)
    return float(np.sum(u * v + np.cos(u))), np.stack([v - np.sin(u), u], axis=1), C


EXTERNAL = {
    "blocks": poisson,
    "indefinite": indefinite,
    "matrix": coupled,
    "sparse": lambda y: coupled(y, scipy.sparse.csr_array),
    "operator": lambda y: coupled(y, aslinearoperator),
}


def jacobian(theta: np.ndarray) -> np.ndarray:
    return difference(lambda t: outputs_of(t, X, outputs=2).reshape(-1), theta)


def dense(curvature: Any) -> np.ndarray:
    if isinstance(curvature, np.ndarray) and curvature.ndim == 3:
        return scipy.linalg.block_diag(*curvature)
    return curvature @ np.eye(30)


@pytest.mark.parametrize("name", EXTERNAL)
def test_value_gradient_and_gauss_newton(name: str) -> None:
    external = EXTERNAL[name]
    objective = nj.Objective(network(outputs=2), X, external)
    theta = objective.x0 + 0.1
    assert objective.fun(theta) == pytest.approx(external(outputs_of(theta, X, outputs=2))[0], rel=1e-13)
    np.testing.assert_allclose(objective.grad(theta), difference(objective.fun, theta), atol=1e-6)
    value, gradient = objective.fun_and_grad(theta)
    assert value == objective.fun(theta)
    np.testing.assert_array_equal(gradient, objective.grad(theta))
    J, C = jacobian(theta), dense(external(outputs_of(theta, X, outputs=2))[2])
    v = RNG.normal(size=theta.size)
    np.testing.assert_allclose(objective.hessp(theta, v), J.T @ C @ J @ v, atol=1e-6)
    np.testing.assert_allclose(objective.hess(theta), J.T @ C @ J, atol=1e-6)
    assert np.array_equal(objective.hess(theta), objective.hess(theta).T)


@pytest.mark.parametrize("name", EXTERNAL)
@pytest.mark.parametrize("curvature", ["difference", "exact"])
def test_the_whole_hessian(name: str, curvature: str) -> None:
    objective = nj.Objective(network(outputs=2), X, EXTERNAL[name], curvature=curvature, prior={"kernel": 2.0})
    theta = objective.x0 + 0.1
    expected = difference(objective.grad, theta, 1e-5)
    tolerance = 1e-6 * np.abs(expected).max()
    v = RNG.normal(size=theta.size)
    np.testing.assert_allclose(objective.hessp(theta, v), expected @ v, atol=10 * tolerance)
    np.testing.assert_allclose(objective.hess(theta), expected, atol=tolerance)
    np.testing.assert_array_equal(objective.hessp(theta, 0 * v), 0 * v)
    gauss = nj.Objective(network(outputs=2), X, EXTERNAL[name], prior={"kernel": 2.0}).hess(theta)
    assert np.abs(gauss - expected).max() > 100 * tolerance


def test_without_curvature_from_outside_the_hessian_is_by_differences() -> None:
    objective = nj.Objective(network(outputs=2), X, lambda y: poisson(y)[:2])
    theta = objective.x0 + 0.1
    np.testing.assert_allclose(objective.hess(theta), difference(objective.grad, theta, 1e-5), atol=1e-4)
    none = nj.Objective(network(outputs=2), X, lambda y: (*poisson(y)[:2], None))
    np.testing.assert_array_equal(none.hess(theta), objective.hess(theta))
    for curvature in ("gauss-newton", "exact"):
        asked = nj.Objective(network(outputs=2), X, lambda y: poisson(y)[:2], curvature=curvature)
        with pytest.raises(OptionError, match="needs the second derivative with respect to the outputs"):
            asked.hessp(theta, theta)
        with pytest.raises(OptionError, match="needs the second derivative"):
            asked.hess(theta)


def test_priors_and_extra_parameters() -> None:
    def external(y: np.ndarray, extra: dict[str, Any]) -> Any:
        value, gradient, _ = poisson(y + extra["shift"])
        return value, gradient, {"shift": gradient.sum(axis=0)}

    model = network(outputs=2)
    objective = nj.Objective(model, X, external, extra={"shift": [0.1, -0.2]}, prior={"shift": (0.1, [0.5, 0.0])})
    theta = objective.x0
    plain = poisson(outputs_of(theta[:-2], X, outputs=2) + np.array([0.1, -0.2]))[0]
    assert objective.fun(theta) == pytest.approx(plain + 0.5 * (4.0**2 + 2.0**2), rel=1e-13)
    np.testing.assert_allclose(objective.grad(theta), difference(objective.fun, theta), atol=1e-5)
    result = objective.minimize("L-BFGS-B", options={"gtol": 1e-6, "ftol": 0, "maxiter": 3000})
    np.testing.assert_array_equal(objective.extra["shift"], result.x[-2:])
    np.testing.assert_array_equal(weights(model), result.x[:-2])
    assert np.abs(objective.grad(result.x)).max() < 1e-4


def test_extra_may_come_as_one_array() -> None:
    def external(y: np.ndarray, extra: dict[str, Any]) -> Any:
        value, gradient, _ = poisson(y + extra["shift"])
        return value, gradient, gradient.sum(axis=0) if extra["shift"].shape else None

    objective = nj.Objective(network(outputs=2), X, external, extra={"shift": [0.1, -0.2]})
    np.testing.assert_allclose(objective.grad(objective.x0), difference(objective.fun, objective.x0), atol=1e-5)


def test_gradients_in_the_models_structure() -> None:
    import keras

    inputs = keras.Input((1,), dtype="float64")
    hidden = keras.layers.Dense(2, "tanh", dtype="float64")(inputs)
    heads = {n: keras.layers.Dense(k, dtype="float64")(hidden) for n, k in [("b", 2), ("a", 1)]}
    model = keras.Model(inputs, heads)

    def by_name(y: dict[str, np.ndarray]) -> Any:
        return np.sum(y["a"] ** 3) + np.sum(y["b"]), {"a": 3 * y["a"] ** 2, "b": np.ones((15, 2))}

    objective = nj.Objective(model, X, by_name)
    np.testing.assert_allclose(objective.grad(objective.x0), difference(objective.fun, objective.x0), atol=1e-7)


def test_one_evaluation_serves_all() -> None:
    calls: list[int] = []

    def external(y: np.ndarray) -> Any:
        calls.append(1)
        return poisson(y)

    objective = nj.Objective(network(outputs=2), X, external, check=False)
    theta = objective.x0
    objective.fun(theta), objective.grad(theta), objective.hessp(theta, theta), objective.hess(theta)
    assert len(calls) == 1
    assert isinstance(objective._at(theta).rows.jacobian, Jacobian)


# ---------------------------------------------------------------- every method of SciPy


def quadratic_in_outputs(y: np.ndarray) -> Any:
    r = y - np.sin(2 * X)
    return 0.5 * np.sum(r**2), r, np.ones((15, 1, 1))


WITH_GRADIENT = ["CG", "BFGS", "L-BFGS-B", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov", "trust-exact"]
LIMIT = {"COBYLA": 3000, "COBYQA": 3000, "Nelder-Mead": 4000, "Powell": 4000}


@pytest.mark.parametrize(
    "method", [*WITH_GRADIENT, "dogleg", "trust-constr", "COBYLA", "COBYQA", "Nelder-Mead", "Powell"]
)
def test_every_method_reaches_the_optimum_of_a_formula(method: str) -> None:
    """y = a exp(−b t): the optimum from curve_fit."""
    t = X + 1
    y = 2.5 * np.exp(-1.3 * t) + 0.05 * np.sin(7 * t)
    f, variables = formula()

    def squares(outputs: np.ndarray) -> Any:
        r = outputs - y
        return 0.5 * np.sum(r**2), r, np.ones((15, 1, 1))

    objective = nj.Objective(f, t, squares, variables=variables)
    result = objective.minimize(method)
    expected = scipy.optimize.curve_fit(lambda t, a, b: a * np.exp(-b * t), t[:, 0], y[:, 0], [1, 0.2])[0]
    tolerance = {"COBYLA": 1e-2, "trust-constr": 1e-4}.get(method, 1e-3)
    np.testing.assert_allclose(result.x, expected, atol=tolerance)
    np.testing.assert_array_equal([float(variables[0]), float(variables[1][0])], result.x)
    assert objective.fun(result.x) == result.fun


CHOICES = [(method, "auto") for method in [*WITH_GRADIENT, "trust-constr"]]
CHOICES += [(method, "exact") for method in ("Newton-CG", "trust-ncg", "trust-krylov", "trust-exact", "trust-constr")]


@pytest.mark.parametrize(("method", "curvature"), CHOICES)
def test_every_method_with_derivatives_fits_a_network(method: str, curvature: str) -> None:
    model = network()
    objective = nj.Objective(model, X, quadratic_in_outputs, curvature=curvature)
    start = objective.fun(objective.x0)
    result = objective.minimize(method, options={"maxfun" if method == "TNC" else "maxiter": 300})
    assert result.fun < 0.05 * start
    np.testing.assert_array_equal(weights(model), result.x)
    assert result.fun == pytest.approx(quadratic_in_outputs(outputs_of(result.x, X))[0], rel=1e-9)


@pytest.mark.parametrize("method", [*WITH_GRADIENT, "dogleg", "trust-constr", "COBYLA", "COBYQA"])
def test_scipys_own_call(method: str) -> None:
    """The callables as they are, with everything that the method takes."""
    objective = nj.Objective(network(), X, quadratic_in_outputs, prior={"*": 3.0})
    kind = methods.METHODS[method]
    given: dict[str, Any] = {"jac": objective.grad} if kind.gradient else {}
    if kind.hessian == "product":
        given["hessp"] = objective.hessp
    if kind.hessian == "matrix":
        given["hess"] = objective.hess
    given["options"] = {"maxfun" if method == "TNC" else "maxiter": 400}
    result = scipy.optimize.minimize(objective.fun, objective.x0, method=method, **given)

    def plain(t: np.ndarray) -> float:
        return quadratic_in_outputs(outputs_of(t, X))[0] + np.sum(t**2) / 18

    oracle = scipy.optimize.minimize(plain, objective.x0, method="BFGS")
    assert result.fun == pytest.approx(plain(result.x), rel=1e-12)
    assert result.fun <= oracle.fun * (1.3 if method.startswith("COB") else 1.02)


@pytest.mark.parametrize("method", [name for name, kind in methods.METHODS.items() if kind.bounds])
def test_bounds_are_kept(method: str) -> None:
    t = X + 1
    y = 2.5 * np.exp(-1.3 * t)
    f, variables = formula()

    def squares(outputs: np.ndarray) -> Any:
        r = outputs - y
        return 0.5 * np.sum(r**2), r, np.ones((15, 1, 1))

    objective = nj.Objective(f, t, squares, variables=variables, bounds={"a": (None, 2.0), "b": (0, None)})
    result = objective.minimize(method)
    oracle = scipy.optimize.least_squares(
        lambda p: (p[0] * np.exp(-p[1] * t) - y)[:, 0], [1, 0.2], bounds=([-np.inf, 0], [2, np.inf])
    )
    loose = method in ("COBYLA", "trust-constr", "Powell")
    np.testing.assert_allclose(result.x, oracle.x, atol=2e-2 if loose else 1e-3)
    assert result.x[0] <= 2 + 1e-8


@pytest.mark.parametrize("method", [name for name, kind in methods.METHODS.items() if not kind.bounds])
def test_bounds_that_a_method_drops_are_refused(method: str) -> None:
    objective = nj.Objective(network(), X, quadratic_in_outputs, bounds={"kernel": (0, None)})
    with pytest.raises(OptionError, match=f"method '{method}' knows no bounds, and 6 parameters have one.*'L-BFGS-B'"):
        objective.minimize(method)
    # SciPy itself warns, and drops them: the table is right
    given: dict[str, Any] = {"hess": lambda t: 2 * np.eye(1)} if methods.METHODS[method].hessian else {}
    with pytest.warns(RuntimeWarning, match=r"cannot handle (constraints nor )?bounds"):
        scipy.optimize.minimize(lambda t: t @ t, [1.0], jac=lambda t: 2 * t, method=method, bounds=[(0, 1)], **given)


@pytest.mark.parametrize("method", [name for name, kind in methods.METHODS.items() if not kind.constraints])
def test_constraints_that_a_method_drops_are_refused(method: str) -> None:
    model = network()
    objective = nj.Objective(model, X, quadratic_in_outputs)
    constraint = nj.OutputConstraint(model, X[:1], 0, None)
    with pytest.raises(OptionError, match=f"method '{method}' knows no constraints.*'SLSQP'"):
        objective.minimize(method, constraints=constraint)


def test_a_method_that_does_not_exist() -> None:
    objective = nj.Objective(network(), X, quadratic_in_outputs)
    for wrong in ("BFSG", 3, None):
        with pytest.raises(OptionError, match="method must be one of 'Nelder-Mead'"):
            objective.minimize(wrong)
    assert objective.minimize("bfgs", options={"maxiter": 1}).nit == 1  # SciPy looks at no case


def test_a_method_of_ones_own_gets_everything() -> None:
    seen: dict[str, Any] = {}

    def steepest(fun: Any, x0: np.ndarray, args: Any = (), **given: Any) -> Any:
        seen.update(given)
        x = x0 - 0.01 * given["jac"](x0)
        return scipy.optimize.OptimizeResult(x=x, fun=fun(x), success=True)

    model = network()
    objective = nj.Objective(model, X, quadratic_in_outputs, bounds={"*": (-9, 9)})
    before = objective.fun(objective.x0)
    result = objective.minimize(steepest)
    assert result.fun < before
    np.testing.assert_array_equal(seen["hessp"](result.x, result.x), objective.hessp(result.x, result.x))
    assert seen["bounds"].ub[0] == 9
    np.testing.assert_array_equal(weights(model), result.x)


def test_callbacks_and_options_reach_scipy() -> None:
    seen: list[float] = []

    def callback(intermediate_result: Any) -> None:
        seen.append(intermediate_result.fun)
        if len(seen) == 3:
            raise StopIteration

    result = nj.Objective(network(), X, quadratic_in_outputs).minimize("BFGS", callback=callback)
    assert len(seen) == 3
    assert result.status == 99


# ---------------------------------------------------------------- global methods


def test_basinhopping() -> None:
    objective = nj.Objective(network(), X, quadratic_in_outputs)
    local = scipy.optimize.minimize(objective.fun, objective.x0, jac=objective.grad).fun
    result = scipy.optimize.basinhopping(
        objective.fun, objective.x0, niter=3, rng=0, minimizer_kwargs={"jac": objective.grad, "method": "L-BFGS-B"}
    )
    assert result.fun <= local + 1e-3
    assert objective.fun(objective.best_theta) <= result.fun


def test_differential_evolution_with_polishing() -> None:
    t = X + 1
    y = 2.5 * np.exp(-1.3 * t)
    f, variables = formula()
    objective = nj.Objective(
        f, t, lambda o: (0.5 * np.sum((o - y) ** 2), o - y), variables=variables, bounds={"a": (0, 5), "b": (0, 5)}
    )

    result = scipy.optimize.differential_evolution(objective.fun, objective.bounds, maxiter=5, rng=0, polish=True)
    np.testing.assert_allclose(result.x, [2.5, 1.3], atol=1e-3)
    polished = scipy.optimize.minimize(objective.fun, result.x, jac=objective.grad, bounds=objective.bounds, tol=1e-14)
    np.testing.assert_allclose(polished.x, [2.5, 1.3], atol=1e-6)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            lambda y: np.sum(y),
            ShapeError,
            r"return \(value, gradient\) or \(value, gradient, curvature\), and returned a float64 alone",
        ),
        (lambda y: y, ShapeError, r"and returned a ndarray of shape \(15, 2\) alone"),
        (lambda y: None, ShapeError, "and returned nothing: it ends without a return"),
        (lambda y: [1.0], ShapeError, r"returned 1 item \(a float\)"),
        (
            lambda y: (1.0, y, None, 3),
            ShapeError,
            r"returned 4 items \(a float, a ndarray of shape \(15, 2\), None, a int\)",
        ),
        (lambda y: (y, y), ShapeError, r"return \(value, gradient, …\): the value is a single number.* \(15, 2\)"),
        (lambda y: (1j, y), DtypeError, "the value must be an array of real numbers"),
        (lambda y: (1.0, y[:, 0]), ShapeError, r"the gradient must have the shape \(n, 2\)"),
        (lambda y: (1.0, y[:14]), ShapeError, "14 samples, and the outputs to 15"),
        (lambda y: (1.0, {"y": y}), ShapeError, "the gradient is a dict"),
        (lambda y: (1.0, y, np.ones((15, 2))), ShapeError, r"\(15, 2, 2\), blocks.*or \(30, 30\), and has \(15, 2\)"),
        (lambda y: (1.0, np.full((15, 2), np.inf)), DataError, "its derivative is not: 30 of its 30"),
        (lambda y: (1.0, 0 * y, np.full((15, 2, 2), np.nan)), DataError, "its derivative is not"),
        (lambda y: (1.0, 0 * y, np.tile([[0.0, 1.0], [0.0, 0.0]], (15, 1, 1))), DataError, "symmetric"),
        (lambda y: (np.sum(y**2), 2.02 * y), DerivativeError, "the derivative says .* the difference"),
        (lambda y: (np.sum(y**2), y), DerivativeError, "relative error"),
    ],
)
def test_answers_that_do_not_fit(answer: Any, error: type[Exception], message: str) -> None:
    model = network(outputs=2)
    before = weights(model)
    objective = nj.Objective(model, X, answer)
    with pytest.raises(error, match=message):
        objective.fun(objective.x0)
    with pytest.raises(error, match=message):
        objective.minimize()
    np.testing.assert_array_equal(weights(model), before)


def test_an_answer_without_the_derivative_of_the_extra_parameters() -> None:
    objective = nj.Objective(network(outputs=2), X, lambda y, extra: (1.0, y), extra={"shift": 1.0})
    with pytest.raises(
        ShapeError, match=r"return \(value, gradient, d_extra\) where there are extra parameters, and returned 2 items"
    ):
        objective.fun(objective.x0)


def test_wrong_arguments() -> None:
    with pytest.raises(DtypeError, match=r"(?s)must be callable, and is ndarray array\(\[.{1,60}\.\.\.\.$"):
        nj.Objective(network(), X, np.zeros((100, 100)) + 0.123)
    with pytest.raises(OptionError, match="curvature must be one of 'auto'"):
        nj.Objective(network(), X, quadratic_in_outputs, curvature="newton")
    with pytest.raises(NameLookupError, match="fits no parameter"):
        nj.Objective(network(), X, quadratic_in_outputs, prior={"dense": 1.0})
    objective = nj.Objective(network(), X, quadratic_in_outputs)
    with pytest.raises(ShapeError, match=r"theta must have the shape \(10,\)"):
        objective.fun(np.ones(3))
    with pytest.raises(DtypeError, match="real numbers"):
        objective.grad("a")
    with pytest.raises(PicklingError, match="Objective computes with a live model"):
        copy.deepcopy(objective)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("method", ["L-BFGS-B", "SLSQP", "trust-ncg", "trust-constr", "COBYLA", "Newton-CG"])
@pytest.mark.parametrize("how", ["raises", "nan"])
def test_a_function_that_fails_ends_the_fit_at_the_best_point(method: str, how: str) -> None:
    model = network()
    values: list[float] = []

    def external(y: np.ndarray) -> Any:
        value, gradient, curvature = quadratic_in_outputs(y)
        if len(values) == 9:
            if how == "raises":
                raise RuntimeError("no convergence")
            value = np.nan
        values.append(value)
        return value, gradient, curvature

    result = nj.Objective(model, X, external, check=False).minimize(method)
    assert not result.success
    assert result.status == -4
    assert ("no convergence" if how == "raises" else "the value is nan") in result.message
    assert result.fun == min(values[:9])
    assert result.nfev == 10
    np.testing.assert_array_equal(weights(model), result.x)
    assert quadratic_in_outputs(outputs_of(result.x, X))[0] == pytest.approx(result.fun, rel=1e-12)


def test_other_errors_go_on_and_leave_the_best_point() -> None:
    model = network()
    objective = nj.Objective(model, X, quadratic_in_outputs)
    seen: list[np.ndarray] = []

    def fail(x: np.ndarray) -> None:
        seen.append(x.copy())
        if len(seen) == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        objective.minimize("BFGS", callback=fail)
    np.testing.assert_array_equal(weights(model), objective.best_theta)
    assert objective.fun(weights(model)) <= objective.fun(seen[-1])


def test_a_start_that_is_not_finite_is_refused() -> None:
    model = network()
    before = weights(model)
    with pytest.raises(DataError, match="the value is nan"):
        nj.Objective(model, X, lambda y: (np.nan, y)).minimize()
    np.testing.assert_array_equal(weights(model), before)
