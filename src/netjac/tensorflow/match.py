"""Each variable's edges → sites in normal form, with proof that every edge is accounted for.

From each parameter the walk follows the graph forwards. An operation that touches weights alone is followed through:
one that moves entries about (reshape, transpose, split) is applied to an array of positions, one that acts entry by
entry (cast, scale, softplus) keeps the positions and leaves a slope. Where a weight meets data, the edge ends: it is a
site if a rule states the operation as a product, and otherwise unmatched, with the reason. Nothing is skipped: an edge
is followed, a site, unmatched, or without derivative (a shape, stop_gradient).

The labels of a product then decide its normal form (see `netjac.sites`): in z and A but not E, or in z alone: p; in all
three: g; in A and E: k; in z and E: c. The label that holds the samples is split into (outer, n, inner) by the survey.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.tensorflow.rules import Axes, Product, Unsupported, issue, product
from netjac.tensorflow.survey import LARGE, PREFIX, Survey

MOVES = frozenset(
    [
        "Reshape",
        "ExpandDims",
        "Squeeze",
        "Transpose",
        "Slice",
        "StridedSlice",
        "Split",
        "SplitV",
        "Unpack",
        "Tile",
        "BroadcastTo",
        "ReverseV2",
        "Roll",
        "Gather",
        "GatherV2",
        "GatherNd",
        "ConcatV2",
        "Pack",
        "Pad",
        "PadV2",
        "Identity",
        "Snapshot",
    ]
)
ENTRYWISE = frozenset(
    [
        "Cast",
        "Neg",
        "Softplus",
        "Square",
        "Exp",
        "Sqrt",
        "Rsqrt",
        "Reciprocal",
        "Inv",
        "Abs",
        "Sigmoid",
        "Tanh",
        "Relu",
        "LeakyRelu",
        "Elu",
        "Selu",
        "Log",
        "Log1p",
        "Expm1",
        "Sin",
        "Cos",
        "Erf",
        "Add",
        "AddV2",
        "Sub",
        "Mul",
        "RealDiv",
        "Div",
        "Maximum",
        "Minimum",
        "Pow",
        "SquaredDifference",
        "BiasAdd",
        "ClipByValue",
    ]
)
EXACT = frozenset({"Cast", "Identity"})  # entrywise with slope 1
WITHOUT_DERIVATIVE = frozenset(["StopGradient", "PreventGradient", "ZerosLike", "OnesLike"])
SHAPES = frozenset(["Shape", "ShapeN", "Size", "Rank"])
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
    """

    variable: int
    operation: Any
    operand: int
    product: Product
    form: NormalForm
    entries: NDArray[np.intp]
    scaled: bool


@dataclass(frozen=True)
class Unmatched:
    """An edge that no rule covers."""

    variable: int
    operation: str
    operation_type: str
    reason: str


@dataclass(frozen=True, eq=False)
class _Origin:
    """What a weight-only tensor is made of: positions in the flattened variable, and whether a slope was picked up."""

    entries: NDArray[np.int64]
    scaled: bool


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

    def parameter(self, position: int) -> Any:
        """The tensor a parameter is fed through."""
        return self.survey._feeds[position]


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
    origins = {start.name: _Origin(np.arange(prod(shape)).reshape(shape), False)}
    pending: list[tuple[int, str]] = []
    operations: dict[str, Any] = {}

    def follow(tensor: Any) -> None:
        for operation in graph.consumers(tensor):
            if operation.name not in operations:
                operations[operation.name] = operation
                heapq.heappush(pending, (graph.order[operation.name], operation.name))

    follow(start)
    while pending:
        operation = operations[heapq.heappop(pending)[1]]
        if not _differentiable(survey, operation):
            continue
        operands = [i for i, tensor in enumerate(operation.inputs) if tensor.name in origins]
        if _meets_data(survey, operation, operands):
            for operand in operands:
                yield _site(survey, position, operation, operand, origins[operation.inputs[operand].name])
            continue
        try:
            made = _follow(survey, operation, origins)
        except Unsupported as error:
            yield Unmatched(position, plain_name(operation.name), operation.type, str(error))
            continue
        for tensor, origin in zip(operation.outputs, made, strict=True):
            origins[tensor.name] = origin
            follow(tensor)


