"""Each variable's edges → sites in normal form, with proof that every edge is accounted for.

From each parameter the walk follows the graph forwards, through operations that touch weights alone (see
`netjac.tensorflow.weights`). Where a weight meets data, the edge ends: it is a site if a rule states the operation as a
product, and otherwise unmatched, with the reason. Nothing is skipped: an edge is followed, a site, unmatched, or
without derivative (a shape, stop_gradient).

The labels of a product then decide its normal form (see `netjac.sites`): in z and A but not E, or in z alone: p; in all
three: g; in A and E: k; in z and E: c. The label that holds the samples is split into (outer, n, inner) by the survey.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.tensorflow.program import PICKS_ROWS
from netjac.tensorflow.rules import Axes, Product, Unsupported, product
from netjac.tensorflow.survey import LARGE, PREFIX, Survey
from netjac.tensorflow.weights import Mix, Origin, WeightProduct, follow

WITHOUT_DERIVATIVE = frozenset(["StopGradient", "PreventGradient", "ZerosLike", "OnesLike"])
SHAPES = frozenset(["Shape", "ShapeN", "Size", "Rank"])
RESTORES = frozenset(["ScatterNd", "TensorScatterUpdate", "TensorScatterAdd", "DynamicStitch", "ParallelDynamicStitch"])
"""Operations that put rows in their places again, wherever they were taken from."""
SAMPLES = "n"


@dataclass(frozen=True, eq=False)
class NormalForm:
    """The labels of a product, split and sorted.

    Attributes
    ----------
    z, a : Axes
        Fine labels of each axis of z and of A; the samples' label is ``"n"``; labels of size 1 are left out.
    p, g, k, c : tuple of str
        Labels by their part.
    sizes
        Of every label but ``"n"``.
    """

    z: Axes
    a: Axes | None
    p: tuple[str, ...]
    g: tuple[str, ...]
    k: tuple[str, ...]
    c: tuple[str, ...]
    sizes: dict[str, int]

    def size(self, labels: Sequence[str]) -> int:
        """Product of the labels' sizes."""
        return prod(self.sizes[label] for label in labels)


@dataclass(frozen=True, eq=False)
class Match:
    """One edge from a variable to data, as a product in normal form.

    Attributes
    ----------
    variable, operation, operand
        Which parameter enters which operation as which operand.
    entries : (g, k, c) integers
        Positions in the flattened variable.
    scaled
        Whether a slope d E / d variable is to be evaluated.
    mix
        What A or D is to be multiplied by, where E is a product of weights.
    """

    variable: int
    operation: Any
    operand: int
    product: Product
    form: NormalForm
    entries: NDArray[np.intp]
    scaled: bool
    mix: Mix | None = None

    @property
    def looks_up(self) -> bool:
        """Whether A is one-hot: the rows of a weight are picked by indices."""
        return self.product.gather and (self.mix is None or self.mix.side != "k")


@dataclass(frozen=True)
class Unmatched:
    """An edge that no rule covers."""

    variable: int
    operation: str
    operation_type: str
    reason: str


def plain_name(name: str) -> str:
    """Name in the user's graph of an operation or tensor of the survey's graph."""
    return name.removeprefix(PREFIX)


