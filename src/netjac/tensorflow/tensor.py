"""The Jacobian as a tensor: at the variables' present values, and differentiable again.

The sites' A and D are built by `symbolic` inside one compiled function of (θ, x), multiplied out there and put in the
places of the columns. The function is called with the variables as they are read where it is called, so that a tape or
``tf.gradients`` goes through it to the variables and to x. (Operations inserted straight into a caller's graph would be
invisible to a tape that records there; a call is not.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.errors import DtypeError, ModelError, NetjacError, ShapeError
from netjac.layout import LETTERS, Layout, parse
from netjac.sites import SiteForm, UseSite
from netjac.tensorflow.evaluator import kept_with
from netjac.tensorflow.extractor import Extractor
from netjac.tensorflow.symbolic import SiteTensors
from netjac.tensorflow.trace import Trace, argument_specs

REPRESENTATIVES = 3  # samples made up for the survey and the probe where x is symbolic


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def jacobian_tensor(model: Any, x: Any, layout: str = "(n l) m", variables: Sequence[Any] | None = None) -> Any:
    """See `netjac.jacobian_tensor`."""
    try:
        return _jacobian_tensor(model, x, layout, variables)
    except NetjacError as error:
        error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph then leaves the error as it is
        raise


def _jacobian_tensor(model: Any, x: Any, layout: str, variables: Sequence[Any] | None) -> Any:
    arrangement = parse(layout)
    if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
        raise ModelError(
            "jacobian_tensor works eagerly and inside tf.function; in a graph of tf.compat.v1, with placeholders and a "
            "Session, use netjac.tensorflow.graph.jacobian(ys, xs)."
        )
    if isinstance(x, (list, tuple)) and all(isinstance(v, (bool, int, float, np.number)) for v in tf.nest.flatten(x)):
        x = np.asarray(x)
    x = tf.nest.map_structure(_tensor_or_array, x)
    with tf.init_scope():  # outside the graph under construction and any tape
        jacobian = kept_with(model, representative(x), variables, TensorJacobian)
    return jacobian(tf.nest.flatten(x), arrangement)


class TensorJacobian:
    """The dense Jacobian of one model and signature as a compiled function of (θ, x).

    Parameters
    ----------
    extractor
        What was traced, matched and probed.
    """

    def __init__(self, extractor: Extractor) -> None:
        trace, sites = extractor.trace, extractor.sites

        def run(*arguments: Any) -> Any:
            count = len(trace.parameters)
            y, values = sites.build(arguments[:count], arguments[count:])
            dtype = widest(trace)
            return tf.concat([tf.cast(b, dtype) for b in by_variable(trace, y, sites.sites, values)], axis=2)

        self._variables = extractor.parameters.variables or ()
        self._rows, self._m = extractor.output_space.size, extractor.parameters.size
        self._dtypes = [tf.as_dtype(name) for name in trace.signature.dtypes]
        self._compiled = tf.function(run, autograph=False).get_concrete_function(*argument_specs(trace))

    def __call__(self, x: Sequence[Any], layout: Layout) -> Any:
        """The Jacobian at the variables' present values and the flattened ``x``."""
        given = [tf.convert_to_tensor(leaf, dtype) for leaf, dtype in zip(x, self._dtypes, strict=True)]
        dense = self._compiled(*(tf.convert_to_tensor(variable) for variable in self._variables), *given)
        return arranged(dense, layout, given[0].shape[0], self._rows, self._m)


def arranged(dense: Any, layout: Layout, n: int | None, l: int, m: int) -> Any:
    """A tensor (n, l, m) in a layout; ``n`` is None where it is not known yet."""
    order = [letter for axis in layout.axes for letter in axis]
    if order != list(LETTERS):
        dense = tf.transpose(dense, [LETTERS.index(letter) for letter in order])
    count = tf.shape(dense)[order.index("n")] if n is None else n
    result = tf.reshape(dense, layout.shape(count, l, m))
    if n is None:  # what does not depend on n is known
        static = [None if "n" in a else size for a, size in zip(layout.axes, layout.shape(1, l, m), strict=True)]
        result = tf.ensure_shape(result, static)
    return result


def by_variable(trace: Trace, y: Any, sites: Sequence[UseSite], values: Sequence[SiteTensors]) -> list[Any]:
    """The columns (n, l, size) of each variable: its sites multiplied out, put in place and added up.

    Parameters
    ----------
    trace, y
        Of the sites; ``y`` is (n, l).
    sites, values
        As `netjac.tensorflow.symbolic.SiteBuilder` gives them.
    """
    found: list[list[Any]] = [[] for _ in trace.parameters.segments]
    for site, value in zip(sites, values, strict=True):
        segment = trace.parameters.segments[site.variable]
        found[site.variable].append(
            _in_place(tf.cast(_explicit(site, value), segment.dtype), site.entries, segment.size)
        )
    samples, rows = tf.shape(y)[0], trace.output_space.size
    return [
        tf.add_n(parts) if parts else tf.zeros([samples, rows, segment.size], segment.dtype)
        for parts, segment in zip(found, trace.parameters.segments, strict=True)
    ]


