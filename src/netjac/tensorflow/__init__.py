"""Jacobians of TensorFlow and Keras networks.

The way of the data: `trace` (a model → `program`, a flat graph) → `survey` (where the samples lie) → `match` by `rules`
(each variable's edges → products) → `groups` (what is kept) → `evaluate` (one compiled function) → `extractor`, which
hands use sites and their values to `netjac.factor` and has the `probe` compare the result with the ordinary derivative.
"""

from netjac.tensorflow.evaluator import Evaluator, evaluator, input_jacobian, jacobian, parameters
from netjac.tensorflow.identity import model_checksum
from netjac.tensorflow.tensor import jacobian_tensor

__all__ = [
    "Evaluator",
    "evaluator",
    "input_jacobian",
    "jacobian",
    "jacobian_tensor",
    "model_checksum",
    "parameters",
]
