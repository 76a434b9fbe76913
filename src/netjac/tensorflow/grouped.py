"""Grouped convolutions as one convolution a group, or as a depthwise one where each group is one channel.

TensorFlow runs their derivatives on a CPU only inside XLA (or, for some types, through oneDNN). Keras wraps them so;
once the wrapping is inlined they must run plainly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from netjac.tensorflow.lifetime import adopt_functions

INSIDE = "grouped"
CONVOLUTIONS = frozenset({"Conv2D", "Conv3D"})
TRANSPOSED = frozenset({"Conv2DBackpropInput", "Conv3DBackpropInputV2"})
"""What a model that differentiates itself has; of (sizes of the image, kernel, cotangents)."""


def split_grouped(definition: Any, captured: Mapping[str, Any] | None = None) -> Any:
    """Rewrite every convolution whose kernel takes fewer channels than its image has, and every derivative of one with
    respect to its image; other nodes stay as they are.

    Parameters
    ----------
    definition : GraphDef
        The flat graph.
    captured : mapping, optional
        What comes in from outside, by tensor name: variables that are read there, whose shapes others follow from.
    """
    if not any(node.op in CONVOLUTIONS | TRANSPOSED for node in definition.node):
        return definition

    def imported() -> None:
        here = tf.compat.v1.get_default_graph()
        feeds = {name: here.capture(tensor) for name, tensor in (captured or {}).items()}
        tf.graph_util.import_graph_def(definition, input_map=feeds, name=INSIDE)

    graph = tf.compat.v1.wrap_function(imported, []).graph
    adopt_functions(graph)
    result = type(definition)(versions=definition.versions, library=definition.library)
    for node in definition.node:
        operation = (
            graph.get_operation_by_name(f"{INSIDE}/{node.name}") if node.op in CONVOLUTIONS | TRANSPOSED else None
        )
        groups = 1 if operation is None else _groups(operation)
        if operation is None or groups == 1:
            result.node.append(node)
        elif node.op in CONVOLUTIONS and _is_depthwise(node, operation.inputs[1].shape):
            result.node.extend(_depthwise(node, groups, operation.inputs[1].shape))
        else:
            result.node.extend(_split(node, groups))
    return result


def _groups(operation: Any) -> int:
    image, kernel = operation.inputs if operation.type in CONVOLUTIONS else (operation.outputs[0], operation.inputs[1])
    known = image.shape.rank is not None and image.shape[-1] is not None and kernel.shape.rank is not None
    if not known or kernel.shape[-2] is None or operation.get_attr("data_format") not in (b"NHWC", b"NDHWC"):
        return 1
    return int(image.shape[-1]) // max(int(kernel.shape[-2]), 1)


def _is_depthwise(node: Any, kernel: Any) -> bool:
    """Whether each group is one channel, and TensorFlow's depthwise convolution can do it on a CPU."""
    _, down, across, _ = node.attr["strides"].list.i if node.op == "Conv2D" else (0, 0, 1, 0)
    return kernel.is_fully_defined() and kernel[-2] == 1 and down == across and max(node.attr["dilations"].list.i) == 1


def _depthwise(node: Any, groups: int, kernel: Any) -> list[Any]:
    """The same with the kernel (h, w, 1, g·c) as (h, w, g, c): channels come out in the same order."""
    shape = _constant(node.name + "/shape", [*kernel[:2], groups, kernel[-1] // groups])
    reshaped = tf.compat.v1.NodeDef(name=node.name + "/kernel", op="Reshape", input=[node.input[1], shape.name])
    reshaped.attr["T"].type = node.attr["T"].type
    reshaped.attr["Tshape"].type = tf.int32.as_datatype_enum
    convolution = tf.compat.v1.NodeDef(name=node.name, op="DepthwiseConv2dNative", input=[node.input[0], reshaped.name])
    for name in ("T", "strides", "padding", "explicit_paddings", "data_format", "dilations"):
        convolution.attr[name].CopyFrom(node.attr[name])
    return [shape, reshaped, convolution]


def _split(node: Any, groups: int) -> list[Any]:
    """One convolution a group, of its channels (the last axis) of image or cotangents, and of the kernel."""
    kind = node.attr["T"].type
    axis = _constant(node.name + "/axis", -1)
    sizes = _sizes_of_a_group(node, groups) if node.op in TRANSPOSED else []
    sources = (
        {"kernel": node.input[1], "cotangents": node.input[2]}
        if sizes
        else dict(zip(("image", "kernel"), node.input, strict=True))
    )
    parts = []
    for suffix, source in sources.items():
        part = tf.compat.v1.NodeDef(name=f"{node.name}/{suffix}", op="Split", input=[axis.name, source])
        part.attr["T"].type = kind
        part.attr["num_split"].i = groups
        parts.append(part)
    convolutions = []
    for i in range(groups):
        own = type(node)()
        own.CopyFrom(node)
        own.name = f"{node.name}/group_{i}"
        own.ClearField("input")
        own.input.extend(size.name for size in sizes[-1:])
        own.input.extend(f"{part.name}:{i}" if i else part.name for part in parts)
        convolutions.append(own)
    joined = tf.compat.v1.NodeDef(name=node.name, op="ConcatV2", input=[*(c.name for c in convolutions), axis.name])
    joined.attr["T"].type = kind
    joined.attr["Tidx"].type = tf.int32.as_datatype_enum
    joined.attr["N"].i = groups
    return [axis, *sizes, *parts, *convolutions, joined]


def _sizes_of_a_group(node: Any, groups: int) -> list[Any]:
    """The image's sizes, (n, ..., channels), with the channels of one group: nodes, the last of which holds them."""
    rank = len(node.attr["strides"].list.i)
    divisor = _constant(node.name + "/groups", [*[1] * (rank - 1), groups])
    sizes = tf.compat.v1.NodeDef(name=node.name + "/sizes", op="FloorDiv", input=[node.input[0], divisor.name])
    sizes.attr["T"].type = tf.int32.as_datatype_enum
    return [divisor, sizes]


def _constant(name: str, value: int | list[int]) -> Any:
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.int32.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int32))
    return node
