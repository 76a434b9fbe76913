"""PyTorch: ``torch.func.vmap(jacrev)`` over ``functional_call``, J Jᵀ made of it, and products."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, jacrev, jvp, linearize, vjp, vmap

from benchmarks import networks
from benchmarks.frameworks.gram import by_tiles, prepared
from benchmarks.networks import CHANNELS, HEADS, HIDDEN, NORM_EPSILON, WIDTH, Network
from benchmarks.task import Prepared, Task

PACKAGES = ("torch", "numpy")


@dataclass(frozen=True)
class _Weight:
    """Where a Keras weight lives in the PyTorch module.

    ``keras.reshape(split).transpose(order).reshape(torch shape)`` is the PyTorch weight.
    """

    name: str
    split: tuple[int, ...]
    order: tuple[int, ...]

    def to_torch(self, value: NDArray[Any], shape: tuple[int, ...]) -> torch.Tensor:
        """The weight in PyTorch's layout."""
        return torch.from_numpy(value.reshape(self.split).transpose(self.order).reshape(shape).copy())

    def to_keras(self, blocks: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Blocks (..., *torch shape) as columns in Keras's order, (..., size)."""
        lead = blocks.shape[: blocks.ndim - len(shape)]
        flat = blocks.reshape(-1, *(self.split[axis] for axis in self.order))
        back = flat.transpose(0, *(1 + self.order.index(axis) for axis in range(len(self.order))))
        return back.reshape(*lead, -1)


class _Transformer(nn.Module):
    """Pre-norm block, mean over the sequence, Dense."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.norm0, self.norm1 = (nn.LayerNorm(WIDTH, eps=NORM_EPSILON) for _ in range(2))
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dense0, self.dense1 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dense2 = nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, sequence, width) → (n, l)."""
        h = self.norm0(x)
        projections = (self.query, self.key, self.value)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for layer in projections)
        attention = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        x = x + self.output((attention @ v).transpose(-2, -3).flatten(-2))
        h = self.dense1(nn.functional.gelu(self.dense0(self.norm1(x))))
        return self.dense2((x + h).mean(dim=-2))


