"""Fills the explicit Jacobian, tile by tile of samples, on all cores.

Blocks add up to the Jacobian, and most columns belong to one block alone: those are written once, straight into the
caller's buffer. `Cover` is who writes, who adds, and what stays zero; it does not depend on any value.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from netjac import planning
from netjac.blocks.base import Block, Placement
from netjac.pools import at_most

Item = TypeVar("Item")

INLINE_BYTES = 1 << 19
"""Below this size a result is filled by the calling thread: waking another one costs more than it saves."""

TILE_BYTES = 8 << 20
"""Size of a tile of the result. What it is made of stays in a core's cache; the result itself streams through."""

_PIECES = 4
"""Pieces that columns are cut into for each thread, so that threads end together; a block pays for each piece."""

_RUNS = 64  # more runs of columns than this are addressed by one index array instead


@dataclass(frozen=True, eq=False)
class Cover:
    """Who writes which columns.

    Attributes
    ----------
    zeros : slices or index arrays
        Columns to be zeroed first: those of no block, and those that a block adds to before any has written them.
    adds : tuple of bool
        For each block, in order: whether it adds to what the blocks before it wrote, or writes.
    alone : tuple of int
        Blocks that share no column with another.
    shared : tuple of tuple of int
        The others, in groups; blocks of different groups share no column.
    """

    zeros: tuple[Any, ...]
    adds: tuple[bool, ...]
    alone: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...]


def cover_of(blocks: Sequence[Block], m: int) -> Cover:
    """The `Cover` of some blocks; worked out once for blocks that lie alike, as at every step of a fit."""
    placements = tuple(getattr(block, "placement", None) for block in blocks)
    if all(isinstance(placement, Placement) for placement in placements):
        return _cover_of_placements(placements, m)
    return cover([block.columns() for block in blocks], m)


@lru_cache(maxsize=64)
def _cover_of_placements(placements: tuple[Placement, ...], m: int) -> Cover:
    return cover([np.sort(placement.indices(), axis=None) for placement in placements], m)


def cover(columns: Sequence[NDArray[np.intp]], m: int) -> Cover:
    """Work out the `Cover` of blocks with these columns (each sorted and without repetition) among ``m``."""
    return _cover_of_runs(columns, m) or _cover_of_columns(columns, m)


def _cover_of_runs(columns: Sequence[NDArray[np.intp]], m: int) -> Cover | None:
    """The usual case, without touching m numbers: every block one run of columns, no two of them meeting."""
    runs: list[tuple[int, int]] = []
    for own in columns:
        if own.size:
            start, stop = int(own[0]), int(own[-1]) + 1
            if stop - start != own.size:
                return None
            runs.append((start, stop))
    zeros, end = [], 0
    for start, stop in sorted(runs):
        if start < end:
            return None
        if start > end:
            zeros.append(slice(end, start))
        end = stop
    if end < m:
        zeros.append(slice(end, m))
    count = len(columns)
    return Cover(tuple(zeros), (False,) * count, tuple(range(count)), ())


def _cover_of_columns(columns: Sequence[NDArray[np.intp]], m: int) -> Cover:
    owner = np.full(m, -1, np.intp)  # the last block that came by
    zero = np.ones(m, bool)
    parent = list(range(len(columns)))
    adds: list[bool] = []
    for i, own in enumerate(columns):
        before = owner[own]
        adds.append(bool(np.any(before >= 0)))
        if not adds[i]:
            zero[own] = False
        for j in np.unique(before[before >= 0]):
            _join(parent, i, int(j))
        owner[own] = i
    roots = [_root(parent, i) for i in range(len(columns))]
    groups = [tuple(i for i, r in enumerate(roots) if r == root) for root in dict.fromkeys(roots)]
    return Cover(
        zeros=_selectors(np.flatnonzero(zero)),
        adds=tuple(adds),
        alone=tuple(group[0] for group in groups if len(group) == 1),
        shared=tuple(group for group in groups if len(group) > 1),
    )


def _root(parent: list[int], i: int) -> int:
    while parent[i] != i:
        i = parent[i]
    return i


def _join(parent: list[int], i: int, j: int) -> None:
    parent[_root(parent, i)] = _root(parent, j)


def _selectors(indices: NDArray[np.intp]) -> tuple[Any, ...]:
    if not indices.size:
        return ()
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    if breaks.size >= _RUNS:
        return (indices,)
    return tuple(slice(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks))


