"""Whole applications of Keras without pretrained weights, against gradients of each sample alone.

One small network runs with every test; six whole ones take minutes (`make slow`), and print what their first call took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import resources, tape_jacobian

import netjac as nj
from netjac.sites import Treatment

A = keras.applications
OUTPUTS = 3
TOLERANCE = 1e-4


def build(application: Callable[..., Any], size: int, **kwargs: Any) -> Any:
    model = application(
        input_shape=(size, size, 3), weights=None, classes=OUTPUTS, classifier_activation=None, **kwargs
    )
    # Offsets and statistics away from their zeros and ones, which would hide errors; scales large enough to count.
    rng = np.random.default_rng(1)
    for variable in model.variables:
        if len(variable.shape) == 1 and "moving" not in variable.path:
            variable.assign(variable.numpy() + 0.2 * rng.uniform(-1, 1, variable.shape))
        elif "layer_scale" in variable.path or variable.path.endswith("/variable"):
            variable.assign(rng.uniform(0.5, 1.0, variable.shape))
        elif "moving_mean" in variable.path:
            variable.assign(0.1 * rng.uniform(-1, 1, variable.shape))
        elif "moving_variance" in variable.path:
            variable.assign(rng.uniform(0.8, 1.2, variable.shape))
    return model


def compare(model: Any, size: int, largest: int) -> nj.Jacobian:
    """Jᵀ u for two u, each sample alone; J v; and variables of at most ``largest`` entries in full."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (2, size, size, 3)).astype(np.float32)
    before = [w.numpy().copy() for w in model.non_trainable_variables]
    started = time.perf_counter()
    J = nj.jacobian(model, x)
    counts = {t.value: count for t, count in J.coverage.counts.items() if count}
    print(f"\n{model.name}: m = {J.m:,}, first call {time.perf_counter() - started:.1f} s, {counts}")
    assert J.shape == (2 * OUTPUTS, sum(int(np.prod(w.shape)) for w in model.trainable_variables))
    for w, value in zip(model.non_trainable_variables, before, strict=True):
        np.testing.assert_array_equal(w.numpy(), value)

    variables = resources(model.trainable_variables)
    one = tf.function(lambda sample, u: gradient(model, variables, sample, u), reduce_retracing=True)
    whole = np.zeros(J.m)
    for i in range(2):
        u = rng.standard_normal((2, OUTPUTS)).astype(np.float32) * (np.arange(2) == i)[:, None]
        expected = one(tf.constant(x[i : i + 1]), tf.constant(u[i : i + 1])).numpy().astype(np.float64)
        found = J.T @ u.reshape(-1)
        assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)
        floor = 1e-6 * np.linalg.norm(expected)
        for segment in J.parameters.segments:
            size_of = np.linalg.norm(expected[segment.slice])
            error = np.linalg.norm(found[segment.slice] - expected[segment.slice])
            assert error <= TOLERANCE * size_of + floor, f"{segment.name}: {error / size_of:.1e}"
        whole += expected
    v = rng.standard_normal(J.m)
    np.testing.assert_allclose(J @ v, J.to_array() @ v, rtol=0, atol=TOLERANCE * np.abs(J @ v).max())

    few = [w for w in model.trainable_variables if np.prod(w.shape) <= largest]
    few = [few[i] for i in np.linspace(0, len(few) - 1, 4).astype(int)]
    names = {id(w): name for w, name in zip(model.trainable_variables, J.parameters.names, strict=True)}
    for w, block in zip(few, tape_jacobian(model, x, few), strict=True):
        found = J.columns(names[id(w)]).to_array().reshape(block.shape)
        assert np.abs(found - block).max() <= TOLERANCE * np.abs(block).max() + 1e-7, names[id(w)]
    return J


def gradient(model: Any, variables: list[Any], sample: Any, u: Any) -> Any:
    with tf.GradientTape() as tape:
        y = model(sample, training=False)
    found = tape.gradient(y, variables, output_gradients=u, unconnected_gradients="zero")
    return tf.concat([tf.reshape(d, [-1]) for d in found], 0)


def test_small_mobile_network() -> None:
    J = compare(build(A.MobileNetV2, 32, alpha=0.35), 32, 500)
    counts = J.coverage.counts
    assert counts[Treatment.FALLBACK] == counts[Treatment.UNREACHED] == 0
    assert counts[Treatment.FACTORED] > 0
    assert counts[Treatment.COLLAPSED] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("MobileNetV2", 32), ("EfficientNetB0", 32), ("ResNet50", 32), ("DenseNet121", 32), ("ConvNeXtTiny", 32),
     ("Xception", 71)],
)  # fmt: skip
def test_whole_applications(name: str, size: int) -> None:
    J = compare(build(getattr(A, name), size), size, 2000)
    assert J.coverage.counts[Treatment.FALLBACK] == 0, str(J.coverage)
