"""A model's derivative with respect to its inputs, as a model of the same variables: netjac differentiates it again."""

from __future__ import annotations

from typing import Any, final

import tensorflow as tf

from netjac.tensorflow.trace import caller


@final
class InputSlopes:
    """x (n, *shape) → ∂y[n, l] / ∂x[n, *shape], (n, l, *shape).

    Parameters
    ----------
    model
        As for `netjac.jacobian`, of one input.
    """

    def __init__(self, model: Any) -> None:
        self._call = caller(model)

    def __call__(self, x: Any) -> Any:
        """The derivative (n, l, *shape)."""
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            outputs = tf.nest.flatten(self._call(x))
            columns = [column for y in outputs for column in tf.unstack(_flat(y), axis=1)]
        zero = tf.UnconnectedGradients.ZERO
        return tf.stack([tape.gradient(column, x, unconnected_gradients=zero) for column in columns], axis=1)


def _flat(y: Any) -> Any:
    """One row a sample."""
    return tf.reshape(y, [tf.shape(y)[0], tf.TensorShape(y.shape[1:]).num_elements()])
