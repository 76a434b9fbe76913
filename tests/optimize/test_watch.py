"""Watching fits: history, progress line, callbacks and Ctrl-C, for every method of solve and minimize."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from formulas import Array, Evaluated, Network, X, Y
from netjac.optimize import LeastSquares, Objective, methods, options
from netjac.optimize import callbacks as own_callbacks
from netjac.optimize.monitor import History, Monitor

SOLVERS = options.METHODS
PRIOR = {"*": 10.0}  # so that JᵀJ is positive definite, for dogleg
MINIMIZERS = sorted(methods.METHODS)
LIMITED = {
    "Nelder-Mead": {"maxiter": 60},
    "Powell": {"maxiter": 3},
    "TNC": {"maxfun": 40},
    "COBYLA": {"maxiter": 80},
    "COBYQA": {"maxfev": 80},
}


def problem() -> tuple[Network, LeastSquares]:
    model = Network(X)
    return model, LeastSquares.from_evaluator(model, Y, prior=PRIOR)


def squares(y: Array) -> tuple[float, Array, Array]:
    r = y - Y[:, None]
    return 0.5 * float(np.sum(r**2)), r, np.ones((len(r), 1, 1))


def objective() -> tuple[Network, Objective]:
    model = Network(X)
    return model, Objective.from_evaluator(model, squares, prior=PRIOR)


def residual(theta: Array) -> Array:
    return np.concatenate([Network(X).evaluate(theta).y[:, 0] - Y, theta / 10])


def cost(theta: Array) -> float:
    return 0.5 * float(np.sum(residual(theta) ** 2))


def gradient(theta: Array) -> Array:
    at = Network(X).evaluate(theta)
    return at.J.T @ (at.y[:, 0] - Y) + theta / 100


def fit(method: str, **given: Any) -> tuple[Network, Any]:
    """By any method of either class, not longer than the test needs."""
    if method in SOLVERS:
        model, least_squares = problem()
        return model, least_squares.solve(method, max_nfev=given.pop("max_nfev", 15), **given)
    model, other = objective()
    limits = LIMITED.get(method, {"maxiter": 12})
    return model, other.minimize(method, options=limits, **given)


# ---------------------------------------------------------------- history


@pytest.mark.filterwarnings("ignore:delta_grad == 0.0:UserWarning")
@pytest.mark.parametrize("method", [*SOLVERS, *MINIMIZERS])
def test_history_tells_the_iterates(method: str) -> None:
    seen: list[Array] = []
    _, result = (
        fit(method, callback=lambda x: seen.append(x))
        if method != "trust-constr"
        else fit(method, callback=lambda x, state: seen.append(x))
    )
    history = result.history
    assert len(seen) >= 3
    iterates = [Network(X).parameters.ravel()]
    iterates += [x for before, x in zip([iterates[0], *seen], seen, strict=False) if not np.array_equal(before, x)]
    assert len(history) == len(iterates)
    np.testing.assert_allclose(history.cost, [cost(x) for x in iterates], rtol=1e-12)
    assert np.all(np.diff(history.nfev) >= 0)
    assert np.all(np.diff(history.time) >= 0)
    if method in MINIMIZERS and not methods.METHODS[method].gradient:
        assert np.all(np.isnan(history.optimality))
    else:
        np.testing.assert_allclose(history.optimality, [np.abs(gradient(x)).max() for x in iterates], rtol=1e-9)
    assert np.isnan(history.damping[0])
    assert np.all(np.isfinite(history.damping[1:])) == (method == "netjac")


def test_damping_and_optimality_of_netjac_are_the_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the gradient is not computed a second time, but for the row of the start."""
    seen, gradients = [], [0]
    _, least_squares = problem()
    inner = least_squares._gradient

    def counted(evaluation: Any) -> Array:
        gradients[0] += 1
        return inner(evaluation)

    monkeypatch.setattr(least_squares, "_gradient", counted)
    result = least_squares.solve("netjac", callback=lambda intermediate_result: seen.append(intermediate_result))
    assert gradients[0] == 1
    np.testing.assert_array_equal(result.history.damping[1:], [s.damping for s in seen])
    np.testing.assert_array_equal(result.history.optimality[1:], [s.optimality for s in seen])
    np.testing.assert_array_equal(result.history.nfev[1:], [s.nfev for s in seen])


@pytest.mark.parametrize("method", ["netjac", "dogbox", "L-BFGS-B"])
def test_optimality_leaves_out_what_pushes_against_a_bound(method: str) -> None:
    bounds = {"out/bias": (-0.5, 0.1), "out/kernel": (-1, 1)}
    if method == "L-BFGS-B":
        result = objective()[1].minimize(method, bounds=bounds, options={"maxiter": 500, "ftol": 0, "gtol": 1e-7})
    else:
        result = problem()[1].solve(method, bounds=bounds, max_nfev=300)
    assert np.abs(gradient(result.x)).max() > 1e-1
    assert result.history.optimality[-1] < 1e-3


