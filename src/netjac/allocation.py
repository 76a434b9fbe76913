"""Memory that cannot be had: the same work in smaller parts."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from netjac.planning import halves

Result = TypeVar("Result")


@dataclass
class Limit:
    """Rows that can be worked on at once, as far as is known: fewer after an allocation failed."""

    rows: float = float("inf")

    def halved(self, rows: int) -> None:
        """So many were too many."""
        self.rows = min(self.rows, -(-rows // 2))


def attempt(
    work: Callable[[slice, slice], Result], samples: slice, outputs: slice, what: str, limit: Limit
) -> Result | None:
    """What ``work`` returns for a range; None, after a warning, where it cannot be allocated and a part of it may.

    Parameters
    ----------
    work, limit
        As for `attempts`.
    what
        Names the work, for the warning.

    Raises
    ------
    MemoryError
        Where one output of one sample cannot be allocated.
    """
    rows = (samples.stop - samples.start) * (outputs.stop - outputs.start)
    if rows > 1 and rows > limit.rows:
        return None
    try:
        return work(samples, outputs)
    except MemoryError:
        if rows <= 1:
            raise
    limit.halved(rows)
    warn(f"{what} could not be allocated, and is tried again in smaller tiles")
    return None


def attempts(
    ranges: Iterable[tuple[slice, slice]],
    work: Callable[[slice, slice], Result],
    what: Callable[[int, int], str],
    limit: Limit | None = None,
) -> Iterator[tuple[slice, slice, Result]]:
    """Iterate over ranges (samples, outputs) and what ``work`` returns for each.

    Where it cannot be allocated the range is cut in halves, after a warning, and so are those after it.

    Parameters
    ----------
    ranges
        See above.
    work
        Returns something for a range; leaves nothing behind when it fails.
    what
        Names the work on so many samples and outputs, for the warning.
    limit
        What is known from before; learns from what happens here.

    Raises
    ------
    MemoryError
        Where one output of one sample cannot be allocated.

    Examples
    --------
    >>> list(attempts([(slice(0, 4), slice(0, 1))], lambda s, o: s.stop, "{} × {}".format, Limit(2)))
    [(slice(0, 2, None), slice(0, 1, None), 2), (slice(2, 4, None), slice(0, 1, None), 4)]
    """
    limit = Limit() if limit is None else limit
    waiting = deque(ranges)
    while waiting:
        samples, outputs = waiting.popleft()
        named = what(samples.stop - samples.start, outputs.stop - outputs.start)
        result = attempt(work, samples, outputs, named, limit)
        if result is None:
            waiting.extendleft(reversed(halves(samples, outputs)))
        else:
            yield samples, outputs, result
            del result  # what comes next has its place


def warn(what: str) -> None:
    """Say that memory ran out and what is done instead."""
    caution(f"{what}; give memory=... to begin with less.")


def caution(message: str) -> None:
    """Warn at the line outside of this package that asked for it."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "netjac":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
