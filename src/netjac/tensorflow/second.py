"""Second derivatives of a traced network times a vector, by two backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.errors import DtypeError, ModelError, ProbeError
from netjac.tensorflow.trace import Trace, flat_outputs, vector_specs, weights

STEPS = (1e-5, 1e-7)
TOLERANCE = 1e-3
"""Steps of the difference that a product is compared with, and by how much it may be off at the better one."""


class SecondProduct:
    """Σ u[n, l] ∇²y[n, l] v as a compiled function of (θ, u, v, x), exact where TensorFlow's second derivatives are.

    Parameters
    ----------
    trace
        The network, in float64.

    Raises
    ------
    DtypeError, ModelError
        If it is in another type, or an operation has no second derivative.
    """

    def __init__(self, trace: Trace) -> None:
        vector, *inputs = vector_specs(trace)
        if vector.dtype != tf.float64:
            raise DtypeError(
                "second derivatives are taken, and compared with differences, in float64: use dtype='float64'."
            )
        self._outputs = trace.output_space.size

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
        given = (tf.constant(array, tf.float64) for array in (theta, u, v))
        return np.asarray(self._compiled(*given, *x)).astype(np.float64)

    def check(
        self,
        theta: NDArray[np.float64],
        x: Sequence[Any],
        gradient: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[Any]],
    ) -> None:
        """Compare one product in random directions with differences of Jᵀ u, which ``gradient`` gives of θ and u.

        A little beside θ: weights of exactly zero, as biases start, put samples on the kinks of a network.
        """
        rng = np.random.default_rng(0)
        theta = theta + 0.01 * (1 + np.abs(theta)) * rng.normal(size=theta.shape)
        u = rng.normal(size=(len(x[0]), self._outputs))
        v = rng.normal(size=theta.shape)
        product = self(theta, u, v, x)
        errors = []
        for step in STEPS:
            ahead, behind = (gradient(theta + side * step * v, u.reshape(-1)) for side in (1, -1))
            difference = (np.asarray(ahead, np.float64) - behind) / (2 * step)
            size = max(float(np.linalg.norm(difference)), float(np.linalg.norm(product)))
            noise = np.finfo(np.float64).eps * float(np.linalg.norm(ahead)) / step
            errors.append(max(float(np.linalg.norm(product - difference)) - noise, 0.0) / (size or 1.0))
        if min(errors) > TOLERANCE:
            raise ProbeError(
                f"TensorFlow's second derivatives of this network disagree with a difference of its first ones by "
                f"{min(errors):.1e}, as they do where an operation holds a mean or a variance fixed "
                "(LayerNormalization): use curvature='difference'."
            )