@pytest.mark.parametrize("method", ["BFGS", "CG", "L-BFGS-B", "SLSQP", "Newton-CG", "trust-constr", "COBYLA"])
def test_watching_costs_no_evaluations(method: str) -> None:
    watched, _ = fit(method)
    model, other = objective()
    kind, limits = methods.METHODS[method], LIMITED.get(method, {"maxiter": 12})
    jac, hessp = other.grad if kind.gradient else None, other.hessp if kind.hessian else None
    scipy.optimize.minimize(other.fun, other.x0, method=method, jac=jac, hessp=hessp, options=limits)
    assert watched.count == model.count > 10


def test_history_as_one_table() -> None:
    _, result = fit("netjac")
    again = History.from_array(result.history.to_array())
    for name in ("nfev", "cost", "optimality", "time", "damping"):
        np.testing.assert_array_equal(getattr(again, name), getattr(result.history, name))
    assert again.nfev.dtype == np.intp
    assert len(again) == len(result.history) > 3


# ---------------------------------------------------------------- progress


@pytest.mark.parametrize("method", ["netjac", "trf", "lm", "L-BFGS-B", "COBYLA"])
def test_one_line_an_iterate_in_a_stream(method: str) -> None:
    stream = io.StringIO()
    _, result = fit(method, progress=stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(result.history)
    for i, line in enumerate(lines):
        assert line.startswith(f"iteration {i:3d}  evaluations ")
        assert f"cost {result.history.cost[i]:.6e}" in line
    assert ("damping" in lines[-1]) == (method == "netjac")
    assert ("optimality" in lines[-1]) == (method != "COBYLA")
    assert lines[-1].endswith(" s")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_shorter_line_leaves_nothing_of_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    terminal = Terminal()
    monitor = Monitor(terminal)
    monitor.iterate(1.0, 0.5, 1e-3)
    monitor.iterate(0.5, np.nan)
    monitor.close()
    _, first, second = terminal.getvalue().rstrip("\n").split("\r")
    assert "damping 1.0e-03" in first
    assert "damping" not in second
    assert len(first) == len(second)
    assert terminal.getvalue().count("\n") == 1


@pytest.mark.parametrize("kernel", [True, False])
def test_in_a_notebook_there_is_a_line_though_it_is_no_terminal(
    kernel: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = types.SimpleNamespace(config={"IPKernelApp": {}} if kernel else {})
    monkeypatch.setitem(sys.modules, "tqdm", None)  # whose bar there needs widgets
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    fit("netjac", progress=True)
    assert ("\riteration   0" in capsys.readouterr().err) == kernel


# ---------------------------------------------------------------- callbacks


@pytest.mark.filterwarnings("ignore:delta_grad == 0.0:UserWarning")
@pytest.mark.parametrize("method", [*SOLVERS, *MINIMIZERS])
def test_stop_iteration_ends_every_method(method: str) -> None:
    seen = []

    def stop(intermediate_result: Any) -> None:
        seen.append((intermediate_result.x.copy(), intermediate_result.fun))
        if len(seen) == 3:
            raise StopIteration

    model, result = fit(method, callback=stop)
    assert len(seen) == 3
    assert result.status == {"trust-constr": 3, "COBYLA": 30, "COBYQA": 3}.get(method, -2 if method in SOLVERS else 99)
    assert cost(result.x) <= cost(seen[-1][0]) * (1 + 1e-12)
    np.testing.assert_array_equal(model.parameters.ravel(), result.x)
    for x, value in seen:
        if method in SOLVERS:
            np.testing.assert_allclose(value, residual(x), rtol=1e-12)
        else:
            assert value == pytest.approx(cost(x), rel=1e-12)


@pytest.mark.parametrize("method", SOLVERS)
@pytest.mark.parametrize("true", [True, np.True_])
def test_returning_true_ends_a_solve(method: str, true: Any) -> None:
    seen = []

    def stop(x: Array) -> Any:
        seen.append(x.copy())
        x[:] = np.nan  # one's own copy
        return true if len(seen) == 2 else None

    _, result = fit(method, callback=stop)
    assert len(seen) == 2
    assert (result.status, result.success) == (-2, False)
    assert cost(result.x) == pytest.approx(result.cost, rel=1e-12)
    assert result.cost <= cost(seen[-1]) * (1 + 1e-12)


def test_returning_true_ends_trust_constr_alone_as_in_scipy() -> None:
    seen: list[Any] = []

    def stop(x: Array, state: Any) -> bool:
        seen.append(state.fun)
        return True

    _, result = fit("trust-constr", callback=stop)
    assert (result.status, len(seen)) == (3, 1)
    calls: list[Array] = []
    fit("BFGS", callback=lambda x: calls.append(x) or True)
    assert len(calls) > 1


def test_callbacks_of_lm_see_the_accepted_steps() -> None:
    """Each is a point whose cost is lower than the last, and the fit without a callback is the same."""
    seen: list[Any] = []
    _, plain = fit("lm")
    _, result = fit("lm", callback=lambda intermediate_result: seen.append(intermediate_result))
    np.testing.assert_array_equal(result.x, plain.x)
    assert np.all(np.diff([s.cost for s in seen]) < 0)
    assert [s.nit for s in seen] == list(range(1, len(seen) + 1))
    np.testing.assert_array_equal([s.cost for s in seen], result.history.cost[1:])
    np.testing.assert_array_equal([s.nfev for s in seen], result.history.nfev[1:])


def test_what_a_callback_raises_goes_on() -> None:
    def fail(x: Array) -> None:
        raise ZeroDivisionError

    for method in SOLVERS:
        with pytest.raises(ZeroDivisionError):
            fit(method, callback=fail)


def test_signatures() -> None:
    result = scipy.optimize.OptimizeResult(x=np.ones(2), fun=3.0)
    shown = own_callbacks.by_result(lambda intermediate_result: intermediate_result)(result)
    assert shown.fun == 3.0
    np.testing.assert_array_equal(shown.x, result.x)
    assert shown.x is not result.x  # what is written into it changes nothing
    assert own_callbacks.by_result(lambda xk: xk.sum())(result) == 2
    assert own_callbacks.by_result(lambda x, s: (x.sum(), s), with_state=True)(result) == (2, result)
    assert own_callbacks.stops(None) is None


# ---------------------------------------------------------------- Ctrl-C


def interrupt_at(number: int) -> Callable[[int], None]:
    def before(count: int) -> None:
        if count >= number:
            raise KeyboardInterrupt

    return before


@pytest.mark.filterwarnings("ignore:delta_grad == 0.0:UserWarning")
@pytest.mark.parametrize("method", [*SOLVERS, *MINIMIZERS])
@pytest.mark.parametrize("number", [2, 7, 12])
def test_ctrl_c_returns_the_best_point(method: str, number: int) -> None:
    evaluated: list[Array] = []
    given: dict[str, Any] = {"max_nfev": 50} if method in SOLVERS else {"options": LIMITED.get(method)}
    model, least_squares = problem() if method in SOLVERS else objective()
    inner, model.before = model.evaluate, interrupt_at(number)

    def evaluate(theta: Array) -> Evaluated:
        out = inner(theta)
        evaluated.append(theta.copy())
        return out

    model.evaluate = evaluate  # type: ignore[method-assign]
    result = (least_squares.solve if method in SOLVERS else least_squares.minimize)(method, **given)
    assert (result.status, result.success) == (-3, False)
    assert result.message == "Interrupted; the result is the best point so far."
    assert len(evaluated) == number - 1
    best = min(cost(theta) for theta in evaluated)
    assert cost(result.x) == best
    assert best == pytest.approx(result.cost if method in SOLVERS else result.fun, rel=1e-12)
    np.testing.assert_array_equal(model.parameters.ravel(), result.x)
    assert result.history.cost[0] == pytest.approx(cost(evaluated[0]))


@pytest.mark.parametrize("method", [*SOLVERS, *MINIMIZERS])
def test_ctrl_c_before_the_first_evaluation_goes_on(method: str) -> None:
    model, least_squares = problem() if method in SOLVERS else objective()
    start, model.before = model.parameters.ravel(), interrupt_at(1)
    with pytest.raises(KeyboardInterrupt):
        (least_squares.solve if method in SOLVERS else least_squares.minimize)(method)
    np.testing.assert_array_equal(model.parameters.ravel(), start)


@pytest.mark.parametrize("method", ["trf", "lm", "L-BFGS-B", "trust-constr"])
def test_a_second_ctrl_c_goes_on_and_leaves_the_best_point(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the result is put together."""
    model, fitted = problem() if method in SOLVERS else objective()
    inner, model.before = fitted._complete, interrupt_at(6)
    kept = []

    def complete(*given: Any) -> Any:
        kept.append(inner(*given).x)
        raise KeyboardInterrupt

    monkeypatch.setattr(fitted, "_complete", complete)
    with pytest.raises(KeyboardInterrupt):
        (fitted.solve if method in SOLVERS else fitted.minimize)(method)
    np.testing.assert_array_equal(model.parameters.ravel(), kept[0])
    assert cost(kept[0]) < cost(Network(X).parameters.ravel())


def test_a_real_signal() -> None:
    """SIGINT from outside, as a terminal sends it, ends the fit and not the process."""
    code = """
import signal, time
from formulas import X, Y, Network
from netjac.optimize import LeastSquares
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have switched off for its children
model = Network(X)
def before(count):
    if count == 4:
        print("ready", flush=True)
    if count >= 4:
        time.sleep(60)
model.before = before
result = LeastSquares.from_evaluator(model, Y).solve("netjac")
print(result.status, result.nfev >= 3, (model.parameters.ravel() == result.x).all())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "-3 True True\n"
    assert process.returncode == 0
