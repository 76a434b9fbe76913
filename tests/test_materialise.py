"""Filling by tiles and threads equals the plain sum of the blocks."""

import os
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netjac import materialise
from netjac.materialise import cover, fill, for_each


@dataclass
class Columns:
    """The least that `fill` needs of a block: some columns, explicit."""

    own: np.ndarray
    values: np.ndarray  # (n, l, own)

    def columns(self):
        return self.own

    def fill(self, out, samples, *, add):
        if add:
            out[..., self.own] += self.values[samples]
        else:
            out[..., self.own] = self.values[samples]

    def take(self, samples, outputs):
        return Columns(self.own, self.values[samples, outputs])

    def pieces(self, columns):
        starts = range(0, len(self.own), columns)
        return [Columns(self.own[i : i + columns], self.values[..., i : i + columns]) for i in starts]


def plain_sum(blocks, shape):
    """Oracle: one entry after the other."""
    total = np.zeros(shape)
    for block in blocks:
        for position, column in enumerate(block.own):
            total[:, :, column] += block.values[:, :, position]
    return total


def check(blocks, out):
    # Sums are taken in the same order, so equality is exact.
    np.testing.assert_array_equal(out, plain_sum(blocks, out.shape))


@st.composite
def problems(draw):
    n, l, m = draw(st.integers(0, 9)), draw(st.integers(0, 3)), draw(st.integers(0, 12))
    kinds = st.one_of(
        st.sets(st.integers(0, m - 1)) if m else st.just(set()),
        st.tuples(st.integers(0, m), st.integers(0, m)).map(lambda ends: set(range(min(ends), max(ends)))),
    )
    sets = draw(st.lists(kinds, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks = []
    for own in sets:
        columns = np.array(sorted(own), np.intp)
        blocks.append(Columns(columns, random.integers(-9, 9, (n, l, columns.size)).astype(float)))
    return blocks, (n, l, m)


@settings(deadline=None)
@given(problems(), st.integers(1, 4), st.sampled_from([1, 100, 1000, None]), st.permutations(range(3)))
def test_any_tile_size_thread_count_and_strides_give_the_plain_sum(problem, threads, tile_bytes, order):
    blocks, shape = problem
    own = cover([block.columns() for block in blocks], shape[2])
    memory = np.full([shape[axis] for axis in order], np.nan)
    out = memory.transpose(np.argsort(order))
    fill(blocks, own, out, threads=threads, tile_bytes=tile_bytes, inline_bytes=0)
    check(blocks, out)


@given(problems())
def test_a_small_result_is_filled_by_the_calling_thread(problem):
    blocks, shape = problem
    out = np.full(shape, np.nan)
    fill(blocks, cover([block.columns() for block in blocks], shape[2]), out)
    check(blocks, out)


def test_the_comparison_fails_where_a_zero_column_was_forgotten():
    blocks = [Columns(np.arange(2), np.ones((3, 1, 2)))]
    own = cover([np.arange(2)], 3)
    wrong = materialise.Cover((), own.adds, own.alone, own.shared)
    out = np.full((3, 1, 3), 7.0)
    fill(blocks, wrong, out)
    with pytest.raises(AssertionError):
        check(blocks, out)


@given(problems())
def test_the_cover_says_who_meets_whom(problem):
    blocks, (_, _, m) = problem
    sets = [set(block.own.tolist()) for block in blocks]
    own = cover([block.columns() for block in blocks], m)
    alone = [i for i, a in enumerate(sets) if not any(a & b for j, b in enumerate(sets) if j != i)]
    assert sorted(own.alone) == alone
    assert sorted((*own.alone, *(i for group in own.shared for i in group))) == list(range(len(blocks)))
    for group in own.shared:
        for other in own.shared:
            if group is not other:
                assert not set().union(*(sets[i] for i in group)) & set().union(*(sets[i] for i in other))
    assert all(add == bool(sets[i] & set().union(*sets[:i])) for i, add in enumerate(own.adds))


def test_many_scattered_zero_columns_are_one_index_array():
    m = 1000
    own = cover([np.arange(0, m, 2)], m)
    assert len(own.zeros) == 1
    blocks = [Columns(np.arange(0, m, 2), np.ones((2, 1, m // 2)))]
    out = np.full((2, 1, m), np.nan)
    fill(blocks, own, out)
    check(blocks, out)


def test_for_each_leaves_nothing_of_the_work_with_other_threads(monkeypatch):
    calls = []  # what was given to the pool: it may keep that until one of its threads looks again

    def submit(function, *arguments):
        calls.append((function, arguments))
        return submitted(function, *arguments)

    submitted = materialise._pool.submit
    monkeypatch.setattr(materialise._pool, "submit", submit)
    array = np.zeros(3)
    kept = weakref.ref(array)

    def work(item, array=array):
        array[item] += 1

    for_each(work, range(3), 2)
    np.testing.assert_array_equal(array, 1)
    del work, array
    assert len(calls) == 1
    assert kept() is None


def test_for_each_uses_as_many_threads_as_asked():
    together = threading.Barrier(3, timeout=30)
    names = set()

    def work(item):
        together.wait()
        names.add(threading.current_thread().name)

    for_each(work, range(3), 3)
    assert len(names) == 3


def test_an_error_is_raised_and_stops_the_rest():
    done = []

    def work(item):
        if item == 3:
            raise IndexError("item three")
        time.sleep(0.001)
        done.append(item)

    for threads in (1, 3):
        done.clear()
        with pytest.raises(IndexError, match="item three"):
            for_each(work, range(1000), threads)
        assert len(done) < 1000


def test_an_error_in_another_thread_is_raised_here():
    caller = threading.current_thread()
    together = threading.Barrier(2, timeout=30)

    def work(item):
        together.wait()
        if threading.current_thread() is not caller:
            raise ValueError("elsewhere")

    with pytest.raises(ValueError, match="elsewhere"):
        for_each(work, range(2), 2)


def test_nested_and_concurrent_calls_finish():
    total = []
    with ThreadPoolExecutor(8) as outside:
        list(outside.map(lambda _: for_each(lambda i: for_each(total.append, range(5), 4), range(5), 4), range(20)))
    assert len(total) == 20 * 25


def test_workers_follow_the_callers_floating_point_settings():
    together = threading.Barrier(2, timeout=30)
    seen = []

    def work(item):
        together.wait()
        seen.append(np.geterr()["over"])

    with np.errstate(over="ignore"):
        for_each(work, range(2), 2)
    assert seen == ["ignore", "ignore"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own():
    for_each(lambda item: None, range(4), 2)  # the parent's threads exist
    child = os.fork()
    if child == 0:
        done = []
        for_each(done.append, range(100), 3)
        os._exit(0 if sorted(done) == list(range(100)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_cover_pickles():
    own = cover([np.arange(3), np.arange(2, 5)], 6)
    again = pickle.loads(pickle.dumps(own))
    assert (again.adds, again.alone, again.shared) == (own.adds, own.alone, own.shared)
