"""Loops and branches, their variables by reference and by value, against the tape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import check, treatments

import netjac as nj

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4))
X3 = RNG.normal(size=(3, 5, 4))
W = tf.Variable(RNG.normal(size=(4, 4)), name="w")
B = tf.Variable(RNG.normal(size=4), name="b")
T = tf.Variable(RNG.normal(size=(6, 4)), name="t")


def step(h: Any) -> Any:
    return tf.tanh(h @ W + B)


def by_reference(x: Any) -> Any:
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, step(h)), (0, x))[1]


def by_value(x: Any) -> Any:
    w = tf.convert_to_tensor(W)
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w + B)), (0, x))[1]


def carried(x: Any) -> Any:
    """The weight is itself a loop variable."""
    return tf.while_loop(lambda i, h, w: i < 3, lambda i, h, w: (i + 1, tf.tanh(h @ w + B), 0.9 * w), (0, x, W))[1]


def branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(W) > 0, lambda: x @ W, lambda: x @ (2 * W)) + B


def branch_in_loop(x: Any) -> Any:
    def body(i: Any, h: Any) -> Any:
        return i + 1, tf.cond(i % 2 == 0, lambda: step(h), lambda: h * B)

    return tf.while_loop(lambda i, h: i < 3, body, (0, x))[1]


def loop_in_loop(x: Any) -> Any:
    def inner(h: Any) -> Any:
        return tf.while_loop(lambda j, g: j < 2, lambda j, g: (j + 1, step(g)), (0, h))[1]

    return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, inner(h) + B), (0, x))[1]


def loop_in_function(x: Any) -> Any:
    return tf.function(by_reference)(x) @ W


def switch(x: Any) -> Any:
    index = tf.cast(tf.math.argmax(B), tf.int32)
    return tf.switch_case(index, [lambda: x @ W, lambda: x * B, lambda: step(x), lambda: x + B])


def scan(x: Any) -> Any:
    states = tf.scan(lambda h, e: tf.tanh(e @ W + h * B), tf.transpose(x, [1, 0, 2]), tf.zeros_like(x[:, 0]))
    return tf.transpose(states, [1, 0, 2])[:, ::2]


def mapped_over_time(x: Any) -> Any:
    return tf.transpose(tf.map_fn(step, tf.transpose(x, [1, 0, 2])), [1, 0, 2])


def mapped_over_samples(x: Any) -> Any:
    return tf.map_fn(lambda e: tf.tanh(tf.linalg.matvec(W, e, transpose_a=True) * B), x)


def looked_up_in_loop(i: Any) -> Any:
    start = tf.zeros((tf.shape(i)[0], 4), tf.float64)
    return tf.while_loop(lambda t, h: t < 3, lambda t, h: (t + 1, tf.tanh(h + tf.gather(T, i[:, 0]) * B)), (0, start))[
        1
    ]


def before_and_after(x: Any) -> Any:
    return by_reference(x @ W) @ tf.transpose(W) + B


CASES = {
    "a loop by reference": (by_reference, X, [W, B]),
    "a loop by value": (by_value, X, [W, B]),
    "a weight carried through a loop": (carried, X, [W, B]),
    "a branch": (branch, X, [W, B]),
    "a branch in a loop": (branch_in_loop, X, [W, B]),
    "a loop in a loop": (loop_in_loop, X, [W, B]),
    "a loop in a function": (loop_in_function, X, [W, B]),
    "one of several branches": (switch, X, [W, B]),
    "scan": (scan, X3, [W, B]),
    "map over time": (mapped_over_time, X3, [W, B]),
    "map over samples": (mapped_over_samples, X, [W, B]),
    "a look-up in a loop": (looked_up_in_loop, np.array([[0, 1], [5, 2], [3, 3]], "int32"), [T, B]),
    "weights outside the loop as well": (before_and_after, X, [W, B]),
}


@pytest.mark.parametrize("name", CASES)
def test_control_flow_equals_the_tape(name: str) -> None:
    f, x, variables = CASES[name]
    check(f, x, variables, random=False)


def test_a_weight_in_a_loop_falls_back_alone() -> None:
    v = tf.Variable(RNG.normal(size=(4, 2)), name="v")
    J = check(lambda x: by_reference(x) @ v, X, [W, v], random=False)
    assert treatments(J) == {"w": {"fallback"}, "v": {"factored"}}


def test_loops_at_other_weights() -> None:
    w = tf.Variable(W)

    def f(x: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))[1]

    before = nj.jacobian(f, X, variables=[w])
    w.assign(-0.5 * w)
    after = check(f, X, [w], random=False)
    assert not np.allclose(before.to_array(), after.to_array())


def test_one_function_in_two_loops() -> None:
    def f(x: Any) -> Any:
        return by_reference(x) + by_reference(x * B)

    check(f, X, [W, B], random=False)
    check(lambda x: f(x) @ W, X, [W, B], random=False)  # the same bodies again, in another program


def test_a_loop_whose_length_is_in_the_data() -> None:
    """Each sample is stepped on until it is large: samples that are done stay as they are."""

    def body(h: Any) -> Any:
        going = tf.reduce_sum(h**2, 1, keepdims=True) < 4
        return (tf.where(going, 1.5 * h + 0.1 * tf.abs(B), h),)

    def f(x: Any) -> Any:
        return tf.while_loop(lambda h: tf.reduce_any(tf.reduce_sum(h**2, 1) < 4), body, (x @ W,))[0]

    check(f, X, [W, B], random=False)