def _explicit(site: UseSite, value: SiteTensors) -> Any:
    """sum_p A[n, p, g, k] D[n, l, p, g, c] as (n, l, g·k·c), times the slope of E."""
    g, k, c = site.entries.shape
    if site.form is SiteForm.DENSE:
        result = value.dense
    else:
        rows, p = value.D.shape[1:3]
        if site.form is SiteForm.EMBEDDING:
            incoming = tf.one_hot(value.indices, k, dtype=value.D.dtype)[:, :, None]
        else:
            incoming = None if value.A is None else tf.cast(value.A, value.D.dtype)
        split = tf.reshape(value.D, [-1, rows, p, g, c])
        if incoming is None:
            result = tf.reduce_sum(split, axis=2) if p != 1 else split[:, :, 0]
        elif p == 1:
            result = incoming[:, None, 0, :, :, None] * split[:, :, 0, :, None, :]
        elif g == 1:
            result = tf.matmul(incoming[:, None, :, 0], split[:, :, :, 0], transpose_a=True)
        else:
            grouped = tf.transpose(split, [0, 1, 3, 2, 4])  # (n, l, g, p, c)
            result = tf.matmul(tf.transpose(incoming, [0, 2, 3, 1])[:, None], grouped)
        result = tf.reshape(result, [-1, rows, g * k * c])
    if value.scale is not None:
        result = result * tf.cast(tf.reshape(value.scale, [-1]), result.dtype)
    return result


def _in_place(explicit: Any, entries: NDArray[np.intp], size: int) -> Any:
    """Columns (n, l, g·k·c) of E's entries → (n, l, size) of the variable's; those of one entry are added."""
    flat = entries.reshape(-1)
    present = np.flatnonzero(flat >= 0)
    where = flat[present]
    if len(flat) == size and np.array_equal(flat, np.arange(size)):
        return explicit
    if len(np.unique(where)) < len(where):
        columns = tf.transpose(explicit, [2, 0, 1])  # negative entries are dropped
        return tf.transpose(tf.math.unsorted_segment_sum(columns, flat.astype(np.int64), size), [1, 2, 0])
    index = np.full(size, len(flat))
    index[where] = present
    if len(where) < size:  # entries the operation does not use: from a column of zeros at the end
        explicit = tf.pad(explicit, [[0, 0], [0, 0], [0, 1]])
    return tf.gather(explicit, index, axis=2)


def widest(trace: Trace) -> Any:
    """Type of the Jacobian: the widest of the variables' and the outputs', half precision as float32."""
    types = [s.dtype for s in (*trace.parameters.segments, *trace.output_space.segments)]
    return tf.float64 if "float64" in types else tf.float32


def is_symbolic(leaf: Any) -> bool:
    """Whether a leaf of x is a tensor of a graph under construction, without a value."""
    return isinstance(leaf, tf.Tensor) and not hasattr(leaf, "numpy")


def representative(x: Any) -> Any:
    """``x`` where it has values; else a few samples of its types and shapes.

    Floating numbers are drawn from (0.1, 0.9), which lies in the domain of logarithms, roots and inverse functions;
    integers are 0, which is an index of every table; booleans alternate.
    """
    leaves = tf.nest.flatten(x)
    if not any(is_symbolic(leaf) for leaf in leaves):
        return x
    rng = np.random.default_rng(0)
    return tf.nest.pack_sequence_as(x, [_few(leaf, rng) for leaf in leaves])


def _few(leaf: Any, rng: np.random.Generator) -> Any:
    if not is_symbolic(leaf):
        array = np.asarray(leaf)
        if not array.ndim:
            raise ShapeError("x must have a first axis of samples, and one of its inputs is a scalar.")
        few = (
            array[np.arange(REPRESENTATIVES) % len(array)]
            if len(array)
            else np.zeros((REPRESENTATIVES, *array.shape[1:]))
        )
        return tf.constant(few, leaf.dtype) if tf.is_tensor(leaf) else few.astype(array.dtype)
    if leaf.shape.rank is None or leaf.shape.rank == 0 or None in leaf.shape.as_list()[1:]:
        raise ShapeError(
            f"the input {leaf.name!r} has shape {leaf.shape}; expected (n, ...) with all sizes but n known: use "
            "tf.ensure_shape, or an input_signature with the sizes."
        )
    return sample_values(leaf.dtype, (REPRESENTATIVES, *leaf.shape.as_list()[1:]), rng)


def sample_values(dtype: Any, shape: Sequence[int], rng: np.random.Generator) -> Any:
    """Values of a type to run a graph with, as a tensor."""
    dtype = tf.as_dtype(dtype).base_dtype
    if dtype.is_floating or dtype.is_complex:
        return tf.cast(rng.uniform(0.1, 0.9, shape), dtype)
    if dtype.is_bool:
        return tf.constant(np.indices(shape).sum(axis=0) % 2 == 0) if shape else tf.constant(False)
    if dtype.is_integer:
        return tf.zeros(shape, dtype)
    raise DtypeError(f"an input has dtype {dtype.name}; expected floating-point, integer or boolean numbers.")


def _tensor_or_array(leaf: Any) -> Any:
    """Variables as tensors, so that a derivative reaches them; anything else as it is."""
    return tf.convert_to_tensor(leaf) if isinstance(leaf, (tf.Variable, keras.Variable)) else leaf