def fill(
    blocks: Sequence[Block],
    cover: Cover,
    out: NDArray[Any],
    *,
    threads: int | None = None,
    tile_bytes: int | None = None,
    inline_bytes: int = INLINE_BYTES,
) -> None:
    """Write the sum of ``blocks`` into ``out`` (n, l, m), of any strides and any real floating dtype.

    ``threads=None`` stands for every core available to this process. The numbers written are the same for every
    number of threads and every size of tile.
    """
    n, l, m = out.shape
    if not out.size:
        return
    threads = available_cores() if threads is None else threads
    if out.nbytes <= inline_bytes and tile_bytes is None:
        for_each(lambda samples: _fill_tile(blocks, cover, out, samples), [slice(0, n)], threads)
        return
    budget = TILE_BYTES if tile_bytes is None else tile_bytes
    tiles = planning.tiles(n, l * m * out.itemsize, budget, at_least=threads)
    slowest = _slowest_axis(out)
    if slowest == 0 and len(tiles) >= threads:
        for_each(lambda samples: _fill_tile(blocks, cover, out, samples), tiles, threads)
    elif slowest == 1 and abs(out.strides[2]) < abs(out.strides[0]) and n * l >= threads:
        # all samples of one output are one region of memory, in which rows follow each other
        ranges = planning.row_ranges(l, n, m * out.itemsize, min(budget, out.nbytes // threads))
        for_each(lambda rows: _fill_rows(blocks, cover, out, rows[1], rows[0]), ranges, threads)
    else:  # one sample is not one region of memory, or there are few: the columns are shared out instead
        columns = -(-m // (_PIECES * threads)) if threads > 1 else m
        if tile_bytes is not None:
            columns = max(1, min(columns, tile_bytes // (n * l * out.itemsize)))
        _fill_by_columns(blocks, cover, out, columns, threads)


def _slowest_axis(out: NDArray[Any]) -> int:
    return max(range(out.ndim), key=lambda axis: abs(out.strides[axis]) * (out.shape[axis] > 1))


def _fill_by_columns(blocks: Sequence[Block], cover: Cover, out: NDArray[Any], columns: int, threads: int) -> None:
    """Fill all samples, some columns at a time; blocks that share columns follow each other in one thread."""
    every = slice(0, out.shape[0])
    for selector in cover.zeros:
        if isinstance(selector, slice):
            parts = planning.row_tiles(selector.stop - selector.start, threads)
            runs = [slice(selector.start + part.start, selector.start + part.stop) for part in parts]
            for_each(lambda run: out[..., run].fill(0), runs, threads)
        else:
            out[..., selector] = 0
    tasks = [[(piece, False)] for i in cover.alone for piece in blocks[i].pieces(columns)]
    tasks += [[(blocks[i], cover.adds[i]) for i in group] for group in cover.shared]

    def work(task: list[tuple[Block, bool]]) -> None:
        for block, add in task:
            block.fill(out, every, add=add)

    for_each(work, tasks, threads)


def _fill_tile(blocks: Sequence[Block], cover: Cover, out: NDArray[Any], samples: slice) -> None:
    tile = out[samples]
    for selector in cover.zeros:
        tile[..., selector] = 0
    for block, add in zip(blocks, cover.adds, strict=True):
        block.fill(tile, samples, add=add)


def _fill_rows(blocks: Sequence[Block], cover: Cover, out: NDArray[Any], samples: slice, outputs: slice) -> None:
    rows = out[samples, outputs]
    _fill_tile([block.take(samples, outputs) for block in blocks], cover, rows, slice(0, len(rows)))


def available_cores() -> int:
    """Number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def for_each(work: Callable[[Item], object], items: Sequence[Item], threads: int) -> None:
    """Call ``work`` on every item, from this thread and up to ``threads - 1`` others; returns when all is done.

    NumPy's BLAS gets what that leaves of ``threads``: one where there are as many items. After an error no further item
    is begun, and the error is raised. Calls from inside ``work`` cannot deadlock: who waits has worked first, and takes
    back what nobody began. After it returns no other thread keeps ``work`` or an item alive, nor any of their arrays.
    """
    workers = min(threads, len(items))
    if not workers:
        return
    share = threads // workers
    pending = deque(partial(work, item) for item in items)  # all that a thread's `drain` holds of the work

    def drain() -> None:
        try:
            with at_most(share, "numpy"):
                while True:
                    try:
                        todo = pending.popleft()
                    except IndexError:
                        return
                    todo()
                    del todo
        except BaseException:
            pending.clear()
            raise

    helpers: list[Future[None]] = []
    try:
        for _ in range(workers - 1):
            helpers.append(_pool.submit(copy_context().run, drain))  # the context holds the caller's np.errstate
    except RuntimeError:  # the interpreter is shutting down: this thread does it all
        pass
    try:
        drain()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        errors = [error for helper in begun if (error := helper.exception()) is not None]
    if errors:
        raise errors[0]


class _Pool:
    """Threads that are started when first needed and kept; a forked child starts its own."""

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=128, thread_name_prefix="netjac")
        return self._executor.submit(function, *arguments)


_pool = _Pool()
