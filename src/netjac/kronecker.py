"""Kronecker factors of each layer's own block of Jᵀ J, summed over tiles of rows.

A layer's block of Jᵀ J is Σ_n,p,p' (a aᵀ) ⊗ (Σ_l d dᵀ). With what comes in taken as independent of what is
differentiated there, it is (Σ a aᵀ) ⊗ (Σ d dᵀ) up to a number (Martens and Grosse 2015, "Optimizing neural networks
with Kronecker-factored approximate curvature", §3; for shared positions, Grosse and Martens 2016). The two sums are
what is computed here; they add up over tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from netjac.algebra import Parts
from netjac.blocks.base import Placement
from netjac.blocks.outer import OuterBlock
from netjac.blocks.tiles import sample_tiles

WIDEST = 4096
"""Largest factor; wider ones would cost more than the products they save."""


@dataclass(frozen=True, eq=False)
class Layer:
    """The two factors of one layer.

    Attributes
    ----------
    placement
        Its columns (g, k, c).
    A : (g, k, k) float64
        Σ a aᵀ over samples and positions.
    D : (g, c, c) float64
        Σ w d dᵀ over rows and positions, w the weight of a row.
    """

    placement: Placement
    A: NDArray[np.float64]
    D: NDArray[np.float64]


def places(parts: Parts, limit: int | None = None) -> list[Placement]:
    """Where the blocks lie that are products, of parameters that no other block holds.

    As many of them, the smallest first, as take no more than ``limit`` bytes; see `layer_bytes`.
    """
    alone = [parts.blocks[i] for i in parts.cover.alone]
    found = [block.placement for block in alone if isinstance(block, OuterBlock) and layer_bytes(block.placement)]
    smallest = sorted(range(len(found)), key=lambda i: layer_bytes(found[i]))
    totals = accumulate(layer_bytes(found[i]) for i in smallest)
    chosen = [i for i, total in zip(smallest, totals, strict=True) if limit is None or total <= limit]
    return [found[i] for i in sorted(chosen)]


def layer_bytes(placement: Placement) -> int:
    """Bytes of a layer's factors, their eigenvectors and eigenvalues; 0 for one too wide to be taken.

    Examples
    --------
    >>> layer_bytes(Placement((1, 3, 2), (6, 2, 1), 0, (1, 3, 2)))
    256
    """
    g, k, c = placement.sizes
    return 8 * g * (2 * (k**2 + c**2) + k * c) if max(k, c) <= WIDEST else 0


def nothing(placements: Sequence[Placement]) -> list[Layer]:
    """Sums of no rows."""
    sizes = [placement.sizes for placement in placements]
    return [
        Layer(placement, np.zeros((g, k, k)), np.zeros((g, c, c)))
        for placement, (g, k, c) in zip(placements, sizes, strict=True)
    ]


def add(layers: Sequence[Layer], parts: Parts, weights: NDArray[np.float64] | None, inputs: bool) -> None:
    """Add rows to the sums, each with a weight (n, l) that is not negative.

    ``inputs`` says whether these samples' A count, as they do with one range of their outputs.
    """
    blocks = {block.placement: block for block in parts.blocks if isinstance(block, OuterBlock)}
    for layer in layers:
        block = blocks[layer.placement]
        g, k, c = layer.placement.sizes
        for s in sample_tiles(block.n, block.p * g * max(k, block.l * c)):
            if inputs:
                layer.A[...] += _squares(block.A[s].reshape(-1, g, k))
            D = block.D[s] if weights is None else block.D[s] * np.sqrt(weights[s])[:, :, None, None, None]
            layer.D[...] += _squares(D.reshape(-1, g, c))


def _squares(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Σ over the first axis of x xᵀ (g, w, w), for rows (r, g, w)."""
    x = rows.astype(np.float64, copy=False).transpose(1, 0, 2)
    return np.stack([part.T @ part for part in x])


def packed(layers: Sequence[Layer]) -> NDArray[np.float64]:
    """All factors as one vector, so that they can be summed as such.

    Examples
    --------
    >>> from netjac.examples import linear_layer
    >>> layers = linear_layer()._kronecker()
    >>> packed(unpacked(packed(layers), [layer.placement for layer in layers])).shape == packed(layers).shape
    True
    """
    return np.concatenate([np.zeros(0), *(part.reshape(-1) for layer in layers for part in (layer.A, layer.D))])


def unpacked(vector: NDArray[np.float64], placements: Sequence[Placement]) -> list[Layer]:
    """What `packed` made a vector of."""
    layers, start = nothing(placements), 0
    for part in [part for layer in layers for part in (layer.A, layer.D)]:
        part[...] = vector[start : start + part.size].reshape(part.shape)
        start += part.size
    return layers
