"""What everything is compared with: float64, one sample after the other, ``tape.jacobian`` without vectorisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.frameworks.keras_models import build
from benchmarks.task import Prepared, Task

PACKAGES = ("tensorflow", "tensorflow_cpu", "keras", "numpy")


def _reference(task: Task, products: bool) -> Prepared:
    network, n = task.network, task.n
    model = build(network, "float64")
    variables = [variable.value for variable in model.trainable_variables]
    x = networks.inputs(network, n).astype(np.float64)

    @tf.function(reduce_retracing=True)
    def one(sample: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(sample[None], training=False)[0]
        blocks = tape.jacobian(y, variables, unconnected_gradients="zero", experimental_use_pfor=False)
        return tf.concat([tf.reshape(block, (network.outputs, -1)) for block in blocks], axis=1)

    def rows(samples: Iterable[int]) -> Iterable[NDArray[np.float64]]:
        return (one(tf.constant(x[i])).numpy() for i in samples)

    def check(_: Any) -> dict[str, NDArray[Any]]:
        y = model(x, training=False).numpy()
        arrays = {"y": y, "jacobian": np.stack(list(rows(task.samples)))}
        if products:
            m = arrays["jacobian"].shape[2]
            v, u = networks.direction(m).astype(np.float64), networks.cotangent(network, n).astype(np.float64)
            arrays["jvp"], arrays["vjp"] = np.empty((n, network.outputs)), np.zeros(m)
            for i, block in enumerate(rows(range(n))):
                arrays["jvp"][i] = block @ v
                arrays["vjp"] += u[i] @ block
        arrays["residual"] = (y - networks.targets(network, n)).ravel()
        return arrays

    return Prepared(lambda: None, check)


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "jacobian": lambda task: _reference(task, products=False),
    "products": lambda task: _reference(task, products=True),
}
