"""Where the samples lie in the tensors of a graph, and samples that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import check

from netjac.tensorflow.survey import LARGE, SampleAxis, Survey, distinct_samples
from netjac.tensorflow.trace import argument_specs, parameter_space, signature_of, trace

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 5, 6))  # samples, time, features
W = tf.Variable(RNG.normal(size=(6, 3)), name="w")


def survey(f: Any, x: Any) -> Survey:
    parameters = parameter_space(f, [W])
    signature, leaves = signature_of(x, "float64")
    traced = trace(f, signature, parameters)
    return Survey(traced.program, argument_specs(traced), [W.numpy()], leaves)


def tensor(s: Survey, name: str) -> Any:
    return s.graph.get_tensor_by_name(f"netjac/{name}:0")


LAYOUTS = {
    "sample-major": (lambda x: tf.reshape(x, [-1, 6], name="here"), 0, SampleAxis(1, 5)),
    "time-major": (lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 6], name="here"), 0, SampleAxis(5, 1)),
    "between": (
        lambda x: tf.reshape(tf.transpose(tf.reshape(x, [-1, 5, 2, 3]), [2, 0, 1, 3]), [-1, 3], name="here"),
        0,
        SampleAxis(2, 5),
    ),
    "last axis": (lambda x: tf.transpose(x[:, 0], name="here"), 1, SampleAxis(1, 1)),
    "last axis, time-major": (
        lambda x: tf.transpose(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 6]), name="here"), 1, SampleAxis(5, 1),
    ),
    "padding first": (  # the first rows are the same for all samples
        lambda x: tf.reshape(tf.transpose(tf.pad(x[:, :1], [[0, 0], [1, 0], [0, 0]]), [1, 0, 2]), [-1, 6], name="here"),
        0, SampleAxis(2, 1),
    ),
    "nothing changes": (lambda x: tf.reshape(0 * x, [-1, 6], name="here"), 0, SampleAxis(1, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_samples_are_found(name: str) -> None:
    f, axis, expected = LAYOUTS[name]

    def g(x: Any) -> Any:
        here = f(x)
        return x[:, 0] @ W + tf.reduce_sum(tf.reshape(here, [tf.shape(x)[0], -1, 3]), 1) * 0

    s = survey(g, X)
    here = tensor(s, "here")
    assert s.batched(here) == (axis,)
    assert s.sample_axis(here, axis) == expected


def test_sizes_and_axes() -> None:
    s = survey(lambda x: tf.concat([x[:, 0], x[:1, 1]], 0, name="odd")[:-1] @ W + tf.cast(tf.shape(x)[0], x.dtype), X)
    odd = tensor(s, "odd")
    assert s.shape(odd) == (LARGE + 1, 6)
    assert s.batched(odd) == (0,)
    assert s.sample_axis(odd, 0) is None  # one more than there are samples
    shape = tensor(s, "Shape")
    assert s.batched(shape) == ()


def test_mixed_samples_lie_nowhere() -> None:
    s = survey(lambda x: tf.reshape(tf.transpose(x, [1, 2, 0]), [-1, 6], name="here")[: tf.shape(x)[0]] @ W, X)
    assert s.sample_axis(tensor(s, "here"), 0) in (None, SampleAxis(30, 1), SampleAxis(5, 6))


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1], [0, 2, 1]])
def test_products_with_samples_anywhere_equal_the_tape(order: list[int]) -> None:
    """x is transposed, all but its last axis merged, a kernel applied, and everything undone."""
    size = X.shape[order[-1]] if order[-1] else None
    back = [order.index(i) for i in range(3)]

    def f(x: Any) -> Any:
        moved = tf.transpose(x, order)
        if size is None:  # the samples come last: they are the other axis of a product from the left
            shape = tf.shape(moved)
            merged = tf.reshape(moved, [30, shape[-1]])
            return tf.transpose(tf.tanh(tf.matmul(V, merged, transpose_a=True)))
        kernel = K[:size, :size]
        done = tf.tanh(tf.reshape(moved, [-1, size]) @ kernel + C[:size])
        return tf.transpose(tf.reshape(done, tf.shape(moved)), back)[:, ::2, ::3]

    check(lambda x: tf.ensure_shape(f(x), (None, 4) if size is None else (None, 3, 2)), X, [K, C, V], random=False)


K = tf.Variable(RNG.normal(size=(6, 6)), name="k")
C = tf.Variable(RNG.normal(size=6), name="c")
V = tf.Variable(RNG.normal(size=(30, 4)), name="v")


def test_zero_weights_do_not_hide_a_time_major_layout() -> None:
    k, c = tf.Variable(np.zeros((6, 3)), name="k"), tf.Variable(np.zeros(3), name="c")

    def f(x: Any) -> Any:
        z = tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 6]) @ k + c
        return tf.transpose(tf.reshape(tf.tanh(z), [5, -1, 3]), [1, 0, 2])

    check(f, X, [k, c], random=False)


@pytest.mark.parametrize("start", [0, 3, 4])
def test_a_time_major_layout_that_differs_late_in_time_alone(start: int) -> None:
    """Samples whose tokens agree in all but the last steps."""
    x = np.array([[1] * 5, [1] * 5, [1] * 5], "int32")
    x[:, start:] = [[2, 3, 4, 5, 6][: 5 - start]] * 3
    table = tf.Variable(RNG.normal(size=(9, 3)), name="table")
    k = tf.Variable(RNG.normal(size=(3, 2)), name="k")

    def f(i: Any) -> Any:
        z = tf.reshape(tf.gather(table, tf.transpose(i)), [-1, 3]) @ k
        return tf.transpose(tf.reshape(tf.tanh(z), [5, -1, 2]), [1, 0, 2])[:, 1:3]

    check(f, x, [table, k], random=False)


@pytest.mark.parametrize(
    "leaf",
    [
        np.zeros((0, 3)),
        np.zeros((1, 3)),
        np.ones((5, 3), "float32"),
        np.array([[1.0, -2.0, 0.0]]),
        np.array([[4, 1, 2]], "int32"),
        np.full((2, 3), 3, "int64"),
        np.array([[True, False, True]]),
    ],
)
def test_samples_are_made_to_differ_in_their_own_domain(leaf: np.ndarray) -> None:
    (batch,) = distinct_samples([leaf], LARGE, np.random.default_rng(0))
    assert batch.shape == (LARGE, 3)
    assert batch.dtype == leaf.dtype
    if leaf.dtype.kind == "f":
        assert len({row.tobytes() for row in batch}) == LARGE
        if len(leaf):
            assert np.all(np.sign(batch[leaf.shape[0] :]) * np.sign(leaf[0]) >= 0)
    elif leaf.dtype.kind == "i" and len(leaf):
        assert batch.min() >= 0
        assert batch.max() <= leaf.max()


def test_padding_that_comes_first_in_blocks_of_samples() -> None:
    """What a dilated convolution does: pixels go onto the samples' axis, and the first block is padding alone."""
    k = tf.Variable(RNG.normal(size=(3, 2)), name="k")

    def f(x: Any) -> Any:
        rows = tf.space_to_batch_nd(x, [2], [[1, 0]]) @ k
        return tf.batch_to_space(tf.sin(rows), [2], [[1, 0]])

    check(f, RNG.normal(size=(3, 1, 3)), [k], random=False)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("vocabulary", [1, 3])
def test_indices_that_are_all_zero_still_tell_where_the_samples_lie(rows: int, vocabulary: int) -> None:
    """Nothing within x's own values can be changed then; with a table of one row nothing beyond them either."""
    table = tf.Variable(RNG.normal(size=(vocabulary, 3)), name="table")
    k = tf.Variable(RNG.normal(size=(3, 2)), name="k")

    def f(i: Any) -> Any:
        z = tf.reshape(tf.gather(table, tf.transpose(i)), [-1, 3]) @ k
        return tf.transpose(tf.reshape(tf.tanh(z), [5, -1, 2]), [1, 0, 2])

    check(f, np.zeros((rows, 5), "int32"), [table, k], random=False)


def test_flags_that_are_all_one_value_still_tell_where_the_samples_lie() -> None:
    k = tf.Variable(RNG.normal(size=(1, 2)), name="k")

    def f(x: Any) -> Any:
        z = tf.reshape(tf.cast(tf.transpose(x), "float64"), [-1, 1]) @ k
        return tf.transpose(tf.reshape(tf.tanh(z), [5, -1, 2]), [1, 0, 2])

    check(f, np.zeros((2, 5), bool), [k], random=False)
