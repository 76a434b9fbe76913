"""Checkpoints: resumed fits end where uninterrupted ones do, whatever happened in between; damage is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formulas import Array, Network, X, Y
from netjac.errors import DataError, NetjacError
from netjac.optimize import LeastSquares, Objective, OptionError, checkpoint, identity, methods
from netjac.optimize.checkpoint import CheckpointNotFoundError, Fit, Snapshot
from netjac.optimize.control import State
from netjac.optimize.monitor import History

COLUMNS = ("nfev", "cost", "optimality", "damping")


def fitted(y: Array = Y, **given: Any) -> tuple[Network, LeastSquares]:
    model = Network(X)
    return model, LeastSquares.from_evaluator(model, y, **given)


def stopping(number: int) -> Any:
    """A callback that ends the fit at its call of that number."""
    calls = [0]

    def callback(x: Array) -> bool:
        calls[0] += 1
        return calls[0] == number

    return callback


def assert_same_end(resumed: Any, whole: Any) -> None:
    for name in ("x", "fun", "grad"):
        np.testing.assert_array_equal(resumed[name], whole[name])
    for name in ("cost", "status", "nfev", "nit", "damping", "optimality", "message"):
        assert resumed[name] == whole[name]
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(resumed.history, name), getattr(whole.history, name))


# ---------------------------------------------------------------- the same trajectory

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bounds": {"bounds": {"kernel": (-1.5, 1.5)}},
    "robust": {"loss": "soft_l1", "f_scale": 0.05},
    "bounds and robust": {"bounds": {"out/kernel": (-1, None)}, "loss": "cauchy", "f_scale": 0.1},
    "scaled": {"x_scale": "jac"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", ["auto", "svd", "normal", "gram", "products"])
@pytest.mark.parametrize("after", [1, 4, 9])
def test_netjac_goes_on_to_the_same_end(kind: str, solver: str, after: int, tmp_path: Path) -> None:
    path = tmp_path / "fit.npz"
    most = 60 if solver == "products" else 25
    options: dict[str, Any] = {"method": "netjac", "max_nfev": most, "linear_solver": solver, **KINDS[kind]}
    if solver == "products" and kind == "scaled":
        options["x_scale"] = np.linspace(0.5, 2, 13)
    whole = fitted()[1].solve(**options)
    assert len(whole.history) > after + 2
    first = fitted()[1].solve(**options, checkpoint=path, checkpoint_every=0, callback=stopping(after))
    assert first.status == -2
    model, problem = fitted()
    model.parameters.assign(np.full(13, 7.0))  # the start is the checkpoint's, not the model's
    resumed = problem.solve(**options, resume=path, checkpoint=path)
    assert_same_end(resumed, whole)
    np.testing.assert_array_equal(model.parameters.ravel(), whole.x)
    assert resumed.njev == whole.njev + 1  # the derivative where it goes on, again
    assert_same_end(fitted()[1].solve(**options, resume=path), whole)  # what has ended stays there


def test_with_a_prior_weights_and_extra_parameters(tmp_path: Path) -> None:
    def scaled(outputs: Array, extra: dict[str, Any]) -> tuple[Array, Array, dict[str, Array]]:
        a = extra["a"]
        return a * outputs[:, 0] - Y, np.full((25, 1), a), {"a": outputs[:, 0]}

    def make() -> LeastSquares:
        return LeastSquares.from_evaluator(
            Network(X), residual=scaled, extra={"a": 0.7}, prior={"*": 3.0}, weights=np.linspace(1, 2, 25)
        )

    path = tmp_path / "fit.npz"
    whole = make().solve("netjac", max_nfev=20)
    make().solve("netjac", checkpoint=path, checkpoint_every=0, callback=stopping(3))
    problem = make()
    assert_same_end(problem.solve("netjac", max_nfev=20, resume=path), whole)
    assert problem.extra["a"] == whole.x[-1] != 0.7


def test_several_problems_as_one(tmp_path: Path) -> None:
    def make(y: Array = Y) -> LeastSquares:
        left, right = Network(X[:12]), Network(X[12:])
        right.parameters.variables = left.parameters.variables
        each = zip((left, right), (y[:12], y[12:]), strict=True)
        return LeastSquares.join([LeastSquares.from_evaluator(model, part) for model, part in each])

    path = tmp_path / "fit.npz"
    whole = make().solve("netjac", max_nfev=15)
    assert len(whole.x) == 13
    make().solve("netjac", max_nfev=8, checkpoint=path)
    assert_same_end(make().solve("netjac", max_nfev=15, resume=path), whole)
    with pytest.raises(DataError, match=r"targets of problem 1: other values.*\n  targets of problem 2: other"):
        make(Y[::-1]).solve("netjac", resume=path)


@pytest.mark.parametrize("status", [0, 1, 2, 3])
def test_a_fit_that_ended_stays_ended_and_goes_on_with_tighter_tests(status: int, tmp_path: Path) -> None:
    """The last iterate's checkpoint knows that it was the last, though the end was never written."""
    path = tmp_path / "fit.npz"
    ends: dict[str, Any] = [
        {"max_nfev": 6},
        {"gtol": 1e-1, "ftol": None, "xtol": None},
        {"ftol": 1e-2, "xtol": None, "gtol": None},
        {"xtol": 1e-1, "ftol": None, "gtol": None},
    ][status]
    whole = fitted()[1].solve("netjac", **ends)
    assert whole.status == status
    with pytest.raises(ZeroDivisionError):
        fitted()[1].solve("netjac", **ends, checkpoint=path, checkpoint_every=0, callback=_failing(whole.nit))
    assert_same_end(fitted()[1].solve("netjac", **ends, resume=path), whole)
    tight = {"max_nfev": 40, "ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-12}
    assert_same_end(
        fitted()[1].solve("netjac", **tight, resume=path),
        fitted()[1].solve("netjac", **tight),
    )


def _failing(number: int) -> Any:
    stop = stopping(number)

    def callback(x: Array) -> None:
        if stop(x):
            raise ZeroDivisionError

    return callback


def test_after_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "fit.npz"
    whole = fitted()[1].solve("netjac", max_nfev=25)
    for number in range(2, 20):
        model, problem = fitted()

        def before(count: int, number: int = number) -> None:
            if count == number:
                raise KeyboardInterrupt

        model.before = before
        first = problem.solve("netjac", max_nfev=25, checkpoint=path)
        assert first.status == -3
        assert_same_end(fitted()[1].solve("netjac", max_nfev=25, resume=path), whole)


# ---------------------------------------------------------------- SciPy's methods


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm"])
def test_scipys_methods_go_on_from_the_best_point(method: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.npz"
    first = fitted()[1].solve(method, checkpoint=path, max_nfev=6)
    model, problem = fitted()
    resumed = problem.solve(method, resume=path, checkpoint=path, max_nfev=60)
    restarted = LeastSquares.from_evaluator(model, Y)
    model.parameters.assign(first.x)
    plain = restarted.solve(method, max_nfev=60)
    np.testing.assert_array_equal(resumed.x, plain.x)
    assert resumed.cost < first.cost
    q = len(first.history)
    for name in (*COLUMNS, "time"):
        np.testing.assert_array_equal(getattr(resumed.history, name)[:q], getattr(first.history, name))
    assert np.all(np.diff(resumed.history.time) >= 0)
    assert np.all(np.diff(resumed.history.nfev) > 0)
    assert len(resumed.history) > q


@pytest.mark.parametrize("method", ["L-BFGS-B", "BFGS", "TNC", "trust-ncg", "trust-constr", "SLSQP", "Nelder-Mead"])
def test_minimize_goes_on_from_the_best_point(method: str, tmp_path: Path) -> None:
    def make() -> tuple[Network, Objective]:
        model = Network(X)
        value = lambda y: (0.5 * np.sum((y[:, 0] - Y) ** 2), (y[:, 0] - Y)[:, None])  # noqa: E731
        return model, Objective.from_evaluator(model, value, prior={"*": 10.0})

    path, limit = tmp_path / "fit.npz", {"maxiter": 5 if methods.METHODS[method].gradient else 50}
    if method == "TNC":
        limit = {"maxfun": 30}
    first = make()[1].minimize(method, options=limit, checkpoint=path)
    model, objective = make()
    resumed = objective.minimize(method, options=limit, checkpoint=path, resume=path, tol=1e-10)
    assert resumed.history.cost[: len(first.history)].tolist() == first.history.cost.tolist()
    assert len(resumed.history) > len(first.history)
    assert resumed.fun < first.fun
    np.testing.assert_array_equal(model.parameters.ravel(), resumed.x)
    with np.load(path) as saved:
        np.testing.assert_array_equal(saved["best"], resumed.x)


# ---------------------------------------------------------------- when it is written


def test_how_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    inner = checkpoint.save

    def save(path: Path, fit: Fit, snapshot: Snapshot) -> None:
        written.append(len(snapshot.history))
        inner(path, fit, snapshot)

    monkeypatch.setattr(checkpoint, "save", save)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def tick(x: Array) -> None:
        clock[0] += 1.0

    result = fitted()[1].solve("netjac", checkpoint=tmp_path / "a", checkpoint_every=0, max_nfev=12)
    q = len(result.history)
    assert written == [*range(1, q + 1), q]
    written.clear()
    fitted()[1].solve("netjac", checkpoint=tmp_path / "a", checkpoint_every=3.0, max_nfev=12, callback=tick)
    assert written == [*range(5, q + 1, 3), q]  # row 1 is the start; the clock says 3 when row 5 comes
    written.clear()
    fitted()[1].solve("netjac", checkpoint=tmp_path / "a", max_nfev=12)
    assert written == [q]
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_an_error_of_the_model_leaves_a_checkpoint(tmp_path: Path) -> None:
    model, problem = fitted()

    def before(count: int) -> None:
        if count == 6:
            raise RuntimeError("the model broke")

    model.before = before
    with pytest.raises(RuntimeError):
        problem.solve("netjac", checkpoint=tmp_path / "a")
    whole = fitted()[1].solve("netjac", max_nfev=20)
    assert_same_end(fitted()[1].solve("netjac", max_nfev=20, resume=tmp_path / "a"), whole)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fit.npz"
    fitted()[1].solve("netjac", checkpoint=path, max_nfev=4)
    before = path.read_bytes()

    def full(*given: Any, **arrays: Any) -> None:
        given[0].write(b"half a f")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        fitted()[1].solve("netjac", checkpoint=path, checkpoint_every=0)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["fit.npz"]


# ---------------------------------------------------------------- what is refused


KERNELS = {"kernel": (-1, 1)}


def fewer() -> LeastSquares:
    return LeastSquares.from_evaluator(Network(X[:20]), Y[:20])


def test_what_a_checkpoint_with_arrays_differs_in(tmp_path: Path) -> None:
    """Bounds, priors, weights and scales are told by what they belong to; fingerprints come last."""
    path = tmp_path / "fit.npz"
    given = {"bounds": KERNELS, "prior": {"*": 2.0}, "weights": np.ones(25)}
    options: dict[str, Any] = {"x_scale": np.ones(13), "max_nfev": 3}
    fitted(**given)[1].solve("netjac", checkpoint=path, **options)

    def said(scale: Any = None, **changed: Any) -> list[str]:
        problem = fitted(**given | changed)[1]
        chosen = options if scale is None else options | {"x_scale": scale}
        with pytest.raises(DataError, match="is of another fit than this one") as caught:
            problem.solve("netjac", resume=path, **chosen)
        return str(caught.value).split("\n  ")[1:]

    marks = r"other values \(fingerprint [0-9a-f]{8} there, [0-9a-f]{8} here\)"
    [line] = said(bounds={**KERNELS, "out/kernel": (-1, 2)})
    assert re.fullmatch(f"bounds of 'out/kernel': {marks}", line)
    assert said(bounds={"hidden/kernel": (-1, 1)}) == ["bounds of 'out/kernel': none here"]
    [line] = said(prior={"*": 2.0, "out/bias": (2.0, 0.5)})
    assert re.fullmatch(f"prior of 'out/bias': {marks}", line)
    [first, second] = said(np.full(13, 2.0), weights=np.full(25, 2.0))
    assert re.fullmatch(f"weights: {marks}", first)
    assert re.fullmatch(f"x_scale: {marks}", second)
    assert said(weights=None) == ["weights: none here"]


@pytest.mark.parametrize(
    ("here", "line"),
    [
        ([["b", [2]], ["a", [2]]], "'a' there is 'b' here, 'b' there is 'a' here"),
        ([["b", [3]], ["a", [2]]], "'b' has shape (2,) there, (3,) here"),
        ([["a", [2]]], "'b' (2,) is there alone"),
        ([["a", [2]], ["b", [2]], ["c", []]], "'c' () is here alone"),
        (
            [[f"v{i}", [i]] for i in range(9)],
            "'a' (2,) is there alone, 'b' (2,) is there alone, 'v0' (0,) is here "
            "alone, 'v1' (1,) is here alone, 'v2' (2,) is here alone, and 6 more",
        ),
    ],
)
def test_which_parameters_differ(here: list[Any], line: str) -> None:
    there = {"parameters": [["a", [2]], ["b", [2]]]}
    assert identity.differences(there, there) == []
    assert identity.differences(there, {"parameters": here}) == [f"parameters: {line}"]


def test_the_same_parameters_in_another_order() -> None:
    there, here = ({"parameters": each} for each in ([["a", [2]], ["b", [3]]], [["b", [3]], ["a", [2]]]))
    assert identity.differences(there, here) == ["parameters: the same, in another order"]


def test_of_another_fit(tmp_path: Path) -> None:
    path = tmp_path / "fit.npz"
    fitted()[1].solve("netjac", checkpoint=path, max_nfev=5)
    before = path.read_bytes()

    def refuses(match: str, problem: Any, method: str = "netjac", **given: Any) -> None:
        with pytest.raises(DataError, match=match) as caught:
            problem.solve(method, resume=path, checkpoint=path, **given)
        assert isinstance(caught.value, NetjacError)
        assert isinstance(caught.value, ValueError)
        assert path.read_bytes() == before

    problem = fitted()[1]
    refuses(
        r"another fit than this one \(here\):\n  method: 'netjac' there, 'trf' here$", problem, "trf", x_scale="jac"
    )
    refuses("loss: 'linear' there, 'huber' here", problem, loss="huber")
    refuses("f_scale: 1.0 there, 2.0 here", problem, f_scale=2)
    refuses("linear_solver: 'auto' there, 'gram' here", problem, linear_solver="gram")
    refuses("x_scale: nothing there, 'jac' here", problem, x_scale="jac")
    refuses("x_scale: nothing there, an array here", problem, x_scale=np.ones(13))
    refuses("bounds of 'hidden/kernel': none there\n  bounds of 'out/kernel': none there$", problem, bounds=KERNELS)
    refuses("targets: other values", fitted(Y + 1e-9)[1])
    refuses("prior of 'hidden/bias': none there\n  prior of 'out/bias': none there$", fitted(prior={"bias": 1.0})[1])
    refuses(
        r"parameters: 'hidden/kernel' has shape \(1, 4\) there, \(1, 5\) here, 'hidden/bias' has shape \(4,\) there",
        LeastSquares.from_evaluator(Network(X, 5), Y),
    )
    renamed = Network(X)
    object.__setattr__(renamed.parameters.segments[0], "name", "other/kernel")
    refuses("parameters: 'hidden/kernel' there is 'other/kernel' here$", LeastSquares.from_evaluator(renamed, Y))
    refuses("targets: shape (25, 1) there, (20, 1) here".replace("(", r"\(").replace(")", r"\)"), fewer())
    refuses("cost was .* so x differs, or the network's layers", LeastSquares.from_evaluator(Network(X + 0.3), Y))
    objective = Objective.from_evaluator(Network(X), lambda y: (float(np.sum(y**2)), 2 * y))
    with pytest.raises(DataError, match="problem: 'LeastSquares' there, 'Objective' here"):
        objective.minimize("BFGS", resume=path)
    assert_same_end(
        problem.solve("netjac", resume=path, max_nfev=12), fitted()[1].solve("netjac", max_nfev=12)
    )  # the right one is taken


def test_missing(tmp_path: Path) -> None:
    model, problem = fitted()
    for given in (
        {"resume": tmp_path / "none"},
        {"resume": tmp_path / "no" / "a"},
        {"checkpoint": tmp_path / "no" / "a"},
    ):
        with pytest.raises(FileNotFoundError, match="there is no") as caught:
            problem.solve("netjac", **given)
        assert isinstance(caught.value, CheckpointNotFoundError)
        assert isinstance(caught.value, NetjacError)
    for given in ({"resume": 3}, {"checkpoint": b"a"}, {"checkpoint": True}):
        with pytest.raises(OptionError, match="must be a path"):
            problem.solve("netjac", **given)
    for every in (-1, np.nan, np.inf, "1", None, True):
        with pytest.raises(OptionError, match="checkpoint_every must be a number of seconds"):
            problem.solve("netjac", checkpoint=tmp_path / "a", checkpoint_every=every)
    assert model.count == 0


def test_damage(tmp_path: Path) -> None:
    """Cut anywhere it is refused; a byte changed anywhere, it is refused or nothing that is read is changed."""
    path, damaged = tmp_path / "fit.npz", tmp_path / "damaged.npz"
    fitted()[1].solve("netjac", checkpoint=path, max_nfev=6)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    problem = fitted()[1]
    for size in [0, 1, 10, len(whole) - 1, *rng.integers(2, len(whole), 20)]:
        damaged.write_bytes(whole[:size])
        with pytest.raises(DataError, match="is damaged, or no checkpoint"):
            problem.solve("netjac", resume=damaged)
    end = problem.solve("netjac", resume=path, max_nfev=8)
    refused = 0
    for position in rng.choice(len(whole), 200, replace=False):
        changed = bytearray(whole)
        changed[position] ^= 1 << int(rng.integers(8))
        damaged.write_bytes(changed)
        try:
            again = problem.solve("netjac", resume=damaged, max_nfev=8)
        except DataError:
            refused += 1
        else:
            assert_same_end(again, end)
    assert refused > 100
    damaged.write_bytes(rng.bytes(1000))
    with pytest.raises(DataError, match="no checkpoint"):
        problem.solve("netjac", resume=damaged)
    np.savez(damaged, x=np.ones(3))
    with pytest.raises(DataError, match="no checkpoint"):
        problem.solve("netjac", resume=damaged)


def test_a_later_format_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fit.npz"
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    fitted()[1].solve("netjac", checkpoint=path, max_nfev=3)
    monkeypatch.undo()
    with pytest.raises(DataError, match="has format 3, and this netjac reads format 2"):
        fitted()[1].solve("netjac", resume=path)


def test_content_survives_to_the_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    history = History.from_array(np.array([[1, 2.5, np.nan, 0.1, np.nan], [3, 1e-300, 0.1, 1 / 3, 1e-17]]))
    state = State(rng.normal(size=4), 0.1, 4.0, 1 / 3, 1e-12, 2.0, rng.normal(size=4), 7, 5, 4, 2)
    fit = Fit({"method": "netjac", "f_scale": 0.1, "parameters": [["a", [2, 2]]]}, (1e-8, None, 1e-8))
    snapshot = Snapshot(rng.normal(size=4), rng.normal(size=4), 1 / 7, history, state)
    checkpoint.save(tmp_path / "a", fit, snapshot)
    again = checkpoint.load(tmp_path / "a", fit)
    assert again.state is not None
    for one, other in ((snapshot, again), (state, again.state), (history, again.history)):
        for name, value in vars(one).items():
            if name not in ("history", "state"):
                np.testing.assert_array_equal(getattr(other, name), value)
                assert type(getattr(other, name)) is type(value)
    assert checkpoint.load(tmp_path / "a", Fit(fit.identity, (1e-9, None, 1e-8))).state.met is None  # type: ignore[union-attr]


# ---------------------------------------------------------------- kill -9

SLOW = """
import sys, time
import numpy as np
from pathlib import Path
from formulas import X, Y, Network
from netjac.optimize import LeastSquares
path = Path(sys.argv[1])
model = Network(X)
model.before = lambda count: time.sleep(0.005)
problem = LeastSquares.from_evaluator(model, Y, bounds={"out/kernel": (-2, 2)})
print("ready", flush=True)
result = problem.solve(
    "netjac", loss="soft_l1", f_scale=0.1, max_nfev=60, ftol=None, xtol=None, gtol=1e-14,
    checkpoint=path, checkpoint_every=0, resume=path if path.exists() else None,
)
np.savez(sys.argv[2], x=result.x, history=result.history.to_array(), status=result.status, nfev=result.nfev)
"""


KILLED_WHILE_WRITING = """
import os, signal
import numpy as np
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
calls, inner, savez = [0], os.replace, np.savez
def replace(source, target):
    calls[0] += 1
    if calls[0] == 4 and WHERE == "before renaming":
        kill()
    inner(source, target)
    if calls[0] == 4 and WHERE == "after renaming":
        kill()
def half(file, **arrays):
    if calls[0] == 3 and WHERE == "half written":
        file.write(b"half")
        file.flush()
        kill()
    savez(file, **arrays)
os.replace, np.savez = replace, half
"""


def run(code: str, folder: Path, name: str, kill_after: float | None = None) -> int:
    """How the process ended that writes NAME.ckpt as it goes and NAME.npz at its end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(folder / f"{name}.ckpt"), str(folder / f"{name}.npz")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if kill_after is not None:
            time.sleep(kill_after)
            process.send_signal(signal.SIGKILL)
    return process.returncode


def assert_same_files(folder: Path) -> None:
    with np.load(folder / "whole.npz") as whole, np.load(folder / "killed.npz") as resumed:
        np.testing.assert_array_equal(resumed["x"], whole["x"])
        assert (resumed["status"], resumed["nfev"]) == (whole["status"], whole["nfev"])
        np.testing.assert_array_equal(np.delete(resumed["history"], 3, axis=1), np.delete(whole["history"], 3, axis=1))


@pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL")
@pytest.mark.parametrize("where", ["half written", "before renaming", "after renaming"])
def test_kill_while_the_checkpoint_is_written(where: str, tmp_path: Path) -> None:
    assert run(SLOW, tmp_path, "whole") == 0
    assert run(f"WHERE = {where!r}{KILLED_WHILE_WRITING}{SLOW}", tmp_path, "killed") == -signal.SIGKILL
    left = {file.name for file in tmp_path.iterdir() if "killed" in file.name}
    assert left == {"killed.ckpt"} | (set() if where == "after renaming" else {"killed.ckpt.partial"})
    with np.load(tmp_path / "killed.ckpt") as saved:
        assert len(saved["history"]) == (4 if where == "after renaming" else 3)
    assert run(SLOW, tmp_path, "killed") == 0
    assert not (tmp_path / "killed.ckpt.partial").exists()
    assert_same_files(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL")
def test_kill_at_any_moment(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    assert run(SLOW, tmp_path, "whole") == 0
    ends = []
    for _ in range(8):
        ends.append(run(SLOW, tmp_path, "killed", rng.uniform(0.0, 0.2)))
        if (tmp_path / "killed.ckpt").exists():
            with np.load(tmp_path / "killed.ckpt") as saved:
                assert {saved[key].dtype.kind for key in saved.files} <= set("fiu")  # whole, each time
    assert -signal.SIGKILL in ends
    assert run(SLOW, tmp_path, "killed") == 0
    assert_same_files(tmp_path)
