"""What is a layer: of Keras, or of legacy Keras (the package ``tf_keras``), which is never imported here."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import keras


def is_layer(model: Any) -> bool:
    """Whether ``model`` is a layer or a model of Keras or of legacy Keras."""
    return isinstance(model, tuple(package.layers.Layer for package in packages()))


def is_model(model: Any) -> bool:
    """Whether ``model`` is a model of Keras or of legacy Keras."""
    return isinstance(model, tuple(package.Model for package in packages()))


def unbuilt(layer: Any) -> list[Any]:
    """The layers in ``layer``, itself included, without weights so far; those that its call leaves out stay so."""
    return [inner for inner in layer._flatten_layers() if not inner.built]


def inference(layer: Any) -> dict[str, bool]:
    """Arguments of a call in which nothing random is drawn and no statistics are gathered.

    Keras takes ``training`` for any layer, legacy Keras for those whose call names it.
    """
    named = isinstance(layer, keras.layers.Layer) or "training" in inspect.signature(layer.call).parameters
    return {"training": False} if named else {}


def packages() -> list[Any]:
    """Keras, and legacy Keras where it has been imported: no model of it exists otherwise."""
    legacy = sys.modules.get("tf_keras")
    return [keras] if legacy is None else [keras, legacy]
