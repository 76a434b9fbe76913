"""The networks, told without any framework: layer sizes, weights and inputs as NumPy arrays.

Every framework builds the same network from the same arrays. A weight has the name and the shape Keras gives it; the
order here is the order of the Keras model's ``trainable_variables``, so the columns of every Jacobian can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Specs = list[tuple[str, tuple[int, ...]]]

SEED = 20240229


@dataclass(frozen=True)
class Network:
    """One architecture.

    Attributes
    ----------
    kind
        ``"mlp"`` (Dense, tanh between), ``"cnn"``, ``"transformer"``, or ``"mixed"`` (Keras only).
    input_shape
        Of one sample.
    widths
        Widths of the Dense layers of an MLP, the output last.
    outputs
        l, outputs per sample.
    """

    name: str
    kind: str
    input_shape: tuple[int, ...]
    outputs: int
    widths: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Widths of an MLP, the input first."""
        return (self.input_shape[0], *self.widths)


def mlp(*sizes: int) -> Network:
    """A fully connected network with tanh between its layers, named after its widths."""
    return Network("-".join(map(str, sizes)), "mlp", (sizes[0],), sizes[-1], sizes[1:])


# Transformer block, pre-norm: x + attention(norm(x)), then x + mlp(norm(x)), mean over the sequence, Dense.
SEQUENCE, WIDTH, HEADS, HIDDEN = 16, 32, 4, 128
NORM_EPSILON = 1e-3
CHANNELS = (8, 16)
FLAT = 5 * 5 * CHANNELS[1]  # 28 → conv 26 → pool 13 → conv 11 → pool 5


class _Networks(dict[str, Network]):
    """Networks by name; an MLP also by its widths, such as ``"10-64-32-2"``."""

    def __missing__(self, name: str) -> Network:
        try:
            return mlp(*map(int, name.split("-")))
        except ValueError as error:
            raise KeyError(f"{name!r} is neither a network nor the widths of one, such as '10-64-32-2'.") from error


NETWORKS = _Networks(
    (network.name, network)
    for network in (
        mlp(1, 20, 1),
        mlp(10, 32, 32, 2),
        mlp(10, 64, 32, 2),
        mlp(50, 256, 256, 5),
        mlp(784, 1024, 1024, 10),
        Network("cnn", "cnn", (28, 28, 1), 10),
        Network("transformer", "transformer", (SEQUENCE, WIDTH), 10),
        Network("ten-dense", "mlp", (20,), 3, (64,) * 9 + (3,)),
        Network("ten-mixed", "mixed", (16, 16, 3), 4),
    )
)


def specs(network: Network) -> Specs:
    """Names and Keras shapes of the weights, in Keras order; empty for a network only Keras knows."""
    if network.kind == "mlp":
        pairs = zip(network.sizes[:-1], network.sizes[1:], strict=True)
        return [
            spec
            for i, (before, after) in enumerate(pairs)
            for spec in ((f"dense{i}/kernel", (before, after)), (f"dense{i}/bias", (after,)))
        ]
    if network.kind == "cnn":
        first, second = CHANNELS
        return [
            ("conv0/kernel", (3, 3, 1, first)),
            ("conv0/bias", (first,)),
            ("conv1/kernel", (3, 3, first, second)),
            ("conv1/bias", (second,)),
            ("dense/kernel", (FLAT, network.outputs)),
            ("dense/bias", (network.outputs,)),
        ]
    if network.kind == "transformer":
        head = WIDTH // HEADS
        projections: Specs = []
        for name in ("query", "key", "value"):
            projections += [(f"{name}/kernel", (WIDTH, HEADS, head)), (f"{name}/bias", (HEADS, head))]
        return [
            ("norm0/gamma", (WIDTH,)),
            ("norm0/beta", (WIDTH,)),
            *projections,
            ("output/kernel", (HEADS, head, WIDTH)),
            ("output/bias", (WIDTH,)),
            ("norm1/gamma", (WIDTH,)),
            ("norm1/beta", (WIDTH,)),
            ("dense0/kernel", (WIDTH, HIDDEN)),
            ("dense0/bias", (HIDDEN,)),
            ("dense1/kernel", (HIDDEN, WIDTH)),
            ("dense1/bias", (WIDTH,)),
            ("dense2/kernel", (WIDTH, network.outputs)),
            ("dense2/bias", (network.outputs,)),
        ]
    return []


def values(shapes: Specs) -> list[Float32]:
    """Weights of a trained network's size: kernels scaled by fan-in, gains near 1, offsets small and never zero."""
    rng = np.random.default_rng(SEED)
    out = []
    for name, shape in shapes:
        drawn = rng.standard_normal(shape)
        if name.endswith("gamma"):
            value = 1 + 0.1 * drawn
        elif name.endswith("kernel"):
            # the attention's projections sum over their first axis, all others over all but their last
            summed = shape[:1] if name.split("/")[-2] in ("query", "key", "value") else shape[:-1]
            value = drawn / np.sqrt(prod(summed))
        else:
            value = 0.1 * drawn
        out.append(value.astype(np.float32))
    return out


def weights(network: Network) -> dict[str, Float32]:
    """The weights of ``network`` by name."""
    shapes = specs(network)
    return dict(zip((name for name, _ in shapes), values(shapes), strict=True))


def inputs(network: Network, n: int) -> Float32:
    """The samples, (n, *input_shape)."""
    rng = np.random.default_rng(SEED + 1)
    return rng.standard_normal((n, *network.input_shape)).astype(np.float32)


def targets(network: Network, n: int) -> Float32:
    """What a fit aims at, (n, l)."""
    return np.random.default_rng(SEED + 2).standard_normal((n, network.outputs)).astype(np.float32)


def direction(m: int) -> Float32:
    """The v of J v, (m,)."""
    return np.random.default_rng(SEED + 3).standard_normal(m).astype(np.float32)


def cotangent(network: Network, n: int) -> Float32:
    """The u of Jᵀ u, (n, l)."""
    return np.random.default_rng(SEED + 4).standard_normal((n, network.outputs)).astype(np.float32)
