"""How many bytes the factors of a network take, from the sizes of its use sites: arithmetic, before anything runs."""

from __future__ import annotations

from math import prod

import numpy as np

from netjac.planning import Footprint
from netjac.sites import SiteForm
from netjac.tensorflow.assembly import Assembly
from netjac.tensorflow.groups import transparent_root
from netjac.tensorflow.survey import LARGE, PREFIX
from netjac.tensorflow.trace import Trace, floating_type

VIEWS = frozenset({"Reshape", "Identity", "Squeeze", "ExpandDims"})
"""Operations whose output is their input's memory."""

PASSING = 4
"""Cotangents that are on their way through the network at once in a backward sweep, beside those that are kept."""


def footprint(trace: Trace, found: Assembly) -> Footprint:
    """What `netjac.tensorflow.evaluate.CompiledSites` needs for some samples and outputs."""
    size = np.dtype(floating_type(trace.parameters)).itemsize
    sample = summed = row = 0
    for g in found.groups:
        p, groups, k, _ = g.sizes
        incoming = 0 if g.constant else p * 8 if g.form is SiteForm.EMBEDDING else p * (groups * k + 1) * size
        if g.form is SiteForm.DENSE:  # A is summed over; a look-up's is made one-hot for that
            summed += max(incoming, p * k * size if g.first.product.gather else 0)
            row += g.first.entries.size * size
        else:
            sample += incoming
    kept = dict.fromkeys(g.cotangents for g in found.groups if g.form is not SiteForm.DENSE)
    row += sum(p * width for key in kept for p, width in (source.shape for source in key)) * size
    row += sum(trace.parameters.segments[f.variable].size for f in found.fallbacks) * size
    forward, passing = _activations(found, {source.root for key in kept for source in key})
    # What is kept of a sweep is put in order at its end, the parts of merged uses are put together before: copies.
    merged = sum(p * width for key in kept if len(key) > 1 for p, width in (source.shape for source in key)) * size
    sweep = max(row + merged + sum(passing[:PASSING]), 2 * trace.output_space.size * size)
    if found.fallbacks:  # each row of each sample comes with a forward pass of its own
        sweep += forward
    return Footprint(sample, row, summed + sample + forward, sweep)


def _activations(found: Assembly, kept: set[str]) -> tuple[int, list[int]]:
    """Bytes a sample of all floating tensors with samples, and of each different cotangent that is not ``kept``."""
    survey, total = found.survey, 0
    passing: dict[str, int] = {}
    for operation in survey.graph.get_operations():
        if not operation.name.startswith(PREFIX) or operation.type in VIEWS:
            continue
        for tensor in operation.outputs:
            if survey.known(tensor) and tensor.dtype.is_floating and survey.batched(tensor):
                size = prod(survey.shape(tensor)) // LARGE * tensor.dtype.size
                total += size
                passing[transparent_root(survey, found.graph, tensor).name] = size
    return total, sorted((size for root, size in passing.items() if root not in kept), reverse=True)
