"""How much memory a compiled function takes at its worst moment: its operations walked in order, nothing run.

Sizes are those of the tensors of a graph for a given number of samples. As TensorFlow's executor does, some operations
run at a time, each when all its inputs are there, those first that came last; equal operations run once; a tensor is
freed after its last use; and operations that work entry by entry write into an input that nobody else needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod
from typing import Any

import tensorflow as tf

VIEWS = frozenset(
    ["Reshape", "Identity", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Snapshot", "StridedSlice"]
)
"""Operations whose output is their first input's memory, where it has the same size."""

IN_PLACE = frozenset(
    [
        *("Abs", "Add", "AddN", "AddV2", "BiasAdd", "Ceil", "Cos", "Div", "Elu", "EluGrad", "Erf", "Exp", "Expm1"),
        *("Floor", "Inv", "InvGrad", "LeakyRelu", "LeakyReluGrad", "Log", "Log1p", "Maximum", "Minimum", "Mul"),
        *("MulNoNan", "Neg", "Pow", "RealDiv", "Reciprocal", "ReciprocalGrad", "Relu", "Relu6", "Relu6Grad"),
        *("ReluGrad", "Round", "Rsqrt", "RsqrtGrad", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin"),
        *("Softmax", "LogSoftmax", "Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "Sqrt", "SqrtGrad"),
        *("Square", "SquaredDifference", "Sub", "Tan", "Tanh", "TanhGrad", "Xdivy", "Xlogy", "Sinh", "Cosh"),
    ]
)
"""Operations that write over an input of the size of their output, if nothing else needs it."""


def peak_and_results(graph: Any, given: Sequence[Any], results: Sequence[Any], threads: int) -> tuple[int, int]:
    """Bytes that the operations of ``graph`` hold at the worst moment, and at the end, ``given`` tensors not counted.

    ``results`` are the tensors asked for; they stay. ``threads`` operations run at a time, for as long as moving their
    inputs and outputs takes.
    """
    steps, wanted = _steps(graph, given, results)
    uses: dict[str, int] = {}
    followers: dict[str, list[_Step]] = {}
    for name in [name for step in steps for name in step.inputs] + wanted:
        uses[name] = uses.get(name, 0) + 1
    for step in steps:
        for source in step.after:
            followers.setdefault(source, []).append(step)

    buffers: dict[str, _Buffer] = {}
    held = peak = clock = 0
    missing = {step.name: len(step.after) for step in steps}
    ready = [step for step in reversed(steps) if not step.after]
    running: list[tuple[int, int, _Step]] = []  # (when it ends, order, step)
    while ready or running:
        while ready and len(running) < threads:
            step = ready.pop()
            inputs = [buffers[name] for name in step.inputs]
            for name, size in step.outputs:
                shared = step.takes_over(inputs, size)
                buffers[name] = _Buffer(size) if shared is None else shared
                buffers[name].uses += uses.get(name, 0)
                held += size if shared is None else 0
            moved = 0 if step.cheap else sum(buffer.size for buffer in inputs) + sum(size for _, size in step.outputs)
            heappush(running, (clock + moved, len(buffers), step))
        peak = max(peak, held)
        clock, _, step = heappop(running)
        inputs = [buffers[name] for name in step.inputs]
        for buffer in inputs:
            buffer.uses -= 1
        for buffer in [*inputs, *(buffers[name] for name, _ in step.outputs)]:
            if buffer.uses <= 0:
                held -= buffer.size
                buffer.size = 0
        following = followers.get(step.name, ())
        for other in following:
            missing[other.name] -= 1
        now = [other for other in following if not missing[other.name]]
        ready += sorted(now, key=lambda other: other.cheap)  # what is cheap first
    return peak, held


@dataclass(eq=False)
class _Buffer:
    """Memory, and how many still want it."""

    size: int
    uses: int = 0


@dataclass(eq=False)
class _Step:
    """One operation, with the names of what it takes and of the operations it waits for, and (name, bytes) it makes."""

    name: str
    type: str
    inputs: list[str]
    after: set[str]
    outputs: list[tuple[str, int]]

    @property
    def cheap(self) -> bool:
        """Whether the executor runs it before anything else that is ready."""
        return self.type in VIEWS or self.type in ("Const", "Shape")

    def takes_over(self, inputs: Sequence[_Buffer], size: int) -> _Buffer | None:
        """The input whose memory an output of this size is."""
        if self.type in VIEWS and inputs and inputs[0].size == size:
            return inputs[0]
        if self.type in IN_PLACE:
            for used in inputs:
                if used.uses == 1 and used.size == size:
                    return used
        return None


def _steps(graph: Any, given: Sequence[Any], results: Sequence[Any]) -> tuple[list[_Step], list[str]]:
    """The operations behind ``results``, equal ones put together as TensorFlow does, and the results' names."""
    needed = _behind(results)
    free = {tensor.op.name for tensor in given}
    same: dict[str, str] = {}  # operation → the equal one that stands for it
    first: dict[Any, str] = {}
    steps = []

    def named(tensor: Any) -> str:
        return f"{same.get(tensor.op.name, tensor.op.name)}:{tensor.value_index}"

    for op in _in_order(op for op in graph.get_operations() if op.name in needed):
        inputs = [named(tensor) for tensor in op.inputs]
        sources = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        after = {same.get(source.name, source.name) for source in sources}
        same[op.name] = op.name
        if op.name not in free and not op.control_inputs:
            attributes = tuple(sorted((k, v.SerializeToString()) for k, v in op.node_def.attr.items()))
            same[op.name] = first.setdefault((op.type, tuple(inputs), attributes), op.name)
        if same[op.name] == op.name:
            none = op.name in free or op.type == "Const"
            outputs = [(f"{op.name}:{i}", 0 if none else _bytes(tensor)) for i, tensor in enumerate(op.outputs)]
            steps.append(_Step(op.name, op.type, inputs, after, outputs))
    return steps, [named(tensor) for tensor in results]


def _in_order(operations: Iterable[Any]) -> Iterator[Any]:
    """The operations in the order given, but each after all it depends on: control inputs may be made later than it."""
    done: set[str] = set()
    waiting = list(operations)
    names = {op.name for op in waiting}
    while waiting:
        late = []
        for op in waiting:
            before = {source.name for source in [*(tensor.op for tensor in op.inputs), *op.control_inputs]} & names
            if before <= done:
                done.add(op.name)
                yield op
            else:
                late.append(op)
        if len(late) == len(waiting):  # a loop of the old kind, which goes round
            yield from late
            return
        waiting = late


def _behind(results: Sequence[Any]) -> set[str]:
    """Names of the operations that results depend on."""
    found: set[str] = set()
    waiting = [tensor.op for tensor in results]
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found.add(op.name)
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return found


def _bytes(tensor: Any) -> int:
    """Of one tensor; nothing for what has no size, such as handles and tensors of unknown shape."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or not tensor.shape.is_fully_defined():
        return 0
    return int(prod(tensor.shape.as_list())) * int(tensor.dtype.size)
