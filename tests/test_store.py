"""Jacobians on disk: what is read again, by netjac and by others, against the arrays that were saved."""

from __future__ import annotations

import itertools
import json
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zarr")

import zarr
from einops import rearrange

import netjac as nj
from netjac import testing
from netjac.layout import parse
from netjac.store import chunks, manifest
from stored import explicit, factored, held, tiled

LAYOUTS = [
    pattern
    for a, b, c in itertools.permutations("nlm")
    for pattern in (f"{a} {b} {c}", f"({a} {b}) {c}", f"{a} ({b} {c})", f"({a} {b} {c})")
]


@pytest.fixture(autouse=True)
def _memory_is_the_disk(monkeypatch):
    """What reaches the disk, and when, is not tested here."""
    monkeypatch.setattr("os.fsync", lambda file: None)


def cube_of(J):
    """The Jacobian (n, l, m) through SciPy's protocol alone."""
    return (J @ np.eye(J.m, dtype=J.dtype)).reshape(J.n, J.l, J.m)


# ---- factors


@pytest.mark.parametrize("kind", ["outer", "embedding", "dense", "mapped"])
def test_every_kind_of_block_comes_back(kind):
    @settings(max_examples=25)
    @given(testing.blocks([kind]), st.integers(1, 3))
    def comes_back(case, samples):
        comes_back_from_disk(*case, samples)

    comes_back()


def comes_back_from_disk(block, dense, samples):
    n, l, m = dense.shape
    J = held([block], m, np.float64 if dense.size == 0 else block.row_squares().dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jac.zarr"
        nj.save(tiled(J, samples) if n * l else J, path)
        S = nj.open(path)
        assert (S.n, S.l, S.m, S.dtype) == (n, l, m, J.dtype)
        np.testing.assert_array_equal(S.y, J.y)
        testing.check_operator(S, dense.reshape(n * l, m))
        assert [type(b) for _, _, tile in S.tiles() for b in tile.blocks] == [type(block)] * len(list(S.tiles()))
        np.testing.assert_array_equal(S.to_array("n l m"), J.to_array("n l m"))


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_factors_of_some_outputs_at_a_time(tmp_path, outputs):
    J = factored(n=3, l=5)
    nj.save(tiled(J, 1, outputs), tmp_path / "jac.zarr")
    S = nj.open(tmp_path / "jac.zarr")
    assert {o.stop - o.start for _, o, _ in S.tiles()} >= {outputs}
    verbs(S, J)


def verbs(S, J):
    """Every verb of S against NumPy on the array of J."""
    rng = np.random.default_rng(0)
    cube = cube_of(J)
    dense, border = cube.reshape(-1, J.m), J.parameters["b"].start
    testing.check_operator(S, dense)
    for layout in LAYOUTS:
        np.testing.assert_allclose(S.to_array(layout), rearrange(cube, f"n l m -> {layout}"), rtol=1e-12)
    testing.assert_close(S.gram(), dense @ dense.T, "gram")
    testing.assert_close(S.gram(J), dense @ dense.T, "gram of two, stored first")
    testing.assert_close(J.gram(S), dense @ dense.T, "gram of two, stored second")
    w = rng.uniform(1, 2, len(dense))
    testing.assert_close(S.normal(w), dense.T @ (w[:, None] * dense), "normal")
    testing.assert_close(S.row_norms(), np.linalg.norm(dense, axis=1), "row norms")
    testing.assert_close(S.column_norms(), np.linalg.norm(dense, axis=0), "column norms")
    b = rng.standard_normal(len(dense))
    damped = np.linalg.solve(dense.T @ dense + 0.1 * np.eye(J.m), dense.T @ b)
    testing.assert_close(S.lstsq(b, 0.1), damped, "lstsq", 1e-9)
    testing.assert_close(S.columns("b").to_array(), dense[:, border:], "columns")
    turned = np.hstack([dense[:, border:], dense[:, :border]])
    testing.assert_close(S.columns(["b", "k*"]).to_array(), turned, "columns by a pattern")
    testing.assert_close(S.columns(["b", "kernel"])[[0]].to_array("n l m")[..., -1], cube[:1, :, border - 1], "both")
    for index in (slice(1, None), [J.n - 1, 0, 0], np.arange(J.n) % 2 == 0, -1, []):
        part = cube[index].reshape(-1, J.l, J.m)
        testing.assert_close(S[index].to_array("n l m"), part, f"samples {index}")
    B = rng.standard_normal((J.n, 2, J.l))
    scaled, C = S.scaled(B), rng.standard_normal((J.n, 1, 2))
    testing.assert_close(scaled.to_array("n l m"), B @ cube, "scaled")
    testing.assert_close(scaled.y, (B @ J.y[:, :, None])[..., 0], "scaled outputs")
    testing.assert_close(scaled.scaled(C).to_array("n l m"), C @ B @ cube, "scaled twice")
    testing.assert_close(S.columns("b").scaled(B)[1:].to_array("n l m"), (B @ cube)[1:, :, border:], "all together")
    assert S.parameters.names == J.parameters.names
    assert S.output_space.segments == J.output_space.segments
    assert S.coverage == J.coverage
    outputs = S.outputs
    np.testing.assert_array_equal(outputs["q"][0], J.y[:, 1:])
    assert str(S.path) in repr(S)


@pytest.mark.parametrize("layout", ["factored", "(l m) n", "n l m", "(n l) m"])
@pytest.mark.parametrize("samples", [2, 3, 7])
def test_every_verb(tmp_path, layout, samples):
    J = factored(n=7, l=3)
    nj.save(tiled(J, samples), tmp_path / "jac.zarr", layout=layout)
    verbs(nj.open(tmp_path / "jac.zarr"), J)


# ---- explicit arrays


@settings(max_examples=40)
@given(
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 7)),
    st.sampled_from(LAYOUTS),
    st.integers(1, 5),
    st.integers(100, 3000),
    st.sampled_from(["float32", "float64"]),
    st.sampled_from([None, "zstd", "gzip", "blosc"]),
)
def test_the_array_read_by_zarr_alone(shape, layout, samples, memory, dtype, compression):
    n, l, m = shape
    J = explicit(n, l, m, dtype)
    cube = ((1 + np.arange(n * l * m)).reshape(n, l, m) / 8).astype(dtype)
    source = tiled(J, samples) if n * l else J
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jac.zarr"
        nj.save(source, path, layout=layout, memory=memory, compression=compression)
        found = zarr.open_group(str(path), mode="r")["jacobian"]
        np.testing.assert_array_equal(found[...], rearrange(cube, f"n l m -> {layout}"))
        assert found.dtype == dtype
        S = nj.open(path)
        np.testing.assert_array_equal(S.to_array("n l m"), cube)
        np.testing.assert_allclose(S.T @ np.ones(n * l), cube.sum((0, 1)))


