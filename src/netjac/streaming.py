"""Jacobians of data of any size, a tile at a time, and what can be summed over them in one pass.

A tile is the Jacobian of some samples (of some of their outputs, where those of one sample are above the budget). The
next one is computed in a thread while the last is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from netjac import api, arguments, data, planning, reductions
from netjac import memory as system
from netjac.errors import DataError, DtypeError, ShapeError
from netjac.jacobian import Jacobian
from netjac.pools import at_most
from netjac.prefetch import ahead
from netjac.progress import Progress, Shown, hidden
from netjac.reductions import Reduced, RowValues
from netjac.spaces import ParameterSpace

DEFAULT = 256 << 20
"""Bytes of a stream's budget where none is given, or half of what is free if that is less."""

FEW = 4
"""Samples at which a network is traced."""


@dataclass(frozen=True, eq=False)
class Tile:
    """The Jacobian of some samples of a stream; unpacks as (samples, outputs, jacobian), as `Jacobian.tiles` gives.

    Attributes
    ----------
    samples, outputs : slice
        Which rows: samples counted from the first of the stream, and which of their l outputs.
    l : int
        Outputs of a sample.
    jacobian : Jacobian
        Of these rows.
    targets, weights
        What came with x in these samples' batch; None where nothing did.
    """

    samples: slice
    outputs: slice
    l: int
    jacobian: Jacobian
    targets: Any = None
    weights: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.samples, self.outputs, self.jacobian))


