"""The yardstick of every dense Jacobian: a fresh buffer of its size, filled with a constant by as many threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.task import Prepared, Task

PACKAGES = ("numpy",)

TILE_BYTES = 8 << 20  # netjac's tiles have this size


def fill(task: Task) -> Prepared:
    """Tiles are contiguous in the buffer, whatever the layout: no layout can be written faster."""
    network = task.network
    entries = task.n * network.outputs * sum(prod(shape) for _, shape in networks.specs(network))
    pool = ThreadPoolExecutor(task.threads)
    tiles = max(task.threads, entries * 4 // TILE_BYTES)

    def run() -> NDArray[np.float32]:
        buffer = np.empty(entries, np.float32)
        for _ in pool.map(lambda tile: tile.fill(1.0), np.array_split(buffer, tiles)):
            pass
        return buffer

    return Prepared(run, lambda _: {}, lambda buffer: int(buffer.nbytes))


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {"fill": fill}