@settings(max_examples=200)
@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from(LAYOUTS),
)
def test_tiles_are_whole_chunks(shape, wanted, layout):
    """Of a regular grid: every entry's chunk, worked out entry by entry, belongs to one tile."""
    arrangement = parse(layout)
    sizes = dict(zip("nlm", shape, strict=True))
    steps = chunks.aligned(arrangement, sizes, dict(zip("nlm", wanted, strict=True)))
    assert all(1 <= steps[letter] <= most for letter, most in zip("nlm", wanted, strict=True))
    grid = arrangement.shape(**steps)
    tile_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    for entry in np.ndindex(shape):
        index = dict(zip("nlm", entry, strict=True))
        place = []
        for axis in arrangement.axes:
            position = 0
            for letter in axis:
                position = position * sizes[letter] + index[letter]
            place.append(position)
        chunk = tuple(p // g for p, g in zip(place, grid, strict=True))
        tile = tuple(index[letter] // steps[letter] for letter in "nlm")
        assert tile_of.setdefault(chunk, tile) == tile


@given(
    st.sampled_from(LAYOUTS),
    st.lists(st.integers(0, 4), max_size=6),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_where_a_part_lies(layout, samples, outputs, parameters):
    sizes = {"n": 5, "l": 3, "m": 4}
    cube = np.arange(60).reshape(5, 3, 4)
    part = {"n": np.array(samples, np.intp), "l": slice(*sorted(outputs)), "m": slice(*sorted(parameters))}
    array = rearrange(cube, f"n l m -> {layout}")
    index = chunks.selection(parse(layout), sizes, part)
    found = array[np.ix_(*(np.arange(s)[i] for s, i in zip(array.shape, index, strict=True)))]
    expected = rearrange(cube[samples][:, part["l"], part["m"]].astype(int), f"n l m -> {layout}")
    np.testing.assert_array_equal(found, expected)


def test_chunks_are_tiles(tmp_path):
    J = explicit(n=10, l=2, m=3)
    nj.save(tiled(J, 4), tmp_path / "jac.zarr", layout="(l m) n")
    group = zarr.open_group(str(tmp_path / "jac.zarr"), mode="r")
    assert group["jacobian"].chunks == (6, 4)
    assert group["jacobian"].metadata.dimension_names == ("l_m", "n")
    assert group["jacobian"].attrs["layout"] == "(l m) n"
    assert [s["name"] for s in group["jacobian"].attrs["parameters"]] == ["a/kernel", "b"]


def test_chunks_are_small_where_rows_are_long(tmp_path):
    J = explicit(n=2, l=2, m=1000)
    nj.save(J, tmp_path / "jac.zarr", layout="n l m", memory=4000)
    assert zarr.open_group(str(tmp_path / "jac.zarr"), mode="r")["jacobian"].chunks == (1, 1, 125)


def test_dask_and_xarray_read_it(tmp_path):
    da, xarray = pytest.importorskip("dask.array"), pytest.importorskip("xarray")
    J = explicit(n=10, l=2, m=3)
    path = tmp_path / "jac.zarr"
    nj.save(tiled(J, 4), path, layout="(l m) n")
    array = da.from_zarr(str(path), component="jacobian")
    assert array.chunks == ((6,), (4, 4, 2))
    np.testing.assert_array_equal(array.compute(scheduler="synchronous"), J.to_array("(l m) n"))
    with xarray.open_zarr(path, consolidated=False, chunks=None) as data:
        assert data["jacobian"].dims == ("l_m", "n")
        assert data["y"].dims == ("n", "l")
        np.testing.assert_array_equal(data["jacobian"].mean("n"), J.to_array("(l m) n").mean(1))


def test_factors_read_by_zarr_and_xarray(tmp_path):
    J = factored(n=5)
    path = tmp_path / "jac.zarr"
    nj.save(J, path)
    group = zarr.open_group(str(path), mode="r")["factors/0"]
    A, D = group["block0_A"][...], group["block0_D"][...]
    np.testing.assert_array_equal(A, J.blocks[0].A)
    by_hand = np.einsum("npgk,nlpgc->nlgkc", A, D).reshape(5, 2, -1)
    np.testing.assert_allclose(by_hand, J.to_array("n l m"), rtol=1e-14)
    xarray = pytest.importorskip("xarray")
    with xarray.open_zarr(path, group="factors/0", consolidated=False, chunks=None) as data:
        assert data["block0_D"].dims == ("n", "l", "p_0", "g_0", "c_0")


# ---- from one store to another; pickles; what is said


def test_a_stored_jacobian_is_saved_in_another_layout(tmp_path):
    J = factored(n=7, l=3)
    nj.save(tiled(J, 2), tmp_path / "a.zarr")
    nj.save(nj.open(tmp_path / "a.zarr"), tmp_path / "b.zarr", layout="(l m) n")
    nj.save(nj.open(tmp_path / "b.zarr").columns("b"), tmp_path / "c.zarr")
    np.testing.assert_array_equal(nj.open(tmp_path / "b.zarr").to_array(), J.to_array())
    np.testing.assert_array_equal(nj.open(tmp_path / "c.zarr").to_array(), J.columns("b").to_array())
    nj.save(tiled(J, 1, 2), tmp_path / "d.zarr")
    nj.save(nj.open(tmp_path / "d.zarr"), tmp_path / "e.zarr")
    np.testing.assert_array_equal(nj.open(tmp_path / "e.zarr").to_array(), J.to_array())


def test_a_pickle_knows_its_store(tmp_path):
    J = factored(n=4)
    nj.save(J, tmp_path / "jac.zarr")
    pickled = pickle.dumps(nj.open(tmp_path / "jac.zarr")[1:])
    np.testing.assert_array_equal(pickle.loads(pickled).to_array(), J[1:].to_array())
    whole = pickle.dumps(nj.open(tmp_path / "jac.zarr"))
    nj.save(factored(n=5), tmp_path / "jac.zarr", overwrite=True)
    with pytest.raises(nj.StoreError, match="another Jacobian than it did"):
        pickle.loads(whole)


def test_it_may_be_moved(tmp_path):
    J = factored(n=4)
    nj.save(J, tmp_path / "a" / "jac.zarr")
    (tmp_path / "a" / "jac.zarr").rename(tmp_path / "elsewhere")
    np.testing.assert_array_equal(nj.open(str(tmp_path / "elsewhere")).to_array(), J.to_array())


def test_no_samples(tmp_path):
    J = factored(n=3)[:0]
    for layout in ("factored", "(l m) n"):
        nj.save(J, tmp_path / layout, layout=layout)
        S = nj.open(tmp_path / layout)
        assert S.shape == (0, 6)
        assert S.to_array("(l m) n").shape == (12, 0)
        assert not S.normal().any()
        assert not S.lstsq(np.zeros(0)).any()
    assert zarr.open_group(str(tmp_path / "(l m) n"), mode="r")["jacobian"].shape == (12, 0)


def test_the_manifest_tells_what_is_there(tmp_path):
    nj.save(tiled(explicit(n=5, l=2, m=3), 2), tmp_path / "jac.zarr", layout="(l m) n", compression="zstd")
    content = json.loads((tmp_path / "jac.zarr" / "netjac" / "manifest.json").read_text())["content"]
    assert content["sizes"] == {"n": 5, "l": 2, "m": 3}
    assert content["layout"] == "(l m) n"
    assert [(s["name"], s["shape"]) for s in content["parameters"]] == [("a/kernel", [1]), ("b", [2])]
    assert [s["name"] for s in content["outputs"]] == ["p", "q"]
    assert set(content["versions"]) == {"netjac", "zarr", "numpy"}
    stored = {str(p.relative_to(tmp_path / "jac.zarr")) for p in (tmp_path / "jac.zarr").rglob("c/**/*") if p.is_file()}
    assert stored == {key for key in content["files"] if not key.endswith("zarr.json")}
    assert len(stored) == 3 + 3
    for key, (checksum, size) in content["files"].items():
        data = (tmp_path / "jac.zarr" / key).read_bytes()
        assert (manifest.digest(data), len(data)) == (checksum, size)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["jac.zarr"]


def test_the_same_call_again_writes_nothing(tmp_path):
    J = factored(n=4)
    nj.save(J, tmp_path / "jac.zarr")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    nj.save(J, tmp_path / "jac.zarr")
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: nj.save(factored(n=5), path), "jacobian changed"),
        (lambda path: nj.save(factored(n=4), path, layout="n l m"), "layout 'factored' instead of 'n l m'"),
        (lambda path: nj.save(factored(n=4), path, compression="zstd"), "compression None instead of 'zstd'"),
    ],
)
def test_another_jacobian_is_not_written_over(tmp_path, change, says):
    path = tmp_path / "jac.zarr"
    nj.save(factored(n=4), path)
    with pytest.raises(nj.StoreError, match=says):
        change(path)
    np.testing.assert_array_equal(nj.open(path).to_array(), factored(n=4).to_array())


