"""Data sets in parts: every form gives the samples once, in order, and arrays are read slice by slice."""

from __future__ import annotations

import array
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netjac.data import Batch, Sliced, Walked, let_go, refuse_batches, source
from netjac.errors import DataError, DtypeError, ShapeError

X = np.arange(14.0).reshape(7, 2)
Y = np.arange(7)


class Lazy:
    """An array of which slices can be read, and nothing else; it notes how much of it was."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.read: list[slice] = []

    def __getitem__(self, samples: slice) -> np.ndarray:
        self.read.append(samples)
        return self._array[samples]

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise AssertionError("converted as a whole")


class Indexed:
    """Batches by number."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= i < 2:  # as a PyDataset may: no IndexError to stop at
            raise RuntimeError("no such batch")
        return X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]


class Sequenced(Indexed):
    """As a Keras PyDataset: not iterable by a method of its own, with a number of batches."""

    num_batches = 2
    __len__ = None  # type: ignore[assignment]


def pairs() -> Iterator[Any]:
    yield X[:4], Y[:4]
    yield X[:0], Y[:0]
    yield X[4:], Y[4:]


class Again:
    """Batches that start anew each time."""

    def __iter__(self) -> Iterator[Any]:
        return pairs()


def joined(batches: list[Batch]) -> np.ndarray:
    return np.concatenate([np.asarray(batch.x) for batch in batches])


@given(st.integers(0, 30), st.integers(1, 40))
def test_slices_cover_every_sample_once(n: int, size: int) -> None:
    x = np.arange(2 * n).reshape(n, 2)
    batches = list(Sliced(x).batches(size))
    np.testing.assert_array_equal(joined(batches) if batches else x, x)
    assert all(batch.n == size for batch in batches[:-1])
    assert all(0 < batch.n <= size for batch in batches[-1:])


def test_arrays_are_never_read_as_a_whole(tmp_path: Any) -> None:
    lazy = Lazy(X)
    data = source({"a": lazy, "b": X})
    assert (data.n, data.repeatable, lazy.read) == (7, True, [])
    assert isinstance(data, Sliced)
    assert data.sample_bytes == 32
    batches = list(data.batches(3))
    assert lazy.read == [slice(0, 3), slice(3, 6), slice(6, 7)]
    np.testing.assert_array_equal(np.concatenate([batch.x["a"] for batch in batches]), X)
    np.testing.assert_array_equal(np.concatenate([batch.x["b"] for batch in batches]), X)

    mapped = np.memmap(tmp_path / "x.bin", X.dtype, "w+", shape=X.shape)
    mapped[:] = X
    assert all(isinstance(batch.x, np.memmap) for batch in source(mapped).batches(2))


def test_zarr_and_hdf5(tmp_path: Any) -> None:
    zarr, h5py = pytest.importorskip("zarr"), pytest.importorskip("h5py")
    stored = zarr.create_array(str(tmp_path / "x.zarr"), shape=X.shape, chunks=(2, 2), dtype=X.dtype)
    stored[:] = X
    np.testing.assert_array_equal(joined(list(source(stored).batches(3))), X)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        np.testing.assert_array_equal(joined(list(source(file.create_dataset("x", data=X)).batches(3))), X)


@pytest.mark.parametrize(
    ("data", "repeatable"),
    [
        (pairs, True),
        (Indexed(), True),
        (Sequenced(), True),
        (pairs(), False),
        (map(lambda pair: pair, pairs()), False),
        (Again(), True),
    ],
    ids=["function", "indexed", "num_batches", "generator", "map", "iterable"],
)
def test_batches_from_what_gives_them(data: Any, repeatable: bool) -> None:
    found = source(data)
    assert isinstance(found, Walked)
    assert (found.n, found.repeatable) == (None, repeatable)
    batches = list(found.batches(99))
    assert [batch.n for batch in batches] == [4, 3]
    np.testing.assert_array_equal(joined(batches), X)
    np.testing.assert_array_equal(np.concatenate([batch.targets for batch in batches]), Y)
    if repeatable:
        np.testing.assert_array_equal(joined(list(found.batches())), X)
    else:
        with pytest.raises(DataError, match="walked once, and it was: give an array"):
            found.batches()


def test_what_came_with_x_is_cut_with_it() -> None:
    [batch] = source(lambda: iter([([X, {"b": X}], Y, Y + 1)])).batches()
    assert batch.n == 7
    assert batch.sample_bytes == 16 + 16 + 8 + 8
    part = batch[2:4]
    np.testing.assert_array_equal(part.x[1]["b"], X[2:4])
    np.testing.assert_array_equal(part.targets, Y[2:4])
    np.testing.assert_array_equal(part.weights, Y[2:4] + 1)
    [alone] = source(lambda: iter([(X,)])).batches()
    assert alone.targets is None
    assert alone[:2].weights is None


