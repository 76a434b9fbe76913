"""Gradients of an operation's own (tf.custom_gradient) that are not linear: clipped, normalised, reduced to signs.

What a backward pass carries back is a product with the Jacobian, and linear in what comes in. An operation whose
gradient is not has no Jacobian to speak of: each cotangent finds another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from netjac.errors import ModelError
from netjac.tensorflow.custom import GRADIENT
from netjac.tensorflow.match import plain_name
from netjac.tensorflow.survey import Survey

TOLERANCE = 1e-2  # rounding of half precision is below, and clipping far above


def refuse_nonlinear(survey: Survey, scales: tuple[float, ...] = (1.0,)) -> None:
    """Raise where an operation's own gradient g has g(a + b) ≠ g(a) + g(b), for random a and b of these sizes."""
    rng = np.random.default_rng(20150)
    for operation in survey.graph.get_operations():
        if GRADIENT not in operation.node_def.attr or not all(survey.known(t) for t in operation.outputs):
            continue
        inputs = [tensor for tensor in operation.inputs if tensor.dtype.is_floating]
        for scale in scales:
            a, b = ([scale * rng.standard_normal(survey.shape(t)) for t in operation.outputs] for _ in range(2))
            whole, *parts = (
                _gradient(survey, operation, inputs, seed)
                for seed in ([x + y for x, y in zip(a, b, strict=True)], a, b)
            )
            if any(_differ(w, p + q) for w, p, q in zip(whole, *parts, strict=True)):
                raise ModelError(
                    f"the operation {plain_name(operation.name)!r} ({operation.type}) brings along a gradient "
                    "(tf.custom_gradient) that is not linear in what comes back to it, such as one that clips. No "
                    "Jacobian goes with it: leave it out of the model, and clip what the optimiser is given."
                )


def _gradient(survey: Survey, operation: Any, inputs: list[Any], seed: list[Any]) -> list[Any]:
    with survey.graph.as_default():
        seeds = [tf.constant(d, t.dtype) for d, t in zip(seed, operation.outputs, strict=True)]
        found = [d for d in tf.gradients(operation.outputs, inputs, grad_ys=seeds) if d is not None]
        found = [tf.convert_to_tensor(d) for d in found]
    survey.fetch(found)
    return [np.asarray(survey.values(tensor)[0], np.float64) for tensor in found]


def _differ(whole: Any, total: Any) -> bool:
    return bool(np.max(np.abs(whole - total), initial=0) > TOLERANCE * np.max(np.abs(total), initial=0))
