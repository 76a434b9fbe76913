"""A Jacobian computed tile by tile against the one that is held: every verb, for tiles of every kind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import netjac as nj
from netjac import algebra
from netjac import tiled as tiled_module
from netjac.tensorflow import extractor as extractor_module
from netjac.tensorflow import fallback, symbolic
from netjac.tensorflow.evaluate import CompiledSites
from netjac.tensorflow.evaluator import evaluator, extractor_of
from netjac.tensorflow.extractor import Extractor

L = keras.layers
Network = tuple[Any, Any, list[tf.Variable] | None]


def data(*shape: int, n: int = 5, dtype: str = "float32") -> Any:
    return np.random.default_rng(3).normal(size=(n, *shape)).astype(dtype)


def classifier() -> Network:
    return keras.Sequential([keras.Input((4,)), L.Dense(6, "tanh"), L.Dense(20)]), data(4), None


def few_outputs() -> Network:
    return keras.Sequential([keras.Input((4,)), L.Dense(6, "tanh"), L.Dense(3)]), data(4), None


def double() -> Network:
    layers = [L.Dense(5, "tanh", dtype="float64"), L.Dense(4, dtype="float64")]
    return keras.Sequential([keras.Input((3,), dtype="float64"), *layers]), data(3, dtype="float64"), None


def image_to_image() -> Network:
    layers = [L.Conv2D(3, 3, padding="same", activation="tanh"), L.Conv2D(1, 3, padding="same")]
    return keras.Sequential([keras.Input((5, 4, 2)), *layers]), data(5, 4, 2, n=3), None


def two_outputs() -> Network:
    x = keras.Input((4,))
    h = L.Dense(5, "tanh")(x)
    return keras.Model(x, {"a": L.Dense(2)(h), "b": L.Reshape((3, 2))(L.Dense(6)(h))}), data(4), None


def embedding() -> Network:
    layers = [L.Embedding(50, 4), L.Dense(3, "tanh"), L.Flatten(), L.Dense(4)]
    x = np.random.default_rng(3).integers(0, 50, (5, 6)).astype("int32")
    return keras.Sequential([keras.Input((6,), dtype="int32"), *layers]), x, None


def recurrent() -> Network:
    return keras.Sequential([keras.Input((3, 2)), L.LSTM(4, return_sequences=True)]), data(3, 2, n=4), None


def shared() -> Network:
    w = tf.Variable(data(4, n=4), name="w")
    return lambda x: tf.tanh(x @ w) @ tf.transpose(w), data(4), [w]


def falling_back(outputs: int = 3) -> Network:
    w, v = tf.Variable(data(3, n=4), name="w"), tf.Variable(data(outputs, n=3), name="v")
    b = tf.Variable(data(n=outputs), name="b")
    return lambda x: tf.tanh(x @ (w @ v)) + b, data(4), [w, v, b]


def falling_back_with_many_outputs() -> Network:
    return falling_back(fallback.UNROLLED_ROWS + 2)


NETWORKS: dict[str, Callable[[], Network]] = {  # each built once: tracing is what takes long
    build.__name__: cache(build)
    for build in (
        classifier,
        few_outputs,
        double,
        image_to_image,
        two_outputs,
        embedding,
        recurrent,
        shared,
        falling_back,
        falling_back_with_many_outputs,
    )
}

# How many samples and outputs (of l) the budget has room for.
BUDGETS: dict[str, Callable[[int], tuple[int, int]]] = {
    "samples": lambda l: (2, l),
    "outputs": lambda l: (1, max(1, l // 2)),
    "least": lambda l: (1, 1),
}


def budget(network: Network, samples: int, outputs: int) -> int:
    """Bytes that tiles of this size need, or the least that works."""
    model, x, variables = network
    with pytest.raises(nj.MemoryBudgetError) as caught:
        nj.jacobian(model, x[:1], variables=variables, memory=1)
    return max(extractor_of(*network)[0].footprint.need(samples, outputs), caught.value.least)


def tiled(network: Network, room: str) -> tuple[nj.TiledJacobian, nj.Jacobian]:
    model, x, variables = network
    held = nj.jacobian(model, x, variables=variables)
    J = nj.jacobian(model, x, variables=variables, memory=budget(network, *BUDGETS[room](held.l)))
    assert isinstance(J, nj.TiledJacobian)
    return J, held


def close(actual: Any, expected: Any, dtype: Any) -> None:
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    a, e = np.asarray(actual), np.asarray(expected)
    assert a.shape == e.shape
    assert a.dtype == e.dtype
    np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * max(1.0, np.abs(e).max(initial=0)))


def check(J: Any, held: nj.Jacobian, precision: Any = None) -> None:
    """Every verb but those that give Jacobians."""
    rng = np.random.default_rng(0)
    t = held.dtype if precision is None else precision
    assert (J.shape, J.dtype, J.n, J.l, J.m) == (held.shape, held.dtype, held.n, held.l, held.m)
    assert J.T.T is J
    assert J.parameters.names == held.parameters.names
    assert str(J.coverage) == str(held.coverage)
    close(J.y, held.y, t)
    tf.nest.map_structure(lambda a, b: close(a, b, t), J.outputs, held.outputs)
    for operator, other in ((J, held), (J.T, held.T)):
        size = other.shape[1]
        for v in (
            rng.normal(size=(size, 3)).astype(t),
            rng.normal(size=size) + 1j * rng.integers(-2, 3, size),
        ):
            close(operator @ v, other @ v, t)
    for layout in ("(l m) n", "m (l n)"):
        close(J.to_array(layout), held.to_array(layout), t)
    out = np.full((held.l, held.m, held.n + 3), np.nan)[:, :, 1:-2]
    assert J.to_array("l m n", out=out) is out
    close(out, held.to_array("l m n", dtype="float64"), t)
    close(np.asarray(J), np.asarray(held), t)
    G = J.gram()
    close(G, held.gram(), t)
    np.testing.assert_array_equal(G, G.T)
    close(J.gram(dtype="float64"), held.gram(dtype="float64"), t)
    close(J.gram(held), held.gram(held), t)
    close(held.gram(J), held.gram(held), t)
    weights = rng.normal(size=(held.n, held.l))
    close(J.normal(weights), held.normal(weights), t)
    close(J.normal(weights[:, 0], dtype="float64", threads=1), held.normal(weights[:, 0], dtype="float64"), t)
    close(J.row_norms(), held.row_norms(), t)
    close(J.column_norms(squared=True), held.column_norms(squared=True), t)
    b = rng.normal(size=(held.n, held.l))
    close(J.lstsq(b, damping=0.5), held.lstsq(b, damping=0.5), t)


@pytest.mark.parametrize("room", BUDGETS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_verb(name: str, room: str) -> None:
    J, held = tiled(NETWORKS[name](), room)
    check(J, held)


def test_the_comparison_finds_a_wrong_row() -> None:
    J, held = tiled(few_outputs(), "samples")
    B = np.broadcast_to(np.eye(3), (5, 3, 3)).copy()
    B[3, 1, 1] = 1.001
    with pytest.raises(AssertionError):
        check(J, held.scaled(B.astype(np.float32)))


@pytest.mark.parametrize("room", BUDGETS)
@pytest.mark.parametrize("name", ["two_outputs", "embedding", "falling_back"])
def test_parts(name: str, room: str) -> None:
    J, held = tiled(NETWORKS[name](), room)
    names = held.parameters.names
    rng = np.random.default_rng(1)
    B = rng.normal(size=(held.n, 4, held.l)).astype(held.dtype)
    C = rng.normal(size=(held.n, 2, 4))
    index = [3, 0, 0, -1, 2]
    for part in (
        lambda J: J.columns([names[-1], names[0]]),
        lambda J: J.columns(names[0]),
        lambda J: J.columns(["*" + names[-1][-1], "*"]),
        lambda J: J[index],
        lambda J: J[1:4],
        lambda J: J[np.arange(J.n) % 2 == 0],
        lambda J: J[-1],
        lambda J: J.scaled(B),
        lambda J: J.scaled(B[:, :1])[index],
        lambda J: J[index].columns(names[0]).scaled(B[index]),
        lambda J: J.scaled(B).scaled(C),
    ):
        actual, expected = part(J), part(held)
        assert str(actual.coverage) == str(expected.coverage)
        assert actual.parameters.names == expected.parameters.names
        close(actual.y, expected.y, held.dtype)
        close(actual.to_array(), expected.to_array(), held.dtype)
        v, u = rng.normal(size=expected.m), rng.normal(size=expected.shape[0])
        close(actual @ v, expected @ v, held.dtype)
        close(actual.T @ u, expected.T @ u, held.dtype)
    check(J.columns(names[1]).scaled(B), held.columns(names[1]).scaled(B))
    assert J.scaled(B[:, :0]).shape == (0, held.m)
    assert J[[]].shape == (0, held.m)
    assert J.columns([]).shape == held.columns([]).shape


def test_tiles_are_the_rows_and_come_no_larger_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    J, held = tiled(classifier(), "outputs")
    assert J.tile_shape == (1, 10)
    dense, seen = held.to_array("n l m"), np.zeros((held.n, held.l), int)
    for samples, outputs, tile in J.tiles():
        assert isinstance(tile, nj.Jacobian)
        assert (tile.n, tile.l) == (samples.stop - samples.start, outputs.stop - outputs.start)
        assert tile.n <= J.tile_shape[0]
        assert tile.l <= J.tile_shape[1]
        assert tile.nbytes <= J.footprint.held(*J.tile_shape)
        close(tile.to_array("n l m"), dense[samples, outputs], np.float32)
        close(tile.y, held.y[samples, outputs], np.float32)
        seen[samples, outputs] += 1
    assert (seen == 1).all()
    [(samples, outputs, whole)] = held.tiles()
    assert whole is held
    assert (samples, outputs) == (slice(0, held.n), slice(0, held.l))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Samples and rows of everything that is computed."""
    record: list[tuple[int, int]] = []
    original = CompiledSites.__call__

    def call(self: CompiledSites, theta: Any, x: Any, seeds: Any = None) -> Any:
        record.append((int(x[0].shape[0]), self._trace.output_space.size if seeds is None else len(seeds)))
        return original(self, theta, x, seeds)

    monkeypatch.setattr(CompiledSites, "__call__", call)
    return record


