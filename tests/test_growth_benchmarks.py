"""The measurements of growth and of threads: their arithmetic, their pages and plots, and one tiny run of each."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are in the repository alone", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import growth, pictures, scaling, threads  # noqa: E402
from benchmarks.memory import PeakMemory, resident  # noqa: E402
from benchmarks.networks import NETWORKS, mlp, specs  # noqa: E402
from benchmarks.task import compared_samples  # noqa: E402

linux_only = pytest.mark.skipif(resident() is None, reason="needs Linux's /proc")


def test_an_mlp_is_known_by_its_widths():
    assert NETWORKS["3-7-2"] == mlp(3, 7, 2)
    assert "3-7-2" not in NETWORKS
    with pytest.raises(KeyError, match="neither a network nor the widths"):
        NETWORKS["no such network"]


def test_fewer_samples_are_compared_where_one_has_many_entries():
    assert compared_samples(64, 100_000) == tuple(range(64))
    assert len(compared_samples(4096, 400_000)) == 16
    assert compared_samples(64, 5_000_000) == (0, 21, 42, 63)
    assert compared_samples(64, 10**8) == (0, 63)
    assert compared_samples(1, 10**8) == (0,)


# ---- growth


def points(seconds, peaks, files=0):
    pairs = zip(seconds, peaks, strict=True)
    return [
        {"n": 10**i, "median_seconds": s, "peak_bytes": p, "file_bytes": files, "runs": 1, "status": "ok"}
        | {"relative_errors": {"vjp": 1e-7}}
        for i, (s, p) in enumerate(pairs, start=3)
    ]


def test_the_slope_is_that_of_a_power_of_n():
    assert growth.slope(points([1e-3, 2e-2, 4e-1], [1, 1, 1])) == pytest.approx(1 + np.log10(2))
    assert growth.slope(points([1e-3, None, 1e-1], [1, None, 1])) == pytest.approx(1)  # a run that failed is left out
    assert np.isnan(growth.slope(points([1.0], [1])))


def test_memory_is_compared_at_the_two_largest_n():
    measured = points([1, 2, 3], [10, 200, 220], files=20)
    assert growth.memory_ratio(measured) == pytest.approx(1.1)
    assert growth.memory_ratio(measured, without_files=True) == pytest.approx(200 / 180)


@linux_only
def test_pages_of_mapped_files_are_told_apart(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(16 << 20, np.uint8))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    with PeakMemory() as memory:
        mapped.sum()
    assert 14 << 20 < memory.files < 20 << 20
    with PeakMemory() as memory:
        np.ones(16 << 20, np.uint8).sum()
    assert memory.files < 2 << 20 < memory.growth


def test_growth_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "SIZES", (1200, 2500))
    options = ["--rounds", "1", "--threads", "1", "--results", str(tmp_path), "--images", str(tmp_path)]
    assert growth.main([*options, "--way", "stream-normal"]) == 0
    (path,) = tmp_path.glob("*-growth.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    (way,) = data["ways"]
    assert [(p["n"], p["runs"], p["status"]) for p in way["points"]] == [(1200, 1, "ok"), (2500, 1, "ok")]
    for point in way["points"]:
        assert set(point["relative_errors"]) == {"vjp", "normal v"}
        assert max(point["relative_errors"].values()) < 1e-5
    page = path.with_suffix(".md")
    text = page.read_text(encoding="utf-8")
    page.unlink()
    picture = (tmp_path / "growth.svg").read_bytes()
    assert growth.main(["--plot", str(path), "--images", str(tmp_path)]) == 0
    assert page.read_text(encoding="utf-8") == text
    assert (tmp_path / "growth.svg").read_bytes() == picture


# ---- scaling


def test_sweeps_grow_in_one_of_n_l_and_m():
    for sweep in scaling.SWEEPS:
        sizes = [point.sizes[sweep.axis] for point in sweep.points]
        assert sizes == sorted(set(sizes))
        for point in sweep.points:
            assert NETWORKS[point.network].outputs == point.sizes["l"]
            assert sum(np.prod(shape) for _, shape in specs(NETWORKS[point.network])) == point.sizes["m"]


def swept(*points):
    """A sweep over n with a row a contender: label → (role, seconds or None, status)."""
    rows = [
        {
            "n": n,
            "contenders": [
                {"contender": label, "role": role, "median_seconds": seconds, "status": status}
                | {"first_call_peak_bytes": 10**6, "held_bytes": 10**5, "relative_errors": {"y": 0.0, "jacobian": 2e-7}}
                for label, (role, seconds, status) in contenders.items()
            ],
        }
        for n, contenders in points
    ]
    return {"axis": "n", "title": "samples n (1-2-1)", "points": rows}


SWEPT = swept(
    (1, {"netjac, factored": ("netjac", 1e-3, "ok"), "tape.jacobian": ("peer", 2e-3, "ok")}),
    (4, {"netjac, factored": ("netjac", 2e-3, "ok"), "tape.jacobian": ("peer", None, "over the time cap of 10 s")}),
    (16, {"netjac, factored": ("netjac", 4e-3, "ok")}),
)


def test_the_page_of_a_sweep_shows_who_stopped_and_why():
    times = scaling._table(SWEPT, scaling.QUANTITIES["Median time of a call, ms"]).splitlines()
    assert [cell.strip() for cell in times[3].split("|")[1:-1]] == ["tape.jacobian", "2", "", ""]
    assert [cell.strip() for cell in scaling._ratios(SWEPT).splitlines()[2].split("|")[2:-1]] == ["2", "", ""]
    assert scaling._stopped(SWEPT) == ["tape.jacobian, n = 4: over the time cap of 10 s"]


def test_plots_are_drawn_from_the_data_alone(tmp_path):
    pictures.scaling({"sweeps": [SWEPT, {**SWEPT, "axis": "n"}]}, tmp_path)
    first = [(tmp_path / f"scaling-{name}.svg").read_bytes() for name in ("time", "memory")]
    pictures.scaling({"sweeps": [SWEPT, {**SWEPT, "axis": "n"}]}, tmp_path)
    assert [(tmp_path / f"scaling-{name}.svg").read_bytes() for name in ("time", "memory")] == first


def test_who_is_over_a_cap_is_not_tried_again(tmp_path, monkeypatch):
    tried = []

    class Stub:
        def __init__(self, settings):
            pass

        def run(self, case):
            tried.append([contender.label for contender in case.contenders])
            outcomes = [scaling.Outcome(contender) for contender in case.contenders]
            for outcome in outcomes[1:]:
                outcome.timing.rounds[1] = [1.0]
            return outcomes

    monkeypatch.setattr(scaling, "Runner", Stub)
    points = scaling.SWEEPS[0].points[:2]
    scaling.measure(scaling.Sweep("n", "title", points), None)
    labels = [contender.label for contender in scaling.CONTENDERS]
    assert tried == [labels, labels[1:]]


# ---- threads


def test_threads_from_end_to_end(tmp_path, monkeypatch):
    verbs = (
        threads.Verb("to_array", "to_array", "10-32-32-2", 300, "(l m) n", buffered=True),
        threads.Verb("jacobian", "jacobian", "10-32-32-2", 30, told=False),
    )
    monkeypatch.setattr(threads, "VERBS", verbs)
    assert threads.main(["--seconds", "0.05", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-threads.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["verb"], row["buffer"]) for row in data["gains"]] == [("to_array", "new"), ("to_array", "the same")]
    for row in data["gains"]:
        assert row["turns"] >= 5
        assert row["difference"] == 0
    assert [(row["verb"], row["threads"]) for row in data["usages"]] == [
        ("to_array", 1),
        ("to_array", 2),
        ("jacobian", None),
    ]
    assert all(row["running"] > 0 for row in data["usages"])
