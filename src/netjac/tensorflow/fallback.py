"""Per-sample differentiation, for the variables that no rule covers: exact, and as dear as it sounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from netjac.tensorflow.trace import Trace


def per_sample(trace: Trace, theta: Sequence[Any], x: Sequence[Any], variables: Sequence[int]) -> list[Any]:
    """d outputs / d variable for each sample alone: one (n, l, size) a variable.

    The program is inserted for one sample and its l rows are differentiated one by one; samples are vectorised where
    TensorFlow can, and looped over otherwise.
    """
    wanted = [theta[i] for i in variables]
    sizes = [trace.parameters.segments[i].size for i in variables]
    outputs = trace.program.outputs
    rows = trace.output_space.size

    def one(sample: Sequence[Any]) -> list[Any]:
        ys = trace.program.insert(theta, [leaf[None] for leaf in sample], outputs)
        flat = tf.concat([tf.reshape(y, [-1]) for y in ys], axis=0)

        def row(j: Any) -> list[Any]:
            gradients = tf.gradients(flat, wanted, grad_ys=tf.one_hot(j, rows, dtype=flat.dtype))
            return [
                tf.zeros([size], w.dtype) if d is None else tf.reshape(tf.convert_to_tensor(d), [size])
                for d, w, size in zip(gradients, wanted, sizes, strict=True)
            ]

        return [tf.stack(list(parts)) for parts in zip(*(row(j) for j in range(rows)), strict=True)]

    samples = list(x)
    found = None
    if not trace.program.has_control_flow:  # TensorFlow's vectoriser stumbles over the derivatives of loops
        with suppress(ValueError, TypeError, NotImplementedError):  # and of some other operations
            found = tf.vectorized_map(one, samples)
    if found is None:
        found = tf.map_fn(one, samples, fn_output_signature=[w.dtype for w in wanted])
    return [tf.reshape(d, [-1, rows, size]) for d, size in zip(found, sizes, strict=True)]
