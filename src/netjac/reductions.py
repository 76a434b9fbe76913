"""Sums over the tiles of a Jacobian, in double precision: Jᵀ J, Jᵀ r, column norms, sketches, and leverage from them.

What is random depends on the number of a row alone, so that no result depends on how the rows are cut into tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh
from scipy.sparse import csr_array

from netjac import algebra, arguments, data, materialise, normal, planning
from netjac.errors import DataError, DtypeError, ShapeError
from netjac.jacobian import Jacobian

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
RowValues = ArrayLike | Callable[[Any], ArrayLike]
"""One value a row of the Jacobian: an array, or a function that returns those of a tile."""

CHUNK_BYTES = 1 << 25
"""Explicit rows, and random numbers, that are held at once."""

SHARED_BYTES = 1 << 20
"""Factors that are summed over by several threads: for fewer, waking another costs more than it saves."""

BLOCK = 1024
"""Rows whose random numbers are drawn together."""


class Piece(Protocol):
    """What is summed over; see `netjac.streaming.Tile`. The Jacobian is in double precision."""

    @property
    def samples(self) -> slice:
        """Which samples."""

    @property
    def outputs(self) -> slice:
        """Which of their outputs."""

    @property
    def l(self) -> int:  # noqa: E743 - as everywhere
        """How many outputs there are."""

    @property
    def jacobian(self) -> Jacobian:
        """Of these rows."""


@dataclass(frozen=True, eq=False)
class Reduced:
    """Results of one pass; None where not asked for.

    Attributes
    ----------
    n, rows : int
        Samples and rows there were.
    normal : (m, m)
        Jᵀ diag(w) J.
    adjoint : (m,)
        Jᵀ diag(w) r.
    column_norms : (m,)
        Of diag(√w) J.
    sketch : (k, m)
        S diag(√w) J.
    """

    n: int
    rows: int
    normal: Matrix | None = None
    adjoint: Vector | None = None
    column_norms: Vector | None = None
    sketch: Matrix | None = None


class Reduction(Protocol):
    """One sum."""

    def add(self, tile: Piece, w: NDArray[np.float64] | None = None) -> None:
        """Add a tile, its rows weighted by w (samples, outputs)."""

    def result(self, n: int, rows: int) -> NDArray[np.float64]:
        """The sum over all tiles; there were n samples and so many rows."""


@final
class Normal:
    """Jᵀ diag(w) J (m, m)."""

    def __init__(self, m: int, threads: int) -> None:
        self._total = normal.NormalSum(m, np.float64, threads)

    def add(self, tile: Piece, w: NDArray[np.float64] | None = None) -> None:
        """Add a tile."""
        self._total.add(tile.jacobian.parts, w)

    def result(self, n: int, rows: int) -> Matrix:
        """The whole matrix, exactly symmetric."""
        return self._total.result()


@final
class Adjoint:
    """Jᵀ diag(w) r (m,)."""

    def __init__(self, m: int, r: RowValues, threads: int) -> None:
        self._totals = np.zeros((threads, m, 1))
        self.given = Rows(r, "r")

    def add(self, tile: Piece, w: NDArray[np.float64] | None = None) -> None:
        """Add a tile."""
        r = self.given.of(tile) if w is None else w * self.given.of(tile)
        shared(tile.jacobian, list(self._totals), lambda J, s, total: J._add_adjoint(r[s, :, None], total))

    def result(self, n: int, rows: int) -> Vector:
        """The vector; r must have had a value for each row."""
        self.given.check(n, rows)
        return self._totals.sum(axis=0)[:, 0]


@final
class ColumnNorms:
    """Euclidean norm of each column of diag(√w) J (m,)."""

    def __init__(self, m: int, threads: int) -> None:
        self._squares = np.zeros((threads, m))

    def add(self, tile: Piece, w: NDArray[np.float64] | None = None) -> None:
        """Add a tile."""

        def add(J: Jacobian, samples: slice, squares: NDArray[np.float64]) -> None:
            algebra.add_column_squares(J.parts, squares, None if w is None else w[samples])

        shared(tile.jacobian, list(self._squares), add)

    def result(self, n: int, rows: int) -> Vector:
        """The norms."""
        return np.sqrt(self._squares.sum(axis=0))


@final
class CountSketch:
    """S diag(√w) J (k, m): each row added, with a random sign, to a random one of k rows."""

    def __init__(self, m: int, k: int, seed: int, threads: int) -> None:
        self._total = np.zeros((k, m))
        self._draws = Draws(seed, lambda rng: rng.integers(0, 2 * k, BLOCK))
        self._threads = threads

    def add(self, tile: Piece, w: NDArray[np.float64] | None = None) -> None:
        """Add a tile."""
        J, (k, m) = tile.jacobian, self._total.shape
        numbers = row_numbers(tile)
        for samples in planning.tiles(J.n, 8 * J.l * max(1, m), CHUNK_BYTES):
            explicit = J.parts.rows(samples, np.float64, self._threads).reshape(-1, m)
            drawn = self._draws.of(numbers[samples].reshape(-1))
            signs = np.where(drawn < k, 1.0, -1.0)
            if w is not None:
                signs *= np.sqrt(w[samples]).reshape(-1)
            S = csr_array((signs, (drawn % k, np.arange(len(drawn)))), shape=(k, len(drawn)))
            self._total += S @ explicit

    def result(self, n: int, rows: int) -> Matrix:
        """The sketch."""
        return self._total


@final
class GaussianSketch:
    """S diag(√w) J (k, m), the entries of S independent and normal, of variance 1/k; J is not formed."""

    def __init__(self, m: int, k: int, seed: int, threads: int) -> None:
        self._total = np.zeros((m, k))
        self._draws = Draws(seed, lambda rng: rng.standard_normal((BLOCK, k)))
        self._threads = threads

    def add(self, tile: Piece, w: NDArray[np.float64] | None = None) -> None:
        """Add a tile."""
        J, k = tile.jacobian, self._total.shape[1]
        numbers = row_numbers(tile)
        for samples in planning.tiles(J.n, 8 * J.l * k, CHUNK_BYTES):
            S = self._draws.of(numbers[samples].reshape(-1)).reshape(-1, J.l, k) / np.sqrt(k)
            if w is not None:
                S *= np.sqrt(w[samples])[:, :, None]
            some = J if samples == slice(0, J.n) else J[samples]

            def add(columns: slice, some: Jacobian = some, S: NDArray[Any] = S) -> None:
                some._add_adjoint(S[:, :, columns], self._total[:, columns])

            materialise.for_each(add, planning.row_tiles(k, self._threads), self._threads)

    def result(self, n: int, rows: int) -> Matrix:
        """The sketch."""
        return np.ascontiguousarray(self._total.T)


def chosen(
    m: int,
    normal: bool = False,
    adjoint: RowValues | None = None,
    column_norms: bool = False,
    sketch: int | None = None,
    seed: int = 0,
    kind: str = "count",
    threads: int = 1,
) -> dict[str, Reduction]:
    """The sums asked for, by name; the arguments are those of `netjac.streaming.Stream.reduce`."""
    sums: dict[str, Reduction] = {}
    if normal:
        sums["normal"] = Normal(m, threads)
    if adjoint is not None:
        sums["adjoint"] = Adjoint(m, adjoint, threads)
    if column_norms:
        sums["column_norms"] = ColumnNorms(m, threads)
    if sketch is not None:
        k, start = _count(sketch, "sketch, its number of rows k,", 1), _count(seed, "seed", 0)
        if kind not in ("count", "gaussian"):
            raise DataError(f"kind must be 'count' or 'gaussian', and is {kind!r}.")
        sums["sketch"] = (CountSketch if kind == "count" else GaussianSketch)(m, k, start, threads)
    return sums


def _count(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DtypeError(f"{what} must be an integer, and is {arguments.describe(value)}.")
    if value < least:
        raise DataError(f"{what} must be {least} or more, and is {value}.")
    return int(value)


# ---- values a row


@final
class Rows:
    """Values of the rows of a tile (samples, outputs), from an array of all rows, read in part, or from a function.

    Parameters
    ----------
    given
        (n*l,), (n, l), or (n, 1) or a function of a tile.
    name
        For messages.
    least
        What no value may be less than.
    samplewise
        Whether (n,) are one a sample, where the number of samples is known before.
    """

    def __init__(self, given: RowValues, name: str, least: float = -np.inf, samplewise: bool = False) -> None:
        self._name, self._least, self._samplewise = name, least, samplewise
        self._of_samples = False  # whether an array of one axis is one a sample
        self._function = given if callable(given) else None
        self._array: Any = None
        if self._function is None:
            sliced = hasattr(given, "shape") and hasattr(given, "__getitem__")
            self._array = given if sliced else arguments.numbers(given, name)
            if len(self._array.shape) not in (1, 2):
                raise ShapeError(f"{name} must have shape (n*l,) or (n, l), and has {tuple(self._array.shape)}.")

    def of(self, tile: Piece) -> NDArray[np.float64]:
        """The values (samples, outputs) of a tile."""
        shape = tile.jacobian.n, tile.jacobian.l
        if self._function is not None:
            values = np.asarray(self._function(tile))
            if values.size != shape[0] * shape[1]:
                raise ShapeError(
                    f"the function for {self._name} must return {shape} values for this tile, one a row, and returned "
                    f"{values.shape}."
                )
        elif self._of_samples:
            values = np.repeat(np.asarray(self._array[tile.samples])[:, None], shape[1], axis=1)
        elif len(self._array.shape) == 1:
            rows = slice(tile.samples.start * tile.l, tile.samples.stop * tile.l)
            values = np.asarray(self._array[rows])
            if values.size != shape[0] * tile.l:
                raise self._too_few(tile)
            values = values.reshape(shape[0], tile.l)[:, tile.outputs]
        else:
            if self._array.shape[1] not in (1, tile.l):
                raise ShapeError(
                    f"{self._name} must have shape (n*l,) or (n, l), l = {tile.l}, and has {tuple(self._array.shape)}."
                )
            values = np.asarray(self._array[tile.samples])
            if len(values) != shape[0]:
                raise self._too_few(tile)
            values = values[:, tile.outputs] if values.shape[1] > 1 else np.repeat(values, shape[1], axis=1)
        if values.dtype.kind not in "fiub":
            raise DtypeError(f"{self._name} must be real numbers, and has dtype {values.dtype}.")
        if not np.isfinite(values).all():
            raise DataError(
                f"{self._name} must be finite, and is not in samples {tile.samples.start} to {tile.samples.stop - 1}."
            )
        if values.min(initial=np.inf) < self._least:
            raise DataError(
                f"{self._name} must be {self._least:g} or more for all but normal and adjoint, and one is "
                f"{values.min()} in samples {tile.samples.start} to {tile.samples.stop - 1}."
            )
        found = values.reshape(shape).astype(np.float64)
        data.let_go(values)
        return found

    def expect(self, n: int, l: int) -> None:
        """Raise, before any work, unless an array has a value for each row of n samples with l outputs each."""
        shape = () if self._array is None else tuple(self._array.shape)
        self._of_samples = self._samplewise and shape == (n,) != (n * l,)
        self.check(n, n * l)

    def check(self, n: int, rows: int) -> None:
        """Raise unless there was a value for each row, and no more."""
        if self._array is not None:
            expected = rows if len(self._array.shape) == 1 and not self._of_samples else n
            if self._array.shape[0] != expected:
                raise ShapeError(
                    f"{self._name} has shape {tuple(self._array.shape)}, and the data had {n} samples and {rows} rows."
                )

    def _too_few(self, tile: Piece) -> ShapeError:
        return ShapeError(
            f"{self._name} has shape {tuple(self._array.shape)}, which ends before sample {tile.samples.stop - 1} of "
            f"{tile.l} outputs; expected (n*l,) or (n, l), or (n, 1) for one value a sample."
        )


# ---- random numbers


def row_numbers(tile: Piece) -> NDArray[np.intp]:
    """Number of each row (samples, outputs) of a tile, among all rows."""
    samples = np.arange(tile.samples.start, tile.samples.stop)
    return samples[:, None] * tile.l + np.arange(tile.outputs.start, tile.outputs.stop)


@final
class Draws:
    """Random numbers that depend on the seed and on the row's number alone.

    Parameters
    ----------
    seed
        Of all.
    draw
        Returns those (`BLOCK`, ...) of a block of rows.
    """

    def __init__(self, seed: int, draw: Callable[[np.random.Generator], NDArray[Any]]) -> None:
        self._key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        self._draw = draw

    def of(self, numbers: NDArray[np.intp]) -> NDArray[Any]:
        """Those of some rows (rows, ...), whose numbers rise."""
        blocks = np.unique(numbers // BLOCK)
        drawn = [self._draw(np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, b]))) for b in blocks]
        return np.concatenate(drawn)[np.searchsorted(blocks, numbers // BLOCK) * BLOCK + numbers % BLOCK]


# ---- leverage


def inverse_root(normal: Matrix, damping: float) -> Matrix:
    """W (m, r) with W Wᵀ a generalised inverse of Jᵀ J + damping, from Jᵀ J (m, m), which is overwritten."""
    if not np.isfinite(normal).all():
        raise DataError("the Jacobian holds values that are not finite.")
    size = len(normal)
    normal[np.diag_indices(size)] += damping
    scale = np.sqrt(normal.diagonal())
    scale[scale == 0] = 1
    values, V = eigh(normal / scale / scale[:, None], overwrite_a=True)
    kept = values > size * np.finfo(np.float64).eps * values[-1:]
    return V[:, kept] / np.sqrt(values[kept]) / scale[:, None]


def leverages(J: Jacobian, root: Matrix, threads: int) -> Vector:
    """Squared norm of each row of J W (n*l,), for W (m, r)."""
    wide = J._widened(np.dtype(np.float64))
    out = np.zeros((J.n, J.l))

    def add(some: Jacobian, samples: slice, _: object) -> None:
        for part in planning.tiles(root.shape[1], 8 * threads * max(1, *J.shape), CHUNK_BYTES):
            product = some._product(root[:, part]).reshape(some.n, some.l, -1)
            out[samples] += np.einsum("nlr,nlr->nl", product, product)

    shared(wide, range(threads), add)
    return out.reshape(-1)


# ---- threads

Own = TypeVar("Own")


def shared(J: Jacobian, own: Sequence[Own], work: Callable[[Jacobian, slice, Own], None]) -> None:
    """Call ``work`` with some samples' Jacobian, which they are, and one of ``own``, in as many threads as those are.

    Each thread has BLAS for itself: the products are long and thin, and its threads would wait for each other longer
    than they work. One thread does it all where that is little.
    """
    threads = len(own) if J.nbytes >= SHARED_BYTES else 1
    parts = planning.row_tiles(J.n, threads)
    tasks = [(J if len(parts) == 1 else J[samples], samples, mine) for samples, mine in zip(parts, own, strict=False)]
    materialise.for_each(lambda task: work(*task), tasks, threads)
