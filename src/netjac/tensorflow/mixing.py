"""Models that mix samples: found by what the outputs do, and the operation to name.

One of three samples is changed at a time; the outputs of the others must stay as they were. That finds what derivatives
do not show: statistics of the batch behind a stopped gradient, or of the inputs alone. And two of the three, in another
order, must have the outputs they had: what depends on the number of samples, or on a sample's place, is no function of
the sample, and would be another one in every tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.errors import SampleMixingError
from netjac.tensorflow.match import Graph, plain_name
from netjac.tensorflow.survey import LARGE, Survey, unit

PLACES = (2, 0)
"""Which of the samples are looked at in other places."""


def refuse_mixing(survey: Survey, graph: Graph) -> None:
    """Raise if a sample's outputs change with another sample (by over four units of rounding), or with its place."""
    outputs = [survey.graph.get_tensor_by_name(name) for name in sorted(graph.outputs)]
    before, after = survey.responses(outputs)
    mixed = any(_reaches_others(b, a[j], i) for i, a in enumerate(after) for j, b in enumerate(before))
    if not mixed and not _depends_on_place(survey, outputs, before):
        return
    again, _ = survey.responses(outputs)
    if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, again, strict=True)):
        raise mixing_error(survey, graph) if mixed else _place_error(survey, graph)


def _depends_on_place(survey: Survey, tensors: Sequence[Any], before: Sequence[NDArray[Any]]) -> bool:
    """Whether samples have other values in other places, by far more than rounding; they lie on the first axis."""
    moved = survey.placed(tensors, PLACES)
    pairs = [(b.astype(np.float64)[list(PLACES)], m.astype(np.float64)) for b, m in zip(before, moved, strict=True)]
    units = [unit(b.dtype) for b in before]
    if not any(_apart(b, m, 64 * u * _size(b)) for (b, m), u in zip(pairs, units, strict=True)):
        return False
    # A matrix product of other size is rounded otherwise, and a network may magnify that.
    nudged = [n.astype(np.float64)[list(PLACES)] for n in survey.nudged(tensors)]
    return any(
        _apart(b, m, 1000 * (u * _size(b) + _size(n - b))) for (b, m), n, u in zip(pairs, nudged, units, strict=True)
    )


def _size(values: NDArray[np.float64]) -> float:
    return float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0))


def _apart(a: NDArray[np.float64], b: NDArray[np.float64], most: float) -> bool:
    if a.shape != b.shape:
        return True
    with np.errstate(invalid="ignore"):
        return bool(np.any(np.abs(a - b) > most))


def _place_error(survey: Survey, graph: Graph) -> SampleMixingError:
    """What to raise; it names the first operation after which a sample's numbers depend on its place."""
    name = "an operation"
    for operation in (survey.graph.get_operation_by_name(name) for name in graph.order):
        held = [t for t in operation.outputs if survey.known(t) and t.dtype.is_floating and survey.batched(t) == (0,)]
        own = [t for t in held if survey.multiple(t, 0) == 1]
        if own and _depends_on_place(survey, own, [survey.values(t)[0] for t in own]):
            name = f"the operation {plain_name(operation.name)!r} ({operation.type})"
            break
    return SampleMixingError(
        f"{name} makes a sample's outputs depend on the number of samples, or on its place among them: they are no "
        "function of the sample. Typical causes: a division by the number of samples, the derivative of a mean over "
        "the batch (take a sum), tf.range or tf.linspace along the batch."
    )


def _reaches_others(before: NDArray[Any], after: NDArray[Any], i: int) -> bool:
    """Whether entries of samples other than i differ; the samples lie on the first axis."""
    b, a = (np.delete(array.astype(np.float64), i, axis=0) for array in (before, after))
    size = np.max(np.abs(b), axis=0, where=np.isfinite(b), initial=0.0)  # of each output by itself
    with np.errstate(invalid="ignore"):
        return bool(
            np.any(~((np.abs(a - b) <= 4 * unit(before.dtype) * size) | (a == b) | (np.isnan(a) & np.isnan(b))))
        )


def mixing_error(survey: Survey, graph: Graph, culprit: Any | None = None) -> SampleMixingError:
    """What to raise; it names ``culprit``, looked for if not given."""
    culprit = mixing_operation(survey, graph) if culprit is None else culprit
    name = "an operation" if culprit is None else f"the operation {plain_name(culprit.name)!r} ({culprit.type})"
    return SampleMixingError(
        f"{name} mixes samples: one sample's output depends on another sample, so no Jacobian organised by sample "
        "exists. Typical causes: batch normalisation with training=True, a mean or softmax over the batch, a reshape "
        "that swaps samples and time."
    )


def mixing_operation(survey: Survey, graph: Graph) -> Any | None:
    """The first operation whose output for one sample changes when another sample does, and its operands' do not."""
    operations = [survey.graph.get_operation_by_name(name) for name in graph.order]
    tensors = {t.name: t for op in operations for t in (*op.inputs, *op.outputs) if survey.known(t)}
    before, after = survey.responses(list(tensors.values()))
    mixed = {
        tensor.name: _is_mixed(survey, tensor, before[j], [values[j] for values in after])
        for j, tensor in enumerate(tensors.values())
    }
    for operation in operations:
        comes_in = any(mixed.get(tensor.name, False) for tensor in operation.inputs)
        if not comes_in and any(mixed.get(tensor.name, False) for tensor in operation.outputs):
            return operation
    return None


def _is_mixed(survey: Survey, tensor: Any, before: NDArray[Any], after: Sequence[NDArray[Any]]) -> bool:
    """Whether entries of the other samples change with one sample."""
    axes = survey.batched(tensor)
    if not axes:
        return any(_differ(before, values).any() for values in after)
    location = survey.sample_axis(tensor, axes[0]) if len(axes) == 1 and axes[0] >= 0 else None
    if location is None:
        return True
    for i, values in enumerate(after):
        changed = np.moveaxis(_differ(before, values), axes[0], 0)
        changed = changed.reshape(location.outer, LARGE, location.inner, -1)
        if np.delete(changed, i, axis=1).any():
            return True
    return False


def _differ(before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
    """Entry by entry; everywhere, where even the shape does."""
    if before.shape != after.shape:
        return np.ones(before.shape, bool)
    different = np.asarray(before != after)
    return different & ~(np.isnan(before) & np.isnan(after)) if before.dtype.kind == "f" else different
