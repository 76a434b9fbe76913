"""Work in tiles: how many samples at a time, and writing an outer product into a buffer of any strides.

Writing the explicit Jacobian is bound by memory, so the arithmetic has to disappear behind the stores. A ufunc pays
some tens of nanoseconds for each of its inner loops, whatever their length; `multiply_into` therefore looks for the
longest inner loop that the strides of the buffer allow, and for short ones lets BLAS do the outer products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 1 << 19
"""Numbers in a temporary array: a few megabytes."""


def sample_tiles(n: int, numbers: int, budget: int = TILE) -> Iterator[slice]:
    """Cut ``n`` samples into slices whose temporaries, ``numbers`` a sample, stay within ``budget`` numbers."""
    step = max(1, budget // max(1, numbers))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def contract(A: NDArray[Any], D: NDArray[Any]) -> NDArray[Any]:
    """Explicit entries (n, l, g, k, c) of the factors A (n, p, g, k) and D (n, l, p, g, c): their sum over p."""
    if A.shape[1] == 1:
        return A[:, :, :, :, None] * D[:, :, 0, :, None, :]
    return np.matmul(A.transpose(0, 2, 3, 1)[:, None], D.transpose(0, 1, 3, 2, 4))


@dataclass(frozen=True)
class _Axis:
    """An axis of the buffer: its size, stride in bytes, and which operands vary along it."""

    size: int
    stride: int
    in_a: bool
    in_d: bool


def multiply_into(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any]) -> None:
    """out[...] = a · d, each operand of the same rank as ``out`` and of size 1 where it does not vary.

    ``out`` may have any strides, and every axis of it must vary in an operand. Same values as
    ``numpy.multiply(a, d, out=out)``, except that a negative zero may come out positive.
    """
    if out.size == 0:
        return
    exact = np.result_type(a, d)
    if not np.can_cast(exact, out.dtype):  # narrower than the factors: multiply first, then round
        _through_tiles(a, d, out, exact)
        return
    order = [i for i in np.argsort([-abs(s) for s in out.strides], kind="stable") if out.shape[i] > 1]
    keep = [*(i for i in range(out.ndim) if out.shape[i] == 1), *order]
    a, d, out = (x.transpose(keep)[(0,) * (out.ndim - len(order))] for x in (a, d, out))
    a, d = (np.ascontiguousarray(x, out.dtype) for x in (a, d))  # small beside out: innermost axis now contiguous
    a, d, out = _merge_axes(a, d, out)
    if out.ndim < 2 or out.strides[-1] != out.itemsize:
        np.multiply(a, d, out=out)
    else:
        _multiply_ordered(a, d, out)


def _through_tiles(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any], dtype: Any) -> None:
    for s in sample_tiles(len(out), prod(out.shape[1:]), 1 << 15):
        tile = np.multiply(a[s] if len(a) > 1 else a, d[s] if len(d) > 1 else d, dtype=dtype)
        np.copyto(out[s], tile, casting="same_kind")


def _merge_axes(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Join neighbouring axes that are one axis in ``out`` and along which the same operands vary."""
    axes: list[_Axis] = []
    for i, (size, stride) in enumerate(zip(out.shape, out.strides, strict=True)):
        axis = _Axis(size, stride, a.shape[i] > 1, d.shape[i] > 1)
        last = axes[-1] if axes else None
        if last and last.stride == size * stride and (last.in_a, last.in_d) == (axis.in_a, axis.in_d):
            axes[-1] = _Axis(last.size * size, stride, axis.in_a, axis.in_d)
        else:
            axes.append(axis)
    if len(axes) == out.ndim:
        return a, d, out
    return (
        a.reshape([x.size if x.in_a else 1 for x in axes]),
        d.reshape([x.size if x.in_d else 1 for x in axes]),
        np.lib.stride_tricks.as_strided(out, [x.size for x in axes], [x.stride for x in axes]),
    )


def _multiply_ordered(a: NDArray[Any], d: NDArray[Any], out: NDArray[Any]) -> None:
    """Multiply into ``out`` (axes by falling stride, the last contiguous) the fastest way its shape allows."""
    np.multiply(a, d, out=out)


@contextmanager
def _small_buffer() -> Iterator[None]:
    """Ufunc buffers so small that NumPy runs long inner loops in place instead of through its buffer."""
    before = np.setbufsize(16)
    try:
        yield
    finally:
        np.setbufsize(before)
