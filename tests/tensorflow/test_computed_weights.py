"""Weights that are computed from variables before they meet the data: exact, factored where entries stay entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_configurations import around, data, of_tokens
from oracles import check, randomise, treatments

L = keras.layers
pytestmark = pytest.mark.usefixtures("precision")

FACTORED = {"factored"}


def variables(**shapes: tuple[int, ...]) -> list[tf.Variable]:
    found = [tf.Variable(tf.zeros(shape, tf.float64), name=name) for name, shape in shapes.items()]
    randomise(found)
    return found


class Normalised(keras.layers.Layer):
    """Weight normalisation (Salimans and Kingma 2016): each column of the kernel has the length that `gain` says."""

    def build(self, shape: Any) -> None:
        self.V = self.add_weight(shape=(shape[-1], 3), name="V")
        self.gain = self.add_weight(shape=(3,), name="gain")

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(x @ (self.V / keras.ops.norm(self.V, axis=0) * self.gain))


class Spectral(keras.layers.Layer):
    """The kernel over its spectral norm, by power iterations inside the call."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.start = self.add_weight(shape=(3, 1), name="start", trainable=False)

    def call(self, x: Any) -> Any:
        v = self.start
        for _ in range(2):
            u = keras.ops.matmul(self.kernel, v)
            v = keras.ops.matmul(keras.ops.transpose(self.kernel), u / keras.ops.norm(u))
        return x @ (self.kernel / keras.ops.norm(v))


def test_weight_normalisation() -> None:
    J = check(*around(Normalised(), (4,)))
    assert list(treatments(J).values())[1] == FACTORED  # the gain; a column's length mixes the entries of V


def test_spectral_norm_inside_the_call() -> None:
    check(*around(Spectral(), (4,)))


def test_spectral_normalisation_of_keras_is_a_plain_kernel_at_inference() -> None:
    J = check(*around(L.SpectralNormalization(L.Conv2D(3, 2)), (3, 3, 2)))
    assert "fallback" not in set().union(*treatments(J).values())


POSITIVE = {
    "softplus": tf.nn.softplus, "square": tf.square, "exp": tf.exp, "abs": tf.abs, "relu": tf.nn.relu,
    "clipped": lambda w: tf.clip_by_value(w, -0.5, 0.5), "sigmoid, scaled": lambda w: 2.0 * tf.sigmoid(w) - 0.5,
    "square root of a square": lambda w: tf.sqrt(tf.square(w) + 0.01), "bounded": lambda w: 0.1 + 0.9 * tf.tanh(w) / 2,
    "reversed and scaled": lambda w: tf.reverse(tf.exp(w), [0]) * 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIVE)
def test_entry_by_entry(name: str) -> None:
    W, b = variables(W=(4, 3), b=(3,))
    of = POSITIVE[name]
    J = check(lambda x: tf.tanh(x @ of(W) + of(b)), data(4), [W, b])
    assert treatments(J) == {"W": FACTORED, "b": FACTORED}


