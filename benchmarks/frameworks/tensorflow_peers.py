"""TensorFlow's own ways to a Jacobian and to products with it, each as a compiled function of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.frameworks.gram import by_tiles, prepared
from benchmarks.frameworks.keras_models import build
from benchmarks.task import Prepared, Task

PACKAGES = ("tensorflow", "tensorflow_cpu", "keras", "numpy")


class _Setting:
    """The model, its variables and the batch of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = build(task.network)
        self.variables = [variable.value for variable in self.model.trainable_variables]
        self.x = tf.constant(networks.inputs(task.network, task.n))

    def split(self, vector: NDArray[Any]) -> list[Any]:
        """A vector (m,) as one tensor a variable."""
        sizes = [variable.shape.num_elements() for variable in self.variables]
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        return [tf.constant(part.reshape(v.shape)) for part, v in zip(parts, self.variables, strict=True)]


def _check(task: Task, result: Any) -> dict[str, NDArray[Any]]:
    """Outputs, and the compared samples of the blocks (n, l, *shape) side by side."""
    y, blocks = result
    index = list(task.samples)
    shape = (len(index), task.network.outputs, -1)
    parts = [tf.gather(block, index).numpy().reshape(shape) for block in blocks]
    return {"y": y.numpy(), "jacobian": np.concatenate(parts, axis=2)}


def _side_by_side(y: Any, blocks: list[Any]) -> Any:
    """The blocks (n, l, *shape) as one matrix (n, l, m)."""
    n, l = tf.shape(y)[0], y.shape[-1]
    return tf.concat([tf.reshape(block, (n, l, -1)) for block in blocks], axis=2)


def _jacobian(setting: _Setting, function: Callable[[Any], Any], matrix: bool, xla: bool) -> Prepared:
    def work(x: Any) -> Any:
        y, blocks = function(x)
        return (y, [_side_by_side(y, blocks)]) if matrix else (y, blocks)

    compiled = tf.function(work, jit_compile=xla)

    def held(result: Any) -> int:
        return sum(block.shape.num_elements() * block.dtype.size for block in result[1])

    return Prepared(lambda: compiled(setting.x), partial(_check, setting.task), held)


def tape(task: Task, matrix: bool = False) -> Prepared:
    """``tape.jacobian`` of the whole batch, as the documentation shows it."""
    setting = _Setting(task)
    l = task.network.outputs

    def function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = setting.model(x, training=False)
            # with respect to the parameters every row of the batch is an output of its own: (n, l, *shape)
        return tf.reshape(y, (-1, l)), tape.jacobian(y, setting.variables, unconnected_gradients="zero")

    return _jacobian(setting, function, matrix, xla=False)


def vectorized(task: Task, xla: bool, matrix: bool = False, nested: bool = False) -> Prepared:
    """``vectorized_map`` of one sample's Jacobian: l gradients in turn, or ``tape.jacobian`` if nested."""
    setting = _Setting(task)
    one = _one_sample(setting, nested)
    return _jacobian(setting, lambda x: tf.vectorized_map(one, x), matrix, xla)


def _one_sample(setting: _Setting, nested: bool) -> Callable[[Any], Any]:
    """Outputs (l,) and Jacobian, one array (l, *shape) a weight, of one sample."""
    model, variables, l = setting.model, setting.variables, setting.task.network.outputs

    def one(sample: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = model(sample[None], training=False)[0]
            outputs = tf.unstack(y, num=l)
        if nested:
            return y, tape.jacobian(y, variables, unconnected_gradients="zero")
        rows = [tape.gradient(output, variables, unconnected_gradients="zero") for output in outputs]
        return y, [tf.stack(column) for column in zip(*rows, strict=True)]

    return one


def gram(task: Task) -> Prepared:
    """J Jᵀ from explicit rows: ``vectorized_map`` with XLA of some samples, then one product a weight."""
    setting = _Setting(task)
    one = _one_sample(setting, nested=False)

    @tf.function(jit_compile=True)
    def rows(x: Any) -> Any:
        y, blocks = tf.vectorized_map(one, x)
        return y, [
            tf.reshape(block, (-1, w.shape.num_elements())) for block, w in zip(blocks, setting.variables, strict=True)
        ]

    @tf.function
    def multiply(a: Any, b: Any) -> Any:
        return tf.add_n([tf.matmul(left, right, transpose_b=True) for left, right in zip(a, b, strict=True)])

    return prepared(task, lambda: by_tiles(task, lambda samples: rows(setting.x[samples]), multiply))


def _product(setting: _Setting, function: Callable[[], Any], name: str, xla: bool) -> Prepared:
    compiled = tf.function(function, jit_compile=xla)

    def check(result: Any) -> dict[str, NDArray[Any]]:
        if name == "jvp":
            return {"jvp": result.numpy()}
        return {"vjp": np.concatenate([part.numpy().ravel() for part in result])}

    return Prepared(compiled, check)


def jvp(task: Task, xla: bool, twice_reverse: bool = False) -> Prepared:
    """J v by forward accumulation, or as the derivative of Jᵀ u with respect to u."""
    setting = _Setting(task)
    m = sum(variable.shape.num_elements() for variable in setting.variables)
    v = setting.split(networks.direction(m))

    def forward() -> Any:
        with tf.autodiff.ForwardAccumulator(setting.variables, v) as accumulator:
            y = setting.model(setting.x, training=False)
        return accumulator.jvp(y)

    def twice() -> Any:
        u = tf.zeros((task.n, task.network.outputs))
        with tf.GradientTape() as outer:
            outer.watch(u)
            with tf.GradientTape() as inner:
                y = setting.model(setting.x, training=False)
            gradient = inner.gradient(y, setting.variables, output_gradients=u)
        return outer.gradient(gradient, u, output_gradients=v)

    return _product(setting, twice if twice_reverse else forward, "jvp", xla)


def vjp(task: Task, xla: bool) -> Prepared:
    """Jᵀ u by one reverse pass."""
    setting = _Setting(task)
    u = tf.constant(networks.cotangent(task.network, task.n))

    def function() -> Any:
        with tf.GradientTape() as tape:
            y = setting.model(setting.x, training=False)
        return tape.gradient(y, setting.variables, output_gradients=u, unconnected_gradients="zero")

    return _product(setting, function, "vjp", xla)


def forward(task: Task) -> Prepared:
    """The outputs alone."""
    setting = _Setting(task)
    compiled = tf.function(lambda x: setting.model(x, training=False))
    return Prepared(lambda: compiled(setting.x), lambda y: {"y": y.numpy()})


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "tape": tape,
    "tape-matrix": partial(tape, matrix=True),
    "vectorized": partial(vectorized, xla=False),
    "vectorized-nested": partial(vectorized, xla=False, nested=True),
    "vectorized-nested-matrix": partial(vectorized, xla=False, nested=True, matrix=True),
    "vectorized-matrix": partial(vectorized, xla=False, matrix=True),
    "xla": partial(vectorized, xla=True),
    "xla-nested": partial(vectorized, xla=True, nested=True),
    "xla-matrix": partial(vectorized, xla=True, matrix=True),
    "jvp-forward": partial(jvp, xla=False),
    "jvp-twice": partial(jvp, xla=False, twice_reverse=True),
    "jvp-forward-xla": partial(jvp, xla=True),
    "jvp-twice-xla": partial(jvp, xla=True, twice_reverse=True),
    "vjp": partial(vjp, xla=False),
    "vjp-xla": partial(vjp, xla=True),
    "forward": forward,
    "gram": gram,
}
