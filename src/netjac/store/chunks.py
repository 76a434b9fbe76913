"""Where tiles of samples and outputs lie in an array of any layout: pure arithmetic on sizes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.errors import LayoutError
from netjac.layout import LETTERS, Layout

CHUNK_BYTES = 16 << 20
"""Most bytes of a chunk, unless one sample's row of one output is larger in factors."""

MANY_CHUNKS, SMALL_CHUNK = 20_000, 64 << 10
"""More chunks than this that are smaller than this are refused."""

Part = Mapping[str, "slice | NDArray[np.intp]"]


def ranges(size: int, step: int) -> list[slice]:
    """Cut ``size`` into ranges of ``step``, the last one shorter: what a regular chunk grid can hold.

    Examples
    --------
    >>> ranges(7, 3)
    [slice(0, 3, None), slice(3, 6, None), slice(6, 7, None)]
    """
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def units(sizes: Mapping[str, int], steps: Mapping[str, int]) -> list[tuple[slice, slice]]:
    """Tiles (samples, outputs), the outputs of a sample one after the other: what is computed and written at once."""
    return list(product(ranges(sizes["n"], steps["n"]), ranges(sizes["l"], steps["l"])))


def dense_steps(sizes: Mapping[str, int], tile: tuple[int, int], itemsize: int, budget: int) -> dict[str, int]:
    """Samples, outputs and parameters of a chunk of the explicit Jacobian within ``budget`` bytes.

    No more samples and outputs than ``tile``; some outputs of one sample where a sample is too large, and some
    parameters of one output where even that is.

    Examples
    --------
    >>> dense_steps({"n": 100, "l": 4, "m": 10}, (50, 4), itemsize=8, budget=1000)
    {'n': 3, 'l': 4, 'm': 10}
    >>> dense_steps({"n": 100, "l": 4, "m": 1000}, (50, 4), itemsize=8, budget=1000)
    {'n': 1, 'l': 1, 'm': 125}
    """
    row = max(1, sizes["m"] * itemsize)
    n, l = max(1, min(tile[0], budget // (tile[1] * row))), tile[1]
    if n == 1:
        l = max(1, min(l, budget // row))
    return {"n": n, "l": l, "m": max(1, min(sizes["m"], budget // (n * l * itemsize)))}


def aligned(layout: Layout, sizes: Mapping[str, int], steps: Mapping[str, int]) -> dict[str, int]:
    """Steps no larger than ``steps`` such that every tile is a union of chunks of a regular grid in ``layout``.

    On an axis of several letters a tile is one range if, from the fastest letter on, it holds some letters whole, some
    of one, and one of each that is slower; and ranges are regular if "some" divides the size, or nothing is slower.

    Examples
    --------
    >>> from netjac.layout import parse
    >>> aligned(parse("(m l) n"), {"n": 9, "l": 10, "m": 7}, {"n": 1, "l": 4, "m": 7})
    {'n': 1, 'l': 2, 'm': 1}
    """
    found = {letter: max(1, min(step, sizes[letter])) for letter, step in steps.items()}
    for axis in layout.axes:
        whole = True
        for place in reversed(range(len(axis))):
            letter = axis[place]
            if not whole:
                found[letter] = 1
            elif found[letter] < sizes[letter]:
                whole = False
                if prod(sizes[slower] for slower in axis[:place]) > 1:
                    found[letter] = max(d for d in range(1, found[letter] + 1) if sizes[letter] % d == 0)
    return found


def refuse_tiny(layout: Layout, sizes: Mapping[str, int], steps: Mapping[str, int], itemsize: int) -> None:
    """Raise where the array would be a great many small chunks, each a file.

    Raises
    ------
    LayoutError
        With a layout that keeps the order of the letters and can be cut well.
    """
    count = prod(-(-sizes[letter] // max(1, steps[letter])) for letter in LETTERS)
    size = prod(min(sizes[letter], steps[letter]) for letter in LETTERS) * itemsize
    if count > MANY_CHUNKS and size < SMALL_CHUNK:
        plain = " ".join(letter for axis in layout.axes for letter in axis)
        raise LayoutError(
            f"in the layout {layout.pattern!r} what is computed together lies apart: it would be {count} chunks of "
            f"{size} bytes. Save it as {plain!r}, which has the same order in memory, or give more memory."
        )


def selection(layout: Layout, sizes: Mapping[str, int], part: Part) -> tuple[Any, ...]:
    """What to index an array of ``layout`` with for ``part``: a range an axis where it is one, else its positions.

    Examples
    --------
    >>> from netjac.layout import parse
    >>> selection(parse("(l m) n"), {"n": 9, "l": 2, "m": 5}, {"n": slice(3, 6), "l": slice(1, 2), "m": slice(0, 5)})
    (slice(5, 10, None), slice(3, 6, None))
    """
    return tuple(_axis(axis, sizes, part) for axis in layout.axes)


def _axis(axis: tuple[str, ...], sizes: Mapping[str, int], part: Part) -> slice | NDArray[np.intp]:
    inner, found = 1, as_range(slice(0, 1))
    for letter in reversed(axis):
        own = as_range(part[letter])
        if isinstance(found, slice) and isinstance(own, slice) and found == slice(0, inner):
            found = slice(own.start * inner, own.stop * inner)
        elif isinstance(found, slice) and isinstance(own, slice) and own.stop - own.start == 1:
            found = slice(own.start * inner + found.start, own.start * inner + found.stop)
        else:
            found = (_positions(own)[:, None] * inner + _positions(found)).reshape(-1)
        inner *= sizes[letter]
    return found


def as_range(own: slice | NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """Positions as a range, where they are one."""
    if isinstance(own, slice) or not len(own) or np.any(np.diff(own) != 1):
        return own
    return slice(int(own[0]), int(own[-1]) + 1)


def _positions(own: slice | NDArray[np.intp]) -> NDArray[np.intp]:
    return np.arange(own.start, own.stop, dtype=np.intp) if isinstance(own, slice) else own


def axis_names(layout: Layout) -> tuple[str, ...]:
    """Names of the axes for readers that know such, as ``"l_m"``."""
    return tuple("_".join(axis) for axis in layout.axes)


def by_letter(n: int, l: int, m: int) -> dict[str, int]:
    """Sizes by the letters of a layout."""
    return dict(zip(LETTERS, (n, l, m), strict=True))
