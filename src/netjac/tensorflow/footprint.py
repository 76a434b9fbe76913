"""How many bytes the factors of a network take, from the sizes of its use sites: arithmetic, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from netjac.plan import Footprint
from netjac.sites import SiteForm
from netjac.tensorflow.groups import Group
from netjac.tensorflow.survey import LARGE, PREFIX, Survey
from netjac.tensorflow.symbolic import Fallback
from netjac.tensorflow.trace import Trace, floating_type

VIEWS = frozenset({"Reshape", "Identity", "Squeeze", "ExpandDims"})
"""Operations whose output is their input's memory."""

LIVE_COTANGENTS = 4
"""Cotangents of the size of the largest activation that are alive at once in a backward sweep, beside those kept."""


def footprint(trace: Trace, survey: Survey, groups: Sequence[Group], fallbacks: Sequence[Fallback]) -> Footprint:
    """What `netjac.tensorflow.evaluate.CompiledSites` needs for some samples and outputs."""
    size = np.dtype(floating_type(trace.parameters)).itemsize
    forward, largest = _activations(survey)
    sample = working = row = 0
    for g in groups:
        p, groups_, k, _ = g.sizes
        incoming = 0 if g.constant else p * 8 if g.form is SiteForm.EMBEDDING else p * (groups_ * k + 1) * size
        if g.form is SiteForm.DENSE:  # A is summed over; a look-up's is made one-hot for that
            working += max(incoming, p * k * size if g.first.product.gather else 0)
            row += g.first.entries.size * size
        else:
            sample += incoming
    for key in dict.fromkeys(g.cotangents for g in groups if g.form is not SiteForm.DENSE):
        row += sum(p * width for p, width in (source.shape for source in key)) * size
    row += sum(trace.parameters.segments[f.variable].size for f in fallbacks) * size
    # Rows are swept one after the other and put in order then: everything kept is there twice for a moment.
    sweep = row + LIVE_COTANGENTS * largest + 2 * trace.output_space.size * size
    if fallbacks:  # each row of each sample comes with a forward pass of its own
        sweep += forward
    return Footprint(sample, row, working + sample + forward, sweep)


def _activations(survey: Survey) -> tuple[int, int]:
    """Bytes a sample of all floating tensors that hold samples, and of the largest of them."""
    sizes = [
        int(np.prod(survey.shape(tensor))) // LARGE * tensor.dtype.size
        for operation in survey.graph.get_operations()
        if operation.name.startswith(PREFIX) and operation.type not in VIEWS
        for tensor in operation.outputs
        if _holds_samples(survey, tensor)
    ]
    return sum(sizes), max(sizes, default=0)


def _holds_samples(survey: Survey, tensor: Any) -> bool:
    return bool(survey.known(tensor) and tensor.dtype.is_floating and survey.batched(tensor))
