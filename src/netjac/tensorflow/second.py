"""Second derivatives of a traced network times a vector, by two backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.errors import ModelError
from netjac.tensorflow.trace import Trace, flat_outputs, vector_specs, weights


class SecondProduct:
    """Σ u[n, l] ∇²y[n, l] v as a compiled function of (θ, u, v, x), exact where TensorFlow's second derivatives are.

    Parameters
    ----------
    trace
        The network.
    """

    def __init__(self, trace: Trace) -> None:
        vector, *inputs = vector_specs(trace)
        self._dtype = vector.dtype

        def product(theta: Any, u: Any, v: Any, *x: Any) -> Any:
            program = trace.program
            y = flat_outputs(program.insert(weights(theta, trace), x, program.outputs), trace)
            gradient = tf.gradients(tf.reduce_sum(tf.cast(u, y.dtype) * y), theta)[0]
            second = None if gradient is None else tf.gradients(tf.tensordot(gradient, v, 1), theta)[0]
            return tf.zeros_like(theta) if second is None else second

        seeds = tf.TensorSpec((None, trace.output_space.size), vector.dtype)
        try:
            self._compiled = tf.function(product, autograph=False).get_concrete_function(vector, seeds, vector, *inputs)
        except (LookupError, NotImplementedError) as error:
            raise ModelError(
                f"TensorFlow has no second derivative of this network ({error}): use curvature='difference'."
            ) from error

    def __call__(self, theta: NDArray[Any], u: NDArray[Any], v: NDArray[Any], x: Sequence[Any]) -> NDArray[np.float64]:
        """The product (m,), for θ (m,), u (n, l), v (m,) and the tensors x."""
        given = (tf.constant(array, self._dtype) for array in (theta, u, v))
        return np.asarray(self._compiled(*given, *x)).astype(np.float64)
