"""What a Jacobian made of blocks can compute without being formed: J Jᵀ, norms, least squares.

J is the sum of its blocks, so J Jᵀ = sum over pairs (a, b) of J_a J_bᵀ. A pair that shares no column gives zero, and
most blocks share no column with any other: each of those contributes its own Gram matrix. Blocks that do share (a
weight used twice) are taken together, and their rows are formed tile by tile, over the columns of their variables
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from scipy.linalg import LinAlgError, lapack, svd
from scipy.sparse.linalg import LinearOperator, lsmr

from netjac import materialise, planning
from netjac.allocation import Limit, attempts, caution, warn
from netjac.blocks.base import Block
from netjac.errors import DataError
from netjac.pools import at_most
from netjac.progress import Progress

DIRECT_SIZE = 20_000
"""Largest matrix that `solve` factorises (3.2 GB in double precision)."""

DENSE_BYTES = 4 << 30
"""Largest explicit Jacobian that `solve` forms when a problem is badly conditioned."""

_SMALL_TILE = 1 << 19
_LARGE_TILE = 1 << 25


@dataclass(frozen=True, eq=False)
class Parts:
    """A Jacobian as its blocks: what every function here works on.

    Attributes
    ----------
    blocks, cover
        The blocks and who of them writes which columns.
    borders : tuple of (start, stop)
        Columns of each variable.
    n, l, m : int
        Samples, outputs a sample, parameters.
    dtype
        Of the Jacobian.
    """

    blocks: tuple[Block, ...]
    cover: materialise.Cover
    borders: tuple[tuple[int, int], ...]
    n: int
    l: int
    m: int
    dtype: np.dtype[Any]

    def rows(self, samples: slice, dtype: DTypeLike, threads: int = 1, outputs: slice | None = None) -> NDArray[Any]:
        """Explicit rows (samples, outputs, m), computed in ``dtype`` where that is wider; by default all outputs."""
        chosen = slice(0, self.l) if outputs is None else outputs
        taken = [block.take(samples, chosen) for block in self.blocks]
        if not np.can_cast(dtype, self.dtype):
            taken = [widened(block, np.dtype(dtype)) for block in taken]
        out = np.empty((samples.stop - samples.start, chosen.stop - chosen.start, self.m), dtype)
        materialise.fill(taken, self.cover, out, threads=threads)
        return out

    def group(self, which: Sequence[int]) -> Parts:
        """Some of the blocks, over the columns of the variables they touch, closed up."""
        blocks: list[Block] = []
        borders: list[tuple[int, int]] = []
        m = 0
        for start, stop in self.touched(which):
            parts = [self.blocks[i].restricted(start, stop, m - start) for i in which]
            blocks += [part for part in parts if part is not None]
            borders.append((m, m + stop - start))
            m += stop - start
        cover = materialise.cover_of(blocks, m)
        return Parts(tuple(blocks), cover, tuple(borders), self.n, self.l, m, self.dtype)

    def touched(self, which: Sequence[int]) -> list[tuple[int, int]]:
        """Borders of the variables that some of the blocks touch."""
        starts = np.array([start for start, _ in self.borders])
        variables: set[int] = set()
        for i in which:
            variables.update(np.unique(np.searchsorted(starts, self.blocks[i].columns(), side="right") - 1).tolist())
        return [self.borders[variable] for variable in sorted(variables)]


def widened(block: Block, dtype: np.dtype[Any]) -> Block:
    """The same block with its floating arrays in another precision: a block computes in that of its arrays."""
    other = object.__new__(type(block))
    for name, value in vars(block).items():
        if isinstance(value, Block):
            value = widened(value, dtype)
        elif getattr(getattr(value, "dtype", None), "kind", "") == "f":  # an array, dense or sparse
            value = value.astype(dtype)
        vars(other)[name] = value
    return other


# ---- J Jᵀ


def gram_work(l: int, other: int, out_bytes: int, itemsize: int) -> planning.Work:
    """Temporaries of `gram`: a tenth of the result, or a megabyte if that is more; at least those of a pair of samples.

    ``l`` and ``other`` are the outputs a sample.
    """
    least = 2 * l * other * itemsize
    return planning.Work(max(out_bytes // 10, 2 * _SMALL_TILE, least), least)


def gram(rows: Parts, columns: Parts | None, out: NDArray[Any], threads: int, work: int) -> None:
    """Write J Jᵀ, or J otherᵀ, into ``out`` (n, l, n of other, l of other), with ``work`` bytes of temporaries."""
    symmetric = columns is None
    other = rows if columns is None else columns
    if not out.size:
        return
    alone, shared = _pairs(rows, other)
    budget = work // 2
    threads = threads if out.nbytes > materialise.INLINE_BYTES else 1
    side = planning.square_tile(2 * rows.l * other.l * out.itemsize, budget // threads)
    row_tiles = planning.row_tiles(rows.n, -(-rows.n // side))
    column_tiles = row_tiles if symmetric else planning.row_tiles(other.n, -(-other.n // side))
    tiles = [(r, c) for i, r in enumerate(row_tiles) for j, c in enumerate(column_tiles) if not symmetric or j <= i]

    limit = Limit()

    def fill_part(r: slice, c: slice) -> NDArray[Any]:
        part = out[r, :, c, :]
        part[...] = 0
        for a, b in alone:
            a.add_gram(b, r, c, part)
        return part

    def fill_tile(tile: tuple[slice, slice]) -> None:
        for _ in attempts([tile], fill_part, lambda r, c: f"what J Jᵀ of {r} × {c} samples needs", limit):
            pass

    materialise.for_each(fill_tile, tiles, threads)
    with at_most(threads, "numpy"):
        for a_group, b_group in shared:
            _add_group(a_group, b_group, out, budget, symmetric, threads)

    def mirror_tile(tile: tuple[slice, slice]) -> None:
        r, c = tile
        if r == c:
            size = (r.stop - r.start) * rows.l
            square = np.ascontiguousarray(out[r, :, c, :]).reshape(size, size)
            mirror(square)
            out[r, :, c, :] = square.reshape(out[r, :, c, :].shape)
        else:
            # close together first: far apart, entries of one column get in each other's way in the cache
            out[c, :, r, :] = np.ascontiguousarray(out[r, :, c, :]).transpose(2, 3, 0, 1)

    if symmetric:
        materialise.for_each(mirror_tile, tiles, threads)


def _pairs(rows: Parts, columns: Parts) -> tuple[list[tuple[Block, Block]], list[tuple[Parts, Parts]]]:
    """Blocks whose Gram matrices add up, and groups whose rows have to be formed."""
    same = len(rows.blocks) == len(columns.blocks)
    if not same or not all(_alike(a, b) for a, b in zip(rows.blocks, columns.blocks, strict=True)):
        return [], [(rows, columns)]
    alone = [(rows.blocks[i], columns.blocks[i]) for i in rows.cover.alone]
    if rows is columns:
        groups = [rows.group(which) for which in rows.cover.shared]
        return alone, [(group, group) for group in groups]
    return alone, [(rows.group(which), columns.group(which)) for which in rows.cover.shared]


def _alike(a: Block, b: Block) -> bool:
    """Whether `Block.add_gram` takes the two."""
    if type(a) is not type(b) or getattr(a, "p", 1) != getattr(b, "p", 1):
        return False
    place = getattr(a, "placement", None), getattr(b, "placement", None)
    return place[0] == place[1] and (place[0] is not None or np.array_equal(a.columns(), b.columns()))


def _add_group(rows: Parts, columns: Parts, out: NDArray[Any], budget: int, symmetric: bool, threads: int) -> None:
    """Add J_group otherᵀ_group to ``out``: explicit rows of one, tile by tile, times the blocks of the other."""
    for c, j, explicit in _explicit(columns, out.dtype, budget // 4, threads):
        vectors = explicit.reshape(-1, columns.m).T  # (m, samples * outputs)
        width = vectors.shape[1]

        def multiplied(r: slice, i: slice, vectors: NDArray[Any] = vectors) -> NDArray[Any]:
            product = np.zeros((r.stop - r.start, i.stop - i.start, vectors.shape[1]), out.dtype)
            for block in rows.blocks:
                block.take(r, i).add_product(vectors, product)
            return product

        some = [
            (r, i)
            for r, i in planning.row_ranges(rows.n, rows.l, width * out.itemsize, budget // 4)
            if not symmetric or r.stop > c.start
        ]
        for r, i, product in attempts(some, multiplied, named("J Jᵀ")):
            out[r, i, c, j] += product.reshape(*product.shape[:2], c.stop - c.start, j.stop - j.start)
            del product
        del explicit, vectors, multiplied  # before the next is made


def _explicit(
    parts: Parts, dtype: DTypeLike, budget: int, threads: int = 1
) -> Iterator[tuple[slice, slice, NDArray[Any]]]:
    """Iterate over explicit rows (samples, outputs, m), within ``budget`` bytes."""
    ranges = planning.row_ranges(parts.n, parts.l, parts.m * np.dtype(dtype).itemsize, budget)
    return attempts(ranges, lambda s, o: parts.rows(s, dtype, threads, o), named("explicit rows"))


def named(what: str) -> Callable[[int, int], str]:
    """What to call work on so many samples and outputs; see `netjac.allocation.attempts`."""
    return lambda samples, outputs: f"{what} of {samples} samples × {outputs} outputs"


def mirror(square: NDArray[Any], step: int = 256) -> None:
    """Copy the part below the diagonal onto the part above it, in place."""
    size = square.shape[0]
    for start in range(0, size, step):
        stop = min(start + step, size)
        corner = square[start:stop, start:stop]
        upper = np.triu_indices(stop - start, 1)
        corner[upper] = corner.T[upper]
        square[start:stop, stop:] = square[stop:, start:stop].T


# ---- norms


def add_row_squares(parts: Parts, out: NDArray[Any]) -> None:
    """out (n, l) += squared norm of each row."""
    for i in parts.cover.alone:
        out += parts.blocks[i].row_squares()
    for which in parts.cover.shared:
        group = parts.group(which)
        for samples, outputs, rows in _explicit(group, parts.dtype, _LARGE_TILE):
            out[samples, outputs] += np.einsum("nlm,nlm->nl", rows, rows)
            del rows


def add_column_squares(parts: Parts, out: NDArray[Any], weights: NDArray[Any] | None = None) -> None:
    """out (m,) += squared norm of each column, the squares times weights (n, l) that are not negative."""
    if weights is not None:
        for _, _, some in _weighted(parts, np.sqrt(weights)):
            add_column_squares(some, out)
            del some
        return
    for i in parts.cover.alone:
        parts.blocks[i].add_column_squares(out)
    for which in parts.cover.shared:
        group = parts.group(which)
        squares = np.zeros(group.m, parts.dtype)
        for _, _, rows in _explicit(group, parts.dtype, _LARGE_TILE):
            squares += np.einsum("nlm,nlm->m", rows, rows)
            del rows
        for (start, stop), (begin, end) in zip(parts.touched(which), group.borders, strict=True):
            out[start:stop] += squares[begin:end]


def _weighted(parts: Parts, w: NDArray[Any]) -> Iterator[tuple[slice, slice, Parts]]:
    """Iterate over rows times numbers w (n, l), in parts within some megabytes."""
    row_bytes = sum(block.nbytes for block in parts.blocks) // max(1, parts.n * parts.l)
    w = w.astype(parts.dtype, copy=False)

    def some(samples: slice, outputs: slice) -> Parts:
        blocks = tuple(block.take(samples, outputs).weighted(w[samples, outputs]) for block in parts.blocks)
        n, l = samples.stop - samples.start, outputs.stop - outputs.start
        return Parts(blocks, parts.cover, parts.borders, n, l, parts.m, parts.dtype)

    ranges = planning.row_ranges(parts.n, parts.l, row_bytes, _LARGE_TILE)
    return attempts(ranges, some, named("weighted rows"))


# ---- min ‖J x − b‖² + damping ‖x‖²

_SAFE_CONDITION = 1e-12  # reciprocal condition number below which a factorised normal matrix is not trusted
_SETTLED = 1e-10  # relative size of the last correction that counts as converged
_CORRECTIONS = 12
_NOT_CONVERGED = {6: "J is too badly conditioned", 7: "that is the most it may take"}  # what LSMR says


class Solvable(Protocol):
    """What `solve` needs: a SciPy operator in double precision, and its explicit forms."""

    shape: tuple[int, int]

    def matvec(self, v: NDArray[Any], /) -> NDArray[Any]:
        """J v."""

    def rmatvec(self, u: NDArray[Any], /) -> NDArray[Any]:
        """Jᵀ u."""

    def gram(self, *, dtype: DTypeLike) -> NDArray[Any]:
        """J Jᵀ."""

    def normal(self, *, dtype: DTypeLike) -> NDArray[Any]:
        """Jᵀ J."""

    def to_array(self, *, dtype: DTypeLike) -> NDArray[Any]:
        """J."""


def solve(J: Solvable, b: NDArray[np.float64], damping: float, limit: int | None = None) -> NDArray[np.float64]:
    """The x (m,) of least ‖J x − b‖² + damping ‖x‖², of smallest norm where there are several; b (n*l,).

    ``limit`` is the most bytes that explicit matrices may take, where that is less than the constants above allow.
    Where one cannot be allocated the solution is found by products alone.
    """
    rows, m = J.shape
    if not rows or not m:
        return np.zeros(m)
    size = min(rows, m)
    try:
        if size <= DIRECT_SIZE and (limit is None or 8 * size**2 <= limit):
            x = _by_cholesky(J, b, damping)
            if x is not None:
                return x
            if 8 * rows * m <= DENSE_BYTES and (limit is None or 24 * rows * m <= limit):
                return _by_singular_values(J, b, damping)
    except MemoryError:
        warn(f"a matrix of {size} × {size} for lstsq could not be allocated, and products are used instead")
    return _by_products(J, b, damping)


def _by_products(J: Solvable, b: NDArray[np.float64], damping: float) -> NDArray[np.float64]:
    """By LSMR (Fong and Saunders 2011), down to rounding, so that what J hardly determines is found too.

    A warning where it has not converged.
    """
    most = 10 * min(J.shape)
    with Progress("lstsq", None, getattr(J, "progress", False), "steps") as bar:

        def adjoint(u: NDArray[Any]) -> NDArray[Any]:
            bar.add(1)
            return J.rmatvec(u)

        counted = LinearOperator(J.shape, J.matvec, adjoint, dtype=np.float64)
        x, reason, steps, *_ = lsmr(counted, b, damp=np.sqrt(damping), atol=0, btol=0, conlim=0, maxiter=most)
    if not np.all(np.isfinite(x)):
        raise DataError("the Jacobian holds values that are not finite.")
    if reason in _NOT_CONVERGED:
        rows, m = J.shape
        caution(
            f"lstsq by products alone, for a matrix of {min(rows, m)} × {min(rows, m)} is beyond its memory, stopped "
            f"after {steps} steps because {_NOT_CONVERGED[reason]}: the solution is not the best one. Give it more "
            "memory, or damping."
        )
    return np.asarray(x, np.float64)


def _by_cholesky(J: Solvable, b: NDArray[np.float64], damping: float) -> NDArray[np.float64] | None:
    """Factorise the smaller of J Jᵀ + damping and Jᵀ J + damping; None where that cannot be trusted.

    With few rows x = Jᵀ a and (J Jᵀ + damping) a = b, else (Jᵀ J + damping) x = Jᵀ b. Either is corrected with the
    residual of the original problem until it settles (Björck 1996, Numerical Methods for Least Squares Problems,
    §2.9.3, "corrected semi-normal equations"), which makes up for the squared condition number.
    """
    rows, m = J.shape
    few_rows = rows <= m
    matrix = J.gram(dtype=np.float64) if few_rows else J.normal(dtype=np.float64)
    matrix.flat[:: matrix.shape[0] + 1] += damping
    if not np.isfinite(np.trace(matrix)):
        return None
    norm = lapack.dlange("1", matrix.T)
    factor, failed = lapack.dpotrf(matrix.T, lower=1, clean=0, overwrite_a=1)
    if failed or lapack.dpocon(factor, norm, uplo="L")[0] < _SAFE_CONDITION:
        return None

    x = np.zeros(m)
    a = np.zeros(rows)
    residual = b
    previous: float | None = None
    for _ in range(_CORRECTIONS):
        if few_rows:
            a += lapack.dpotrs(factor, residual - damping * a, lower=1)[0]
            new = J.rmatvec(a)
        else:
            new = x + lapack.dpotrs(factor, J.rmatvec(residual) - damping * x, lower=1)[0]
        change, size = float(np.linalg.norm(new - x)), float(np.linalg.norm(new))
        x = new
        # Corrections shrink by a constant ratio: stop when the next one would be rounding.
        ratio = 1.0 if previous is None else change / previous
        if change * min(1.0, ratio) <= 2 * np.finfo(np.float64).eps * size:
            return x
        if previous is not None and ratio > 0.5:  # rounding, no longer progress
            break
        previous = change
        residual = b - J.matvec(x)
    return x if change <= _SETTLED * size else None


def _by_singular_values(J: Solvable, b: NDArray[np.float64], damping: float) -> NDArray[np.float64]:
    """By the singular values of the explicit J, those of rounding size dropped as `numpy.linalg.lstsq` drops them."""
    matrix = J.to_array(dtype=np.float64)
    if not np.all(np.isfinite(matrix)):
        raise DataError("the Jacobian holds values that are not finite.")
    rank_tolerance = np.finfo(np.float64).eps * max(matrix.shape)
    try:
        U, s, Vt = svd(matrix, full_matrices=False, overwrite_a=True, check_finite=False)
    except LinAlgError:
        matrix = J.to_array(dtype=np.float64)
        U, s, Vt = svd(matrix, full_matrices=False, overwrite_a=True, check_finite=False, lapack_driver="gesvd")
    kept = s > rank_tolerance * s[0]
    gain = np.divide(s, s * s + damping, where=kept, out=np.zeros_like(s))
    return np.asarray(Vt.T @ (gain * (U.T @ b)))