@pytest.mark.parametrize("room", BUDGETS)
def test_nothing_larger_than_a_tile_is_computed(room: str, computed: list[tuple[int, int]]) -> None:
    network = NETWORKS["classifier"]()
    need = budget(network, *BUDGETS[room](20))
    computed.clear()
    J = nj.jacobian(network[0], network[1], memory=need)
    verbs = {
        "product": lambda: J @ np.ones(J.m, np.float32),
        "adjoint": lambda: J.T @ np.ones((J.shape[0], J.l), np.float32),
        "to_array": lambda: J.to_array("(l m) n"),
        "normal": lambda: J.normal(),
        "row_norms": lambda: J.row_norms(),
        "column_norms": lambda: J.column_norms(),
    }
    assert not computed
    for verb in verbs.values():
        verb()
        assert sum(n * rows for n, rows in computed) == J.n * J.l  # one pass, no row twice
        assert all(n <= J.tile_shape[0] and rows <= J.tile_shape[1] for n, rows in computed)
        assert all(J.footprint.need(n, rows) <= need for n, rows in computed)
        computed.clear()
    J.T @ np.ones((J.shape[0], 2), np.float32)
    assert sum(n * rows for n, rows in computed) == J.n * 2  # one row a sample for each column, combined from all
    assert all(J.footprint.combined(J.l).peak(n, rows) <= need for n, rows in computed)
    computed.clear()
    J.gram()
    assert all(J.footprint.need(n, rows) <= need for n, rows in computed)
    computed.clear()
    J.gram(dtype="float64")
    assert all(J.footprint.widened().need(n, rows) <= need for n, rows in computed)


