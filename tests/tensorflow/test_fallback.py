"""What no rule covers: differentiated sample by sample, alone, exactly, and said so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import check, treatments

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4))
W = tf.Variable(RNG.normal(size=(4, 4)), name="w")
N = tf.Variable(RNG.normal(size=(4, 4)), name="n")


def normed(x: Any) -> Any:
    return x @ (N / tf.norm(N))


CASES = {
    "in front": (lambda x: tf.tanh(normed(x)) @ W, {"w"}),
    "behind": (lambda x: normed(tf.tanh(x @ W)), {"w"}),
    "twice, one use covered": (lambda x: tf.tanh(x @ N) + normed(x @ W), {"w"}),
    "both in one operation": (lambda x: x @ tf.linalg.inv(W @ N + 10 * tf.eye(4, dtype=tf.float64)), set()),
    "a determinant": (lambda x: (x @ W) * tf.linalg.det(N), {"w"}),
    "an eigenvalue": (lambda x: (x @ W) * tf.linalg.eigvalsh(N + tf.transpose(N)), {"w"}),
    "a solve with data": (lambda x: tf.transpose(tf.linalg.solve(N, tf.transpose(x @ W))), {"w"}),
}


@pytest.mark.parametrize(
    "name",
    [
        "in front",
        "behind",
        "twice, one use covered",
        "both in one operation",
        "a determinant",
        "an eigenvalue",
        "a solve with data",
    ],
)
def test_it_is_right_and_alone(name: str) -> None:
    f, factored = CASES[name]
    J = check(f, X, [W, N], random=False)
    found = treatments(J)
    assert found["n"] == {"fallback"}
    assert {v for v, kinds in found.items() if kinds == {"factored"}} == factored
    for entry in J.coverage.entries:
        if entry.treatment.value == "fallback":
            assert entry.reason
            assert entry.operation
            assert entry.operation_type


def test_several_inputs_and_outputs() -> None:
    def f(p: Any) -> Any:
        return {"u": normed(p["a"])[:, :3], "v": [tf.tanh(p["b"][:, None] * normed(p["a"] @ W))]}

    check(f, {"a": X, "b": X[:, 0]}, [W, N], random=False)


def test_integer_inputs() -> None:
    table = tf.Variable(RNG.normal(size=(5, 4)), name="table")
    J = check(
        lambda i: tf.reduce_sum(tf.gather(table / tf.norm(table), i), 1),
        np.array([[0, 4], [1, 1]], "int32"),
        [table],
        random=False,
    )
    assert treatments(J)["table"] == {"fallback"}


def test_two_variables_at_once_and_many_outputs() -> None:
    other = tf.Variable(RNG.normal(size=(4, 18)), name="other")
    check(lambda x: tf.tanh(normed(x)) @ tf.nn.l2_normalize(other, 0), X, [N, other], random=False)


def test_what_tensorflow_cannot_vectorise_is_looped_over() -> None:
    """A diagonal in an einsum, and a look-up by hashing: no vectorised form."""
    check(lambda x: tf.einsum("bi,ii->bi", x, N), X, [N], random=False)
