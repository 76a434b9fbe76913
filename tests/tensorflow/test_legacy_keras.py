"""Models of legacy Keras (the package tf_keras) against the tape: built, named, called and unrolled as Keras's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import compare, randomise, tape_jacobian, treatments

import netjac as nj

tf_keras = pytest.importorskip("tf_keras")
L = tf_keras.layers


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = tf_keras.backend.floatx()
    tf_keras.backend.set_floatx("float64")
    yield
    tf_keras.backend.set_floatx(before)


def data(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(3, *shape))


def around(layer: Callable[[Any], Any], *shape: int) -> tuple[Any, np.ndarray]:
    """A layer, and a Dense layer on what it gives."""
    i = tf_keras.Input(shape)
    return tf_keras.Model(i, L.Dense(2)(L.Flatten()(layer(i)))), data(*shape)


def check(model: Any, x: Any) -> nj.Jacobian:
    randomise(model.variables)
    J = nj.jacobian(model, x)
    compare(J, tape_jacobian(model, x, model.trainable_variables))
    return J


def without_fallback(J: nj.Jacobian) -> None:
    assert set().union(*treatments(J).values()) <= {"factored", "collapsed"}, str(J.coverage)


LAYERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "convolution": lambda: around(L.Conv2D(3, 2, activation="tanh"), 4, 4, 2),
    "grouped convolution": lambda: around(L.Conv2D(4, 2, groups=2), 4, 4, 2),
    "separable convolution": lambda: around(L.SeparableConv2D(3, 2), 4, 4, 2),
    "transposed convolution": lambda: around(L.Conv2DTranspose(3, 2), 3, 3, 2),
    "batch normalisation": lambda: around(L.BatchNormalization(), 3, 3, 2),
    "layer normalisation": lambda: around(L.LayerNormalization(), 4, 3),
    "attention": lambda: around(lambda i: L.MultiHeadAttention(2, 3)(i, i), 4, 3),
    "dense on each step": lambda: around(L.TimeDistributed(L.Dense(3)), 4, 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    without_fallback(check(*LAYERS[name]()))


KINDS = {"SimpleRNN": L.SimpleRNN, "LSTM": L.LSTM, "GRU": L.GRU}
FORMS: dict[str, Callable[[Any], Any]] = {
    "last": lambda kind: kind(3),
    "sequences backwards": lambda kind: kind(3, return_sequences=True, go_backwards=True),
    "time first": lambda kind: lambda i: kind(3, time_major=True)(tf.transpose(i, [1, 0, 2])),
    "masked": lambda kind: lambda i: kind(3)(L.Masking()(i)),
    "both ways": lambda kind: L.Bidirectional(kind(2, return_sequences=True)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_recurrent_layers_are_unrolled(kind: str, form: str) -> None:
    model, x = around(FORMS[form](KINDS[kind]), 4, 2)
    x[0, 2:], x[1, :1] = 0, 0
    without_fallback(check(model, x))
    assert not any(getattr(layer, "unroll", False) for layer in model._flatten_layers())


def test_stacked_cells() -> None:
    without_fallback(check(*around(L.RNN([L.LSTMCell(2), L.GRUCell(2)]), 3, 2)))


def test_masked_both_ways_and_convolutional_recurrence_are_exact() -> None:
    """Loops remain, where Keras cannot unroll, or would unroll wrongly."""
    for layer, shape in (
        (lambda i: L.Bidirectional(L.GRU(2, return_sequences=True))(L.Masking()(i)), (4, 2)),
        (L.ConvLSTM2D(2, 2), (2, 3, 3, 1)),
    ):
        model, x = around(layer, *shape)
        x[0, 1:] = 0
        J = check(model, x)
        assert "fallback" in set().union(*treatments(J).values())


def test_stateful_layers_are_refused() -> None:
    model = tf_keras.Sequential([L.LSTM(3, stateful=True, batch_input_shape=(2, 3, 2)), L.Dense(1)])
    with pytest.raises(nj.ModelError, match="stateful"):
        nj.jacobian(model, data(3, 2)[:2])


def test_sequential_with_layers_that_train_otherwise() -> None:
    model = tf_keras.Sequential([L.Dense(4, "tanh", name="a"), L.BatchNormalization(name="n"), L.Dropout(0.5),
                                 L.Dense(2, name="b")])  # fmt: skip
    x = data(3)
    with pytest.raises(nj.ModelError, match="never built"):
        nj.jacobian(model, x)
    model(x)
    J = check(model, x)
    without_fallback(J)
    assert J.parameters.names == ("a/kernel", "a/bias", "n/gamma", "n/beta", "b/kernel", "b/bias")
    model.layers[0].trainable = False
    assert nj.jacobian(model, x).parameters.names == J.parameters.names[2:]


def test_several_inputs_and_outputs() -> None:
    i, j = tf_keras.Input((3,), name="i"), tf_keras.Input((2, 2), name="j")
    h = L.Concatenate()([L.Dense(2, "tanh")(i), L.Flatten()(L.Dense(3)(j))])
    outputs = {"z": L.Dense(2)(h), "a": L.Reshape((2, 2))(L.Dense(4)(i))}
    model, x = tf_keras.Model([i, j], outputs), [data(3), data(2, 2, seed=1)]
    J = check(model, x)
    assert J.output_space.names == ("a", "z")
    with pytest.raises(nj.ShapeError, match="takes 2 inputs"):
        nj.jacobian(model, x[0])
    with pytest.raises(nj.ShapeError, match=r"samples of shape \(3,\)"):
        nj.jacobian(model, [data(4), x[1]])
    check(tf_keras.Model({"i": i, "j": j}, outputs), {"i": x[0], "j": x[1]})


class Own(tf_keras.Model):
    """Trains unless told otherwise."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.first, self.norm, self.last = L.Dense(3, name="first"), L.BatchNormalization(name="n"), L.LSTM(2)

    def call(self, x: Any, training: bool = True) -> Any:
        return self.last(self.norm(self.first(x), training=training))


def test_class_of_ones_own_is_called_for_inference() -> None:
    model, x = Own(), data(3, 2)
    model(x)
    randomise(model.variables)
    J = nj.jacobian(model, x)
    without_fallback(J)
    compare(J, tape_jacobian(lambda x: model(x, training=False), x, model.trainable_variables))
    assert J.parameters.names[:4] == ("first/kernel", "first/bias", "n/gamma", "n/beta")


def test_a_layer_in_a_plain_function() -> None:
    layer, x = L.GRU(2), data(3, 2)
    layer(x)
    randomise(layer.variables)
    J = nj.jacobian(lambda x: layer(x), x, variables=layer.trainable_variables)
    without_fallback(J)
    compare(J, tape_jacobian(layer, x, layer.trainable_variables))
    assert nj.jacobian(layer, x).parameters.names[0].endswith("kernel")


def test_changes_after_a_trace_are_seen() -> None:
    model, x = around(L.Dense(3), 4)
    first = nj.jacobian(model, x).y
    model.layers[1].activation = tf.tanh
    second = nj.jacobian(model, x).y
    assert not np.allclose(first, second)
    np.testing.assert_allclose(second, model(x), rtol=1e-12)


def test_a_fit() -> None:
    model, x = around(L.Dense(6, "tanh"), 2)
    x = np.random.default_rng(1).normal(size=(8, 2))
    y = np.stack([np.sin(x[:, 0]), x[:, 1] ** 2], axis=1)
    start = float(np.sum((model(x).numpy() - y) ** 2))
    nj.LeastSquares(model, x, y).solve(max_nfev=50)
    assert np.sum((model(x).numpy() - y) ** 2) < 1e-3 * start
