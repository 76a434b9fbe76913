"""Grouped convolutions as one convolution a group, or as a depthwise one where each group is one channel.

TensorFlow runs their derivatives on a CPU only inside XLA (or, for some types, through oneDNN). Keras wraps them so;
once the wrapping is inlined they must run plainly.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

CONVOLUTIONS = frozenset({"Conv2D", "Conv3D"})


def split_grouped(definition: Any) -> Any:
    """Rewrite every convolution whose kernel takes fewer channels than its image has; other nodes stay as they are."""
    if not any(node.op in CONVOLUTIONS for node in definition.node):
        return definition
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="")
    result = type(definition)(versions=definition.versions, library=definition.library)
    for node in definition.node:
        groups = _groups(graph, node) if node.op in CONVOLUTIONS else 1
        if groups == 1:
            result.node.append(node)
        else:
            kernel = graph.get_operation_by_name(node.name).inputs[1].shape
            depthwise = _is_depthwise(node, kernel)
            result.node.extend(_depthwise(node, groups, kernel) if depthwise else _split(node, groups))
    return result


def _groups(graph: Any, node: Any) -> int:
    image, kernel = graph.get_operation_by_name(node.name).inputs
    known = image.shape.rank is not None and image.shape[-1] is not None and kernel.shape.rank is not None
    if not known or kernel.shape[-2] is None or node.attr["data_format"].s not in (b"NHWC", b"NDHWC"):
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
    kind = node.attr["T"].type
    axis = _constant(node.name + "/axis", -1)
    parts = []
    for suffix, source in (("image", node.input[0]), ("kernel", node.input[1])):
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
        own.input.extend(f"{part.name}:{i}" if i else part.name for part in parts)
        convolutions.append(own)
    joined = tf.compat.v1.NodeDef(name=node.name, op="ConcatV2", input=[*(c.name for c in convolutions), axis.name])
    joined.attr["T"].type = kind
    joined.attr["Tidx"].type = tf.int32.as_datatype_enum
    joined.attr["N"].i = groups
    return [axis, *parts, *convolutions, joined]


def _constant(name: str, value: int | list[int]) -> Any:
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.int32.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int32))
    return node
