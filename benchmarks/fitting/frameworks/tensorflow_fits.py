"""TensorFlow: tf-levenberg-marquardt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from numpy.typing import NDArray
from tf_levenberg_marquardt.training import Trainer

from benchmarks.fitting.task import FitTask, Goal, PreparedFit, Watch
from benchmarks.frameworks.keras_models import build

PACKAGES = ("tensorflow_cpu", "keras", "tf-levenberg-marquardt", "numpy")


def levenberg(task: FitTask, solve: str) -> PreparedFit:
    """``Trainer.train_step`` on the whole batch; ``solve`` is its ``solve_method``."""
    from tf_levenberg_marquardt.loss import MeanSquaredError

    keras.config.set_floatx(task.dtype)  # the trainer goes by it
    keras.config.set_dtype_policy(task.dtype)
    x, y, start = task.load()
    inputs, targets = tf.constant(x), tf.constant(y)
    model = build(task.network, task.dtype)
    sgd = keras.optimizers.SGD(learning_rate=1.0)
    trainer = Trainer(model, optimizer=sgd, loss=MeanSquaredError(), solve_method=solve)

    def begin() -> None:
        for variable, value in zip(model.trainable_variables, start.values(), strict=True):
            variable.assign(value)
        trainer.backup_variables()
        trainer.reset_damping_factor()

    def outputs() -> NDArray[Any]:
        begin()
        return model(inputs).numpy()

    def fit(goal: Goal) -> Watch:
        begin()
        watch = Watch(goal)
        stopped = False
        while not (watch.ended or stopped):
            loss, _, attempts, stopped = trainer.train_step(inputs, targets)
            watch.steps += 1
            watch.evaluations += 1 + int(attempts)
            watch.over(float(loss))
        watch.ended = watch.ended or "stopped by itself: its damping reached the maximum"
        return watch

    def weights() -> dict[str, NDArray[Any]]:
        return {name: variable.numpy() for name, variable in zip(start, model.trainable_variables, strict=True)}

    return PreparedFit(fit, outputs, weights)


CONTENDERS: dict[str, Callable[[FitTask], PreparedFit]] = {
    "qr": partial(levenberg, solve="qr"),
    "cholesky": partial(levenberg, solve="cholesky"),
}