@final
class Stream:
    """The Jacobian of a network over data of any size; iterating gives a `Tile` after the other. See `netjac.stream`.

    Attributes
    ----------
    parameters : ParameterSpace
        The columns.
    n : int or None
        Samples, where that is known before the end.
    m : int
        Parameters.
    memory : int
        The budget in bytes.
    """

    def __init__(
        self,
        model: Any,
        given: Any,
        memory: float | str | None,
        variables: Sequence[Any] | None,
        dtype: Any,
        prefetch: int,
        threads: int | None,
        progress: Shown,
    ) -> None:
        self._source = data.source(given)
        if isinstance(prefetch, bool) or not isinstance(prefetch, int | np.integer) or prefetch < 0:
            raise DataError(f"prefetch must be a number of tiles, 0 or more, and is {prefetch!r}.")
        self.memory = _default() if memory is None else planning.memory_bytes(memory)
        self.parameters: ParameterSpace = api.parameters(model, variables)
        self.m = self.parameters.size
        self._model, self._variables, self._dtype = model, variables, dtype
        self._theta = self.parameters.ravel()
        self._prefetch, self._progress = int(prefetch), progress
        self._threads = arguments.threads(threads)
        hidden(progress)  # refused before any work

    @property
    def n(self) -> int | None:
        """Samples, where that is known before the end."""
        return self._source.n

    def __iter__(self) -> Generator[Tile]:
        return self._walk("stream")

    def __repr__(self) -> str:
        count = "some" if self.n is None else str(self.n)
        budget = planning.in_words(self.memory)
        return f"<Stream of the Jacobian of {count} samples with respect to {self.m} parameters within {budget}>"

    # ---- reductions

    def normal(self, weights: RowValues | None = None) -> NDArray[np.float64]:
        """Jᵀ J (m, m), or Jᵀ diag(w) J, in one pass; see `reduce`."""
        return _given(self.reduce(normal=True, weights=weights).normal)

    def adjoint(self, r: RowValues, weights: RowValues | None = None) -> NDArray[np.float64]:
        """Jᵀ r (m,), or Jᵀ diag(w) r, in one pass; see `reduce`.

        Parameters
        ----------
        r : (n*l,) or (n, l), or a function of a tile
            A function returns the values (rows,) or (samples, outputs) of the tile it is given, such as
            ``lambda tile: tile.jacobian.y - tile.targets``.
        weights
            As for `reduce`.
        """
        return _given(self.reduce(adjoint=r, weights=weights).adjoint)

    def column_norms(self, squared: bool = False, weights: RowValues | None = None) -> NDArray[np.float64]:
        """Euclidean norm of each column (m,) of J, or of diag(√w) J, or its square, in one pass; see `reduce`."""
        norms = _given(self.reduce(column_norms=True, weights=weights).column_norms)
        return norms**2 if squared else norms

    def sketch(
        self, k: int, seed: int = 0, kind: str = "count", weights: RowValues | None = None
    ) -> NDArray[np.float64]:
        """S J (k, m), or S diag(√w) J, for a random S (k, n*l) with E[Sᵀ S] = 1, in one pass; see `reduce`.

        Parameters
        ----------
        k : int
            Rows of the sketch.
        seed : int
            S depends on it and on the row's number alone, not on tiles.
        kind : {"count", "gaussian"}
            "count": every row of J is added to one of the k, with a random sign (Charikar, Chen and Farach-Colton
            2004; Clarkson and Woodruff 2013). "gaussian": S has independent normal entries of variance 1/k.
        weights
            As for `reduce`.
        """
        return _given(self.reduce(sketch=k, seed=seed, kind=kind, weights=weights).sketch)

    def leverage(self, damping: float = 0.0, weights: RowValues | None = None) -> NDArray[np.float64]:
        """Diagonal of J (Jᵀ J + damping)⁻¹ Jᵀ, one entry a row (n*l,), in two passes; with weights of diag(√w) J.

        Directions that J leaves undetermined are left out, as by a pseudo-inverse; each entry is between 0 and 1.

        Parameters
        ----------
        damping : float
            Not negative.
        weights
            As for `reduce`, none negative.

        Raises
        ------
        DataError
            The data can be walked once only, or were not the same in the second pass.
        """
        penalty = arguments.damping(damping)
        if not self._source.repeatable:
            raise DataError(
                "leverage needs two passes over the data, and they are an iterator, which can be walked once; give an "
                "array, a data set, or a function that returns a new iterator."
            )
        given = None if weights is None else reductions.Rows(weights, "weights", least=0, samplewise=True)
        first = self._reduced(reductions.chosen(self.m, normal=True, threads=self._threads), given)
        with at_most(self._threads, "scipy"):
            root = reductions.inverse_root(_given(first.normal), penalty)
        found: list[NDArray[np.float64]] = []
        with closing(self._walk("leverage, second pass")) as tiles:
            for tile in tiles:
                found.append(reductions.leverages(tile.jacobian, root, self._threads))
                if given is not None:
                    found[-1] *= given.of(tile).reshape(-1)
        values = np.concatenate([np.zeros(0), *found])
        if len(values) != first.rows:
            raise DataError(f"the data gave {first.rows} rows in the first pass and {len(values)} in the second.")
        return values

    def reduce(
        self,
        *,
        normal: bool = False,
        adjoint: RowValues | None = None,
        column_norms: bool = False,
        sketch: int | None = None,
        weights: RowValues | None = None,
        seed: int = 0,
        kind: str = "count",
    ) -> Reduced:
        """Several reductions in one pass, summed in double precision.

        Parameters
        ----------
        normal, column_norms : bool
            Whether to compute Jᵀ J, and the columns' norms.
        adjoint
            r of Jᵀ r, as for `adjoint`.
        sketch : int, optional
            k, as for `Stream.sketch`, with ``seed`` and ``kind``.
        weights : (n*l,), (n, l) or (n, 1), or a function of a tile, optional
            A weight w a row, or a sample: the results are Jᵀ diag(w) J, Jᵀ diag(w) r, and those of diag(√w) J. Of any
            sign where these are only the first two. Also (n,), where the number of samples is known beforehand.

        Returns
        -------
        Reduced
            With fields ``normal``, ``adjoint``, ``column_norms``, ``sketch`` (None where not asked for), ``n`` and
            ``rows``: how many samples and rows there were.

        Raises
        ------
        DataError, ShapeError, DtypeError
            Nothing was asked for; or r, weights or k do not fit.
        """
        sums = reductions.chosen(self.m, normal, adjoint, column_norms, sketch, seed, kind, self._threads)
        if not sums:
            raise DataError("nothing to reduce: ask for normal, adjoint, column_norms or sketch.")
        least = 0 if column_norms or sketch is not None else -np.inf
        return self._reduced(
            sums, None if weights is None else reductions.Rows(weights, "weights", least, samplewise=True)
        )

    def _reduced(self, sums: dict[str, reductions.Reduction], weights: reductions.Rows | None) -> Reduced:
        n = rows = 0
        given = [weights, *(total.given for total in sums.values() if isinstance(total, reductions.Adjoint))]
        with closing(self._walk(", ".join(sums), wide=True)) as tiles:
            for tile in tiles:
                if self.n is not None and not rows:
                    for values in given:
                        if values is not None:
                            values.expect(self.n, tile.l)
                wide = replace(tile, jacobian=tile.jacobian._widened(np.dtype(np.float64)))
                del tile
                w = None if weights is None else weights.of(wide)
                for total in sums.values():
                    total.add(wide, w)
                n = wide.samples.stop
                rows += wide.jacobian.shape[0]
                del wide
        if weights is not None:
            weights.check(n, rows)
        return Reduced(n, rows, **{name: total.result(n, rows) for name, total in sums.items()})

    # ---- tiles

    def _walk(self, what: str, wide: bool = False) -> Generator[Tile]:
        """One pass; with ``wide``, room is left for factors that are brought to double precision."""
        making = _Making(self._network, self._theta, self.memory, max(1, self._prefetch), wide)
        made = making.tiles(self._source)
        with Progress(what, self.n, self._progress, "samples") as bar, closing(ahead(made, self._prefetch)) as tiles:
            for tile in tiles:
                done = tile.samples.stop - tile.samples.start if tile.outputs.stop == tile.l else 0
                yield tile
                del tile
                bar.add(done)

    def _network(self, x: Any) -> Any:
        """The network at x, traced on the first use of a signature."""
        return api._tensorflow().evaluator(self._model, x, self._variables, dtype=self._dtype)


