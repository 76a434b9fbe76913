"""J Jᵀ (n·l, n·l): of whatever forms J explicitly, some samples at a time; and what is compared of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import networks
from benchmarks.task import Prepared, Task

TILE_BYTES = 2_500_000_000  # of explicit rows; two tiles are held, and a framework may need as much again to make one


def prepared(task: Task, run: Callable[[], tuple[Any, Any]], outputs_first: bool = False) -> Prepared:
    """A contender whose ``run`` gives the outputs (n, l) and J Jᵀ, one array of n·l rows and columns.

    ``outputs_first``: its rows and columns are those of output 0 of all samples, then of output 1, and so on.
    """
    n, l = task.n, task.network.outputs
    sample, output = np.repeat(task.samples, l), np.tile(np.arange(l), len(task.samples))
    rows = output * n + sample if outputs_first else sample * l + output

    def check(result: tuple[Any, Any]) -> dict[str, NDArray[Any]]:
        y, matrix = result
        square = np.asarray(matrix).reshape(n * l, n * l)
        return {"y": np.asarray(y).reshape(n, l), "gram": square[np.ix_(rows, rows)]}

    return Prepared(run, check, lambda result: int(result[1].nbytes))


def by_tiles(
    task: Task, form: Callable[[slice], tuple[Any, Any]], multiply: Callable[[Any, Any], Any]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Outputs (n, l) and J Jᵀ (n·l, n·l), from every pair of tiles.

    ``form(samples)`` gives the outputs of some samples and their rows of J, in whatever form; ``multiply(a, b)`` is
    a bᵀ of two such. Half of the pairs are the transpose of the other half. Two tiles are held at once; all those that
    fit in memory, two, are formed once.
    """
    n, l = task.n, task.network.outputs
    m = sum(prod(shape) for _, shape in networks.specs(task.network))
    count = -(-n * l * m * 4 // TILE_BYTES)
    tiles = [slice(*pair) for pair in pairwise(n * i // count for i in range(count + 1))]
    y, matrix = np.empty((n, l), np.float32), np.empty((n * l, n * l), np.float32)
    other: Any = None
    for i, samples in enumerate(tiles):
        y[samples], here = form(samples)
        for j in reversed(range(i + 1)):
            if j < i - 1:
                other = None  # before the next is formed
                other = form(tiles[j])[1]
            a, b = (slice(tile.start * l, tile.stop * l) for tile in (samples, tiles[j]))
            matrix[a, b] = multiply(here, here if i == j else other)
            if i != j:
                matrix[b, a] = matrix[a, b].T
        other = here
    return y, matrix
