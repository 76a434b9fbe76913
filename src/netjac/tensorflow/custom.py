"""Gradients that operations bring along (tf.custom_gradient), carried over with the graph.

Such a gradient is a Python function over tensors of the graph it was traced in, and means nothing in another. It is
therefore called once, in that graph, with placeholders for what comes back; the operations it adds are then inserted
wherever the gradient is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

from netjac.errors import ModelError
from netjac.tensorflow.lifetime import Registered, forget_gradient, registered_gradient, registered_gradients

GRADIENT = "_gradient_op_type"
Node = Any
_NUMBER = count()


@dataclass(frozen=True, eq=False)
class OwnGradient:
    """What an operation's own gradient became in its graph: tensors coming in (cotangents) and going out."""

    incoming: tuple[Any, ...]
    outgoing: tuple[Any, ...]  # one an operand, None where there is none


def own_gradients(graph: Any, operations: Sequence[Any] | None = None) -> dict[str, OwnGradient]:
    """Call the own gradient of every operation of a graph (or of these alone) that has one; by the operation's name."""
    found = {}
    for operation in graph.get_operations() if operations is None else operations:
        if GRADIENT not in operation.node_def.attr:
            continue
        with graph.as_default(), tf.name_scope("netjac_own_gradient"):
            incoming = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in operation.outputs]
            outgoing = ops.get_gradient_function(operation)(operation, *incoming)
            outgoing = [None if d is None else tf.convert_to_tensor(d) for d in tf.nest.flatten(outgoing)]
        found[operation.name] = OwnGradient(tuple(incoming), tuple(outgoing))
    return found


def forget_own_gradients(operations: Sequence[Any], known: frozenset[str]) -> None:
    """Take those gradients of the operations out of TensorFlow's table that are not among the names ``known``.

    They hold on to the graph they were traced in, which is of no use once they are carried over.
    """
    if new := registered_gradients() - known:
        for operation in operations:
            name = operation.node_def.attr[GRADIENT].s.decode()
            if name in new:
                forget_gradient(name)


def carry_over(
    nodes: dict[str, Node], gradients: Mapping[str, tuple[Sequence[str], Sequence[str | None]]]
) -> tuple[Registered, ...]:
    """Register each gradient anew, made of nodes alone, and take those nodes out of the graph.

    Parameters
    ----------
    nodes
        The graph, changed in place.
    gradients
        By node, the names of what comes in and of what goes out.

    Returns
    -------
    tuple of Registered
        To be held as long as the nodes may be differentiated.
    """
    held = []
    moved: set[str] = set()
    for name, (incoming, outgoing) in gradients.items():
        if name not in nodes:
            continue
        inside = _descendants(nodes, incoming)
        moved |= inside | {_producer(n) for n in incoming}
        part = tf.compat.v1.GraphDef()
        part.node.extend(nodes[n] for n in nodes if n in inside)
        for node in part.node:
            for place, source in enumerate(node.input):
                node.input[place] = _findable(nodes, source, moved)
        outgoing = [None if source is None else _findable(nodes, source, moved) for source in outgoing]
        held.append(_registered(_inserted(name, part, tuple(incoming), tuple(outgoing))))
        nodes[name].attr[GRADIENT].s = held[-1].name.encode()
    for name in moved:
        nodes.pop(name, None)
    for node in nodes.values():
        if GRADIENT in node.attr and node.name not in gradients:
            held.append(_registered(_guarded(node.attr[GRADIENT].s.decode(), node.name)))
            node.attr[GRADIENT].s = held[-1].name.encode()
    return tuple(held)


def _registered(gradient: Callable[..., Any]) -> Registered:
    return registered_gradient(f"NetjacOwnGradient{next(_NUMBER)}", gradient)


def _inserted(
    name: str, part: Any, incoming: tuple[str, ...], outgoing: tuple[str | None, ...]
) -> Callable[..., list[Any]]:
    """The gradient of the node ``name``: insert ``part``, with the rest of the graph around it."""
    inside = {node.name for node in part.node}
    around = {source for node in part.node for source in node.input if _producer(source) not in inside}
    around |= {source for source in outgoing if source is not None and _producer(source) not in inside}

    def gradient(operation: Any, *cotangents: Any) -> list[Any]:
        prefix = operation.name.removesuffix(name)
        given = dict(zip(incoming, cotangents, strict=True))
        feeds = {
            source: given[source] if source in given else operation.graph.get_tensor_by_name(prefix + _full(source))
            for source in around
        }
        wanted = [source for source in outgoing if source is not None and source not in feeds]
        taken = {source for node in part.node for source in node.input}
        inner = {source: _here(tensor) for source, tensor in feeds.items() if source in taken}
        names = [_full(source) for source in wanted]
        made = tf.graph_util.import_graph_def(part, inner, names, name="own_gradient") if wanted else []
        results = feeds | dict(zip(wanted, made, strict=True))
        return [None if source is None else results[source] for source in outgoing]

    return gradient


def _guarded(original: str, name: str) -> Callable[..., Any]:
    """An own gradient out of reach, inside a nested function: usable only as far as it needs no tensor of its graph."""

    def gradient(operation: Any, *cotangents: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = {id(tensor) for tensor, _ in getattr(graph, "captures", ())}
        try:
            found = ops.gradient_registry.lookup(original)(operation, *cotangents)
            taken = [tensor for tensor, _ in getattr(graph, "captures", ()) if id(tensor) not in before]
            if all(_within_reach(tensor, graph) for tensor in taken):
                return found
            reason: Exception | None = None
        except (ValueError, TypeError) as error:
            reason = error
        raise ModelError(
            f"the operation {name!r} has a gradient of its own (tf.custom_gradient) inside a nested tf.function, "
            "where it cannot be carried over; leave out that tf.function."
        ) from reason

    return gradient


def _within_reach(tensor: Any, graph: Any) -> bool:
    """Whether a tensor belongs to a graph around ``graph``, or to none."""
    while graph is not None:
        graph = getattr(graph, "outer_graph", None)
        if getattr(tensor, "graph", graph) is graph:
            return True
    return not hasattr(tensor, "graph")


def _full(name: str) -> str:
    """A tensor's name, of the form its graph knows it by."""
    return name if ":" in name else name + ":0"


def _findable(nodes: dict[str, Node], source: str, moved: set[str]) -> str:
    """The tensor under a name that is still its own once the graph is inserted, where placeholders are fed."""
    placeholder = nodes[_producer(source)]
    if placeholder.op != "Placeholder" or placeholder.name in moved:
        return source
    name = placeholder.name + "/given"
    if name not in nodes:
        nodes[name] = tf.compat.v1.NodeDef(name=name, op="Identity", input=[placeholder.name])
        nodes[name].attr["T"].CopyFrom(placeholder.attr["dtype"])
    return name


def _descendants(nodes: Mapping[str, Node], sources: Sequence[str]) -> set[str]:
    """Nodes that depend on the sources, without the sources."""
    reached = {_producer(source) for source in sources}
    roots = set(reached)
    grown = True
    while grown:
        grown = False
        for node in nodes.values():
            if node.name not in reached and any(_producer(source) in reached for source in node.input):
                reached.add(node.name)
                grown = True
    return reached - roots


def _producer(name: str) -> str:
    return name.lstrip("^").partition(":")[0]


def _here(tensor: Any) -> Any:
    graph = tf.compat.v1.get_default_graph()
    return tensor if tensor.graph is graph else graph.capture(tensor)
