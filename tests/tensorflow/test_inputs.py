"""input_jacobian against plain loops: seed cases, structures, many outputs, refusals."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import call, close, count, flat_row, limit, randomise, sample

import netjac as nj
from netjac.tensorflow import symbolic

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3))
W = tf.Variable(RNG.normal(size=(3, 2)), name="w")


def loop(model: Any, x: Any) -> list[np.ndarray]:
    """One array (n, l, *sample) a leaf: each sample alone, each output alone."""
    per_leaf: list[list[np.ndarray]] = [[] for _ in tf.nest.flatten(x)]
    for i in range(count(x)):
        one = sample(x, i)
        leaves = tf.nest.flatten(one)
        with tf.GradientTape(persistent=True) as tape:
            for leaf in leaves:
                tape.watch(leaf)
            y = flat_row(call(model, one))
        rows = [
            tape.gradient(
                y, leaves, output_gradients=tf.one_hot(j, len(y), dtype=y.dtype), unconnected_gradients="zero"
            )
            for j in range(len(y))
        ]
        for kept, found in zip(per_leaf, zip(*rows, strict=True), strict=True):
            kept.append(np.stack([np.asarray(tf.convert_to_tensor(d))[0] for d in found]))
    return [np.stack(blocks) for blocks in per_leaf]


def check(model: Any, x: Any, tol: float | None = None) -> Any:
    found = nj.input_jacobian(model, x)
    tf.nest.assert_same_structure(found, x)
    for ours, expected in zip(tf.nest.flatten(found), loop(model, x), strict=True):
        assert isinstance(ours, np.ndarray)
        close(ours, expected, "input_jacobian", limit(ours.dtype) if tol is None else tol)
    return found


def test_a_matrix_of_ones_gives_the_matrix_of_ones() -> None:
    w = tf.Variable(tf.ones((3, 3)))
    found = nj.input_jacobian(lambda x: x @ w, [[1.0, 7.0, 5.0]])
    assert found.shape == (1, 3, 3)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0], np.ones((3, 3)))


def test_the_transposed_kernel_of_a_linear_layer() -> None:
    found = nj.input_jacobian(lambda x: x @ W, X)
    for i in range(len(X)):
        np.testing.assert_array_equal(found[i], W.numpy().T)


def test_networks() -> None:
    check(lambda x: tf.tanh(x @ W) ** 2, X)
    check(lambda x: tf.tanh(tf.einsum("btd,dk->bkt", x, W)), RNG.normal(size=(3, 5, 3)))
    check(lambda x: tf.tanh(x[:, :, ::2, 0] @ W[:2]), RNG.normal(size=(2, 4, 3, 2)))


@pytest.mark.parametrize("precision", ["float32", "float64"], indirect=True)
def test_a_convolution(precision: str) -> None:
    model = keras.Sequential(
        [keras.Input((5, 5, 2)), L.Conv2D(3, 2, activation="tanh"), L.BatchNormalization(), L.Flatten(), L.Dense(2)]
    )
    randomise(model.weights)
    found = check(model, RNG.normal(size=(3, 5, 5, 2)).astype(precision))
    assert found.shape == (3, 2, 5, 5, 2)
    assert found.dtype == precision


def test_lists_and_dicts(precision: str) -> None:
    a, b = keras.Input((3,), name="a"), keras.Input((2, 2), name="b")
    h = L.Concatenate()([L.Dense(4, "tanh")(a), L.Flatten()(L.Dense(3, "tanh")(b))])
    x = {"a": X, "b": RNG.normal(size=(4, 2, 2))}
    model = keras.Model({"a": a, "b": b}, {"u": L.Dense(2)(h), "v": L.Dense(1)(a)})
    randomise(model.weights)
    assert set(check(model, x)) == {"a", "b"}
    listed = keras.Model([a, b], L.Dense(2)(h))
    assert isinstance(check(listed, [x["a"], x["b"]]), list)
    check(lambda p: {"s": p["a"] @ W, "t": p["c"][1] * p["c"][0][:, 0]}, {"a": X, "c": (x["b"], X[:, :2])})


def test_an_input_that_does_not_matter() -> None:
    found = check(lambda p: p[0] @ W, [X, X[:, :1]])
    assert not found[1].any()


def test_vectorised_over_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tf.constant(RNG.normal(size=(2, 23)))

    def f(x: Any) -> Any:
        return {"many": tf.tanh(tf.tanh(x @ W) @ kernel), "few": x @ W}

    many = check(f, X)
    assert many.shape == (4, 25, 3)
    monkeypatch.setattr(symbolic, "UNROLLED_OUTPUTS", 100)
    unrolled = nj.input_jacobian(lambda x: f(x), X)
    np.testing.assert_allclose(unrolled, many, atol=1e-14)


def test_no_sample_and_one_sample() -> None:
    def f(x: Any) -> Any:
        return tf.tanh(x @ W)

    empty = nj.input_jacobian(f, X[:0])
    assert empty.shape == (0, 2, 3)
    assert empty.dtype == np.float64
    np.testing.assert_allclose(nj.input_jacobian(f, X[:1]), nj.input_jacobian(f, X)[:1], rtol=1e-14)


def test_present_weights_are_used() -> None:
    w = tf.Variable(W)

    def f(x: Any) -> Any:
        return x @ w

    nj.input_jacobian(f, X)
    w.assign(2 * w)
    np.testing.assert_array_equal(nj.input_jacobian(f, X)[0], w.numpy().T)


def test_a_callable_says_by_trial_which_type_it_computes_in() -> None:
    single = tf.Variable(W.numpy().astype("float32"))
    assert nj.input_jacobian(lambda x: x @ single, X).dtype == np.float32
    assert nj.input_jacobian(lambda x: x @ W, X.astype("float32")).dtype == np.float64
    assert nj.input_jacobian(lambda x: x @ W, X.tolist()).dtype == np.float64
    assert nj.input_jacobian(tf.sin, X).dtype == np.float64


MIXING = {
    "a mean over the batch": lambda x: x - tf.reduce_mean(x, 0, name="centre"),
    "a softmax over the batch": lambda x: tf.nn.softmax(x, axis=0),
    "reversed samples": lambda x: tf.reverse(x, [0]),
    "a leak": lambda x: x + 1e-4 * tf.reduce_sum(x, 0),
    "behind a stopped gradient": lambda x: x * tf.stop_gradient(tf.reduce_max(x)),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("n", [1, 4])
def test_mixing_is_refused(name: str, n: int) -> None:
    with pytest.raises(nj.SampleMixingError, match="mixes samples"):
        nj.input_jacobian(MIXING[name], X[:n])


def test_integer_inputs_are_refused_with_advice() -> None:
    model = keras.Sequential([keras.Input((3,), dtype="int32"), L.Embedding(5, 2), L.Flatten(), L.Dense(2)])
    with pytest.raises(nj.DtypeError, match="embedding's output"):
        nj.input_jacobian(model, np.zeros((2, 3), "int32"))


def test_batch_statistics_are_refused() -> None:
    norm = L.BatchNormalization()
    norm.build((None, 3))
    before = [np.asarray(w).copy() for w in norm.weights]
    with pytest.raises(nj.SampleMixingError):
        nj.input_jacobian(lambda x: norm(x, training=True), X.astype("float32"))
    for value, weight in zip(before, norm.weights, strict=True):
        np.testing.assert_array_equal(value, np.asarray(weight))
