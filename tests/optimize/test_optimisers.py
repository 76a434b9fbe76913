"""The same callables in SciPy's other entry points and in optimisers that are not SciPy's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import netjac as nj
from netjac.optimize import OptionError
from small_fits import difference, formula, network, outputs_of, weights

T = np.linspace(0, 3, 30)[:, None]
Y = 2.5 * np.exp(-1.3 * T[:, 0]) + 0.05 * np.sin(7 * T[:, 0])
EXPECTED = scipy.optimize.curve_fit(
    lambda t, a, b: a * np.exp(-b * t), T[:, 0], Y, [1, 0.2], ftol=1e-15, xtol=1e-15, gtol=1e-15
)[0]
LOSSES = ["linear", "soft_l1", "huber", "cauchy", "arctan"]


def decay(**given: Any) -> nj.LeastSquares:
    f, variables = formula()
    return nj.LeastSquares(f, T, Y, variables=variables, **given)


# ---------------------------------------------------------------- least_squares


@pytest.mark.parametrize("method", ["trf", "dogbox"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("form", ["dense", "operator"])
def test_least_squares(method: str, loss: str, bounded: bool, form: str) -> None:
    problem = decay(jac=form, bounds={"a": (0, 2.0)} if bounded else None)
    given: dict[str, Any] = {"loss": loss, "f_scale": 0.1, "xtol": 1e-13, "ftol": 1e-13, "gtol": 1e-13}
    result = scipy.optimize.least_squares(
        problem.fun, problem.x0, problem.jac, method=method, bounds=problem.bounds, **given
    )
    oracle = scipy.optimize.least_squares(
        lambda p: p[0] * np.exp(-p[1] * T[:, 0]) - Y, [1, 0.2], "3-point", bounds=problem.bounds, **given
    )
    np.testing.assert_allclose(result.x, oracle.x, rtol=2e-5)
    solved = problem.solve(method, **given)
    np.testing.assert_allclose(solved.x, oracle.x, rtol=2e-5)


def test_least_squares_lm() -> None:
    problem = decay(jac="dense")
    result = scipy.optimize.least_squares(problem.fun, problem.x0, problem.jac, method="lm", xtol=1e-14, ftol=1e-14)
    np.testing.assert_allclose(result.x, EXPECTED, rtol=1e-7)
    for wrong in ({"loss": "huber"}, {"bounds": {"a": (0, 2)}}, {"jac": "operator"}):
        with pytest.raises(OptionError, match="'lm'"):
            decay().solve("lm", **wrong)


def test_leastsq_and_curve_fit() -> None:
    problem = decay(jac="dense")
    found, _ = scipy.optimize.leastsq(problem.fun, problem.x0, Dfun=problem.jac, xtol=1e-14, ftol=1e-14)
    np.testing.assert_allclose(found, EXPECTED, rtol=1e-7)
    fitted, _ = scipy.optimize.curve_fit(
        lambda x, *theta: problem.fun(theta) + Y, T[:, 0], Y, problem.x0, jac=lambda x, *theta: problem.jac(theta)
    )
    np.testing.assert_allclose(fitted, EXPECTED, rtol=1e-5)


# ---------------------------------------------------------------- root


@pytest.mark.parametrize("method", ["hybr", "lm"])
def test_root_of_a_square_system(method: str) -> None:
    """Ten equations in the ten weights of a network: its values at ten points."""
    model = network()
    x = np.linspace(-1, 1, 10)[:, None]
    target = outputs_of(weights(model) + 0.02 * np.cos(np.arange(10)), x)[:, 0]
    problem = nj.LeastSquares(model, x, target, jac="dense")
    result = scipy.optimize.root(problem.fun, problem.x0, jac=problem.jac, method=method, tol=1e-12)
    np.testing.assert_allclose(outputs_of(result.x, x)[:, 0], target, atol=1e-7)


def test_root_by_krylov_takes_values_alone() -> None:
    """A square linear system through a layer: a solution that NumPy knows."""
    A = np.array([[3.0, 1.0], [1.0, 2.0]])
    w = tf.Variable([0.0, 0.0], dtype="float64", name="w")
    problem = nj.LeastSquares(lambda x: tf.linalg.matvec(x, w), A, [1.0, 0.0], variables=[w])
    result = scipy.optimize.root(problem.fun, problem.x0, method="krylov", tol=1e-10)
    np.testing.assert_allclose(result.x, np.linalg.solve(A, [1, 0]), atol=1e-8)


# ---------------------------------------------------------------- outside SciPy


@pytest.mark.parametrize(
    "algorithm", ["LD_LBFGS", "LD_SLSQP", "LD_MMA", "LD_TNEWTON_PRECOND", "LN_COBYLA", "LN_BOBYQA"]
)
def test_nlopt(algorithm: str) -> None:
    nlopt = pytest.importorskip("nlopt")
    problem = decay(bounds={"a": (0, 5), "b": (0, 5)})

    def value(theta: np.ndarray, gradient: np.ndarray) -> float:
        if gradient.size:
            gradient[:] = problem.grad(theta)
        return problem.cost(theta)

    optimiser = nlopt.opt(getattr(nlopt, algorithm), problem.parameters.size)
    optimiser.set_min_objective(value)
    optimiser.set_lower_bounds(problem.bounds.lb)
    optimiser.set_upper_bounds(problem.bounds.ub)
    optimiser.set_xtol_rel(1e-9)
    optimiser.set_maxeval(2000)
    found = optimiser.optimize(problem.x0)
    np.testing.assert_allclose(found, EXPECTED, rtol=1e-4)
    problem.parameters.assign(found)
    np.testing.assert_array_equal(problem.x0, found)


def test_nlopt_with_a_constraint_on_the_outputs() -> None:
    nlopt = pytest.importorskip("nlopt")
    f, variables = formula()
    problem = nj.LeastSquares(f, T, Y, variables=variables)
    limit = nj.OutputConstraint(f, [[0.0]], None, 2.0, problem=problem)

    def value(theta: np.ndarray, gradient: np.ndarray) -> float:
        if gradient.size:
            gradient[:] = problem.grad(theta)
        return problem.cost(theta)

    def excess(result: np.ndarray, theta: np.ndarray, gradient: np.ndarray) -> None:
        if gradient.size:
            gradient[:] = limit.jac(theta)
        result[:] = limit.fun(theta) - limit.ub

    optimiser = nlopt.opt(nlopt.LD_SLSQP, 2)
    optimiser.set_min_objective(value)
    optimiser.add_inequality_mconstraint(excess, [1e-9])
    optimiser.set_xtol_rel(1e-10)
    found = optimiser.optimize(problem.x0)
    oracle = scipy.optimize.least_squares(
        lambda p: p[0] * np.exp(-p[1] * T[:, 0]) - Y, [1, 0.2], bounds=([-np.inf, -np.inf], [2.0, np.inf]), xtol=1e-12
    )
    np.testing.assert_allclose(found, oracle.x, rtol=1e-4)


def test_iminuit() -> None:
    """MIGRAD with our gradient; its errors are those of curve_fit."""
    iminuit = pytest.importorskip("iminuit")
    problem = decay(weights=np.full(30, 1 / 0.05**2))
    minuit = iminuit.Minuit(problem.cost, problem.x0, grad=problem.grad, name=("a", "b"))
    minuit.errordef = iminuit.Minuit.LIKELIHOOD
    minuit.strategy = 2
    minuit.migrad()
    minuit.hesse()
    assert minuit.valid
    _, covariance = scipy.optimize.curve_fit(
        lambda t, a, b: a * np.exp(-b * t), T[:, 0], Y, [1, 0.2], sigma=np.full(30, 0.05), absolute_sigma=True
    )
    np.testing.assert_allclose(np.asarray(minuit.values), EXPECTED, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(minuit.errors), np.sqrt(np.diag(covariance)), rtol=2e-2)


def test_iminuit_with_bounds_by_name() -> None:
    iminuit = pytest.importorskip("iminuit")
    problem = decay(bounds={"a": (0, 2)})
    minuit = iminuit.Minuit(problem.cost, problem.x0, grad=problem.grad)
    minuit.errordef = iminuit.Minuit.LIKELIHOOD
    minuit.limits = list(zip(problem.bounds.lb, problem.bounds.ub, strict=True))
    minuit.migrad()
    assert minuit.values[0] == pytest.approx(2, abs=1e-3)


def ipopt_example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "ipopt.py"
    spec = importlib.util.spec_from_file_location("ipopt_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ipopt(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cyipopt")
    ipopt_example().main()
    assert abs(float(capsys.readouterr().out.split()[-1])) < 1e-3


def test_what_ipopt_is_given() -> None:
    """The derivatives in the order that cyipopt takes them, whether it is installed or not."""
    problem = ipopt_example().problem()
    theta = problem.fit.x0
    np.testing.assert_allclose(problem.gradient(theta), difference(problem.objective, theta), atol=1e-6)
    np.testing.assert_allclose(
        problem.jacobian(theta).reshape(40, -1), difference(problem.constraints, theta), atol=1e-7
    )


def test_without_ipopt_the_example_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cyipopt", None)
    with pytest.raises(SystemExit, match="conda install -c conda-forge cyipopt"):
        ipopt_example().main()
