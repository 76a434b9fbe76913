"""A model or a callable → a `Program`: what is traced, with which variables, under which names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from netjac.data import refuse_batches
from netjac.errors import DataError, DtypeError, ModelError, NetjacError, ShapeError
from netjac.spaces import OutputSpace, ParameterSpace, Segment, lay_out
from netjac.tensorflow.custom import forget_own_gradients
from netjac.tensorflow.layers import inference, is_layer, is_model, unbuilt
from netjac.tensorflow.lifetime import registered_gradients
from netjac.tensorflow.precision import wide_segments, wide_type
from netjac.tensorflow.program import Program, flatten
from netjac.tensorflow.recurrent import unrolled
from netjac.tensorflow.refusals import fixed_samples, refuse_output

_TRACING = threading.RLock()  # a trace changes how Keras calls recurrent layers while it lasts


@dataclass(frozen=True)
class Signature:
    """Structure, shapes per sample and dtypes of x: what one compiled function serves."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """A hashable form."""
        return (repr(self.structure), self.shapes, self.dtypes)


def signature_of(x: Any, floating: str | None) -> tuple[Signature, list[Any]]:
    """Signature of x and its flattened arrays (NumPy arrays or tensors); clear errors for what cannot be a batch.

    Floating NumPy arrays and lists of numbers take the type ``floating``; tensors keep their own. Where ``floating`` is
    None, arrays keep their own type as well, and lists are float32.
    """
    if isinstance(x, (list, tuple)) and all(isinstance(v, (bool, int, float, np.number)) for v in tf.nest.flatten(x)):
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise ShapeError("the rows of x do not all have the same length; pad them to one, or cut them.") from error
        if x.dtype.kind == "f":
            x = x.astype(floating or "float32")
    refuse_batches(x, "x", " netjac.stream(model, batches) takes them as they are.")
    leaves = [_as_batch(leaf, floating) for leaf in tf.nest.flatten(x)]
    if not leaves:
        raise ShapeError("x holds no array; give an array (n, ...), or a list or dict of such arrays.")
    if len({int(leaf.shape[0]) for leaf in leaves}) > 1:
        raise ShapeError(f"the inputs have different numbers of samples: {[int(leaf.shape[0]) for leaf in leaves]}.")
    structure = tf.nest.pack_sequence_as(x, list(range(len(leaves))))
    shapes = tuple(tuple(int(d) for d in leaf.shape[1:]) for leaf in leaves)
    return Signature(structure, shapes, tuple(tf.as_dtype(leaf.dtype).name for leaf in leaves)), leaves


def _as_batch(leaf: Any, floating: str | None) -> Any:
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        raise DtypeError(f"x holds a {type(leaf).__name__}; give a dense array of shape (n, ...), padded if need be.")
    if leaf is None:
        raise DtypeError("x, or one of its inputs, is None; give an array of shape (n, ...).")
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise DataError("x is an array with masked entries; fill them (x.filled(...)) or leave those samples out.")
    array = leaf if isinstance(leaf, tf.Tensor) else np.asarray(leaf)
    if len(array.shape) == 0 and array.dtype == object:
        raise DtypeError(f"x holds a {type(leaf).__name__}; give an array of shape (n, ...).")
    if len(array.shape) == 0:
        raise ShapeError("x must have a first axis of samples, and is a scalar; write x[None] for one sample.")
    if not isinstance(array, tf.Tensor):
        if array.dtype.kind not in "fiub":
            raise DtypeError(f"x has dtype {array.dtype}; expected floating-point, integer or boolean numbers.")
        if array.dtype.kind == "f" and floating is not None:
            array = array.astype(floating, copy=False)
    elif not (array.dtype.is_floating or array.dtype.is_integer or array.dtype.is_bool):
        raise DtypeError(f"x has dtype {array.dtype.name}; expected floating-point, integer or boolean numbers.")
    if tf.as_dtype(array.dtype).is_floating:
        finite = tf.reduce_all(tf.math.is_finite(array)) if isinstance(array, tf.Tensor) else np.isfinite(array).all()
        if not bool(finite):
            raise DataError("x holds NaN or infinite values; remove or replace those samples first.")
    return array


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced model: the program, and what its rows and columns are called."""

    program: Program
    signature: Signature
    parameters: ParameterSpace
    output_space: OutputSpace


