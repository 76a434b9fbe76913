"""The Jacobian against the formula of the package docstring, recomputed entry by entry with plain loops."""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st

import netjac as nj
from netjac import factor
from netjac.examples import linear_layer
from netjac.jacobian import Jacobian
from netjac.sites import Coverage, CoverageEntry, SiteForm, SiteValues, Treatment, UseSite
from netjac.spaces import OutputSpace, ParameterSpace, lay_out
from netjac.transposed import TransposedJacobian

VARIABLES = {
    "dense/kernel": (5, 4),
    "dense/bias": (4,),
    "sequence/kernel": (3, 6),
    "unreached": (2, 2),
    "groups": (2, 3, 2),
    "table": (6, 2),
    "odd": (7,),
    "tied": (4, 3),
    "scale": (3,),
}


def site_list(n, l, random):
    """Use sites of every kind, with random values: (name, form, entries, cotangent, values)."""

    def normal(*shape):
        return random.normal(size=shape)

    shared = normal(n, l, 1, 4)
    tied = np.arange(12).reshape(4, 3)
    return [
        ("dense/kernel", SiteForm.OUTER, np.arange(20).reshape(1, 5, 4), 0, {"A": normal(n, 1, 1, 5), "D": shared}),
        ("dense/bias", SiteForm.OUTER, np.arange(4).reshape(1, 1, 4), 0, {"D": shared}),
        (  # positions that share the weight
            "sequence/kernel",
            SiteForm.OUTER,
            np.arange(18).reshape(1, 3, 6),
            1,
            {"A": normal(n, 2, 1, 3), "D": normal(n, l, 2, 6)},
        ),
        (
            "groups",
            SiteForm.OUTER,
            np.arange(12).reshape(2, 3, 2),
            2,
            {"A": normal(n, 1, 2, 3), "D": normal(n, l, 1, 4)},
        ),
        (
            "table",
            SiteForm.EMBEDDING,
            np.arange(12).reshape(1, 6, 2),
            3,
            {"indices": random.integers(0, 6, (n, 3)), "D": normal(n, l, 3, 2)},
        ),
        ("odd", SiteForm.DENSE, np.array([1, 3, 4, 6]).reshape(1, 4, 1), -1, {"dense": normal(n, l, 4)}),
        ("tied", SiteForm.OUTER, tied[None], 4, {"A": normal(n, 1, 1, 4), "D": normal(n, l, 1, 3)}),
        ("tied", SiteForm.OUTER, tied.T[None], 5, {"A": normal(n, 1, 1, 3), "D": normal(n, l, 1, 4)}),  # transposed
        ("tied", SiteForm.OUTER, tied[None, 1:3], 6, {"A": normal(n, 1, 1, 2), "D": normal(n, l, 1, 3)}),  # sliced
        (  # repeated and scaled
            "scale",
            SiteForm.OUTER,
            np.array([0, 1, 2, 0, 1, 2]).reshape(1, 1, 6),
            7,
            {"A": normal(n, 2, 1, 1), "D": normal(n, l, 2, 6), "scale": normal(1, 1, 6)},
        ),
    ]


def make(n=4, l=2, dtype=np.float64, seed=0, only=None):
    """A Jacobian built through `netjac.factor`, and what it must be, (n, l, m) float64, by naive loops."""
    random = np.random.default_rng(seed)
    space = ParameterSpace(lay_out(list(VARIABLES), list(VARIABLES.values()), [np.dtype(dtype).name] * len(VARIABLES)))
    sites, values, entries, expected = [], [], [], np.zeros((n, l, space.size))
    for name, form, places, cotangent, arrays in site_list(n, l, random):
        arrays = {key: a if key == "indices" else a.astype(dtype) for key, a in arrays.items()}
        if only is not None and name not in only:
            continue
        sites.append(UseSite(space.find(name), name, form, places, cotangent))
        values.append(SiteValues(**arrays))
        entries.append(CoverageEntry(name, VARIABLES[name], Treatment.FACTORED, name, "MatMul"))
        add_formula(expected, space[name].start, places, arrays)
    y = random.normal(size=(n, l)).astype(dtype)
    blocks = factor.plan(sites, space).build(values)
    return Jacobian(space, OutputSpace.flat(l), y, blocks, Coverage(tuple(entries))), expected


