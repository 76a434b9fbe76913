"""netjac on data of any size, read from files in the folder `DATA`; and what it is compared with.

What does not grow with n (tracing, the probe, starting threads) is done beforehand, on a few samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import netjac as nj
from benchmarks import networks
from benchmarks.frameworks.keras_models import build
from benchmarks.task import Prepared, Task

PACKAGES = ("netjac", "tensorflow", "tensorflow_cpu", "keras", "numpy", "scipy")
DATA = "NETJAC_BENCHMARK_DATA"  # variable with the folder of x-N.npy (n, *input shape) and u-N.npy (n, l)
MEMORY = "256 MiB"
FEW = 1000
CHUNK = 10_000


class _Setting:
    """The model, its data as memory maps, and the v and u of products."""

    def __init__(self, task: Task, dtype: str = "float32") -> None:
        folder = Path(os.environ[DATA])
        self.model = build(task.network, dtype)
        self.x, self.u = (np.load(folder / f"{name}-{task.n}.npy", mmap_mode="r") for name in ("x", "u"))
        self.v = networks.direction(nj.parameters(self.model).size)

    def prepared(self, work: Callable[[Any, Any], Any], check: Callable[[Any], dict[str, NDArray[Any]]]) -> Prepared:
        """``work(x, u)``, done once on a few samples now."""
        work(self.x[:FEW], self.u[:FEW])
        return Prepared(lambda: work(self.x, self.u), check)


def stream(task: Task, normal: bool) -> Prepared:
    """``nj.stream``: Jᵀ u, and Jᵀ J if ``normal``, in one pass."""
    setting = _Setting(task)

    def work(x: Any, u: Any) -> Any:
        return nj.stream(setting.model, x, memory=MEMORY, progress=False).reduce(normal=normal, adjoint=u)

    def check(found: Any) -> dict[str, NDArray[Any]]:
        arrays = {"vjp": found.adjoint}
        return arrays | {"normal v": found.normal @ setting.v} if normal else arrays

    return setting.prepared(work, check)


def product(task: Task, adjoint: bool) -> Prepared:
    """``nj.jacobian`` within a budget, and J v or Jᵀ u with it."""
    setting = _Setting(task)

    def work(x: Any, u: Any) -> Any:
        J = nj.jacobian(setting.model, x, memory=MEMORY, progress=False)
        return J.T @ np.asarray(u).ravel() if adjoint else J @ setting.v

    def check(found: Any) -> dict[str, NDArray[Any]]:
        return {"vjp": found} if adjoint else {"jvp": found.reshape(task.n, -1)}

    return setting.prepared(work, check)


def factored(task: Task) -> Prepared:
    """``nj.jacobian`` without a budget of one's own: all factors are held."""
    setting = _Setting(task)

    def check(J: Any) -> dict[str, NDArray[Any]]:
        return {"vjp": J.T @ np.asarray(setting.u).ravel(), "jvp": (J @ setting.v).reshape(task.n, -1)}

    return setting.prepared(lambda x, _: nj.jacobian(setting.model, x), check)


def reference(task: Task) -> Prepared:
    """Products in float64 by TensorFlow, some samples at a time."""
    setting = _Setting(task, "float64")
    variables = [variable.value for variable in setting.model.trainable_variables]
    sizes = [variable.shape.num_elements() for variable in variables]
    parts = np.split(setting.v.astype(np.float64), np.cumsum(sizes)[:-1])
    v = [tf.constant(part.reshape(variable.shape)) for part, variable in zip(parts, variables, strict=True)]

    @tf.function(reduce_retracing=True)
    def products(x: Any, u: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(variables, v) as forward, tf.GradientTape(persistent=True) as tape:
            y = setting.model(x, training=False)
        jv = forward.jvp(y)
        return jv, *(
            tf.concat([tf.reshape(g, [-1]) for g in tape.gradient(y, variables, output_gradients=w)], 0)
            for w in (u, jv)
        )

    def check(_: Any) -> dict[str, NDArray[Any]]:
        jvp, vjp, normal = [], 0.0, 0.0
        for start in range(0, task.n, CHUNK):
            x, u = (tf.constant(np.float64(data[start : start + CHUNK])) for data in (setting.x, setting.u))
            found = products(x, u)
            jvp.append(found[0].numpy())
            vjp, normal = vjp + found[1].numpy(), normal + found[2].numpy()
        return {"jvp": np.concatenate(jvp), "vjp": np.asarray(vjp), "normal v": np.asarray(normal)}

    return Prepared(lambda: None, check)


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "stream-normal": partial(stream, normal=True),
    "stream-adjoint": partial(stream, normal=False),
    "budget-jvp": partial(product, adjoint=False),
    "budget-vjp": partial(product, adjoint=True),
    "factored": factored,
    "reference": reference,
}