class _Making:
    """Tiles of batches, one after the other.

    Parameters
    ----------
    network
        Takes x to what evaluates the Jacobian there.
    theta : (m,)
        The parameters.
    memory
        The budget.
    prefetch
        Tiles that may be there beside the one in use.
    wide
        Whether tiles are brought to double precision where they are used.
    """

    def __init__(
        self, network: Callable[[Any], Any], theta: NDArray[Any], memory: int, prefetch: int, wide: bool
    ) -> None:
        self._network, self._theta, self._memory = network, theta, memory
        self._prefetch, self._wide = prefetch, wide
        self._l: int | None = None
        self._most: float = np.inf  # samples of a tile that could be allocated, as far as is known

    def tiles(self, source: data.Sliced | data.Walked) -> Iterator[Tile]:
        """All tiles, the samples in order; data that can be sliced are read as they are needed.

        The network is traced at once, in the thread that asks.
        """
        if isinstance(source, data.Sliced):
            size = self._size(source[slice(0, FEW)], 0, 0) if source.n else 1
            return self._all(source.batches(size))
        batches = source.batches()
        first = list(islice(batches, 1))
        for batch in first:
            self._size(batch, 0, 0)
        return self._all(chain(first, batches))

    def _all(self, batches: Iterator[data.Batch]) -> Iterator[Tile]:
        start = 0
        for number, batch in enumerate(batches):
            size = self._size(batch, number, start)
            for samples in planning.row_tiles(batch.n, -(-batch.n // size)):
                yield from self._tiles(batch[samples], number, start + samples.start)
                data.let_go((batch.x, batch.targets, batch.weights))
            start += batch.n

    def _size(self, batch: data.Batch, number: int, start: int) -> int:
        """Samples of a tile of data such as these."""
        few = batch[slice(0, min(batch.n, FEW))]
        with _named(few, number, start):
            network = self._network(few.x)
        footprint, l = network.footprint, network.output_space.size
        if self._wide and network.dtype != np.float64:
            footprint = footprint.widened()
        # What was read, and the same as the network takes it.
        footprint = replace(footprint, sample=footprint.sample + 2 * batch.sample_bytes)
        need = footprint.need(1, l) + (self._prefetch - 1) * footprint.held(1, l)
        return int(max(1, min(self._most, self._memory // max(1, need))))

    def _tiles(self, batch: data.Batch, number: int, start: int) -> Iterator[Tile]:
        """Tiles of a batch of which the factors should fit: one, or several where they do not."""
        with _named(batch, number, start):
            J = self._network(batch.x).evaluate(self._theta, self._memory)
        if self._l not in (None, J.l):
            raise ShapeError(
                f"batch {number} has {J.l} outputs a sample, and those before have {self._l}: their rows cannot stand "
                "in one Jacobian. Bring the samples to one shape."
            )
        self._l = J.l
        if not isinstance(J, Jacobian) and batch.n > 1:  # after a failed allocation
            self._most = max(1, batch.n // 2)
        for samples, outputs, tile in J.tiles():
            part, place = batch[samples], slice(start + samples.start, start + samples.stop)
            yield Tile(place, outputs, J.l, tile, data.kept(part.targets), data.kept(part.weights))
            del tile


@contextmanager
def _named(batch: data.Batch, number: int, start: int) -> Iterator[None]:
    """Say in which samples something is wrong."""
    try:
        yield
    except (DataError, DtypeError, ShapeError) as error:
        where = f"batch {number}, samples {start} to {start + batch.n - 1}"
        bad = batch.not_finite()
        if bad is not None:
            where += f", the first in sample {start + bad}"
        raise type(error)(f"{where}: {error}") from error


def _default() -> int:
    free = system.default_budget()
    return DEFAULT if free is None else min(DEFAULT, free)


def _given(value: NDArray[np.float64] | None) -> NDArray[np.float64]:
    assert value is not None
    return value


def stream(
    model: Any,
    data: Any,
    *,
    memory: float | str | None = None,
    variables: Sequence[Any] | None = None,
    dtype: Any = None,
    prefetch: int = 1,
    threads: int | None = None,
    progress: Shown = None,
) -> Stream:
    """The Jacobian of a network over data of any size, a tile at a time.

    Parameters
    ----------
    model, variables, dtype
        As for `netjac.jacobian`. The parameters are those of this moment, whatever becomes of the model.
    data
        x as for `netjac.jacobian`, of any kind that has a shape and slices (NumPy, a memory map, Zarr, HDF5): only
        slices are read. Or batches, each x or a tuple (x, targets) or (x, targets, weights): a ``tf.data.Dataset``, a
        Keras ``PyDataset``, an iterable, a function that returns an iterator, or an iterator, which can be walked
        once.
    memory : number of bytes or str, optional
        Most memory that tiles, the data they are made of and what is needed on the way may take. By default 256 MiB,
        or half of what is free if that is less.
    prefetch : int
        Tiles that are computed, in a thread, beyond the one in use; 0 computes each when it is asked for.
    threads : int, optional
        Of the reductions; by default every core available to the process.
    progress : bool or text stream, optional
        By default a bar on standard error if that is a terminal and a second has passed (with tqdm installed); False
        shows none, True shows it whatever standard error is, a stream shows it there.

    Returns
    -------
    Stream
        Iterate over it for tiles, each of which unpacks as (samples, outputs, Jacobian); or ask it for ``normal()``,
        ``adjoint(r)``, ``column_norms()``, ``sketch(k)``, ``leverage()``, or several at once with ``reduce(...)``.

    Raises
    ------
    DataError, DtypeError, ShapeError
        The data are of no such kind. While they are walked: values that are not finite, with the batch and the
        samples named; a second pass over an iterator.
    MemoryBudgetError
        While they are walked: one output of one sample is above the budget.
    ModelError, SampleMixingError, RandomModelError, ProbeError, ImportError
        As for `netjac.jacobian`.

    Examples
    --------
    ::

        x = np.load("x.npy", mmap_mode="r")  # larger than memory
        for samples, outputs, J in nj.stream(model, x, memory="1 GiB"):
            ...
        nj.stream(model, x).reduce(normal=True, adjoint=r, column_norms=True)  # in one pass
    """
    return Stream(model, data, memory, variables, dtype, prefetch, threads, progress)