class Graph:
    """The operations the outputs depend on, in order."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.order: dict[str, int] = {}
        outputs = [survey.graph.get_tensor_by_name(PREFIX + name) if not self._is_fed(name) else None
                   for name in survey.program.outputs]  # fmt: skip
        for tensor in outputs:
            if tensor is not None:
                self._visit(tensor.op)
        self.outputs = frozenset(tensor.name for tensor in outputs if tensor is not None)
        self._picked = self._behind_picked_rows()

    def _is_fed(self, name: str) -> bool:
        return name in self.survey.program.inputs or name in self.survey.program.parameters

    def _visit(self, operation: Any) -> None:
        pending: list[tuple[Any, bool]] = [(operation, False)]
        while pending:
            current, done = pending.pop()
            if done:
                self.order.setdefault(current.name, len(self.order))
            elif current.name not in self.order:
                pending.append((current, True))
                pending.extend((t.op, False) for t in current.inputs if t.op.name not in self.order)

    def consumers(self, tensor: Any) -> list[Any]:
        """Operations the outputs depend on that take ``tensor``."""
        return [op for op in tensor.consumers() if op.name in self.order]

    def _behind_picked_rows(self) -> frozenset[str]:
        """The operations that work on rows which values of the samples picked or sorted: tensors by name."""
        found: set[str] = set()
        for name in self.order:
            operation = self.survey.graph.get_operation_by_name(name)
            if operation.type in RESTORES or operation.type in SHAPES:
                continue
            if _picks_rows(self.survey, operation) or any(tensor.name in found for tensor in operation.inputs):
                found |= {tensor.name for tensor in operation.outputs}
        return frozenset(found)

    def holds_picked_rows(self, tensor: Any) -> bool:
        """Whether it depends on the values of the samples which of them a tensor holds, or in which order."""
        return tensor.name in self._picked

    def parameter(self, position: int) -> Any:
        """The tensor a parameter is fed through."""
        return self.survey._feeds[position]


def _picks_rows(survey: Survey, operation: Any) -> bool:
    """Whether values of the samples decide which of them come out, or in which order."""
    held = [survey.batched(tensor) for tensor in operation.inputs if survey.known(tensor)]
    if operation.type == "TopKV2":
        return len(survey.shape(operation.inputs[0])) - 1 in held[0]
    return operation.type in PICKS_ROWS and any(held)


def match(survey: Survey, graph: Graph) -> tuple[list[Match], list[Unmatched]]:
    """Every edge of every parameter."""
    matches: list[Match] = []
    unmatched: list[Unmatched] = []
    for position in range(len(survey.program.parameters)):
        for edge in _edges(survey, graph, position):
            (matches if isinstance(edge, Match) else unmatched).append(edge)  # type: ignore[arg-type]
    return matches, unmatched


def _edges(survey: Survey, graph: Graph, position: int) -> Iterator[Match | Unmatched]:
    start = graph.parameter(position)
    shape = tuple(start.shape)
    if prod(shape) == 0:  # nothing to differentiate with respect to
        return
    origins = {start.name: Origin(np.arange(prod(shape)).reshape(shape), False)}
    pending: list[tuple[int, str]] = []
    operations: dict[str, Any] = {}

    def visit(tensor: Any) -> None:
        for operation in graph.consumers(tensor):
            if operation.name not in operations:
                operations[operation.name] = operation
                heapq.heappush(pending, (graph.order[operation.name], operation.name))

    visit(start)
    while pending:
        operation = operations[heapq.heappop(pending)[1]]
        if not _differentiable(survey, operation):
            continue
        operands = [i for i, tensor in enumerate(operation.inputs) if tensor.name in origins]
        try:
            _refuse_irregular(graph, operation)
            if _meets_data(survey, operation, operands):
                for operand in operands:
                    origin = origins[operation.inputs[operand].name]
                    if origin.entries.size:  # a sum over nothing depends on nothing
                        yield _site(survey, position, operation, operand, origin)
                continue
            made = follow(survey, operation, origins)
        except Unsupported as error:
            yield Unmatched(position, plain_name(operation.name), operation.type, str(error))
            continue
        for tensor, origin in zip(operation.outputs, made, strict=True):
            origins[tensor.name] = origin
            visit(tensor)


def _differentiable(survey: Survey, operation: Any) -> bool:
    """Whether a derivative can pass: not into a shape, a comparison or stop_gradient."""
    if operation.type in WITHOUT_DERIVATIVE:
        return False
    return any(is_differentiable(tensor.dtype) or not survey.known(tensor) for tensor in operation.outputs)


def is_differentiable(dtype: Any) -> bool:
    """Whether derivatives pass through tensors of this type."""
    return bool(dtype.is_floating or dtype.is_complex)


def _refuse_irregular(graph: Graph, operation: Any) -> None:
    """Raise `Unsupported` for what no rule is made for, whatever the operation."""
    if any(tensor.dtype.is_complex for tensor in operation.outputs):
        raise Unsupported("its numbers are complex")
    if any(graph.holds_picked_rows(tensor) for tensor in (*operation.inputs, *operation.outputs)):
        raise Unsupported("the rows it works on are picked or sorted by values of the samples")


def _meets_data(survey: Survey, operation: Any, operands: Sequence[int]) -> bool:
    others = [t for i, t in enumerate(operation.inputs) if i not in operands and t.dtype != tf.resource]
    return any(not survey.known(t) or survey.batched(t) for t in (*others, *operation.outputs))


def _site(survey: Survey, position: int, operation: Any, operand: int, origin: Origin) -> Match | Unmatched:
    try:
        stated = product(operation, operand, survey)
        form, weight = normal_form(stated, operation.outputs[0], survey)
        fine = [label for axis in weight for label in axis]
        entries = origin.entries.reshape([form.sizes[label] for label in fine])
        entries = entries.transpose([fine.index(label) for label in (*form.g, *form.k, *form.c)])
        entries = entries.reshape(form.size(form.g), form.size(form.k), form.size(form.c)).astype(np.intp)
        if origin.product is None:
            scaled = origin.scaled or stated.negative
            return Match(position, operation, operand, stated, form, entries, scaled)
        entries, mix = _mixed(origin.product, entries)
    except Unsupported as error:
        return Unmatched(position, plain_name(operation.name), operation.type, str(error))
    if stated.negative:
        mix = replace(mix, gain=-mix.gain)
    return Match(position, operation, operand, stated, form, entries, False, mix)


def _mixed(made: WeightProduct, entries: NDArray[np.intp]) -> tuple[NDArray[np.intp], Mix]:
    """From entries (g, k, c) of a product of weights to those of the variable."""
    g, k, c = entries.shape
    whole = np.arange(k * c)
    for by_rows in (True, False):
        if g == 1 and np.array_equal(entries[0], whole.reshape(k, c) if by_rows else whole.reshape(c, k).T):
            own, mix = made.mix(by_rows)
            return own[None].astype(np.intp), mix
    raise Unsupported("a product of weights, of which the operation uses a part")


def normal_form(stated: Product, output: Any, survey: Survey) -> tuple[NormalForm, Axes]:
    """Split the samples' label, drop labels of size 1, sort the rest; also the fine labels of E's axes."""
    axes = survey.batched(output)
    if len(axes) != 1 or axes[0] < 0:
        raise Unsupported("its output does not hold the samples on one axis")
    held = stated.z[axes[0]]
    location = survey.sample_axis(output, axes[0])
    if location is None or not held:
        raise Unsupported("its output does not hold the samples in one regular place")
    samples, rest = held[0], held[1:]
    sizes = dict(stated.sizes)
    inside = prod(sizes[label] for label in rest)
    if any(samples in axis for axis in stated.e) or location.inner % max(inside, 1):
        raise Unsupported("the weight itself is spread over the samples")
    split = [("<", location.outer), (SAMPLES, LARGE), (">", location.inner // max(inside, 1))]
    parts = tuple(label for label, _ in split)
    sizes |= dict(split)

    def refine(tensor_axes: Axes) -> Axes:
        return tuple(
            tuple(
                part
                for label in axis
                for part in (parts if label == samples else (label,))
                if part == SAMPLES or sizes[part] != 1
            )
            for axis in tensor_axes
        )

    z, e = refine(stated.z), refine(stated.e)
    a = None if stated.a is None else refine(stated.a)
    in_z, in_e, in_a = ([label for axis in t for label in axis] for t in (z, e, a or ()))
    if a is not None and SAMPLES not in in_a:
        raise Unsupported("what it multiplies the weight with does not depend on the sample")
    if stated.gather:
        in_a = [*in_a, *e[0]]
    lost = [label for label in in_a if label not in in_z and label not in in_e]
    lost += [label for label in in_e if label not in in_z and label not in in_a]
    if lost:
        raise Unsupported("it sums over an axis of one operand alone")
    form = NormalForm(
        z,
        a,
        p=tuple(label for label in in_z if label not in in_e and label != SAMPLES),
        g=tuple(label for label in in_z if label in in_e and label in in_a),
        k=tuple(label for label in in_a if label in in_e and label not in in_z),
        c=tuple(label for label in in_z if label in in_e and label not in in_a),
        sizes={label: size for label, size in sizes.items() if label != SAMPLES},
    )
    return form, e