def add_formula(expected, start, places, arrays):
    """J[n, l, entry of (g, k, c)] += sum_p A[n, p, g, k] · D[n, l, p, g, c] · scale[g, k, c], one term at a time."""
    n, l, _ = expected.shape
    groups, ks, cs = places.shape
    for i, j, g, k, c in np.ndindex(n, l, groups, ks, cs):
        column = start + places[g, k, c]
        if "dense" in arrays:
            expected[i, j, column] += arrays["dense"][i, j, (g * ks + k) * cs + c]
            continue
        for p in range(arrays["D"].shape[2]):
            if "indices" in arrays:
                a = float(arrays["indices"][i, p] == k)
            else:
                a = float(arrays["A"][i, p, g, k]) if "A" in arrays else 1.0
            scale = float(arrays["scale"][g, k, c]) if "scale" in arrays else 1.0
            expected[i, j, column] += a * float(arrays["D"][i, j, p, g * cs + c]) * scale


def check(J, expected, dtype=np.float64):
    """Assert that J is ``expected`` (n, l, m) in every form an operator is used in."""
    n, l, m = expected.shape
    dense = expected.reshape(n * l, m)
    tolerance = {"rtol": 0, "atol": (2e-5 if dtype == np.float32 else 1e-12) * max(1.0, np.abs(dense).max(initial=0))}
    assert J.shape == dense.shape
    assert J.dtype == dtype
    np.testing.assert_allclose(np.asarray(J), dense, **tolerance)
    random = np.random.default_rng(1)
    for operator, matrix in ((J, dense), (J.T, dense.T), (J.H, dense.T), (J.T.T, dense)):
        columns = matrix.shape[1]
        for x in (
            random.normal(size=columns).astype(dtype),
            random.normal(size=columns),
            random.normal(size=(columns, 1)),
            random.normal(size=(columns, 3)),
            np.asfortranarray(random.normal(size=(columns, 3))),
            random.normal(size=(2 * columns, 6))[::2, ::-2],
            random.integers(-3, 4, (columns, 2)),
            random.normal(size=columns) > 0,
            random.normal(size=columns) + 1j * random.normal(size=columns),
            np.zeros((columns, 0)),
        ):
            wanted = matrix.astype(dtype) @ x
            products = [operator @ x, operator.dot(x), operator * x]
            products.append(operator.matvec(x) if x.ndim == 1 or x.shape[1] == 1 else operator.matmat(x))
            back = operator.T
            products.append(back.rmatvec(x) if x.ndim == 1 or x.shape[1] == 1 else back.rmatmat(x))
            products.append((x.T @ operator.T).T)
            for product in products:
                np.testing.assert_allclose(product, wanted, **{**tolerance, "atol": 30 * tolerance["atol"]})
                assert product.shape == wanted.shape
                assert product.dtype == wanted.dtype


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("n", "l"), [(4, 2), (1, 1), (1, 3), (5, 1), (0, 2)])
def test_equals_the_specification_entry_by_entry(n, l, dtype):
    J, expected = make(n, l, dtype)
    check(J, expected, dtype)


def test_the_comparison_fails_for_one_wrong_entry():
    J, expected = make()
    expected[2, 1, 7] += 1e-6
    with pytest.raises(AssertionError):
        check(J, expected)


def test_no_sites_at_all_gives_zeros():
    J, expected = make(only=())
    check(J, expected)
    assert J.nbytes == 0


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 4),
    st.integers(1, 3),
    st.permutations("nlm"),
    st.sampled_from(["{} {} {}", "({} {}) {}", "{} ({} {})", "({} {} {})"]),
    st.sets(st.sampled_from(list(VARIABLES))),
    st.integers(1, 3),
    st.sampled_from(["float32", "float64"]),
)
def test_every_layout_of_any_selection_of_sites(n, l, letters, grouping, only, threads, dtype):
    J, expected = make(n, l, only=only)
    layout = grouping.format(*letters)
    array = J.to_array(layout, threads=threads, dtype=dtype)
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    wanted = rearrange(expected, f"n l m -> {layout}")
    np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-5 if dtype == "float32" else 1e-12)
    assert array.shape == wanted.shape


