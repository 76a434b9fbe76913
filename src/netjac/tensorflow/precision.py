"""A traced graph in double precision: the same operations, computed in float64 whatever the model was built in.

Every type attribute that names a floating type narrower than float64 is made float64, in the graph and in the bodies of
its loops and branches; complex64 becomes complex128. Constants are widened, and so keep the value that was rounded when
the model was traced. What comes from outside in a type of its own (variables that are not trained, tables, numbers
drawn from a fixed seed) keeps that type and is widened right after. What TensorFlow cannot compute in float64 is
written in operations that it can (batch normalisation), or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

from netjac.errors import DtypeError, ModelError
from netjac.spaces import Segment
from netjac.tensorflow.functions import READS, functions_of

Node = Any  # a NodeDef
WIDER = {
    tf.float16.as_datatype_enum: tf.float64.as_datatype_enum,
    tf.bfloat16.as_datatype_enum: tf.float64.as_datatype_enum,
    tf.float32.as_datatype_enum: tf.float64.as_datatype_enum,
    tf.complex64.as_datatype_enum: tf.complex128.as_datatype_enum,
}
"""What each type becomes; others stay."""

STORED = frozenset(
    ["LookupTableFind", "LookupTableFindV2", "VarHandleOp", "DecodeRaw", "ParseTensor", "ImmutableConst"]
)
"""Beside reads of variables and random numbers, operations whose result is of the type that something is stored in."""

OPAQUE = frozenset({"Bitcast", "PyFunc", "PyFuncStateless", "EagerPyFunc", "XlaCallModule"})
"""Operations that mean something else, or nothing, in another type."""

BATCH_NORMALISATIONS = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})


def requested(dtype: Any) -> str | None:
    """``dtype`` as a caller writes it: None, or float64 in any of its spellings."""
    if dtype is None:
        return None
    try:
        name = tf.as_dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name != "float64":
        raise DtypeError(f'dtype is {name}; expected None (the model\'s own type) or "float64".')
    return "float64"


def wide_type(name: str) -> str:
    """The name of the type that numbers of the type called ``name`` are computed in: integers stay integers."""
    enum = tf.as_dtype(name).as_datatype_enum
    return str(tf.as_dtype(WIDER.get(enum, enum)).name)


def wide_tensor(tensor: Any) -> Any:
    """A tensor, or an array, in its wide type."""
    return tf.cast(tensor, wide_type(tf.as_dtype(tensor.dtype).name))


def wide_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same segments, of the wide type."""
    return tuple(replace(segment, dtype=wide_type(segment.dtype)) for segment in segments)


def widen(nodes: dict[str, Node], functions: dict[str, Any]) -> None:
    """Rewrite a flat graph, and the functions it uses, so that all is computed in float64; both change in place.

    Placeholders become float64 with the rest: what is fed for a captured tensor must be widened (`wide_tensor`).

    Parameters
    ----------
    nodes
        The graph, by name.
    functions
        The bodies of loops and branches, by name; those that the graph does not reach stay as they are.

    Raises
    ------
    ModelError
        Operations that TensorFlow cannot compute in float64: all of them, by name.
    """
    refused: list[str] = []
    reached = _reached(nodes.values(), functions)
    new, _ = _body(nodes.values(), functions, "{0}", refused)
    nodes.clear()
    nodes.update((node.name, node) for node in new)
    for name in reached:
        definition = functions[name]
        new, renamed = _body(definition.node_def, functions, "{0}:{1}:0", refused)
        for node in new:
            _rename(node.input, renamed)
        del definition.node_def[:]
        definition.node_def.extend(new)
        for result, source in definition.ret.items():
            definition.ret[result] = renamed.get(source, source)
        for argument in (*definition.signature.input_arg, *definition.signature.output_arg):
            argument.type = WIDER.get(argument.type, argument.type)
            argument.ClearField("experimental_full_type")
            for handle in argument.handle_data if argument.type == tf.variant.as_datatype_enum else ():
                handle.dtype = WIDER.get(handle.dtype, handle.dtype)
    if refused:
        raise ModelError(
            f"cannot be computed in float64: {'; '.join(refused)}. With dtype=None the model is evaluated in its own "
            "type."
        )


def rounded_to(node: Node) -> set[int]:
    """The types among a node's attributes that its result is rounded to: a stored value is as exact as it is stored."""
    if node.op == "Cast":
        return {node.attr["DstT"].type}
    return set() if _is_stored(node) else {value.type for value in node.attr.values()}


def _reached(nodes: Iterable[Node], functions: Mapping[str, Any]) -> list[str]:
    """Names of the functions that nodes use, directly or inside others."""
    found: dict[str, None] = {}
    pending = list(nodes)
    while pending:
        node = pending.pop()
        for name in [node.op, *(function.name for function in functions_of(node))]:
            if name in functions and name not in found:
                found[name] = None
                pending.extend(functions[name].node_def)
    return list(found)


