"""The Keras models, for TensorFlow's own ways to a Jacobian and for netjac."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from benchmarks import networks
from benchmarks.networks import Network


def build(network: Network, dtype: str = "float32") -> Any:
    """The Keras model of ``network`` with the shared weights."""
    inputs = keras.Input(network.input_shape, dtype=dtype)
    body = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer, "mixed": _mixed}[network.kind]
    model = keras.Model(inputs, body(network, inputs, dtype))
    _load(network, model)
    return model


def _load(network: Network, model: Any) -> None:
    variables = model.trainable_variables
    shapes = networks.specs(network) or [(variable.path, tuple(variable.shape)) for variable in variables]
    if [tuple(variable.shape) for variable in variables] != [shape for _, shape in shapes]:
        raise RuntimeError(f"Keras orders the weights of {network.name} differently from benchmarks.networks.")
    for variable, value in zip(variables, networks.values(shapes), strict=True):
        variable.assign(value)


def _mlp(network: Network, h: Any, dtype: str) -> Any:
    for width in network.widths[:-1]:
        h = layers.Dense(width, activation="tanh", dtype=dtype)(h)
    return layers.Dense(network.widths[-1], dtype=dtype)(h)


def _cnn(network: Network, h: Any, dtype: str) -> Any:
    for channels in networks.CHANNELS:
        h = layers.Conv2D(channels, 3, activation="relu", dtype=dtype)(h)
        h = layers.MaxPooling2D(2, dtype=dtype)(h)
    h = layers.Flatten(dtype=dtype)(h)
    return layers.Dense(network.outputs, dtype=dtype)(h)


def _transformer(network: Network, x: Any, dtype: str) -> Any:
    head = networks.WIDTH // networks.HEADS
    h = layers.LayerNormalization(epsilon=networks.NORM_EPSILON, dtype=dtype)(x)
    h = layers.MultiHeadAttention(networks.HEADS, head, dtype=dtype)(h, h)
    x = layers.Add(dtype=dtype)([x, h])
    h = layers.LayerNormalization(epsilon=networks.NORM_EPSILON, dtype=dtype)(x)
    h = layers.Dense(networks.HIDDEN, activation="gelu", dtype=dtype)(h)
    h = layers.Dense(networks.WIDTH, dtype=dtype)(h)
    x = layers.Add(dtype=dtype)([x, h])
    x = layers.GlobalAveragePooling1D(dtype=dtype)(x)
    return layers.Dense(network.outputs, dtype=dtype)(x)


def _mixed(network: Network, x: Any, dtype: str) -> Any:
    """Ten layers with weights, of nine kinds."""
    h = layers.Conv2D(8, 3, padding="same", dtype=dtype)(x)
    h = layers.BatchNormalization(dtype=dtype)(h)
    h = layers.Activation("relu", dtype=dtype)(h)
    h = layers.DepthwiseConv2D(3, strides=2, padding="same", dtype=dtype)(h)
    h = layers.SeparableConv2D(16, 3, activation="relu", padding="same", dtype=dtype)(h)
    h = layers.MaxPooling2D(2, dtype=dtype)(h)
    h = layers.Reshape((16, 16), dtype=dtype)(h)
    h = layers.Add(dtype=dtype)([h, layers.MultiHeadAttention(2, 8, dtype=dtype)(h, h)])
    h = layers.LayerNormalization(dtype=dtype)(h)
    h = layers.Conv1D(24, 3, activation="tanh", dtype=dtype)(h)
    h = layers.GlobalAveragePooling1D(dtype=dtype)(h)
    h = layers.Dense(32, activation="swish", dtype=dtype)(h)
    h = layers.Dense(16, activation="tanh", dtype=dtype)(h)
    return layers.Dense(network.outputs, dtype=dtype)(h)
