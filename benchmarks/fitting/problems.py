"""The problems in NumPy alone: data, start weights, and the loss of whatever weights a fit ended with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.networks import Float32, Network

Weights = dict[str, NDArray[np.float32] | NDArray[np.float64]]


def data(network: Network, n: int) -> tuple[Float32, Float32]:
    """x (n, d) and y (n, l): sin(10 x) / 10 x on an even grid over [−1, 1] for one input, else waves along two
    directions for each output, sin(2 a·x) + cos(3 b·x) / 2 with x normal and |a|, |b| about 1.

    Rounded to float32, so that all precisions fit the same numbers.
    """
    d, l = network.sizes[0], network.outputs
    if d == 1:
        x = np.linspace(-1.0, 1.0, n)[:, None].astype(np.float32)
        return x, np.sinc(10 / np.pi * x).astype(np.float32)
    rng = np.random.default_rng(networks.SEED + 5)
    x = rng.standard_normal((n, d)).astype(np.float32)
    a, b = rng.standard_normal((2, d, l)) / np.sqrt(d)
    return x, (np.sin(2 * x @ a) + 0.5 * np.cos(3 * x @ b)).astype(np.float32)


def start(network: Network, bound: float | None) -> Weights:
    """Start weights by name, moved into the bounds."""
    weights = networks.weights(network)
    if bound is None:
        return dict(weights)
    return {name: np.clip(value, -np.float32(bound), np.float32(bound)) for name, value in weights.items()}


def outputs(weights: Weights, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """The network's outputs (n, l), in float64."""
    values = [value.astype(np.float64) for value in weights.values()]
    h = x.astype(np.float64)
    for kernel, bias in zip(values[:-2:2], values[1:-2:2], strict=True):
        h = np.tanh(h @ kernel + bias)
    return np.asarray(h @ values[-2] + values[-1])


def mse(weights: Weights, x: NDArray[np.float32], y: NDArray[np.float32]) -> float:
    """Mean squared error, in float64."""
    return float(np.mean((outputs(weights, x) - y) ** 2))


def excess(weights: Weights, bound: float) -> float:
    """By how much the worst parameter lies outside ± bound."""
    return max(0.0, *(float(np.abs(value).max()) - bound for value in weights.values()))