def test_out_is_written_in_place_whatever_its_strides():
    J, expected = make()
    memory = np.full((3, 2 * J.m, J.n * J.l), np.nan)
    out = memory[1, ::-2].T  # (n*l, m), columns backwards and apart
    assert J.to_array(out=out) is out
    np.testing.assert_allclose(out, expected.reshape(J.shape), atol=1e-12)
    assert np.isnan(memory[1, ::2]).all()
    assert np.isnan(memory[[0, 2]]).all()


def test_out_decides_the_dtype_when_none_is_named():
    J, expected = make(dtype=np.float32)
    out = np.empty((J.n, J.l, J.m))
    J.to_array("n l m", out=out)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    half = J.to_array(dtype=np.float16)
    np.testing.assert_allclose(half, expected.reshape(J.shape), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"out": np.empty((3, 3))}, nj.ShapeError, r"\(8, 92\)"),
        ({"out": np.empty((8, 92), int)}, nj.DtypeError, "int64"),
        ({"out": np.empty((8, 92), complex)}, nj.DtypeError, "complex128"),
        ({"out": np.empty((8, 92)), "dtype": "float32"}, nj.DtypeError, "float32"),
        ({"out": np.broadcast_to(0.0, (8, 92))}, nj.DataError, "read-only"),
        ({"out": [[0.0]]}, nj.DtypeError, "NumPy array"),
        ({"dtype": int}, nj.DtypeError, "int64"),
        ({"dtype": "complex64"}, nj.DtypeError, "complex64"),
        ({"dtype": "no such"}, nj.DtypeError, "no such"),
        ({"layout": "(n k) m"}, nj.LayoutError, "'k'"),
        ({"threads": 0}, nj.DataError, "threads"),
        ({"threads": 1.5}, nj.DtypeError, "threads"),
    ],
)
def test_bad_arguments_of_to_array_are_refused_before_any_work(arguments, error, words):
    J, _ = make()
    before = np.array(arguments.get("out", 0.0))
    with pytest.raises(error, match=words):
        J.to_array(**arguments)
    np.testing.assert_array_equal(before, arguments.get("out", 0.0))


def test_numpy_makes_a_matrix_of_it():
    J, expected = make(dtype=np.float32)
    assert np.asarray(J).dtype == np.float32
    assert np.asarray(J, dtype=np.float64).dtype == np.float64
    np.testing.assert_allclose(np.asarray(J.T), expected.reshape(J.shape).T, atol=1e-5)


def test_products_with_other_things():
    J, expected = make()
    dense = expected.reshape(J.shape)
    v = np.arange(J.m) / J.m
    np.testing.assert_allclose(J @ v.tolist(), dense @ v)
    sparse = scipy.sparse.random_array((J.m, 3), density=0.3, rng=np.random.default_rng(0))
    np.testing.assert_allclose(J @ sparse, dense @ sparse.toarray())
    for operator, matrix in (
        (2 * J, 2 * dense),
        (J + J, 2 * dense),
        (J - 3 * J, -2 * dense),
        (J @ J.T, dense @ dense.T),
        (J.T @ J, dense.T @ dense),
        (scipy.sparse.linalg.aslinearoperator(J), dense),
    ):
        identity = np.eye(matrix.shape[1])
        np.testing.assert_allclose(operator @ identity, matrix, atol=1e-12)
        np.testing.assert_allclose(operator.H @ np.eye(matrix.shape[0]), matrix.T, atol=1e-12)


@pytest.mark.parametrize("shape", [(3,), (91, 2), (93,), (92, 2, 2), ()])
def test_operands_of_wrong_shape_are_refused(shape):
    J, _ = make()
    for operator in (J, J.T):
        with pytest.raises(ValueError, match=r"shape|expected|mismatch|Scalar"):
            operator @ np.zeros(shape)


def test_operands_that_are_not_numbers_are_refused():
    J, _ = make()
    with pytest.raises((TypeError, ValueError)):
        J @ np.array(["a"] * J.m)
    with pytest.raises(TypeError):
        J @ np.array([None] * J.m)


