"""JAX: ``jit(vmap(jacrev))``, J Jᵀ made of it, and products. Weights keep Keras's shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.frameworks.gram import by_tiles, prepared
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


class Setting:
    """The weights by name, the batch, and the function of both."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.weights = {name: jnp.asarray(value) for name, value in networks.weights(task.network).items()}
        self.x = jnp.asarray(networks.inputs(task.network, task.n))
        self.function = _function(task.network)

    def split(self, vector: NDArray[Any]) -> Weights:
        parts = np.split(vector, np.cumsum([weight.size for weight in self.weights.values()])[:-1])
        named = zip(self.weights.items(), parts, strict=True)
        return {name: jnp.asarray(part.reshape(weight.shape)) for (name, weight), part in named}

    def columns(self, blocks: Weights) -> NDArray[Any]:
        """One array a weight as a vector (m,), in Keras's order."""
        return np.concatenate([np.asarray(blocks[name]).ravel() for name in self.weights])

    @property
    def direction(self) -> Weights:
        """The v of J v."""
        return self.split(networks.direction(sum(weight.size for weight in self.weights.values())))

    @property
    def cotangent(self) -> Any:
        """The u of Jᵀ u."""
        return jnp.asarray(networks.cotangent(self.task.network, self.task.n))


def _derivative(setting: Setting) -> Callable[[Weights, Any], Any]:
    """Jacobian, one array (n, l, *shape) a weight in Keras's order, and outputs (n, l)."""

    def one(weights: Weights, sample: Any) -> Any:
        y = setting.function(weights, sample[None])[0]
        return y, y

    def derivative(weights: Weights, x: Any) -> Any:
        named, y = jax.vmap(jax.jacrev(one, has_aux=True), in_axes=(None, 0))(weights, x)
        # JAX sorts the keys of a dict; the weights' own order is Keras's
        return [named[name] for name in setting.weights], y

    return derivative


def jacobian(task: Task, matrix: bool) -> Prepared:
    """``jit(vmap(jacrev))``."""
    setting = Setting(task)

    @jax.jit
    def derivative(weights: Weights, x: Any) -> Any:
        blocks, y = _derivative(setting)(weights, x)
        return y, [jnp.concatenate([b.reshape(*b.shape[:2], -1) for b in blocks], axis=2)] if matrix else blocks

    def check(result: Any) -> dict[str, NDArray[Any]]:
        y, blocks = result
        index = np.array(task.samples)
        parts = [np.asarray(block)[index].reshape(len(index), task.network.outputs, -1) for block in blocks]
        return {"y": np.asarray(y), "jacobian": np.concatenate(parts, axis=2)}

    def run() -> Any:
        return jax.block_until_ready(derivative(setting.weights, setting.x))

    return Prepared(run, check, lambda result: sum(block.nbytes for block in result[1]))


def gram(task: Task) -> Prepared:
    """J Jᵀ from explicit rows: ``jit(vmap(jacrev))`` of some samples, then one product a weight."""
    setting = Setting(task)

    @jax.jit
    def form(weights: Weights, x: Any) -> Any:
        blocks, y = _derivative(setting)(weights, x)
        return y, [block.reshape(block.shape[0] * block.shape[1], -1) for block in blocks]

    @jax.jit
    def multiply(a: Any, b: Any) -> Any:
        return sum(left @ right.T for left, right in zip(a, b, strict=True))

    return prepared(task, lambda: by_tiles(task, lambda samples: form(setting.weights, setting.x[samples]), multiply))


def product_jvp(task: Task, held: bool = False) -> Prepared:
    """``jax.jvp`` inside ``jit``; ``held``: the function that ``jax.linearize`` gave before, inside ``jit``."""
    setting = Setting(task)
    tangents = setting.direction

    @jax.jit
    def function(weights: Weights, v: Weights, x: Any) -> Any:
        return jax.jvp(lambda w: setting.function(w, x), (weights,), (v,))[1]

    def check(result: Any) -> dict[str, NDArray[Any]]:
        return {"jvp": np.asarray(result)}

    if held:
        product = jax.jit(jax.linearize(lambda w: setting.function(w, setting.x), setting.weights)[1])
        return Prepared(lambda: jax.block_until_ready(product(tangents)), check)
    return Prepared(lambda: jax.block_until_ready(function(setting.weights, tangents, setting.x)), check)


def product_vjp(task: Task, held: bool = False) -> Prepared:
    """``jax.vjp`` inside ``jit``, forward pass included; ``held``: the function that it gave before, inside ``jit``."""
    setting = Setting(task)
    cotangent = setting.cotangent

    @jax.jit
    def function(weights: Weights, u: Any, x: Any) -> Any:
        return jax.vjp(lambda w: setting.function(w, x), weights)[1](u)[0]

    def check(result: Any) -> dict[str, NDArray[Any]]:
        return {"vjp": setting.columns(result)}

    if held:
        pull = jax.jit(jax.vjp(lambda w: setting.function(w, setting.x), setting.weights)[1])
        return Prepared(lambda: jax.block_until_ready(pull(cotangent)[0]), check)
    return Prepared(lambda: jax.block_until_ready(function(setting.weights, cotangent, setting.x)), check)


def kernel(task: Task) -> Prepared:
    """J Jᵀ u by ``vjp``, then ``jvp``, in one compiled function."""
    setting = Setting(task)
    u = setting.cotangent

    @jax.jit
    def function(weights: Weights, u: Any, x: Any) -> Any:
        _, pull = jax.vjp(lambda w: setting.function(w, x), weights)
        return jax.jvp(lambda w: setting.function(w, x), (weights,), pull(u))[1]

    return Prepared(
        lambda: jax.block_until_ready(function(setting.weights, u, setting.x)),
        lambda result: {"kernel": np.asarray(result)},
    )


def normal(task: Task) -> Prepared:
    """Jᵀ J v by ``jvp``, then ``vjp``, in one compiled function."""
    setting = Setting(task)
    v = setting.direction

    @jax.jit
    def function(weights: Weights, v: Weights, x: Any) -> Any:
        _, image = jax.jvp(lambda w: setting.function(w, x), (weights,), (v,))
        return jax.vjp(lambda w: setting.function(w, x), weights)[1](image)[0]

    return Prepared(
        lambda: jax.block_until_ready(function(setting.weights, v, setting.x)),
        lambda result: {"normal": setting.columns(result)},
    )


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "jacobian": partial(jacobian, matrix=False),
    "jacobian-matrix": partial(jacobian, matrix=True),
    "gram": gram,
    "jvp": product_jvp,
    "vjp": product_vjp,
    "jvp-held": partial(product_jvp, held=True),
    "vjp-held": partial(product_vjp, held=True),
    "kernel": kernel,
    "normal": normal,
}
