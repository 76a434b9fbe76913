"""From a model to Jacobians: trace, survey, match, evaluate, factor and probe, put together for one signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

from netjac import factor
from netjac.jacobian import Jacobian
from netjac.sites import Coverage, CoverageEntry, SiteForm, SiteValues, Treatment, UseSite
from netjac.spaces import OutputSpace, ParameterSpace
from netjac.tensorflow import probe
from netjac.tensorflow.evaluate import CompiledSites
from netjac.tensorflow.groups import Group, group
from netjac.tensorflow.match import Graph, Match, Unmatched, match, plain_name
from netjac.tensorflow.survey import Survey
from netjac.tensorflow.symbolic import Fallback
from netjac.tensorflow.trace import Signature, Trace, argument_specs, trace


class Extractor:
    """Jacobians of one model for inputs of one signature, any number of samples.

    It holds no reference to the model, only to its variables, so that a model that is dropped can be collected.

    Parameters
    ----------
    model, variables
        As for `netjac.jacobian`.
    signature, leaves
        Of the first x; a few of its samples serve for the survey and the probe.
    parameters
        The columns.
    """

    def __init__(self, model: Any, signature: Signature, leaves: Sequence[Any], parameters: ParameterSpace) -> None:
        self.parameters = parameters
        self._trace = trace(model, signature, parameters)
        self.output_space: OutputSpace = self._trace.output_space
        theta = [np.asarray(variable) for variable in parameters.variables or ()]
        found = assemble(self._trace, theta, leaves)
        self._sites = CompiledSites(self._trace, found.groups, found.fallbacks)
        self.coverage = found.coverage
        self._plan = factor.plan(self._sites.sites, parameters)
        probe.check(self._trace, found.survey, found.graph, theta, self._jacobian)

    @property
    def trace(self) -> Trace:
        """What was traced."""
        return self._trace

    @property
    def sites(self) -> CompiledSites:
        """The sites, compiled, and what builds them in other graphs."""
        return self._sites

    def evaluate(self, x: Sequence[Any], theta: ArrayLike | None = None) -> Jacobian:
        """The Jacobian at ``x`` (tensors) and the vector ``theta`` (m,), or at the variables' present values."""
        if x[0].shape[0] == 0:
            return self._empty()
        return self._jacobian(self._vector(theta), x)

    def outputs(self, x: Sequence[Any], theta: ArrayLike | None = None) -> NDArray[Any]:
        """The flat outputs (n, l) alone."""
        if x[0].shape[0] == 0:
            return self._empty().y
        return _wide(self._sites.outputs(self._vector(theta), x))

    def _vector(self, theta: ArrayLike | None) -> NDArray[Any]:
        return self.parameters.ravel() if theta is None else self.parameters.vector(theta)

    def _jacobian(self, theta: NDArray[Any], x: Sequence[Any]) -> Jacobian:
        y, values = self._sites(theta, x)
        return Jacobian(self.parameters, self.output_space, _wide(y), self._plan.build(values), self.coverage)

    def _empty(self) -> Jacobian:
        rows = self.output_space.size
        dtype = np.result_type(np.float32, *(s.dtype for s in self.parameters.segments if "16" not in s.dtype))
        values = [_empty_values(site, rows, dtype) for site in self._sites.sites]
        y = np.zeros((0, rows), dtype)
        return Jacobian(self.parameters, self.output_space, y, self._plan.build(values), self.coverage)


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
    coverage = _coverage(traced.parameters, groups, reached, unmatched)
    return Assembly(tuple(g for g in groups if g in reached), tuple(fallbacks), coverage, survey, graph)


def _wide(y: NDArray[Any]) -> NDArray[Any]:
    """Half precision as float32: NumPy and SciPy compute in nothing narrower."""
    return y if y.dtype in (np.float32, np.float64) else y.astype(np.float32)


def _empty_values(site: UseSite, rows: int, dtype: Any) -> SiteValues:
    g, k, c = site.entries.shape
    if site.form is SiteForm.DENSE:
        return SiteValues(dense=np.zeros((0, rows, g * k * c), dtype))
    d = np.zeros((0, rows, 1, g * c), dtype)
    if site.form is SiteForm.EMBEDDING:
        return SiteValues(D=d, indices=np.zeros((0, 1), np.int64))
    return SiteValues(D=d, A=np.zeros((0, 1, g, k), dtype))


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
    parameters: ParameterSpace, groups: Sequence[Group], reached: Sequence[Group], unmatched: Sequence[Unmatched]
) -> Coverage:
    entries = []
    for position, segment in enumerate(parameters.segments):
        uses = [_use(g, m, g in reached) for g in groups if g.first.variable == position for m in g.members]
        uses += [
            (e.operation, e.operation_type, Treatment.FALLBACK, e.reason) for e in unmatched if e.variable == position
        ]
        if not any(use[2] is not Treatment.UNREACHED for use in uses):
            uses = [("", "", Treatment.UNREACHED, "does not reach the outputs: zero columns")]
        entries += [
            CoverageEntry(segment.name, segment.shape, treatment, operation, operation_type, reason)
            for operation, operation_type, treatment, reason in uses
        ]
    return Coverage(tuple(entries))


def _use(g: Group, member: Match, reached: bool) -> tuple[str, str, Treatment, str]:
    name, kind = plain_name(member.operation.name), member.operation.type
    if not reached:
        return name, kind, Treatment.UNREACHED, "does not reach the outputs"
    if g.form is SiteForm.DENSE:
        return name, kind, Treatment.COLLAPSED, f"its columns are fewer than the factors at {g.sizes[0]} positions"
    return name, kind, Treatment.FACTORED, ""