A, B, C, S = variables(A=(4, 2), B=(4, 3), C=(2, 3), S=())
PUT_TOGETHER: dict[str, tuple[Callable[[Any], Any], list[Any], dict[str, set[str]]]] = {
    "side by side": (lambda x: x @ tf.concat([A, B], 1), [A, B], {"A": FACTORED, "B": FACTORED}),
    "one above the other": (
        lambda x: tf.concat([x, x[:, :2]], 1) @ tf.concat([B, C], 0), [B, C], {"B": FACTORED, "C": FACTORED},
    ),
    "stacked": (lambda x: x @ tf.stack([A[:, 0], B[:, 1], A[:, 1]], 1), [A, B], {"A": FACTORED, "B": FACTORED}),
    "padded": (lambda x: x @ tf.pad(A, [[0, 0], [1, 2]]), [A], {"A": FACTORED}),
    "rows shuffled": (lambda x: x @ tf.gather(B, [2, 0, 3, 1]), [B], {"B": FACTORED}),
    "columns repeated": (lambda x: x @ tf.tile(B, [1, 2]), [B], {"B": FACTORED}),
    "scaled by a variable": (lambda x: x @ (S * B), [S, B], {"S": FACTORED, "B": FACTORED}),
    "the sum of two": (lambda x: x @ (B + tf.pad(A, [[0, 0], [0, 1]])), [A, B], {"A": FACTORED, "B": FACTORED}),
    "the product of two, entry by entry": (lambda x: x @ (B * tf.exp(C[:1])), [B, C], {"B": FACTORED, "C": FACTORED}),
    # What mixes entries may be treated in any way that is exact.
    "symmetric": (lambda x: x[:, :3] @ (B[:3] + tf.transpose(B[:3])), [B], {}),
    "a product of two": (lambda x: x @ (A @ C), [A, C], {}),
    "a softmax over rows": (lambda x: x @ tf.nn.softmax(B, 0), [B], {}),
    "an inverse": (lambda x: x[:, :2] @ tf.linalg.inv(tf.transpose(A) @ A), [A], {}),
    "a diagonal": (lambda x: x[:, :3] @ tf.linalg.diag(B[0]), [B], {"B": FACTORED}),
    "the diagonal of another": (lambda x: x[:, :2] * tf.linalg.diag_part(A[1:3]), [A], {"A": FACTORED}),
    "padded by reflection": (lambda x: x @ tf.pad(B, [[0, 0], [1, 1]], "REFLECT"), [B], {"B": FACTORED}),
    "a triangle": (lambda x: x[:, :2] @ tf.linalg.band_part(A[:2], -1, 0), [A], {"A": FACTORED}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUT_TOGETHER)
def test_put_together(name: str) -> None:
    f, of, expected = PUT_TOGETHER[name]
    J = check(lambda x: tf.tanh(f(x)), data(4), of)
    found = treatments(J)
    # A weight whose entries only move or scale stays factored.
    assert all(found[name] == expected[name] for name in found if name in expected), str(J.coverage)


def test_one_vector_cut_into_layers() -> None:
    (theta,) = variables(theta=(4 * 3 + 3 + 3 * 2 + 2,))

    def f(x: Any) -> Any:
        W, b, V, c = tf.split(theta, [12, 3, 6, 2])
        return tf.tanh(x @ tf.reshape(W, (4, 3)) + b) @ tf.reshape(V, (3, 2)) + c

    J = check(f, data(4), [theta])
    assert treatments(J) == {"theta": FACTORED}
    assert len(J.coverage.entries) == 4


def test_hypernetwork() -> None:
    """The weights of a layer depend on the sample: they are data, and the hypernetwork's own weights are weights."""
    i, j = keras.Input((4,)), keras.Input((2,))
    kernel = L.Reshape((4, 3))(L.Dense(12)(L.Dense(3, "tanh")(j)))
    y = keras.ops.einsum("ni,nij->nj", i, kernel) + L.Dense(3)(j)
    J = check(keras.Model([i, j], L.Dense(2)(keras.ops.tanh(y))), [data(4), data(2, seed=8)])
    assert set().union(*treatments(J).values()) == {"factored"}


def test_hypernetwork_that_shifts_shared_weights() -> None:
    W, H = variables(W=(4, 3), H=(2, 12))

    def f(x: Any) -> Any:
        own = W + tf.reshape(tf.tanh(x[:, 4:] @ H), (-1, 4, 3))
        return tf.einsum("ni,nij->nj", x[:, :4], own)

    check(f, data(6), [W, H])


LORA: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "Dense": lambda: (L.Dense(3), (4,), None),
    "EinsumDense": lambda: (L.EinsumDense("btd,de->bte", (3, 3), bias_axes="e"), (3, 4), None),
    "Conv1D": lambda: (L.Conv1D(3, 2), (4, 2), None),
    "Conv2D": lambda: (L.Conv2D(3, 2), (3, 3, 2), None),
    "Embedding": lambda: (L.Embedding(5, 3), (4,), 5),
}


@pytest.mark.parametrize("name", LORA)
def test_low_rank_adapters(name: str) -> None:
    layer, shape, size = LORA[name]()
    model, x = around(layer, shape) if size is None else of_tokens(layer, shape[0], size)
    layer.enable_lora(2)
    frozen = [w.numpy().copy() for w in layer.non_trainable_variables]
    J = check(model, x, random=False)  # one of the two factors starts at zero
    assert any("lora" in variable for variable in J.parameters.names)
    assert not any(variable.endswith(("/kernel", "/embeddings")) for variable in J.parameters.names)
    randomise(model.trainable_variables)
    check(model, x, random=False)
    assert all(
        np.array_equal(w.numpy(), before) for w, before in zip(layer.non_trainable_variables, frozen, strict=True)
    )


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
def test_in_single_precision(precision: str) -> None:
    check(*around(Normalised(), (4,)))


def test_a_constraint_is_no_part_of_the_call() -> None:
    """Keras projects weights after a step of training; the Jacobian is that of the call alone."""
    check(*around(L.Dense(3, kernel_constraint="non_neg", kernel_regularizer="l2"), (4,)))


def test_weights_of_one_variable_used_in_different_ways() -> None:
    (W,) = variables(W=(3, 3))
    J = check(lambda x: tf.tanh(x @ W) @ tf.transpose(W) + x * W[0] + tf.exp(W[1, 1]) * x, data(3), [W])
    assert treatments(J)["W"] <= {"factored", "collapsed"}
    assert len(J.coverage.entries) == 4
