"""Recurrent networks: unrolled and factored where the length is known, exact sample by sample elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_configurations import around, data, tokens
from oracles import check, randomise, treatments

import netjac as nj

L = keras.layers
pytestmark = pytest.mark.usefixtures("precision")


def without_fallback(J: nj.Jacobian) -> None:
    found = set().union(*treatments(J).values())
    assert found <= {"factored", "collapsed"}, str(J.coverage)


class Leaky(keras.layers.Layer):
    """A cell of one's own: h' = tanh(x W + h U) · s + (1 − s) · h, with a learned rate."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_size = self.units = units

    def build(self, shape: Any) -> None:
        self.W = self.add_weight(shape=(shape[-1], self.units), name="W")
        self.U = self.add_weight(shape=(self.units, self.units), name="U")
        self.rate = self.add_weight(shape=(self.units,), name="rate")

    def call(self, x: Any, states: Any) -> Any:
        (h,) = states if isinstance(states, (list, tuple)) else [states]
        s = keras.ops.sigmoid(self.rate)
        h = keras.ops.tanh(x @ self.W + h @ self.U) * s + (1 - s) * h
        return h, [h]


def deep(i: Any) -> Any:
    h = L.Bidirectional(L.LSTM(2, return_sequences=True), merge_mode="sum")(i)
    h = L.GRU(3, return_sequences=True, reset_after=False, go_backwards=True)(h)
    return L.SimpleRNN(2)(L.LayerNormalization()(h))


NETWORKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a cell of one's own": lambda: around(L.RNN(Leaky(3), return_sequences=True), (4, 2)),
    "stacked with a cell of one's own": lambda: around(L.RNN([Leaky(3), L.GRUCell(2)]), (3, 2)),
    "three kinds, one behind the other": lambda: around(deep, (3, 2)),
    "in each time step of a longer one": lambda: around(lambda i: L.GRU(2)(L.TimeDistributed(L.LSTM(2))(i)), (2, 3, 2)),
    "an encoder and a decoder": lambda: around(
        lambda a, b: L.GRU(2, return_sequences=True)(b, initial_state=L.GRU(2)(a)), (3, 2), (2, 3)
    ),
    "one step": lambda: around(L.LSTM(3), (1, 2)),
    "a convolutional one in two ways": lambda: around(
        L.Bidirectional(L.ConvLSTM1D(2, 2, return_sequences=True, dilation_rate=2, padding="same")), (2, 4, 1)
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_of_known_length(name: str) -> None:
    without_fallback(check(*NETWORKS[name]()))


def test_masked_tokens() -> None:
    i = keras.Input((5,), dtype="int32")
    h = L.Bidirectional(L.LSTM(2))(L.Embedding(6, 3, mask_zero=True)(i))
    x = tokens(5, 6, n=3)
    x[0, 2:], x[1, 4:], x[2, :2] = 0, 0, 0
    J = check(keras.Model(i, L.Dense(2)(h)), x)
    without_fallback(J)


def test_masked_steps_do_not_count() -> None:
    """Where a sample is masked, other numbers there change nothing."""
    i = keras.Input((None, 2))
    model = keras.Model(i, L.Dense(1)(L.GRU(3)(L.Masking(0.0)(i))))
    x = data(4, 2)
    x[0, 2:] = 0
    without_fallback(check(model, x))
    short = nj.jacobian(model, x[:1, :2]).to_array()
    np.testing.assert_allclose(nj.jacobian(model, x).to_array()[:1], short, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("layer", [L.SimpleRNN, L.LSTM, L.GRU])
def test_zeros_where_masked(layer: Any) -> None:
    i = keras.Input((4, 2))
    h = layer(3, return_sequences=True, zero_output_for_mask=True)(L.Masking(0.0)(i))
    x = data(4, 2)
    x[0, 2:], x[1, :2] = 0, 0
    J = check(keras.Model(i, L.Dense(2)(layer(2)(h))), x)
    assert all(entry.reason for entry in J.coverage.entries if entry.treatment.value == "fallback")


def test_length_left_open_in_the_model_is_told_by_the_data() -> None:
    i = keras.Input((None, 2))
    model = keras.Model(i, L.Dense(2)(L.LSTM(3)(i)))
    for length in (2, 4):
        without_fallback(check(model, data(length, 2)))


class Shortened(keras.Model):
    """A length that only running the graph tells."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.end = layer, L.Dense(2)

    def call(self, x: Any) -> Any:
        return self.end(self.layer(x[:, : 3 + tf.cast(0 * x[0, 0, 0], tf.int32)]))


@pytest.mark.parametrize(
    "layer",
    [lambda: L.SimpleRNN(2), lambda: L.LSTM(2), lambda: L.GRU(2), lambda: L.Bidirectional(L.GRU(2)),
     lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(2), Leaky(2)]))],
    ids=["SimpleRNN", "LSTM", "GRU", "Bidirectional", "cells"],
)  # fmt: skip
def test_unknown_length_is_exact_and_said_to_be_differentiated_per_sample(layer: Callable[[], Any]) -> None:
    model, x = Shortened(layer()), data(4, 2)
    model(x)
    J = check(model, x)
    found = treatments(J)
    assert [found[name] for name in list(found)[-2:]] == [{"factored"}, {"factored"}]  # of the layer behind
    loops = [entry for entry in J.coverage.entries if entry.treatment.value == "fallback"]
    assert len({entry.variable for entry in loops}) == len(found) - 2
    assert all(entry.operation and entry.reason for entry in loops)
    assert not any(layer.unroll for layer in model._flatten_layers() if isinstance(layer, L.RNN))


class Wrapped(tf.Module):
    """A recurrent layer behind an attribute of something that Keras does not know."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        return self.layer(x)


@pytest.mark.parametrize(
    "layer",
    [lambda: L.SimpleRNN(2), lambda: L.LSTM(2), lambda: L.GRU(2), lambda: L.Bidirectional(L.LSTM(2)),
     lambda: L.RNN([L.GRUCell(2), Leaky(2)]), lambda: L.TimeDistributed(L.GRU(2))],
    ids=["SimpleRNN", "LSTM", "GRU", "Bidirectional", "cells", "TimeDistributed"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["lambda", "module", "layer in a lambda", "decorated"])
def test_wherever_the_layer_is(layer: Callable[[], Any], form: str) -> None:
    built = layer()
    x = data(2, 3, 2) if isinstance(built, L.TimeDistributed) else data(3, 2)
    built(x)
    function: Any = {
        "lambda": lambda x: built(x),
        "module": Wrapped(built),
        "layer in a lambda": L.Lambda(lambda x: built(x)),
        "decorated": tf.function(lambda x: built(x)),
    }[form]
    without_fallback(check(function, x, built.trainable_variables))


def test_one_of_unknown_length_leaves_the_others_unrolled() -> None:
    class Both(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shortened = L.GRU(2, return_sequences=True), Shortened(L.LSTM(2))

        def call(self, x: Any) -> Any:
            return self.shortened(self.first(x))

    model, x = Both(), data(4, 2)
    model(x)
    found = treatments(check(model, x))
    assert [kinds for name, kinds in found.items() if "gru" in name] == [{"collapsed"}] * 3
    assert [kinds for name, kinds in found.items() if "lstm" in name] == [{"fallback"}] * 3


class Doubled(L.LSTM):
    """A class of one's own, with its own call."""

    def call(self, sequences: Any, initial_state: Any = None, mask: Any = None, training: bool = False) -> Any:
        return 2 * super().call(sequences, initial_state, mask, training)


def test_class_of_ones_own() -> None:
    without_fallback(check(*around(Doubled(2), (3, 2))))


def test_unrolling_is_for_the_trace_alone() -> None:
    classes = (L.RNN, L.LSTM, Doubled)
    before = [vars(kind)["call"] for kind in classes]
    model, x = Shortened(L.LSTM(2)), data(4, 2)
    model(x)
    nj.jacobian(model, x)
    with pytest.raises(nj.NetjacError, match="could not be traced"):
        nj.jacobian(lambda x: model(x) @ x, x, variables=model.trainable_variables)
    assert [vars(kind)["call"] for kind in classes] == before


def test_other_threads_see_layers_as_they_are() -> None:
    layer, seen = L.LSTM(2), []
    x = data(3, 2)
    layer(x)

    class Watched(L.RNN):
        def inner_loop(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.unroll)
            return super().inner_loop(*args, **kwargs)

    watched = Watched(L.LSTMCell(2))
    watched(x)

    def f(x: Any) -> Any:
        thread = Thread(target=watched, args=(np.asarray(data(3, 2)),))
        thread.start()
        thread.join()
        return watched(x)

    seen.clear()
    check(f, x, watched.trainable_variables)
    assert seen[:2] == [False, True]


# States that last -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda layer: layer, L.Bidirectional], ids=["alone", "Bidirectional"])
@pytest.mark.parametrize("layer", [L.SimpleRNN, L.LSTM, L.GRU])
def test_stateful_layers_are_refused(layer: Any, wrap: Callable[[Any], Any]) -> None:
    i = keras.Input(batch_shape=(2, 3, 2))
    model, x = keras.Model(i, L.Dense(1)(wrap(layer(2, stateful=True))(i))), data(3, 2, n=2)
    model(x)
    states = [v.numpy() for v in model.non_trainable_variables]
    with pytest.raises(nj.ModelError, match=r"stateful.*initial_state"):
        nj.jacobian(model, x)
    for state, before in zip(model.non_trainable_variables, states, strict=True):
        np.testing.assert_array_equal(state, before)


def test_state_given_as_an_input() -> None:
    """Whether a layer is stateful makes no difference then."""
    i, h, c = keras.Input(batch_shape=(2, 3, 2)), keras.Input(batch_shape=(2, 2)), keras.Input(batch_shape=(2, 2))
    x = [data(3, 2), data(2), data(2, seed=8)]
    plain, stateful = (
        keras.Model([i, h, c], L.Dense(1)(L.LSTM(2, stateful=stateful)(i, initial_state=[h, c])))
        for stateful in (False, True)
    )
    J = check(plain, x)
    without_fallback(J)
    for variable, value in zip(stateful.trainable_variables, plain.trainable_variables, strict=True):
        variable.assign(value)
    np.testing.assert_allclose(nj.jacobian(stateful, x).to_array(), J.to_array(), rtol=1e-12, atol=1e-15)


# Loops of one's own ---------------------------------------------------------------------------------------------------


def weights(*shapes: tuple[int, ...]) -> list[tf.Variable]:
    found = [tf.Variable(tf.zeros(shape, tf.float64), name=f"w{i}") for i, shape in enumerate(shapes)]
    randomise(found)
    return found


def test_while_loop() -> None:
    W, b, V = weights((3, 3), (3,), (3, 2))

    def f(x: Any) -> Any:
        _, h = tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, tf.tanh(h @ W + b)), (0, x))
        return h @ V

    J = check(f, data(3), [W, b, V])
    assert treatments(J) == {"w0": {"fallback"}, "w1": {"fallback"}, "w2": {"factored"}}


def test_loop_that_ends_when_a_sample_says_so() -> None:
    """Each sample alone takes as many steps as it needs, which only a loop over samples can do."""
    W, V = weights((2, 2), (2, 2))

    def one(x: Any) -> Any:
        return tf.while_loop(
            lambda i, h: (i < 6) & (tf.reduce_sum(h**2) > 0.2), lambda i, h: (i + 1, tf.tanh(h @ W)), (0, x[None])
        )[1][0]

    J = check(lambda x: tf.map_fn(one, x) @ V, data(2), [W, V])
    assert treatments(J) == {"w0": {"fallback"}, "w1": {"factored"}}


def test_scan() -> None:
    W, U, V = weights((2, 3), (3, 3), (3, 2))

    def f(x: Any) -> Any:
        steps = tf.transpose(x, [1, 0, 2])
        start = tf.zeros((tf.shape(x)[0], 3), tf.float64)
        h = tf.scan(lambda h, s: tf.tanh(s @ W + h @ U), steps, start)
        return tf.transpose(h, [1, 0, 2]) @ V

    J = check(f, data(4, 2), [W, U, V])
    found = treatments(J)
    assert found["w0"] == found["w1"] == {"fallback"}
    assert found["w2"] <= {"factored", "collapsed"}


def test_python_loop_is_unrolled_and_merged() -> None:
    W, U, b = weights((2, 8), (8, 8), (8,))

    def f(x: Any) -> Any:
        h = tf.zeros((tf.shape(x)[0], 8), tf.float64)
        for step in tf.unstack(x, axis=1):
            h = tf.tanh(step @ W + h @ U + b)
        return h[:, :1]

    J = check(f, data(3, 2), [W, U, b])
    without_fallback(J)
    assert treatments(J)["w1"] == {"factored"}
    assert [len(J.coverage.treatment(name)) for name in ("w0", "w1", "w2")] == [3, 3, 3]
