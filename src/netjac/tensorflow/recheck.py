"""Models that could mix samples: checked again at every evaluation, not only on first use.

Some operations can carry one sample's values to another: a reduction over the axis of samples, a sort or a running sum
along it, a branch or loop that sees the whole batch. Where one reaches the outputs, mixing may be asleep at first
(behind a threshold, a gate of zero, a number of samples) and wake up later. Such a model pays one ordinary gradient
more at each evaluation; a model made of operations that act on each sample by itself pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.errors import SampleMixingError
from netjac.tensorflow.functions import INPUT_TYPES
from netjac.tensorflow.match import Graph, plain_name
from netjac.tensorflow.probe import OrdinaryGradient, cotangents, precision, relative_error
from netjac.tensorflow.survey import LARGE, Survey
from netjac.tensorflow.trace import Trace
from netjac.tensorflow.weights import SHAPES

ALONG_AN_AXIS = {"Cumsum": 1, "Cumprod": 1, "CumulativeLogsumexp": 1, "ReverseV2": 1, "Roll": 2}
"""Operations along the axes that an operand names."""

ALONG_THE_LAST = frozenset({"Softmax", "LogSoftmax", "TopKV2"})
"""Operations along the last axis."""

ANYWHERE = frozenset(
    [
        *("ReverseSequence", "Unique", "UniqueV2", "UniqueWithCounts", "ScatterNd", "TensorScatterUpdate"),
        *("TensorScatterAdd", "SegmentSum", "SegmentMean", "SegmentMax", "UnsortedSegmentSum", "UnsortedSegmentMax"),
        *("UnsortedSegmentMin", "Bincount", "DenseBincount"),
    ]
)
"""Operations that bring entries together by values."""


def suspect(survey: Survey, graph: Graph) -> Any | None:
    """The first operation that could carry one sample's values to another; None where there is none."""
    for name in graph.order:
        operation = survey.graph.get_operation_by_name(name)
        if operation.type in SHAPES:
            continue
        axes = [survey.batched(tensor) for tensor in operation.inputs if survey.known(tensor)]
        if not any(axes):
            continue
        if operation.type in INPUT_TYPES or operation.type in ANYWHERE or _along(survey, operation, axes[0]):
            return operation
        if not all(_holds_samples(survey, tensor) for tensor in operation.outputs if survey.known(tensor)):
            return operation
    return None


def _along(survey: Survey, operation: Any, held: tuple[int, ...]) -> bool:
    """Whether the operation works along an axis that holds samples."""
    if operation.type not in ALONG_THE_LAST and operation.type not in ALONG_AN_AXIS:
        return False
    rank = len(survey.shape(operation.inputs[0]))
    if operation.type in ALONG_THE_LAST:
        return rank - 1 in held
    named = tf.get_static_value(operation.inputs[ALONG_AN_AXIS[operation.type]])
    return named is None or any(int(axis) % rank in held for axis in np.ravel(named))


def _holds_samples(survey: Survey, tensor: Any) -> bool:
    """Whether one axis holds a whole number of entries for each sample."""
    axes = survey.batched(tensor)
    return len(axes) == 1 and axes[0] >= 0 and survey.multiple(tensor, axes[0]) is not None


class Recheck:
    """Jᵀ u against one ordinary gradient, at the θ and x of an evaluation.

    Parameters
    ----------
    trace
        The network.
    operation
        What `suspect` found.
    """

    def __init__(self, trace: Trace, operation: Any) -> None:
        self._trace = trace
        self._name = f"{plain_name(operation.name)!r} ({operation.type})"
        self._gradient: OrdinaryGradient | None = None

    def __call__(self, theta: NDArray[Any], x: Sequence[Any], jacobian: Any) -> None:
        """Raise `SampleMixingError` unless ``jacobian`` is that of the whole batch."""
        if self._gradient is None:
            self._gradient = OrdinaryGradient(self._trace)
        u = cotangents(np.random.default_rng(LARGE), jacobian.n, jacobian.l)
        expected = self._gradient(theta, x, u)
        ours = np.asarray(jacobian.T @ u.reshape(-1), np.float64)
        if not (np.isfinite(expected).all() and np.isfinite(ours).all()):
            return
        low, tolerance = precision(self._trace)
        if relative_error(ours, expected, np.linalg.norm(expected), low) <= tolerance:
            return
        exact = self._gradient.by_outputs(theta, x, u)
        if relative_error(ours, exact.value, np.linalg.norm(exact.size), low) > tolerance:
            raise SampleMixingError(
                f"the operation {self._name} mixes samples at these inputs and parameters: one sample's output depends "
                "on another sample, so no Jacobian organised by sample exists."
            )
