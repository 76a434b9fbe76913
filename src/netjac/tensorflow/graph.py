r"""Jacobians of symbolic tensors in graphs of ``tf.compat.v1``: placeholders, variables and a Session.

``tf.gradients(ys, xs)`` gives the derivative of the *sum* of ys. Here

    J_x[n, l, …] = ∂ys[n, l] / ∂x[n, …]      for x with the samples along its first axis,
    J_w[n, l, …] = ∂ys[n, l] / ∂w[…]         for a variable w (or any tensor without samples),

with n samples and the outputs of a sample flattened to l. Both are symbolic: fed, fetched, and differentiated again.

- For x: l backward passes with unit cotangents for all samples at once, through the graph as it is. What they give is
  Σ_n' ∂ys[n', l] / ∂x[n, …], which is J_x where samples do not mix; `check_samples` tells, with data.
- For w: the part of the graph between w, the samples and ys is copied, matched by the rules of `netjac.jacobian`, and
  compared with the ordinary derivative at made-up samples. Its factors A and D are multiplied out. What no rule covers
  is differentiated sample by sample; `coverage` says what became of each variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from netjac.errors import DataError, DtypeError, ModelError, RandomModelError, SampleMixingError, ShapeError
from netjac.layout import parse
from netjac.sites import Coverage
from netjac.tensorflow.graph_variables import parameter_blocks, parameter_coverage
from netjac.tensorflow.subgraph import SOURCES, Parameter, ancestors
from netjac.tensorflow.symbolic import sweeps
from netjac.tensorflow.tensor import arranged


def jacobian(ys: Any, xs: Any, layout: str | None = None, inputs: Any = None) -> Any:
    r"""Jacobian of symbolic outputs by sample, with respect to inputs and variables.

    Parameters
    ----------
    ys : tf.Tensor (n, …)
        Outputs, the samples along the first axis; all other sizes known. The number of samples need not be.
    xs
        What to differentiate with respect to: one, or a list, of

        - tensors with the samples along the first axis: those in ``inputs``, and what depends on them;
        - variables (resource and reference variables), and tensors that do not depend on ``inputs``.
    layout : str, optional
        Arrangement of the letters n (samples), l (outputs of a sample) and m (the entries of all xs, one after the
        other), for example ``"(n l) m"``. By default each x keeps its shape.
    inputs : tensors, optional
        Those that hold the samples along the first axis. By default all placeholders and dataset elements that ys
        depend on and whose first size is unknown or that of ys; where there are none, the tensors among ``xs`` with
        the first size of ys.

    Returns
    -------
    tf.Tensor, or a list of them where ``xs`` is a list
        (n, l, \*shape of a sample) for an input, (n, l, \*shape) for a variable; zeros where ys do not depend on it.
        With a ``layout``, one tensor. They may be fed, fetched, and used in a loss.

    Raises
    ------
    ShapeError
        ys has no axis of samples, or a size that must be known is not.
    DtypeError
        ys or one of xs is not floating; for integer inputs differentiate with respect to the embedding's output.
    SampleMixingError
        The operations that lead to a variable's Jacobian mix samples, when run at made-up values (flags are False
        then). Mixing on the way from an input alone, or behind a flag, is not noticed here; see `check_samples`.
    RandomModelError
        The copied part draws random numbers (dropout that is on); for inputs alone, random numbers may be drawn: the
        derivative is that of the draw.
    ModelError
        A part of the graph that must be copied cannot be: a loop or branch of TensorFlow 1, a fixed number of samples.
    LayoutError
        The layout is no arrangement of n, l and m.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from netjac.tensorflow import graph
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     x = tf.compat.v1.placeholder(tf.float32, (None, 3))
    ...     W_1 = tf.compat.v1.get_variable("W_1", (3, 3), initializer=tf.compat.v1.ones_initializer())
    ...     layer_out = x @ W_1
    ...     J_x, J_W = graph.jacobian(layer_out, [x, W_1])
    ...     session.run(tf.compat.v1.global_variables_initializer())
    ...     of_x, of_W = session.run([J_x, J_W], {x: [[1, 7, 5]]})
    >>> of_x[0]
    array([[1., 1., 1.],
           [1., 1., 1.],
           [1., 1., 1.]], dtype=float32)
    >>> of_W[0, 0]  # the first output's derivative by W_1
    array([[1., 0., 0.],
           [7., 0., 0.],
           [5., 0., 0.]], dtype=float32)
    """
    arrangement = None if layout is None else parse(layout)
    given = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    with _modern(), _graph_of(ys).as_default():
        request = _request(ys, given, inputs)
        found: dict[int, Any] = dict(zip(request.of_samples, _input_blocks(ys, request), strict=True))
        of_parameters = parameter_blocks(ys, request.parameters, request.inputs)
        found |= dict(zip(request.without_samples, of_parameters, strict=True))
        blocks = [found[i] for i in range(len(given))]
        if arrangement is None:
            return blocks if isinstance(xs, (list, tuple)) else blocks[0]
        if any(None in block.shape.as_list()[2:] for block in blocks):
            raise ShapeError("a layout needs the sizes of a sample, and one of xs has sizes that are not known.")
        dtype = tf.float64 if any(block.dtype == tf.float64 for block in blocks) else tf.float32
        sizes = [prod(block.shape.as_list()[2:]) for block in blocks]
        n, l = tf.shape(ys)[0], _outputs(ys)
        flat = [tf.cast(tf.reshape(b, [n, l, size]), dtype) for b, size in zip(blocks, sizes, strict=True)]
        return arranged(tf.concat(flat, axis=2), arrangement, ys.shape.as_list()[0], l, sum(sizes))


def coverage(ys: Any, xs: Any, inputs: Any = None) -> Coverage:
    """How `jacobian` treats each variable among ``xs``: factored, collapsed, or differentiated sample by sample.

    Parameters
    ----------
    ys, xs, inputs
        As for `jacobian`; tensors with samples among ``xs`` are left out.

    Examples
    --------
    ::

        print(graph.coverage(layer_out, W_1))
    """
    given = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    with _modern(), _graph_of(ys).as_default():
        request = _request(ys, given, inputs)
        return parameter_coverage(ys, request.parameters, request.inputs)


def check_samples(session: Any, ys: Any, feed_dict: Mapping[Any, Any] | None = None, inputs: Any = None) -> None:
    """Raise if ys mix samples at these data: each sample in turn is replaced, and the others' ys must stay.

    Takes n + 2 forward passes for n samples.

    Parameters
    ----------
    session : tf.compat.v1.Session
    ys, inputs
        As for `jacobian`.
    feed_dict
        As for ``session.run``: n ≥ 2 samples, no two alike.

    Raises
    ------
    SampleMixingError
        A sample's outputs change with another sample.
    RandomModelError
        The outputs change by themselves.
    DataError
        There are fewer than two samples, or all are alike.

    Examples
    --------
    ::

        graph.check_samples(session, layer_out, {x: [[1, 7, 5], [2, 3, 4]]})
    """
    with _modern():
        held = _sample_tensors(ys, [], inputs)
    feeds = dict(feed_dict or {})
    before, *values = session.run([ys, *held], feeds)
    again = session.run(ys, feeds)
    limit = 4 * np.finfo(before.dtype).eps * max(1e-30, np.abs(before).max(initial=0.0, where=np.isfinite(before)))

    def differ(other: Any, rows: Any) -> bool:
        a, b = before[rows], other[rows]
        with np.errstate(invalid="ignore"):
            return bool(np.any(~((np.abs(a - b) <= limit) | (a == b) | (np.isnan(a) & np.isnan(b)))))

    n = len(before)
    if differ(again, slice(None)):
        raise RandomModelError("the outputs differ from run to run at the same data: random numbers are drawn.")
    if n < 2 or all(np.array_equal(value[:1].repeat(n, 0), value) for value in values):
        raise DataError(f"two samples that differ are needed to tell whether samples mix, and {n} were given.")
    for i in range(n):
        others = [j for j in range(n) if any(not np.array_equal(v[i], v[j]) for v in values)]
        source = others[i % len(others)]
        changed = feeds | {tensor: _with_row(v, i, source) for tensor, v in zip(held, values, strict=True)}
        if differ(session.run(ys, changed), np.arange(n) != i):
            raise SampleMixingError(
                f"the outputs of other samples change when sample {i} does: {ys.name!r} mixes samples, so that no "
                "Jacobian organised by sample exists. Typical causes: batch normalisation in training mode, a mean or "
                "softmax over the batch, a reshape that swaps samples and time."
            )


def _with_row(values: Any, i: int, source: int) -> Any:
    copy = np.array(values)
    copy[i] = values[source]
    return copy


# What is asked for ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Request:
    """Which of xs hold samples, and which do not; positions among xs."""

    inputs: tuple[Any, ...]
    of_samples: tuple[int, ...]
    tensors: tuple[Any, ...]
    without_samples: tuple[int, ...]
    parameters: tuple[Parameter, ...]


def _graph_of(ys: Any) -> Any:
    if not isinstance(ys, tf.Tensor) or hasattr(ys, "numpy") or ys.graph.building_function:
        raise ModelError(
            "ys must be a symbolic tensor of a tf.compat.v1 graph (with placeholders and a Session); eagerly and "
            "inside tf.function use netjac.jacobian, netjac.input_jacobian or netjac.jacobian_tensor."
        )
    if not ys.dtype.is_floating:
        raise DtypeError(f"ys has dtype {ys.dtype.name}; derivatives need floating-point outputs.")
    if not ys.shape.rank or None in ys.shape.as_list()[1:]:
        raise ShapeError(f"ys has shape {ys.shape}; expected (n, ...) with n the samples and all other sizes known.")
    return ys.graph


def _outputs(ys: Any) -> int:
    return prod(ys.shape.as_list()[1:])


def _request(ys: Any, xs: Sequence[Any], inputs: Any) -> _Request:
    held = _sample_tensors(ys, xs, inputs)
    names = {tensor.name for tensor in held}
    sampled: list[int] = []
    plain: list[int] = []
    for i, x in enumerate(xs):
        if isinstance(x, tf.Tensor) and getattr(x, "graph", None) is not ys.graph:
            raise ModelError(f"one of xs, {x.name!r}, belongs to another graph than ys, {ys.name!r}.")
        dtype = tf.as_dtype(x.dtype).base_dtype
        if not dtype.is_floating:
            raise DtypeError(
                f"one of xs, {x.name!r}, has dtype {dtype.name}, for which no derivative exists; if it holds indices, "
                "differentiate with respect to the embedding's output, which may be any tensor of the graph."
            )
        (sampled if not _is_variable(x) and _holds_samples(x, names) else plain).append(i)
    for i in sampled:
        if xs[i].shape.rank == 0:
            raise ShapeError(f"{xs[i].name!r} depends on the samples and is a scalar; it has no axis of samples.")
    parameters = tuple(_parameter(xs[i]) for i in plain)
    return _Request(held, tuple(sampled), tuple(xs[i] for i in sampled), tuple(plain), parameters)


def _is_variable(x: Any) -> bool:
    return isinstance(x, tf.Variable)


def _holds_samples(x: Any, names: set[str]) -> bool:
    if x.name in names:
        return True
    return any(t.name in names for op in ancestors(x).values() for t in (*op.inputs, *op.outputs))


def _sample_tensors(ys: Any, xs: Sequence[Any], inputs: Any) -> tuple[Any, ...]:
    """Tensors that hold the samples along the first axis."""
    if inputs is not None:
        held = tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
        for tensor in held:
            if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
                raise ShapeError(f"inputs must be tensors (n, ...), and one is {tensor!r}.")
        return held
    n = ys.shape.as_list()[0]
    sources = [t for op in ancestors(ys).values() if op.type in SOURCES for t in op.outputs]
    for tensor in sources:
        if tensor.shape.rank is None:
            raise ShapeError(
                f"nothing is known of the shape of {tensor.name!r}; give it one, or say inputs=[...], the tensors with "
                "the samples along the first axis."
            )
    held = tuple(t for t in sources if t.shape.rank and t.shape.as_list()[0] in (None, n))
    fixed = [x for x in xs if not _is_variable(x) and x.shape.rank and x.shape.as_list()[0] in (None, n)]
    return held or tuple(fixed)


def _parameter(x: Any) -> Parameter:
    dtype = tf.as_dtype(x.dtype).base_dtype
    shape: list[Any] = x.shape.as_list() if x.shape.rank is not None else [None]
    if None in shape:
        raise ShapeError(f"{x.name!r} has shape {x.shape}; its sizes must be known, or it must be one of inputs=[...].")
    tensor = x
    if _is_variable(x):
        tensor = x.handle if hasattr(x, "handle") else x._ref()
    return Parameter(x.name.partition(":")[0], tensor, dtype, tuple(shape))


# Inputs ---------------------------------------------------------------------------------------------------------------


def _input_blocks(ys: Any, request: _Request) -> list[Any]:
    """(n, l, *shape of a sample) of each tensor with samples: one backward pass an output."""
    if not request.tensors:
        return []
    l = _outputs(ys)
    if l == 0:
        return [tf.zeros_like(x)[:, None][:, :0] for x in request.tensors]
    return sweeps([ys], [l], request.tensors, list)


@contextmanager
def _modern() -> Iterator[None]:
    """Shapes of TensorFlow 2 while it lasts, also where ``tf.compat.v1.disable_v2_behavior`` was called."""
    old = not isinstance(tf.TensorShape([1])[0], int)
    if old:
        tf.compat.v1.enable_v2_tensorshape()
    try:
        yield
    finally:
        if old:
            tf.compat.v1.disable_v2_tensorshape()
