"""Loops and branches: variables they use by reference are handed to them by value.

A While or If keeps its bodies as functions that receive a variable's handle and read it inside. To evaluate at any θ,
the bodies are copied with the handle's argument turned into the value itself, and their reads into plain copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import tensorflow as tf

from netjac.errors import ModelError
from netjac.tensorflow.lifetime import Registered, registered_function

Node = Any
_NUMBER = count()
# Types of the inputs of a functional operation, and how many inputs come before its bodies' arguments.
INPUT_TYPES = {
    "While": ("T", 0),
    "StatelessWhile": ("T", 0),
    "If": ("Tin", 1),
    "StatelessIf": ("Tin", 1),
    "Case": ("Tin", 1),
    "StatelessCase": ("Tin", 1),
    "PartitionedCall": ("Tin", 0),
    "StatefulPartitionedCall": ("Tin", 0),
}

READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
LOOPS = frozenset({"While", "StatelessWhile"})


def read_by_value(node: Node, dtype: int) -> Node | None:
    """Turn a read of a variable's handle into one of its value, in place; a constant to add, if one is needed."""
    if node.op == "ReadVariableOp":
        node.op = "Identity"
        node.attr.clear()
        node.attr["T"].type = dtype
        return None
    if node.op == "ResourceGatherNd":
        indices = node.attr["Tindices"].type
        node.op = "GatherNd"
        node.attr.clear()
        node.attr["Tparams"].type, node.attr["Tindices"].type = dtype, indices
        return None
    if node.op != "ResourceGather":
        raise ModelError(
            f"the operation {node.name!r} ({node.op}) uses a trainable variable by reference; read its value first."
        )
    axis = tf.compat.v1.NodeDef(name=node.name + "_axis", op="Const")
    axis.attr["dtype"].type = tf.int32.as_datatype_enum
    batch_dims, indices = node.attr["batch_dims"].i, node.attr["Tindices"].type
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(int(batch_dims), tf.int32))
    node.op = "GatherV2"
    node.attr.clear()
    for name, value in (("Tparams", dtype), ("Tindices", indices), ("Taxis", tf.int32.as_datatype_enum)):
        node.attr[name].type = value
    node.attr["batch_dims"].i = batch_dims
    return axis


def pass_by_value(node: Node, position: int, variable: Any, functions: dict[str, Any]) -> None:
    """Let a functional operation take its input number ``position``, a handle so far, by value."""
    if node.op not in INPUT_TYPES:
        raise ModelError(
            f"the operation {node.name!r} ({node.op}) uses a trainable variable by reference; read its value first."
        )
    name, offset = INPUT_TYPES[node.op]
    place = position - offset
    node.attr[name].list.type[place] = tf.as_dtype(variable.dtype).as_datatype_enum
    if node.op in LOOPS:  # a loop hands its inputs on as outputs
        node.attr["output_shapes"].list.shape[place].CopyFrom(variable.shape.as_proto())
    if "_read_only_resource_inputs" in node.attr:
        del node.attr["_read_only_resource_inputs"]
    for function in functions_of(node):
        function.name = _by_value(function.name, place, variable, functions)


def functions_of(node: Node) -> Iterable[Any]:
    """The function references among a node's attributes."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        yield from value.list.func


def _by_value(name: str, position: int, variable: Any, functions: dict[str, Any]) -> str:
    """A copy of a function that takes argument ``position`` by value; its name."""
    dtype = tf.as_dtype(variable.dtype).as_datatype_enum
    definition = type(functions[name])()
    definition.CopyFrom(functions[name])
    definition.signature.name = f"{name}_value_{next(_NUMBER)}"
    argument = definition.signature.input_arg[position]
    argument.type = dtype
    argument.handle_data.clear()
    definition.arg_attr.pop(position, None)
    values = {argument.name}
    renamed: dict[str, str] = {}
    changed = True
    while changed:  # handles may be passed on through Identity, in any order of the nodes
        changed = False
        for node in list(definition.node_def):
            for place, source in enumerate(node.input):
                if source.lstrip("^").partition(":")[0] not in values or source.startswith("^"):
                    continue
                if node.op == "Identity" and node.attr["T"].type == tf.resource.as_datatype_enum:
                    node.attr["T"].type = dtype
                    values.add(node.name)
                    changed = True
                elif node.op in INPUT_TYPES:
                    types, offset = INPUT_TYPES[node.op]
                    if node.attr[types].list.type[place - offset] == tf.resource.as_datatype_enum:
                        pass_by_value(node, place, variable, functions)
                elif node.op in READS:
                    if node.op == "ReadVariableOp":
                        renamed[f"{node.name}:value:0"] = f"{node.name}:output:0"
                    axis = read_by_value(node, dtype)
                    if axis is not None:
                        definition.node_def.append(axis)
                        node.input.append(f"{axis.name}:output:0")
    for node in definition.node_def:
        sources = [renamed.get(source, source) for source in node.input]
        del node.input[:]
        node.input.extend(sources)
    for output in definition.signature.output_arg:
        source = definition.ret[output.name]
        definition.ret[output.name] = renamed.get(source, source)
        if source.partition(":")[0] in values:
            output.type = dtype
            output.handle_data.clear()
    functions[definition.signature.name] = definition
    return str(definition.signature.name)


def with_own_functions(definition: Any) -> tuple[Any, tuple[Registered, ...]]:
    """A copy of a GraphDef whose functions have names of their own, and these names, to be held as long as it may run.

    Differentiating a loop rewrites its bodies under names made from theirs; two graphs with the same names would clash.
    """
    if not definition.library.function:
        return definition, ()
    number = next(_NUMBER)
    copy = type(definition)()
    copy.CopyFrom(definition)
    names = {f.signature.name: f"{f.signature.name}_{number}" for f in copy.library.function}
    for function in copy.library.function:
        function.signature.name = names[function.signature.name]
        _rename(function.node_def, names)
    _rename(copy.node, names)
    return copy, tuple(map(registered_function, copy.library.function))  # where a loop looks when it runs


def _rename(nodes: Iterable[Node], names: Mapping[str, str]) -> None:
    for node in nodes:
        for function in functions_of(node):
            function.name = names.get(function.name, function.name)