def test_works_in_scipys_solvers():
    J, expected = make()
    dense = expected.reshape(J.shape)
    b = np.arange(J.shape[0], dtype=float)
    wanted = np.linalg.lstsq(dense, b)[0]
    start = np.ones(J.shape[0])
    np.testing.assert_allclose(scipy.sparse.linalg.lsmr(J, b, atol=1e-14, btol=1e-14)[0], wanted, atol=1e-8)
    np.testing.assert_allclose(scipy.sparse.linalg.lsqr(J, b, atol=1e-14, btol=1e-14)[0], wanted, atol=1e-8)
    values = scipy.sparse.linalg.svds(J, k=3, v0=start, return_singular_vectors=False)
    singular = np.linalg.svd(dense, compute_uv=False)
    np.testing.assert_allclose(np.sort(values), np.sort(singular[:3]))
    largest = scipy.sparse.linalg.eigsh(J @ J.T, k=2, v0=start, return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(largest), np.sort(singular[:2] ** 2))


def test_columns_select_variables_in_the_order_given():
    J, expected = make()
    for names in (
        ["tied"],
        ["scale", "unreached", "dense/bias"],
        ["dense/kernel", "odd"],
        [],
        list(VARIABLES),
    ):
        part = J.columns(names)
        index = [i for name in names for i in range(J.parameters[name].start, J.parameters[name].stop)]
        check(part, expected[:, :, index])
        assert part.parameters.names == tuple(names)
        assert {entry.variable for entry in part.coverage.entries} == set(names) - {"unreached"}
    check(J.columns("bias"), expected[:, :, 20:24])
    check(J.columns("dense/*"), expected[:, :, :24])
    check(J.columns(["dense/b*", "dense/k*"]), expected[:, :, [*range(20, 24), *range(20)]])
    with pytest.raises(nj.NameLookupError, match=r"'hidden/\*' fits no parameter; they are called 'dense/kernel'"):
        J.columns("hidden/*")
    with pytest.raises(nj.NameLookupError, match=r"no parameter is called 'nothing'.*'dense/kernel'"):
        J.columns("nothing")
    with pytest.raises(nj.NameLookupError, match="fits several"):
        J.columns("kernel")
    with pytest.raises(nj.NameLookupError, match="twice"):
        J.columns(["tied", "tied"])
    for wrong in (3, None, b"", b"bias", ["tied", 3], [b"bias"], {"tied": 1}, np.arange(2)):
        with pytest.raises(nj.DtypeError, match=r"J\.columns\(names\) takes .*got .*J\.parameters\.names lists them"):
            J.columns(wrong)


@pytest.mark.parametrize(
    ("samples", "index"),
    [
        (1, [1]),
        (-1, [3]),
        (np.int64(2), [2]),
        (np.array(2), [2]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, -2), [3, 1]),
        (slice(9, 12), []),
        ([0, -1, 0], [0, 3, 0]),
        (np.array([3, 1], np.uint8), [3, 1]),
        ([], []),
        (np.array([], int), []),
        (np.array([True, False, False, True]), [0, 3]),
        ([False, True, False, False], [1]),
        (range(2), [0, 1]),
    ],
)
def test_samples_are_selected_as_numpy_selects(samples, index):
    J, expected = make()
    part = J[samples]
    check(part, expected[index])
    np.testing.assert_array_equal(part.y, J.y[index])


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        (4, nj.SampleIndexError),
        (-5, nj.SampleIndexError),
        ([0, 9], nj.SampleIndexError),
        (np.array([True, False]), nj.SampleIndexError),
        (True, TypeError),
        (1.0, TypeError),
        ("dense/kernel", TypeError),
        (None, TypeError),
        (..., TypeError),
        ((0, 1), TypeError),
        ([[0, 1]], TypeError),
        ([[0], [0, 1]], TypeError),
        ([0.5], TypeError),
    ],
)
def test_other_selections_are_refused(samples, error):
    J, _ = make()
    with pytest.raises(error, match="sample") as raised:
        J[samples]
    assert isinstance(raised.value, nj.NetjacError)


def test_a_sample_out_of_range_is_an_index_error_that_tells_how_many_there_are():
    J, _ = make()
    with pytest.raises(IndexError, match="sample 9 is out of range: this Jacobian has 4 samples"):
        J[9]