def test_adjoint_products_keep_numbers_of_any_size() -> None:
    """Combinations of outputs are computed in the network's single precision; the numbers may be double."""
    J, held = tiled(NETWORKS["classifier"](), "outputs")
    u = np.random.default_rng(0).normal(size=(J.shape[0], 3)) * [1e-60, 1.0, 1e60]
    ours, expected = J.T @ u, held.T @ u
    size = np.abs(expected).max(axis=0)
    np.testing.assert_allclose(ours / size, expected / size, atol=1e-5)
    assert not np.any(J.T @ np.zeros(J.shape[0]))


def test_scaled_computes_as_many_rows_as_asked_for(computed: list[tuple[int, int]]) -> None:
    J, held = tiled(classifier(), "samples")
    B = data(2, 20)
    computed.clear()
    combined = J.scaled(B)
    assert isinstance(combined, nj.Jacobian)
    assert computed == [(5, 2)]
    check(combined, held.scaled(B))


def test_what_fits_is_held() -> None:
    model, x, _ = network = classifier()
    footprint = extractor_of(*network)[0].footprint
    enough = footprint.peak(5, 20)
    assert isinstance(nj.jacobian(model, x, memory=enough), nj.Jacobian)
    assert isinstance(nj.jacobian(model, x, memory="1 GB"), nj.Jacobian)
    J = nj.jacobian(model, x, memory=enough - 1)
    assert isinstance(J, nj.TiledJacobian)
    assert isinstance(J[:4], nj.Jacobian)
    assert isinstance(J[:], nj.TiledJacobian)
    assert footprint.held(5, 20) == nj.jacobian(model, x).nbytes


