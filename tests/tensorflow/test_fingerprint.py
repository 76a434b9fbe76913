"""A trace that Python has made stale is made anew; one that is not, is kept."""

from __future__ import annotations

import functools
from types import ModuleType

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import check

import netjac as nj
from netjac.tensorflow.fingerprint import fingerprint

X = np.random.default_rng(0).uniform(0.5, 1.5, (3, 4))
W = tf.Variable(np.random.default_rng(1).normal(size=(4, 2)))
FACTOR = 1.0


def follows(f, variables=None) -> None:
    check(f, X, variables=[W] if variables is None else variables, random=False)


def test_layers_and_what_they_hold():
    leaky = keras.layers.LeakyReLU(negative_slope=0.1, dtype="float64")
    dense = keras.layers.Dense(3, "tanh", dtype="float64")
    model = keras.Sequential([keras.Input((4,), dtype="float64"), dense, leaky])
    follows(model, model.trainable_variables)
    dense.activation = keras.activations.sigmoid
    follows(model, model.trainable_variables)
    dense.activation = keras.activations.linear
    leaky.negative_slope = 3.0
    follows(model, model.trainable_variables)


def test_statistics_adapted_again():
    normalise = keras.layers.Normalization(dtype="float64")
    normalise.adapt(X)
    model = keras.Sequential([keras.Input((4,), dtype="float64"), normalise, keras.layers.Dense(2, dtype="float64")])
    follows(model, model.trainable_variables)
    normalise.adapt(10 * X + 1)
    follows(model, model.trainable_variables)


def test_closures_globals_defaults_and_arguments(monkeypatch):
    scale, options = np.ones(2), {"power": 1.0}

    def f(x, shift=0.0):
        return FACTOR * (x @ W) ** options["power"] * scale + shift * tf.reduce_sum(W)

    held = functools.partial(f, shift=0.5)
    follows(f)
    scale *= 3.0
    follows(f)
    options["power"] = 2.0
    follows(f)
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    follows(f)
    f.__defaults__ = (2.0,)
    follows(f)
    follows(held)


def test_objects_with_attributes_and_helpers_defined_again():
    class Model:
        def __init__(self) -> None:
            self.gain = 1.0

        def __call__(self, x):
            return self.gain * (x @ W)

        def method(self, x):
            return self.gain * (x @ W)

    model = Model()
    for f in (model, model.method):
        model.gain = 1.0
        follows(f)
        model.gain = -2.0
        follows(f)


class Settings:
    def __init__(self, gain: float) -> None:
        self.gain = gain


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain: float) -> None:
        self.gain = gain


@pytest.mark.parametrize("base", [keras.layers.Layer, tf.Module])
def test_what_layers_of_ones_own_keep_for_themselves(base):
    class Own(base):
        shared = 1.0

        def __init__(self) -> None:
            super().__init__()
            self._gain, self.settings, self.slotted = 1.0, Settings(1.0), Slotted(1.0)

        def __call__(self, x, **named):
            return self.shared * self._gain * self.settings.gain * self.slotted.gain * (x @ W)

    own = Own()
    own.built = True
    follows(own, [W])
    own._gain = 2.0
    follows(own, [W])
    own.settings.gain = 3.0
    follows(own, [W])
    own.slotted.gain = -1.0
    follows(own, [W])
    Own.shared = 0.5
    follows(own, [W])


def test_modules_sets_and_slots_that_a_function_reads():
    module, chosen, slotted = ModuleType("settings"), {1.0}, Slotted(2.0)
    module.gain = 1.0

    def f(x):
        return module.gain * sum(chosen) * slotted.gain * (x @ W)

    follows(f)
    module.gain = 3.0
    follows(f)
    chosen.add(4.0)
    follows(f)
    slotted.gain = -1.0
    follows(f)


def test_a_trace_that_is_not_stale_is_kept():
    traces = []

    class Counting(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            self.calls = 0
            self.dense = keras.layers.Dense(2, dtype="float64")

        def build(self, shape) -> None:
            self.dense.build(shape)
            self.built = True

        def call(self, x):
            self.calls += 1
            traces.append(1)
            return self.dense(x)

    layer = Counting()
    layer.build((None, 4))
    nj.jacobian(layer, X)
    first = len(traces)
    for n in (1, 2, 3):
        layer.dense.kernel.assign(layer.dense.kernel + 1.0)
        nj.jacobian(layer, X[:n])
    assert len(traces) == first
    assert fingerprint(layer) == fingerprint(layer)
