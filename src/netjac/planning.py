"""How work over samples is cut into tiles: pure arithmetic on sizes, the same answer every time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import isfinite, isqrt
from numbers import Real

from netjac.errors import DataError, DtypeError, MemoryBudgetError

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?:([kmgt]?)(i?)b?)?\s*", re.IGNORECASE)


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


# ---- memory


def memory_bytes(memory: float | str) -> int:
    """Bytes of a memory budget: a number of them, or a string such as "512 MiB", "2 GB" or "1.5GiB".

    kB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB of 1024; upper and lower case are the same.

    Raises
    ------
    DataError, DtypeError
        Where it is not positive, cannot be read, or is neither a number nor a string.

    Examples
    --------
    >>> memory_bytes("512 MiB"), memory_bytes("2 GB"), memory_bytes(1e6)
    (536870912, 2000000000, 1000000)
    """
    if isinstance(memory, str):
        match = _AMOUNT.fullmatch(memory)
        if match is None or (match[3] and not match[2]):
            raise DataError(
                f"memory={memory!r} is no amount of memory; write a number and a unit, as in '512 MiB' or '2 GB' "
                "(units: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)."
            )
        base = 1024 if match[3] else 1000
        amount = float(match[1]) * base ** _PREFIXES[(match[2] or "").lower()]
    elif isinstance(memory, Real) and not isinstance(memory, bool):
        amount = float(memory)
    else:
        raise DtypeError(
            f"memory must be a number of bytes, a string such as '512 MiB', or None, and is a {type(memory).__name__}."
        )
    if not (isfinite(amount) and amount >= 1):
        raise DataError(f"memory must be one byte or more, and finite, and is {memory!r}.")
    return int(amount)


def in_words(size: int) -> str:
    """A number of bytes to read, rounded up, such that `memory_bytes` of it is no less.

    Examples
    --------
    >>> in_words(500), in_words(67_108_864), in_words(67_108_865)
    ('500 B', '64 MiB', '64.1 MiB')
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            tenths = -(-size * 10 // 1024**power)
            return f"{tenths // 10}.{tenths % 10} {unit}".replace(".0 ", " ")
    return f"{size} B"


@dataclass(frozen=True)
class Footprint:
    """Bytes that the factors of some samples and outputs take, and what is needed besides while they are computed.

    Attributes
    ----------
    sample, row : int
        Held: s samples and r outputs of each take s·(sample + r·row).
    sample_work, row_work : int
        The same for temporaries.
    """

    sample: int
    row: int
    sample_work: int = 0
    row_work: int = 0

    def held(self, samples: int, rows: int) -> int:
        """Bytes of the factors, once they are there."""
        return samples * (self.sample + rows * self.row)

    def peak(self, samples: int, rows: int) -> int:
        """Bytes at the worst moment of computing them."""
        return self.held(samples, rows) + samples * (self.sample_work + rows * self.row_work)

    def need(self, samples: int, rows: int) -> int:
        """Bytes at the worst moment where one tile is still held while the next is computed."""
        return self.held(samples, rows) + self.peak(samples, rows)

    def widened(self) -> Footprint:
        """After conversion from single to double precision."""
        return Footprint(2 * self.sample, 2 * self.row, self.sample_work + self.sample, self.row_work + self.row)

    def combined(self, l: int) -> Footprint:
        """Of rows that are combinations of l outputs: their weights, cut out, in double and in the network's type."""
        return replace(self, row_work=self.row_work + 24 * l)


def tile_sizes(n: int, l: int, footprint: Footprint, budget: int) -> tuple[int, int]:
    """Most samples and outputs of a tile such that two tiles fit the budget, one held and one being computed.

    All outputs of as many samples as fit; where those of one sample are too many, some outputs of one sample.

    Raises
    ------
    MemoryBudgetError
        Where one output of one sample is above the budget.

    Examples
    --------
    >>> tile_sizes(n=100, l=10, footprint=Footprint(sample=1000, row=400), budget=100_000)
    (10, 10)
    >>> tile_sizes(n=100, l=1000, footprint=Footprint(sample=1000, row=400), budget=100_000)
    (1, 122)
    """
    n, l = max(1, n), max(1, l)
    samples = budget // max(1, footprint.need(1, l))
    if samples:
        return min(n, samples), l
    first = footprint.need(1, 1)
    if first > budget:
        raise MemoryBudgetError(
            f"one output of one sample needs {in_words(first)} of memory, more than the budget of {in_words(budget)}; "
            f"the least that works is memory={first}.",
            least=first,
        )
    return 1, 1 + (budget - first) // (footprint.need(1, 2) - first)


@dataclass(frozen=True)
class Work:
    """Bytes of temporaries: those that are usual, and the fewest that will do."""

    usual: int
    least: int


NO_WORK = Work(0, 0)
"""None that grow with the problem."""


@dataclass(frozen=True)
class Room:
    """Bytes that tiles of factors may take (None: as many as they may anyway), and temporaries."""

    tiles: int | None
    work: int


def room(budget: int, what: str, result: int, copies: int, work: Work, tiles: Sequence[int]) -> Room:
    """How a budget is shared by the result of a verb, copies of factors, temporaries and tiles.

    Parameters
    ----------
    budget
        Bytes for all.
    what
        The result, for a message.
    result, copies
        Bytes of the result, and of factors in another precision.
    work
        Temporaries.
    tiles
        Least bytes of tiles, for each Jacobian whose tiles are computed.

    Raises
    ------
    MemoryBudgetError
        Where they do not fit.

    Examples
    --------
    >>> room(1000, "a matrix", result=500, copies=0, work=Work(100, 10), tiles=[50])
    Room(tiles=400, work=100)
    """
    fixed, least = result + copies, len(tiles) * max(tiles, default=0)
    need = fixed + work.least + least
    if need > budget:
        raise MemoryBudgetError(
            f"{what} needs {in_words(need)} of memory, {in_words(result)} of them for itself, more than the budget of "
            f"{in_words(budget)}; the least that works is memory={need}.",
            least=need,
        )
    left = budget - fixed
    if not tiles:
        return Room(None, max(work.least, min(work.usual, left)))
    share = max(work.least, min(work.usual, left // 2, left - least))
    return Room((left - share) // len(tiles), share)


def row_ranges(n: int, l: int, row_bytes: int, budget: int) -> list[tuple[slice, slice]]:
    """Cut n samples' l outputs into ranges (samples, outputs) within ``budget`` bytes at so many a row; no row is cut.

    All outputs of some samples; where those of one are too many, some outputs of one sample.

    Examples
    --------
    >>> row_ranges(n=4, l=3, row_bytes=10, budget=60)
    [(slice(0, 2, None), slice(0, 3, None)), (slice(2, 4, None), slice(0, 3, None))]
    >>> row_ranges(n=1, l=3, row_bytes=10, budget=20)
    [(slice(0, 1, None), slice(0, 2, None)), (slice(0, 1, None), slice(2, 3, None))]
    """
    rows = max(1, budget // max(1, row_bytes))
    if not n * l:
        return []
    samples, outputs = max(1, rows // l), min(l, rows)
    return list(product(row_tiles(n, -(-n // samples)), row_tiles(l, -(-l // outputs))))


def halves(samples: slice, outputs: slice) -> list[tuple[slice, slice]]:
    """A tile in two: half of its samples, or half of the outputs of one; empty for one output of one sample.

    Examples
    --------
    >>> halves(slice(4, 7), slice(0, 2))
    [(slice(4, 6, None), slice(0, 2, None)), (slice(6, 7, None), slice(0, 2, None))]
    >>> halves(slice(4, 5), slice(0, 2))
    [(slice(4, 5, None), slice(0, 1, None)), (slice(4, 5, None), slice(1, 2, None))]
    """
    if samples.stop - samples.start > 1:
        return [(part, outputs) for part in _cut(samples)]
    if outputs.stop - outputs.start > 1:
        return [(samples, part) for part in _cut(outputs)]
    return []


def _cut(whole: slice) -> tuple[slice, slice]:
    middle = (whole.start + whole.stop + 1) // 2
    return slice(whole.start, middle), slice(middle, whole.stop)


def tile_count_and_shape(n: int, l: int, footprint: Footprint, budget: int) -> tuple[int, tuple[int, int]]:
    """How many tiles `tile_grid` makes, and samples and outputs of the largest, without making them.

    Examples
    --------
    >>> tile_count_and_shape(n=10**9, l=3, footprint=Footprint(sample=0, row=10), budget=40)
    (2000000000, (1, 2))
    """
    samples, rows = tile_sizes(n, l, footprint, budget)
    along, across = max(1, -(-n // samples)), max(1, -(-l // rows))
    return along * across, (-(-n // along), -(-l // across))


def tile_grid(n: int, l: int, footprint: Footprint, budget: int) -> list[tuple[slice, slice]]:
    """Tiles (samples, outputs) of n samples' l outputs, sample by sample, none larger than `tile_sizes` allows.

    Examples
    --------
    >>> tile_grid(n=2, l=3, footprint=Footprint(sample=0, row=10), budget=40)
    [(slice(0, 1, None), slice(0, 2, None)), (slice(0, 1, None), slice(2, 3, None)), ...]
    """
    samples, rows = tile_sizes(n, l, footprint, budget)
    return list(product(row_tiles(n, -(-n // samples)), row_tiles(l, -(-l // rows))))
