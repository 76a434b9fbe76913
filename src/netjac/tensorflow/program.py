"""A traced network as a plain function of (θ, x): one flat graph without variables, calls or side effects.

`flatten` takes the graph TensorFlow traced and rewrites it node by node:

- calls of nested functions are replaced by their bodies, so that every use of a weight is in sight;
- reads of trainable variables become placeholders, so that evaluating at another θ touches no variable;
- whatever the outputs do not depend on is dropped, side effects included.

A `Program` can then be inserted into any graph under construction, as often as needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def

from netjac.errors import ModelError
from netjac.tensorflow.assignments import assignments
from netjac.tensorflow.custom import carry_over, own_gradients
from netjac.tensorflow.functions import CALLS, INPUT_TYPES, READS, pass_by_value, read_by_value, with_own_functions
from netjac.tensorflow.grouped import split_grouped
from netjac.tensorflow.lifetime import Registered, keep_with
from netjac.tensorflow.precision import wide_tensor, widen

Node = Any  # a NodeDef

PICKS_ROWS = frozenset(
    ["Where", "DynamicPartition", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "ListDiff"]
)
"""Operations with outputs of as many rows as values say."""


@dataclass(frozen=True, eq=False)
class Program:
    """A flat graph of the outputs.

    Attributes
    ----------
    graph_def
        The nodes the outputs depend on.
    inputs, parameters, outputs
        Tensor names, in the order of the flattened x, of the variables and of the flattened outputs. A parameter's
        name may be absent from the graph (the variable does not reach the outputs).
    captured
        Other tensors the graph needs (non-trainable variables' handles, constants), by tensor name.
    gradients
        Names under which TensorFlow finds the gradients that operations bring along.
    assigned
        Variables that the model's call assigns to; the program does not.
    """

    graph_def: Any
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    captured: Mapping[str, Any]
    gradients: tuple[Registered, ...] = ()
    assigned: tuple[str, ...] = ()

    @property
    def has_control_flow(self) -> bool:
        """Whether a loop or a branch is left in the graph."""
        return any(node.op in INPUT_TYPES for node in self.graph_def.node)

    @property
    def picks_rows(self) -> bool:
        """Whether values decide about the number of rows of a tensor."""
        return any(node.op in PICKS_ROWS for node in self.graph_def.node)

    @property
    def nodes(self) -> frozenset[str]:
        """Names of the nodes."""
        return frozenset(node.name for node in self.graph_def.node)

    def part(self, fetch: Sequence[str]) -> Program:
        """What the tensors named in ``fetch`` depend on, alone."""
        kept = _ancestors({node.name: node for node in self.graph_def.node}, fetch)
        definition = type(self.graph_def)(versions=self.graph_def.versions, library=self.graph_def.library)
        definition.node.extend(kept.values())
        captured = {name: tensor for name, tensor in self.captured.items() if _producer(name) in kept}
        return replace(self, graph_def=definition, outputs=tuple(fetch), captured=captured)

    def insert(self, theta: Sequence[Any], x: Sequence[Any], fetch: Sequence[str]) -> list[Any]:
        """Put the graph into the one under construction, applied to ``theta`` and ``x``; tensors named in ``fetch``."""
        given = dict(zip((*self.inputs, *self.parameters), (*x, *theta), strict=True))
        present = self.nodes
        feeds = {
            name: _here(tf.convert_to_tensor(value))
            for name, value in (given | dict(self.captured)).items()
            if name.partition(":")[0] in present
        }
        # A fetched name that is itself fed is not returned by the import: answer it here.
        wanted = [name for name in fetch if name not in feeds]
        definition, functions = with_own_functions(self.graph_def)
        keep_with(tf.compat.v1.get_default_graph(), functions + self.gradients)
        got = tf.graph_util.import_graph_def(definition, input_map=feeds, return_elements=wanted, name="netjac")
        found = dict(zip(wanted, got, strict=True))
        return [feeds[name] if name in feeds else found[name] for name in fetch]


def _here(tensor: Any) -> Any:
    """The tensor as the graph under construction sees it: captured, if it comes from outside."""
    graph = tf.compat.v1.get_default_graph()
    return tensor if getattr(tensor, "graph", None) is graph else graph.capture(tensor)


def flatten(
    graph: Any, inputs: Sequence[Any], outputs: Sequence[Any], variables: Sequence[Any], wide: bool = False
) -> Program:
    """Rewrite a traced FuncGraph into a `Program`.

    Parameters
    ----------
    graph
        The traced graph; its captures tell which placeholder stands for which variable.
    inputs, outputs
        Its placeholders for the flattened x, and its flattened outputs.
    variables
        The ``tf.Variable`` objects to differentiate with respect to.
    wide
        Whether to compute in float64, whatever the graph was traced in.
    """
    own = own_gradients(graph)
    definition = graph.as_graph_def()
    functions = {f.signature.name: f for f in definition.library.function}
    names = _variable_names(graph)
    assigning = assignments(definition.node, functions, names)
    nodes, aliases = _inline({node.name: node for node in definition.node}, functions)
    handles = {id(variable.handle): i for i, variable in enumerate(variables)}
    parameters = tuple(f"netjac_parameter_{i}:0" for i in range(len(variables)))
    by_placeholder = {}
    captured = {}
    for external, internal in graph.captures:
        position = handles.get(id(external))
        if position is None:
            captured[internal.name] = external
        else:
            by_placeholder[internal.op.name] = position
    _replace_reads(nodes, by_placeholder, parameters, variables, functions)
    output_names = tuple(_resolve(_tensor_name(tensor), aliases) for tensor in outputs)
    gradients = {
        name: (
            [_tensor_name(tensor) for tensor in gradient.incoming],
            [None if tensor is None else _resolve(_tensor_name(tensor), aliases) for tensor in gradient.outgoing],
        )
        for name, gradient in own.items()
    }
    kept = _ancestors(nodes, output_names)
    gradients = {name: gradient for name, gradient in gradients.items() if name in kept}
    kept = _ancestors(nodes, [*output_names, *(t for _, made in gradients.values() for t in made if t is not None)])
    assigning.check(kept, names)
    if wide:
        widen(kept, functions)
        captured = {name: wide_tensor(tensor) for name, tensor in captured.items()}
    registered = carry_over(kept, gradients)
    for node in kept.values():
        if any(_producer(source) in by_placeholder for source in node.input):
            raise ModelError(
                f"the operation {node.name!r} ({node.op}) uses a trainable variable by reference; read its value first."
            )
    flat = tf.compat.v1.GraphDef(versions=definition.versions)
    if any(node.op in INPUT_TYPES for node in kept.values()):
        flat.library.CopyFrom(definition.library)
        del flat.library.function[:]
        flat.library.function.extend(functions.values())
    flat.node.extend(kept.values())
    outside = {name: tensor for name, tensor in captured.items() if name.partition(":")[0] in kept}
    return Program(
        split_grouped(flat, outside),
        tuple(tensor.name for tensor in inputs),
        parameters,
        tuple(_tensor_name_of(name) for name in output_names),
        outside,
        registered,
        tuple(names[placeholder] for placeholder in assigning.variables),
    )


def _variable_names(graph: Any) -> dict[str, str]:
    """Names of the variables whose handles a FuncGraph captures, by the placeholder that stands for the handle."""
    names = {id(variable.handle): variable.name.partition(":")[0] for variable in graph.variables}
    return {
        internal.op.name: names.get(id(external), internal.op.name)
        for external, internal in graph.captures
        if internal.dtype == tf.resource
    }


def _inline(nodes: dict[str, Node], functions: Mapping[str, Any]) -> tuple[dict[str, Node], dict[str, str]]:
    """Replace calls by bodies until none is left; ``aliases`` maps a call's outputs to the bodies' tensors."""
    aliases: dict[str, str] = {}
    pending = [node for node in nodes.values() if _is_call(node, functions)]
    while pending:
        call = pending.pop()
        definition = functions[call.attr["f"].func.name if call.op in CALLS else call.op]
        body, flat_names = function_def_to_graph_def(definition)
        arguments = [arg.name for arg in definition.signature.input_arg]
        given = dict(zip(arguments, [i for i in call.input if not i.startswith("^")], strict=True))
        del nodes[call.name]
        prefix = call.name + "/"
        for node in body.node:
            if node.name in given:
                aliases[f"{prefix}{node.name}"] = given[node.name]
                continue
            copy = type(node)()
            copy.CopyFrom(node)
            copy.name = prefix + node.name
            del copy.input[:]
            copy.input.extend(prefix + _data(i) for i in node.input if not i.startswith("^"))
            nodes[copy.name] = copy
            if _is_call(copy, functions):
                pending.append(copy)
        for index, arg in enumerate(definition.signature.output_arg):
            source = prefix + _data(flat_names.get(definition.ret[arg.name], definition.ret[arg.name]))
            aliases[f"{call.name}:{index}" if index else call.name] = source
    for node in nodes.values():
        resolved = [_resolve(_data(i), aliases) for i in node.input if not i.startswith("^")]
        del node.input[:]
        node.input.extend(resolved)
    return nodes, aliases


def _is_call(node: Node, functions: Mapping[str, Any]) -> bool:
    return node.op in functions or (node.op in CALLS and node.attr["f"].func.name in functions)


def _resolve(name: str, aliases: Mapping[str, str]) -> str:
    while name in aliases:
        name = _data(aliases[name])
    return name


def _replace_reads(
    nodes: dict[str, Node],
    handles: Mapping[str, int],
    parameters: Sequence[str],
    variables: Sequence[Any],
    functions: dict[str, Any],
) -> None:
    """Turn each use of a trainable variable's handle into one of its value, taken from a placeholder."""
    for node in list(nodes.values()):
        for place, source in enumerate(node.input):
            if _producer(source) not in handles:
                continue
            position = handles[_producer(source)]
            dtype = tf.as_dtype(variables[position].dtype).as_datatype_enum
            if node.op in INPUT_TYPES:
                pass_by_value(node, place, variables[position], functions)
            elif node.op in READS:
                axis = read_by_value(node, dtype)
                if axis is not None:
                    nodes[axis.name] = axis
                    node.input.append(axis.name)
            else:
                continue  # an assignment or the like: the outputs may not depend on it, and it is dropped then
            name = parameters[position].partition(":")[0]
            node.input[place] = name
            if name not in nodes:
                placeholder = tf.compat.v1.NodeDef(name=name, op="Placeholder")
                placeholder.attr["dtype"].type = dtype
                placeholder.attr["shape"].shape.CopyFrom(variables[position].shape.as_proto())
                nodes[name] = placeholder


def _ancestors(nodes: Mapping[str, Node], outputs: Sequence[str]) -> dict[str, Node]:
    kept: dict[str, Node] = {}
    pending = [_producer(name) for name in outputs]
    while pending:
        name = pending.pop()
        if name not in kept:
            kept[name] = nodes[name]
            pending.extend(_producer(i) for i in nodes[name].input)
    return kept


def _producer(name: str) -> str:
    return name.lstrip("^").partition(":")[0]


def _data(name: str) -> str:
    """The canonical form of a tensor name inside a GraphDef: ``node`` for output 0, ``node:i`` for others."""
    node, _, index = name.partition(":")
    return node if index in ("", "0") else name


def _tensor_name(tensor: Any) -> str:
    return _data(tensor.name)


def _tensor_name_of(name: str) -> str:
    return name if ":" in name else name + ":0"
