"""A trace taken apart: survey, matches, groups, and the coverage table that says what became of every use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.sites import Coverage, CoverageEntry, SiteForm, Treatment
from netjac.spaces import ParameterSpace
from netjac.tensorflow import probe
from netjac.tensorflow.groups import Group, group
from netjac.tensorflow.match import SHAPES, Graph, Match, Unmatched, match, plain_name
from netjac.tensorflow.survey import Survey
from netjac.tensorflow.symbolic import Fallback
from netjac.tensorflow.trace import Trace, argument_specs

STEPS = frozenset({"Round", "Rint", "Floor", "Ceil", "Sign", "FloorDiv"})
"""Operations whose derivative is zero wherever it exists."""

RANKS = frozenset({"ArgMax", "ArgMin", "Bucketize", "LowerBound", "UpperBound"})
COMPARISONS = frozenset({"Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"})
"""Named only for weights that reach the outputs in no other way: a comparison mostly picks one of two branches."""


@dataclass(frozen=True, eq=False)
class Assembly:
    """A trace taken apart: what is factored (``groups``), what is not (``fallbacks``), and what was run to find out."""

    groups: tuple[Group, ...]
    fallbacks: tuple[Fallback, ...]
    coverage: Coverage
    survey: Survey
    graph: Graph


def assemble(traced: Trace, theta: Sequence[NDArray[Any]], leaves: Sequence[Any]) -> Assembly:
    """Survey a trace near ``theta`` and at samples like those of ``leaves``, match its edges and group them."""
    probe.refuse_random(traced.program)
    # Away from weights of zero, which would hide where the samples lie.
    near = probe.moved(theta, np.random.default_rng(0))
    survey = Survey(traced.program, argument_specs(traced), near, leaves)
    graph = Graph(survey)
    matches, unmatched = match(survey, graph)
    falling = {edge.variable for edge in unmatched}
    matches = [m for m in matches if m.variable not in falling]
    groups = group(survey, graph, matches, traced.output_space.size)
    reached = _reached(survey, graph, groups)
    fallbacks = [
        Fallback(edge.variable, edge.operation, edge.reason)
        for position in sorted(falling)
        for edge in [next(e for e in unmatched if e.variable == position)]
    ]
    coverage = _coverage(traced.parameters, graph, groups, reached, unmatched)
    dropped = (f"the assignment to {name!r} in the model's call is not carried out" for name in traced.program.assigned)
    coverage = replace(coverage, notes=(*coverage.notes, *dropped))
    return Assembly(tuple(g for g in groups if g in reached), tuple(fallbacks), coverage, survey, graph)


def _reached(survey: Survey, graph: Graph, groups: Sequence[Group]) -> list[Group]:
    """The groups whose cotangents the outputs reach."""
    roots = list(dict.fromkeys(c.root for g in groups for c in g.cotangents))
    if not roots:
        return []
    with survey.graph.as_default():
        tensors = [survey.graph.get_tensor_by_name(root) for root in roots]
        gradients = tf.gradients([survey.graph.get_tensor_by_name(name) for name in sorted(graph.outputs)], tensors)
    live = {root for root, gradient in zip(roots, gradients, strict=True) if gradient is not None}
    return [g for g in groups if any(c.root in live for c in g.cotangents)]


def _coverage(
    parameters: ParameterSpace,
    graph: Graph,
    groups: Sequence[Group],
    reached: Sequence[Group],
    unmatched: Sequence[Unmatched],
) -> Coverage:
    steps = _zero_derivatives(graph, range(len(parameters)))
    why = "does not reach the outputs"
    entries = []
    for position, segment in enumerate(parameters.segments):
        stopped = why + (f": its derivative is zero at {', '.join(steps[position])}" if steps[position] else "")
        uses = [_use(g, m, g in reached, stopped) for g in groups if g.first.variable == position for m in g.members]
        uses += [
            (e.operation, e.operation_type, Treatment.FALLBACK, e.reason) for e in unmatched if e.variable == position
        ]
        if not any(use[2] is not Treatment.UNREACHED for use in uses):
            uses = [
                ("", "", Treatment.UNREACHED, stopped + "; zero columns" if steps[position] else why + ": zero columns")
            ]
        entries += [
            CoverageEntry(segment.name, segment.shape, treatment, operation, operation_type, reason)
            for operation, operation_type, treatment, reason in uses
        ]
    notes = dict.fromkeys(step for found in steps for step in found if step.partition(" ")[0] not in COMPARISONS)
    return Coverage(tuple(entries), tuple(f"derivative taken as zero at {step}, where it exists" for step in notes))


def _use(g: Group, member: Match, reached: bool, stopped: str) -> tuple[str, str, Treatment, str]:
    name, kind = plain_name(member.operation.name), member.operation.type
    if not reached:
        return name, kind, Treatment.UNREACHED, stopped
    if g.form is SiteForm.DENSE:
        return name, kind, Treatment.COLLAPSED, f"its columns are fewer than the factors at {g.sizes[0]} positions"
    return name, kind, Treatment.FACTORED, ""


def _zero_derivatives(graph: Graph, parameters: Iterable[int]) -> list[list[str]]:
    """For each parameter the rounding, ranking and other stepwise operations that its values pass on to the outputs."""
    found = []
    for position in parameters:
        steps: dict[str, None] = {}
        pending, seen = [graph.parameter(position)], set()
        while pending:
            for operation in graph.consumers(pending.pop()):
                if operation.name in seen:
                    continue
                seen.add(operation.name)
                if operation.type in SHAPES:
                    continue
                if _is_step(operation):
                    steps[f"{operation.type} {plain_name(operation.name)!r}"] = None
                else:
                    pending.extend(operation.outputs)
        found.append(list(steps))
    return found


def _is_step(operation: Any) -> bool:
    """Whether real numbers go in and what comes out changes in steps: rounded, ranked, made an integer."""
    if not operation.inputs[0].dtype.is_floating:
        return False
    if operation.type in STEPS:
        return True
    casts = operation.type == "Cast" and operation.outputs[0].dtype.is_integer
    return casts or operation.type in RANKS or operation.type in COMPARISONS