@pytest.mark.parametrize("n", [0, 1])
def test_no_samples_and_one(n: int) -> None:
    network = classifier()
    model, x, _ = network
    J = nj.jacobian(model, x[:n], memory=budget(network, 1, 3))
    assert isinstance(J, nj.TiledJacobian if n else nj.Jacobian)
    check(J, nj.jacobian(model, x[:n]))


def test_parameters_and_inputs_are_those_of_the_moment_it_was_made() -> None:
    model, x, _ = network = few_outputs()
    least = budget(network, 1, 1)
    held = nj.jacobian(model, x)
    given = x.copy()
    J = nj.jacobian(model, given, memory=least)
    theta = nj.parameters(model).ravel()
    later = evaluator(model, x).evaluate(vector := 0.5 * theta, memory=least)
    expected = evaluator(model, x).evaluate(vector.copy())
    nj.parameters(model).assign(2 * theta)
    given += 1
    vector += 1
    check(J, held)
    check(later, expected)


def test_other_variables_have_to_stay() -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(4), L.BatchNormalization(), L.Dense(18)])
    x = data(3)
    J = nj.jacobian(model, x, memory=budget((model, x, None), 1, 5))
    check(J, nj.jacobian(model, x))
    model.layers[1].moving_mean.assign(np.ones(4))
    with pytest.raises(nj.ModelError, match="not trained have changed"):
        J.column_norms()


def test_a_sweep_that_cannot_be_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(symbolic.tf, "vectorized_map", refuse)
    for build in (classifier, falling_back):
        J, held = tiled(build(), "outputs")
        check(J, held)
        B = np.random.default_rng(0).normal(size=(held.n, 2, held.l))
        close(J.scaled(B).to_array(), held.scaled(B).to_array(), np.float32)


@pytest.mark.parametrize("name", ["classifier", "image_to_image", "falling_back_with_many_outputs"])
def test_the_probe_keeps_to_a_budget_of_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch, computed: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(extractor_module, "PROBE_BYTES", 1)
    model, x, variables = globals()[name]()
    nj.jacobian(model, x[:1], variables=variables)
    *probed, _ = computed
    assert all(n == 1 for n, _ in probed)
    assert max(rows for _, rows in probed) < 5


def test_the_probe_finds_a_wrong_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Extractor.factors

    def wrong(self: Extractor, theta: Any, x: Any, seeds: Any = None) -> Any:
        return original(self, theta, x, None if seeds is None else seeds[::-1])

    monkeypatch.setattr(Extractor, "factors", wrong)
    monkeypatch.setattr(extractor_module, "PROBE_BYTES", 1)
    model, x, _ = classifier()
    with pytest.raises(nj.ProbeError):
        nj.jacobian(model, x)


def test_lstsq_iterates_where_a_matrix_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    J, held = tiled(few_outputs(), "samples")
    b = np.random.default_rng(0).normal(size=held.shape[0])
    expected = held.lstsq(b, damping=0.1)
    monkeypatch.setattr(tiled_module, "SOLVER_BYTES", 8 * 15 * 15 - 1)
    monkeypatch.setattr(algebra, "_by_cholesky", None)
    again = J._within(J.memory)
    np.testing.assert_allclose(again.lstsq(b, damping=0.1), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(J.lstsq(b, damping=0.1, memory=3000), expected, rtol=0, atol=1e-5)


def test_a_budget_too_small_states_the_least_that_works() -> None:
    network = few_outputs()
    model, x, _ = network
    with pytest.raises(nj.MemoryBudgetError, match="least that works is memory=") as caught:
        nj.jacobian(model, x, memory=100)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, nj.NetjacError)
    with pytest.raises(nj.MemoryBudgetError):
        nj.jacobian(model, x, memory=caught.value.least - 1)
    J = nj.jacobian(model, x, memory=caught.value.least)
    held = nj.jacobian(model, x)
    check(J, held)
    wide = J._widened(np.dtype(np.float64)).scaled(np.ones((5, 8, 3)))
    assert wide.tile_shape == (1, 1)
    check(wide, held.scaled(np.ones((5, 8, 3))), np.float32)