def trainable(model: Any, variables: Sequence[Any] | None) -> list[tuple[str, Any]]:
    """(name, tf.Variable) of what to differentiate with respect to; errors if there is nothing."""
    if variables is None:
        if is_layer(model) and (not model.built or (not model.trainable_variables and unbuilt(model))):
            raise ModelError(
                f"the model {model.name!r} was never built; call model(x), or model.build(input_shape), first."
            )
        variables = getattr(model, "trainable_variables", None)
        if variables is None:
            raise ModelError(
                f"a plain {type(model).__name__} does not say which variables it trains; write variables=[w, b, ...]."
            )
    if isinstance(variables, (tf.Variable, keras.Variable)):
        variables = [variables]
    if not isinstance(variables, Iterable):
        raise DtypeError(f"variables must be a list of tf.Variable objects, and is a {type(variables).__name__}.")
    variables = list(variables)
    resources = [_resource(variable) for variable in variables]
    named = [(_name(variable), resource) for variable, resource in zip(variables, resources, strict=True)]
    if not named:
        raise ModelError("there are no trainable variables; set layer.trainable = True, or give variables=[...].")
    if len({id(v) for _, v in named}) != len(named):
        raise ModelError("a variable is listed twice in variables=[...].")
    common = named[0][0].partition("/")[0] + "/" if is_model(model) else ""
    if common and all(name.startswith(common) for name, _ in named) and common == model.name + "/":
        named = [(name.removeprefix(common), variable) for name, variable in named]
    paths = _module_paths(model)
    return [(paths.get(id(variable), name), variable) for name, variable in named]


def _name(variable: Any) -> str:
    return str(variable.path if isinstance(variable, keras.Variable) else variable.name.partition(":")[0])


def _resource(variable: Any) -> Any:
    inner = variable.value if isinstance(variable, keras.Variable) else variable
    if not isinstance(inner, tf.Variable) or not hasattr(inner, "handle"):
        raise DtypeError(
            f"variables must be tf.Variable or keras.Variable objects, and one is {type(variable).__name__}."
        )
    if not inner.dtype.is_floating:
        raise DtypeError(
            f"the variable {_name(variable)!r} has dtype {inner.dtype.name}; derivatives need floating point."
        )
    if not inner.shape.is_fully_defined():
        raise ShapeError(
            f"the variable {_name(variable)!r} was declared with the shape {inner.shape}, which leaves sizes open, and "
            "its columns must be counted; make it without shape=..., tf.Variable(value)."
        )
    return inner


def _module_paths(model: Any) -> dict[int, str]:
    """For a plain tf.Module, whose variables are often all called 'Variable': attribute paths such as 'layers.0.w'."""
    if not isinstance(model, tf.Module) or is_layer(model):
        return {}
    found = model._flatten(predicate=lambda value: isinstance(value, tf.Variable), with_path=True)
    return {id(variable): ".".join(str(part) for part in path) for path, variable in found}


def parameter_space(model: Any, variables: Sequence[Any] | None = None) -> ParameterSpace:
    """The trainable variables of a model, in its order, live."""
    named = trainable(model, variables)
    segments = lay_out(
        [name for name, _ in named],
        [tuple(int(d) for d in variable.shape) for _, variable in named],
        [variable.dtype.name for _, variable in named],
    )
    return ParameterSpace(segments, [variable for _, variable in named])


def floating_type(parameters: ParameterSpace) -> str:
    """The type floating inputs are given in: the variables' own, float32 for half precision."""
    types = {s.dtype if s.dtype in ("float32", "float64") else "float32" for s in parameters.segments}
    return max(types, default="float32")


def trace(model: Any, signature: Signature, parameters: ParameterSpace, wide: bool = False) -> Trace:
    """Trace ``model`` at ``signature``, any number of samples, with random layers off.

    With ``wide``, what was traced is rewritten to take, compute and return float64.
    """
    _check_inputs(model, signature)
    specs = [
        tf.TensorSpec((None, *shape), dtype, name=f"netjac_input_{i}")
        for i, (shape, dtype) in enumerate(zip(signature.shapes, signature.dtypes, strict=True))
    ]
    call = caller(model)

    def flat(*leaves: Any) -> Any:
        return call(tf.nest.pack_sequence_as(signature.structure, list(leaves)))

    assert parameters.variables is not None
    known = registered_gradients()
    without_weights = unbuilt(model) if is_layer(model) else []
    with _TRACING, unrolled():
        try:
            concrete = _concrete(flat, specs)
        except NetjacError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise ModelError(
                f"the model could not be traced for inputs {_describe(signature)}:\n{type(error).__name__}: {error}\n"
                "Check that x has the shape and structure the model takes, and that it computes with TensorFlow's "
                "operations throughout: .numpy() and NumPy's functions have no derivative here."
                f"{fixed_samples(model)}"
            ) from error
    late = [f"{layer.name!r} ({type(layer).__name__})" for layer in without_weights if layer.built and layer.weights]
    if late:
        raise ModelError(
            f"the model {model.name!r} calls layers that were never built, and had no weights until now: "
            f"{', '.join(late)}. Call model(x) once before it is given to netjac."
        )
    outputs, template = _outputs(concrete.structured_outputs)
    inputs = concrete.inputs[: len(specs)]
    traced = concrete.graph.get_operations()
    program = flatten(concrete.graph, inputs, outputs, parameters.variables, wide)
    forget_own_gradients(traced, known)
    rows = _output_space(concrete.structured_outputs, outputs, template)
    if wide:
        signature = replace(signature, dtypes=tuple(wide_type(name) for name in signature.dtypes))
        parameters = ParameterSpace(wide_segments(parameters.segments), parameters.variables)
        rows = OutputSpace(wide_segments(rows.segments), rows.template)
    return Trace(program, signature, parameters, rows)


