"""netjac's solver as a method of scipy.optimize.minimize."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize

import netjac as nj
from formulas import Array, Network, X, Y
from netjac.errors import DataError, ShapeError
from netjac.optimize import LeastSquares, OptionError


def fitted(**given: Any) -> tuple[Network, LeastSquares]:
    model = Network(X)
    return model, LeastSquares.from_evaluator(model, Y, **given)


def test_it_is_the_same_fit() -> None:
    model, problem = fitted(prior={"*": 10.0})
    start = model.parameters.ravel()
    result = scipy.optimize.minimize(problem.cost, problem.x0, method=problem.minimizer)
    other = fitted(prior={"*": 10.0})[1].solve("netjac")
    np.testing.assert_array_equal(result.x, other.x)
    assert (result.fun, result.nfev, result.nit, result.status) == (other.cost, other.nfev, other.nit, other.status)
    assert result.success
    np.testing.assert_array_equal(result.jac, other.grad)
    np.testing.assert_allclose(result.jac, problem.grad(result.x), atol=1e-9)
    np.testing.assert_array_equal(model.parameters.ravel(), start)  # as with any method that SciPy is asked for
    bfgs = scipy.optimize.minimize(problem.cost, result.x, jac=problem.grad)
    assert result.fun <= bfgs.fun * (1 + 1e-6)


@pytest.mark.parametrize("form", ["pairs", "Bounds", "own"])
def test_bounds(form: str) -> None:
    lower, upper = np.full(13, -1.0), np.full(13, 1.0)
    upper[:4] = np.inf
    given: dict[str, Any] = {"bounds": (lower, upper)} if form == "own" else {}
    problem = fitted(**given)[1]
    bounds: Any = None
    if form == "pairs":
        bounds = [(-1, None)] * 4 + [(-1, 1)] * 9
    elif form == "Bounds":
        bounds = scipy.optimize.Bounds(-1, upper)
    start = problem.x0 if form == "own" else problem.x0 + 3  # which SciPy's own methods move into the bounds, too
    result = scipy.optimize.minimize(
        problem.cost, start, method=problem.minimizer, bounds=bounds, options={"max_nfev": 300}
    )
    assert np.all((result.x >= lower) & (result.x <= upper))
    assert np.any(result.active_mask != 0)
    other = scipy.optimize.minimize(
        problem.cost, result.x, jac=problem.grad, bounds=scipy.optimize.Bounds(lower, upper), method="L-BFGS-B"
    )
    assert result.fun <= other.fun * (1 + 1e-5)


def test_callbacks() -> None:
    problem = fitted()[1]
    seen: list[Any] = []

    def watch(intermediate_result: Any) -> None:
        seen.append(intermediate_result)

    result = scipy.optimize.minimize(problem.cost, problem.x0, method=problem.minimizer, callback=watch)
    assert [s.nit for s in seen] == list(range(1, result.nit + 1))
    for s in seen:
        assert s.fun == pytest.approx(problem.cost(s.x), rel=1e-14)
        np.testing.assert_allclose(s.jac, problem.grad(s.x), atol=1e-8)

    def stop(x: Array) -> None:
        assert x.shape == (13,)
        raise StopIteration

    stopped = scipy.optimize.minimize(problem.cost, problem.x0, method=problem.minimizer, callback=stop)
    assert (stopped.status, stopped.success, stopped.nit) == (-2, False, 1)


def test_tolerance_and_options() -> None:
    problem = fitted()[1]

    def run(**given: Any) -> Any:
        return scipy.optimize.minimize(problem.cost, problem.x0, method=problem.minimizer, **given)

    assert run(tol=1e-2).nit < run(tol=1e-10).nit
    assert run(tol=1e-2).x.tolist() == run(options={"ftol": 1e-2, "xtol": 1e-2, "gtol": 1e-2}).x.tolist()
    assert run(tol=1e-2, options={"ftol": 1e-10, "xtol": 1e-10, "gtol": 1e-10}).nit == run(tol=1e-10).nit
    few = run(options={"maxiter": 3})
    assert (few.nit, few.status, few.success) == (3, 0, False)
    assert few.message == "Maximum number of iterations has been exceeded."
    assert run(options={"max_nfev": 4}).nfev == 4
    assert run(options={"linear_solver": "normal"}).linear_solver == "normal"
    # A callback that stops in the last iteration allowed is what stopped it.
    assert run(options={"maxiter": 1}, callback=lambda x: True).status == -2


def test_derivatives_may_be_given() -> None:
    problem = fitted()[1]
    plain = scipy.optimize.minimize(problem.cost, problem.x0, method=problem.minimizer)
    given: dict[str, Any] = {"jac": problem.grad, "hess": problem.hess, "hessp": problem.hessp}
    result = scipy.optimize.minimize(problem.cost, problem.x0, method=problem.minimizer, **given)
    np.testing.assert_array_equal(result.x, plain.x)


def test_inside_basinhopping() -> None:
    problem = fitted()[1]
    local = scipy.optimize.minimize(problem.cost, problem.x0, method=problem.minimizer)
    minimizer = {"method": problem.minimizer, "options": {"max_nfev": 30}}
    result = scipy.optimize.basinhopping(problem.cost, problem.x0, niter=4, rng=0, minimizer_kwargs=minimizer)
    assert result.fun <= local.fun * 1.1


def test_what_is_refused() -> None:
    model, problem = fitted()

    def run(fun: Any = None, **given: Any) -> Any:
        return scipy.optimize.minimize(fun or problem.cost, problem.x0, method=problem.minimizer, **given)

    with pytest.raises(DataError, match="minimises the cost of its problem"):
        run(lambda theta: problem.cost(theta) + np.sum(theta**2))
    scaled = run(lambda theta, a: a * problem.cost(theta), args=(1.0,), options={"maxiter": 1})  # equal: fine
    assert scaled.nit == 1
    with pytest.raises(DataError, match="minimises the cost"):
        run(lambda theta, a: a * problem.cost(theta), args=(2.0,))
    evaluations = model.count
    with pytest.raises(OptionError, match="no constraints"):
        run(constraints={"type": "eq", "fun": np.sum})
    with pytest.raises(OptionError, match="no constraints"):
        run(constraints=[scipy.optimize.LinearConstraint(np.eye(13), 0, 1)])
    with pytest.raises(OptionError, match="no options gtoll, maxfun: the minimizer knows tol"):
        run(options={"gtoll": 1, "maxfun": 3})
    with pytest.raises(OptionError, match="maxiter must be"):
        run(options={"maxiter": 0})
    with pytest.raises(ShapeError, match="13 pairs"):
        run(bounds=[(0, 1)] * 3)
    assert model.count == evaluations
    with pytest.raises(OptionError, match="linear_solver"):
        run(options={"linear_solver": "qr"})
    assert issubclass(OptionError, nj.NetjacError)
