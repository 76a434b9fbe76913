"""The yardstick of every dense Jacobian: a fresh buffer of its size, filled with a constant by as many threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.task import Prepared, Task

PACKAGES = ("numpy",)

TILE_BYTES = 8 << 20  # netjac's tiles have this size


def fill(task: Task, again: bool = False) -> Prepared:
    """Tiles are contiguous in the buffer, whatever the layout: no layout can be written faster.

    ``again``: the buffer of the call before, whose memory is there already.
    """
    network = task.network
    entries = task.n * network.outputs * sum(prod(shape) for _, shape in networks.specs(network))
    pool = ThreadPoolExecutor(task.threads)
    tiles = max(task.threads, entries * 4 // TILE_BYTES)

    kept = np.empty(entries if again else 0, np.float32)

    def run() -> NDArray[np.float32]:
        buffer = kept if again else np.empty(entries, np.float32)
        for _ in pool.map(lambda tile: tile.fill(1.0), np.array_split(buffer, tiles)):
            pass
        return buffer

    return Prepared(run, lambda _: {}, lambda buffer: int(buffer.nbytes))


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {"fill": fill, "fill-again": partial(fill, again=True)}
