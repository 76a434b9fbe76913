"""Data sets in parts, however large: arrays read slice by slice, and batches from anything that gives them.

`source` takes what users have: arrays with a shape and slices (NumPy, memory maps, Zarr, HDF5), alone or in a dict or
list where a model has several inputs; a ``tf.data.Dataset``; a Keras ``PyDataset``; any iterable or iterator of
batches; a function that returns one. No framework is named here: what things can do is what counts.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, final

import numpy as np

from netjac.errors import DataError, DtypeError, ShapeError

_AGAIN = (
    "give an array, a tf.data.Dataset, a Keras PyDataset, an iterable that starts anew each time, or a function that "
    "returns a new iterator"
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Some samples: inputs, and what came with them.

    Attributes
    ----------
    x
        Arrays (n, ...), in the structure that the model takes.
    targets, weights
        What came beside x, as Keras has it: a batch that is a tuple is (x,), (x, targets) or (x, targets, weights).
    """

    x: Any
    targets: Any = None
    weights: Any = None

    @property
    def n(self) -> int:
        """Samples."""
        return sample_count(self.x)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample, everything that came with it included."""
        parts = leaves((self.x, self.targets, self.weights))
        return sum(_entry_bytes(leaf) for leaf in parts if leaf is not None)

    def not_finite(self) -> int | None:
        """The first sample of which x holds NaN or an infinite number; None where none does."""
        bad = np.zeros(self.n, bool)
        for leaf in leaves(self.x):
            values = np.asarray(leaf)
            if values.dtype.kind == "f":
                bad |= ~np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
        return int(np.argmax(bad)) if bad.any() else None

    def __getitem__(self, samples: slice) -> Batch:
        """Return some of the samples."""
        return Batch(*(mapped(lambda leaf: leaf[samples], part) for part in (self.x, self.targets, self.weights)))


class Source(Protocol):
    """A data set that can be walked from its first sample to its last."""

    @property
    def n(self) -> int | None:
        """Samples, where that is known without walking."""

    @property
    def repeatable(self) -> bool:
        """Whether it can be walked again."""

    def batches(self, size: int | None = None) -> Iterator[Batch]:
        """Batches one after the other, none empty; of ``size`` samples where the data can be cut anywhere."""


@final
class Sliced:
    """Arrays that are read slice by slice, never as a whole.

    Parameters
    ----------
    x
        An array (n, ...), or a dict, list or tuple of them: anything with a shape and slices.

    Raises
    ------
    ShapeError
        The arrays have different numbers of samples, or one has no axis of samples.

    Examples
    --------
    >>> [batch.x.shape for batch in Sliced(np.zeros((7, 2))).batches(3)]
    [(3, 2), (3, 2), (1, 2)]
    """

    repeatable = True

    def __init__(self, x: Any) -> None:
        self._whole = Batch(mapped(_sliceable, x))
        self.n: int = self._whole.n

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return self._whole.sample_bytes

    def __getitem__(self, samples: slice) -> Batch:
        """Return some samples, read now."""
        return self._whole[samples]

    def batches(self, size: int | None = None) -> Iterator[Batch]:
        """Batches of ``size`` samples, the last one of what is left; all at once by default."""
        step = max(1, self.n if size is None else size)
        for start in range(0, self.n, step):
            yield self[start : min(start + step, self.n)]


@final
class Walked:
    """Batches as they come, each read once a pass.

    Parameters
    ----------
    start
        Returns an iterator over the batches, from the first.
    repeatable
        Whether it does so more than once.

    Raises
    ------
    DataError
        On walking a second time what can be walked once.
    """

    n = None

    def __init__(self, start: Callable[[], Iterator[Any]], repeatable: bool) -> None:
        self._start = start
        self.repeatable = repeatable
        self._begun = False

    def batches(self, size: int | None = None) -> Iterator[Batch]:
        """Batches in the sizes that they have; ``size`` changes nothing here."""
        if self._begun and not self.repeatable:
            raise DataError(f"the data are an iterator, which can be walked once, and it was: {_AGAIN}.")
        self._begun = True
        return (batch for batch in map(read, self._start()) if batch.n)


def source(data: Any) -> Sliced | Walked:
    """The data set that ``data`` is.

    Parameters
    ----------
    data
        Arrays, as `netjac.jacobian` takes them, of any kind that has a shape and slices: they are x. Or batches, each
        x or a tuple (x, targets) or (x, targets, weights): a ``tf.data.Dataset``, a Keras ``PyDataset``, an iterable,
        an iterator (which can be walked once), or a function without arguments that returns one.

    Raises
    ------
    DtypeError
        It is none of these.
    ShapeError
        Arrays have different numbers of samples, or a scalar is among them.
    DataError
        It has no end.

    Examples
    --------
    >>> source(np.zeros((7, 2))).n
    7
    >>> [batch.n for batch in source(np.zeros((size, 2)) for size in (4, 0, 3)).batches()]
    [4, 3]
    """
    if isinstance(data, Sliced | Walked):
        return data
    if data is None or isinstance(data, str | bytes | set | frozenset):
        raise _unknown(data)
    if _is_array(data) or isinstance(data, Mapping | list | tuple):
        return Sliced(data)
    _refuse_endless(data)
    if hasattr(data, "num_batches") and hasattr(data, "__getitem__"):  # a Keras PyDataset
        return Walked(lambda: _items(data, data.num_batches), True)
    if isinstance(data, Iterable):
        once = iter(data) is data if isinstance(data, Iterator) else False
        return Walked(lambda: iter(data), not once)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return Walked(lambda: _items(data, len(data)), True)
    if callable(data):
        return Walked(lambda: _iterator(data()), True)
    raise _unknown(data)


def refuse_batches(given: Any, name: str, instead: str) -> None:
    """Refuse batches where all samples are needed as arrays, and say how to get those.

    Parameters
    ----------
    given
        An array, or arrays in a structure.
    name
        What it is called in the message.
    instead
        What takes batches, a sentence for the message.

    Raises
    ------
    DtypeError

    Examples
    --------
    >>> refuse_batches(iter([np.zeros((4, 2))]), "x", "")
    Traceback (most recent call last):
    netjac.errors.DtypeError: x must be an array of all samples, (n, ...), or a dict or list of such, and is a \
