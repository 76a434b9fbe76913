"""A stream of a network's Jacobian against the Jacobian that is held, for every kind of data."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import netjac as nj
from netjac import progress, reductions
from netjac.tensorflow.evaluate import CompiledSites

L = keras.layers
N = 23
X = np.random.default_rng(3).normal(size=(N, 4)).astype("float32")
Y = np.random.default_rng(4).normal(size=(N, 3)).astype("float32")
R = np.random.default_rng(5).normal(size=N * 3)


@cache
def network() -> Any:
    return keras.Sequential([keras.Input((4,)), L.Dense(6, "tanh"), L.Dense(3)])


@cache
def dense() -> np.ndarray:
    """The rows, by an ordinary derivative of each sample."""
    rows = []
    for sample in X:
        with tf.GradientTape() as tape:
            y = network()(sample[None])
        found = tape.jacobian(y, network().trainable_variables)
        rows.append(np.concatenate([np.reshape(part, (3, -1)) for part in found], axis=1))
    return np.concatenate(rows).astype(np.float64)


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return X[6 * i : 6 * i + 6], Y[6 * i : 6 * i + 6]


def generator() -> Iterator[Any]:
    for a, b in ((0, 1), (1, 1), (1, 12), (12, 23)):
        yield X[a:b]


def mapped(path: Any) -> Any:
    stored = np.memmap(path / "x.bin", "float32", "w+", shape=X.shape)
    stored[:] = X
    return stored


def zarr(path: Any) -> Any:
    stored = pytest.importorskip("zarr").create_array(str(path / "x.zarr"), shape=X.shape, chunks=(5, 4), dtype="f4")
    stored[:] = X
    return stored


DATA: dict[str, Callable[[Any], Any]] = {
    "array": lambda _: X,
    "list of numbers": lambda _: X.tolist(),
    "tensor": lambda _: tf.constant(X),
    "memory map": mapped,
    "zarr": zarr,
    "dataset": lambda _: tf.data.Dataset.from_tensor_slices((X, Y)).batch(7),
    "PyDataset": lambda _: Sequence(),
    "function": lambda _: generator,
    "iterator": lambda _: generator(),
}


def close(found: Any, expected: Any, relative: float = 2e-6) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=relative * np.abs(expected).max())


def no_threads() -> bool:
    return all(thread.name != "netjac-prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(("memory", "prefetch"), [(None, 1), ("8 kB", 0), ("8 kB", 2), (2000, 1)])
def test_tiles_of_every_kind_of_data_are_the_rows(kind: str, memory: Any, prefetch: int, tmp_path: Any) -> None:
    stream = nj.stream(network(), DATA[kind](tmp_path), memory=memory, prefetch=prefetch)
    found = np.full((N, 3, stream.m), np.nan)
    for samples, outputs, J in stream:
        assert isinstance(J, nj.Jacobian)
        assert np.isnan(found[samples, outputs]).all()
        found[samples, outputs] = J.to_array("n l m")
    close(found.reshape(-1, stream.m), dense())
    assert no_threads()


@pytest.mark.parametrize("memory", [None, 2000])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_whoever_gives_batches_may_write_the_next_into_the_same_arrays(prefetch: int, memory: Any) -> None:
    def batches() -> Iterator[Any]:
        x, y, w = np.empty((6, 4), "float32"), np.empty((6, 3), "float32"), np.empty(6)
        for start in range(0, 18, 6):
            x[:], y[:], w[:] = X[start : start + 6], Y[start : start + 6], np.arange(start, start + 6)
            yield x, {"deep": [y]}, w

    tiles = list(nj.stream(network(), batches, memory=memory, prefetch=prefetch))
    assert len(tiles) > 3 or memory is None
    for tile in tiles:
        np.testing.assert_array_equal(tile.targets["deep"][0], Y[tile.samples])
        np.testing.assert_array_equal(tile.weights, np.arange(18)[tile.samples])
        rows = dense().reshape(N, 3, -1)[tile.samples, tile.outputs]
        close(tile.jacobian.to_array("n l m"), rows)


def test_values_of_a_wrong_number_are_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    evaluate = CompiledSites.__call__
    monkeypatch.setattr(CompiledSites, "__call__", lambda *given: made.append(given) or evaluate(*given))
    stream = nj.stream(network(), X, memory=2000, prefetch=0)
    J = dense()
    close(stream.normal(), J.T @ J)
    made.clear()
    for changes in ({"adjoint": R[:-1]}, {"adjoint": np.ones(N)}, {"normal": True, "weights": np.ones(3 * N - 1)}):
        with pytest.raises(nj.ShapeError, match=f"the data had {N} samples and {3 * N} rows"):
            stream.reduce(**changes)
    assert len(made) <= 3  # a tile each
    w = np.linspace(0, 1, N)
    rows = np.sqrt(np.repeat(w, 3))[:, None] * J
    close(stream.normal(weights=w), rows.T @ rows)
    close(stream.leverage(1e-3, weights=w), nj.stream(network(), X).leverage(1e-3, weights=np.repeat(w, 3)))


def test_data_frames() -> None:
    frame = pytest.importorskip("pandas").DataFrame(X, columns=list("abcd"))
    close(nj.stream(network(), frame, memory=2000).normal(), dense().T @ dense())
    close(nj.stream(network(), lambda: iter([frame[:9], frame[9:]])).normal(), dense().T @ dense())


def test_a_list_of_batches_is_told_what_it_is_taken_for() -> None:
    with pytest.raises(nj.ShapeError, match="takes batches from a function that returns an iterator"):
        nj.stream(network(), [(X, Y), (X, Y)]).normal()
    with pytest.raises(nj.DtypeError, match="must return an iterator over batches, and returned 0"):
        nj.stream(network(), lambda: 0).normal()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", DATA)
def test_reductions_of_every_kind_of_data(kind: str, weighted: bool, tmp_path: Any) -> None:
    stream = nj.stream(network(), DATA[kind](tmp_path), memory="8 kB")
    w = np.linspace(0, 2, 3 * N) if weighted else np.ones(3 * N)
    weights = w if weighted else None
    found = stream.reduce(normal=True, adjoint=R, column_norms=True, sketch=4, weights=weights)
    J = dense()
    rows = np.sqrt(w)[:, None] * J
    close(found.normal, rows.T @ rows)
    close(found.adjoint, J.T @ (w * R))
    close(found.column_norms, np.linalg.norm(rows, axis=0))
    drawn = reductions.Draws(0, lambda rng: rng.integers(0, 8, reductions.BLOCK)).of(np.arange(3 * N))
    S = np.zeros((4, 3 * N))
    S[drawn % 4, np.arange(3 * N)] = np.where(drawn < 4, 1, -1)
    close(found.sketch, S @ rows)
    assert (found.n, found.rows) == (N, 3 * N)
    if kind != "iterator":
        hat = rows @ np.linalg.solve(rows.T @ rows + 0.1 * np.eye(J.shape[1]), rows.T)
        close(stream.leverage(0.1, weights), np.diag(hat), 1e-5)


def test_weights_that_come_with_the_data_and_such_that_are_negative() -> None:
    w = np.linspace(0.5, 2, N).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((X, Y, w)).batch(7)
    stream = nj.stream(network(), data, memory="8 kB")
    rows = np.sqrt(np.repeat(w, 3))[:, None] * dense()
    of_tile = lambda tile: np.repeat(tile.weights, tile.jacobian.l)  # noqa: E731
    close(stream.normal(of_tile), rows.T @ rows)
    close(stream.column_norms(weights=of_tile), np.linalg.norm(rows, axis=0))
    close(stream.adjoint(R, of_tile), dense().T @ (np.repeat(w, 3) * R))
    negative = np.linspace(-1, 1, 3 * N)
    close(stream.adjoint(R, negative), dense().T @ (negative * R))
    close(stream.normal(negative), dense().T @ (negative[:, None] * dense()))
    for verb in (
        lambda: stream.column_norms(weights=negative),
        lambda: stream.leverage(0.1, negative),
        lambda: stream.sketch(3, weights=negative),
        lambda: stream.reduce(normal=True, sketch=3, weights=negative),
    ):
        with pytest.raises(nj.DataError, match="weights must be 0 or more"):
            verb()
    with pytest.raises(nj.ShapeError, match="weights has shape"):
        stream.column_norms(weights=np.ones(3 * N + 3))


@pytest.mark.parametrize("size", [1, 2, 7, 23, 100])
def test_sums_are_those_of_the_whole_jacobian_to_rounding(size: int) -> None:
    """In double precision, whatever the batches: the factors are the same numbers."""
    whole = nj.jacobian(network(), X, dtype="float64")
    J = whole.to_array()
    stream = nj.stream(network(), lambda: (X[i : i + size] for i in range(0, N, size)), dtype="float64")
    w = np.linspace(0.5, 2, N)
    for found, expected in (
        (stream.normal(), J.T @ J),
        (stream.normal(np.repeat(w, 3)), J.T @ (np.repeat(w, 3)[:, None] * J)),
        (stream.normal(w[:, None]), J.T @ (np.repeat(w, 3)[:, None] * J)),
        (stream.adjoint(R), J.T @ R),
        (stream.adjoint(R.reshape(N, 3)), J.T @ R),
        (stream.column_norms(squared=True), (J**2).sum(axis=0)),
        (stream.leverage(0.1), np.diag(J @ np.linalg.solve(J.T @ J + 0.1 * np.eye(J.shape[1]), J.T))),
    ):
        close(found, expected, 1e-12)
    for kind in ("count", "gaussian"):
        once = nj.stream(network(), X, dtype="float64").sketch(5, seed=2, kind=kind)
        close(stream.sketch(5, seed=2, kind=kind), once, 1e-12)
        assert np.abs(stream.sketch(5, seed=3, kind=kind) - once).max() > 0.1


def test_what_came_with_x_comes_with_its_tile() -> None:
    stream = nj.stream(network(), Sequence(), memory="8 kB")
    gradient = stream.adjoint(lambda tile: tile.jacobian.y - tile.targets)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((network()(X) - Y) ** 2) / 2
    expected = np.concatenate([np.ravel(part) for part in tape.gradient(loss, network().trainable_variables)])
    close(gradient, expected, 1e-5)


def test_several_inputs_and_outputs() -> None:
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    h = L.Dense(5, "tanh")(L.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, {"u": L.Dense(2)(h), "v": L.Dense(1)(h)})
    x = {"a": X, "b": X[:, :2]}
    J = nj.jacobian(model, x)
    batches = lambda: ({name: part[i : i + 9] for name, part in x.items()} for i in range(0, N, 9))  # noqa: E731
    for data in (x, batches, tf.data.Dataset.from_tensor_slices(x).batch(9)):
        stream = nj.stream(model, data, memory="10 kB")
        close(np.concatenate([tile.jacobian.to_array() for tile in stream]), J.to_array(), 1e-6)


def test_only_slices_are_read() -> None:
    class Lazy:
        shape, dtype = (10**12, 4), np.dtype("float32")
        largest = 0

        def __getitem__(self, samples: slice) -> Any:
            self.largest = max(self.largest, samples.stop - samples.start)
            return np.ones((samples.stop - samples.start, 4), "float32")

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("converted as a whole")

    data = Lazy()
    stream = nj.stream(network(), data, memory="1 MB")
    assert stream.n == 10**12
    for samples, _, J in stream:
        assert J.n == samples.stop - samples.start <= 10_000
        if samples.start:
            break
    assert 1 < data.largest <= 10_000
    assert no_threads()


@pytest.mark.parametrize("data", [X[:0], lambda: iter(()), lambda: iter([X[:0]])])
def test_no_data(data: Any) -> None:
    stream = nj.stream(network(), data)
    assert list(stream) == []
    found = stream.reduce(normal=True, adjoint=np.zeros(0), column_norms=True, sketch=2)
    assert not found.normal.any()
    assert not found.adjoint.any()
    assert (found.column_norms.shape, found.sketch.shape, found.n) == ((stream.m,), (2, stream.m), 0)
    assert stream.leverage().shape == (0,)


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_is_not_finite_is_named(start: int, prefetch: int) -> None:
    bad = X.copy()
    bad[start + 2, 1] = np.nan
    batches = lambda: (bad[i : i + 9] for i in range(0, N, 9))  # noqa: E731
    message = rf"batch {start // 9}, samples {start} to .*first in sample {start + 2}: x holds NaN"
    stream = nj.stream(network(), batches, prefetch=prefetch)
    with pytest.raises(nj.DataError, match=message):
        stream.normal()
    tiles = iter(nj.stream(network(), batches, prefetch=prefetch))
    if start:
        assert next(tiles).samples == slice(0, 9)
    with pytest.raises(nj.DataError, match=message):
        next(tiles)
    assert no_threads()


def test_batches_that_do_not_belong_together() -> None:
    w = tf.Variable(np.ones((4, 2), "float32"))
    model = lambda x: tf.reshape(x @ w, (-1, x.shape[1] * 2))  # noqa: E731
    batches = lambda: iter([np.ones((3, 5, 4), "float32"), np.ones((3, 6, 4), "float32")])  # noqa: E731
    with pytest.raises(nj.ShapeError, match="batch 1 has 12 outputs a sample, and those before have 10"):
        nj.stream(model, batches, variables=[w]).normal()


def test_an_iterator_is_walked_once() -> None:
    stream = nj.stream(network(), generator())
    with pytest.raises(nj.DataError, match="leverage needs two passes"):
        stream.leverage()
    close(stream.normal(), dense().T @ dense())  # it was refused before it was walked
    with pytest.raises(nj.DataError, match="can be walked once, and it was"):
        stream.normal()
    with pytest.raises(nj.DataError, match="can be walked once"):
        next(iter(stream))


def test_data_that_change_between_passes() -> None:
    parts = iter([[X], [X[:5]]])
    with pytest.raises(nj.DataError, match="69 rows in the first pass and 15 in the second"):
        nj.stream(network(), lambda: iter(next(parts))).leverage()


def test_the_parameters_are_those_of_the_moment_it_was_made() -> None:
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, "tanh")])
    J = nj.jacobian(model, X).to_array()
    stream = nj.stream(model, X, memory="4 kB", prefetch=0)
    found = []
    for tile in stream:
        found.append(tile.jacobian.to_array())
        space = nj.parameters(model)
        space.assign(0.5 * space.ravel())
    assert len(found) > 1
    close(np.concatenate(found), J)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_the_data_raise_comes_through(prefetch: int) -> None:
    def broken() -> Iterator[Any]:
        yield X
        raise OSError("disk gone")

    stream = nj.stream(network(), broken, prefetch=prefetch)
    with pytest.raises(OSError, match="disk gone"):
        stream.normal()
    assert no_threads()


def test_an_interrupt_leaves_no_thread() -> None:
    stream = nj.stream(network(), X, memory="8 kB")

    def stop() -> None:
        for _ in stream:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert no_threads()
    close(stream.normal(), dense().T @ dense())


def test_memory_that_cannot_be_had_makes_tiles_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    original, failures = CompiledSites.__call__, []

    def call(self: Any, theta: Any, x: Any, seeds: Any = None) -> Any:
        if len(x[0]) > 4:
            failures.append(len(x[0]))
            raise MemoryError
        return original(self, theta, x, seeds)

    nj.jacobian(network(), X[:2])
    monkeypatch.setattr(CompiledSites, "__call__", call)
    stream = nj.stream(network(), lambda: (X[i : i + 10] for i in range(0, N, 10)))
    with pytest.warns(RuntimeWarning, match="tried again in smaller tiles"):
        close(stream.normal(), dense().T @ dense())
    assert 0 < len(failures) < 8


def test_a_budget_too_small_states_the_least() -> None:
    with pytest.raises(nj.MemoryBudgetError, match="least that works is memory=") as caught:
        nj.stream(network(), X, memory=100).normal()
    close(nj.stream(network(), X, memory=caught.value.least).normal(), dense().T @ dense())


@pytest.mark.parametrize(
    "arguments",
    [{"prefetch": -1}, {"prefetch": 1.5}, {"prefetch": True}, {"threads": 0}, {"memory": "x"}, {"progress": 3}],
)
def test_arguments_are_refused_before_any_work(arguments: dict[str, Any]) -> None:
    with pytest.raises((nj.DataError, nj.DtypeError)):
        nj.stream(network(), X, **arguments)
    with pytest.raises(nj.DataError, match="nothing to reduce"):
        nj.stream(network(), X).reduce()


def test_progress_of_a_stream_and_of_tiled_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(progress.Progress, "add", lambda self, rows: counted.append(rows))
    text = io.StringIO()
    nj.stream(network(), X, memory="8 kB", progress=text).reduce(normal=True, column_norms=True)
    assert "normal, column_norms" in text.getvalue()
    assert f"/{N}.0 [" in text.getvalue()
    assert sum(counted) == N
    assert len(counted) > 1
    for budget in ("8 kB", 2000):  # tiles of samples, and of outputs
        J = nj.jacobian(network(), X, memory=budget, progress=text)
        for verb in ("to_array", "normal", "gram", "row_norms", "column_norms"):
            for part in (J, J._widened(np.dtype("float64")), J.columns(J.parameters.names[0])):
                text.truncate(text.seek(0))
                counted.clear()
                getattr(part, verb)()
                assert verb in text.getvalue()
                assert sum(counted) == (J.shape[0] ** 2 if verb == "gram" else J.shape[0])
    text.truncate(text.seek(0))
    J.progress = False
    J.normal()
    nj.jacobian(network(), X, memory="8 kB", progress=False).normal()
    nj.jacobian(network(), X, progress=text).normal()  # one tile: nothing to count
    assert text.getvalue() == ""


def test_what_it_prints() -> None:
    text = repr(nj.stream(network(), X, memory="1 MiB"))
    assert text == "<Stream of the Jacobian of 23 samples with respect to 51 parameters within 1 MiB>"
    assert "of some samples" in repr(nj.stream(network(), generator))
