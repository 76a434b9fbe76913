"""The benchmarks of fits: arithmetic, problems, and one tiny fit from end to end. Nothing asserts on time."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are in the repository alone", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.fits import chosen  # noqa: E402
from benchmarks.fitting import page, problems  # noqa: E402
from benchmarks.fitting.cases import CASES, MILLION, MORE_ROWS, NETJAC  # noqa: E402
from benchmarks.fitting.frameworks import netjac_fits, scipy_fit  # noqa: E402
from benchmarks.fitting.runner import (  # noqa: E402
    Fit,
    FitCase,
    FitContender,
    FitOutcome,
    FitRunner,
    FitSettings,
    export,
    paired_ratio,
)
from benchmarks.fitting.task import FitTask, Goal, Watch, joined, split  # noqa: E402
from benchmarks.networks import mlp, specs  # noqa: E402

TRF = FitContender("SciPy trf, J from netjac", "peer", "netjac_fits", "scipy-trf")


@pytest.fixture
def settings(tmp_path):
    return FitSettings(
        pythons={"netjac_fits": sys.executable},
        threads=1,
        rounds=2,
        budget_seconds=60.0,
        cap_seconds=120.0,
        cap_bytes=None,
        most_steps=200,
        scratch=tmp_path,
    )


def outcome(label, role, *seconds, dtype="float64", status="reached", steps=5, peak=None):
    fits = {turn: Fit(each, steps, steps + 1, status, "", peak, 1e-7) for turn, each in enumerate(seconds)}
    return FitOutcome(FitContender(label, role, "module", "name", dtype), status, fits=fits)


def test_the_loss_in_numpy_is_that_of_keras():
    from benchmarks.frameworks.keras_models import build

    network = mlp(3, 5, 4, 2)
    x, y = problems.data(network, 7)
    weights = problems.start(network, None)
    predicted = build(network)(x).numpy()
    np.testing.assert_allclose(problems.outputs(weights, x), predicted, rtol=1e-5, atol=1e-6)
    assert problems.mse(weights, x, y) == pytest.approx(np.mean((predicted - y) ** 2), rel=1e-5)


def test_data_are_what_the_page_says():
    x, y = problems.data(mlp(1, 20, 1), 5)
    np.testing.assert_allclose(x[:, 0], [-1, -0.5, 0, 0.5, 1])
    np.testing.assert_allclose(y[[0, 1, 2], 0], [np.sin(10) / 10, np.sin(5) / 5, 1], rtol=1e-6)
    x, y = problems.data(mlp(4, 3, 2), 6)
    assert (x.shape, y.shape) == ((6, 4), (6, 2))
    assert np.ptp(y, axis=0).min() > 0.1


def test_a_start_lies_within_its_bounds():
    weights = problems.start(mlp(13, 37, 37, 2), 0.375)
    assert problems.excess(weights, 0.375) == 0
    assert problems.excess(weights, 0.25) == pytest.approx(0.125)


def test_a_task_reads_what_was_exported(tmp_path):
    case = replace(CASES[0], n=4)
    export(case, tmp_path / "case.npz")
    task = FitTask.from_json(FitTask(case.sizes, str(tmp_path / "case.npz"), "float64", 1).to_json())
    x, y, weights = task.load()
    assert {each.dtype for each in (x, y, *weights.values())} == {np.dtype("float64")}
    assert [(name, value.shape) for name, value in weights.items()] == specs(task.network)
    np.testing.assert_array_equal(x, problems.data(task.network, 4)[0])


def test_theta_is_split_as_it_was_joined():
    weights = problems.start(mlp(2, 3, 1), None)
    again = split(joined(weights), weights)
    assert [value.shape for value in again.values()] == [value.shape for value in weights.values()]
    for name, value in weights.items():
        np.testing.assert_array_equal(again[name], value)


@pytest.mark.parametrize(
    ("mse", "steps", "seconds", "ended"),
    [(0.9, 0, 60.0, "reached"), (2.0, 3, 60.0, "after 3 steps"), (2.0, 0, -1.0, "after -1 s"), (2.0, 0, 60.0, "")],
)
def test_a_fit_is_over_at_its_goal_or_its_limits(mse, steps, seconds, ended):
    watch = Watch(Goal(1.0, 3, seconds), steps=steps)
    assert watch.over(mse) == bool(ended)
    assert watch.ended == ended


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm"])
def test_scipy_is_stopped_at_the_goal_and_counted(method):
    called = []

    def fun(theta):
        called.append(theta)
        return np.array([10 * (theta[1] - theta[0] ** 2), 1 - theta[0]])

    def jac(theta):
        return np.array([[-20 * theta[0], 10.0], [-1.0, 0.0]])

    start = np.array([-1.2, 1.0])
    theta, watch = scipy_fit.fit(fun, jac, start, Goal(1e-3, 500, 60.0), method, None)
    assert watch.ended == "reached"
    assert watch.evaluations == len(called)
    assert np.mean(fun(theta) ** 2) <= 1e-3
    assert watch.steps > 1
    _, one = scipy_fit.fit(fun, jac, start, Goal(1e-3, 1, 60.0), method, None)
    assert (one.steps, one.ended) == (1, "after 1 steps")


def test_scipy_keeps_bounds_and_says_why_it_stopped():
    def fun(theta):
        return theta - 2.0

    theta, watch = scipy_fit.fit(fun, lambda _: np.eye(2), np.zeros(2), Goal(1e-6, 500, 60.0), "trf", 1.0)
    np.testing.assert_allclose(theta, 1.0, atol=1e-6)
    assert watch.ended.startswith("stopped by itself")


def test_ratios_pair_the_fits_of_one_round():
    a, b = outcome("a", "peer", 2.0, 20.0, 2.0), outcome("b", "netjac", 1.0, 10.0, 1.0)
    assert paired_ratio(a, b) == 2.0
    b.fits = {5: b.fits[0]}
    assert paired_ratio(a, b) == 2.0  # of medians


def test_figures_compare_with_the_fastest_peer_that_reached_the_goal():
    ours = outcome("netjac", "netjac", 1.0, peak=10)
    peers = [outcome("slow", "peer", 30.0), outcome("quick", "peer", 12.0), outcome("fails", "peer", 0.1, status="no")]
    assert page.figures({"wide-n500": [ours, *peers]}) == [
        ("wide-n500, netjac in float64: time to the goal", "≥ 10 × faster", "12 ×", "reached", "quick, float64")
    ]
    assert page.figures({"wide-n500": [ours, peers[2]]})[0][-1] == "no peer reached the goal"
    assert page.figures({"wide-n500": [replace(ours, status="after 9 steps"), *peers]}) == []


def test_a_step_and_memory_count_even_where_the_goal_was_not_reached():
    ours = outcome("netjac", "netjac", 1.0, peak=10)
    peer = outcome("large", "peer", 60.0, status="after 60 s", steps=2, peak=200)
    _, step, memory = page.figures({MILLION: [ours, peer]})
    assert step[2:4] == ("150 ×", "reached")
    assert memory[2:] == ("1/20", "reached", "large, float64, 0 MB")


def test_a_time_short_of_the_goal_stands_in_brackets():
    ours = outcome("netjac", "netjac", 1.0)
    table = page.case_table([ours, outcome("fails", "peer", 3.0, status="after 3 s")])
    assert "(3)" in table
    assert "after 3 s" in table


def test_the_problems_are_those_asked_for():
    shapes = {case.name: case.shape for case in CASES}
    assert shapes["bounded-n250"] == (500, 2000)
    assert shapes[MILLION] == (1000, 1_154_049)
    assert shapes["sinc-n20000"] == (20_000, 61)
    for case in CASES:
        assert case.contenders[:2] == tuple(NETJAC)
        lm = [contender for contender in case.contenders if contender.label.startswith("SciPy lm")]
        assert {contender.excluded for contender in lm} <= {MORE_ROWS if case.shape[0] < case.shape[1] else ""}
        for contender in case.contenders:
            if contender.module == "netjac_fits":
                assert contender.name in netjac_fits.CONTENDERS


def test_names_choose_cases_and_contenders():
    [case] = chosen(["wide*"], ["SciPy trf*"])
    assert {contender.label.split(",")[0] for contender in case.contenders} == {"netjac", "SciPy trf"}
    assert chosen(None) == list(CASES)
    with pytest.raises(SystemExit, match="no case is called 'nothing'"):
        chosen(["nothing"])


def test_another_start_is_not_timed(settings, monkeypatch):
    outputs = problems.outputs
    monkeypatch.setattr(problems, "outputs", lambda weights, x: outputs(weights, x) + 1e-3)
    case = FitCase("tiny", "", (1, 4, 1), 8, 1e-2, (TRF,))
    [found] = FitRunner(settings).run(case)
    assert "not the same network" in found.status


def test_one_tiny_fit_from_end_to_end(settings, tmp_path):
    """netjac in both precisions, SciPy, one that cannot start and one that is excluded, into both files."""
    absent = replace(TRF, label="absent", name="no such contender")
    excluded = replace(TRF, label="excluded", excluded="has no bounds")
    contenders = (*NETJAC, TRF, absent, excluded)
    case = replace(CASES[0], name="sinc-n2000", sizes=(1, 6, 1), n=40, goal=1e-3, contenders=contenders)
    results = {case.name: FitRunner(settings).run(case)}
    *present, broken, out = results[case.name]
    for each in present:
        assert each.reached, each.status
        assert set(each.fits) == {0, 1}
        assert each.last.mse <= 1.01e-3
        assert each.first > 0
        assert each.last.evaluations > each.last.steps > 0
    assert "KeyError" in broken.status
    assert (out.status, out.fits) == ("has no bounds", {})

    data = page.as_data(results, settings)
    text = page.as_markdown(results, data)
    page.write(tmp_path / "page.md", text, data)
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text
    assert (tmp_path / "page.json").exists()
    assert "SciPy trf, J from netjac" in text


def test_digits_and_deviations_of_a_straight_line():
    from benchmarks import nist

    assert nist.digits(np.array([1.001, 2.0]), np.array([1.0, 2.0])) == pytest.approx(3.0)
    assert nist.digits(np.array([np.nan, 2.0]), np.array([1.0, 2.0])) == 0.0
    assert nist.digits(np.array([2.0]), np.array([2.0])) == 11.0
    x = np.array([0.0, 1.0, 2.0, 4.0])
    y = np.array([1.0, 2.5, 2.5, 6.0])
    (_, covariance), J = np.polyfit(x, y, 1, cov=True), np.stack([x, np.ones(4)], axis=1)
    residual_sum = float(np.sum((J @ np.polyfit(x, y, 1) - y) ** 2))
    np.testing.assert_allclose(nist.deviations(J, residual_sum), np.sqrt(np.diag(covariance)), rtol=1e-12)
    assert np.all(nist.deviations(np.ones((4, 2)), 1.0) > 1e6)  # of parameters that the data do not tell apart


def test_a_nist_problem_into_the_page():
    from benchmarks import nist
    from tests.nist import DIRECTORY

    if not DIRECTORY.is_dir():
        pytest.skip("NIST's data files are not beside this repository")
    table = nist.run(["Misra1a", "BoxBOD"])
    near = table["Misra1a"]["netjac", "near"]
    assert near.solved
    assert near.deviation_digits > 6
    text = nist.as_markdown(table)
    assert f"{near.digits:.1f} / {near.evaluations}" in text
