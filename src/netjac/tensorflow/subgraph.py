"""Part of a ``tf.compat.v1`` graph → a `Trace`, as if it had been a model.

The part between the tensors that hold the samples, the parameters, and the outputs is imported into a graph of its own,
where variables stand for the parameters; from there on it is what any traced model is. What the part needs and does not
depend on them (other variables, a keep probability, a flag) is captured: its value is taken from the graph it came
from, and made up where the part is run to be surveyed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from netjac.errors import ModelError, ShapeError
from netjac.spaces import OutputSpace, ParameterSpace, lay_out
from netjac.tensorflow.custom import OwnGradient, carry_over, own_gradients
from netjac.tensorflow.functions import CALLS
from netjac.tensorflow.lifetime import keep_with
from netjac.tensorflow.program import flatten
from netjac.tensorflow.trace import Signature, Trace

PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2", "PlaceholderWithDefault"})
SOURCES = PLACEHOLDERS | {"IteratorGetNext", "QueueDequeueManyV2", "QueueDequeueUpToV2"}
OLD_CONTROL_FLOW = frozenset({"Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond", "RefSwitch", "RefMerge"})


@dataclass(frozen=True, eq=False)
class Parameter:
    """Something without samples to differentiate with respect to: a variable, or any floating tensor.

    Attributes
    ----------
    tensor
        The handle of a resource variable, the reference of an older variable, or the tensor.
    """

    name: str
    tensor: Any
    dtype: Any
    shape: tuple[int, ...]

    @property
    def by_handle(self) -> bool:
        """Whether operations take the variable's handle and not its value."""
        return bool(self.tensor.dtype == tf.resource)

    def value(self) -> Any:
        """Its value, in the graph under construction."""
        if self.by_handle:
            return tf.raw_ops.ReadVariableOp(resource=self.tensor, dtype=self.dtype)
        return tf.identity(self.tensor)


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a graph.

    Attributes
    ----------
    trace
        With the given parameters first, then those variables that operations of the part take by handle.
    parameters
        Of the trace.
    inputs
        The tensors that hold the samples, as far as the outputs depend on them.
    captured
        By name in the program, what else the part needs from its graph.
    """

    trace: Trace
    parameters: tuple[Parameter, ...]
    inputs: tuple[Any, ...]
    captured: Mapping[str, Any]

    def with_captured(self, values: Mapping[str, Any]) -> Trace:
        """The trace with these values for what is captured."""
        program = self.trace.program
        return replace(self.trace, program=replace(program, captured={**program.captured, **values}))


def ancestors(output: Any, stops: Iterable[str] = ()) -> dict[str, Any]:
    """Operations a tensor depends on, by name; tensors named in ``stops`` are not followed."""
    stopped = set(stops)
    found: dict[str, Any] = {}
    pending = [] if output.name in stopped else [output.op]
    while pending:
        operation = pending.pop()
        if operation.name not in found:
            found[operation.name] = operation
            pending.extend(t.op for t in operation.inputs if t.name not in stopped)
    return found


def cut(output: Any, parameters: Sequence[Parameter], inputs: Sequence[Any]) -> Part | None:
    """The part of a graph that leads from ``parameters`` and ``inputs`` to ``output``; None if none does.

    Raises
    ------
    ModelError
        A loop or a branch of the older kind, or an operation that cannot be copied, lies on the way.
    """
    stops = [t.name for t in (*(p.tensor for p in parameters), *inputs)]
    operations = ancestors(output, stops)
    dependent = _reached(operations, stops)
    if output.op.name not in dependent:
        return None
    old = sorted(name for name in dependent if operations[name].type in OLD_CONTROL_FLOW)
    if old:
        raise ModelError(
            f"the operation {old[0]!r} ({operations[old[0]].type}) belongs to a loop or branch of TensorFlow 1, which "
            "cannot be copied; call tf.compat.v1.enable_control_flow_v2() before the graph is built."
        )
    own = _own_gradients(output.graph, [operations[name] for name in operations if name in dependent])
    incoming = [t for gradient in own.values() for t in gradient.incoming]
    operations |= {t.op.name: t.op for t in incoming}
    for tensor in (t for gradient in own.values() for t in gradient.outgoing if t is not None):
        operations |= ancestors(tensor, stops)
    dependent = _reached(operations, [*stops, *(t.name for t in incoming)])
    seeds = [t.name for op in operations.values() if _is_impure(op) for t in op.outputs]
    impure = _reached(operations, seeds) | {name for name, op in operations.items() if _is_impure(op)}
    inside = {name for name in operations if name in dependent or name not in impure} | {t.op.name for t in incoming}
    used = {t.name: t for name in inside for t in operations[name].inputs}
    outside = {name: t for name, t in used.items() if name in stops or t.op.name not in inside}
    captured = [t for name, t in outside.items() if name not in stops]
    handles = tuple(_of_handle(t) for t in captured if t.dtype == tf.resource)
    return _trace(
        output,
        (*parameters, *handles),
        tuple(t for t in inputs if t.name in used),
        [t for t in captured if t.dtype != tf.resource],
        _definition(output.graph, [operations[name] for name in operations if name in inside], outside, own),
        used,
    )


def _own_gradients(graph: Any, operations: Sequence[Any]) -> dict[str, OwnGradient]:
    """Gradients that the operations bring along, as operations of their graph; calls are seen through instead."""
    try:
        return own_gradients(graph, [op for op in operations if op.type not in CALLS])
    except Exception as error:  # whatever the user's code raises
        raise ModelError(
            f"a gradient that an operation brings along (tf.custom_gradient) could not be copied:\n{error}"
        ) from error


def _is_impure(operation: Any) -> bool:
    """Whether the operation's value is more than a function of constants."""
    return operation.type in PLACEHOLDERS | OLD_CONTROL_FLOW or operation.op_def.is_stateful


