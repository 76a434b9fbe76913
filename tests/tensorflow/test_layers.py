"""Every layer of keras.layers with trainable weights, found by walking it, against the tape, sample by sample."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from layer_configurations import (
    ABSTRACT,
    CONFIGURATIONS,
    WITHOUT_WEIGHTS,
    around,
    built_in,
    layer_classes,
    present,
    unconfigured,
)
from layer_table import PAGE, committed, measured, row
from oracles import check

L = keras.layers
CASES = [(layer, label) for layer, labels in present().items() for label in labels]
ALWAYS = 1  # configurations of each layer that are run in single precision in every test run
SINGLE = [
    pytest.param(layer, label, marks=[] if i < ALWAYS else pytest.mark.slow)
    for layer, labels in present().items()
    for i, label in enumerate(labels)
]
LIMITS = {"float32": 1e-5, "float64": 1e-12}


def test_no_layer_slips_past() -> None:
    missing = unconfigured(layer_classes())
    assert not missing, f"add a configuration to layer_configurations.py, or a reason for having none: {missing}"


def test_a_new_layer_would_be_noticed() -> None:
    class Novel(keras.layers.Layer):
        pass

    module = SimpleNamespace(Dense=L.Dense, Renamed=L.Dense, Novel=Novel, NovelToo=Novel, relu=keras.activations.relu)
    assert unconfigured(layer_classes(module)) == ["Novel"]


def test_layers_said_to_have_no_weights_make_none() -> None:
    """None of the classes between such a layer and `Layer` adds a trainable weight."""
    adding = {
        cls.__name__
        for cls, names in layer_classes().items()
        if WITHOUT_WEIGHTS.intersection(names)
        for base in cls.__mro__[: cls.__mro__.index(keras.layers.Layer)]
        if base.__module__.startswith("keras") and "add_weight(" in inspect.getsource(base)
    }
    assert adding <= {"Normalization"}  # statistics, not trainable
    layer = L.Normalization()
    layer.build((None, 3))
    assert not layer.trainable_variables


@pytest.mark.parametrize(("layer", "label"), CASES)
def test_double_precision(layer: str, label: str) -> None:
    assert measured(layer, label, "float64").error <= LIMITS["float64"]


@pytest.mark.parametrize(("layer", "label"), SINGLE)
def test_single_precision(layer: str, label: str) -> None:
    assert measured(layer, label, "float32").error <= LIMITS["float32"]


def test_few_layers_need_the_fallback() -> None:
    falling = {layer for layer, label in CASES if measured(layer, label, "float64").reasons}
    assert len(falling) <= 0.05 * len(present()), falling


def test_the_documented_table_is_current() -> None:
    """Rows of layers that the installed Keras does not have, or has with fewer configurations, are left out."""
    rows = {name: rest for name, *rest in committed(PAGE.read_text(encoding="utf-8"))}
    assert set(present()) <= set(rows), "run tests/tensorflow/layer_table.py"
    for layer in present():
        _, configurations, treatments = row(layer)
        assert rows[layer] == [configurations, treatments], f"{layer}: run {Path('tests/tensorflow/layer_table.py')}"


def test_every_configuration_is_of_a_layer_with_weights() -> None:
    assert not set(CONFIGURATIONS) & (WITHOUT_WEIGHTS | set(ABSTRACT))


# Layers without weights stand between others: their derivatives must pass. ------------------------------------------

BETWEEN: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "activations": ((6,), [L.ELU, L.LeakyReLU, L.ReLU, L.Softmax, L.UnitNormalization, L.Identity,
                           lambda: L.Activation("mish"), lambda: L.Rescaling(2.0, 0.1), lambda: L.Dropout(0.5),
                           lambda: L.GaussianNoise(1.0), lambda: L.ActivityRegularization(0.1)]),
    "sequences": ((6, 3), [lambda: L.ZeroPadding1D(1), lambda: L.Cropping1D(1), lambda: L.UpSampling1D(2),
                           lambda: L.MaxPooling1D(2), lambda: L.AveragePooling1D(2, padding="same"),
                           lambda: L.Permute((2, 1)), lambda: L.SpatialDropout1D(0.5), L.GlobalMaxPooling1D,
                           lambda: L.RepeatVector(2), lambda: L.Reshape((3, 2)), L.GlobalAveragePooling1D]),
    "images": ((4, 4, 2), [lambda: L.ZeroPadding2D(1), lambda: L.Cropping2D(1), lambda: L.MaxPooling2D(2),
                           lambda: L.UpSampling2D(2, interpolation="bilinear"), lambda: L.Resizing(3, 3),
                           lambda: L.AveragePooling2D(2, strides=1), lambda: L.SpatialDropout2D(0.5)]),
    "volumes": ((4, 4, 4, 2), [lambda: L.ZeroPadding3D(1), lambda: L.Cropping3D(1), lambda: L.UpSampling3D(2),
                               lambda: L.MaxPooling3D(2), lambda: L.AveragePooling3D(2, strides=1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_derivatives_pass_layers_without_weights(name: str) -> None:
    shape, layers = BETWEEN[name]

    def call(h: Any) -> Any:
        for layer in [lambda: L.Dense(shape[-1]), *layers]:
            h = layer()(h)
        return h

    with built_in("float32" if name == "volumes" else "float64"):  # pooling in space is single precision alone
        check(*around(call, shape))


def test_merging_layers() -> None:
    def call(a: Any, b: Any) -> Any:
        first, second = L.Dense(4, "tanh"), L.Dense(4, "sigmoid")
        pairs = [[first(a), second(b)], [second(a), first(b)]]
        merged = [layer(pair) for layer in (L.Add(), L.Subtract(), L.Multiply(), L.Average()) for pair in pairs]
        more = [layer(pairs[0]) for layer in (L.Maximum(), L.Minimum(), L.Dot(axes=1), L.Concatenate())]
        return L.Concatenate()([*merged, *more])

    with built_in("float64"):
        check(*around(call, (3,), (3,)))


def test_the_measure_notices_a_wrong_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison must not pass everything."""
    import layer_table

    def off(model: Any, x: Any, variables: Any) -> list[np.ndarray]:
        blocks = exact(model, x, variables)
        blocks[0][0, 0, 0] += 1e-10
        return blocks

    exact = layer_table.tape_jacobian
    monkeypatch.setattr(layer_table, "tape_jacobian", off)
    with pytest.raises(AssertionError):
        measured.__wrapped__("Dense", "bias", "float64")
