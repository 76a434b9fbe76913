"""Whole applications of Keras: their Jacobians by netjac, and in each way TensorFlow has.

Networks have no pretrained weights, small images and a head of three outputs; they run in inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from benchmarks.task import Prepared, Task

PACKAGES = ("netjac", "tensorflow", "tensorflow_cpu", "keras", "numpy", "scipy")
SIZES = {name: 32 for name in ("MobileNetV2", "EfficientNetB0", "ResNet50", "DenseNet121", "ConvNeXtTiny")}
SIZES["Xception"] = 71  # the smallest it takes
OUTPUTS = 3


def build(name: str) -> Any:
    """The network; offsets and statistics away from zero and one, which would hide errors."""
    keras.utils.set_random_seed(0)
    size = SIZES[name]
    model = getattr(keras.applications, name)(
        input_shape=(size, size, 3), weights=None, classes=OUTPUTS, classifier_activation=None
    )
    rng = np.random.default_rng(1)
    for variable in model.variables:
        path = variable.path
        if "moving_variance" in path:
            variable.assign(rng.uniform(0.8, 1.2, variable.shape))
        elif "layer_scale" in path or path.endswith("/variable"):
            variable.assign(rng.uniform(0.5, 1.0, variable.shape))
        elif len(variable.shape) == 1:
            variable.assign(variable.numpy() + 0.1 * rng.uniform(-1, 1, variable.shape))
    return model


def images(name: str, n: int) -> NDArray[np.float32]:
    """The batch (n, size, size, 3)."""
    size = SIZES[name]
    return np.random.default_rng(0).uniform(0, 1, (n, size, size, 3)).astype(np.float32)


def _rows(blocks: Sequence[Any]) -> NDArray[Any]:
    """Blocks (l, *shape) of one sample as (l, m)."""
    return np.concatenate([np.asarray(block).reshape(OUTPUTS, -1) for block in blocks], axis=1)


def netjac(task: Task, dense: bool = False) -> Prepared:
    """``nj.jacobian(model, x)``; all its entries in one matrix, if ``dense``."""
    model, x = build(task.network_name), images(task.network_name, task.n)

    def run() -> Any:
        import netjac as nj

        jacobian = nj.jacobian(model, x)
        return jacobian, jacobian.to_array() if dense else None

    def check(result: Any) -> dict[str, NDArray[Any]]:
        jacobian, array = result
        last = array[-OUTPUTS:] if dense else jacobian[[task.n - 1]].to_array()
        return {"y": np.asarray(jacobian.outputs), "jacobian": last}

    def held(result: Any) -> int:
        return int(result[1].nbytes if dense else result[0].nbytes)

    return Prepared(run, check, held)


class _Network:
    """A network, its batch, and the Jacobian of one sample or of all as TensorFlow functions."""

    def __init__(self, task: Task) -> None:
        self.model = build(task.network_name)
        self.variables = [variable.value for variable in self.model.trainable_variables]
        self.x = tf.constant(images(task.network_name, task.n))

    def gradients(self, sample: Any) -> Any:
        """Outputs (l,) and blocks (l, *shape) of one sample: a gradient for each output."""
        with tf.GradientTape(persistent=True) as tape:
            y = self.model(sample[None], training=False)[0]
            outputs = tf.unstack(y, num=OUTPUTS)
        rows = [tape.gradient(output, self.variables) for output in outputs]
        return y, [tf.stack([tf.convert_to_tensor(part) for part in column]) for column in zip(*rows, strict=True)]

    def jacobian(self, x: Any, vectorised: bool = True) -> Any:
        """Outputs and blocks of all samples by ``tape.jacobian``: (n, l) and (n, l, *shape)."""
        with tf.GradientTape() as tape:
            y = self.model(x, training=False)
        return y, tape.jacobian(y, self.variables, experimental_use_pfor=vectorised)

    def sample(self, sample: Any) -> Any:
        """As `gradients`, by ``tape.jacobian``."""
        y, blocks = self.jacobian(sample[None])
        return y[0], [block[0] for block in blocks]


def whole(task: Task, function: Callable[[_Network, Any], Any], xla: bool = False) -> Prepared:
    """One call for the batch."""
    network = _Network(task)
    compiled = tf.function(partial(function, network), jit_compile=xla)

    def check(result: Any) -> dict[str, NDArray[Any]]:
        y, blocks = result
        return {"y": y.numpy(), "jacobian": _rows([block[-1] for block in blocks])}

    return Prepared(lambda: compiled(network.x), check, lambda result: _bytes(result[1]))


def one_by_one(task: Task, function: Callable[[_Network, Any], Any], xla: bool = False) -> Prepared:
    """One call a sample."""
    network = _Network(task)
    compiled = tf.function(partial(function, network), jit_compile=xla)

    def check(results: Any) -> dict[str, NDArray[Any]]:
        return {"y": np.stack([y.numpy() for y, _ in results]), "jacobian": _rows(results[-1][1])}

    return Prepared(
        lambda: [compiled(sample) for sample in network.x],
        check,
        lambda results: sum(_bytes(blocks) for _, blocks in results),
    )


def _bytes(blocks: Sequence[Any]) -> int:
    return sum(block.shape.num_elements() * block.dtype.size for block in blocks)


def reference(task: Task) -> Prepared:
    """Float64 outputs of all samples, and the rows of the last: one gradient after the other."""
    single = build(task.network_name)
    weights = {variable.path: variable.numpy() for variable in single.variables}
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    network = _Network(task)
    for variable, value in zip(network.model.variables, weights.values(), strict=True):
        variable.assign(value)
    x = tf.cast(network.x, tf.float64)

    def check(_: Any) -> dict[str, NDArray[Any]]:
        _, blocks = tf.function(network.gradients)(x[-1])
        return {"y": network.model(x, training=False).numpy(), "jacobian": _rows(blocks)}

    return Prepared(lambda: None, check)


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "netjac": netjac,
    "netjac-dense": partial(netjac, dense=True),
    "tape": partial(whole, function=_Network.jacobian),
    "tape-loop": partial(whole, function=partial(_Network.jacobian, vectorised=False)),
    "samples": partial(one_by_one, function=_Network.gradients),
    "samples-xla": partial(one_by_one, function=_Network.gradients, xla=True),
    "samples-tape": partial(one_by_one, function=_Network.sample),
    "vectorized": partial(whole, function=lambda net, x: tf.vectorized_map(net.gradients, x)),
    "vectorized-xla": partial(whole, function=lambda net, x: tf.vectorized_map(net.gradients, x), xla=True),
    "reference": reference,
}
