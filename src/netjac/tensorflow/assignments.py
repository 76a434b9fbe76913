"""Assignments to variables in a model's call (a step counter, running statistics): netjac carries none of them out.

A Jacobian is taken at the variables' present values and leaves them as they are. An assignment that the outputs do not
use is therefore left out, and told. Where the outputs use what a variable was assigned, they are another function
without it: such a model is refused. TensorFlow orders reads and assignments by control edges, so that a read comes
after an assignment if it depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from netjac.errors import ModelError
from netjac.tensorflow.functions import CALLS, INPUT_TYPES, READS, functions_of

Node = Any  # a NodeDef


@dataclass(eq=False)
class Assignments:
    """What a graph assigns; operations by their names once calls are inlined, variables by their placeholders.

    Attributes
    ----------
    operations
        Assigning operation → the variables it assigns. Loops and branches that assign inside count as one.
    late
        Operation that reads a variable after it was assigned → that variable.
    """

    operations: dict[str, frozenset[str]] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)

    def check(self, kept: Collection[str], names: Mapping[str, str]) -> None:
        """Raise where the operations ``kept``, which the outputs depend on, need an assignment.

        ``names`` are the variables' own, by placeholder.
        """
        needed = [*self.late.items(), *((operation, min(made)) for operation, made in self.operations.items())]
        for operation, variable in needed:
            if operation not in kept:
                continue
            raise ModelError(
                f"the model assigns to the variable {names.get(variable, variable)!r} in its call, and its outputs use "
                f"the new value (at the operation {operation!r}). A Jacobian is taken at the variables' present values "
                "and changes none: assign outside the model's call, or go on with the value that was assigned and not "
                "with the variable (h = v + 1; v.assign(h); ... h ...)."
            )

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables assigned, in the order of the graph."""
        return tuple(dict.fromkeys(name for names in self.operations.values() for name in sorted(names)))


def assignments(nodes: Iterable[Node], functions: Mapping[str, Any], handles: Collection[str]) -> Assignments:
    """The assignments in a graph with its control edges, before calls are inlined.

    Parameters
    ----------
    nodes
        Of the graph.
    functions
        FunctionDefs, by name.
    handles
        Placeholders of the variables.
    """
    found = Assignments()
    bodies = (function.node_def for function in functions.values())
    nodes = list(nodes)
    if any(_assigns(node) for body in (nodes, *bodies) for node in body):
        _walk(nodes, functions, {name: name for name in handles}, frozenset(), "", found)
    return found


def _walk(
    nodes: Iterable[Node],
    functions: Mapping[str, Any],
    handles: Mapping[str, str],
    earlier: frozenset[str],
    prefix: str,
    found: Assignments,
) -> frozenset[str]:
    """Record what a body assigns and reads late; the variables it assigns.

    ``handles`` are the body's own names of them, and ``earlier`` those that were assigned before the body is run.
    """
    by_name = {node.name: node for node in nodes}
    before: dict[str, frozenset[str]] = {}
    assigned: dict[str, frozenset[str]] = {}
    for name in _in_order(by_name):
        node = by_name[name]
        sources = [source for source in map(_producer, node.input) if source in by_name]
        before[name] = earlier.union(*(before[s] | assigned[s] for s in sources))
        used = {i: handles[p] for i, p in enumerate(_data_producers(node)) if p in handles}
        if _is_call(node, functions):
            whole = node.op in INPUT_TYPES and node.op not in CALLS  # a loop or a branch, which is not inlined
            inside = Assignments() if whole else found
            parts = [
                _walk_body(body, node, used, functions, before[name], prefix, inside)
                for body in _bodies(node, functions)
            ]
            assigned[name] = frozenset[str]().union(*parts)
            if whole and assigned[name]:
                found.operations[prefix + name] = assigned[name]
            if whole and (late := before[name] & set(used.values())):
                found.late[prefix + name] = min(late)
        elif _assigns(node):
            assigned[name] = frozenset(used.values())
            if used:
                found.operations[prefix + name] = assigned[name]
        else:
            assigned[name] = frozenset()
            if late := before[name] & set(used.values()):
                found.late[prefix + name] = min(late)
    return frozenset[str]().union(*assigned.values())


def _walk_body(
    body: Any,
    call: Node,
    used: Mapping[int, str],
    functions: Mapping[str, Any],
    before: frozenset[str],
    prefix: str,
    found: Assignments,
) -> frozenset[str]:
    offset = INPUT_TYPES[call.op][1] if call.op in INPUT_TYPES else 0
    arguments = [argument.name for argument in body.signature.input_arg]
    handles = {arguments[i - offset]: variable for i, variable in used.items()}
    return _walk(body.node_def, functions, handles, before, f"{prefix}{call.name}/", found)


def _bodies(node: Node, functions: Mapping[str, Any]) -> list[Any]:
    names = [node.op] if node.op in functions else [function.name for function in functions_of(node)]
    return [functions[name] for name in names if name in functions]


def _is_call(node: Node, functions: Mapping[str, Any]) -> bool:
    return node.op in functions or node.op in INPUT_TYPES


def _assigns(node: Node) -> bool:
    return node.op.startswith(("Assign", "Resource")) and node.op not in READS


def _in_order(nodes: Mapping[str, Node]) -> Iterable[str]:
    """Names, each after those of the nodes it depends on."""
    done: set[str] = set()
    for start in nodes:
        pending = [start]
        while pending:
            name = pending[-1]
            missing = [s for s in map(_producer, nodes[name].input) if s in nodes and s not in done]
            if name in done or not missing:
                pending.pop()
                if name not in done:
                    done.add(name)
                    yield name
            else:
                pending += missing


def _data_producers(node: Node) -> list[str]:
    return [_producer(source) for source in node.input if not source.startswith("^")]


def _producer(name: str) -> str:
    return name.lstrip("^").partition(":")[0]
