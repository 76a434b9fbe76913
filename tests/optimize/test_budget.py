"""Fits within a memory budget: the same answer whatever the tiles and the way to compute steps, and nothing larger."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import netjac as nj
from netjac import memory, planning
from netjac.optimize import minimand, routes
from netjac.optimize.budget import Need, share, steps_bytes
from netjac.optimize.rows import Factors, Rows
from netjac.tensorflow.evaluate import CompiledSites

N = 28
X = np.random.default_rng(0).normal(size=(N, 3))
Y = np.stack([np.sin(2 * X[:, 0]), X[:, 1] * X[:, 2]], axis=1)
SOLVERS = ["normal", "gram", "svd", "products"]
TILES = [1, 2, 7]


@cache
def network(outputs: int = 2, width: int = 5) -> tuple[Any, np.ndarray]:
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(width, "tanh", name="hidden")
    model = keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(outputs, name="out")])
    return model, nj.parameters(model).ravel()


def problem(outputs: int = 2, solver: str = "", **options: Any) -> nj.LeastSquares:
    """With fewer parameters than residuals, and with more for the solver that is for those."""
    model, start = network(outputs, 20 if solver == "gram" else 5)
    nj.parameters(model).assign(start)
    y = None if "residual" in options else np.tile(Y, outputs // 2)
    return nj.LeastSquares(model, X, y, **options)


@pytest.fixture(autouse=True)
def by_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are computed as large ones are."""
    monkeypatch.setattr(minimand, "_EXPLICIT_WORK", 0)
    monkeypatch.setattr(routes, "_SPECTRAL_WORK", 0)
    monkeypatch.setattr(routes, "_FALLBACK_WORK", 0)


def budget(of: nj.LeastSquares, way: str, tiles: int, copies: int = 0) -> int:
    """For so many tiles beside the matrices of a way to compute steps; for 1, factors that are held."""
    need = of._source.need(copies)
    steps = steps_bytes(way, *of.shape, need.layers)
    whole = need.held + need.peak + steps
    if tiles == 1:
        return whole
    network = of._source._evaluator
    cut = network.footprint.need(-(-N // tiles), network.output_space.size) + steps
    assert cut < whole
    return cut


def kind(result: Any) -> tuple[str, int]:
    """What the derivative of a result is made of, and its tiles."""
    rows = result.jac.rows
    J = rows.jacobian if isinstance(rows, Factors) else rows.rows.jacobian
    return type(J).__name__, len(J._grid())


def residual(outputs: np.ndarray) -> Any:
    """From outside: two rows a sample, the second of both outputs."""
    a, b = outputs.T
    r = np.stack([a - np.sin(2 * X[:, 0]), b - X[:, 1] * X[:, 2] + 0.1 * a * b], axis=1)
    return r, np.stack([np.stack([1 + 0 * a, 0 * a], axis=1), np.stack([0.1 * b, 1 + 0.1 * a], axis=1)], axis=1)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the problem, and of the fit
    "plain": ({}, {}),
    "bounds": ({"bounds": {"*/kernel": (-0.5, 0.5)}, "prior": {"*": 3.0}}, {}),
    "loss": ({}, {"loss": "soft_l1", "f_scale": 0.1}),
    "weights": ({"weights": np.linspace(0.5, 2, N)}, {}),
    "weights of rows and a loss": ({"weights": np.linspace(0.5, 2, 2 * N).reshape(N, 2)}, {"loss": "huber"}),
    "prior": ({"prior": {"*/kernel": 2.0}}, {}),
    "from outside": ({"residual": residual}, {}),
}


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_that_without_a_budget(case: str, solver: str, tiles: int) -> None:
    given, options = CASES[case]
    given = given | {"solver": solver}
    options = options | {"linear_solver": solver, "max_nfev": 6}
    expected = problem(**given).solve("netjac", **options)
    way = "explicit" if solver == "gram" and case == "bounds" else solver
    copies = int("loss" in options)
    found = problem(**given, memory=budget(problem(**given), way, tiles, copies)).solve("netjac", **options)
    if case != "from outside":  # whose rows are combinations of outputs, which take other tiles
        assert kind(found) == ("Jacobian" if tiles == 1 else "TiledJacobian", tiles)
    assert found.linear_solver == solver
    assert found.nfev == expected.nfev
    assert expected.nit >= 2
    np.testing.assert_allclose(found.cost, expected.cost, rtol=1e-7)
    np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-6 * np.abs(expected.x).max())
    np.testing.assert_allclose(found.grad, expected.grad, rtol=0, atol=1e-6 * np.abs(expected.grad).max())


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_networks_in_single_precision(solver: str, tiles: int) -> None:
    options = {"linear_solver": solver, "max_nfev": 4}
    given = {"solver": solver, "dtype": None}
    expected = problem(**given).solve("netjac", **options)
    found = problem(**given, memory=budget(problem(**given), solver, tiles)).solve("netjac", **options)
    assert kind(found) == ("Jacobian" if tiles == 1 else "TiledJacobian", tiles)
    assert found.jac.rows.jacobian.dtype == np.float32
    np.testing.assert_allclose(found.cost, expected.cost, rtol=1e-4)
    np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-3 * np.abs(expected.x).max())


