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


def turned(x: Any) -> Any:
    """Complex numbers from the first and the last two of four."""
    return tf.complex(x[:, :2], x[:, 2:])


COMPLEX = {
    "a factor": lambda x: tf.math.real(turned(x @ W) * tf.complex(N[0, :2], N[1, :2])),
    "a cast": lambda x: tf.math.imag(turned(x @ W) * tf.cast(N[0, :2], tf.complex128)),
    "a sum": lambda x: tf.abs(turned(x @ W) + tf.complex(N[0, :2], N[1, :2])),
    "a product": lambda x: tf.math.real(turned(x @ W) @ tf.complex(N[:2], N[2:])),
    "a phase": lambda x: tf.signal.irfft(tf.signal.rfft(x @ W) * tf.exp(tf.complex(0 * N[0, :1], N[0, :1]))),
}


@pytest.mark.parametrize("name", ["a factor", "a cast", "a sum", "a product", "a phase"])
def test_weights_of_complex_numbers(name: str) -> None:
    found = treatments(check(COMPLEX[name], X, [W, N], random=False))
    assert found["n"] == {"fallback"}
    assert found["w"] <= {"factored", "collapsed"}


def test_what_is_used_as_it_is_and_made_complex() -> None:
    def f(x: Any) -> Any:
        h = x @ W
        return h + tf.math.real(tf.signal.fft(tf.cast(h, tf.complex128)))

    assert treatments(check(f, X, [W], random=False))["w"] == {"factored"}


def negative(x: Any) -> Any:
    return tf.cast(x[:, 0] < 0, tf.int32)


def by_sign(x: Any) -> Any:
    """Dispatch to one of two layers, as a mixture of experts does."""
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), negative(x), 2)
    plus, minus = tf.dynamic_partition(x, negative(x), 2)
    return tf.dynamic_stitch(places, [plus @ W, tf.tanh(minus @ W)])


def sorted_by_sign(x: Any) -> Any:
    order = tf.concat(tf.dynamic_partition(tf.range(tf.shape(x)[0]), negative(x), 2), 0)
    return tf.dynamic_stitch([order], [tf.tanh(tf.gather(x, order) @ W)])


def some_alone(x: Any) -> Any:
    some = x[:, 0] > 0
    rows = tf.tanh(tf.boolean_mask(x, some) @ W)
    return tf.scatter_nd(tf.where(some), rows, tf.shape(x, tf.int64))


def sorted_and_back(x: Any) -> Any:
    order = tf.argsort(x[:, 0])
    return tf.gather(tf.tanh(tf.gather(x, order) @ W), tf.argsort(order))


def each_word_once(x: Any) -> Any:
    words, where = tf.unique(tf.cast(x[:, 0] > 0, tf.int32))
    return tf.gather(tf.tanh(tf.gather(W, words)), where)


PICKED = {
    "by sign": by_sign,
    "sorted by sign": sorted_by_sign,
    "some alone": some_alone,
    "sorted and back": sorted_and_back,
    "each word once": each_word_once,
}


@pytest.mark.parametrize("later", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("name", ["by sign", "sorted by sign", "some alone", "sorted and back", "each word once"])
def test_rows_that_values_pick(name: str, later: bool) -> None:
    """Which rows a layer sees, and in which order, may differ from one x to the next."""
    tidy = np.sort(np.abs(RNG.normal(size=(5, 4))), axis=0)
    untidy = tidy[[3, 0, 4, 1, 2]] * np.array([1, -1, 1, 1, -1])[:, None]
    for x in (tidy, untidy) if later else (untidy, tidy):
        J = check(PICKED[name], x, [W], random=False)
        assert treatments(J)["w"] == {"fallback"}
        assert "picked or sorted" in J.coverage.entries[0].reason
