"""Networks of every kind of layer Keras ships with weights, against the tape, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import check, randomise, treatments

import netjac as nj
from netjac.sites import Treatment

L = keras.layers
NETWORKS: dict[str, Callable[[], tuple[Any, Any]]] = {}


def network(build: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    NETWORKS[build.__name__] = build
    return build


def data(*shape: int, n: int = 3) -> np.ndarray:
    """Inputs of n samples, away from zero."""
    rng = np.random.default_rng(7)
    values = rng.uniform(0.2, 1.0, (n, *shape)) * rng.choice([-1.0, 1.0], (n, *shape))
    return values.astype(keras.config.floatx())


def tokens(length: int, size: int, n: int = 3) -> np.ndarray:
    return np.random.default_rng(7).integers(0, size, (n, length)).astype("int32")


def chain(shape: tuple[int, ...], *layers: Any, dtype: Any = None, l: int = 2) -> Any:
    """The layers one after the other, then a dense layer with l outputs, so that every cotangent is different."""
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers, L.Flatten(), L.Dense(l)])


@network
def dense() -> tuple[Any, Any]:
    return chain((4,), L.Dense(6, "tanh"), L.Dense(5, "gelu"), l=3), data(4)


@network
def dense_without_bias() -> tuple[Any, Any]:
    return chain((4,), L.Dense(6, "tanh", use_bias=False), L.Dense(5, "elu", use_bias=False)), data(4)


@network
def dense_on_sequences() -> tuple[Any, Any]:
    return chain((5, 4), L.Dense(6, "tanh"), L.Dense(3, "sigmoid")), data(5, 4)


@network
def dense_on_grids() -> tuple[Any, Any]:
    return chain((2, 3, 4), L.Dense(6, "tanh")), data(2, 3, 4)


@network
def einsum_dense() -> tuple[Any, Any]:
    return chain(
        (4, 5),
        L.EinsumDense("btd,dhk->bthk", (4, 2, 3), bias_axes="hk", activation="tanh"),
        L.EinsumDense("bthk,hkd->btd", (4, 5), bias_axes="d", activation="tanh"),
        L.EinsumDense("btd,te->bed", (3, 5), bias_axes="ed"),
    ), data(4, 5)


@network
def conv1d() -> tuple[Any, Any]:
    return chain((7, 3), L.Conv1D(4, 3, strides=2, padding="same", activation="tanh"), L.Conv1D(2, 2)), data(7, 3)


@network
def conv1d_causal_dilated() -> tuple[Any, Any]:
    return chain((7, 3), L.Conv1D(4, 3, padding="causal", dilation_rate=2, activation="tanh")), data(7, 3)


@network
def conv2d() -> tuple[Any, Any]:
    return chain(
        (6, 7, 3),
        L.Conv2D(4, (3, 2), strides=(2, 1), padding="same", activation="tanh"),
        L.Conv2D(3, 2, strides=2, activation="tanh"),
    ), data(6, 7, 3)


@network
def conv2d_many_channels() -> tuple[Any, Any]:
    return chain((3, 3, 12), L.Conv2D(10, 2, activation="tanh")), data(3, 3, 12)


@network
def conv2d_one_by_one() -> tuple[Any, Any]:
    return chain((3, 4, 3), L.Conv2D(4, 1, strides=2, activation="tanh"), L.Conv2D(3, 1, padding="same")), data(3, 4, 3)


@network
def conv2d_dilated() -> tuple[Any, Any]:
    return chain(
        (7, 6, 2),
        L.Conv2D(3, 3, dilation_rate=(2, 1), activation="tanh"),
        L.Conv2D(3, 2, dilation_rate=2, padding="same"),
    ), data(7, 6, 2)


@network
def conv2d_in_groups() -> tuple[Any, Any]:
    return chain((5, 5, 4), L.Conv2D(6, 3, groups=2, activation="tanh"), L.Conv2D(6, 2, groups=3)), data(5, 5, 4)


@network
def conv3d() -> tuple[Any, Any]:
    return chain(
        (4, 4, 3, 2),
        L.Conv3D(4, 2, strides=(2, 1, 1), padding="same", activation="tanh"),
        L.Conv3D(2, (1, 2, 2), groups=2),
    ), data(4, 4, 3, 2)


@network
def depthwise1d() -> tuple[Any, Any]:
    return chain((7, 3), L.DepthwiseConv1D(3, depth_multiplier=2, activation="tanh"), L.SeparableConv1D(4, 3)), data(
        7, 3
    )


@network
def depthwise2d() -> tuple[Any, Any]:
    return chain(
        (6, 6, 3),
        L.DepthwiseConv2D(3, depth_multiplier=2, strides=2, padding="same", activation="tanh"),
        L.SeparableConv2D(3, 2, depth_multiplier=2, activation="tanh"),
    ), data(6, 6, 3)


@network
def depthwise2d_dilated() -> tuple[Any, Any]:
    return chain((6, 6, 2), L.DepthwiseConv2D(2, dilation_rate=2, activation="tanh")), data(6, 6, 2)


@network
def transposed1d() -> tuple[Any, Any]:
    return chain(
        (4, 3), L.Conv1DTranspose(4, 3, strides=2, padding="same", activation="tanh"), L.Conv1DTranspose(2, 2)
    ), data(4, 3)


@network
def transposed2d() -> tuple[Any, Any]:
    return chain(
        (3, 2, 3),
        L.Conv2DTranspose(4, 3, strides=(2, 1), padding="same", activation="tanh"),
        L.Conv2DTranspose(2, 2, strides=3, activation="tanh"),
    ), data(3, 2, 3)


@network
def transposed2d_output_padding() -> tuple[Any, Any]:
    return chain(
        (3, 3, 2),
        L.Conv2DTranspose(3, 3, strides=2, padding="same", output_padding=0, activation="tanh"),
        L.Conv2DTranspose(2, 2, strides=3, output_padding=2),
    ), data(3, 3, 2)


@network
def transposed3d() -> tuple[Any, Any]:
    return chain((2, 3, 2, 2), L.Conv3DTranspose(3, 2, strides=(2, 1, 2), padding="same", activation="tanh")), data(
        2, 3, 2, 2
    )


@network
def embedding() -> tuple[Any, Any]:
    return chain((4,), L.Embedding(9, 3), L.Dense(4, "tanh"), dtype="int32"), tokens(4, 9)


@network
def embedding_of_large_table() -> tuple[Any, Any]:
    return chain((3,), L.Embedding(60, 2), L.Activation("tanh"), dtype="int32"), tokens(3, 60)


@network
def embedding_masked_lstm() -> tuple[Any, Any]:
    x = tokens(4, 6)
    x[0, 2:] = 0
    return chain((4,), L.Embedding(6, 3, mask_zero=True), L.LSTM(3), dtype="int32"), x


@network
def bidirectional_under_a_mask() -> tuple[Any, Any]:
    """Outputs at masked steps are zero, which Keras forgets where the layer is unrolled."""
    x = data(4, 2)
    x[0, 2:], x[1, 3:] = 0, 0
    i = keras.Input((4, 2))
    h = L.Bidirectional(L.GRU(3, return_sequences=True))(L.Masking(0.0)(i))
    return keras.Model(i, L.Dense(2)(keras.ops.reshape(h, (-1, 24)))), x


@network
def batch_normalization() -> tuple[Any, Any]:
    return chain((5, 5, 2), L.Conv2D(3, 2), L.BatchNormalization(), L.Activation("tanh")), data(5, 5, 2)


@network
def batch_normalization_on_vectors() -> tuple[Any, Any]:
    return chain(
        (4,), L.Dense(5), L.BatchNormalization(), L.Activation("tanh"), L.BatchNormalization(scale=False)
    ), data(4)


@network
def layer_normalization() -> tuple[Any, Any]:
    return chain(
        (4, 5), L.Dense(6), L.LayerNormalization(), L.Activation("tanh"), L.LayerNormalization(axis=(1, 2))
    ), data(4, 5)


@network
def rms_normalization() -> tuple[Any, Any]:
    return chain((4, 5), L.Dense(6), L.RMSNormalization(), L.Activation("tanh")), data(4, 5)


@network
def group_normalization() -> tuple[Any, Any]:
    return chain((4, 4, 2), L.Conv2D(4, 2), L.GroupNormalization(2), L.Activation("tanh")), data(4, 4, 2)


@network
def unit_and_spectral_normalization() -> tuple[Any, Any]:
    return chain((4,), L.SpectralNormalization(L.Dense(5, "tanh")), L.UnitNormalization()), data(4)


@network
def attention() -> tuple[Any, Any]:
    i = keras.Input((4, 6))
    a = L.MultiHeadAttention(2, 3)(i, i)
    h = L.LayerNormalization()(i + a)
    h = h + L.Dense(6)(L.Dense(8, "gelu")(h))
    return keras.Model(i, L.Dense(2)(L.GlobalAveragePooling1D()(h))), data(4, 6)


@network
def cross_attention() -> tuple[Any, Any]:
    i, j = keras.Input((3, 4), name="q"), keras.Input((5, 2), name="k")
    a = L.MultiHeadAttention(2, 3, value_dim=2, output_shape=4)(i, j, use_causal_mask=False)
    return keras.Model([i, j], L.Dense(2)(L.Flatten()(a))), [data(3, 4), data(5, 2)]


@network
def group_query_attention() -> tuple[Any, Any]:
    i = keras.Input((3, 4))
    return keras.Model(i, L.Dense(2)(L.Flatten()(L.GroupQueryAttention(3, 4, 2)(i, i)))), data(3, 4)


@network
def plain_attention() -> tuple[Any, Any]:
    i = keras.Input((3, 4))
    h = L.Dense(4)(i)
    a = L.Attention(use_scale=True)([h, i]) + L.AdditiveAttention()([i, h])
    return keras.Model(i, L.Dense(2)(L.Flatten()(a))), data(3, 4)


@network
def residual() -> tuple[Any, Any]:
    i = keras.Input((5,))
    h = i + L.Dense(5, "tanh")(i)
    h = L.Concatenate()([h, L.Dense(3, "tanh")(h)]) * L.Dense(8, "sigmoid")(h)
    return keras.Model(i, L.Dense(2)(h)), data(5)


@network
def tied() -> tuple[Any, Any]:
    i = keras.Input((5,))
    shared = L.Dense(5, "tanh")
    return keras.Model(i, L.Dense(2)(shared(shared(shared(i))))), data(5)


@network
def lstm() -> tuple[Any, Any]:
    return chain((3, 2), L.LSTM(3, return_sequences=True), L.LSTM(2)), data(3, 2)


@network
def gru() -> tuple[Any, Any]:
    return chain((3, 2), L.GRU(3, return_sequences=True, go_backwards=True), L.GRU(2, reset_after=False)), data(3, 2)


@network
def simple_rnn() -> tuple[Any, Any]:
    return chain((3, 2), L.RNN([L.SimpleRNNCell(3), L.LSTMCell(2)])), data(3, 2)


@network
def bidirectional() -> tuple[Any, Any]:
    return chain((3, 2), L.Bidirectional(L.LSTM(2, return_sequences=True), merge_mode="concat")), data(3, 2)


@network
def conv_lstm() -> tuple[Any, Any]:
    return chain((2, 3, 3, 1), L.ConvLSTM2D(2, 2)), data(2, 3, 3, 1)


@network
def time_distributed() -> tuple[Any, Any]:
    return chain((3, 2), L.TimeDistributed(L.Dense(4, "tanh"))), data(3, 2)


@network
def prelu() -> tuple[Any, Any]:
    return chain((3, 4), L.Dense(4), L.PReLU(), L.Dense(3), L.PReLU(shared_axes=[1])), data(3, 4)


@network
def several_outputs() -> tuple[Any, Any]:
    i, j = keras.Input((4,), name="b"), keras.Input((2, 3), name="a")
    h = L.Concatenate()([L.Dense(3, "tanh")(i), L.Flatten()(L.Dense(2, "tanh")(j))])
    model = keras.Model({"b": i, "a": j}, {"z": L.Dense(2)(h), "u": [L.Reshape((2, 1))(L.Dense(2)(h)), L.Dense(1)(i)]})
    return model, {"a": data(2, 3), "b": data(4)}


@network
def nested() -> tuple[Any, Any]:
    block = keras.Sequential([keras.Input((4,)), L.Dense(4, "tanh"), L.Dense(4)], name="block")
    i = keras.Input((4,))
    inner = keras.Model(i, i + block(i), name="inner")
    return keras.Sequential([keras.Input((4,)), inner, L.Activation("tanh"), block, L.Dense(2)]), data(4)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = L.Dense(4), L.Dense(2)
        self.gain = self.add_weight(shape=(4,), name="gain")
        self.shift = self.add_weight(shape=(), name="shift")

    def call(self, x: Any, training: bool = True) -> Any:
        h = self.first(x) * self.gain + self.shift
        return self.second(h * h if training else tf.tanh(h))


@network
def subclassed() -> tuple[Any, Any]:
    model, x = Subclassed(), data(3)
    model(x)
    return model, x


@network
def lora() -> tuple[Any, Any]:
    model, x = chain((4,), L.Dense(4, "tanh")), data(4)
    model.layers[0].enable_lora(2)
    return model, x


@network
def pooling_and_padding() -> tuple[Any, Any]:
    return chain(
        (6, 6, 2),
        L.Conv2D(3, 2, activation="tanh"),
        L.ZeroPadding2D(1),
        L.MaxPooling2D(2),
        L.Conv2D(2, 2),
        L.UpSampling2D(2),
        L.AveragePooling2D(2),
        L.Permute((3, 1, 2)),
        L.Dense(3, "softmax"),
    ), data(6, 6, 2)


# One network of each kind in single precision too.
SINGLE = [
    "dense",
    "dense_on_sequences",
    "einsum_dense",
    "conv1d",
    "conv2d",
    "conv2d_in_groups",
    "depthwise2d",
    "transposed2d",
    "embedding",
    "batch_normalization",
    "layer_normalization",
    "group_normalization",
    "attention",
    "residual",
    "tied",
    "lstm",
    "prelu",
    "several_outputs",
    "subclassed",
    "pooling_and_padding",
]
CASES = [*(("float64", name) for name in NETWORKS), *(("float32", name) for name in SINGLE)]
FALLING_BACK = {"lora", "bidirectional_under_a_mask"}  # products of weights in two types; a loop


@pytest.mark.parametrize(("precision", "name"), CASES, indirect=["precision"])
def test_every_layer_equals_the_tape(name: str, precision: str) -> None:
    model, x = NETWORKS[name]()
    J = check(model, x)
    assert J.dtype == precision
    assert J.coverage.counts[Treatment.FALLBACK] == 0 or name in FALLING_BACK, J.coverage


# What became of each variable ----------------------------------------------------------------------------------------

COVERAGE: dict[str, dict[str, set[str]]] = {
    "dense": {"dense": {"factored"}},
    "dense_on_sequences": {"dense": {"factored", "collapsed"}},
    "conv2d_many_channels": {"conv2d": {"factored"}},
    "depthwise2d_dilated": {"depthwise_conv2d": {"collapsed"}},
    "embedding": {"embedding": {"factored"}},
    "embedding_of_large_table": {"embedding": {"factored"}},
    "tied": {"dense": {"factored"}},
    "lstm": {"lstm": {"factored", "collapsed"}},
    "gru": {"gru": {"factored", "collapsed"}},
    "bidirectional": {"bidirectional": {"factored", "collapsed"}},
    "time_distributed": {"time_distributed": {"factored", "collapsed"}},
    "attention": {"multi_head_attention": {"factored", "collapsed"}},
    "batch_normalization": {"batch_normalization": {"collapsed"}},
}


@pytest.mark.parametrize("name", COVERAGE)
def test_treatment_of_representative_layers(name: str, precision: str) -> None:
    model, x = NETWORKS[name]()
    found = treatments(nj.jacobian(model, x))
    for layer, allowed in COVERAGE[name].items():
        mine = {
            variable: kinds
            for variable, kinds in found.items()
            if variable.split("/")[0].rstrip("_0123456789") == layer
        }
        assert mine, found
        for variable, kinds in mine.items():
            assert kinds <= allowed, (variable, kinds)
    assert not any("fallback" in kinds for kinds in found.values())


def test_coverage_prints_as_a_table() -> None:
    shapes = {"encoder/kernel": (4, 6), "shift": (), "normed": (6, 2), "unused": (3, 1, 2)}
    v = {name: tf.Variable(np.ones(shape), name=name) for name, shape in shapes.items()}

    def f(x: Any) -> Any:
        return tf.tanh(x @ v["encoder/kernel"] + v["shift"]) @ (v["normed"] / tf.norm(v["normed"]))

    text = str(nj.jacobian(f, np.ones((3, 4)), variables=list(v.values())).coverage)
    header, rule, *rows, summary = text.splitlines()
    assert header.split() == ["variable", "shape", "treatment", "operation", "why"]
    assert set(rule) <= {"─", " "}
    starts = [header.index(word) for word in ("shape", "treatment", "operation", "why")]
    for row in rows:
        assert all(row[start - 2 : start].strip() == "" for start in starts if start <= len(row)), text

    def row_of(name: str) -> str:
        return next(row for row in rows if row.startswith(name + " "))

    assert "4 × 6" in row_of("encoder/kernel")
    assert "factored" in row_of("encoder/kernel")
    assert "MatMul" in row_of("encoder/kernel")
    assert "scalar" in row_of("shift")
    assert "collapsed" in row_of("shift")
    assert "6 positions" in row_of("shift")
    assert "fallback" in row_of("normed")
    assert row_of("normed")[starts[-1] :].strip()
    assert "3 × 1 × 2" in row_of("unused")
    assert "unreached" in row_of("unused")
    assert "zero columns" in row_of("unused")
    assert summary.startswith("1 factored, 1 collapsed, ")
    assert summary.endswith(" fallback, 1 unreached")


def test_a_function_of_its_own_gradient(precision: str) -> None:
    """Force fields and physics-informed networks: each kernel is used twice, once transposed."""
    net = keras.Sequential([keras.Input((3,)), L.Dense(5, "tanh"), L.Dense(4, "tanh"), L.Dense(1)])
    randomise(net.weights)

    def force(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = net(x)
        return {"energy": energy, "force": -tape.gradient(energy, x)}

    J = check(force, data(3), net.trainable_variables, random=False)
    assert J.coverage.counts[Treatment.FALLBACK] == 0

    def laplacian(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = net(x)
            slope = inner.gradient(y, x)
        return outer.batch_jacobian(slope, x, experimental_use_pfor=False)[:, 0, 0] + y[:, 0]

    check(laplacian, data(3), net.trainable_variables, random=False)


def test_a_module_of_layers(precision: str) -> None:
    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(np.ones((4, 3)), name="w")
            self.gain = tf.Variable(1.5, dtype=tf.float64)
            self.frozen = tf.Variable(2.0, dtype=tf.float64, trainable=False)

        def __call__(self, x: Any) -> Any:
            return self.frozen * tf.tanh(self.gain * x @ self.w)

    assert check(Net(), data(4)).m == 13