def _body(
    nodes: Iterable[Node], functions: Mapping[str, Any], form: str, refused: list[str]
) -> tuple[list[Node], dict[str, str]]:
    """Nodes in float64, and what references to their outputs are called now where that changes.

    ``form`` says how a node's first output is referred to, from the names of the node and of that output.
    """
    nodes = [_complete(node) for node in nodes]
    consumed = {source for node in nodes for source in node.input}
    made: list[Node] = []
    renamed: dict[str, str] = {}
    for node in nodes:
        if node.op in functions or not any(kind in WIDER for kind in _types(node)):
            problem = _inner_type(node)
            new = [_widened(node)]
        elif _is_stored(node):
            problem = "draws numbers that depend on others" if _takes_floating(node) else ""
            new = _kept(node, form)
        elif node.op in BATCH_NORMALISATIONS:
            result = form.format(node.name, _outputs(node.op)[0])
            others = any(source.startswith(node.name + ":") for source in consumed - {result})
            problem = "more than its result is used" if others else ""
            new = _batch_normalisation(node, form)
        else:
            new = [_widened(node)]
            problem = _inner_type(node) or _without_kernel(new[0])
        if problem:
            refused.append(f"the operation {node.name!r} ({node.op}): {problem}")
            continue
        before, after = (form.format(node.name, (_outputs(kind) or [""])[0]) for kind in (node.op, new[-1].op))
        if before != after:
            renamed[before] = after
        made += new
    return made, renamed


def _is_stored(node: Node) -> bool:
    """Whether a node's values are what they are in the narrow type: stored outside, or drawn from a seed."""
    if node.op in READS or node.op in STORED:
        return True
    definition = op_def_registry.get(node.op)
    names = {arg.name for arg in (*definition.input_arg, *definition.attr)} if definition is not None else set()
    return bool(names & {"seed", "key"}) and "Shuffle" not in node.op


def _takes_floating(node: Node) -> bool:
    """Whether random numbers are made of floating numbers given."""
    if node.op in READS or node.op in STORED:
        return False
    definition = op_def_registry.get(node.op)
    return any(node.attr[arg.type_attr].type in WIDER for arg in definition.input_arg if arg.type_attr)


def _kept(node: Node, form: str) -> list[Node]:
    """A node as it was, under another name, and what widens its result under its own."""
    own = _copy(node)
    [output] = op_def_registry.get(node.op).output_arg
    kind = node.attr[output.type_attr].type if output.type_attr else output.type
    if kind not in WIDER:
        return [own]
    own.name = node.name + "/own_type"
    added = []
    for place, argument in enumerate(op_def_registry.get(node.op).input_arg):
        given = node.attr[argument.type_attr].type if argument.type_attr else argument.type
        if given in WIDER:  # the value of a missing key
            added.append(_cast(f"{own.name}/{argument.name}", node.input[place], WIDER[given], given))
            own.input[place] = form.format(added[-1].name, "y")
    return [*added, own, _cast(node.name, form.format(own.name, output.name), kind, WIDER[kind])]


def _widened(node: Node) -> Node:
    """A copy of a node with every floating type as wide as can be."""
    new = _copy(node)
    new.ClearField("experimental_type")
    for value in new.attr.values():
        if value.type in WIDER:
            value.type = WIDER[value.type]
        if value.HasField("tensor") and value.tensor.dtype in WIDER:
            array = tf.make_ndarray(value.tensor)
            value.tensor.CopyFrom(tf.make_tensor_proto(array.astype(_numpy(WIDER[value.tensor.dtype]))))
        for place, kind in enumerate(value.list.type):
            value.list.type[place] = WIDER.get(kind, kind)
    if new.op == "Cast" and new.attr["SrcT"].type == new.attr["DstT"].type:
        kind = new.attr["DstT"].type
        new.op = "Identity"
        new.attr.clear()
        new.attr["T"].type = kind
    return new


