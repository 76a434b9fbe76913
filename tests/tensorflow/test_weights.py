"""Weights made from other weights before they meet the data: adapters, and kernels put together from parts."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import check

import netjac as nj
from netjac.sites import Treatment

FACTORS = {Treatment.FACTORED, Treatment.COLLAPSED}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def variables(*shapes: tuple[int, ...]) -> list[tf.Variable]:
    return [tf.Variable(normal(*shape, seed=i), dtype="float64") for i, shape in enumerate(shapes)]


def test_both_factors_of_a_low_rank_change_keep_their_own_factors():
    w, a, b = variables((4, 3), (4, 2), (2, 3))
    J = check(lambda x: tf.tanh(x @ (w + 0.5 * a @ b)), normal(5, 4), variables=[w, a, b])
    assert J.coverage.counts[Treatment.FACTORED] == 3


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_low_rank_change_on_sequences(sign):
    w, a, b = variables((4, 3), (4, 2), (2, 3))
    J = check(lambda x: tf.tanh(x @ (w + sign * (a @ b) / 3.0)), normal(5, 6, 4), variables=[w, a, b])
    assert {entry.treatment for entry in J.coverage.entries} <= FACTORS


def test_products_of_transposed_weights():
    a, b = variables((4, 2), (2, 3))

    def f(x):
        kernel = tf.matmul(b, a, transpose_a=True, transpose_b=True)  # (3, 4)
        return tf.tanh(tf.matmul(x, kernel, transpose_b=True) - x @ (-tf.transpose(kernel)))

    J = check(f, normal(5, 4), variables=[a, b])
    assert {entry.treatment for entry in J.coverage.entries} <= FACTORS


def test_a_low_rank_change_of_an_embedding():
    table, a, b = variables((50, 3), (50, 2), (2, 3))
    ids = np.random.default_rng(0).integers(0, 50, (5, 7))
    J = check(lambda i: tf.reduce_sum(tf.tanh(tf.gather(table + a @ b, i)), axis=1), ids, variables=[table, a, b])
    assert {entry.treatment for entry in J.coverage.entries} <= FACTORS


def test_what_is_more_than_one_product_falls_back_and_is_right():
    a, b, c = variables((4, 2), (2, 3), (4, 4))
    J = check(lambda x: tf.tanh(x @ (c @ c) @ (a @ b @ tf.transpose(a @ b))), normal(3, 4), variables=[a, b, c])
    assert J.coverage.counts[Treatment.FALLBACK] > 0
    assert all(entry.reason for entry in J.coverage.entries if entry.treatment is Treatment.FALLBACK)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: keras.layers.Dense(6), (4,)),
        (lambda: keras.layers.EinsumDense("abc,cd->abd", (5, 6), bias_axes="d"), (5, 4)),
        (lambda: keras.layers.Conv2D(6, 3), (6, 6, 2)),
        (lambda: keras.layers.Embedding(7, 5), (4,)),
    ],
    ids=["dense", "einsum", "conv", "embedding"],
)
def test_adapters_of_keras_layers_are_factored(layer, shape):
    adapted = layer()
    ids = isinstance(adapted, keras.layers.Embedding)
    inputs = keras.Input(shape, dtype="int32" if ids else "float32")
    model = keras.Sequential([inputs, adapted, keras.layers.Flatten(), keras.layers.Dense(2)])
    adapted.enable_lora(2)
    x = np.random.default_rng(0).integers(0, 7, (3, *shape)) if ids else normal(3, *shape).astype("float32")
    J = check(model, x)
    assert {entry.treatment for entry in J.coverage.entries} <= FACTORS


def test_a_kernel_of_several_variables():
    a, b, bias = variables((4, 2), (4, 3), (5,))

    def f(x):
        kernel = tf.pad(tf.concat([a, 2.0 * b], axis=1), [[0, 0], [0, 1]])
        return tf.tanh(x @ kernel)[:, :5] + tf.stack(tf.unstack(bias)[::-1])

    J = check(f, normal(5, 4), variables=[a, b, bias])
    assert J.coverage.counts[Treatment.FALLBACK] == 0
    assert isinstance(J, nj.Jacobian)
