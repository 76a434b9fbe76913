"""Small networks and formulas that several tests fit, with what NumPy says of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


def network(hidden: int = 3, outputs: int = 1, inputs: int = 1, dtype: str = "float64", seed: int = 1) -> Any:
    """inputs-hidden-outputs with tanh, its first layer called "hidden", its last "out"."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((inputs,), dtype=dtype),
            layers.Dense(hidden, "tanh", dtype=dtype, name="hidden", bias_initializer="random_normal"),
            layers.Dense(outputs, dtype=dtype, name="out", bias_initializer="random_normal"),
        ]
    )


def weights(model: Any) -> np.ndarray:
    """The live weights as one vector."""
    return np.concatenate([np.ravel(np.asarray(w)) for w in model.trainable_weights])


def outputs_of(theta: np.ndarray, x: np.ndarray, hidden: int = 3, outputs: int = 1) -> np.ndarray:
    """That network in NumPy, (n, outputs)."""
    inputs = x.shape[1]
    sizes = np.cumsum([inputs * hidden, hidden, hidden * outputs, outputs])
    w, b, v, c = np.split(theta, sizes[:-1])
    return np.tanh(x @ w.reshape(inputs, hidden) + b) @ v.reshape(hidden, outputs) + c


def difference(fun: Any, theta: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of fun, (*shape of fun, M)."""
    columns = []
    for unit in np.eye(theta.size):
        ahead, behind = np.asarray(fun(theta + step * unit)), np.asarray(fun(theta - step * unit))
        columns.append((ahead - behind) / (2 * step))
    return np.stack(columns, axis=-1)


@cache
def _formula() -> tuple[Any, list[Any]]:
    a, b = tf.Variable(1.0, dtype="float64", name="a"), tf.Variable([0.2], dtype="float64", name="b")
    return lambda x: a * tf.exp(-b * x), [a, b]


def formula() -> tuple[Any, list[Any]]:
    """y = a exp(-b x) as a TensorFlow formula, and its variables at (1, 0.2); always the same ones, traced once."""
    f, (a, b) = _formula()
    a.assign(1.0)
    b.assign([0.2])
    return f, [a, b]
