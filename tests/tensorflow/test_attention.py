"""Attention and transformers: every use of every kernel factored or collapsed, exact against the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from layer_configurations import data, head, tokens
from oracles import check, treatments

L = keras.layers
ops = keras.ops
pytestmark = pytest.mark.usefixtures("precision")


class Positions(keras.layers.Layer):
    """Learned positions, added to every sample's sequence, in one of the ways people write it."""

    def __init__(self, length: int, how: str = "broadcast") -> None:
        super().__init__()
        self.length, self.how = length, how

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(self.length, shape[-1]), name="positions")

    def call(self, x: Any) -> Any:
        if self.how == "broadcast":
            return x + self.table
        if self.how == "slice":
            return x + self.table[None, : x.shape[1]]
        if self.how == "gather":
            return x + ops.take(self.table, ops.arange(x.shape[1]), axis=0)
        if self.how == "broadcast_to":
            return x + ops.broadcast_to(self.table[: x.shape[1]], ops.shape(x))
        return x + ops.tile(self.table[None, : x.shape[1]], [ops.shape(x)[0], 1, 1])


class ClassToken(keras.layers.Layer):
    """A learned token before each sequence."""

    def build(self, shape: Any) -> None:
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")

    def call(self, x: Any) -> Any:
        return ops.concatenate([ops.tile(self.token, [ops.shape(x)[0], 1, 1]), x], axis=1)


def block(x: Any, width: int, before: bool, causal: bool = False) -> Any:
    """A transformer block with its normalisation before or after."""
    attention = L.MultiHeadAttention(2, 2)
    first, second = L.LayerNormalization(), L.LayerNormalization()
    wide, narrow = L.Dense(2 * width, "gelu"), L.Dense(width)
    if before:
        y = first(x)
        x = x + attention(y, y, use_causal_mask=causal)
        return x + narrow(wide(second(x)))
    x = first(x + attention(x, x, use_causal_mask=causal))
    return second(x + narrow(wide(x)))


def encoder(before: bool) -> tuple[Any, Any]:
    i = keras.Input((3, 4))
    h = block(block(Positions(3)(i), 4, before), 4, before)
    return keras.Model(i, L.Dense(2)(L.GlobalAveragePooling1D()(h))), data(3, 4)


def positions(how: str) -> tuple[Any, Any]:
    i = keras.Input((3, 4))
    return keras.Model(i, head(L.Dense(3, "tanh")(Positions(5 if how != "broadcast" else 3, how)(i)))), data(3, 4)


def language_model(tied: bool) -> tuple[Any, Any]:
    """Causal, with one matrix for words that come in and words that go out."""
    i = keras.Input((3,), dtype="int32")
    words = L.ReversibleEmbedding(5, 4, tie_weights=tied)
    h = block(Positions(3)(words(i)), 4, True, causal=True)
    return keras.Model(i, words(L.LayerNormalization()(h), reverse=True)[:, -1]), tokens(3, 5)


def with_class_token() -> tuple[Any, Any]:
    i = keras.Input((4, 4, 1))
    patches = L.Reshape((4, 4))(L.Conv2D(4, 2, strides=2)(i))
    return keras.Model(i, L.Dense(2)(block(ClassToken()(patches), 4, True)[:, 0])), data(4, 4, 1)


def encoder_and_decoder() -> tuple[Any, Any]:
    i, j = keras.Input((3, 4)), keras.Input((2, 4))
    memory = block(i, 4, False)
    h = L.LayerNormalization()(j + L.GroupQueryAttention(2, 2, 1)(j, j, use_causal_mask=True))
    h = L.LayerNormalization()(h + L.MultiHeadAttention(2, 2)(h, memory))
    return keras.Model([i, j], head(h)), [data(3, 4), data(2, 4, seed=8)]


class Relative(keras.layers.Layer):
    """Attention of one's own with a learned bias for each distance (a gather from a table, added to the scores)."""

    def build(self, shape: Any) -> None:
        d = shape[-1]
        self.qkv = self.add_weight(shape=(d, 3 * d), name="qkv")
        self.distance = self.add_weight(shape=(2 * shape[1] - 1, 2), name="distance")

    def call(self, x: Any) -> Any:
        t, d = x.shape[1:]
        q, k, v = ops.split(ops.reshape(x @ self.qkv, (-1, t, 3, 2, d // 2)), 3, axis=2)
        scores = ops.einsum("nqhd,nkhd->nhqk", q[:, :, 0], k[:, :, 0])
        apart = ops.arange(t)[:, None] - ops.arange(t)[None] + t - 1
        scores = scores + ops.transpose(ops.take(self.distance, apart, axis=0), (2, 0, 1))
        return ops.reshape(ops.einsum("nhqk,nkhd->nqhd", ops.softmax(scores), v[:, :, 0]), (-1, t, d))


def relative() -> tuple[Any, Any]:
    i = keras.Input((3, 4))
    return keras.Model(i, head(Relative()(i))), data(3, 4)


def rotary() -> tuple[Any, Any]:
    """Positions that turn queries and keys: no weights, but between the kernels and the scores."""
    i = keras.Input((3, 4))

    def turn(h: Any) -> Any:
        angle = ops.cast(ops.arange(3)[:, None] * ops.arange(1, 3)[None], h.dtype)
        a, b = ops.split(h, 2, axis=-1)
        return ops.concatenate([a * ops.cos(angle) - b * ops.sin(angle), a * ops.sin(angle) + b * ops.cos(angle)], -1)

    q, k, v = (L.Dense(4, use_bias=bias)(i) for bias in (True, False, True))
    return keras.Model(i, head(L.Attention(use_scale=True)([turn(q), v, turn(k)]))), data(3, 4)


NETWORKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "normalisation before": lambda: encoder(True),
    "normalisation after": lambda: encoder(False),
    "tied embeddings, causal": lambda: language_model(True),
    "embeddings apart, causal": lambda: language_model(False),
    "class token and patches": with_class_token,
    "encoder and decoder": encoder_and_decoder,
    "a bias for each distance": relative,
    "rotary positions": rotary,
    **{f"positions by {how}": lambda how=how: positions(how)
       for how in ("broadcast", "slice", "gather", "broadcast_to", "tile")},
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_transformers(name: str) -> None:
    J = check(*NETWORKS[name]())
    assert set().union(*treatments(J).values()) <= {"factored", "collapsed"}, str(J.coverage)


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
def test_in_single_precision(precision: str) -> None:
    check(*encoder(True))


def test_both_uses_of_a_tied_embedding_are_found() -> None:
    J = check(*language_model(True))
    uses = [entry for entry in J.coverage.entries if entry.variable.endswith("/embeddings")]
    assert {entry.operation_type for entry in uses} == {"GatherV2", "MatMul"}


def test_a_mask_given_with_the_call() -> None:
    layer = L.MultiHeadAttention(2, 3)
    x = [data(3, 4), data(5, 4, seed=9)]
    layer.build((None, 3, 4), (None, 5, 4))
    mask = tf.constant([[True, True, False, True, False]])

    def f(inputs: Any) -> Any:
        return layer(inputs[0], inputs[1], attention_mask=mask)[:, 1, :2]

    J = check(f, x, list(layer.trainable_variables))
    assert set().union(*treatments(J).values()) <= {"factored", "collapsed"}
