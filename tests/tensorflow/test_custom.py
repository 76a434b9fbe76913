"""Operations with a gradient of their own, whatever that gradient needs of the graph around it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import check, treatments

import netjac as nj

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3))
W = tf.Variable(RNG.normal(size=(3, 3)), name="w")
B = tf.Variable(RNG.normal(size=3), name="b")


@tf.custom_gradient
def rounded(x: Any) -> Any:
    """Straight through: its gradient is not the derivative."""
    return tf.round(4 * x) / 4, lambda d: d


@tf.custom_gradient
def clipped(x: Any) -> Any:
    """Its gradient needs x and the result."""
    y = tf.tanh(x)
    return y, lambda d: d * (1 - y * y) * tf.cast(tf.abs(x) < 1, x.dtype)


@tf.custom_gradient
def two(x: Any, k: Any) -> Any:
    """Two operands, two results."""

    def gradient(d: Any, e: Any) -> Any:
        return d * k + 2 * e, tf.reduce_sum(d * x, 0)

    return (x * k, x + 1), gradient


@tf.custom_gradient
def half(x: Any) -> Any:
    return x, lambda d: None if d is None else 0.5 * d


CASES = {
    "straight through, of data": lambda x: rounded(x @ W) + B,
    "straight through, of a weight": lambda x: tf.tanh(x @ rounded(W) + B),
    "needs what came in": lambda x: clipped(x @ W + B) @ W,
    "of a weight, needs what came in": lambda x: tf.tanh(x @ clipped(W)) + B,
    "of a weight as it is": lambda x: tf.tanh(x @ W) + half(B),
    "of the input as it is": lambda x: clipped(x) @ W + B,
    "two operands": lambda x: two(x @ W, B)[0] + two(tf.sin(x @ W), tf.cos(B))[1],
    "the same twice": lambda x: clipped(clipped(x @ W + B) @ W),
    "silu": lambda x: tf.nn.silu(x @ W + B) @ W,
    "silu with a trained slope": lambda x: tf.nn.silu(x @ W, B[0]) + B,
}


@pytest.mark.parametrize("name", CASES)
def test_own_gradients_equal_the_tape(name: str) -> None:
    check(CASES[name], X, [W, B], random=False)


def test_own_gradients_under_many_outputs() -> None:
    v = tf.Variable(RNG.normal(size=(3, 20)), name="v")
    check(lambda x: clipped(clipped(x @ W + B) @ v), X, [W, B, v], random=False)


def test_own_gradients_of_inputs() -> None:
    found = nj.input_jacobian(lambda x: clipped(x @ W + B), X)
    for i in range(len(X)):
        x = tf.constant(X[i : i + 1])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = clipped(x @ W + B)[0]
        np.testing.assert_allclose(found[i], tape.jacobian(y, x)[:, 0], atol=1e-14)


def test_a_weight_behind_an_own_gradient_falls_back() -> None:
    J = check(lambda x: tf.tanh(x @ rounded(W) + B), X, [W, B], random=False)
    assert treatments(J) == {"w": {"fallback"}, "b": {"factored"}}
    assert any("gradient of its own" in entry.reason for entry in J.coverage.entries if entry.variable == "w")


def test_own_gradients_at_other_weights() -> None:
    w = tf.Variable(W)

    def f(x: Any) -> Any:
        return clipped(x @ w)

    nj.jacobian(f, X, variables=[w])
    w.assign(-w)
    check(f, X, [w], random=False)


@pytest.mark.parametrize("activation", ["silu", "gelu", "mish", "sparsemax", "selu", "softsign", "log_softmax"])
def test_keras_activations(activation: str, precision: str) -> None:
    layers = [keras.layers.Dense(4, activation), keras.layers.Dense(2)]
    check(keras.Sequential([keras.Input((3,)), *layers]), X)


CLIPPING = {
    "by value": lambda d: tf.clip_by_value(d, -0.1, 0.1),
    "by norm": lambda d: tf.clip_by_norm(d, 0.1),
    "to signs": tf.sign,
    "to size 1": lambda d: d / (tf.norm(d, axis=1, keepdims=True) + 1e-9),
}


@pytest.mark.parametrize("clip", CLIPPING)
def test_a_gradient_that_is_not_linear_is_refused_by_name(clip: str) -> None:
    @tf.custom_gradient
    def clipping(x: Any) -> Any:
        return tf.identity(x, name="clipped_here"), CLIPPING[clip]

    def f(x: Any) -> Any:
        return clipping(x @ W) @ W

    message = r"the operation '\S*IdentityN\S*' \(IdentityN\) .* not linear .* clip what the optimiser is given"
    with pytest.raises(nj.ModelError, match=message):
        nj.jacobian(f, X, variables=[W])
    with pytest.raises(nj.ModelError, match=message):
        nj.input_jacobian(f, X)


def test_clipping_that_never_clips_changes_nothing() -> None:
    @tf.custom_gradient
    def clipping(x: Any) -> Any:
        return tf.identity(x), lambda d: tf.clip_by_value(d, -1e3, 1e3)

    check(lambda x: tf.tanh(clipping(x @ W)) @ W, X, [W], random=False)
    nj.input_jacobian(lambda x: tf.tanh(clipping(x @ W)), X)


def test_inside_a_nested_function_it_is_right_or_refused() -> None:
    @tf.function
    def simple(x: Any) -> Any:
        return rounded(x) * 2

    check(lambda x: simple(x @ W), X, [W], random=False)

    @tf.function
    def closed(x: Any) -> Any:
        return clipped(x) * 2

    with pytest.raises(nj.ModelError, match=r"custom_gradient\) inside a nested tf.function"):
        nj.jacobian(lambda x: closed(x @ W), X, variables=[W])
