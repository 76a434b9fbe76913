"""Gram and normal matrices, norms and least squares, against dense NumPy in double precision."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import aslinearoperator

import netjac as nj
from netjac import algebra, factor, materialise, normal
from netjac.jacobian import Jacobian
from netjac.sites import Coverage, SiteForm, SiteValues, UseSite
from netjac.spaces import OutputSpace, ParameterSpace, lay_out

SHAPES = {"first": (4, 3), "bias": (3,), "tied": (3, 5), "nothing": (2,), "odd": (6,)}


def make(n=5, l=2, seed=0, dtype=np.float64, kinds="first bias tied again odd", shapes=SHAPES):
    """A Jacobian of random factors and its dense matrix; "again" is a second use of "tied", transposed and in part."""
    random = np.random.default_rng(seed)
    space = ParameterSpace(lay_out(list(shapes), list(shapes.values()), [np.dtype(dtype).name] * len(shapes)))

    def normal(*shape):
        return random.normal(size=shape).astype(dtype)

    sites, values = [], []
    for kind in kinds.split():
        name = "tied" if kind == "again" else kind
        start, shape = space[name].start, shapes[name]
        entries = np.arange(np.prod(shape)).reshape(1, -1, shape[-1]) if len(shape) > 1 else None
        if kind == "again":
            entries = entries[:, :2].transpose(0, 2, 1)
        if kind in ("bias", "odd"):
            entries = np.arange(shape[0]).reshape(1, 1, -1)
            form, arrays = SiteForm.DENSE, {"dense": normal(n, l, shape[0])}
        else:
            form, arrays = (
                SiteForm.OUTER,
                {"A": normal(n, 1, 1, entries.shape[1]), "D": normal(n, l, 1, entries.shape[2])},
            )
        sites.append(UseSite(space.find(name), kind, form, entries, len(sites) if form is SiteForm.OUTER else -1))
        values.append(SiteValues(**arrays))
    blocks = factor.plan(sites, space).build(values)
    dense = np.zeros((n, l, space.size))
    for site, value in zip(sites, values, strict=True):
        start = space.segments[site.variable].start
        for _, k, c in np.ndindex(site.entries.shape):
            if value.dense is None:
                one = value.A[:, None, 0, 0, k].astype(float) * value.D[:, :, 0, c].astype(float)
            else:
                one = value.dense[:, :, k * site.entries.shape[2] + c]
            dense[:, :, start + site.entries[0, k, c]] += one
    y = normal(n, l)
    return Jacobian(space, OutputSpace.flat(l), y, blocks, Coverage()), dense.reshape(n * l, space.size)


def close(actual, expected, dtype=np.float64):
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=(1e-5 if dtype == np.float32 else 1e-12) * scale)


CASES = ["first bias tied again odd", "first", "tied again", "", "again odd"]
sizes = st.tuples(st.integers(0, 7), st.integers(1, 3))


def test_the_comparison_fails_where_a_cross_term_is_missing():
    J, dense = make(kinds="tied again")
    alone = sum(nj.Jacobian(J.parameters, J.output_space, J.y, [block], J.coverage).gram() for block in J.blocks)
    with pytest.raises(AssertionError):
        close(alone, dense @ dense.T)


@given(sizes, st.sampled_from(CASES), st.sampled_from([np.float32, np.float64]), st.integers(1, 3))
def test_gram(size, kinds, dtype, threads):
    J, dense = make(*size, dtype=dtype, kinds=kinds)
    G = J.gram(threads=threads)
    assert G.dtype == dtype
    close(G, dense @ dense.T, dtype)
    np.testing.assert_array_equal(G, G.T)


@given(sizes, sizes, st.sampled_from(CASES))
def test_gram_with_another_jacobian(size, other_size, kinds):
    J, dense = make(*size, kinds=kinds)
    K, other = make(*other_size, seed=1, kinds=kinds)
    close(J.gram(K), dense @ other.T)


@pytest.mark.parametrize(
    ("kinds", "others"), [("first bias", "tied again"), ("first tied odd", "first"), ("tied", "tied again")]
)
def test_gram_with_a_jacobian_made_of_other_blocks(kinds, others):
    J, dense = make(kinds=kinds)
    K, other = make(3, 1, seed=1, kinds=others)
    close(J.gram(K), dense @ other.T)
    close(K.gram(J), other @ dense.T)


def test_gram_does_not_depend_on_its_tiles(monkeypatch):
    J, dense = make(n=23)
    whole = J.gram()
    monkeypatch.setattr(algebra, "_SMALL_TILE", 64)
    close(J.gram(threads=3), whole)
    close(J.gram(J[3:8]), dense @ dense[6:16].T)
    np.testing.assert_array_equal(J.gram(), J.gram().T)


def test_gram_writes_into_out_and_sums_in_the_dtype_asked_for():
    J, dense = make(n=6, dtype=np.float32)
    out = np.full((24, 12), np.nan)[::-2, :].T[::1].T  # any strides
    assert J.gram(out=out) is out
    close(out, dense @ dense.T)
    close(J.gram(dtype="float64"), dense @ dense.T)  # double precision, from factors in single
    with pytest.raises(nj.ShapeError, match="Gram matrix"):
        J.gram(out=np.empty((3, 3)))
    with pytest.raises(nj.DtypeError):
        J.gram(dtype=int)
    with pytest.raises(nj.DtypeError, match="another Jacobian"):
        J.gram(np.eye(3))
    with pytest.raises(nj.ShapeError, match="variables"):
        J.gram(J.columns("first"))


@pytest.mark.parametrize("kinds", ["first tied odd", "tied again"])
def test_gram_takes_a_tenth_more_memory_than_its_result(kinds):
    shapes = {"first": (60, 50), "bias": (3,), "tied": (50, 40), "odd": (70,)}
    J, _ = make(n=400, l=10, kinds=kinds, shapes=shapes, dtype=np.float32)
    result = J.gram()  # once before, so that what is made once does not count
    tracemalloc.start()
    try:
        J.gram(out=result)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= max(0.1 * result.nbytes, 4e6)


@given(sizes, st.sampled_from(CASES), st.permutations(range(3)), st.integers(1, 3), st.sampled_from([1, 200, None]))
def test_blocks_fill_memory_of_any_order_by_tiles_of_any_size(size, kinds, order, threads, tile_bytes):
    J, dense = make(*size, kinds=kinds)
    shape = (*size, J.m)
    memory = np.full([shape[axis] for axis in order], np.nan)
    out = memory.transpose(np.argsort(order))
    materialise.fill(J.blocks, J.cover, out, threads=threads, tile_bytes=tile_bytes, inline_bytes=0)
    close(out.reshape(dense.shape), dense)


@given(sizes, st.sampled_from(CASES), st.sampled_from([np.float32, np.float64]))
def test_normal(size, kinds, dtype):
    J, dense = make(*size, dtype=dtype, kinds=kinds)
    N = J.normal()
    assert N.dtype == dtype
    close(N, dense.T @ dense, dtype)
    np.testing.assert_array_equal(N, N.T)


@pytest.mark.parametrize("kinds", ["first tied odd", "tied again", "first"])
def test_column_norms_with_weights(kinds):
    J, dense = make(kinds=kinds)
    w = np.linspace(0, 2, J.shape[0])
    expected = np.sum(w[:, None] * dense.reshape(J.shape) ** 2, axis=0)
    np.testing.assert_allclose(J.column_norms(squared=True, weights=w), expected, rtol=1e-12)
    np.testing.assert_allclose(J.column_norms(weights=w.reshape(J.n, J.l)), np.sqrt(expected), rtol=1e-12)
    np.testing.assert_allclose(J.column_norms(True, w), np.diag(J.normal(w)), rtol=1e-12)
    with pytest.raises(nj.DataError, match="must not be negative"):
        J.column_norms(weights=-w)
    with pytest.raises(nj.ShapeError, match="weights"):
        J.column_norms(weights=w[1:])


@pytest.mark.parametrize("form", ["rows", "cube", "samples"])
@pytest.mark.parametrize("sign", ["positive", "mixed", "zero"])
def test_normal_with_weights(form, sign):
    J, dense = make(n=7)
    w = np.random.default_rng(2).normal(size=7 if form == "samples" else (7, 2))
    w = np.abs(w) if sign == "positive" else 0 * w if sign == "zero" else w
    rows = np.repeat(w, 2) if form == "samples" else w.reshape(-1)
    N = J.normal(rows if form == "rows" else w)
    close(N, dense.T @ np.diag(rows) @ dense)
    np.testing.assert_array_equal(N, N.T)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "longdouble"])
def test_normal_in_any_precision_and_any_tiles(dtype, monkeypatch):
    monkeypatch.setattr(algebra, "_LARGE_TILE", 1)
    J, dense = make(n=7, dtype=np.float32)
    N = J.normal(dtype=dtype)
    assert N.dtype == np.dtype(dtype)
    np.testing.assert_allclose(N, dense.T @ dense, atol=0.2 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("side", [1, 4, 1000])
def test_normal_is_shared_out_in_tiles_of_columns(threads, side, monkeypatch):
    monkeypatch.setattr(normal, "_SHARED_WORK", 0)
    monkeypatch.setattr(normal, "_SIDE", side)
    J, dense = make(n=11)
    w = np.random.default_rng(2).normal(size=J.shape[0])
    for work in (None, 6000, 1):
        total = normal.NormalSum(J.m, np.float64, threads, work)
        total.add(J.parts, w.reshape(J.n, J.l))
        close(total.result(), dense.T @ np.diag(w) @ dense)


@pytest.mark.parametrize("gathered", [0, 1, 7, 64])
@pytest.mark.parametrize("weighted", [False, True])
def test_normal_gathers_the_rows_of_small_parts(gathered, weighted, monkeypatch):
    monkeypatch.setattr(normal, "_GATHERED", gathered)
    updates = []
    add_normal = normal._add_normal
    monkeypatch.setattr(normal, "_add_normal", lambda rows, *more: updates.append(len(rows)) or add_normal(rows, *more))
    J, dense = make(n=9)
    w = np.random.default_rng(2).normal(size=J.shape[0])
    total = normal.NormalSum(J.m, np.float64, 2)
    for i, j in ((0, 1), (1, 2), (2, 7), (7, 7), (7, 9)):
        total.add(J[i:j].parts, w.reshape(J.n, J.l)[i:j] if weighted else None)
    close(total.result(), dense.T @ (w[:, None] * dense if weighted else dense))
    if not weighted:
        assert updates == {0: [2, 2, 10, 4], 1: [2, 2, 10, 4], 7: [10, 8], 64: [18]}[gathered]


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        (np.ones(3), nj.ShapeError),
        (np.ones((2, 5)), nj.ShapeError),
        (np.full(5, np.nan), nj.DataError),
        (np.full(5, np.inf), nj.DataError),
        (np.ones(5, complex), nj.DtypeError),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, error):
    J, _ = make()
    with pytest.raises(error, match="weights"):
        J.normal(weights)


@given(sizes, st.sampled_from(CASES), st.sampled_from([np.float32, np.float64]))
def test_norms(size, kinds, dtype):
    J, dense = make(*size, dtype=dtype, kinds=kinds)
    for actual, axis in ((J.row_norms(), 1), (J.column_norms(), 0)):
        assert actual.dtype == dtype
        close(actual, np.linalg.norm(dense, axis=axis), dtype)
    close(J.row_norms(squared=True), (dense**2).sum(axis=1), dtype)
    close(J.column_norms(squared=True), (dense**2).sum(axis=0), dtype)


# ---- least squares: few rows, many rows, square; full rank or not


def regularised(dense, b, damping):
    """Oracle: the augmented system [J; sqrt(damping)] x ≈ [b; 0]."""
    m = dense.shape[1]
    augmented = np.vstack([dense, np.sqrt(damping) * np.eye(m)])
    return np.linalg.lstsq(augmented, np.concatenate([b, np.zeros(m)]))[0]


@pytest.mark.parametrize("damping", [0.0, 1e-8, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("kinds", ["first bias tied odd", "first bias tied again odd", "odd", "bias", ""])
@pytest.mark.parametrize(("n", "l"), [(1, 1), (5, 2), (40, 3)])
def test_lstsq(n, l, kinds, damping):
    J, dense = make(n, l, kinds=kinds)
    b = np.random.default_rng(1).normal(size=n * l)
    wanted = regularised(dense, b, damping)
    for form in (b, b.reshape(n, l)):
        x = J.lstsq(form, damping)
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, wanted, rtol=1e-8, atol=1e-8 * np.abs(wanted).max(initial=0) + 1e-15)


@given(sizes, st.sampled_from(CASES), st.sampled_from([0.0, 1e-2]))
def test_lstsq_of_any_rank(size, kinds, damping):
    J, dense = make(*size, kinds=kinds)
    b = np.random.default_rng(1).normal(size=J.shape[0])
    x = J.lstsq(b, damping)
    wanted = regularised(dense, b, damping) if len(b) else np.zeros(J.m)
    np.testing.assert_allclose(x, wanted, atol=1e-8 * (1 + np.abs(wanted).max(initial=0)))


@pytest.mark.parametrize("scale", [1e-3, 1e-6, 1e-9, 0.0])
@pytest.mark.parametrize("n", [10, 100])
def test_lstsq_badly_conditioned(n, scale):
    _, dense = make(n, 1, kinds="first bias")
    nearly = np.array(dense)
    nearly[1] = nearly[0] + scale * nearly[1]  # two rows nearly alike; with many rows make two columns so
    nearly[:, 1] = nearly[:, 0] + scale * nearly[:, 1]
    site = UseSite(0, "all", SiteForm.DENSE, np.arange(27).reshape(1, 27, 1))
    space = ParameterSpace(lay_out(["all"], [(nearly.shape[1],)], ["float64"]))
    site = UseSite(0, "all", SiteForm.DENSE, np.arange(nearly.shape[1]).reshape(1, -1, 1))
    blocks = factor.plan([site], space).build([SiteValues(dense=nearly[:, None, :])])
    K = Jacobian(space, OutputSpace.flat(1), np.zeros((n, 1)), blocks, Coverage())
    b = nearly @ np.random.default_rng(3).normal(size=nearly.shape[1])
    wanted = np.linalg.lstsq(nearly, b)[0]
    x = K.lstsq(b)
    np.testing.assert_allclose(nearly @ x, b, atol=1e-8 * np.abs(b).max())
    tolerance = 1e-8 if scale in (1e-3, 0.0) else 1e-6
    np.testing.assert_allclose(x, wanted, atol=tolerance * np.abs(wanted).max())
    for damping in (1e-12, 1e-4):
        residual = nearly.T @ (b - nearly @ K.lstsq(b, damping)) - damping * K.lstsq(b, damping)
        assert np.abs(residual).max() <= 1e-10 * np.abs(nearly.T @ b).max()


def test_lstsq_too_large_to_factorise(monkeypatch):
    J, dense = make(8, 2)
    b = np.random.default_rng(1).normal(size=16)
    monkeypatch.setattr(algebra, "DIRECT_SIZE", 3)
    for damping in (0.0, 0.5):
        np.testing.assert_allclose(J.lstsq(b, damping), regularised(dense, b, damping), atol=1e-8)


def test_lstsq_badly_conditioned_and_too_large_to_form(monkeypatch):
    J, dense = make(8, 2, kinds="odd")
    monkeypatch.setattr(algebra, "DENSE_BYTES", 0)
    monkeypatch.setattr(algebra, "_SAFE_CONDITION", 2.0)
    b = np.random.default_rng(1).normal(size=16)
    np.testing.assert_allclose(J.lstsq(b), regularised(dense, b, 0.0), atol=1e-8)


def test_lstsq_works_in_double_precision_for_single_precision_factors():
    J, dense = make(5, 2, dtype=np.float32)
    b = np.random.default_rng(1).normal(size=10)
    for damping in (0.0, 1e-3):
        np.testing.assert_allclose(J.lstsq(b, damping), regularised(dense, b, damping), atol=1e-8)


@pytest.mark.parametrize(
    ("b", "damping", "error", "words"),
    [
        (np.ones(3), 0.0, nj.ShapeError, r"\(10,\) or \(5, 2\)"),
        (np.ones((2, 5)), 0.0, nj.ShapeError, "b must"),
        (np.full(10, np.nan), 0.0, nj.DataError, "finite"),
        (np.ones(10, complex), 0.0, nj.DtypeError, "real"),
        (np.ones(10), -1.0, nj.DataError, "damping"),
        (np.ones(10), np.nan, nj.DataError, "damping"),
        (np.ones(10), np.inf, nj.DataError, "damping"),
        (np.ones(10), "much", nj.DtypeError, "damping"),
    ],
)
def test_lstsq_refuses_what_makes_no_sense(b, damping, error, words):
    J, _ = make()
    with pytest.raises(error, match=words):
        J.lstsq(b, damping)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("n", [2, 20])
def test_lstsq_says_that_the_jacobian_is_not_finite(n, bad):
    J, _ = make(n, 1, kinds="odd")
    values = J.blocks[0].values.copy()
    values[1, 0, 2] = bad
    K = Jacobian(J.parameters, J.output_space, J.y, [type(J.blocks[0])(values, J.blocks[0].placement)], J.coverage)
    with np.errstate(invalid="ignore"), pytest.raises(nj.DataError, match="not finite"):
        K.lstsq(np.ones(n))


def test_a_levenberg_marquardt_step_with_many_parameters():
    shapes = {"first": (40, 30), "tied": (30, 20)}
    J, dense = make(30, 1, kinds="first tied", shapes=shapes, dtype=np.float32)
    b = np.random.default_rng(1).normal(size=30)
    np.testing.assert_allclose(J.lstsq(b, 1e-4), regularised(dense, b, 1e-4), atol=1e-8)


@pytest.mark.parametrize("size", [0, 1, 5, 256, 600])
def test_mirror(size):
    square = np.random.default_rng(0).normal(size=(size, size))
    wanted = np.tril(square) + np.tril(square, -1).T
    algebra.mirror(square)
    np.testing.assert_array_equal(square, wanted)


def badly_conditioned(rows, columns, damping, seed=0):
    """J with singular values from 1 to 1e-8 and of rank 7, b, and the best x of smallest norm."""
    random = np.random.default_rng(seed)
    U, V = (np.linalg.qr(random.normal(size=(size, size)))[0] for size in (rows, columns))
    s = np.geomspace(1, 1e-8, 7)
    b = random.normal(size=rows)
    return U[:, :7] * s @ V[:, :7].T, b, V[:, :7] @ (s / (s**2 + damping) * (U[:, :7].T @ b))


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (20, 20)])
@pytest.mark.parametrize("damping", [0.0, 1e-12, 1e-3])
def test_least_squares_by_products_alone_finds_what_is_hardly_determined(shape, damping):
    dense, b, x = badly_conditioned(*shape, damping)
    found = algebra.solve(aslinearoperator(dense), b, damping, limit=0)
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-5 * np.abs(x).max())


def test_least_squares_by_products_says_where_it_has_not_converged(monkeypatch):
    dense, b, _ = badly_conditioned(40, 12, 0)
    lsmr = algebra.lsmr
    monkeypatch.setattr(algebra, "lsmr", lambda *given, **options: lsmr(*given, **(options | {"maxiter": 3})))
    with pytest.warns(RuntimeWarning, match=r"12 × 12 is beyond its memory, stopped after 3 steps"):
        algebra.solve(aslinearoperator(dense), b, 0, limit=0)
