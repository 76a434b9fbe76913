"""Work in tiles: how many samples at a time, and writing an outer product into a buffer of any strides.

Writing the explicit Jacobian is bound by memory, so the arithmetic has to disappear behind the stores. A ufunc pays
some tens of nanoseconds for each of its inner loops, whatever their length; `multiply_into` therefore looks for the
longest inner loop that the strides of the buffer allow, and for short ones lets BLAS do the outer products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 1 << 19
"""Numbers in a temporary array: a few megabytes."""


def sample_tiles(n: int, numbers: int, budget: int | None = None) -> Iterator[slice]:
    """Cut ``n`` samples into slices whose temporaries, ``numbers`` a sample, stay within ``budget`` numbers."""
    step = max(1, (TILE if budget is None else budget) // max(1, numbers))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def product(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """x (…, i, j) @ y (…, j, k); where j = 1 as a broadcast product, since NumPy has no fast path for that."""
    return x * y if x.shape[-1] == 1 else x @ y


def contract(A: NDArray[Any], D: NDArray[Any]) -> NDArray[Any]:
    """Explicit entries (n, l, g, k, c) of the factors A (n, p, g, k) and D (n, l, p, g, c): their sum over p."""
    if A.shape[1] == 1:
        return A[:, :, :, :, None] * D[:, :, 0, :, None, :]
    return np.matmul(A.transpose(0, 2, 3, 1)[:, None], D.transpose(0, 1, 3, 2, 4))


def is_matrix(out: NDArray[Any], dtype: Any) -> bool:
    """Whether the last two axes of ``out`` are a matrix of ``dtype`` that BLAS can write where it lies."""
    step, rest = divmod(out.strides[-2], out.itemsize)
    return out.dtype == dtype and out.strides[-1] == out.itemsize and rest == 0 and step >= out.shape[-1]


def multiply_into(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any]) -> None:
    """out[...] = a · d, each operand of the same rank as ``out`` and of size 1 where it does not vary.

    ``out`` may have any strides, and every axis of it must vary in an operand. Same values as
    ``numpy.multiply(a, d, out=out)``, except that a negative zero may come out positive.
    """
    if out.size == 0:
        return
    if not a.dtype == d.dtype == out.dtype and not np.can_cast(exact := np.result_type(a, d), out.dtype):
        # Narrower than the factors: multiply first, then round.
        for s in sample_tiles(len(out), prod(out.shape[1:]), 1 << 15):
            tile = np.multiply(a[s] if len(a) > 1 else a, d[s] if len(d) > 1 else d, dtype=exact)
            np.copyto(out[s], tile, casting="same_kind")
        return
    order, a_shape, d_shape, shape, way = _strategy(a.shape, d.shape, out.shape, out.strides, out.itemsize)
    # Copies are small beside out; the operands' axes then follow its memory, from the slowest to the innermost.
    a = _contiguous(a.transpose(order), out.dtype).reshape(a_shape)
    d = _contiguous(d.transpose(order), out.dtype).reshape(d_shape)
    way(a, d, out.transpose(order).reshape(shape))


def _contiguous(x: NDArray[Any], dtype: Any) -> NDArray[Any]:
    if x.flags.c_contiguous and x.dtype == dtype:
        return x
    copy = np.empty(x.shape, dtype)
    copy_into(copy, x)
    return copy


def copy_into(target: NDArray[Any], source: NDArray[Any]) -> None:
    """target[...] = source, for arrays of the same shape and any strides.

    Where the two run through memory along different axes, NumPy's copy would fetch every cache line of ``source``
    many times; some of the target's innermost axis at a time, each is fetched once.
    """
    axes = [i for i in range(target.ndim) if target.shape[i] > 1]
    if target.size > 1 << 12 and axes:
        inner = min(axes, key=lambda i: abs(target.strides[i]))
        if inner != min(axes, key=lambda i: abs(source.strides[i])) and target.shape[inner] > 64:
            target, source = np.moveaxis(target, inner, 0), np.moveaxis(source, inner, 0)
            for start in range(0, len(target), 64):
                target[start : start + 64] = source[start : start + 64]
            return
    target[...] = source


Shape = tuple[int, ...]
Way = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]


@lru_cache(maxsize=1024)
def _strategy(
    a: Shape, d: Shape, shape: Shape, strides: Shape, itemsize: int
) -> tuple[Shape, Shape, Shape, Shape, Way]:
    """Order of the axes by falling stride, the operands' and the buffer's shapes with like axes joined, and the way."""
    order = tuple(sorted(range(len(shape)), key=lambda i: -abs(strides[i])))
    axes: list[tuple[int, int, bool, bool]] = []  # size, stride, varies in a, varies in d
    for i in order:
        size, stride, in_a, in_d = shape[i], strides[i], a[i] > 1, d[i] > 1
        if size == 1:
            continue
        if axes and axes[-1][1:] == (size * stride, in_a, in_d):
            axes[-1] = (axes[-1][0] * size, stride, in_a, in_d)
        else:
            axes.append((size, stride, in_a, in_d))
    joined, steps, *varies = zip(*axes, strict=True) if axes else ((), (), (), ())
    a_shape, d_shape = (tuple(n if v else 1 for n, v in zip(joined, vs, strict=True)) for vs in varies)
    return order, a_shape, d_shape, joined, _way(a_shape, d_shape, joined, steps, itemsize)


# What an entry of 4 bytes costs, in nanoseconds of one core: rough figures, needed only to rank the ways below.
_ENTRY, _LOOP = 0.05, 30.0  # a ufunc without its buffer: an entry, an inner loop
_JOINED_ENTRY = 0.085  # the same from two operands larger than the nearest cache
_BUFFERED_ENTRY, _BUFFERED_LOOP = 0.15, 5.0  # through its buffer
_ACROSS_ENTRY, _ACROSS_LOOP = 0.38, 6.0  # with gaps between the entries of an inner loop
_BLAS_ENTRY, _BLAS_CALL, _BLAS_BYTES = 0.1, 70.0, 64  # entries in vectors of so many bytes
_BLAS_ALONE = 1 << 17  # entries of an outer product up to which OpenBLAS stays in the thread that calls it
_COPIED_ENTRY, _COPIED_LOOP = 0.03, 3.0  # plain copies


def _way(a: Shape, d: Shape, shape: Shape, strides: Shape, itemsize: int) -> Way:
    """The cheapest way to multiply into a buffer whose axes have falling strides."""
    if len(shape) < 2 or strides[-1] != itemsize:
        return _buffered
    rows, columns = shape[-2:]
    wide = itemsize / 4
    costs: dict[Way, float] = {
        _direct: _ENTRY * wide + _LOOP / columns,
        _buffered: _BUFFERED_ENTRY * wide + _BUFFERED_LOOP / columns,
        _across: _ACROSS_ENTRY + _ACROSS_LOOP / rows,
    }
    step, rest = divmod(strides[-2], itemsize)
    if {a[-2:], d[-2:]} == {(rows, 1), (1, columns)} and rest == 0 and step >= columns:
        lanes = _BLAS_BYTES // itemsize
        costs[_outer] = (_BLAS_CALL / rows + _BLAS_ENTRY * wide * (-(-columns // lanes) * lanes)) / columns
    if step == columns and not rest:
        together = _together(rows, columns)
        costs[_joined] = _JOINED_ENTRY * wide + _LOOP / (together * columns)
        for x in (a, d):
            if x[-2:] in ((rows, 1), (1, columns)):  # has to be repeated along the other axis
                size = prod(x[:-2]) * columns * (rows if x[-2] > 1 else together)
                costs[_joined] += size / prod(shape) * (_COPIED_ENTRY * wide + _COPIED_LOOP / columns)
    return min(costs, key=lambda way: costs[way])


def _buffered(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any]) -> None:
    np.multiply(a, d, out=out)


def _direct(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any]) -> None:
    """Inner loops along the last axis, in place."""
    with _small_buffer():
        np.multiply(a, d, out=out)


def _across(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any]) -> None:
    """Inner loops along the last axis but one, where the last is very short."""
    np.multiply(a.swapaxes(-1, -2), d.swapaxes(-1, -2), out=out.swapaxes(-1, -2), order="C")


def _outer(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any]) -> None:
    """Outer products by BLAS, as (rows, 2) @ (2, columns) with zeros: NumPy keeps single columns away from BLAS."""
    left, right = (a, d) if a.shape[-1] == 1 else (d, a)
    left, right = _with_zeros(left.swapaxes(-1, -2)).swapaxes(-1, -2), _with_zeros(right)
    most = max(1, _BLAS_ALONE // out.shape[-1])
    for start in range(0, out.shape[-2], most):
        rows = slice(start, start + most)
        np.matmul(left[..., rows, :], right, out=out[..., rows, :])


def _with_zeros(x: NDArray[Any]) -> NDArray[Any]:
    padded = np.zeros((*x.shape[:-2], 2, x.shape[-1]), x.dtype)
    padded[..., :1, :] = x
    return padded


def _together(rows: int, columns: int) -> int:
    """How many rows to join into one inner loop: some thousand entries, and few rows left over."""
    most = min(rows, -(-2048 // columns))
    return min(range(most, most // 2, -1), key=lambda size: rows % size)


def _joined(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any]) -> None:
    """Inner loops along several rows at once, for which the operands are repeated."""
    *lead, rows, columns = out.shape
    together = _together(rows, columns)
    body = rows - rows % together
    if body < rows:
        last_a, last_d = (x if x.shape[-2] == 1 else x[..., body:, :] for x in (a, d))
        np.multiply(last_a, last_d, out=out[..., body:, :])
    out = out[..., :body, :].reshape(*lead, body // together, together * columns)
    # Some of the first axis at a time, so that what is repeated stays in the cache.
    slices = list(sample_tiles(lead[0], body * columns)) if lead else [slice(None)]
    for s in slices:
        some_a, some_d = (x if not lead or len(x) == 1 else x[s] for x in (a, d))
        _direct(_repeat(some_a, body, together, columns), _repeat(some_d, body, together, columns), out[s])


def _repeat(x: NDArray[Any], body: int, together: int, columns: int) -> NDArray[Any]:
    """Operand (..., rows or 1, columns or 1) as (..., body / together or 1, together · columns or 1)."""
    *lead, rows, last = x.shape
    if (rows, last) == (1, 1):
        return x
    pieces = 1 if rows == 1 else body // together
    if rows > 1:
        x = x[..., :body, :].reshape(*lead, pieces, together, last)
    else:
        x = x[..., None, :]
    return np.broadcast_to(x, (*lead, pieces, together, columns)).reshape(*lead, pieces, together * columns)


@contextmanager
def _small_buffer() -> Iterator[None]:
    """Ufunc buffers so small that NumPy runs long inner loops in place instead of through its buffer."""
    before = np.setbufsize(16)
    try:
        yield
    finally:
        np.setbufsize(before)
