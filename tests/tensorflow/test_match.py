"""From a variable to where it meets data, through operations on weights alone; every edge accounted for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import check, treatments

import netjac as nj
from netjac.tensorflow.weights import ENTRYWISE

RNG = np.random.default_rng(0)
X = RNG.uniform(0.3, 1.2, (3, 4)) * RNG.choice([-1.0, 1.0], (3, 4))


def weight(*shape: int, positive: bool = False) -> Any:
    value = RNG.uniform(0.2, 0.8, shape)
    return tf.Variable(value if positive else value * RNG.choice([-1.0, 1.0], shape), name="w")


def meets(x: Any, e: Any) -> Any:
    """The vector e (4,) meets data in a way every entry of it counts differently."""
    return tf.tanh(x * e) @ tf.constant(np.arange(1.0, 9.0).reshape(4, 2))


PATHS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "reshape": (weight(2, 2), lambda w: tf.reshape(w, [4])),
    "transpose": (weight(2, 2), lambda w: tf.reshape(tf.transpose(w), [-1])),
    "split": (weight(8), lambda w: tf.split(w, 2)[1]),
    "split unevenly": (weight(9), lambda w: tf.split(w, [4, 5])[0]),
    "unstack": (weight(4, 3), lambda w: tf.unstack(w, axis=1)[2]),
    "slice": (weight(3, 6), lambda w: tf.slice(w, [1, 1], [1, 4])[0]),
    "strided slice": (weight(9), lambda w: w[7::-2]),
    "strided slice with new axes": (weight(5, 3), lambda w: w[1:, tf.newaxis, 2, ...][:, 0]),
    "one row": (weight(3, 4), lambda w: w[1]),
    "one number": (weight(5), lambda w: tf.tile(w[3:4], [4])),
    "expand and squeeze": (weight(4), lambda w: tf.squeeze(tf.expand_dims(w, 0), 0)),
    "tile": (weight(2), lambda w: tf.tile(w, [2])),
    "broadcast": (weight(1), lambda w: tf.broadcast_to(w, [4])),
    "reverse": (weight(4), lambda w: tf.reverse(w, [0])),
    "roll": (weight(4), lambda w: tf.roll(w, 1, 0)),
    "gather": (weight(6), lambda w: tf.gather(w, [5, 0, 2, 2])),
    "gather columns": (weight(1, 6), lambda w: tf.gather(w, [5, 0, 2, 2], axis=1)[0]),
    "gather_nd": (weight(3, 3), lambda w: tf.gather_nd(w, [[0, 1], [2, 2], [1, 0], [0, 1]])),
    "concatenated with constants": (
        weight(2),
        lambda w: tf.concat([tf.constant([2.0], tf.float64), w, tf.constant([1.0], tf.float64)], 0),
    ),
    "concatenated with itself": (weight(2), lambda w: tf.concat([w, w], 0)),
    "padded": (weight(2), lambda w: tf.pad(w, [[1, 1]])),
    "padded with ones": (weight(2), lambda w: tf.pad(w, [[2, 0]], constant_values=1)),
    "shape from a shape": (weight(2, 2), lambda w: tf.reshape(w, [tf.size(w)])),
    "scale": (weight(4), lambda w: 3 * w),
    "scale by a vector": (weight(4), lambda w: w * tf.constant([1.0, -2.0, 0.0, 0.5], tf.float64)),
    "shift": (weight(4), lambda w: 1.5 - w),
    "divide": (weight(4), lambda w: w / 3),
    "one over": (weight(4), lambda w: 2 / w),
    "softplus": (weight(4), tf.nn.softplus),
    "square": (weight(4), tf.square),
    "times itself": (weight(4), lambda w: w * w),
    "sum with itself": (weight(4), lambda w: w + 2 * w),
    "power": (weight(4, positive=True), lambda w: w**1.5),
    "stretched and scaled": (weight(1), lambda w: w * tf.constant([1.0, 2.0, 3.0, 4.0], tf.float64)),
    "a chain": (weight(2, 4), lambda w: tf.nn.softplus(2 * tf.transpose(tf.exp(w)))[:, 1][::-1]),
    "scaled, then moved": (weight(2, 2), lambda w: tf.reshape(tf.transpose(tf.square(w)), [4])),
    "gather, then scaled": (weight(6), lambda w: tf.exp(tf.gather(w, [5, 0, 2, 2]))),
    "scaled, then gathered": (weight(6), lambda w: tf.gather(tf.exp(w), [5, 0, 2, 2])),
    "look-up, then scaled": (weight(6), lambda w: tf.nn.softplus(tf.nn.embedding_lookup(w, [5, 0, 2, 2]))),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_of_weights_alone_is_followed(name: str) -> None:
    w, path = PATHS[name]
    J = check(lambda x: meets(x, path(w)), X, [w], random=False)
    assert treatments(J)["w"] == {"factored"}, J.coverage


ELEMENTARY = {
    "Neg": tf.negative,
    "Softplus": tf.nn.softplus,
    "Square": tf.square,
    "Exp": tf.exp,
    "Sqrt": tf.sqrt,
    "Rsqrt": tf.math.rsqrt,
    "Reciprocal": tf.math.reciprocal,
    "Inv": lambda w: tf.raw_ops.Inv(x=w),
    "Abs": tf.abs,
    "Sigmoid": tf.sigmoid,
    "Tanh": tf.tanh,
    "Relu": lambda w: tf.nn.relu(w - 0.5),
    "LeakyRelu": lambda w: tf.nn.leaky_relu(w - 0.5),
    "Elu": lambda w: tf.nn.elu(w - 0.5),
    "Selu": lambda w: tf.nn.selu(w - 0.5),
    "Log": tf.math.log,
    "Log1p": tf.math.log1p,
    "Expm1": tf.math.expm1,
    "Sin": tf.sin,
    "Cos": tf.cos,
    "Erf": tf.math.erf,
    "Add": lambda w: tf.raw_ops.Add(x=w, y=w),
    "AddV2": lambda w: w + 1,
    "Sub": lambda w: 1 - w,
    "Mul": lambda w: w * 2,
    "RealDiv": lambda w: 1 / w,
    "Div": lambda w: tf.raw_ops.Div(x=w, y=w * w),
    "Maximum": lambda w: tf.maximum(w, 0.5),
    "Minimum": lambda w: tf.minimum(w, 0.5),
    "Pow": lambda w: w**w,
    "SquaredDifference": lambda w: tf.math.squared_difference(w, 2.0),
    "BiasAdd": lambda w: tf.nn.bias_add(w[None], tf.constant([1.0, 2.0, 3.0, 4.0], tf.float64))[0],
    "ClipByValue": lambda w: tf.clip_by_value(w, 0.4, 0.6),
}


def test_every_entrywise_operation_is_right() -> None:
    """All of them in one network, a variable each."""
    weights = {kind: tf.Variable(RNG.uniform(0.2, 0.9, 4), name=kind) for kind in ELEMENTARY}

    def f(x: Any) -> Any:
        return sum(
            meets(x + 0.1 * i, tf.cast(path(weights[kind]), tf.float64))
            for i, (kind, path) in enumerate(ELEMENTARY.items())
        )

    check(f, X, list(weights.values()), random=False)
    assert {*ELEMENTARY, "Cast"} == ENTRYWISE


def test_a_weight_in_another_precision() -> None:
    w = tf.Variable(RNG.normal(size=4), name="w")
    check(lambda x: meets(x, tf.cast(tf.cast(w, tf.float32), tf.float64)), X, [w], tol=1e-6, random=False)


def test_entries_chosen_by_the_weights_themselves_follow_them() -> None:
    """The order found at the first evaluation is not the order at the next."""
    w = weight(4)

    def f(x: Any) -> Any:
        return meets(x, tf.gather(w, tf.argsort(w)))

    check(f, X, [w], random=False)
    w.assign(w[::-1])
    check(f, X, [w], random=False)


HARD: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a norm": (weight(4), lambda w: w / tf.norm(w)),
    "a running sum": (weight(4), tf.cumsum),
    "a softmax": (weight(4), tf.nn.softmax),
    "an operation without a second derivative": (weight(4), tf.nn.softsign),
    "a diagonal": (weight(4, 4), lambda w: tf.linalg.diag_part(w)),
    "sorted": (weight(4), tf.sort),
    "a product with itself": (weight(2, 2), lambda w: tf.reshape(w @ w, [4])),
    "two entries together": (weight(5), lambda w: w[1:] * w[:-1]),
    "an index of itself": (weight(4), lambda w: tf.gather(w, tf.argsort(w))),
    "a band": (weight(2, 2), lambda w: tf.reshape(tf.linalg.band_part(w, 0, -1), [4])),
    "scattered": (weight(2), lambda w: tf.scatter_nd([[3], [0]], w, [4])),
}


@pytest.mark.parametrize("name", HARD)
def test_what_is_harder_to_follow_is_right_all_the_same(name: str) -> None:
    w, path = HARD[name]
    b = tf.Variable([0.5, -0.5], dtype=tf.float64, name="b")
    J = check(lambda x: meets(x, path(w)) + b, X, [w, b], random=False)
    assert treatments(J)["b"] == {"factored"}


def test_one_vector_cut_into_layers() -> None:
    theta = weight(4 * 3 + 3 + 3 * 2 + 2)

    def f(x: Any) -> Any:
        h = tf.tanh(x @ tf.reshape(theta[:12], [4, 3]) + theta[12:15])
        return h @ tf.reshape(theta[15:21], [3, 2]) + theta[21:]

    assert treatments(check(f, X, [theta], random=False))["w"] == {"factored"}


def test_overlapping_cuts_add_up() -> None:
    theta = weight(14)
    J = check(
        lambda x: tf.tanh(x @ tf.reshape(theta[:12], [4, 3])) + tf.sin(x[:, :3]) * theta[10:13],
        X,
        [theta],
        random=False,
    )
    assert treatments(J)["w"] == {"factored"}


def test_joined_weights() -> None:
    a, b = tf.Variable(RNG.normal(size=(4, 2)), name="a"), tf.Variable(RNG.normal(size=(4, 1)), name="b")
    check(lambda x: tf.tanh(x @ tf.concat([a, b], 1)), X, [a, b], random=False)
    rows = [tf.Variable(RNG.normal(size=3), name=f"row{i}") for i in range(4)]
    check(lambda x: tf.tanh(x @ tf.stack(rows)), X, rows, random=False)


def test_two_weights_entry_by_entry() -> None:
    g, v = weight(4), tf.Variable(RNG.normal(size=(4, 3)), name="v")
    J = check(lambda x: tf.tanh(x @ (v * tf.exp(g)[:, None])), X, [g, v], random=False)
    assert treatments(J) == {"w": {"factored"}, "v": {"factored"}}


def test_weight_normalisation() -> None:
    g, v = tf.Variable(RNG.normal(size=3), name="g"), tf.Variable(RNG.normal(size=(4, 3)), name="v")
    J = check(lambda x: tf.tanh(x @ (v / tf.norm(v, axis=0) * g)), X, [g, v], random=False)
    assert treatments(J) == {"g": {"factored"}, "v": {"fallback"}}


def test_tied_to_its_transpose() -> None:
    w = weight(4, 3)
    J = check(lambda x: tf.tanh(x @ w) @ tf.transpose(w), X, [w], random=False)
    assert treatments(J)["w"] == {"factored"}
    assert J.coverage.counts[nj.sites.Treatment.FACTORED] == 2


def test_edges_without_derivative() -> None:
    w, b, c = weight(4, 3), tf.Variable(RNG.normal(size=3), name="b"), tf.Variable(RNG.normal(size=3), name="c")

    def f(x: Any) -> Any:
        steps = tf.cast(tf.shape(w)[0], x.dtype) + tf.cast(tf.argmax(w[0]), x.dtype)
        return tf.tanh(x @ w) * steps + tf.stop_gradient(b) + tf.zeros_like(c)

    J = check(f, X, [w, b, c], random=False)
    assert treatments(J) == {"w": {"factored"}, "b": {"unreached"}, "c": {"unreached"}}
    assert not J.columns(["b", "c"]).to_array().any()


def test_a_variable_that_is_not_used_at_all() -> None:
    w, b = weight(4, 3), tf.Variable(RNG.normal(size=3), name="b")
    J = check(lambda x: x @ w, X, [b, w], random=False)
    (entry,) = (e for e in J.coverage.entries if e.variable == "b")
    assert entry.treatment.value == "unreached"
    assert "zero columns" in entry.reason


def test_nothing_reaches_the_outputs() -> None:
    b = tf.Variable(RNG.normal(size=3), name="b")
    J = check(lambda x: tf.sin(x), X, [b], random=False)
    assert J.shape == (12, 3)
    assert not J.to_array().any()
    np.testing.assert_allclose(J.outputs, np.sin(X))


def test_the_input_itself_is_an_output() -> None:
    b = tf.Variable(RNG.normal(size=4), name="b")
    check(lambda x: {"x": x, "y": x * b}, X, [b], random=False)


B = tf.Variable(RNG.normal(size=(4, 3)), name="b")
ZERO_DERIVATIVES = {
    "rounded": (lambda x: tf.round(x @ B), "Round"),
    "compared": (lambda x: tf.cast(x @ B > 0, x.dtype), "Greater"),
    "searched for": (
        lambda x: tf.gather(tf.constant([1.0, 2.0, 4.0], x.dtype), tf.searchsorted(tf.zeros_like(x[:, :2]), x @ B)),
        "LowerBound",
    ),
    "ranked": (lambda x: tf.one_hot(tf.argmax(x @ B, 1), 3, dtype=x.dtype), "ArgMax"),
}


@pytest.mark.parametrize("name", ["rounded", "compared", "searched for", "ranked"])
def test_zero_columns_name_the_operation_that_makes_them(name: str) -> None:
    f, operation = ZERO_DERIVATIVES[name]
    J = check(f, X, [B], random=False)
    assert not J.to_array().any()
    (entry,) = J.coverage.entries
    assert f"its derivative is zero at {operation}" in entry.reason


def test_a_comparison_that_picks_a_branch_is_not_worth_a_note() -> None:
    J = check(lambda x: tf.where(x @ B > 0, x @ B, 0.1 * (x @ B)), X, [B], random=False)
    assert not J.coverage.notes
