"""Each operation that has a rule, in each of its operands, transposed and broadcast, against the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import check, treatments

F = Callable[[Any], Any]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.uniform(0.3, 1.2, shape) * rng.choice([-1.0, 1.0], shape)


def weight(*shape: int, seed: int = 1) -> Any:
    return tf.Variable(values(*shape, seed=seed), name="w")


X = values(4, 5)
XT = values(4, 3, 5)  # samples, time, features
XI = values(3, 5, 4, 2)  # images
INDICES = np.array([[0, 2, 2], [1, 0, 3], [3, 3, 3], [2, 1, 0]], "int32")


def head(h: Any) -> Any:
    """Two outputs in which every entry of h counts differently."""
    flat = tf.reshape(h, [tf.shape(h)[0], int(np.prod(h.shape[1:]))])
    size = flat.shape[1]
    return tf.tanh(0.3 * flat) @ tf.constant(values(size, 2, seed=9))


# name: (shape of the weight, x, function of (x, w), treatment)
CASES: dict[str, tuple[tuple[int, ...], np.ndarray, Callable[[Any, Any], Any], str]] = {
    "x @ w": ((5, 3), X, lambda x, w: x @ w, "factored"),
    "x @ wᵀ": ((3, 5), X, lambda x, w: tf.matmul(x, w, transpose_b=True), "factored"),
    "xᵀᵀ @ w": ((5, 3), X, lambda x, w: tf.matmul(tf.transpose(x), w, transpose_a=True), "factored"),
    "w @ xᵀ": ((3, 5), X, lambda x, w: tf.transpose(tf.matmul(w, x, transpose_b=True)), "factored"),
    "wᵀ @ xᵀ": ((5, 3), X, lambda x, w: tf.transpose(tf.matmul(w, x, transpose_a=True, transpose_b=True)), "factored"),
    "one column": ((5, 1), X, lambda x, w: x @ w, "factored"),
    "one row": ((1, 3), X[:, :1], lambda x, w: x @ w, "factored"),
    "one number": ((1, 1), X[:, :1], lambda x, w: x @ w, "factored"),
    "batched x @ w": ((5, 2), XT, lambda x, w: tf.matmul(x, w), ""),
    "batched w @ x": ((2, 3), XT, lambda x, w: tf.matmul(w, x), ""),
    "batched w @ xᵀ": ((2, 5), XT, lambda x, w: tf.matmul(w, x, transpose_b=True), ""),
    "batched xᵀ @ w": ((3, 2), XT, lambda x, w: tf.matmul(x, w, transpose_a=True), ""),
    "a matrix a step": ((3, 5, 2), XT[:, :, None], lambda x, w: tf.matmul(x, w), "factored"),
    "a matrix a step, transposed": (
        (3, 2, 5),
        XT[:, :, None],
        lambda x, w: tf.matmul(x, w, transpose_b=True),
        "factored",
    ),
    "a matrix a step, one step stretched": ((1, 5, 2), XT[:, :, None], lambda x, w: tf.matmul(x, w), ""),
    "steps stretched over x": ((3, 5, 2), X[:, None, None], lambda x, w: tf.matmul(x, w), "factored"),
    "einsum to heads": ((5, 2, 2), XT, lambda x, w: tf.einsum("btd,dhk->bhtk", x, w), ""),
    "einsum, the weight first": ((2, 5), XT, lambda x, w: tf.einsum("kd,btd->bkt", w, x), ""),
    "einsum over time": ((3, 4), XT, lambda x, w: tf.einsum("btd,te->bde", x, w), ""),
    "einsum over both": ((3, 5, 2), XT, lambda x, w: tf.einsum("btd,tdk->bk", x, w), "factored"),
    "einsum element by element": ((3, 5), XT, lambda x, w: tf.einsum("btd,td->btd", x, w), "factored"),
    "einsum with dots": ((5, 2), XT, lambda x, w: tf.einsum("...d,dk->...k", x, w), ""),
    "einsum with dots on both": ((3, 5, 2), XT, lambda x, w: tf.einsum("b...d,...dk->b...k", x, w), ""),
    "einsum of a diagonal": ((5, 5), X, lambda x, w: tf.einsum("bi,ii->bi", x, w), "fallback"),
    "einsum of three": ((5,), X, lambda x, w: tf.einsum("bi,i,i->bi", x, w, tf.constant(values(5))), ""),
    "einsum that sums the weight": ((5, 2), X, lambda x, w: tf.einsum("bi,ik->bi", x, w), "fallback"),
    "x + w": ((5,), X, lambda x, w: x + w, "factored"),
    "w + x": ((5,), X, lambda x, w: w + x, "factored"),
    "x − w": ((5,), X, lambda x, w: x - w, "factored"),
    "w − x": ((5,), X, lambda x, w: w - x, "factored"),
    "a number added": ((), X, lambda x, w: x + w, "collapsed"),
    "a number subtracted": ((), X, lambda x, w: x - w, "collapsed"),
    "a number times": ((), X, lambda x, w: x * w, "collapsed"),
    "added a step": ((3, 1), XT, lambda x, w: x + w, ""),
    "subtracted a feature": ((1, 5), XT, lambda x, w: x - w, ""),
    "added with an axis more": ((1, 3, 5), XT, lambda x, w: x + w, "factored"),
    "x stretched": ((3, 5), X[:, None], lambda x, w: x + w, "factored"),
    "x and w stretched": ((3, 1), X[:, None], lambda x, w: x * w, ""),
    "bias": ((5,), XT, lambda x, w: tf.nn.bias_add(x, w), ""),
    "bias of an image": ((2,), XI, lambda x, w: tf.nn.bias_add(x, w), "collapsed"),
    "x · w": ((5,), X, lambda x, w: x * w, "factored"),
    "w · x": ((5,), X, lambda x, w: w * x, "factored"),
    "times a step": ((3, 1), XT, lambda x, w: x * w, ""),
    "times everything": ((3, 5), XT, lambda x, w: x * w, "factored"),
    "x / w": ((5,), X, lambda x, w: x / w, "factored"),
    "w / x": ((5,), X, lambda x, w: w / x, "factored"),
    "x / |w| without NaN": ((5,), X, lambda x, w: tf.math.divide_no_nan(x, w), "factored"),
    "x · w without NaN": ((5,), X, lambda x, w: tf.math.multiply_no_nan(x, w), "factored"),
    "w · x without NaN": ((5,), X, lambda x, w: tf.math.multiply_no_nan(w, x), "factored"),
    "|x| to the w": ((5,), X, lambda x, w: tf.abs(x) ** w, "factored"),
    "|w| to the x": ((5,), X, lambda x, w: tf.abs(w) ** x, "factored"),
    "maximum": ((5,), X, lambda x, w: tf.maximum(x, w), "factored"),
    "minimum": ((5,), X, lambda x, w: tf.minimum(w, x), "factored"),
    "squared difference": ((3, 5), XT, lambda x, w: tf.math.squared_difference(x, w), "factored"),
    "squared difference, the other way": ((1, 5), XT, lambda x, w: tf.math.squared_difference(w, x), ""),
    "x log w": ((5,), X, lambda x, w: tf.math.xlogy(x, tf.abs(w)), "factored"),
    "w log x": ((5,), X, lambda x, w: tf.math.xlogy(w, tf.abs(x)), "factored"),
    "x log(1 + w)": ((5,), X, lambda x, w: tf.math.xlog1py(x, tf.abs(w)), "factored"),
    "x / w without NaN at 0": ((5,), X, lambda x, w: tf.math.xdivy(x, w), "factored"),
    "atan2": ((5,), X, lambda x, w: tf.math.atan2(x, w), "factored"),
    "atan2, the other way": ((5,), X, lambda x, w: tf.math.atan2(w, x), "factored"),
    "where": ((5,), X, lambda x, w: tf.where(x > 0, w, x), "factored"),
    "where, the other way": ((3, 1), XT, lambda x, w: tf.where(x > 0, x, w), ""),
    "where, a number": ((), XT, lambda x, w: tf.where(x > 0, x, w), "collapsed"),
    "remainder": ((5,), X, lambda x, w: tf.math.floormod(tf.abs(x) + 3, tf.abs(w)), "factored"),
    "stretched over the samples": ((5,), X, lambda x, w: tf.broadcast_to(w, tf.shape(x)) * x, ""),
    "stretched over samples and time": ((5,), XT, lambda x, w: tf.broadcast_to(w, tf.shape(x)) * x, ""),
    "tiled over the samples": ((1, 2, 5), X, lambda x, w: tf.tile(w, [tf.shape(x)[0], 1, 1]) * x[:, None], ""),
    "tiled over samples and features": (
        (1, 2),
        X,
        lambda x, w: tf.tile(w, [tf.shape(x)[0], 2]) * x[:, :4],
        "",
    ),
    "a token in front": (
        (1, 1, 5),
        XT,
        lambda x, w: tf.concat([tf.tile(w, [tf.shape(x)[0], 1, 1]), x], 1),
        "",
    ),
    "repeated a sample": ((5,), X, lambda x, w: tf.repeat(w[None], tf.shape(x)[0], 0) * x, ""),
    "convolution": ((2, 3, 2, 3), XI, lambda x, w: tf.nn.conv2d(x, w, (2, 1), "SAME"), ""),
    "convolution, padded by hand": (
        (2, 3, 2, 3),
        XI,
        lambda x, w: tf.nn.conv2d(x, w, 1, [[0, 0], [0, 2], [1, 1], [0, 0]]),
        "",
    ),
    "convolution, dilated": (
        (2, 2, 2, 3),
        XI,
        lambda x, w: tf.nn.convolution(x, w, padding="VALID", dilations=(2, 3)),
        "",
    ),
    "convolution of all of the image": ((5, 4, 2, 3), XI, lambda x, w: tf.nn.conv2d(x, w, 1, "VALID"), "factored"),
    "convolution with a kernel of one": ((1, 1, 2, 3), XI, lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"), ""),
    "depthwise": (
        (2, 2, 2, 3),
        XI,
        lambda x, w: tf.nn.depthwise_conv2d(x, w, (1, 2, 2, 1), "SAME"),
        "",
    ),
    "depthwise, padded by hand": (
        (2, 2, 2, 1),
        XI,
        lambda x, w: tf.nn.depthwise_conv2d(x, w, (1, 1, 1, 1), [[0, 0], [1, 0], [0, 1], [0, 0]]),
        "",
    ),
    "convolution in space": (
        (2, 2, 1, 2, 2),
        XI[..., None, :],
        lambda x, w: tf.nn.conv3d(x, w, [1, 2, 1, 1, 1], "SAME"),
        "",
    ),
    "transposed convolution": (
        (3, 2, 3, 2),
        XI,
        lambda x, w: tf.nn.conv2d_transpose(x, w, [tf.shape(x)[0], 10, 4, 3], (2, 1), "SAME"),
        "",
    ),
    "transposed convolution, padded by hand": (
        (3, 2, 3, 2),
        XI,
        lambda x, w: tf.nn.conv2d_transpose(x, w, [tf.shape(x)[0], 6, 4, 3], 1, [[0, 0], [1, 0], [0, 1], [0, 0]]),
        "",
    ),
    "transposed convolution in space": (
        (2, 2, 1, 2, 2),
        XI[..., None, :],
        lambda x, w: tf.nn.conv3d_transpose(x, w, [tf.shape(x)[0], 10, 5, 1, 2], [1, 2, 1, 1, 1], "VALID"),
        "",
    ),
    "the weight is the image": (
        (1, 4, 4, 1),
        XI[:, :1, :1, :1],
        lambda x, w: tf.nn.conv2d(x * w, tf.ones((2, 2, 1, 1), tf.float64), 1, "VALID"),
        "",
    ),
    "look-up": ((4, 2), INDICES, lambda i, w: tf.gather(w, i), ""),
    "look-up of a large table": ((40, 2), INDICES, lambda i, w: tf.gather(w, i), "factored"),
    "look-up of numbers": ((40,), INDICES, lambda i, w: tf.gather(w, i), "factored"),
    "look-up of matrices": ((9, 2, 2), INDICES, lambda i, w: tf.gather(w, i), "factored"),
    "look-up of one token": ((4, 2), INDICES[:, 0], lambda i, w: tf.gather(w, i), "factored"),
    "embedding_lookup": ((40, 2), INDICES, lambda i, w: tf.nn.embedding_lookup(w, i), "factored"),
    "look-up by one-hot": ((4, 2), INDICES, lambda i, w: tf.one_hot(i, 4, dtype=w.dtype) @ w, ""),
    "look-up of columns": ((2, 4), INDICES, lambda i, w: tf.transpose(tf.gather(w, i, axis=1), [1, 2, 0]), "fallback"),
    "look-up of a scaled table": ((40, 2), INDICES, lambda i, w: tf.gather(w * 3 * w, i), "factored"),
    "look-up of a transposed table": ((2, 40), INDICES, lambda i, w: tf.gather(tf.transpose(w), i), "factored"),
    "look-up of many dimensions": ((4, 3), INDICES, lambda i, w: tf.gather_nd(w, i[..., None]), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_equals_the_tape(name: str) -> None:
    shape, x, f, treatment = CASES[name]
    w = weight(*shape)
    J = check(lambda x: head(f(x, w)), x, [w], random=False)
    if treatment:
        assert treatments(J) == {"w": {treatment}}, J.coverage


@pytest.mark.parametrize("layout", ["samples last", "samples in the middle"])
def test_samples_need_not_come_first(layout: str) -> None:
    w, b = weight(5, 3), tf.Variable(values(3), name="b")
    order = [1, 2, 0] if layout == "samples last" else [1, 0, 2]

    def f(x: Any) -> Any:
        h = tf.transpose(x, order)
        z = tf.einsum("tdb,dk->tkb", h, w) if layout == "samples last" else tf.einsum("tbd,dk->tkb", h, w)
        return head(tf.transpose(tf.tanh(z + b[:, None]), [2, 0, 1]))

    assert "fallback" not in treatments(check(f, XT, [w, b], random=False))["w"]


def test_a_product_of_two_weights_and_data() -> None:
    w, v = weight(5, 3), tf.Variable(values(3, 5, seed=4), name="v")
    J = check(lambda x: head(x @ (w @ v)), X, [w, v], random=False)
    assert treatments(J) == {"w": {"factored"}, "v": {"factored"}}


def test_a_gradient_of_its_own_is_not_read_by_a_rule() -> None:
    """The gradient registered for an operation type in one graph is not that type's own."""
    w = weight(5, 3)

    @tf.custom_gradient
    def doubled(x: Any, k: Any) -> Any:
        return x @ k, lambda d: (d @ tf.transpose(k), 2 * tf.transpose(x) @ d)

    J = check(lambda x: head(doubled(x, w)), X, [w], random=False)
    assert treatments(J)["w"] == {"fallback"}