@pytest.mark.parametrize("tiles", TILES)
def test_more_outputs_than_are_folded(tiles: int) -> None:
    given = {"weights": np.linspace(0.5, 2, N * 18), "outputs": 18}
    for solver in ("normal", "products"):
        options = {"linear_solver": solver, "max_nfev": 4, "loss": "soft_l1"}
        expected = problem(**given).solve("netjac", **options)
        found = problem(**given, memory=budget(problem(**given), solver, tiles)).solve("netjac", **options)
        assert kind(found)[0] == ("Jacobian" if tiles == 1 else "TiledJacobian")
        np.testing.assert_allclose(found.cost, expected.cost, rtol=1e-8)
        np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-7 * np.abs(expected.x).max())


def outputs(theta: np.ndarray) -> np.ndarray:
    """`network` in NumPy."""
    W, b, V, c = np.split(theta, [15, 20, 30])
    return np.tanh(X @ W.reshape(3, 5) + b) @ V.reshape(5, 2) + c


def test_a_fit_in_tiles_ends_at_the_minimum_that_scipy_finds() -> None:
    made = problem(memory=budget(problem(), "normal", 7), prior={"*": 0.5})
    found = made.solve("netjac", linear_solver="normal", max_nfev=300)

    def rows(theta: np.ndarray) -> np.ndarray:
        return np.concatenate([(outputs(theta) - Y).reshape(-1), theta / 0.5])

    scipys = scipy.optimize.least_squares(rows, found.x, jac="3-point", xtol=1e-14, ftol=1e-14, gtol=1e-12)
    np.testing.assert_allclose(found.cost, 0.5 * np.sum(rows(found.x) ** 2), rtol=1e-12)
    np.testing.assert_allclose(found.cost, scipys.cost, rtol=1e-6)
    assert found.success


# ---- the way


@pytest.mark.parametrize(
    ("shape", "bytes_", "expected"),
    [
        ((1000, 100), 10**9, "normal"),
        ((1000, 100), 10**7, "products"),  # 100² and the tiles of its sum do not fit
        ((100, 1000), 10**9, "gram"),
        ((100, 1000), 400_000, "products"),
        ((100_000, 100_000), 10**9, "products"),
        ((100_000, 100_000), 2 * 10**7, "diagonal"),
    ],
)
def test_the_way_is_the_first_that_fits(shape: tuple[int, int], bytes_: int, expected: str) -> None:
    ways = routes.ways(*shape)
    need = Need(held=3000, peak=10_000, least=100, layers=10**6 if min(shape) > 1000 else 0)
    way, found = share(bytes_, need, *shape, ways)
    assert way == expected
    assert found.factors is not None
    assert found.steps is not None
    assert found.steps >= steps_bytes(way, *shape, need.layers)
    held = found.factors >= need.peak
    assert found.steps + found.factors + (need.held if held else 0) <= bytes_
    for better in ways[: ways.index(way)]:
        assert steps_bytes(better, *shape, need.layers) + need.least > bytes_


