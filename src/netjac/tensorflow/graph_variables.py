"""Jacobians with respect to the variables of a ``tf.compat.v1`` graph.

A part of the graph is cut out (`subgraph`), and surveyed, matched and probed eagerly at made-up values. What its sites
are made of is then built again with the graph's own tensors, in a graph of TensorFlow 2, and the operations of that are
inserted where the part came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from netjac.errors import ModelError, RandomModelError, SampleMixingError
from netjac.sites import Coverage, CoverageEntry, Treatment
from netjac.tensorflow import probe
from netjac.tensorflow.assembly import Assembly, assemble
from netjac.tensorflow.evaluate import use_sites
from netjac.tensorflow.groups import Group
from netjac.tensorflow.subgraph import Parameter, Part, ancestors, cut
from netjac.tensorflow.symbolic import Fallback, SiteBuilder
from netjac.tensorflow.tensor import REPRESENTATIVES, by_variable, sample_values
from netjac.tensorflow.trace import Trace, argument_specs


@dataclass(frozen=True, eq=False)
class _Taken:
    """How the Jacobian of a part is made: by its groups, and by differentiation of each sample for the rest."""

    groups: tuple[Group, ...]
    fallbacks: tuple[Fallback, ...]
    coverage: Coverage


def parameter_blocks(ys: Any, parameters: Sequence[Parameter], inputs: Sequence[Any]) -> list[Any]:
    """(n, l, *shape) of each of the parameters, in the graph of ``ys``."""
    found: dict[int, Any] = {}
    for group in _apart(parameters):
        blocks = _blocks_of_part(ys, [parameters[i] for i in group], inputs)
        found |= dict(zip(group, blocks, strict=True))
    return [found[i] for i in range(len(parameters))]


def parameter_coverage(ys: Any, parameters: Sequence[Parameter], inputs: Sequence[Any]) -> Coverage:
    """How `parameter_blocks` treats each of them."""
    entries: dict[int, list[CoverageEntry]] = {}
    notes: dict[str, None] = {}
    for group in _apart(parameters):
        members = [parameters[i] for i in group]
        part = _cut(ys, members, inputs)
        if part is None:
            entries |= {i: [_unreached(p)] for i, p in zip(group, members, strict=True)}
            continue
        found = _taken_apart(part, len(group)).coverage
        notes |= dict.fromkeys(found.notes)
        for i, segment in zip(group, part.trace.parameters.segments, strict=False):
            entries[i] = [entry for entry in found.entries if entry.variable == segment.name]
    return Coverage(tuple(entry for i in sorted(entries) for entry in entries[i]), tuple(notes))


def _apart(parameters: Sequence[Parameter]) -> list[list[int]]:
    """Positions, in groups of which no member depends on another: a tensor made of a variable cuts its way off."""
    above = [ancestors(p.tensor) for p in parameters]
    names = [p.tensor.op.name for p in parameters]
    groups: list[list[int]] = []
    for i in range(len(parameters)):
        for group in groups:
            if all(names[j] not in above[i] and names[i] not in above[j] for j in group):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _blocks_of_part(ys: Any, parameters: Sequence[Parameter], inputs: Sequence[Any]) -> list[Any]:
    n, l = tf.shape(ys)[0], prod(ys.shape.as_list()[1:])
    part = _cut(ys, parameters, inputs)
    if part is None or l == 0:
        return [tf.zeros([n, l, *p.shape], p.dtype) for p in parameters]
    taken = _taken_apart(part, len(parameters))
    trace = part.with_captured({name: _readable(tensor) for name, tensor in part.captured.items()})
    run = tf.function(_columns(trace, taken, len(parameters)), autograph=False)
    try:
        concrete = run.get_concrete_function(*argument_specs(trace))
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise ModelError(
            f"the graph of {ys.name!r} could not be differentiated sample by sample; a number of samples that is fixed "
            f"in the graph (in a reshape, say) is a typical cause:\n{error}"
        ) from error
    blocks = _inserted(concrete, [*(p.value() for p in part.parameters), *part.inputs])
    return [tf.reshape(b, [n, l, *p.shape]) for b, p in zip(blocks, parameters, strict=True)]


def _inserted(concrete: Any, arguments: Sequence[Any]) -> list[Any]:
    """The operations of a function, straight in the graph under construction.

    A call would be changed by a later ``tf.gradients``, which a Session that has run it does not allow.
    """
    given = [*arguments, *concrete.captured_inputs]
    definition = concrete.graph.as_graph_def()
    used = {source.partition(":")[0] for node in definition.node for source in node.input}
    feeds = {t.name: value for t, value in zip(concrete.inputs, given, strict=True) if t.op.name in used}
    outputs = [tensor.name for tensor in concrete.outputs]
    blocks: list[Any] = tf.graph_util.import_graph_def(definition, feeds, outputs, name="netjac_jacobian")
    return blocks


def _cut(ys: Any, parameters: Sequence[Parameter], inputs: Sequence[Any]) -> Part | None:
    """`subgraph.cut`, outside the graph under construction."""
    if not inputs:
        raise ModelError(
            f"no placeholder with an axis of samples leads to {ys.name!r}; say inputs=[...], the tensors with the "
            "samples along the first axis."
        )
    with context.eager_mode():
        return cut(ys, parameters, inputs)


def _readable(tensor: Any) -> Any:
    """The value of a tensor, which may be the reference of a variable."""
    return tf.identity(tensor) if tensor.dtype != tensor.dtype.base_dtype else tensor


def _columns(trace: Trace, taken: _Taken, count: int) -> Any:
    """The function of (θ, x) that gives the first ``count`` variables' columns."""
    build = SiteBuilder(trace, taken.groups, taken.fallbacks)
    sites = use_sites(trace, taken.groups, taken.fallbacks)

    def run(*arguments: Any) -> list[Any]:
        theta, x = arguments[: len(trace.parameters)], arguments[len(trace.parameters) :]
        y, values = build(theta, x)
        return by_variable(trace, y, sites, values)[:count]

    return run


