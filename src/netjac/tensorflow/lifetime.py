"""Names in TensorFlow's tables, for as long as something needs them.

TensorFlow finds gradients of operations, and the bodies of loops and branches, by name in tables of the whole process,
and takes nothing out of them by itself. What is put there on behalf of a model must go with it, or a process that makes
many models grows without end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tensorflow.python.eager import context
from tensorflow.python.framework import ops


class Registered:
    """A name in such a table; it is taken out when nothing holds this any more.

    Attributes
    ----------
    name : str
    """

    def __init__(self, name: str, remove: Callable[[str], None]) -> None:
        self.name = name
        weakref.finalize(self, remove, name).atexit = False


def registered_gradient(name: str, gradient: Callable[..., Any]) -> Registered:
    """Let operations that carry ``name`` be differentiated by ``gradient``."""
    ops.RegisterGradient(name)(gradient)
    return Registered(name, forget_gradient)


def registered_function(definition: Any) -> Registered:
    """Let ``definition``, a FunctionDef, be found under its name when a graph runs."""
    context.context().add_function_def(definition)
    return Registered(definition.signature.name, context.context().remove_function)


def adopt_functions(graph: Any) -> None:
    """Let the functions of the graph of a ``tf.compat.v1`` wrapped function go with it.

    Where one is made or pruned, TensorFlow adds all of them to its table once more, and forgets about it.
    """
    if graph._functions:
        names = [function.signature.name for function in graph.as_graph_def().library.function]
        keep_with(graph, tuple(Registered(name, context.context().remove_function) for name in names))


def registered_gradients() -> frozenset[str]:
    """Names of all gradients that TensorFlow knows at this moment."""
    return frozenset(ops.gradient_registry.list())


def forget_gradient(name: str) -> None:
    """Take a gradient out of TensorFlow's table, whoever put it there."""
    ops.gradient_registry._registry.pop(name, None)


def keep_with(graph: Any, held: tuple[Registered, ...]) -> None:
    """Hold names as long as the graph lives, or the outermost of the graphs of functions that it is inside of."""
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    if held:
        weakref.finalize(graph, len, held).atexit = False  # a finaliser holds its arguments