def _concrete(function: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """Trace as it stands; with AutoGraph where Python control flow on tensors asks for it."""
    try:
        return tf.function(function, autograph=False).get_concrete_function(*specs)
    except tf.errors.OperatorNotAllowedInGraphError:
        return tf.function(function, autograph=True).get_concrete_function(*specs)


def caller(model: Any) -> Callable[[Any], Any]:
    """How to call ``model`` on x: Keras layers with training=False, anything else as it is."""
    if is_layer(model):
        return lambda x: model(x, **inference(model))
    if not callable(model):
        raise ModelError(
            f"expected a Keras model, a layer, a tf.Module or a function, and got a {type(model).__name__}."
        )
    return lambda x: model(x)


def _check_inputs(model: Any, signature: Signature) -> None:
    """Feature counts that a Keras model states, before any work."""
    if not is_model(model) or not getattr(model, "inputs", None):
        return
    if len(model.inputs) != len(signature.shapes):
        raise ShapeError(
            f"the model takes {len(model.inputs)} inputs, and x holds {len(signature.shapes)} arrays. A list is the "
            "inputs of one model; netjac.stream takes batches from a function that returns an iterator over them."
        )
    if isinstance(signature.structure, dict):
        return  # matched by name; Keras says itself when a name is missing
    for tensor, given in zip(model.inputs, signature.shapes, strict=True):
        wanted = tuple(tensor.shape[1:])
        if len(wanted) != len(given) or any(w not in (None, g) for w, g in zip(wanted, given, strict=True)):
            raise ShapeError(
                f"the model's input {tensor.name!r} takes samples of shape {wanted}, and x has samples of shape "
                f"{given}."
            )


def _describe(signature: Signature) -> str:
    return ", ".join(
        f"(n, {', '.join(map(str, s))}) {d}" if s else f"(n,) {d}"
        for s, d in zip(signature.shapes, signature.dtypes, strict=True)
    )


def _outputs(structured: Any) -> tuple[list[Any], Any]:
    outputs = tf.nest.flatten(structured)
    for tensor in outputs:
        if not isinstance(tensor, tf.Tensor):
            raise DtypeError(f"the model returns a {type(tensor).__name__}; expected dense tensors.")
        if not tensor.dtype.is_floating:
            raise DtypeError(
                f"the output {tensor.name!r} has dtype {tensor.dtype.name}; derivatives need floating-point outputs."
            )
        if not tensor.shape.rank or tensor.shape[0] is not None or any(d is None for d in tensor.shape[1:]):
            refuse_output(tensor)
    return outputs, tf.nest.pack_sequence_as(structured, list(range(len(outputs))))


def _output_space(structured: Any, outputs: Sequence[Any], template: Any) -> OutputSpace:
    paths = ["/".join(map(str, path)) or "output" for path in _paths(template)]
    segments: tuple[Segment, ...] = lay_out(
        paths, [tuple(int(d) for d in t.shape[1:]) for t in outputs], [t.dtype.name for t in outputs]
    )
    return OutputSpace(segments, template)


def _paths(template: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(template, dict):
        for key in sorted(template):
            yield from _paths(template[key], (*path, key))
    elif isinstance(template, (list, tuple)):
        for i, value in enumerate(template):
            yield from _paths(value, (*path, i))
    else:
        yield path


def vector_specs(trace: Trace) -> list[Any]:
    """TensorSpecs of θ as one vector (m,), then of the flattened x."""
    vector = tf.TensorSpec((trace.parameters.size,), floating_type(trace.parameters))
    return [vector, *argument_specs(trace)[len(trace.parameters) :]]


def weights(vector: Any, trace: Trace) -> list[Any]:
    """θ as one vector (m,) → one tensor a variable, in its own shape and type."""
    segments = trace.parameters.segments
    parts = tf.split(vector, [segment.size for segment in segments])
    return [tf.cast(tf.reshape(part, s.shape), s.dtype) for part, s in zip(parts, segments, strict=True)]


def argument_specs(trace: Trace) -> list[Any]:
    """TensorSpecs of θ, one a variable, then of the flattened x."""
    signature = trace.signature
    return [tf.TensorSpec(s.shape, s.dtype) for s in trace.parameters.segments] + [
        tf.TensorSpec((None, *shape), dtype) for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
    ]


def flat_outputs(outputs: Sequence[Any], trace: Trace) -> Any:
    """The outputs as one (n, l)."""
    flat = [tf.reshape(y, [tf.shape(y)[0], s.size]) for y, s in zip(outputs, trace.output_space.segments, strict=True)]
    dtype = max((y.dtype for y in flat), key=lambda d: d.size)
    return flat[0] if len(flat) == 1 else tf.concat([tf.cast(y, dtype) for y in flat], axis=1)