@pytest.mark.parametrize("memory", ["much", "-1 MB", 0, float("nan"), True, [1]])
def test_a_budget_that_is_none(memory: Any) -> None:
    model, x, _ = few_outputs()
    with pytest.raises(nj.NetjacError, match="memory"):
        nj.jacobian(model, x, memory=memory)
    with pytest.raises(nj.NetjacError, match="memory"):
        nj.jacobian(model, x[:0], memory=memory)


def test_wrong_arguments_are_refused_before_any_work(computed: list[tuple[int, int]]) -> None:
    J, held = tiled(few_outputs(), "samples")
    computed.clear()
    for J_ in (J, held):
        for wrong, error in (
            (lambda J: J @ np.ones(3), nj.ShapeError),
            (lambda J: J.T @ np.ones(3), nj.ShapeError),
            (lambda J: J.to_array("(n l)"), nj.LayoutError),
            (lambda J: J.to_array(out=np.ones(3)), nj.ShapeError),
            (lambda J: J.columns("nothing"), nj.NameLookupError),
            (lambda J: J.columns(3), nj.DtypeError),
            (lambda J: J[99], nj.SampleIndexError),
            (lambda J: J.scaled(np.ones((2, 2))), nj.ShapeError),
            (lambda J: J.scaled(np.ones((5, 2, 3), complex)), nj.DtypeError),
            (lambda J: J.gram(3), nj.DtypeError),
            (lambda J: J.gram(J.columns("bias")), nj.NetjacError),
            (lambda J: J.normal(np.ones(2)), nj.ShapeError),
            (lambda J: J.lstsq(np.ones(2)), nj.ShapeError),
            (lambda J: J.lstsq(np.ones(15), damping=-1), nj.DataError),
        ):
            with pytest.raises(error):
                wrong(J_)
    assert not computed


class Held:
    """A source of tiles that needs no network: the factors, held in memory."""

    def __init__(self, J: nj.Jacobian, source: Any) -> None:
        self.J, self.footprint, self.dtype = J, source.footprint, source.dtype

    def blocks(self, samples: Any, rows: Any) -> Any:
        part = self.J[samples]
        if rows is None:
            return part.blocks
        combinations = np.eye(self.J.l)[rows][None].repeat(len(samples), 0) if isinstance(rows, slice) else rows
        return part.scaled(combinations.astype(self.dtype)).blocks


def test_it_pickles_as_its_source_does() -> None:
    network = few_outputs()
    J, held = tiled(network, "samples")
    for part in (J, J.columns(held.parameters.names[0])):
        with pytest.raises(nj.PicklingError, match=r"Save the model .* J\[samples\], which pickles"):
            pickle.dumps(part)
        for again in (copy.copy(part), copy.deepcopy(part)):
            np.testing.assert_array_equal(again.to_array(), part.to_array())
    assert isinstance(J[:1], nj.Jacobian)  # what the message says pickles
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(J[:1])).to_array(), J.to_array()[: J.l])

    source = Held(held, J._source)
    free = nj.TiledJacobian(source, held.parameters, held.output_space, held.y, held.coverage, J.memory)
    B = data(2, held.l, n=held.n)
    name = held.parameters.names[0]
    for verb in (lambda J: J, lambda J: J.columns(name), lambda J: J[[3, 0, 1]], lambda J: J.scaled(B)):
        again = pickle.loads(pickle.dumps(verb(free)))
        assert repr(again) == repr(verb(free))
        np.testing.assert_allclose(again.to_array(), verb(held).to_array(), rtol=1e-5, atol=1e-6)


def test_what_it_prints() -> None:
    J, _ = tiled(classifier(), "outputs")
    assert repr(J) == (
        "<TiledJacobian of 5 samples × 20 outputs with respect to 170 parameters: shape (100, 170), float32, "
        f"10 tiles of up to 1 × 10 within {nj.planning.in_words(J.memory)}>"
    )