def _reached(operations: Mapping[str, Any], sources: Iterable[str]) -> set[str]:
    """Those of the operations that depend on the tensors named in ``sources``."""
    consumers: dict[str, list[Any]] = {}
    for operation in operations.values():
        for tensor in operation.inputs:
            consumers.setdefault(tensor.name, []).append(operation)
    found: set[str] = set()
    pending = list(sources)
    while pending:
        for operation in consumers.get(pending.pop(), ()):
            if operation.name not in found:
                found.add(operation.name)
                pending.extend(t.name for t in operation.outputs)
    return found


def _of_handle(handle: Any) -> Parameter:
    """The variable behind a handle."""
    if handle.op.type != "VarHandleOp":
        raise ModelError(f"the operation {handle.op.name!r} ({handle.op.type}) lies on the way and cannot be copied.")
    shape = tf.TensorShape(handle.op.get_attr("shape")).as_list()
    return Parameter(handle.op.name, handle, tf.as_dtype(handle.op.get_attr("dtype")), tuple(shape))


def _trace(
    output: Any,
    parameters: tuple[Parameter, ...],
    inputs: tuple[Any, ...],
    captured: Sequence[Any],
    definition: Any,
    used: Mapping[str, Any],
) -> Part:
    """Import the definition into a graph of its own; eagerly."""
    sizes = [tensor.shape.as_list()[1:] for tensor in inputs]
    for tensor, size in zip(inputs, sizes, strict=True):
        if None in size:
            raise ShapeError(
                f"the input {tensor.name!r} has shape {tensor.shape}; all sizes but the first must be known."
            )
    stand_ins = [tf.Variable(np.zeros(p.shape), dtype=p.dtype, name=f"parameter_{i}") for i, p in enumerate(parameters)]

    def run(*arguments: Any) -> Any:
        given = dict(zip([t.name for t in (*inputs, *captured)], arguments, strict=True))
        here = tf.compat.v1.get_default_graph()
        for parameter, variable in zip(parameters, stand_ins, strict=True):
            if parameter.tensor.name in used:
                given[parameter.tensor.name] = (
                    here.capture(variable.handle) if parameter.by_handle else variable.read_value()
                )
        return tf.graph_util.import_graph_def(definition, given, [output.name], name="")[0]

    shapes = [*([None, *size] for size in sizes), *(t.shape for t in captured)]
    specs = [
        tf.TensorSpec(shape, t.dtype.base_dtype, name=f"netjac_argument_{i}")
        for i, (shape, t) in enumerate(zip(shapes, (*inputs, *captured), strict=True))
    ]
    try:
        concrete = tf.function(run, autograph=False).get_concrete_function(*specs)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise ModelError(f"the graph of {output.name!r} could not be copied:\n{error}") from error
    names = [tensor.name for tensor in concrete.inputs[: len(specs)]]
    program = flatten(concrete.graph, concrete.inputs[: len(inputs)], concrete.outputs, stand_ins)
    signature = Signature(
        list(range(len(inputs))), tuple(map(tuple, sizes)), tuple(t.dtype.base_dtype.name for t in inputs)
    )
    space = ParameterSpace(
        lay_out([p.name for p in parameters], [p.shape for p in parameters], [p.dtype.name for p in parameters])
    )
    rows = lay_out(["output"], [tuple(output.shape.as_list()[1:])], [output.dtype.name])
    present = program.nodes
    needed = {
        name: tensor
        for name, tensor in zip(names[len(inputs) :], captured, strict=True)
        if name.partition(":")[0] in present
    }
    return Part(Trace(program, signature, space, OutputSpace(rows, 0)), parameters, inputs, needed)


def _definition(
    graph: Any, operations: Sequence[Any], outside: Mapping[str, Any], own: Mapping[str, OwnGradient]
) -> Any:
    """The operations without control edges, devices and colocation, and with the gradients they bring along."""
    nodes: dict[str, Any] = {}
    names: dict[str, str] = {}
    for i, tensor in enumerate(outside.values()):
        if tensor.dtype != tf.resource:  # a name of its own inside, for gradients to find
            names[_data(tensor.name)] = f"netjac_given_{i}"
            node = tf.compat.v1.NodeDef(name=f"netjac_given_{i}", op="Identity", input=[_data(tensor.name)])
            node.attr["T"].type = tensor.dtype.base_dtype.as_datatype_enum
            nodes[node.name] = node
    for operation in operations:
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(operation.node_def)
        data = [_data(source) for source in node.input if not source.startswith("^")]
        del node.input[:]
        node.input.extend(names.get(source, source) for source in data)
        node.device = ""
        node.attr.pop("_class", None)
        nodes[node.name] = node
    gradients = {
        name: (
            [_data(t.name) for t in gradient.incoming],
            [None if t is None else names.get(_data(t.name), _data(t.name)) for t in gradient.outgoing],
        )
        for name, gradient in own.items()
    }
    keep_with(graph, carry_over(nodes, gradients))
    whole = graph.as_graph_def()
    definition = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
    definition.node.extend(nodes.values())
    return definition


def _data(name: str) -> str:
    """A tensor's name as nodes write it: ``node`` for output 0, ``node:i`` for others."""
    return name.removesuffix(":0")