list_iterator. Batches of pairs become arrays by: x, y = map(numpy.concatenate, zip(*batches)).
    """
    for leaf in leaves(given):
        how = _walked_by(leaf)
        if how is not None:
            raise DtypeError(
                f"{name} must be an array of all samples, (n, ...), or a dict or list of such, and is a "
                f"{type(leaf).__name__}. Batches of pairs become arrays by: x, y = map(numpy.concatenate, zip(*{how}))."
                f"{instead}"
            )


def _walked_by(leaf: Any) -> str | None:
    """How one walks what gives batches, in Python; None for what is no such thing."""
    if leaf is None or _is_array(leaf) or hasattr(leaf, "__array__") or isinstance(leaf, Mapping | Sequence | Set):
        return None
    if hasattr(leaf, "num_batches") and hasattr(leaf, "__getitem__"):  # a Keras PyDataset
        return "(data[i] for i in range(len(data)))"
    if isinstance(leaf, Iterable):
        return "batches"
    return "batches()" if callable(leaf) else None


def read(given: Any) -> Batch:
    """A batch out of x, (x,), (x, targets) or (x, targets, weights)."""
    if isinstance(given, Batch):
        return given
    if isinstance(given, tuple):
        if not 1 <= len(given) <= 3:
            raise ShapeError(
                f"a batch that is a tuple must be (x,), (x, targets) or (x, targets, weights), and has {len(given)} "
                "entries; put several inputs of a model into a list or a dict."
            )
        batch = Batch(*(mapped(_sliceable, part) for part in given))
        _refuse_other_lengths(batch)
        return batch
    return Batch(mapped(_sliceable, given))


def _refuse_other_lengths(batch: Batch) -> None:
    n = batch.n
    for name, part in (("targets", batch.targets), ("weights", batch.weights)):
        for leaf in leaves(part):
            shape = tuple(leaf.shape)
            if not shape or shape[0] != n:
                raise ShapeError(
                    f"the {name} of a batch must have one entry for each of its {n} samples, as their first axis, and "
                    f"have the shape {shape}."
                )


def sample_count(x: Any) -> int:
    """Samples of arrays (n, ...) in a structure."""
    counts = []
    for leaf in leaves(x):
        if not len(leaf.shape):
            raise ShapeError("x must have a first axis of samples, and is a scalar; write x[None] for one sample.")
        counts.append(int(leaf.shape[0]))
    if not counts:
        raise ShapeError("x holds no array; give an array (n, ...), or a list or dict of such arrays.")
    if len(set(counts)) > 1:
        raise ShapeError(
            f"the inputs have different numbers of samples: {counts}. A list or tuple stands for the inputs of one "
            "model; to hand over batches, give a function that returns an iterator over them."
        )
    return counts[0]


def kept(structure: Any) -> Any:
    """The same with a copy of each NumPy array, for whoever made it may write the next batch into it."""
    return mapped(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, structure)


def let_go(structure: Any) -> None:
    """Let go of pages that were read from memory-mapped files: as long as they are there, they count as this process's.

    The system keeps them as it keeps any file, and they are read again where they are needed again. Only maps that
    cannot be written to, for a page that was written to may be nowhere else.
    """
    for leaf in leaves(structure):
        found = leaf
        while isinstance(found, np.ndarray) and getattr(found, "mode", "r") == "r":
            found = found.base
        if isinstance(found, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            found.madvise(mmap.MADV_DONTNEED)


# ---- structures: arrays in dicts, lists and tuples


def mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """The same structure with each array replaced by what ``function`` makes of it; None stays."""
    if structure is None:
        return None
    if isinstance(structure, Mapping):
        return {key: mapped(function, part) for key, part in structure.items()}
    if isinstance(structure, list | tuple) and not _is_numbers(structure):
        parts = [mapped(function, part) for part in structure]
        return parts if isinstance(structure, list) else tuple(parts)
    return function(structure)


def leaves(structure: Any) -> list[Any]:
    """The arrays of a structure, in order."""
    found: list[Any] = []
    mapped(found.append, structure)
    return found


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "__getitem__")


def _is_numbers(value: Any) -> bool:
    """Whether a list or tuple is numbers, nested or not: an array rather than several."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, bool | int | float | complex | np.number)


