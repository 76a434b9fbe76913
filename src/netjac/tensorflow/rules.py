"""Operation type → how it uses a weight: as a product of labelled axes.

A rule reads an operation z = op(…, E, …) whose weight operand E meets data, and states it as an einsum,

    z[labels of z] = Σ A[labels of A] · E[labels of E],

with the labels of every axis (several, major first, where an axis is a merged one) and a way to build A from the
operation's own operands. Labels decide everything that follows: which of them are positions p, groups g, inputs k and
outputs c is the same argument for every operation (`netjac.tensorflow.match`). Attributes are whitelisted: what a rule
does not understand is `Unsupported`, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from netjac.tensorflow.patches import Padding, convolution_patches, transposed_patches
from netjac.tensorflow.survey import Survey

Axes = tuple[tuple[str, ...], ...]
Build = Callable[[Sequence[Any], Any], Any]  # operands and output of the operation, in the graph under construction


class Unsupported(Exception):
    """No rule covers this use of a weight; the message becomes the reason in the coverage table."""


@dataclass(frozen=True, eq=False)
class Product:
    """An operation as a product of labelled axes.

    Attributes
    ----------
    z, e, a : Axes
        Labels of the axes of output, weight operand and A; ``a`` is None where A is identically 1.
    sizes
        Size of each label (at the survey's larger n).
    build
        Makes A; None where A is identically 1.
    gather
        Whether A is one-hot over the first label of ``e``, and ``build`` gives its indices instead.
    negative
        Whether z is minus the product.
    """

    z: Axes
    e: Axes
    a: Axes | None
    sizes: Mapping[str, int]
    build: Build | None = None
    gather: bool = False
    negative: bool = False


Rule = Callable[[Any, int, Survey], Product]
RULES: dict[str, Rule] = {}


def rule(*operation_types: str) -> Callable[[Rule], Rule]:
    """Register a rule for operation types."""

    def register(function: Rule) -> Rule:
        for operation_type in operation_types:
            RULES[operation_type] = function
        return function

    return register


def product(operation: Any, operand: int, survey: Survey) -> Product:
    """The operation as a product, its weight being operand number ``operand``; `Unsupported` where no rule fits."""
    if operation.type not in RULES:
        raise Unsupported(f"no rule for {operation.type}")
    if "_gradient_op_type" in operation.node_def.attr:
        raise Unsupported("it has a gradient of its own (tf.custom_gradient)")
    return RULES[operation.type](operation, operand, survey)


def issue(operation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Issue ``operation`` again, on other inputs of possibly other types, in the graph under construction."""
    attributes = {name: value for name, value in operation.node_def.attr.items() if not name.startswith("_")}
    position = 0
    for arg in operation.op_def.input_arg:
        if arg.type_attr:
            attributes[arg.type_attr] = tf.compat.v1.AttrValue(type=inputs[position].dtype.as_datatype_enum)
        position += operation.get_attr(arg.number_attr) if arg.number_attr else 1
    graph = tf.compat.v1.get_default_graph()
    return list(graph.create_op(operation.type, list(inputs), attrs=attributes).outputs)


def _sizes(survey: Survey, *pairs: tuple[Any, Axes]) -> dict[str, int]:
    """Sizes of the labels that stand alone on an axis of a tensor."""
    sizes: dict[str, int] = {}
    for tensor, axes in pairs:
        for labels, size in zip(axes, survey.shape(tensor), strict=True):
            if len(labels) == 1:
                sizes[labels[0]] = size
    return sizes


def _operand(position: int) -> Build:
    return lambda inputs, output: inputs[position]


# Matrix products ----------------------------------------------------------------------------------------------------


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(operation: Any, operand: int, survey: Survey) -> Product:
    flags = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    left, right = operation.inputs
    output = operation.outputs[0]
    rank = len(survey.shape(output))
    batch = [f"b{i}" for i in range(rank - 2)]
    labels = []
    for tensor, matrix, flag in ((left, ("r", "k"), flags[0]), (right, ("k", "c"), flags[1])):
        own = batch[len(batch) - (len(survey.shape(tensor)) - 2) :]
        labels.append([*own, *(reversed(matrix) if operation.get_attr(flag) else matrix)])
    z: list[str] = [*batch, "r", "c"]
    return _broadcast_product(survey, operation, operand, labels, z)


@rule("Einsum")
def _einsum(operation: Any, operand: int, survey: Survey) -> Product:
    equation = operation.get_attr("equation")
    equation = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    if len(operation.inputs) != 2:
        raise Unsupported(f"an einsum of {len(operation.inputs)} operands")
    sources, result = equation.split("->")
    terms = sources.split(",")
    ranks = [len(survey.shape(tensor)) for tensor in operation.inputs]
    labels = [_expand_ellipsis(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    z = _expand_ellipsis(result, len(survey.shape(operation.outputs[0])))
    if any(len(set(axes)) != len(axes) for axes in (*labels, z)):
        raise Unsupported(f"the einsum {equation} takes a diagonal")
    return _broadcast_product(survey, operation, operand, labels, z)


def _expand_ellipsis(term: str, rank: int) -> list[str]:
    head, dots, tail = term.partition("...")
    if not dots:
        return list(term)
    count = rank - len(head) - len(tail)
    return [*head, *(f".{count - i}" for i in range(count)), *tail]  # numbered from the right, as they broadcast


def _broadcast_product(survey: Survey, operation: Any, operand: int, labels: list[list[str]], z: list[str]) -> Product:
    """A product of two operands whose axes of size 1 broadcast."""
    output = operation.outputs[0]
    other = 1 - operand
    z_axes: Axes = tuple((label,) for label in z)
    sizes = _sizes(survey, (output, z_axes))
    for tensor, own in zip(operation.inputs, labels, strict=True):
        for label, size in zip(own, survey.shape(tensor), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))

    def axes(position: int) -> Axes:
        shape = survey.shape(operation.inputs[position])
        return tuple(
            (label,) if size == sizes[label] else () for label, size in zip(labels[position], shape, strict=True)
        )

    return Product(z_axes, axes(operand), axes(other), sizes, _operand(other))


# Element by element -------------------------------------------------------------------------------------------------


def _aligned(survey: Survey, tensor: Any, rank: int, shape: Sequence[int]) -> Axes:
    """Labels of a tensor that broadcasts to ``shape``; axes it is stretched along carry none."""
    own = survey.shape(tensor)
    offset = rank - len(own)
    return tuple((f"i{offset + i}",) if size == shape[offset + i] else () for i, size in enumerate(own))


def _elementwise(operation: Any, operand: int, survey: Survey) -> tuple[Axes, Axes, dict[str, int]]:
    output = operation.outputs[0]
    shape = survey.shape(output)
    z: Axes = tuple((f"i{i}",) for i in range(len(shape)))
    return z, _aligned(survey, operation.inputs[operand], len(shape), shape), _sizes(survey, (output, z))


@rule("Add", "AddV2", "Sub")
def _sum(operation: Any, operand: int, survey: Survey) -> Product:
    z, e, sizes = _elementwise(operation, operand, survey)
    return Product(z, e, None, sizes, negative=operation.type == "Sub" and operand == 1)


@rule("BiasAdd")
def _bias_add(operation: Any, operand: int, survey: Survey) -> Product:
    if operand != 1:
        raise Unsupported("the weight is the first operand of a BiasAdd")
    output = operation.outputs[0]
    rank = len(survey.shape(output))
    z: Axes = tuple((f"i{i}",) for i in range(rank))
    channel = 1 if operation.get_attr("data_format") in (b"NCHW", "NCHW") else rank - 1
    return Product(z, (z[channel],), None, _sizes(survey, (output, z)))


@rule("Mul")
def _mul(operation: Any, operand: int, survey: Survey) -> Product:
    z, e, sizes = _elementwise(operation, operand, survey)
    other = 1 - operand
    a = _aligned(survey, operation.inputs[other], len(z), survey.shape(operation.outputs[0]))
    return Product(z, e, a, sizes, _operand(other))


@rule("RealDiv", "Div", "DivNoNan", "MulNoNan", "Pow", "Maximum", "Minimum", "SquaredDifference", "Xdivy", "Xlogy",
      "Xlog1py", "Atan2", "SelectV2", "FloorMod")  # fmt: skip
def _binary(operation: Any, operand: int, survey: Survey) -> Product:
    """Any function of one entry of E and of data: A is its slope, dz/dE, element by element."""
    z, e, sizes = _elementwise(operation, operand, survey)

    def build(inputs: Sequence[Any], output: Any) -> Any:
        stretched = tf.broadcast_to(inputs[operand], tf.shape(output))
        (again,) = issue(operation, [*inputs[:operand], stretched, *inputs[operand + 1 :]])
        slope = tf.gradients(again, stretched)[0]
        return tf.zeros_like(output) if slope is None else slope

    return Product(z, e, z, sizes, build)


@rule("BroadcastTo", "Tile")
def _broadcast(operation: Any, operand: int, survey: Survey) -> Product:
    if operand != 0:
        raise Unsupported("the weight decides a shape")
    weight, output = survey.shape(operation.inputs[0]), survey.shape(operation.outputs[0])
    offset = len(output) - len(weight)
    z: list[tuple[str, ...]] = [(f"r{i}",) for i in range(len(output))]
    sizes = {f"r{i}": size for i, size in enumerate(output)}
    e: list[tuple[str, ...]] = []
    for i, size in enumerate(weight):
        repeats, name = output[offset + i] // max(size, 1), f"e{i}"
        sizes[name] = size
        sizes[f"r{offset + i}"] = repeats
        z[offset + i] = (f"r{offset + i}", name)
        e.append((name,))
    return Product(tuple(z), tuple(e), None, sizes)


# Convolutions -------------------------------------------------------------------------------------------------------


def _format(operation: Any) -> None:
    layout = operation.get_attr("data_format")
    layout = layout.decode() if isinstance(layout, bytes) else layout
    if layout not in ("NHWC", "NDHWC"):
        raise Unsupported(f"channels before pixels ({layout})")


def _spatial(operation: Any, name: str, rank: int) -> tuple[int, ...]:
    return tuple(int(v) for v in operation.get_attr(name)[1 : rank - 1])


def _padding(operation: Any) -> Padding:
    padding = operation.get_attr("padding")
    padding = padding.decode() if isinstance(padding, bytes) else padding
    if padding == "SAME":
        return "SAME"
    if padding == "VALID":
        return "VALID"
    flat = [int(v) for v in operation.get_attr("explicit_paddings")]
    return tuple(zip(flat[2:-2:2], flat[3:-2:2], strict=True))


@rule("Conv2D", "Conv3D", "DepthwiseConv2dNative")
def _convolution(operation: Any, operand: int, survey: Survey) -> Product:
    if operand != 1:
        raise Unsupported("the weight is the image of a convolution")
    _format(operation)
    image, kernel = operation.inputs
    output = operation.outputs[0]
    rank = len(survey.shape(output))
    window = survey.shape(kernel)[: rank - 2]
    channels_in, channels = survey.shape(kernel)[rank - 2 :]
    strides, dilations = _spatial(operation, "strides", rank), _spatial(operation, "dilations", rank)
    padding = _padding(operation)
    pixels = [f"x{i}" for i in range(rank - 2)]
    taps = tuple(f"q{i}" for i in range(rank - 2))
    sizes = dict(zip(("b", *pixels), survey.shape(output), strict=False)) | dict(zip(taps, window, strict=True))
    depthwise = operation.type == "DepthwiseConv2dNative"
    groups = channels_in if depthwise else survey.shape(image)[-1] // max(channels_in, 1)
    inputs: tuple[str, ...]
    weight: Axes
    if depthwise:
        sizes |= {"g": channels_in, "c": channels}
        inputs, weight = ("g",), (*((t,) for t in taps), ("g",), ("c",))
    else:
        sizes |= {"g": groups, "i": channels_in, "c": channels // max(groups, 1)}
        inputs, weight = ("g", "i"), (*((t,) for t in taps), ("i",), ("g", "c"))

    def build(inputs: Sequence[Any], output: Any) -> Any:
        known = tf.ensure_shape(inputs[0], (None, *survey.shape(image)[1:]))
        return convolution_patches(known, window, strides, dilations, padding)

    z: Axes = (("b",), *((x,) for x in pixels), ("g", "c"))
    return Product(z, weight, (("b",), *((x,) for x in pixels), taps, inputs), sizes, build)


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def _transposed_convolution(operation: Any, operand: int, survey: Survey) -> Product:
    if operand != 1:
        raise Unsupported("the weight is the image of a transposed convolution")
    _format(operation)
    kernel = operation.inputs[1]
    output = operation.outputs[0]
    shape = survey.shape(output)
    rank = len(shape)
    window = survey.shape(kernel)[: rank - 2]
    channels, channels_in = survey.shape(kernel)[rank - 2 :]
    if channels != shape[-1]:
        raise Unsupported("a transposed convolution in groups")
    strides, dilations = _spatial(operation, "strides", rank), _spatial(operation, "dilations", rank)
    padding = _padding(operation)
    pixels = [f"x{i}" for i in range(rank - 2)]
    taps = tuple(f"q{i}" for i in range(rank - 2))
    sizes = dict(zip(("b", *pixels), shape, strict=False)) | dict(zip(taps, window, strict=True))
    sizes |= {"i": channels_in, "c": channels}

    def build(inputs: Sequence[Any], output: Any) -> Any:
        known = tf.ensure_shape(inputs[2], (None, *survey.shape(operation.inputs[2])[1:]))
        return transposed_patches(known, shape[1:-1], window, strides, dilations, padding)

    z: Axes = (("b",), *((x,) for x in pixels), ("c",))
    weight: Axes = (*((t,) for t in taps), ("c",), ("i",))
    return Product(z, weight, (("b",), *((x,) for x in pixels), taps, ("i",)), sizes, build)


# Look-ups -----------------------------------------------------------------------------------------------------------


@rule("GatherV2")
def _gather(operation: Any, operand: int, survey: Survey) -> Product:
    if operand != 0:
        raise Unsupported("the weight is an index")
    axis = int(survey.values(operation.inputs[2])[0])
    if axis != 0 or operation.get_attr("batch_dims") != 0:
        raise Unsupported(f"a gather along axis {axis} or with batch dimensions")
    table, indices = survey.shape(operation.inputs[0]), survey.shape(operation.inputs[1])
    rows: Axes = tuple((f"i{i}",) for i in range(len(indices)))
    features: Axes = tuple((f"f{i}",) for i in range(len(table) - 1))
    sizes = _sizes(survey, (operation.inputs[0], (("v",), *features)), (operation.inputs[1], rows))
    return Product((*rows, *features), (("v",), *features), rows, sizes, _operand(1), gather=True)