def test_overwriting(tmp_path):
    path = tmp_path / "jac.zarr"
    nj.save(factored(n=4), path)
    nj.save(factored(n=5), path, overwrite=True, layout="n l m")
    np.testing.assert_array_equal(nj.open(path).to_array(), factored(n=5).to_array())
    assert not (path / "factors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["jac.zarr"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["jac.zarr", "jac.zarr.partial"])
def test_what_is_not_netjacs_is_left_alone(tmp_path, name, overwrite):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("precious")
    with pytest.raises(nj.StoreError, match=r"no store of netjac's|not netjac's"):
        nj.save(factored(n=4), tmp_path / "jac.zarr", overwrite=overwrite)
    assert (tmp_path / name / "thesis.tex").read_text() == "precious"


def test_an_empty_folder_is_filled(tmp_path):
    nj.save(factored(n=2), tmp_path)
    assert nj.open(tmp_path).n == 2


def test_arguments(tmp_path):
    J = factored(n=2)
    with pytest.raises(nj.DtypeError, match="needs the path"):
        nj.save(J)
    with pytest.raises(nj.DtypeError, match="has its data already"):
        nj.save(J, np.ones(3), tmp_path / "jac.zarr")
    with pytest.raises(nj.DataError, match="compression must be"):
        nj.save(J, tmp_path / "jac.zarr", compression="rar")
    with pytest.raises(nj.LayoutError, match="unknown letter"):
        nj.save(J, tmp_path / "jac.zarr", layout="n k m")
    for call in (lambda: nj.save(J, "s3://bucket/jac.zarr"), lambda: nj.open("s3://bucket/jac.zarr")):
        with pytest.raises(nj.DataError, match="a folder of a file system"):
            call()
    with pytest.raises(nj.StoreError, match="no store at"):
        nj.open(tmp_path / "jac.zarr")
    with pytest.raises(nj.StoreError, match=r"no store of netjac\.save"):
        nj.open(tmp_path)
    assert not list(tmp_path.iterdir())


def test_layouts_that_would_be_dust_are_refused(tmp_path):
    J = explicit(n=1000, l=1, m=100)
    with pytest.raises(nj.LayoutError, match="Save it as 'm n l'"):
        nj.save(tiled(J, 3), tmp_path / "jac.zarr", layout="(m n) l")
    assert not list(tmp_path.iterdir())
    nj.save(tiled(J, 500), tmp_path / "jac.zarr", layout="(m n) l")
    np.testing.assert_array_equal(nj.open(tmp_path / "jac.zarr").to_array("(m n) l"), J.to_array("(m n) l"))


def test_progress_is_silent_where_nobody_looks(tmp_path, capsys):
    nj.save(factored(n=2), tmp_path / "jac.zarr", progress=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("path", [None, 5, b"jac.zarr"])
def test_what_is_no_path(path):
    with pytest.raises(nj.DtypeError, match="path of a store must be"):
        nj.open(path)
