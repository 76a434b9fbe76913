"""What a trace took from Python as constants: when it changes, the trace is stale and is made anew.

A trace sees numbers, flags, activation functions and NumPy arrays as they are at that moment. Their fingerprint is
taken right after tracing and compared at each later call. It covers attributes of layers and modules and of their own
classes, and closures, defaults, arguments and global names of functions, with what these hold up to a few levels deep.
Values of variables are no part of it: they are read at each evaluation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

SIMPLE = (bool, int, float, complex, str, bytes, type(None), np.generic)
DEPTH = 4
LARGE_ARRAY = 1 << 16
"""Arrays of more entries than this are compared by identity and a sample of their entries."""


def fingerprint(model: Any) -> Any:
    """A value that is equal as long as nothing the trace of ``model`` took as constant has changed."""
    if isinstance(model, keras.layers.Layer):
        return tuple(_attributes(layer) for layer in model._flatten_layers())
    return _of(model, DEPTH)


def _attributes(owner: Any) -> Any:
    """The attributes that are constants, of a layer or a module.

    Of private ones, those that its own classes add to a library's, and no whole numbers, lists or objects: these count
    and record calls, and to follow them would be to trace at every one.
    """
    found = []
    classes = _own_classes(type(owner))
    private = _kept_by_libraries() if classes else None
    attributes = [pair for kind in classes for pair in vars(kind).items() if type(pair[1]) in (bool, int, str, float)]
    for name, value in (*vars(owner).items(), *attributes):
        if name[0] == "_":
            own = private is not None and name[:2] != "__" and name not in private
            if own and (type(value) in (bool, str, float) or isinstance(value, np.ndarray)):
                found.append((name, _of_plain(value)))
        elif type(value) in (bool, int, str, float) or value is None:
            found.append((name, value))
        elif isinstance(value, (list, tuple, dict, np.ndarray)):
            found.append((name, _of_plain(value)))
        elif callable(value) or isinstance(value, tf.Tensor):
            found.append((name, id(value)))
        elif _own_classes(type(value)) and not isinstance(value, tf.Module):
            found.append((name, _of_plain(_held(value))))
    return (id(owner), tuple(found))


def _own_classes(kind: type) -> tuple[type, ...]:
    """Of a class and its bases, those that no library defines."""
    return () if _is_library(kind) else tuple(base for base in kind.__mro__ if not _is_library(base))


def _held(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    slots = [name for kind in _own_classes(type(value)) for name in getattr(kind, "__slots__", ())]
    named = {name: getattr(value, name) for name in slots if name[:2] != "__" and hasattr(value, name)}
    return named | getattr(value, "__dict__", {})


@functools.cache
def _kept_by_libraries() -> frozenset[str]:
    """Names of the attributes that every layer, model and module has; some change from call to call."""
    return frozenset(name for owner in (keras.layers.Layer(), keras.Model(), tf.Module()) for name in vars(owner))


def _of_plain(value: Any) -> Any:
    """Of numbers and arrays in lists and dicts; other things by identity."""
    if isinstance(value, (list, tuple)):
        return tuple(_of_plain(entry) for entry in value)
    if isinstance(value, dict):
        return tuple((key, _of_plain(entry)) for key, entry in value.items())
    return _of(value, 1) if isinstance(value, (*SIMPLE, np.ndarray)) else id(value)


def _of(value: Any, depth: int) -> Any:
    if isinstance(value, SIMPLE):
        return (type(value), value)
    if isinstance(value, np.ndarray):
        entries = value if value.size <= LARGE_ARRAY else value.reshape(-1)[:: value.size // LARGE_ARRAY]
        return (id(value), value.shape, entries.dtype.str, entries.tobytes())
    if depth == 0 or isinstance(value, (tf.Tensor, tf.Variable, keras.Variable)):
        return id(value)
    if isinstance(value, FunctionType):
        return _of_function(value, depth)
    if isinstance(value, MethodType):
        return (_of(value.__func__, depth), _of(value.__self__, depth))
    if isinstance(value, functools.partial):
        return (_of(value.func, depth), _of_all(value.args, depth), _of_all(value.keywords.items(), depth))
    if isinstance(value, (list, tuple)):
        return (type(value), _of_all(value, depth))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(_of_all(value, depth)))
    if isinstance(value, dict):
        return _of_all(value.items(), depth)
    if isinstance(value, keras.layers.Layer):
        return fingerprint(value)
    if isinstance(value, type) or type(value).__module__ in ("builtins", "tensorflow"):
        return id(value)
    python = getattr(value, "python_function", None)  # of a tf.function
    if isinstance(python, FunctionType):
        return (id(value), _of(python, depth))
    if isinstance(value, tf.Module):
        return tuple(_attributes(module) for module in (value, *value.submodules))
    if type(value).__module__.partition(".")[0] in ("tensorflow", "keras", "numpy"):
        return id(value)
    return (id(value), _of_all(_held(value).items(), depth))


def _of_all(values: Iterable[Any], depth: int) -> Any:
    return tuple(_of(value, depth - 1) for value in values)


def _of_function(function: FunctionType, depth: int) -> Any:
    cells = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    names = _names(function.__code__)
    read = [function.__globals__[name] for name in names if name in function.__globals__]
    for module in [value for value in (*read, *cells) if isinstance(value, ModuleType) and not _is_library(value)]:
        read += [vars(module)[name] for name in names if name in vars(module)]
    read = [value for value in read if not (isinstance(value, ModuleType) or _is_library(value))]
    return (
        id(function.__code__),
        _of_all(cells, depth),
        _of(function.__defaults__, depth - 1),
        _of(function.__kwdefaults__, depth - 1),
        _of_all(read, depth),
    )


def _is_empty(cell: Any) -> bool:
    """Whether a closure's variable has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Global names a function and the functions inside it may read."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _is_library(value: Any) -> bool:
    """What libraries define does not change."""
    home = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return str(home).partition(".")[0] in ("tensorflow", "keras", "tf_keras", "numpy", "builtins")
