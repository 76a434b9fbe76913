"""A checksum of what a model computes: its operations and all its values, and no name.

Two models have the same one if they are traced to the same graph and hold the same numbers; the names that Keras and
TensorFlow count up ("dense_3") do not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from netjac.tensorflow.evaluator import extractor_of


def model_checksum(model: Any, x: Any) -> str:
    """Of the traced graph, the parameters and every other value it reads, for inputs of the signature of ``x``."""
    extractor, _ = extractor_of(model, x)
    trace = extractor.trace
    found = hashlib.blake2b(digest_size=16)
    found.update(repr((trace.signature.key, [(s.shape, s.dtype) for s in trace.parameters.segments])).encode())
    found.update(np.ascontiguousarray(trace.parameters.ravel()).data)
    program = trace.program
    order = [*program.inputs, *program.parameters, *program.captured]
    for piece in _graph(program.graph_def, [name.partition(":")[0] for name in order], program.outputs):
        found.update(piece)
    for tensor in program.captured.values():
        found.update(_value(tensor))
    return found.hexdigest()


def _graph(definition: Any, first: Sequence[str], outputs: Sequence[str]) -> Iterator[bytes]:
    """The nodes one after the other, each by its operation, its attributes and the numbers of its sources."""
    functions = {f.signature.name: f for f in definition.library.function}
    number = {name: i for i, name in enumerate([*first, *(n.name for n in definition.node if n.name not in first)])}
    for node in definition.node:
        yield from _node(node, functions)
        yield repr([(number[name], place) for name, place in map(_source, node.input)]).encode()
    yield repr([(number[name], place) for name, place in map(_source, outputs)]).encode()


def _source(name: str) -> tuple[str, str]:
    node, _, place = name.lstrip("^").partition(":")
    return node, place or "0"


def _node(node: Any, functions: dict[str, Any]) -> Iterator[bytes]:
    yield node.op.encode()
    for key in sorted(node.attr):
        value = node.attr[key]
        called = _called(value)
        if called:  # its name is counted up: its body instead
            yield key.encode()
            for name in called:
                yield from _body(functions[name], functions) if name in functions else ()
        elif not key.startswith("_") and key not in ("shared_name", "container"):
            yield key.encode() + value.SerializeToString(deterministic=True)


def _called(value: Any) -> list[str]:
    names: Iterable[Any] = [value.func] if value.HasField("func") else value.list.func
    return [function.name for function in names]


def _body(function: Any, functions: dict[str, Any]) -> Iterator[bytes]:
    for node in function.node_def:
        yield from _node(node, functions)


def _value(tensor: Any) -> bytes:
    """The numbers in a captured constant, or in the variable that a captured handle leads to; tables have none."""
    if tensor.dtype != tf.resource:
        return np.asarray(tensor).tobytes()
    data = getattr(tensor, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return b""
    dtype = tf.as_dtype(data.shape_and_type[0].dtype)
    return np.asarray(tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype)).tobytes()