def test_lists_of_numbers_are_arrays() -> None:
    assert source([[1.0, 7.0, 5.0]]).n == 1
    assert source([1.0, 2.0]).n == 2
    assert source([X, X]).n == 7


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (None, DtypeError, "NoneType; expected an array"),
        ("x.npy", DtypeError, "str; expected"),
        (3, DtypeError, "int; expected"),
        ([X, X[:3]], ShapeError, r"different numbers of samples: \[7, 3\].*a function that returns an iterator"),
        ([], ShapeError, "holds no array"),
        (np.float64(3), ShapeError, "scalar"),
        ([[1.0], [1.0, 2.0]], ShapeError, "same length"),
    ],
)
def test_what_is_no_data(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        source(data)


def test_a_batch_of_too_many_parts() -> None:
    with pytest.raises(ShapeError, match=r"\(x, targets, weights\), and has 4"):
        list(source(iter([(X, X, X, X)])).batches())


@pytest.mark.parametrize("part", ["targets", "weights"])
@pytest.mark.parametrize(
    "values", [np.zeros((9, 1)), np.zeros((1, 1)), [1.0, 2.0], {"a": np.zeros(5), "b": np.zeros(4)}]
)
def test_what_comes_with_a_batch_has_as_many_samples(part: str, values: Any) -> None:
    batch = (np.zeros((5, 2)), values) if part == "targets" else (np.zeros((5, 2)), None, values)
    with pytest.raises(ShapeError, match=f"the {part} of a batch must have one entry for each of its 5 samples"):
        list(source(lambda: iter([batch])).batches())


def test_scalars_are_no_targets() -> None:
    with pytest.raises(ShapeError, match="targets of a batch"):
        list(source(lambda: iter([(np.zeros((5, 2)), np.float64(1))])).batches())


def test_data_without_end() -> None:
    class Repeated:
        def cardinality(self) -> int:
            return -1

        def __iter__(self) -> Iterator[Any]:
            return iter([])

    with pytest.raises(DataError, match=r"no end.*\.take"):
        source(Repeated())

    class Unnumbered(Indexed):
        num_batches = None

    with pytest.raises(DataError, match="no end"):
        list(source(Unnumbered()).batches())


class Paired:
    """Batches as Keras' ``PyDataset`` has them."""

    num_batches = 3

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return np.full((2, 1), i), np.full(2, -i)


def in_twos() -> Iterator[tuple[Any, Any]]:
    return (Paired()[i] for i in range(3))


@pytest.mark.parametrize(
    "what",
    [in_twos(), in_twos, Paired(), {"a": np.zeros((6, 1)), "b": in_twos()}],
    ids=lambda what: type(what).__name__,
)
def test_batches_are_refused_with_what_makes_arrays_of_them(what: Any) -> None:
    with pytest.raises(DtypeError, match=r"^x must be an array of all samples.*, and is a .* Then stream\.$") as caught:
        refuse_batches(what, "x", " Then stream.")
    [line] = re.findall(r": (x, y = .*)\. Then", str(caught.value))
    known: dict[str, Any] = {"numpy": np, "batches": in_twos if what is in_twos else in_twos(), "data": Paired()}
    exec(line, known)
    np.testing.assert_array_equal(known["x"][:, 0], [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(known["y"], [0, 0, -1, -1, -2, -2])


@pytest.mark.parametrize(
    "what",
    [
        *(np.zeros((2, 1)), [[1.0], [2.0]], range(3), array.array("d", [1.0]), deque([1.0])),
        *({"a": [np.zeros(2)]}, None, 3.0, "x.npy", {1}),
    ],
    ids=lambda what: type(what).__name__,
)
def test_what_is_no_batches_is_left_to_others(what: Any) -> None:
    refuse_batches(what, "x", "")


# ---- memory maps


def mapped_pages() -> int | None:
    """Bytes of files that are mapped into this process and in memory."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            (line,) = (line for line in status if line.startswith("RssFile:"))
    except (OSError, ValueError):
        return None
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(mapped_pages() is None, reason="needs Linux's /proc")
@pytest.mark.parametrize("form", ["alone", "structure"])
def test_pages_of_a_memory_map_are_let_go_and_read_again(tmp_path: Path, form: str) -> None:
    np.save(tmp_path / "x.npy", np.arange(1 << 22))
    whole = np.load(tmp_path / "x.npy", mmap_mode="r")
    before = mapped_pages()
    first = int(whole.sum())
    assert mapped_pages() - before > 30 << 20  # 32 MiB
    let_go(whole[5:] if form == "alone" else {"x": [np.asarray(whole).reshape(-1, 2)[:7], None], "y": np.ones(2)})
    assert mapped_pages() - before < 4 << 20
    assert int(whole.sum()) == first == (1 << 21) * ((1 << 22) - 1)


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_a_memory_map_that_was_written_to_is_left_alone(tmp_path: Path, mode: str) -> None:
    np.save(tmp_path / "x.npy", np.zeros(5000))
    mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
    mapped[:] = 1
    let_go((mapped[:100], np.asarray(mapped)))
    assert mapped.sum() == 5000


def test_what_is_no_memory_map_is_let_go_without_effect() -> None:
    let_go([np.arange(3), Lazy(X), None, {"a": 1.0}])
