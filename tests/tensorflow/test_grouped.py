"""Grouped convolutions become one convolution a group, or a depthwise one; nothing else is touched."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_configurations import data
from oracles import check

from netjac.tensorflow.grouped import split_grouped

L = keras.layers


def graph_of(x: Any, k: Any, **options: Any) -> Any:
    with tf.Graph().as_default() as graph:
        image = tf.compat.v1.placeholder(x.dtype, (None, *x.shape[1:]), name="x")
        kernel = tf.compat.v1.placeholder(k.dtype, k.shape, name="k")
        convolution = tf.nn.conv2d if x.ndim == 4 else tf.nn.conv3d
        tf.identity(convolution(image, kernel, **options), name="y")
    return graph.as_graph_def()


def run(definition: Any, x: Any, k: Any) -> np.ndarray:
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            return session.run("y:0", {"x:0": x, "k:0": k})


def naive(x: np.ndarray, k: np.ndarray, groups: int) -> np.ndarray:
    """Each group alone, by TensorFlow's plain convolution with stride 1 and no padding."""
    parts = [
        tf.nn.convolution(a, b)
        for a, b in zip(np.split(x, groups, -1), np.split(k, groups, -1), strict=True)
    ]  # fmt: skip
    return np.concatenate(parts, -1)


@pytest.mark.parametrize("groups", [2, 3, 6])
def test_values_are_those_of_each_group_alone(groups: int, rng: np.random.Generator) -> None:
    x, k = rng.normal(size=(2, 5, 4, 6)), rng.normal(size=(2, 3, 6 // groups, 6))
    split = split_grouped(graph_of(x, k, strides=1, padding="VALID"))
    kinds = [node.op for node in split.node if "Conv" in node.op]
    assert kinds == (["DepthwiseConv2dNative"] if groups == 6 else ["Conv2D"] * groups)
    np.testing.assert_allclose(run(split, x, k), naive(x, k, groups), atol=1e-12)


def test_depthwise_with_several_channels_out_of_each(rng: np.random.Generator) -> None:
    x, k = rng.normal(size=(2, 5, 4, 3)), rng.normal(size=(2, 3, 1, 6))
    split = split_grouped(graph_of(x, k, strides=1, padding="VALID"))
    assert [node.op for node in split.node if "Conv" in node.op] == ["DepthwiseConv2dNative"]
    np.testing.assert_allclose(run(split, x, k), naive(x, k, 3), atol=1e-12)


def test_in_space(rng: np.random.Generator) -> None:
    x, k = rng.normal(size=(2, 3, 3, 3, 4)), rng.normal(size=(2, 2, 2, 2, 6))
    split = split_grouped(graph_of(x, k, strides=[1] * 5, padding="VALID"))
    np.testing.assert_allclose(run(split, x, k), naive(x, k, 2), atol=1e-12)


def test_one_group_stays_as_it_is(rng: np.random.Generator) -> None:
    definition = graph_of(rng.normal(size=(2, 5, 4, 6)), rng.normal(size=(2, 3, 6, 4)), strides=1, padding="SAME")
    assert list(split_grouped(definition).node) == list(definition.node)


def test_a_graph_without_convolutions_is_the_same_object() -> None:
    with tf.Graph().as_default() as graph:
        tf.constant(1.0)
    definition = graph.as_graph_def()
    assert split_grouped(definition) is definition


def test_behind_a_frozen_layer() -> None:
    """The channels that come in are those of a variable that is read outside."""
    layers = [L.EinsumDense("btd,dc->btc", (3, 4), trainable=False), L.Conv1D(6, 2, groups=2), L.Flatten(), L.Dense(2)]
    check(keras.Sequential([keras.Input((3, 2)), *layers]), data(3, 2))


@pytest.mark.parametrize("groups", [2, 4])
def test_derivatives_with_respect_to_the_image(groups: int, rng: np.random.Generator) -> None:
    sizes, k, d = (2, 5, 4, 4), rng.normal(size=(2, 3, 4 // groups, 8)), rng.normal(size=(2, 4, 2, 8))
    with tf.Graph().as_default() as graph:
        kernel = tf.compat.v1.placeholder(k.dtype, k.shape, name="k")
        cotangents = tf.compat.v1.placeholder(d.dtype, (None, *d.shape[1:]), name="x")
        options = {"input_sizes": sizes, "strides": [1] * 4, "padding": "VALID"}
        tf.identity(tf.raw_ops.Conv2DBackpropInput(filter=kernel, out_backprop=cotangents, **options), name="y")
    split = split_grouped(graph.as_graph_def())
    assert [node.op for node in split.node if "Conv" in node.op] == ["Conv2DBackpropInput"] * groups
    parts = zip(np.split(k, groups, -1), np.split(d, groups, -1), strict=True)
    alone = [tf.nn.conv2d_transpose(b, a, (*sizes[:3], 4 // groups), 1, "VALID") for a, b in parts]
    np.testing.assert_allclose(run(split, d, k), np.concatenate(alone, -1), atol=1e-12)


def test_a_model_that_differentiates_itself() -> None:
    net = keras.Sequential([keras.Input((4, 4)), L.Conv1D(4, 2, groups=2, activation="tanh"), L.Flatten(), L.Dense(1)])

    def forces(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = net(x)
        return tape.gradient(energy, x)

    check(forces, data(4, 4).astype("float32"), net.trainable_variables)
