"""Input derivatives across samples, the full matrix, against the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import close, limit, randomise

import netjac as nj
from netjac.tensorflow import inputs

L = keras.layers
RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(3, 2))


def tape_matrix(f: Callable[[Any], Any], x: Any) -> np.ndarray:
    """(n, l, n, *input shape) by ``tape.jacobian``."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = f(x)
        y = tf.reshape(y, [y.shape[0], -1])
    return np.asarray(tape.jacobian(y, x, experimental_use_pfor=False))


def attention(x: Any) -> Any:
    q = x @ tf.cast(KERNEL, x.dtype)
    return tf.matmul(tf.nn.softmax(tf.matmul(q, q, transpose_b=True)), x)


MIXING: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "softmax over the batch": (lambda x: tf.nn.softmax(x, axis=0), (3,)),
    "mean over the batch": (lambda x: tf.tanh(x - tf.reduce_mean(x, 0)), (3,)),
    "attention across the batch": (attention, (3,)),
    "samples and time swapped": (lambda x: tf.reshape(tf.transpose(x**2, [1, 0, 2]), [-1, 4, 2]), (4, 2)),
    "sorted": (lambda x: tf.sort(x, axis=0), (3,)),
    "running sum": (lambda x: tf.cumsum(x**2), (2, 2)),
    "no mixing at all": (lambda x: tf.sin(x), (3,)),
    "one output": (lambda x: tf.reduce_sum(x**2, 1) / tf.reduce_sum(x**2), (3,)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("n", [1, 4])
def test_models_that_mix_samples(name: str, n: int, dtype: str) -> None:
    f, shape = MIXING[name]
    x = RNG.normal(size=(n, *shape)).astype(dtype)
    found = nj.input_jacobian(f, x, across_samples=True)
    assert found.dtype == dtype
    close(found, tape_matrix(f, x), name, limit(dtype))


@pytest.mark.parametrize("precision", ["float32", "float64"], indirect=True)
@pytest.mark.parametrize("shape", [(3,), (4, 4, 2)])
def test_batch_normalisation_in_training_mode(shape: tuple[int, ...], precision: str) -> None:
    model = keras.Sequential([keras.Input(shape), L.Dense(3, "tanh"), L.BatchNormalization(), L.Flatten(), L.Dense(2)])
    randomise(model.weights)
    before = [np.asarray(w) for w in model.weights]
    x = RNG.normal(size=(4, *shape)).astype(precision)

    def f(x: Any) -> Any:
        return model(x, training=True)

    found = nj.input_jacobian(f, x, across_samples=True)
    for value, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, np.asarray(weight))  # the statistics are left alone
    close(found, tape_matrix(f, x), "batch normalisation", limit(precision))
    assert np.abs(found[0, :, 1]).max() > 0


def test_without_mixing_the_diagonal_is_the_matrix_by_sample() -> None:
    x = RNG.normal(size=(5, 3))

    def f(x: Any) -> Any:
        return tf.tanh(x @ KERNEL)

    full = nj.input_jacobian(f, x, across_samples=True)
    by_sample = nj.input_jacobian(f, x)
    for i in range(5):
        np.testing.assert_allclose(full[i, :, i], by_sample[i], rtol=1e-13)
        assert not np.delete(full[i], i, axis=1).any()


def test_several_inputs_and_outputs_of_several_shapes() -> None:
    x = {"a": RNG.normal(size=(3, 2)), "b": RNG.normal(size=(3, 2, 2))}

    def f(x: Any) -> Any:
        return [tf.nn.softmax(x["a"], axis=0), tf.reduce_sum(x["b"], [1, 2]) * tf.reduce_sum(x["a"])]

    found = nj.input_jacobian(f, x, across_samples=True)
    for name in x:

        def joined(leaf: Any, name: str = name) -> Any:
            parts = f(x | {name: leaf})
            return tf.concat([tf.reshape(part, [3, -1]) for part in parts], axis=1)

        close(found[name], tape_matrix(joined, x[name]), name, 1e-12)


def test_tiles_and_loops_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = RNG.normal(size=(5, 3))
    whole = nj.input_jacobian(lambda x: attention(x), x, across_samples=True)
    for tile in (1, 40, 100):
        monkeypatch.setattr(inputs, "TILE", tile)
        np.testing.assert_allclose(nj.input_jacobian(lambda x: attention(x), x, across_samples=True), whole, rtol=1e-12)

    def refuse(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(tf, "vectorized_map", refuse)
    np.testing.assert_allclose(nj.input_jacobian(lambda x: attention(x), x, across_samples=True), whole, rtol=1e-12)


def test_a_loop_over_the_samples() -> None:
    def f(x: Any) -> Any:
        total = tf.zeros_like(x[0])
        rows = tf.TensorArray(x.dtype, size=tf.shape(x)[0], element_shape=(3,))
        _, _, rows = tf.while_loop(
            lambda i, *_: i < tf.shape(x)[0],
            lambda i, total, rows: (i + 1, tf.tanh(total + x[i]), rows.write(i, tf.tanh(total + x[i]))),
            (0, total, rows),
        )
        return tf.ensure_shape(rows.stack(), (None, 3))

    x = RNG.normal(size=(4, 3))
    close(nj.input_jacobian(f, x, across_samples=True), tape_matrix(f, x), "a recurrence over the samples", 1e-12)


def test_no_samples_and_an_input_that_does_not_reach() -> None:
    assert nj.input_jacobian(attention, np.zeros((0, 3)), across_samples=True).shape == (0, 3, 0, 3)
    x = [RNG.normal(size=(3, 2)), RNG.normal(size=(3, 4))]
    found = nj.input_jacobian(lambda x: x[0] ** 2, x, across_samples=True)
    assert found[1].shape == (3, 2, 3, 4)
    assert not found[1].any()


def test_the_present_weights_are_used() -> None:
    w = tf.Variable(KERNEL)

    def f(x: Any) -> Any:
        return tf.nn.softmax(x @ w, axis=0)

    x = RNG.normal(size=(3, 3))
    nj.input_jacobian(f, x, across_samples=True)
    w.assign(2 * w)
    close(nj.input_jacobian(f, x, across_samples=True), tape_matrix(f, x), "after an assignment", 1e-12)


def test_the_refusal_of_mixing_says_how_to_get_the_full_matrix() -> None:
    with pytest.raises(nj.SampleMixingError, match="across_samples=True"):
        nj.input_jacobian(lambda x: tf.nn.softmax(x, axis=0), RNG.normal(size=(3, 3)))


def test_randomness_and_integers_are_still_refused() -> None:
    with pytest.raises(nj.RandomModelError):
        nj.input_jacobian(lambda x: tf.nn.dropout(x, 0.5), np.ones((2, 3)), across_samples=True)
    with pytest.raises(nj.DtypeError, match="embedding's output"):
        nj.input_jacobian(lambda x: tf.cast(x, tf.float32), np.ones((2, 3), int), across_samples=True)
