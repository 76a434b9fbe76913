"""Models made for one number of samples, and Python code inside a graph: taken where they can be, refused in words."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import check

import netjac as nj

L = keras.layers
X = np.random.default_rng(0).normal(size=(4, 3))
W = tf.Variable(np.random.default_rng(1).normal(size=(3, 2)), name="w")


def fixed(*layers: Any, n: int = 4, shape: tuple[int, ...] = (3,)) -> Any:
    i = h = keras.Input(shape, batch_size=n)
    for layer in layers:
        h = layer(h)
    return keras.Model(i, h)


@pytest.mark.parametrize("n", [4, 3])
def test_a_stated_number_of_samples_that_nothing_uses_is_ignored(n: int) -> None:
    check(fixed(L.Dense(4, "tanh"), L.Dense(2)), X[:n].astype("float32"))
    check(keras.Sequential([keras.Input(batch_shape=(4, 3)), L.Dense(2)]), X[:n].astype("float32"))


def test_outputs_with_a_fixed_number_of_samples() -> None:
    model = fixed(L.Dense(2), L.Lambda(lambda h: tf.reshape(h, (4, 2))))
    with pytest.raises(nj.ShapeError, match=r"shape \(4, 2\) whatever.*made for 4 samples.*without batch_size"):
        nj.jacobian(model, X)


def test_a_fixed_number_of_samples_inside() -> None:
    model = fixed(L.Dense(2), L.Lambda(lambda h: tf.reshape(tf.reshape(h, (-1, 8)), (-1, 2))))
    with pytest.raises(nj.ModelError, match=r"cannot be run on 2 samples(.|\n)*must say -1"):
        nj.jacobian(model, X)


def test_a_model_that_cannot_be_traced_with_any_number_of_samples() -> None:
    model = fixed(L.Dense(2), L.Lambda(lambda h: h * [[1.0]] * h.shape[0]))
    with pytest.raises(nj.ModelError, match=r"could not be traced(.|\n)*built for 4 samples, no more and no fewer"):
        nj.jacobian(model, X)


@pytest.mark.parametrize("call", [tf.py_function, tf.numpy_function])
def test_python_code_that_does_not_state_its_shape(call: Any) -> None:
    def f(x: Any) -> Any:
        return call(lambda a: 2 * a, [x @ W], tf.float64)

    with pytest.raises(nj.ShapeError, match=r"'(Eager)?PyFunc' .*does not state what it returns(.|\n)*ensure_shape"):
        nj.jacobian(f, X, variables=[W])


@pytest.mark.parametrize("call", [tf.py_function, tf.numpy_function])
def test_weights_through_python_code(call: Any) -> None:
    """TensorFlow's gradient of a numpy_function is none, which would read as a derivative of zero."""

    def f(x: Any) -> Any:
        return tf.ensure_shape(call(lambda a: 2 * a, [x @ W], tf.float64), (None, 2)) + 0 * (x @ W)

    with pytest.raises(nj.ModelError, match=r"'(Eager)?PyFunc' .*no derivative here(.|\n)*tf.custom_gradient"):
        nj.jacobian(f, X, variables=[W])


@pytest.mark.parametrize("call", [tf.py_function, tf.numpy_function])
def test_data_through_python_code(call: Any) -> None:
    def f(x: Any) -> Any:
        return tf.sin(tf.ensure_shape(call(lambda a: 2 * a, [x], tf.float64), (None, 3)) @ W)

    check(f, X, [W], random=False)
    gc.collect()  # the Python code lives as long as what was traced
    check(f, X[:2], [W], random=False)


def test_python_code_with_a_derivative_of_its_own() -> None:
    @tf.custom_gradient
    def cubed(a: Any) -> Any:
        y = tf.ensure_shape(tf.numpy_function(lambda v: v**3, [a], tf.float64), a.shape)
        return y, lambda d: d * 3 * a**2

    check(lambda x: cubed(x @ W), X, [W], random=False)
