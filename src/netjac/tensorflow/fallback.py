"""Per-sample differentiation, for the variables that no rule covers: exact, and as dear as it sounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from netjac.tensorflow.trace import Trace
from netjac.tensorflow.vectorise import vectorized_map

UNROLLED_ROWS = 16  # more rows than this are differentiated in a loop: unrolling them takes long to trace


def per_sample(
    trace: Trace, theta: Sequence[Any], x: Sequence[Any], variables: Sequence[int], seeds: Any = None
) -> list[Any]:
    """d outputs / d variable for each sample alone: one (n, l, size) a variable.

    The program is inserted for one sample and its l rows are differentiated one by one; samples are vectorised where
    TensorFlow can, and looped over otherwise. With ``seeds``, (q, n, l) or (q,) integers as for
    `netjac.tensorflow.symbolic.SiteBuilder`, the rows are q combinations of outputs: (n, q, size).
    """
    wanted = [theta[i] for i in variables]
    sizes = [trace.parameters.segments[i].size for i in variables]
    outputs = trace.program.outputs
    rows = trace.output_space.size

    def flat_outputs_of(sample: Sequence[Any]) -> Any:
        ys = trace.program.insert(theta, [leaf[None] for leaf in sample], outputs)
        return tf.concat([tf.reshape(y, [-1]) for y in ys], axis=0)

    def row(flat: Any, seed: Any) -> list[Any]:
        gradients = tf.gradients(flat, wanted, grad_ys=tf.cast(seed, flat.dtype))
        return [
            tf.zeros([size], w.dtype) if d is None else tf.reshape(tf.convert_to_tensor(d), [size])
            for d, w, size in zip(gradients, wanted, sizes, strict=True)
        ]

    def every_row(sample: Sequence[Any]) -> list[Any]:
        flat = flat_outputs_of(sample)
        unit = (tf.one_hot(j, rows, dtype=flat.dtype) for j in range(rows))
        return [tf.stack(list(parts)) for parts in zip(*(row(flat, seed) for seed in unit), strict=True)]

    if seeds is None and rows > UNROLLED_ROWS:
        seeds = tf.range(rows)
    if seeds is None:
        found = _each(every_row, list(x), trace, wanted)
        return [tf.reshape(d, [-1, rows, size]) for d, size in zip(found, sizes, strict=True)]
    q = tf.shape(seeds)[0]

    def one_row(pair: Any) -> list[Any]:
        sample, i = pair // q, pair % q
        seed = tf.one_hot(seeds[i], rows) if seeds.dtype.is_integer else seeds[i, sample]
        return row(flat_outputs_of([leaf[sample] for leaf in x]), seed)

    found = _each(one_row, tf.range(tf.shape(x[0])[0] * q), trace, wanted)
    return [tf.reshape(d, [-1, q, size]) for d, size in zip(found, sizes, strict=True)]


def _each(function: Callable[[Any], list[Any]], items: Any, trace: Trace, wanted: Sequence[Any]) -> list[Any]:
    """``function`` of every item, stacked: vectorised where TensorFlow can."""
    # TensorFlow's vectoriser stumbles over the derivatives of loops, over sizes that values decide,
    if not (trace.program.has_control_flow or trace.program.picks_rows):
        with suppress(ValueError, TypeError, NotImplementedError):  # and over some other operations
            vectorised: list[Any] = vectorized_map(function, items)
            return vectorised
    looped: list[Any] = tf.map_fn(function, items, fn_output_signature=[w.dtype for w in wanted])
    return looped
