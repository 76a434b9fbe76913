"""Grouped convolutions become one convolution a group, or a depthwise one; nothing else is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from netjac.tensorflow.grouped import split_grouped


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