def test_iterating_gives_one_jacobian_a_sample():
    J, expected = make()
    for sample, wanted in zip(J, expected, strict=True):
        np.testing.assert_allclose(np.asarray(sample), wanted, atol=1e-12)


@pytest.mark.parametrize("q", [0, 1, 3])
def test_scaled_combines_the_rows_of_each_sample(q):
    J, expected = make()
    B = np.random.default_rng(5).normal(size=(J.n, q, J.l))
    part = J.scaled(B)
    check(part, np.einsum("nql,nlm->nqm", B, expected))
    np.testing.assert_allclose(part.y, np.einsum("nql,nl->nq", B, J.y))
    assert part.output_space.size == q


def test_scaled_promotes_and_refuses():
    J, expected = make(dtype=np.float32)
    check(J.scaled(np.ones((4, 1, 2), np.float32)), expected.sum(axis=1, keepdims=True), np.float32)
    assert J.scaled(np.ones((4, 1, 2))).dtype == np.float64
    assert J.scaled(np.ones((4, 1, 2), int)).dtype == np.float64
    with pytest.raises(nj.ShapeError, match=r"B\[:, None, :\]"):
        J.scaled(np.ones((4, 2)))
    with pytest.raises(nj.ShapeError, match=r"\(4, q, 2\)"):
        J.scaled(np.ones((4, 2, 3)))
    with pytest.raises(nj.DtypeError):
        J.scaled(np.ones((4, 1, 2), complex))


def test_the_external_chain_gives_the_gradient():
    J, expected = make()
    outside = np.random.default_rng(3).normal(size=(J.n, J.l))  # d value / d outputs
    wanted = np.einsum("nl,nlm->m", outside, expected)
    np.testing.assert_allclose(J.T @ outside.reshape(-1), wanted)
    np.testing.assert_allclose(J.scaled(outside[:, None, :]).T @ np.ones(J.n), wanted)


def test_outputs_come_in_the_models_structure_and_read_only():
    J, _ = make(l=5)
    space = OutputSpace(lay_out(["a", "b"], [(2,), (3, 1)], ["float64"] * 2), {"first": 0, "rest": [1]})
    again = Jacobian(J.parameters, space, J.y, J.blocks, J.coverage)
    np.testing.assert_array_equal(again.outputs["first"], J.y[:, :2])
    np.testing.assert_array_equal(again.outputs["rest"][0], J.y[:, 2:].reshape(J.n, 3, 1))
    for array in (again.y, again.outputs["first"], again.outputs["rest"][0]):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_the_constructor_refuses_what_does_not_fit():
    J, _ = make()
    with pytest.raises(nj.ShapeError, match=r"\(n, 2\)"):
        Jacobian(J.parameters, J.output_space, np.zeros((4, 3)), J.blocks, J.coverage)
    with pytest.raises(nj.ShapeError, match="blocks"):
        Jacobian(J.parameters, J.output_space, np.zeros((3, 2)), J.blocks, J.coverage)
    with pytest.raises(nj.DtypeError):
        Jacobian(J.parameters, J.output_space, np.zeros((4, 2), int), J.blocks, J.coverage)
    y = np.zeros((4, 2))
    Jacobian(J.parameters, J.output_space, y, J.blocks, J.coverage)
    y[...] = 1  # the caller's array stays writeable


def test_pickles_and_copies():
    J, expected = make()
    for again in (pickle.loads(pickle.dumps(J)), copy.copy(J), copy.deepcopy(J), pickle.loads(pickle.dumps(J[1:]))):
        check(again, expected[J.n - again.n :])
        assert not again.y.flags.writeable
        assert again.coverage == J.coverage
        assert again.parameters.names == J.parameters.names
    check(pickle.loads(pickle.dumps(J.T)).T, expected)


def test_a_pickle_holds_no_live_variables():
    J, _ = make()
    live = ParameterSpace(J.parameters.segments, [object() for _ in J.parameters.segments])
    again = pickle.loads(pickle.dumps(Jacobian(live, J.output_space, J.y, J.blocks, J.coverage)))
    assert again.parameters.variables is None