def _sliceable(leaf: Any) -> Any:
    if hasattr(leaf, "iloc"):  # a data frame, which is indexed by columns
        return np.asarray(leaf)
    if _is_array(leaf):
        return leaf
    try:
        return np.asarray(leaf)
    except ValueError as error:
        raise ShapeError("the rows of x do not all have the same length; pad them to one, or cut them.") from error


def _entry_bytes(leaf: Any) -> int:
    size = getattr(leaf.dtype, "itemsize", None) or getattr(leaf.dtype, "size", None) or 8
    return int(prod(int(d) for d in leaf.shape[1:]) * size)


def _iterator(batches: Any) -> Iterator[Any]:
    if not isinstance(batches, Iterable):
        raise DtypeError(f"the function for the data must return an iterator over batches, and returned {batches!r}.")
    return iter(batches)


def _items(data: Any, count: int | None) -> Iterator[Any]:
    if count is None:
        raise DataError("the data have no end: their number of batches is None. Give it, and one pass will do.")
    return (data[i] for i in range(count))


def _refuse_endless(data: Any) -> None:
    """A ``tf.data.Dataset`` says how many batches it has: -1 for no end, -2 for not known."""
    cardinality = getattr(data, "cardinality", None)
    if callable(cardinality) and int(cardinality()) == -1:
        raise DataError("the data set has no end, for it was repeated: call .take(batches), or leave out .repeat().")


def _unknown(data: Any) -> DtypeError:
    return DtypeError(
        f"the data are a {type(data).__name__}; expected an array (n, ...), a dict or list of arrays, or batches: "
        f"{_AGAIN}."
    )