def _cnn(outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, CHANNELS[0]), CHANNELS):
        layers += [nn.Conv2d(before, after, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(networks.FLAT, outputs))


def _mlp(network: Network) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip(network.sizes[:-1], network.sizes[1:], strict=True):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _build(network: Network) -> tuple[nn.Module, dict[str, _Weight]]:
    """The module, and by parameter name in Keras's order where each weight comes from."""
    specs = dict(networks.specs(network))
    places: dict[str, str] = {}
    if network.kind == "mlp":
        module = _mlp(network)
        places = {f"dense{i}": str(2 * i) for i in range(len(network.widths))}
    elif network.kind == "cnn":
        module = _cnn(network.outputs)
        places = {"conv0": "0", "conv1": "3", "dense": "7"}
    else:
        module = _Transformer(network.outputs)
    weights = {}
    for name, shape in specs.items():
        layer, part = name.split("/")
        parameter = f"{places.get(layer, layer)}.{'weight' if part in ('kernel', 'gamma') else 'bias'}"
        weights[parameter] = _Weight(name, *_rearrangement(network, name, shape))
    return module, weights


def _rearrangement(network: Network, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``split`` and ``order`` of `_Weight`."""
    if not name.endswith("kernel"):
        return (prod(shape),), (0,)
    if len(shape) == 4:  # (height, width, in, out) → (out, in, height, width)
        return shape, (3, 2, 0, 1)
    if network.kind == "cnn":  # rows of the Dense kernel follow the flattened (5, 5, 16); PyTorch flattens (16, 5, 5)
        return (5, 5, CHANNELS[1], shape[1]), (3, 2, 0, 1)
    rows = WIDTH if len(shape) == 3 else shape[0]  # attention: (width, heads, head) or (heads, head, width)
    return (rows, prod(shape) // rows), (1, 0)


class Setting:
    """The module, its parameters by name in Keras's order, and the batch."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self.task = task
        self.module, self.weights = _build(task.network)
        self.module.eval().requires_grad_(False)
        values = networks.weights(task.network)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.module.named_parameters()}
        if set(shapes) != set(self.weights):
            raise RuntimeError(f"parameters {sorted(set(shapes) ^ set(self.weights))} have no counterpart.")
        self.shapes = {name: shapes[name] for name in self.weights}
        self.parameters = {name: w.to_torch(values[w.name], shapes[name]) for name, w in self.weights.items()}
        x = networks.inputs(task.network, task.n)
        if task.network.kind == "cnn":
            x = x.transpose(0, 3, 1, 2).copy()
        self.x = torch.from_numpy(x)

    def batch(self, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """Outputs of the whole batch, (n, l)."""
        return functional_call(self.module, parameters, (self.x,))

    def split(self, vector: NDArray[Any]) -> dict[str, torch.Tensor]:
        """A vector (m,) in Keras's order as one tensor a parameter."""
        parts = np.split(vector, np.cumsum([prod(shape) for shape in self.shapes.values()])[:-1])
        named = zip(self.weights.items(), parts, strict=True)
        return {name: weight.to_torch(part, self.shapes[name]) for (name, weight), part in named}

    @property
    def direction(self) -> dict[str, torch.Tensor]:
        """The v of J v."""
        return self.split(networks.direction(sum(prod(shape) for shape in self.shapes.values())))

    @property
    def cotangent(self) -> torch.Tensor:
        """The u of Jᵀ u."""
        return torch.from_numpy(networks.cotangent(self.task.network, self.task.n))

    def columns(self, blocks: dict[str, torch.Tensor]) -> NDArray[Any]:
        """Blocks (..., *shape) side by side, (..., m), in Keras's order."""
        parts = [w.to_keras(blocks[name].numpy(), self.shapes[name]) for name, w in self.weights.items()]
        return np.concatenate(parts, axis=-1)


def _derivative(setting: Setting) -> Callable[[dict[str, torch.Tensor], torch.Tensor], Any]:
    """Jacobian (n, l, *shape) by parameter, and outputs (n, l)."""

    def one(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = functional_call(setting.module, parameters, (sample[None],))[0]
        return y, y

    return vmap(jacrev(one, has_aux=True), in_dims=(None, 0))


def jacobian(task: Task, matrix: bool) -> Prepared:
    """``vmap(jacrev)``; the matrix keeps PyTorch's own order of a weight's entries."""
    setting = Setting(task)
    derivative = _derivative(setting)

    def run() -> Any:
        blocks, y = derivative(setting.parameters, setting.x)
        return (y, torch.cat([block.flatten(2) for block in blocks.values()], dim=2)) if matrix else (y, blocks)

    def check(result: Any) -> dict[str, NDArray[Any]]:
        y, blocks = result
        index = torch.tensor(task.samples)
        if matrix:
            parts = torch.split(blocks[index], [prod(shape) for shape in setting.shapes.values()], dim=2)
            named = zip(setting.shapes.items(), parts, strict=True)
            chosen = {name: part.unflatten(2, shape) for (name, shape), part in named}
        else:
            chosen = {name: block[index] for name, block in blocks.items()}
        return {"y": y.numpy(), "jacobian": setting.columns(chosen)}

    def held(result: Any) -> int:
        return sum(block.nbytes for block in ([result[1]] if matrix else result[1].values()))

    return Prepared(run, check, held)


def gram(task: Task) -> Prepared:
    """J Jᵀ from explicit rows: ``vmap(jacrev)`` of some samples, then one product a weight."""
    setting = Setting(task)
    derivative = _derivative(setting)

    def form(samples: slice) -> tuple[torch.Tensor, list[torch.Tensor]]:
        blocks, y = derivative(setting.parameters, setting.x[samples])
        return y, [block.flatten(2).flatten(0, 1) for block in blocks.values()]

    def multiply(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
        out = torch.zeros(len(a[0]), len(b[0]))
        for left, right in zip(a, b, strict=True):
            out.addmm_(left, right.T)
        return out

    return prepared(task, lambda: by_tiles(task, form, multiply))


def product_jvp(task: Task, held: bool = False) -> Prepared:
    """``torch.func.jvp``; ``held``: of the function that ``torch.func.linearize`` gave before."""
    setting = Setting(task)
    tangents = setting.direction
    if held:
        _, product = linearize(setting.batch, setting.parameters)
        return Prepared(lambda: product(tangents), lambda result: {"jvp": result.numpy()})
    return Prepared(
        lambda: jvp(setting.batch, (setting.parameters,), (tangents,))[1], lambda result: {"jvp": result.numpy()}
    )


def product_vjp(task: Task, held: bool = False) -> Prepared:
    """``torch.func.vjp``, forward pass included; ``held``: of the function that it gave before."""
    setting = Setting(task)
    u, kept = setting.cotangent, vjp(setting.batch, setting.parameters)[1] if held else None

    def run() -> Any:
        pull = kept or vjp(setting.batch, setting.parameters)[1]
        return pull(u)[0]

    return Prepared(run, lambda result: {"vjp": setting.columns(result)})


def kernel(task: Task) -> Prepared:
    """J Jᵀ u by ``vjp``, then ``jvp``."""
    setting = Setting(task)
    u = setting.cotangent

    def run() -> torch.Tensor:
        _, pull = vjp(setting.batch, setting.parameters)
        return jvp(setting.batch, (setting.parameters,), (pull(u)[0],))[1]

    return Prepared(run, lambda result: {"kernel": result.numpy()})


def normal(task: Task) -> Prepared:
    """Jᵀ J v by ``jvp``, then ``vjp``."""
    setting = Setting(task)
    v = setting.direction

    def run() -> dict[str, torch.Tensor]:
        _, image = jvp(setting.batch, (setting.parameters,), (v,))
        _, pull = vjp(setting.batch, setting.parameters)
        return pull(image)[0]

    return Prepared(run, lambda result: {"normal": setting.columns(result)})


os.environ.setdefault("KMP_BLOCKTIME", "0")  # idle threads must not spin while another process is timed

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