def test_repr_and_sizes():
    J, _ = make()
    text = repr(J)
    for words in ("4 samples", "2 outputs", "92 parameters", "(8, 92)", "float64", "factored", "dense"):
        assert words in text
    assert J.nbytes == sum(block.nbytes for block in J.blocks)
    assert "TransposedJacobian" in repr(J.T)
    assert isinstance(J.T, TransposedJacobian)


def test_nothing_changes_the_blocks():
    J, expected = make()
    arrays = [a for block in J.blocks for a in vars(block).values() if isinstance(a, np.ndarray)]
    before = copy.deepcopy(arrays)
    for array in arrays:
        array.flags.writeable = False
    J[:2].to_array(dtype="float32")
    J.columns("tied").gram()
    J.gram(J[1:])
    J.normal(np.ones(J.n))
    J.row_norms()
    J.column_norms()
    J.lstsq(np.ones(J.shape[0]), 0.1)
    J.scaled(expected[:, :1, :2])
    np.testing.assert_equal(arrays, before)


def network(weights, x):
    """A 3-4-2 network, one sample at a time, one number at a time; works on complex numbers too."""
    rows = []
    for sample in x:
        layer = list(sample)
        for kernel, bias in (weights[:2], weights[2:]):
            sums = [bias[c] + sum(layer[k] * kernel[k, c] for k in range(len(layer))) for c in range(len(bias))]
            layer = [np.tanh(s) for s in sums] if kernel is weights[0] else sums
        rows.append(layer)
    return np.array(rows)


def test_a_small_network_against_the_complex_step():
    random = np.random.default_rng(0)
    shapes = [(3, 4), (4,), (4, 2), (2,)]
    weights = [random.normal(size=shape) for shape in shapes]
    x = random.normal(size=(5, 3))
    space = ParameterSpace(lay_out(["k0", "b0", "k1", "b1"], shapes, ["float64"] * 4))

    hidden = np.tanh(x @ weights[0] + weights[1])
    D1 = np.broadcast_to(np.eye(2), (5, 2, 2))  # ∂y/∂z of the last layer
    D0 = (D1 @ weights[2].T) * (1 - hidden**2)[:, None, :]
    sites, values = [], []
    for layer, (A, D) in enumerate(((x, D0), (hidden, D1))):
        k, c = shapes[2 * layer]
        sites.append(UseSite(2 * layer, "MatMul", SiteForm.OUTER, np.arange(k * c).reshape(1, k, c), layer))
        sites.append(UseSite(2 * layer + 1, "BiasAdd", SiteForm.OUTER, np.arange(c).reshape(1, 1, c), layer))
        values += [SiteValues(A=A[:, None, None, :], D=D[:, :, None, :]), SiteValues(D=D[:, :, None, :])]
    y = network(weights, x)
    J = Jacobian(space, OutputSpace.flat(2), y, factor.plan(sites, space).build(values), Coverage())

    theta = space.ravel(weights)
    expected = np.zeros((5, 2, space.size))
    for column in range(space.size):
        moved = theta.astype(complex)
        moved[column] += 1e-30j
        parts = [moved[segment.slice].reshape(segment.shape) for segment in space]
        expected[:, :, column] = network(parts, x).imag / 1e-30
    check(J, expected)
    np.testing.assert_allclose(J.to_array("(l m) n"), expected.reshape(5, -1).T, atol=1e-13)


RAGGED, MASKED = [[1.0], [2.0, 3.0]], np.ma.masked_equal(np.arange(6.0), 2)
VERBS = {
    "lstsq": lambda J, given: J.lstsq(given),
    "normal": lambda J, given: J.normal(weights=given),
    "column_norms": lambda J, given: J.column_norms(weights=given),
    "scaled": lambda J, given: J.scaled(given),
}


@pytest.mark.parametrize("verb", VERBS)
def test_ragged_and_masked_arrays_are_refused(verb):
    J = linear_layer()
    with pytest.raises(nj.ShapeError, match="do not all have the same length"):
        VERBS[verb](J, RAGGED)
    with pytest.raises(nj.DataError, match="has masked entries"):
        VERBS[verb](J, MASKED)
    if verb == "lstsq":  # nothing of it is masked
        np.testing.assert_array_equal(J.lstsq(np.ma.asarray(np.arange(6.0))), J.lstsq(np.arange(6.0)))
