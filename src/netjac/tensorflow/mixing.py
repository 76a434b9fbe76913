"""Where one sample first reaches another: the operation to name when a model is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from netjac.tensorflow.match import Graph
from netjac.tensorflow.survey import LARGE, Survey


def mixing_operation(survey: Survey, graph: Graph) -> Any | None:
    """The first operation whose output for one sample changes when another sample does, and its operands' do not."""
    operations = [survey.graph.get_operation_by_name(name) for name in graph.order]
    tensors = {t.name: t for op in operations for t in (*op.inputs, *op.outputs) if survey.known(t)}
    survey.fetch(list(tensors.values()))
    mixed = {name: _is_mixed(survey, tensor) for name, tensor in tensors.items()}
    for operation in operations:
        before = any(mixed.get(tensor.name, False) for tensor in operation.inputs)
        if not before and any(mixed.get(tensor.name, False) for tensor in operation.outputs):
            return operation
    return None


def _is_mixed(survey: Survey, tensor: Any) -> bool:
    """Whether the entries of the first samples change with the last sample."""
    before, after = survey.values(tensor)
    axes = survey.batched(tensor)
    if not axes:
        return before.shape != after.shape or not np.array_equal(before, after, equal_nan=before.dtype.kind == "f")
    location = survey.sample_axis(tensor, axes[0]) if len(axes) == 1 and axes[0] >= 0 else None
    if location is None:
        return True
    changed = np.moveaxis(before != after, axes[0], 0)
    if before.dtype.kind == "f":
        changed &= ~np.moveaxis(np.isnan(before) & np.isnan(after), axes[0], 0)
    return bool(changed.reshape(location.outer, LARGE, location.inner, -1)[:, :-1].any())