def _batch_normalisation(node: Node, form: str) -> list[Node]:
    """(x − mean) / √(variance + ε) · scale + offset, of the mean and variance given or of the batch's own."""
    training = node.attr["is_training"].b
    layout = node.attr["data_format"].s
    prefix = node.name + "/in_basic_operations"
    made: list[Node] = []

    def add(op: str, name: str, *inputs: str, **types: Any) -> str:
        made.append(tf.compat.v1.NodeDef(name=name, op=op, input=inputs))
        for attribute, kind in ({"T": tf.float64} | types).items():
            made[-1].attr[attribute].type = kind.as_datatype_enum
        return form.format(name, _outputs(op)[0])

    def constant(name: str, value: Any, kind: Any) -> str:
        made.append(tf.compat.v1.NodeDef(name=f"{prefix}/{name}", op="Const"))
        made[-1].attr["dtype"].type = kind.as_datatype_enum
        made[-1].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, kind))
        return form.format(made[-1].name, "output")

    def mean_of(name: str, values: str) -> str:
        axes = [axis for axis, letter in enumerate(layout.decode()) if letter != "C"]
        found = add("Mean", f"{prefix}/{name}", values, constant(name + "/axes", axes, tf.int32), Tidx=tf.int32)
        made[-1].attr["keep_dims"].b = True
        return found

    x = node.input[0]
    names = ("scale", "offset") if training else ("scale", "offset", "mean", "variance")
    parts = dict(zip(names, node.input[1:], strict=False))
    if layout.startswith(b"NC"):
        shape = constant("shape", [1, -1] + [1] * (len(layout) - 2), tf.int32)
        for name, part in parts.items():
            parts[name] = add("Reshape", f"{prefix}/{name}", part, shape, Tshape=tf.int32)
    if training:
        parts["mean"] = mean_of("mean", x)
        parts["variance"] = mean_of("variance", add("SquaredDifference", f"{prefix}/squares", x, parts["mean"]))
    epsilon = constant("epsilon", node.attr["epsilon"].f, tf.float64)
    inverse = add("Rsqrt", f"{prefix}/inverse", add("AddV2", f"{prefix}/positive", parts["variance"], epsilon))
    normal = add("Mul", f"{prefix}/normal", add("Sub", f"{prefix}/centred", x, parts["mean"]), inverse)
    add("AddV2", node.name, add("Mul", f"{prefix}/scaled", normal, parts["scale"]), parts["offset"])
    return made


def _inner_type(node: Node) -> str:
    """Why an operation computes in a narrow type whatever its attributes say; empty where it does not."""
    definition = op_def_registry.get(node.op)
    if node.op in OPAQUE and any(kind in WIDER for kind in _types(node)):
        return "it means something else in another type"
    if definition is None:
        return ""
    fixed = [arg.type for arg in (*definition.input_arg, *definition.output_arg) if arg.type in WIDER]
    return f"it computes in {tf.as_dtype(fixed[0]).name} alone" if fixed else ""


def _without_kernel(node: Node) -> str:
    """Why an operation cannot run as written; empty where it can."""
    definition = op_def_registry.get(node.op)
    for attribute in definition.attr if definition is not None else ():
        allowed = attribute.allowed_values.list.type
        value = node.attr[attribute.name]
        if allowed and any(kind not in allowed for kind in ([value.type] if value.type else value.list.type)):
            return "TensorFlow has it in narrower types alone"
    kinds = _kernels(node.op)
    if kinds and not any(
        all(node.attr[name].type in types for name, types in kernel if node.attr[name].type) for kernel in kinds
    ):
        return "TensorFlow has it in narrower types alone"
    return ""


@cache
def _kernels(op: str) -> tuple[tuple[tuple[str, frozenset[int]], ...], ...]:
    """The type constraints of every kernel of an operation on the devices there are."""
    devices = {"CPU", "DEFAULT", *(device.device_type for device in tf.config.list_physical_devices())}
    return tuple(
        tuple((c.name, frozenset(c.allowed_values.list.type)) for c in kernel.constraint)
        for kernel in kernels.get_registered_kernels_for_op(op).kernel
        if kernel.device_type in devices
    )


@cache
def _outputs(op: str) -> list[str]:
    """Names of an operation's outputs; none for a function."""
    definition = op_def_registry.get(op)
    return [] if definition is None else [arg.name for arg in definition.output_arg]


def _types(node: Node) -> list[int]:
    """All types among a node's attributes."""
    return [kind for value in node.attr.values() for kind in (value.type, value.tensor.dtype, *value.list.type)]


def _cast(name: str, source: str, before: int, after: int) -> Node:
    node = tf.compat.v1.NodeDef(name=name, op="Cast", input=[source])
    node.attr["SrcT"].type, node.attr["DstT"].type = before, after
    return node


def _copy(node: Node) -> Node:
    copy = type(node)()
    copy.CopyFrom(node)
    return copy


def _complete(node: Node) -> Node:
    """A copy of a node with all its attributes: those left at their defaults may be absent from a saved graph."""
    copy = _copy(node)
    definition = op_def_registry.get(node.op)
    for attribute in definition.attr if definition is not None else ():
        if attribute.name not in copy.attr and attribute.HasField("default_value"):
            copy.attr[attribute.name].CopyFrom(attribute.default_value)
    return copy


def _numpy(kind: int) -> Any:
    return np.dtype(tf.as_dtype(kind).as_numpy_dtype)


def _rename(names: Any, renamed: Mapping[str, str]) -> None:
    for place, name in enumerate(names):
        names[place] = renamed.get(name, name)