def _differentiable(survey: Survey, operation: Any) -> bool:
    """Whether a derivative can pass: not into a shape, a comparison or stop_gradient."""
    if operation.type in WITHOUT_DERIVATIVE:
        return False
    return any(tensor.dtype.is_floating or not survey.known(tensor) for tensor in operation.outputs)


def _meets_data(survey: Survey, operation: Any, operands: Sequence[int]) -> bool:
    others = [t for i, t in enumerate(operation.inputs) if i not in operands and t.dtype != tf.resource]
    return any(not survey.known(t) or survey.batched(t) for t in (*others, *operation.outputs))


def _follow(survey: Survey, operation: Any, origins: dict[str, _Origin]) -> list[_Origin]:
    """Through an operation that touches weights alone."""
    found = [origins.get(tensor.name) for tensor in operation.inputs]
    known = [origin for origin in found if origin is not None]
    scaled = any(origin.scaled for origin in known)
    if "_gradient_op_type" in operation.node_def.attr:
        raise Unsupported("it has a gradient of its own (tf.custom_gradient)")
    if operation.type in MOVES and all(o is None or t.dtype.is_floating for o, t in _pairs(found, operation)):
        # Position + 1, so that what comes from elsewhere (other weights, padding) is 0.
        operands = [
            origin.entries + 1
            if origin is not None
            else np.zeros(survey.shape(tensor), np.int64)
            if tensor.dtype.is_floating
            else _constant(survey, tensor)
            for origin, tensor in _pairs(found, operation)
        ]
        with tf.Graph().as_default() as graph:
            inputs = [tf.constant(operand) for operand in operands]
            made = issue(operation, inputs)
            with tf.compat.v1.Session(graph=graph) as session:
                return [_Origin(np.asarray(entries, np.int64) - 1, scaled) for entries in session.run(made)]
    if operation.type in ENTRYWISE:
        shape = survey.shape(operation.outputs[0])
        entries = np.broadcast_to(known[0].entries, shape)
        for origin in known[1:]:
            other = np.broadcast_to(origin.entries, shape)
            if np.any((entries != other) & (entries >= 0) & (other >= 0)):
                raise Unsupported("a weight computed from several entries of the same variable")
            entries = np.maximum(entries, other)
        exact = operation.type in EXACT or (len(known) == 1 and _adds(operation, found))
        return [_Origin(entries, scaled or not exact)]
    raise Unsupported("a weight computed by an operation that is not entry by entry")


def _pairs(found: Sequence[_Origin | None], operation: Any) -> list[tuple[_Origin | None, Any]]:
    return list(zip(found, operation.inputs, strict=True))


def _adds(operation: Any, found: Sequence[_Origin | None]) -> bool:
    """Whether the operation adds something to the weight, so that its slope is 1."""
    return operation.type in ("Add", "AddV2", "BiasAdd") or (operation.type == "Sub" and found[0] is not None)


def _constant(survey: Survey, tensor: Any) -> NDArray[Any]:
    """The value of a tensor that is the same at every evaluation: made of constants and of shapes."""
    value = tf.get_static_value(tensor)
    if value is None:
        pending, seen = [tensor.op], set()
        while pending:
            operation = pending.pop()
            if operation.type in ("Placeholder", "ReadVariableOp"):
                raise Unsupported("values of weights or of data decide which entries it takes")
            if operation.name not in seen and operation.type not in SHAPES:
                seen.add(operation.name)
                pending.extend(t.op for t in operation.inputs)
        value = survey.values(tensor)[0]
    return np.asarray(value, tensor.dtype.as_numpy_dtype)


def _site(survey: Survey, position: int, operation: Any, operand: int, origin: _Origin) -> Match | Unmatched:
    try:
        stated = product(operation, operand, survey)
        form, weight = normal_form(stated, operation.outputs[0], survey)
    except Unsupported as error:
        return Unmatched(position, plain_name(operation.name), operation.type, str(error))
    fine = [label for axis in weight for label in axis]
    entries = origin.entries.reshape([form.sizes[label] for label in fine])
    entries = entries.transpose([fine.index(label) for label in (*form.g, *form.k, *form.c)])
    entries = entries.reshape(form.size(form.g), form.size(form.k), form.size(form.c))
    return Match(position, operation, operand, stated, form, entries.astype(np.intp), origin.scaled or stated.negative)


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
