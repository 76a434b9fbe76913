"""Recurrent layers of Keras while a model is traced: unrolled wherever they are, so that their steps factor.

A layer that Keras runs in a loop hides its products in it; unrolled, they are plain products, one a step. What decides
is each call: layers may stand in a model, in a plain function or behind an attribute, and lengths may differ.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import tensorflow as tf

from netjac.errors import ModelError
from netjac.tensorflow.layers import packages

UNROLLED = {"unroll": True, "_could_use_gpu_kernel": False}
"""Attributes of a layer that is unrolled; the second is legacy Keras's, which looks at it first."""


@contextmanager
def unrolled() -> Iterator[None]:
    """While this lasts, and in this thread, recurrent layers called with a known number of steps are unrolled.

    Raises
    ------
    ModelError
        From the call of a layer that starts from the state it was left in (``stateful=True``).
    """
    thread = threading.get_ident()
    changed = [(kind, vars(kind)["call"]) for kind in _recurrent_classes() if "call" in vars(kind)]
    for kind, call in changed:
        kind.call = _unrolling(call, thread)
    try:
        yield
    finally:
        for kind, call in changed:
            kind.call = call


def _recurrent_classes() -> list[Any]:
    """Recurrent layers of Keras and of legacy Keras, and all that derive from them."""
    found = [package.layers.RNN for package in packages()]
    for kind in found:
        found += [derived for derived in kind.__subclasses__() if derived not in found]
    return found


def _unrolling(call: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """``call`` of a class, with the flags of the layer changed for its duration."""
    signature = inspect.signature(call)

    @wraps(call)
    def unrolling(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(layer, *args, **kwargs)
        _, *given = signature.bind_partial(layer, *args, **kwargs).arguments.items()
        named = dict(given)
        if layer.stateful and named.get("initial_state") is None:
            raise _stateful(layer)
        if layer.unroll or not given or not _can_unroll(layer, given[0][1], named.get("mask")):
            return call(layer, *args, **kwargs)
        before = {name: value for name, value in vars(layer).items() if name in UNROLLED}
        for name in before:
            setattr(layer, name, UNROLLED[name])
        try:
            return call(layer, *args, **kwargs)
        finally:
            for name, value in before.items():
                setattr(layer, name, value)

    return unrolling


def _can_unroll(layer: Any, sequences: Any, mask: Any) -> bool:
    """Whether the number of steps is known; under a mask, also whether Keras unrolls correctly.

    Unrolled backwards, Keras zeroes the outputs of the wrong steps.
    """
    if mask is not None and layer.zero_output_for_mask and layer.go_backwards and layer.return_sequences:
        return False
    shape = tf.nest.flatten(sequences)[0].shape
    steps = 0 if getattr(layer, "time_major", False) else 1
    return shape.rank is not None and shape[steps] is not None


def _stateful(layer: Any) -> ModelError:
    return ModelError(
        f"the layer {layer.name!r} is stateful: what it gives depends on earlier calls, and its state is held for one "
        "number of samples. Build it with stateful=False, or give the state as an input: layer(x, initial_state=...)."
    )
