"""How work over samples is cut into tiles: pure arithmetic on sizes, the same answer every time."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt


def tile_count(n: int, sample_bytes: int, budget: int) -> int:
    """Number of tiles needed for ``n`` samples of ``sample_bytes`` each, no tile above ``budget`` bytes if it can be.

    A sample is never cut: one that is above the budget is a tile of its own.

    Examples
    --------
    >>> tile_count(n=100, sample_bytes=1000, budget=32_000)
    4
    """
    samples = max(1, budget // max(1, sample_bytes))
    return -(-n // samples)


def row_tiles(n: int, count: int) -> list[slice]:
    """Cut ``n`` samples into at most ``count`` consecutive tiles, none empty, of sizes that differ by one at most.

    Examples
    --------
    >>> row_tiles(7, 3)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    >>> row_tiles(2, 5)
    [slice(0, 1, None), slice(1, 2, None)]
    """
    count = max(1, min(count, n))
    small, larger = divmod(n, count)
    borders = [i * small + min(i, larger) for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(borders) if b > a]


def tiles(n: int, sample_bytes: int, budget: int, at_least: int = 1) -> list[slice]:
    """Tiles of ``n`` samples within ``budget`` bytes each, and ``at_least`` that many where the samples suffice.

    Their number is a multiple of ``at_least`` where it can be, so that as many workers finish together.

    Examples
    --------
    >>> len(tiles(n=100, sample_bytes=1000, budget=40_000, at_least=2))
    4
    """
    count = tile_count(n, sample_bytes, budget)
    return row_tiles(n, -(-count // at_least) * at_least)


def square_tile(pair_bytes: int, budget: int) -> int:
    """Side of the largest square tile of pairs of samples, ``pair_bytes`` each, within ``budget`` bytes (at least 1).

    Examples
    --------
    >>> square_tile(pair_bytes=400, budget=2_000_000)
    70
    """
    return max(1, isqrt(max(0, budget) // max(1, pair_bytes)))