def test_no_way_takes_more_than_the_budget_where_another_fits() -> None:
    assert problem().solve("netjac", max_nfev=2).linear_solver == "normal"
    room = steps_bytes("normal", *problem().shape)
    found = problem(memory=room - 1).solve("netjac", max_nfev=20)
    assert found.linear_solver == "products"
    assert f"'normal' would take {planning.in_words(room)}" in found.reason
    assert "preconditioned by Kronecker factors of 2 layers" in found.reason
    assert found.cost < 0.5 * problem().cost(network()[1])
    least = budget_error(lambda: problem(memory=1)).least
    found = problem(memory=least).solve("netjac", max_nfev=6)
    assert found.linear_solver == "products"
    assert kind(found) == ("TiledJacobian", N * 2)
    assert found.cost < problem().cost(network()[1])


def budget_error(make: Any) -> nj.MemoryBudgetError:
    with pytest.raises(nj.MemoryBudgetError, match="least that works is memory=") as caught:
        make()
    return caught.value


def test_a_budget_too_small_is_an_error_that_states_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    problem().solve("netjac", max_nfev=1)  # probed and compiled
    with monkeypatch.context() as patch:
        patch.setattr(CompiledSites, "__call__", None)
        patch.setattr(CompiledSites, "outputs", None)
        error = budget_error(lambda: problem(memory=100))  # before any work
        assert budget_error(lambda: problem(memory=error.least - 1)).least == error.least
        wide = problem(memory=error.least)
        asked = budget_error(lambda: wide.solve("netjac", linear_solver="normal"))
    assert problem(memory=error.least).solve("netjac", max_nfev=2).nfev == 2
    [quick] = re.findall(r"memory=\d+, and (.*) is many times as fast", str(error))
    name, tiles = kind(problem(memory=quick).solve("netjac", max_nfev=2))
    assert name == "TiledJacobian"
    assert tiles <= 16
    assert asked.least > error.least
    found = problem(memory=asked.least).solve("netjac", linear_solver="normal", max_nfev=2)
    assert found.linear_solver == "normal"


def test_the_solver_alone_keeps_to_a_budget() -> None:
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(40, 20)), rng.normal(size=40)
    J = nj.jacobian(network()[0], X, dtype="float64")
    target = rng.normal(size=J.shape[0])

    def fit(memory: Any = None, **options: Any) -> Any:
        start = np.zeros(J.m)
        return nj.least_squares(lambda t: J @ t - target, start, lambda t: J, memory=memory, **options)

    best = fit()
    least = budget_error(lambda: fit(1)).least
    for amount in (least, 100_000, "1 GB"):
        found = fit(amount, max_nfev=50)
        np.testing.assert_allclose(found.cost, best.cost, rtol=1e-4)
    assert fit(least).linear_solver == "products"
    assert "preconditioned by the diagonal" in fit(least, max_nfev=1).reason
    assert budget_error(lambda: fit(least, linear_solver="normal")).least == steps_bytes("normal", *J.shape)
    plain = nj.least_squares(lambda t: A @ t - b, np.zeros(20), lambda t: A, memory="30 kB")
    np.testing.assert_allclose(plain.x, np.linalg.lstsq(A, b)[0], rtol=1e-4)
    with pytest.raises(nj.DataError, match="memory"):
        fit(0)


@pytest.mark.parametrize("method", ["trf", "dogbox"])
def test_scipys_methods_get_an_operator_where_the_array_does_not_fit(method: str) -> None:
    rows, m = problem().shape
    small = problem(memory=budget(problem(), "operator", 2))
    result = small.solve(method, max_nfev=3)
    assert isinstance(result.jac, nj.optimize.residual.ResidualJacobian)
    assert isinstance(small.jac(small.x0), nj.optimize.residual.ResidualJacobian)
    assert budget_error(lambda: small.solve(method, jac="dense")).least >= steps_bytes("dense", rows, m)
    large = problem(memory="1 MB")
    assert isinstance(large.solve(method, max_nfev=3).jac, np.ndarray)
    assert isinstance(large.jac(large.x0), np.ndarray)
    np.testing.assert_allclose(small.cost(result.x), result.cost)
    expected = problem().solve(method, max_nfev=2, jac="operator", tr_solver="lsmr")
    result = small.solve(method, x0=network()[1], max_nfev=2)
    np.testing.assert_allclose(result.cost, expected.cost, rtol=0.02)  # LSMR ends early, at an error of a hundredth


