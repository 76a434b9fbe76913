"""Networks with thousands of outputs a sample (a segmentation map): what is computed, and that it is right."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import netjac as nj
from netjac.tensorflow.evaluate import CompiledSites

L = keras.layers
MEMORY = "20 MiB"


def segmentation(size: int = 32) -> tuple[Any, np.ndarray]:
    """(n, size, size, 3) → a map (n, size, size, 4)."""
    layers = [L.Conv2D(5, 3, padding="same", activation="tanh"), L.Conv2D(4, 3, padding="same")]
    x = np.random.default_rng(3).normal(size=(2, size, size, 3)).astype("float32")
    return keras.Sequential([keras.Input((size, size, 3)), *layers]), x


def tape_row(model: Any, x: np.ndarray, i: int, j: int) -> np.ndarray:
    with tf.GradientTape() as tape:
        y = tf.reshape(model(x[i : i + 1]), [-1])[j]
    return np.concatenate([np.ravel(d) for d in tape.gradient(y, model.trainable_variables)])


def test_rows_of_a_map_equal_the_tape() -> None:
    model, x = segmentation()
    J = nj.jacobian(model, x, memory=MEMORY)
    assert isinstance(J, nj.TiledJacobian)
    assert J.l == 4096
    for i, j in ((0, 0), (0, 4095), (1, 7), (1, 2222)):
        expected = tape_row(model, x, i, j)
        B = np.zeros((2, 1, J.l), np.float32)
        B[i, 0, j] = 1
        np.testing.assert_allclose(J.scaled(B).to_array()[i], expected, atol=1e-5 * np.abs(expected).max())


def test_an_adjoint_product_equals_one_backward_pass() -> None:
    model, x = segmentation()
    J = nj.jacobian(model, x, memory=MEMORY)
    u = np.random.default_rng(0).normal(size=(2, 32, 32, 4)).astype("float32")
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(model(x) * u)
    expected = np.concatenate([np.ravel(d) for d in tape.gradient(y, model.trainable_variables)])
    np.testing.assert_allclose(J.T @ u.reshape(-1), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("size", [16, 32])
def test_the_first_call_looks_at_few_of_the_outputs_alone(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    original = CompiledSites.__call__

    def call(self: CompiledSites, theta: Any, x: Any, seeds: Any = None) -> Any:
        rows = self._trace.output_space.size if seeds is None else len(seeds)
        computed.append(rows * int(x[0].shape[0]))
        return original(self, theta, x, seeds)

    monkeypatch.setattr(CompiledSites, "__call__", call)
    nj.jacobian(*segmentation(size), memory=MEMORY)
    assert 0 < sum(computed) <= 256, "rows computed, whatever the size of the map"


class Faulty(CompiledSites):
    """Sites that are wrong in what is done with given combinations, or with single outputs."""

    units: bool

    def __call__(self, theta: Any, x: Any, seeds: Any = None) -> Any:
        y, values = super().__call__(theta, x, seeds)
        if seeds is not None and (seeds.ndim == 1) == self.units:
            for v in values:
                for name in ("D", "dense"):
                    if getattr(v, name) is not None:
                        object.__setattr__(v, name, 1.01 * getattr(v, name))
        return y, values


@pytest.mark.parametrize("units", [False, True])
def test_what_is_wrong_with_many_outputs_is_found(units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = type("Wrong", (Faulty,), {"units": units})
    monkeypatch.setattr("netjac.tensorflow.extractor.CompiledSites", faulty)
    with pytest.raises(nj.ProbeError):
        nj.jacobian(*segmentation(16), memory=MEMORY)


def test_mixing_is_found_with_many_outputs() -> None:
    model, x = segmentation(16)
    w = tf.Variable(1.0)
    with pytest.raises(nj.SampleMixingError):
        nj.jacobian(lambda x: model(x) * w - tf.reduce_mean(x, 0)[..., :1], x, variables=[w], memory=MEMORY)
    with pytest.raises(nj.SampleMixingError):
        nj.jacobian(lambda x: tf.reverse(model(x) * w, [0]), x, variables=[w], memory=MEMORY)
