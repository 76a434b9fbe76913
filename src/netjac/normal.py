"""Jᵀ J as a sum over rows, which are explicit a few at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from netjac import materialise, planning
from netjac.algebra import Parts, mirror, named
from netjac.allocation import attempts

_SHARED_WORK = 1 << 23
"""Multiplications below which one thread does them: waking another costs more than it saves."""

_SIDE = 128
"""Least side of a tile of Jᵀ J where there are others for other threads: smaller ones are slow to multiply."""


_GATHERED = 64
"""Rows below which parts are gathered: all of Jᵀ J is read and written once for so many, instead of once a part."""


def normal_work(m: int, itemsize: int) -> planning.Work:
    """Temporaries of `NormalSum`: a tenth of the result between 16 and 32 MiB; at least those of a row."""
    least = 2 * m * itemsize
    return planning.Work(max(min(max(m * m * itemsize // 10, 1 << 24), 1 << 25), least), least)


class NormalSum:
    """Jᵀ diag(weights) J (m, m), computed and summed in one type, as the sum over parts of the rows.

    Parameters
    ----------
    m, dtype, threads
        Of the result, and to work with.
    work : int, optional
        Most bytes beside the result: three quarters for explicit rows, the last for tiles of their products. By default
        those of `normal_work`.
    """

    def __init__(self, m: int, dtype: DTypeLike, threads: int, work: int | None = None) -> None:
        self._total = np.zeros((m, m), dtype)
        self._threads = threads
        row_bytes = max(1, m * self._total.itemsize)
        budget = normal_work(m, self._total.itemsize).usual if work is None else work
        self._rows, self._products = budget - budget // 4, budget // 4
        self._most = min(_GATHERED, self._rows // 4 // row_bytes)  # they are joined, and rows of each sign taken out
        self._gathered: list[tuple[NDArray[Any], NDArray[Any] | None]] = []
        self._count = 0

    def add(self, parts: Parts, weights: NDArray[Any] | None = None) -> None:
        """Add the rows of a part, with weights (n, l) of any sign."""
        m, dtype = parts.m, self._total.dtype
        few = parts.n * parts.l < self._most

        def rows(samples: slice, outputs: slice) -> tuple[NDArray[Any], NDArray[Any] | None]:
            w = None if weights is None else weights[samples, outputs].reshape(-1)
            return parts.rows(samples, dtype, self._threads, outputs).reshape(-1, m), w

        if not m:
            return
        ranges = planning.row_ranges(parts.n, parts.l, m * dtype.itemsize, self._rows)
        for _, _, found in attempts(ranges, rows, named("explicit rows")):
            if few:
                self._gathered.append(found)
                self._count += len(found[0])
            else:
                self._add(*found)
            del found
        if self._count >= self._most:
            self._flush()

    def result(self) -> NDArray[Any]:
        """The whole matrix, exactly symmetric; nothing is to be added after."""
        self._flush()
        mirror(self._total)
        return self._total

    def _flush(self) -> None:
        if not self._count:
            return
        rows, weights = zip(*self._gathered, strict=True)
        self._gathered, self._count = [], 0
        self._add(np.concatenate(rows), None if weights[0] is None else np.concatenate(weights))

    def _add(self, rows: NDArray[Any], weights: NDArray[Any] | None) -> None:
        """Add rows, which are scaled in place by the roots of their weights, those of either sign by themselves."""
        if weights is None:
            _add_normal(rows, 1.0, self._total, self._threads, self._products)
            return
        rows *= np.sqrt(np.abs(weights))[:, None].astype(rows.dtype)
        for sign in (1.0, -1.0):
            chosen = np.sign(weights) == sign
            if chosen.any():
                some = rows if chosen.all() else rows[chosen]
                _add_normal(some, sign, self._total, self._threads, self._products)


def _add_normal(rows: NDArray[Any], sign: float, total: NDArray[Any], threads: int, work: int) -> None:
    """Lower part of total (m, m) += sign · rowsᵀ rows: some columns of rows times some, in tiles of ``work`` bytes.

    The tiles are shared out to threads here, and not inside BLAS, whose threads would have to be waited for at each.
    """
    m = len(total)
    sharing = threads if len(rows) * m * m >= _SHARED_WORK else 1
    side = min(planning.square_tile(total.itemsize, work // sharing), max(_SIDE, -(-m // sharing)))
    columns = planning.row_tiles(m, -(-m // side))
    tiles = [(i, j) for k, i in enumerate(columns) for j in columns[: k + 1]]
    materialise.for_each(lambda tile: _add_normal_tile(rows, sign, total, *tile), tiles, sharing)


def _add_normal_tile(rows: NDArray[Any], sign: float, total: NDArray[Any], i: slice, j: slice) -> None:
    product = rows[:, i].T @ rows[:, j]
    (np.add if sign > 0 else np.subtract)(total[i, j], product, out=total[i, j])
