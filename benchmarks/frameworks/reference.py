"""What everything is compared with: float64, one sample after the other, ``tape.jacobian`` without vectorisation.

Where a whole Jacobian of each sample would take minutes, one product with it a sample: forward or reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.frameworks.keras_models import build
from benchmarks.task import Prepared, Task

PACKAGES = ("tensorflow", "tensorflow_cpu", "keras", "numpy")


class _Samples:
    """The network in double precision, one sample at a time."""

    def __init__(self, task: Task) -> None:
        self.task, self.network = task, task.network
        self.model = build(task.network, "float64")
        self.variables = [variable.value for variable in self.model.trainable_variables]
        self.x = networks.inputs(task.network, task.n).astype(np.float64)

        @tf.function(reduce_retracing=True)
        def jacobian(sample: Any) -> Any:
            with tf.GradientTape() as tape:
                y = self.model(sample[None], training=False)[0]
            blocks = tape.jacobian(y, self.variables, unconnected_gradients="zero", experimental_use_pfor=False)
            return tf.concat([tf.reshape(block, (self.network.outputs, -1)) for block in blocks], axis=1)

        @tf.function(reduce_retracing=True)
        def forward(sample: Any, tangents: Any) -> Any:
            with tf.autodiff.ForwardAccumulator(self.variables, tangents) as accumulator:
                y = self.model(sample[None], training=False)
            return accumulator.jvp(y)[0]

        @tf.function(reduce_retracing=True)
        def reverse(sample: Any, u: Any) -> Any:
            with tf.GradientTape() as tape:
                y = self.model(sample[None], training=False)[0]
            return tape.gradient(y, self.variables, output_gradients=u, unconnected_gradients="zero")

        self._jacobian, self._forward, self._reverse = jacobian, forward, reverse

    def outputs(self) -> NDArray[np.float64]:
        """y (n, l)."""
        return self.model(self.x, training=False).numpy()

    def jacobians(self, samples: Iterable[int]) -> Iterable[NDArray[np.float64]]:
        """J[i] (l, m)."""
        return (self._jacobian(tf.constant(self.x[i])).numpy() for i in samples)

    def jvp(self, v: NDArray[np.float64]) -> NDArray[np.float64]:
        """J v (n, l), for v (m,)."""
        sizes = [variable.shape.num_elements() for variable in self.variables]
        parts = np.split(v, np.cumsum(sizes)[:-1])
        tangents = [tf.constant(part.reshape(w.shape)) for part, w in zip(parts, self.variables, strict=True)]
        return np.stack([self._forward(tf.constant(sample), tangents).numpy() for sample in self.x])

    def vjp(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Jᵀ u (m,), for u (n, l)."""
        total = [np.zeros(variable.shape) for variable in self.variables]
        for sample, cotangent in zip(self.x, u, strict=True):
            for sum_, part in zip(total, self._reverse(tf.constant(sample), tf.constant(cotangent)), strict=True):
                sum_ += part.numpy()
        return np.concatenate([part.ravel() for part in total])


def _jacobian(task: Task, products: bool) -> Prepared:
    """Explicit rows of the compared samples; for products, of all of them in turn."""
    network, n = task.network, task.n
    samples = _Samples(task)

    def check(_: Any) -> dict[str, NDArray[Any]]:
        y = samples.outputs()
        arrays = {"y": y, "jacobian": np.stack(list(samples.jacobians(task.samples)))}
        if products:
            m = arrays["jacobian"].shape[2]
            v, u = networks.direction(m).astype(np.float64), networks.cotangent(network, n).astype(np.float64)
            arrays["jvp"], arrays["vjp"] = np.empty((n, network.outputs)), np.zeros(m)
            for i, block in enumerate(samples.jacobians(range(n))):
                arrays["jvp"][i] = block @ v
                arrays["vjp"] += u[i] @ block
        arrays["residual"] = (y - networks.targets(network, n)).ravel()
        return arrays

    return Prepared(lambda: None, check)


def _gram(task: Task) -> Prepared:
    """J Jᵀ of the compared samples (s·l, s·l), from their explicit rows: nothing larger than these is ever held."""
    samples = _Samples(task)

    def check(_: Any) -> dict[str, NDArray[Any]]:
        l = task.network.outputs
        rows: NDArray[np.float64] | None = None
        for i, block in enumerate(samples.jacobians(task.samples)):
            if rows is None:
                rows = np.empty((len(task.samples) * l, block.shape[1]))
            rows[i * l : (i + 1) * l] = block
        assert rows is not None
        return {"y": samples.outputs(), "gram": rows @ rows.T}

    return Prepared(lambda: None, check)


def _tangent(task: Task) -> Prepared:
    """J v, Jᵀ u and what is made of them, by one forward or reverse pass a sample; J itself would take minutes."""
    samples = _Samples(task)

    def check(_: Any) -> dict[str, NDArray[Any]]:
        m = sum(variable.shape.num_elements() for variable in samples.variables)
        jvp = samples.jvp(networks.direction(m).astype(np.float64))
        vjp = samples.vjp(networks.cotangent(task.network, task.n).astype(np.float64))
        return {
            "y": samples.outputs(),
            "jvp": jvp,
            "vjp": vjp,
            "kernel": samples.jvp(vjp),
            "normal": samples.vjp(jvp),
            "centred": samples.vjp(jvp - jvp.mean()),
        }

    return Prepared(lambda: None, check)


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "jacobian": partial(_jacobian, products=False),
    "products": partial(_jacobian, products=True),
    "gram": _gram,
    "tangent": _tangent,
}