def test_joined_problems_share_a_budget() -> None:
    def joined(memory: Any = None) -> nj.LeastSquares:
        return nj.LeastSquares.join(problem(), problem(weights=np.linspace(0.5, 2, N)), memory=memory)

    expected = joined().solve("netjac", max_nfev=5)
    need = joined()._source.need(0)
    steps = steps_bytes("normal", *joined().shape)
    for room in (need.held + need.peak, need.peak // 2, need.least):
        found = joined(steps + room).solve("netjac", max_nfev=5)
        assert found.linear_solver == "normal"
        np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-7)
    parts = [rows for rows, _ in found.jac.rows.parts]
    assert all(kind_of_rows(rows) == "TiledJacobian" for rows in parts)
    budget_error(lambda: joined(1000))


def kind_of_rows(rows: Rows) -> str:
    return type((rows if isinstance(rows, Factors) else rows.rows).jacobian).__name__


def test_the_minimizer_keeps_to_the_budget() -> None:
    made = problem(memory=budget(problem(), "normal", 2))
    found = scipy.optimize.minimize(made.cost, made.x0, method=made.minimizer, options={"maxiter": 3})
    other = problem()
    expected = scipy.optimize.minimize(other.cost, other.x0, method=other.minimizer, options={"maxiter": 3})
    np.testing.assert_allclose(found.x, expected.x, rtol=1e-7)


def test_without_a_budget_half_of_what_is_free_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = problem().solve("netjac", max_nfev=5)
    monkeypatch.setattr(memory, "SMALL", 0)
    for tiles in (1, 2):
        free = 2 * budget(problem(), "normal", tiles)
        monkeypatch.setattr(memory, "available", lambda *_, free=free: free)
        found = problem().solve("netjac", max_nfev=5)
        assert kind(found) == ("Jacobian" if tiles == 1 else "TiledJacobian", tiles)
        np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-7)
    monkeypatch.setattr(memory, "default_budget", lambda *_: 1)
    problem().solve("netjac", max_nfev=2)  # the least that works, rather than an error
    monkeypatch.setattr(memory, "default_budget", lambda *_: None)
    assert kind(problem().solve("netjac", max_nfev=2)) == ("Jacobian", 1)


# ---- memory that cannot be had

ERRORS = [MemoryError("no room"), tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")]


@pytest.mark.parametrize("error", ERRORS, ids=["Python", "TensorFlow"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_factors_that_cannot_be_had(solver: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"linear_solver": solver, "max_nfev": 6}
    expected = problem(solver=solver).solve("netjac", **options)
    original, failures = CompiledSites.__call__, []

    def call(self: Any, theta: Any, x: Any, seeds: Any = None) -> Any:
        if len(x[0]) > 6:
            failures.append(len(x[0]))
            raise error
        return original(self, theta, x, seeds)

    made = problem(solver=solver)
    monkeypatch.setattr(CompiledSites, "__call__", call)
    with pytest.warns(RuntimeWarning, match="could not be allocated, and is tried again in smaller tiles") as told:
        found = made.solve("netjac", **options)
    assert len(told) == len(failures) < 5  # once for the whole fit, not at each step
    assert kind(found)[0] == "TiledJacobian"
    np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-7 * np.abs(expected.x).max())


@pytest.mark.parametrize("where", ["matrix", "factor"])
def test_a_matrix_that_cannot_be_had_is_done_without(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = problem().solve("netjac", linear_solver="products", max_nfev=100)
    calls = []

    def refuse(*_: Any, **__: Any) -> Any:
        calls.append(1)
        raise MemoryError("no room")

    if where == "matrix":
        monkeypatch.setattr(Factors, "normal", refuse)
    else:
        monkeypatch.setattr("netjac.optimize.direct._cholesky", refuse)
    with pytest.warns(RuntimeWarning, match="steps by 'normal' could not be allocated, and products are used"):
        found = problem().solve("netjac", max_nfev=100)
    assert found.linear_solver == "products"
    assert found.reason.startswith("memory ran out; ")
    assert len(calls) == 1
    np.testing.assert_allclose(found.cost, expected.cost, rtol=0.1)
    with pytest.raises(MemoryError, match="no room"):
        problem().solve("netjac", linear_solver="normal")  # asked for, so no other way is taken
