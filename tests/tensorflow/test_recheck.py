"""Mixing that is asleep when a model is first seen, and wakes up later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import check

import netjac as nj
from netjac.tensorflow import evaluator

X = np.random.default_rng(0).uniform(0.5, 1.0, (5, 4))


def kernel() -> tf.Variable:
    return tf.Variable(np.random.default_rng(1).normal(size=(4, 3)))


def rechecked(f: Callable[[Any], Any], x: Any, variables: list[tf.Variable]) -> bool:
    return evaluator(f, x, variables)._extractor._recheck is not None


def test_a_threshold_that_the_inputs_cross_later():
    w = kernel()

    def f(x):
        z = x @ w
        return z + tf.nn.relu(tf.reduce_sum(z, axis=0) - 1000.0)

    check(f, X, variables=[w], random=False)
    with pytest.raises(nj.SampleMixingError, match="Sum"):
        nj.jacobian(f, 1e4 * np.abs(X) * np.sign(np.sum(w.numpy())), variables=[w])


def test_a_threshold_that_the_parameters_cross_during_a_fit():
    w = tf.Variable(np.ones((4, 3)))

    def f(x):
        z = x @ w
        return z + tf.nn.relu(tf.reduce_sum(z, axis=0) - 1000.0)

    evaluate = evaluator(f, X, [w]).evaluate
    evaluate()
    with pytest.raises(nj.SampleMixingError, match="at these inputs and parameters"):
        evaluate(np.full(12, 1e3))


def test_a_gate_that_is_opened_later():
    w, gate = kernel(), tf.Variable(0.0, dtype="float64", trainable=False)

    def f(x):
        z = x @ w
        return z - gate * tf.reduce_mean(z, axis=0)

    check(f, X, variables=[w], random=False)
    gate.assign(1.0)
    with pytest.raises(nj.SampleMixingError):
        nj.jacobian(f, X, variables=[w])


def test_a_branch_on_the_number_of_samples():
    w = kernel()

    def f(x):
        z = x @ w
        return tf.cond(tf.shape(x)[0] > 3, lambda: z - tf.reduce_mean(z, axis=0), lambda: z)

    check(f, X[:2], variables=[w], random=False)
    with pytest.raises(nj.SampleMixingError):
        nj.jacobian(f, X, variables=[w])


@pytest.mark.parametrize(
    ("f", "suspicious"),
    [
        (lambda x, w: tf.cumsum(x @ w, axis=1), False),
        (lambda x, w: tf.reverse(tf.nn.softmax(x @ w), [1]), False),
        (lambda x, w: tf.reduce_mean(x @ w, axis=1, keepdims=True), False),
        (lambda x, w: tf.transpose(tf.transpose(x @ w)), False),
        (lambda x, w: x @ w + 0.0 * tf.reduce_max(x @ w), True),
        (lambda x, w: x @ w + 0.0 * tf.cumsum(x @ w, axis=0), True),
        (lambda x, w: x @ w + 0.0 * tf.transpose(tf.nn.softmax(tf.transpose(x @ w))), True),
    ],
    ids=[
        "cumsum of outputs",
        "softmax",
        "mean of outputs",
        "transposes",
        "max",
        "cumsum of samples",
        "softmax of samples",
    ],
)
def test_only_what_could_mix_is_checked_again(f, suspicious):
    w = kernel()
    assert rechecked(lambda x: f(x, w), X, [w]) is suspicious


def test_arrays_of_tensors_and_tables_are_looked_over():
    """They have no shape."""
    w = kernel()
    keys, values = tf.constant([0, 10], tf.int64), tf.constant([1, 3], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0)

    def steps(x):
        array = tf.TensorArray(x.dtype, size=2)
        for i in range(2):
            array = array.write(i, tf.tanh(x @ w) * float(i))
        return tf.transpose(array.stack(), [1, 0, 2])

    check(steps, X, variables=[w], random=False)
    check(lambda i: tf.gather(w, table.lookup(i)), np.array([0, 10, 77]), variables=[w], random=False)