def _taken_apart(part: Part, count: int) -> _Taken:
    """Match and probe the part at made-up values; where that is not possible, every variable is for the fallback."""
    rng = np.random.default_rng(0)
    with context.eager_mode():
        try:
            made_up = {k: sample_values(t.dtype, t.shape.as_list(), rng) for k, t in part.captured.items()}
            traced = part.with_captured(made_up)
            signature = traced.signature
            leaves = [
                sample_values(dtype, (REPRESENTATIVES, *shape), rng)
                for dtype, shape in zip(signature.dtypes, signature.shapes, strict=True)
            ]
            theta = [rng.uniform(0.2, 0.8, s.shape).astype(s.dtype) for s in traced.parameters.segments]
            found = assemble(traced, theta, leaves)
            _probe(traced, found, theta)
            return _restricted(found, count)
        except (SampleMixingError, RandomModelError):
            raise
        except Exception as error:  # whatever made-up values may provoke in a graph that was not made for them
            reason = f"could not be run at made-up values ({type(error).__name__})"
            segments = part.trace.parameters.segments[:count]
            return _Taken(
                (),
                tuple(Fallback(i, segment.name, reason) for i, segment in enumerate(segments)),
                Coverage(tuple(CoverageEntry(s.name, s.shape, Treatment.FALLBACK, reason=reason) for s in segments)),
            )


def _restricted(found: Assembly, count: int) -> _Taken:
    """What concerns the first ``count`` variables."""
    groups = tuple(g for g in found.groups if g.first.variable < count)
    return _Taken(groups, tuple(f for f in found.fallbacks if f.variable < count), found.coverage)


def _probe(traced: Trace, found: Assembly, theta: Sequence[Any]) -> None:
    taken = _Taken(found.groups, found.fallbacks, found.coverage)
    run = tf.function(_columns(traced, taken, len(traced.parameters)), autograph=False)

    def matrix(vector: Any, x: Sequence[Any]) -> Any:
        pairs = zip(traced.parameters.unravel(vector), traced.parameters, strict=True)
        weights = [tf.constant(w, s.dtype) for w, s in pairs]
        blocks = [np.asarray(block, np.float64) for block in run(*weights, *x)]
        return np.concatenate([block.reshape(-1, block.shape[2]) for block in blocks], axis=1)

    probe.check(traced, found.survey, found.graph, theta, matrix)


def _unreached(parameter: Parameter) -> CoverageEntry:
    return CoverageEntry(
        parameter.name, parameter.shape, Treatment.UNREACHED, reason="does not reach the outputs: zero columns"
    )
