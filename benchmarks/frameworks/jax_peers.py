"""JAX: ``jit(vmap(jacrev))``, and its products. Weights keep Keras's shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.networks import HEADS, NORM_EPSILON, WIDTH, Network
from benchmarks.task import Prepared, Task

PACKAGES = ("jax", "jaxlib", "numpy")

Weights = dict[str, Any]


def _mlp(w: Weights, x: Any) -> Any:
    last = len(w) // 2 - 1
    for i in range(last):
        x = jnp.tanh(x @ w[f"dense{i}/kernel"] + w[f"dense{i}/bias"])
    return x @ w[f"dense{last}/kernel"] + w[f"dense{last}/bias"]


def _cnn(w: Weights, x: Any) -> Any:
    for name in ("conv0", "conv1"):
        kernel = w[f"{name}/kernel"]
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + w[f"{name}/bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.reshape(x.shape[0], -1) @ w["dense/kernel"] + w["dense/bias"]


def _norm(w: Weights, name: str, x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + NORM_EPSILON) * w[f"{name}/gamma"] + w[f"{name}/beta"]


def _transformer(w: Weights, x: Any) -> Any:
    h = _norm(w, "norm0", x)
    q, k, v = (
        jnp.einsum("ntw,whd->nhtd", h, w[f"{name}/kernel"]) + w[f"{name}/bias"][:, None, :]
        for name in ("query", "key", "value")
    )
    attention = jax.nn.softmax(jnp.einsum("nhtd,nhsd->nhts", q, k) / (WIDTH // HEADS) ** 0.5)
    mixed = jnp.einsum("nhts,nhsd->nthd", attention, v)
    x = x + jnp.einsum("nthd,hdw->ntw", mixed, w["output/kernel"]) + w["output/bias"]
    h = _norm(w, "norm1", x)
    h = jax.nn.gelu(h @ w["dense0/kernel"] + w["dense0/bias"], approximate=False)
    x = x + h @ w["dense1/kernel"] + w["dense1/bias"]
    return x.mean(axis=1) @ w["dense2/kernel"] + w["dense2/bias"]


def _function(network: Network) -> Callable[[Weights, Any], Any]:
    return {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}[network.kind]


class _Setting:
    def __init__(self, task: Task) -> None:
        self.weights = {name: jnp.asarray(value) for name, value in networks.weights(task.network).items()}
        self.x = jnp.asarray(networks.inputs(task.network, task.n))
        self.function = _function(task.network)

    def split(self, vector: NDArray[Any]) -> Weights:
        parts = np.split(vector, np.cumsum([weight.size for weight in self.weights.values()])[:-1])
        named = zip(self.weights.items(), parts, strict=True)
        return {name: jnp.asarray(part.reshape(weight.shape)) for (name, weight), part in named}


def jacobian(task: Task, matrix: bool) -> Prepared:
    """``jit(vmap(jacrev))``."""
    setting = _Setting(task)

    def one(weights: Weights, sample: Any) -> Any:
        y = setting.function(weights, sample[None])[0]
        return y, y

    @jax.jit
    def derivative(weights: Weights, x: Any) -> Any:
        named, y = jax.vmap(jax.jacrev(one, has_aux=True), in_axes=(None, 0))(weights, x)
        # JAX sorts the keys of a dict; the weights' own order is Keras's
        blocks = [named[name] for name in setting.weights]
        return y, [jnp.concatenate([b.reshape(*b.shape[:2], -1) for b in blocks], axis=2)] if matrix else blocks

    def check(result: Any) -> dict[str, NDArray[Any]]:
        y, blocks = result
        index = np.array(task.samples)
        parts = [np.asarray(block)[index].reshape(len(index), task.network.outputs, -1) for block in blocks]
        return {"y": np.asarray(y), "jacobian": np.concatenate(parts, axis=2)}

    def run() -> Any:
        return jax.block_until_ready(derivative(setting.weights, setting.x))

    return Prepared(run, check, lambda result: sum(block.nbytes for block in result[1]))


def product_jvp(task: Task) -> Prepared:
    """``jax.jvp`` inside ``jit``."""
    setting = _Setting(task)
    tangents = setting.split(networks.direction(sum(prod(weight.shape) for weight in setting.weights.values())))

    @jax.jit
    def function(weights: Weights, v: Weights, x: Any) -> Any:
        return jax.jvp(lambda w: setting.function(w, x), (weights,), (v,))[1]

    return Prepared(
        lambda: jax.block_until_ready(function(setting.weights, tangents, setting.x)),
        lambda result: {"jvp": np.asarray(result)},
    )


def product_vjp(task: Task) -> Prepared:
    """``jax.vjp`` inside ``jit``, forward pass included."""
    setting = _Setting(task)
    cotangent = jnp.asarray(networks.cotangent(task.network, task.n))

    @jax.jit
    def function(weights: Weights, u: Any, x: Any) -> Any:
        return jax.vjp(lambda w: setting.function(w, x), weights)[1](u)[0]

    return Prepared(
        lambda: jax.block_until_ready(function(setting.weights, cotangent, setting.x)),
        lambda result: {"vjp": np.concatenate([np.asarray(result[name]).ravel() for name in setting.weights])},
    )


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "jacobian": partial(jacobian, matrix=False),
    "jacobian-matrix": partial(jacobian, matrix=True),
    "jvp": product_jvp,
    "vjp": product_vjp,
}
