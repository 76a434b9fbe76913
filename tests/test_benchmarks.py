"""The benchmarks' arithmetic, the caps on a worker, and one tiny case from end to end. Nothing here asserts on time."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are in the repository alone", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import networks, report  # noqa: E402
from benchmarks.__main__ import chosen  # noqa: E402
from benchmarks.cases import CASES, FACTORED, FACTORS, FILL, GRAM, GRAM_HELD, LAYOUTS  # noqa: E402
from benchmarks.figures import figures  # noqa: E402
from benchmarks.memory import PeakMemory, resident  # noqa: E402
from benchmarks.process import DROPPED_VARIABLES, OverCap, Process, WorkerError, environment  # noqa: E402
from benchmarks.runner import (  # noqa: E402
    Case,
    Contender,
    Outcome,
    Runner,
    Settings,
    Timing,
    paired_ratio,
    relative_errors,
)
from benchmarks.task import Task, compared_samples  # noqa: E402

linux_only = pytest.mark.skipif(resident() is None, reason="needs Linux's /proc")


@pytest.fixture
def settings(tmp_path):
    return Settings(
        pythons={},
        threads=2,
        rounds=2,
        slice_seconds=0.001,
        budget_seconds=1.0,
        cap_seconds=120.0,
        cap_bytes=None,
        scratch=tmp_path,
    )


def outcome(label, role, *rounds, **more):
    calls = {turn: list(seconds) for turn, seconds in enumerate(rounds)}
    return Outcome(Contender(label, role, "module", "name"), timing=Timing(calls), **more)


def test_timing_counts_a_round_once_however_many_calls_it_has():
    timing = Timing({1: [1.0, 1.0, 1.0, 1.0], 2: [3.0], 3: [5.0, 0.5]})
    assert timing.runs == 7
    assert timing.best == 0.5
    assert timing.median == 2.75  # of 1, 3 and 2.75


def test_a_ratio_pairs_the_turns_of_one_round():
    a = Timing({1: [2.0], 2: [20.0], 3: [2.0]})
    b = Timing({1: [1.0], 2: [10.0], 3: [1.0]})  # the machine was slow in the second round
    assert paired_ratio(a, b) == 2.0
    assert paired_ratio(Timing({1: [6.0], 4: [100.0]}), Timing({1: [3.0], 5: [1.0]})) == 2.0
    assert paired_ratio(Timing({1: [6.0]}), Timing({2: [3.0]})) == 2.0  # no round in common


def test_errors_are_relative_to_the_largest_entry_of_the_reference():
    reference = {"jacobian": np.array([[1.0, -4.0], [0.0, 2.0]])}
    assert relative_errors({"jacobian": reference["jacobian"] + [[0, 0], [0.4, 0]]}, reference) == {
        "jacobian": pytest.approx(0.1)
    }
    assert relative_errors({"jacobian": reference["jacobian"]}, reference) == {"jacobian": 0.0}


@pytest.mark.parametrize("wrong", [np.ones(3), np.array([1.0, np.nan]), np.array([1.0, np.inf])])
def test_wrong_shapes_and_values_that_are_not_finite_are_infinitely_wrong(wrong):
    assert relative_errors({"y": wrong}, {"y": np.ones(2)}) == {"y": np.inf}


def test_small_jacobians_are_compared_whole_and_large_ones_in_part():
    assert compared_samples(100, 10) == tuple(range(100))
    samples = compared_samples(2000, 400_000)
    assert (samples[0], samples[-1], len(set(samples))) == (0, 1999, 16)


def test_a_task_survives_the_pipe():
    task = Task("10-64-32-2", 100, 2, (0, 5, 99), "(l m) n")
    assert Task.from_json(task.to_json()) == task


def test_workers_start_without_what_slows_numpy_down():
    given = {**dict.fromkeys(DROPPED_VARIABLES, "Haswell"), "HOME": "home"}
    made = environment(3, given)
    assert not set(DROPPED_VARIABLES) & set(made)
    assert (made["HOME"], made["OMP_NUM_THREADS"]) == ("home", "3")


@linux_only
def test_peak_memory_sees_what_was_used_and_let_go():
    with PeakMemory() as memory:
        np.ones(16 << 20, np.uint8).sum()
    assert memory.growth is not None
    assert 15 << 20 < memory.growth < 64 << 20


def _fill_process(tmp_path, byte_cap=None):
    process = Process(sys.executable, "plain", "fill", 1, tmp_path / "log", byte_cap)
    task = Task("10-64-32-2", 1000, 1, (0,))
    process.send("prepare", task=task.to_json())
    return process


def test_a_worker_over_its_time_cap_is_stopped(tmp_path):
    with _fill_process(tmp_path) as process, pytest.raises(OverCap, match="time cap") as stopped:
        process.receive(0.0)
    assert stopped.value.seconds == 0.0


@linux_only
def test_a_worker_over_its_memory_cap_is_stopped(tmp_path):
    with _fill_process(tmp_path, byte_cap=1) as process, pytest.raises(OverCap, match="memory cap"):
        process.receive(60.0)


def test_a_worker_says_what_went_wrong(tmp_path):
    with Process(sys.executable, "plain", "no such contender", 1, tmp_path / "log") as process:
        with pytest.raises(WorkerError, match="KeyError"):
            process.ask("prepare", 60.0, task=Task("10-64-32-2", 2, 1, (0,)).to_json())
        process._popen.kill()
        process._popen.wait()
        with pytest.raises(WorkerError, match="SIGKILL"):
            process.ask("first", 60.0)


def test_another_network_is_not_timed(settings, tmp_path):
    class Stub:
        def ask(self, do, cap, path):
            np.savez(path, y=np.array([[1.0, 2.0]]))
            return {"held": 0}

    runner, result = Runner(settings), outcome("contender", "peer")
    runner._compare(Stub(), result, {"y": np.array([[1.0, 2.0]])})
    assert result.errors == {"y": 0.0}
    with pytest.raises(WorkerError, match="not the same network"):
        runner._compare(Stub(), result, {"y": np.array([[1.0, 2.1]])})


class SlowStub:
    """A worker whose calls take a minute."""

    def __init__(self):
        self.caps = {}

    def ask(self, do, cap, path=None):
        self.caps[do] = cap
        if path:
            np.savez(path, y=np.ones(2))
        return {"check": {"held": 0}}.get(do, {"seconds": {"first": 61.0, "memory": 60.0}.get(do), "peak": 7})


def test_a_call_over_the_whole_budget_is_timed_once(settings):
    runner, slow, reference = Runner(settings), outcome("slow", "peer"), {"y": np.ones(2)}
    assert runner._warm_up(SlowStub(), slow, reference) is False
    assert (slow.first, slow.peak, list(slow.timing.rounds.values())) == (61.0, 7, [[60.0]])
    patient = Runner(replace(settings, budget_seconds=100.0))
    quick = outcome("quick", "peer")
    assert patient._warm_up(SlowStub(), quick, reference) is True
    assert not quick.timed


def test_patience_allows_one_long_call_and_times_that(settings):
    worker, result = SlowStub(), Outcome(Contender("once", "peer", "module", "name", patience=5.0))
    assert Runner(settings)._warm_up(worker, result, {"y": np.ones(2)}) is False
    assert worker.caps["first"] == 5 * settings.cap_seconds
    assert "memory" not in worker.caps
    assert (result.timing.median, result.first_peak, result.peak) == (61.0, 7, None)


def test_those_of_the_same_work_take_turns(settings, monkeypatch):
    labels = []
    monkeypatch.setattr(Runner, "_reference", lambda self, case, contender: {})
    monkeypatch.setattr(
        Runner, "_alternate", lambda self, case, outcomes, _: labels.append([o.contender.label for o in outcomes])
    )
    works = {"a": "J v", "b": "J u", "c": "J v"}
    contenders = tuple(Contender(label, "peer", "", "", dense=False, work=work) for label, work in works.items())
    results = Runner(settings).run(Case("name", "title", "10-32-32-2", 3, contenders))
    assert [result.contender.label for result in results] == ["a", "b", "c"]
    assert labels == [["a", "c"], ["b"]]


def test_a_gram_matrix_by_tiles_forms_those_that_fit_once(monkeypatch):
    from benchmarks.frameworks import gram

    task = Task("10-32-32-2", 10, 1, ())
    rows = np.random.default_rng(0).standard_normal((10, 2, 5)).astype(np.float32)
    y, expected = rows[..., 0], rows.reshape(20, 5) @ rows.reshape(20, 5).T
    formed = []

    def form(samples):
        formed.append((samples.start, samples.stop))
        return y[samples], rows[samples].reshape(-1, 5)

    m = sum(np.prod(shape) for _, shape in networks.specs(task.network))
    for count, tiles in ((1, [(0, 10)]), (2, [(0, 5), (5, 10)]), (3, [(0, 3), (3, 6), (6, 10), (0, 3)])):
        monkeypatch.setattr(gram, "TILE_BYTES", -(-10 * 2 * m * 4 // count))
        formed.clear()
        outputs, matrix = gram.by_tiles(task, form, lambda a, b: a @ b.T)
        assert formed == tiles
        np.testing.assert_array_equal(outputs, y)
        np.testing.assert_allclose(matrix, expected, rtol=1e-5, atol=1e-6)


def test_compared_rows_of_a_gram_matrix_in_either_order():
    from benchmarks.frameworks.gram import prepared

    task, rng = Task("10-32-32-2", 4, 1, (0, 3)), np.random.default_rng(0)
    y, cube = rng.standard_normal((4, 2)), rng.standard_normal((4, 2, 4, 2))
    expected = cube[[0, 3]][:, :, [0, 3]].reshape(4, 4)
    by_sample = prepared(task, lambda: (y, cube.reshape(8, 8)))
    by_output = prepared(task, lambda: (y, cube.transpose(1, 0, 3, 2)), outputs_first=True)
    for contender in (by_sample, by_output):
        arrays = contender.check(contender.run())
        np.testing.assert_array_equal(arrays["gram"], expected)
        np.testing.assert_array_equal(arrays["y"], y)


def test_references_of_products_agree_with_explicit_rows():
    from benchmarks.frameworks.reference import CONTENDERS

    task = Task("10-32-32-2", 3, 1, (0, 1, 2))
    arrays = {name: CONTENDERS[name](task).check(None) for name in ("products", "gram", "tangent")}
    J = arrays["products"]["jacobian"].reshape(6, -1)
    jvp, vjp = arrays["products"]["jvp"].ravel(), arrays["products"]["vjp"]
    np.testing.assert_allclose(arrays["gram"]["gram"], J @ J.T, rtol=1e-12)
    for name, expected in {
        "jvp": jvp,
        "vjp": vjp,
        "kernel": J @ vjp,
        "normal": J.T @ jvp,
        "centred": J.T @ (jvp - jvp.mean()),
    }.items():
        np.testing.assert_allclose(arrays["tangent"][name].ravel(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reference", ["gram", "tangent"])
def test_contenders_of_this_environment_agree_with_the_reference(reference):
    from benchmarks.frameworks import netjac_contenders, tensorflow_peers
    from benchmarks.frameworks.reference import CONTENDERS

    task = Task("10-32-32-2", 5, 1, (0, 2, 4))
    expected = CONTENDERS[reference](task).check(None)
    here = {"netjac_contenders": netjac_contenders, "tensorflow_peers": tensorflow_peers}
    case = next(case for case in CASES if case.reference == reference)
    chosen = [contender for contender in case.contenders if contender.module in here]
    assert len(chosen) >= 4
    for contender in chosen:
        prepared = here[contender.module].CONTENDERS[contender.name](task)
        errors = relative_errors(prepared.check(prepared.run()), expected)
        assert max(errors.values()) < 1e-5, contender.label


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_keras_orders_the_weights_as_the_benchmarks_do(name):
    from benchmarks.frameworks.keras_models import build

    network = networks.NETWORKS[name]
    model = build(network)  # raises where the order differs
    assert model.output_shape == (None, network.outputs)
    if name.startswith("ten"):
        assert sum(bool(layer.trainable_variables) for layer in model.layers) == 10


def test_every_contender_of_this_environment_exists():
    from benchmarks.frameworks import netjac_contenders, plain, reference, tensorflow_peers

    here = {module.__name__.split(".")[-1]: module for module in (netjac_contenders, plain, tensorflow_peers)}
    for case in CASES:
        assert case.reference in reference.CONTENDERS
        for contender in case.contenders:
            assert (contender.network or case.network) in networks.NETWORKS
            if contender.module in here:
                assert contender.name in here[contender.module].CONTENDERS


def test_figures_compare_with_the_fastest_peer_and_say_what_is_missing():
    peers = [
        outcome("slow", "peer", [9.0], held=1200),
        outcome("quick", "peer", [4.0], held=1200, peak=600),
        outcome("quick, matrix", "peer", [6.0]),
    ]
    ours = [
        outcome("netjac, factored", "netjac", [0.1], held=10, peak=20),
        outcome("netjac, dense", "netjac", [2.0]),
    ]
    rows = {row.what: row for row in figures({"mlp-256-n200": [*ours, *peers]})}
    blocks, matrix, time, memory = rows.values()
    assert (blocks.reached, blocks.met, blocks.against) == ("2 ×", True, "quick, 4e+03 ms; netjac 2e+03 ms")
    assert (matrix.reached, matrix.against.split(";")[0]) == ("3 ×", "quick, matrix, 6e+03 ms")
    assert (time.reached, time.met) == ("40 ×", True)
    assert (memory.reached, memory.met) == ("1/60", True)

    failed = Outcome(Contender("netjac, dense", "netjac", "module", "name"), status="failed: why")
    rows = figures({"cnn": [failed, *peers]})
    assert [(row.reached, row.met, row.against) for row in rows] == [("not measured", None, "failed: why")] * 2


def test_figures_of_a_gram_matrix_tell_dense_ways_from_libraries_and_memory_from_factors():
    ours = [
        outcome(GRAM.label, "netjac", [0.1], peak=50_000_000),
        outcome(GRAM_HELD.label, "netjac", [0.05], held=20_000_000, peak=21_000_000),
        outcome(FACTORS.label, "netjac", [0.05], held=24_000_000),
    ]
    peers = [
        outcome("dense J in tiles, torch.func", "peer", [90.0]),
        outcome("library", "peer", [0.2]),
        outcome("another", "peer", [0.4]),
    ]
    dense, library, memory = figures({"gram-n256": [*ours, *peers]})
    assert (dense.reached, dense.met, dense.asked) == ("900 ×", True, "≥ 10 × faster")
    assert (library.reached, library.against) == ("2 ×", "library, 200 ms; netjac 100 ms; another, 4 ×")
    assert (memory.reached, memory.met) == ("5.0 %", True)
    assert memory.against.split("; ")[1:] == [
        "the factors hold 24.0 MB",
        "nj.jacobian and J Jᵀ together grow by 50.0 MB",
    ]
    stopped = Outcome(peers[0].contender, "over the time cap of 300 s", least=300.0)
    (bound, *_) = figures({"gram-n256": [*ours, stopped]})
    assert (bound.reached, bound.met) == ("> 3e+03 ×", True)
    assert bound.against == "dense J in tiles, torch.func, over the time cap of 300 s; netjac 100 ms"
    ours[1].peak = 23_000_000
    assert figures({"gram-n256": [*ours, *peers]})[2].met is False


def test_figures_of_products_are_of_the_same_work():
    def product(label, role, work, seconds):
        timing = Timing({1: [seconds]})
        return Outcome(Contender(f"{label}: {work}", role, "module", "name", work=work), timing=timing)

    outcomes = [
        product("netjac", "netjac", "J v", 1.0),
        product("quick", "peer", "J v", 3.0),
        product("slow", "peer", "J v", 5.0),
        product("netjac", "netjac", "Jᵀ u", 2.0),
        product("quick", "peer", "Jᵀ u", 1.0),
    ]
    rows = figures({"tangent-n64": outcomes})
    assert [row.reached for row in rows] == ["3 ×", "0.5 ×"]
    assert rows[0].against == "quick, 3e+03 ms; netjac 1e+03 ms; slow, 5 ×"
    first, second = report.case_table(outcomes).split("\n\n")
    assert [line.split("|")[4].strip() for line in first.splitlines()] == [
        "× quick: J v",
        "-" * 14,
        "0.333",
        "1",
        "1.67",
    ]
    assert "× quick: Jᵀ u" in second


def test_names_choose_cases():
    assert [case.name for case in chosen(["mlp-64-*"], quick=False)] == ["mlp-64-n100", "mlp-64-n1000"]
    assert len(chosen(None, quick=True)) < len(chosen(None, quick=False)) == len(CASES)
    with pytest.raises(SystemExit, match="no case is called 'nothing'"):
        chosen(["nothing"], quick=False)


def test_one_tiny_case_from_end_to_end(settings, tmp_path):
    """netjac, a peer, the yardstick and a contender that cannot start, in alternation, into both files."""
    transposed = Contender("netjac, (l m) n", "netjac", "netjac_contenders", "dense", layout=LAYOUTS[3])
    peer = Contender("vectorized_map", "peer", "tensorflow_peers", "vectorized")
    absent = Contender("absent", "peer", "plain", "no such contender")
    case = Case("mlp-64-n100", "tiny", "10-32-32-2", 3, (FACTORED, transposed, peer, absent, FILL))
    results = {case.name: Runner(settings).run(case)}
    *present, broken, _ = results[case.name]
    for each in (*present, results[case.name][-1]):
        assert each.status == "ok"
        assert set(each.timing.rounds) == {1, 2}
        assert each.first > 0
        assert each.held > 0
    for each in present:
        assert set(each.errors) == {"y", "jacobian"}
        assert max(each.errors.values()) < 1e-5
    assert not broken.timed
    assert "KeyError" in broken.status

    page, text = report.write(results, settings, tmp_path / "results")
    assert page.read_text(encoding="utf-8") == text
    assert page.with_suffix(".json").exists()
    assert "vectorized_map" in text
    assert "KeyError" in text
