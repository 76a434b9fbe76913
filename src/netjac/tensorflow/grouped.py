"""Grouped convolutions as one convolution a group.

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
        result.node.extend([node] if groups == 1 else _split(node, groups))
    return result


def _groups(graph: Any, node: Any) -> int:
    image, kernel = graph.get_operation_by_name(node.name).inputs
    known = image.shape.rank is not None and image.shape[-1] is not None and kernel.shape.rank is not None
    if not known or kernel.shape[-2] is None or node.attr["data_format"].s not in (b"NHWC", b"NDHWC"):
        return 1
    return int(image.shape[-1]) // max(int(kernel.shape[-2]), 1)


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


def _constant(name: str, value: int) -> Any:
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.int32.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int32))
    return node
