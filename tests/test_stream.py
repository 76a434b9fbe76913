"""What a stream is made of, without a network: items made ahead, sums over tiles, progress."""

from __future__ import annotations

import gc
import io
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import netjac as nj
from netjac import prefetch, progress, reductions
from netjac.examples import linear_layer
from netjac.prefetch import ahead
from netjac.progress import Progress
from netjac.streaming import Tile

N, L = 10, 2
J = linear_layer(N)
DENSE = np.asarray(J)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "netjac-prefetch"]


# ---- items made ahead


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_same_items_in_the_same_order(count: int) -> None:
    assert list(ahead(iter(range(50)), count)) == list(range(50))
    assert list(ahead(iter(()), count)) == []
    assert not threads()


@pytest.mark.parametrize("count", [1, 2])
def test_no_more_are_made_than_asked_for(count: int) -> None:
    made = threading.Semaphore(0)
    begun: list[int] = []

    def items() -> Iterator[int]:
        for i in range(10):
            begun.append(i)
            made.release()
            yield i

    walk = ahead(items(), count)
    for used in range(4):
        assert next(walk) == used
        for _ in range(count if used == 0 else 0):
            made.acquire()  # one for each that may be ahead
        made.acquire()
        assert max(begun) == used + count
    walk.close()
    assert not threads()


def test_the_next_is_made_while_the_last_is_used() -> None:
    second = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        second.set()
        yield 2

    for item in ahead(items(), 1):
        assert second.wait(60)  # while the first is used: it would hang without a thread
        del item


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(2)])
def test_what_is_raised_in_the_making_is_raised_at_its_place(count: int, error: BaseException) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise error

    walk = ahead(items(), count)
    assert next(walk) == 1
    with pytest.raises(type(error)):
        next(walk)
    assert not threads()


@pytest.mark.parametrize("how", ["close", "dropped", "raised", "interrupted"])
def test_a_walk_that_ends_early_leaves_no_thread_and_closes_the_items(how: str) -> None:
    closed: list[bool] = []

    def items() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.append(True)

    walk = ahead(items(), 1)
    next(walk)
    assert threads()
    if how == "close":
        walk.close()
    elif how == "dropped":
        del walk
        gc.collect()
    else:
        error = KeyboardInterrupt if how == "interrupted" else RuntimeError
        with pytest.raises(error):
            walk.throw(error())
    assert not threads()
    assert closed == [True]


def test_one_that_waits_for_its_data_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "PATIENCE", 0.05)
    waiting, arrived = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 0
        waiting.set()
        arrived.wait(60)
        yield 1

    walk = ahead(items(), 1)
    next(walk)
    assert waiting.wait(60)
    walk.close()
    [thread] = threads()
    assert thread.daemon
    arrived.set()
    thread.join(60)
    assert not threads()


def test_items_that_were_used_are_let_go() -> None:
    class Item:
        pass

    walk = ahead((Item() for _ in range(3)), 1)
    item = next(walk)
    gone = weakref.ref(item)
    del item
    gc.collect()
    assert gone() is None
    walk.close()


# ---- sums over tiles


def tiles(*borders: int, outputs: bool = False) -> list[Tile]:
    """J cut at these samples, and each sample's outputs one by one if asked."""
    found = []
    edges = [0, *sorted(borders), N]
    for a, b in pairwise(edges):
        if a == b:
            continue
        whole = J[a:b]
        cuts = [slice(0, L)] if not outputs else [slice(o, o + 1) for o in range(L)]
        for cut in cuts:
            part = whole if not outputs else whole.scaled(np.eye(L)[cut][None].repeat(b - a, 0))
            found.append(Tile(slice(a, b), cut, L, part))
    return found


def total(reduction: reductions.Reduction, pieces: list[Tile], w: np.ndarray | None = None) -> np.ndarray:
    """The sum, with weights (N, L)."""
    for piece in pieces:
        reduction.add(piece, None if w is None else w[piece.samples, piece.outputs])
    return reduction.result(N, N * L)


cuts = st.lists(st.integers(0, N), max_size=4)


@pytest.fixture(scope="module")
def _always_shared() -> Iterator[None]:
    """However small a tile is, its samples are shared out to the threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "SHARED_BYTES", 0)
        yield


@pytest.mark.usefixtures("_always_shared")
@given(cuts, st.booleans(), st.integers(0, 2**32), st.integers(1, 3))
def test_sums_depend_neither_on_tiles_nor_on_threads(
    borders: list[int], outputs: bool, seed: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    r, w = rng.normal(size=N * L), rng.normal(size=(N, L))
    pieces = tiles(*borders, outputs=outputs)
    close = dict(rtol=1e-12, atol=1e-12 * np.abs(DENSE).max() ** 2)
    np.testing.assert_allclose(total(reductions.Normal(8, threads), pieces), DENSE.T @ DENSE, **close)
    weighted = DENSE.T @ (w.reshape(-1, 1) * DENSE)
    np.testing.assert_allclose(total(reductions.Normal(8, threads), pieces, w), weighted, **close)
    for given_r in (r, r.reshape(N, L), lambda t: r.reshape(N, L)[t.samples, t.outputs]):
        np.testing.assert_allclose(total(reductions.Adjoint(8, given_r, threads), pieces), DENSE.T @ r, **close)
    np.testing.assert_allclose(
        total(reductions.Adjoint(8, r, threads), pieces, w), DENSE.T @ (w.reshape(-1) * r), **close
    )
    root = np.abs(w).reshape(-1, 1) ** 0.5
    for weights, rows in ((None, DENSE), (np.abs(w), root * DENSE)):
        norms = np.linalg.norm(rows, axis=0)
        np.testing.assert_allclose(total(reductions.ColumnNorms(8, threads), pieces, weights), norms, rtol=1e-12)
    for kind in (reductions.CountSketch, reductions.GaussianSketch):
        make = partial(kind, 8, 3, 5, threads)
        np.testing.assert_allclose(total(make(), pieces), total(make(), tiles()), **close)
        np.testing.assert_allclose(total(make(), pieces, np.abs(w)), total(make(), tiles(), np.abs(w)), **close)
        single = total(make(), pieces, np.eye(N * L)[3].reshape(N, L))  # row 3 alone, in some multiples
        np.testing.assert_allclose(single, np.outer(single @ DENSE[3] / (DENSE[3] @ DENSE[3]), DENSE[3]), **close)


@pytest.mark.parametrize("kind", ["count", "gaussian"])
def test_a_sketch_is_a_random_matrix_times_j(kind: str) -> None:
    """Its mean Sᵀ S is 1; and a count sketch moves each row to one place, all places and signs alike."""
    draws = 200
    mean = np.zeros((8, 8))
    for seed in range(draws):
        sums = reductions.chosen(8, sketch=4, seed=seed, kind=kind)
        sketch = total(sums["sketch"], tiles(3))
        assert sketch.shape == (4, 8)
        mean += sketch.T @ sketch / draws
    expected = DENSE.T @ DENSE
    assert np.linalg.norm(mean - expected) < 0.25 * np.linalg.norm(expected)
    if kind == "count":
        one = reductions.CountSketch(8, 4, 3, 1)
        for tile in tiles(*range(N)):
            before = one.result(N, N * L).copy()
            one.add(tile)
            change = one.result(N, N * L) - before
            rows = tile.jacobian.to_array()
            assert np.linalg.norm(change) in (
                pytest.approx(np.linalg.norm(rows)),  # to two places
                pytest.approx(np.linalg.norm(rows[0] + rows[1])),  # to one
                pytest.approx(np.linalg.norm(rows[0] - rows[1])),
            )
        drawn = reductions.Draws(0, lambda rng: rng.integers(0, 8, reductions.BLOCK)).of(np.arange(3000))
        assert (np.bincount(drawn, minlength=8) > 250).all()


def test_random_numbers_depend_on_the_row_alone() -> None:
    draws = reductions.Draws(7, lambda rng: rng.standard_normal((reductions.BLOCK, 2)))
    numbers = np.arange(5 * reductions.BLOCK)
    whole = draws.of(numbers)
    some = np.array([0, 3, reductions.BLOCK - 1, reductions.BLOCK, 3 * reductions.BLOCK + 2])
    np.testing.assert_array_equal(draws.of(some), whole[some])
    assert len(np.unique(whole)) == whole.size
    other = reductions.Draws(8, lambda rng: rng.standard_normal((reductions.BLOCK, 2))).of(some)
    assert not np.any(other == whole[some])


@pytest.mark.usefixtures("_always_shared")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_leverage_is_the_diagonal_of_the_hat_matrix(damping: float, threads: int) -> None:
    dense = DENSE
    root = reductions.inverse_root(dense.T @ dense, damping)
    found = reductions.leverages(J, root, threads)
    hat = dense @ np.linalg.pinv(dense.T @ dense + damping * np.eye(8)) @ dense.T
    np.testing.assert_allclose(found, np.diag(hat), rtol=1e-9)
    assert reductions.leverages(J[:0], root, threads).shape == (0,)


def test_leverage_leaves_out_what_is_undetermined() -> None:
    few = J[:2]  # 4 rows, 8 parameters
    dense = np.asarray(few)
    found = reductions.leverages(few, reductions.inverse_root(dense.T @ dense, 0.0), 1)
    np.testing.assert_allclose(found, np.diag(dense @ np.linalg.pinv(dense)), rtol=1e-9)
    assert not reductions.leverages(few, reductions.inverse_root(np.zeros((8, 8)), 0.0), 1).any()
    with pytest.raises(nj.DataError, match="not finite"):
        reductions.inverse_root(np.full((8, 8), np.nan), 0.0)


@pytest.mark.parametrize(
    ("r", "error", "message"),
    [
        (np.ones(19), nj.ShapeError, "ends before sample 9"),
        (np.ones(21), nj.ShapeError, r"shape \(21,\), and the data had 10 samples and 20 rows"),
        (np.ones((9, 2)), nj.ShapeError, "ends before"),
        (np.ones((11, 2)), nj.ShapeError, "the data had"),
        (np.ones((10, 3)), nj.ShapeError, "l = 2"),
        (np.ones((10, 2, 1)), nj.ShapeError, "must have shape"),
        (np.ones(20) * 1j, nj.DtypeError, "complex"),
        (np.r_[np.ones(12), np.nan, np.ones(7)], nj.DataError, "not in samples 5 to 9"),
        (lambda tile: np.ones(3), nj.ShapeError, "the function for r must return"),
    ],
)
def test_values_that_do_not_fit_the_rows(r: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        total(reductions.Adjoint(8, r, 1), tiles(5))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sketch": 0}, nj.DataError),
        ({"sketch": 2.0}, nj.DtypeError),
        ({"sketch": True}, nj.DtypeError),
        ({"sketch": 2, "seed": -1}, nj.DataError),
        ({"sketch": 2, "kind": "sparse"}, nj.DataError),
    ],
)
def test_what_cannot_be_reduced(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        reductions.chosen(8, column_norms=True, **changes)


def test_a_tile_unpacks_as_those_of_a_jacobian() -> None:
    [tile] = tiles()
    samples, outputs, part = tile
    [(s, o, whole)] = J.tiles()
    assert (samples, outputs) == (s, o)
    np.testing.assert_array_equal(part.to_array(), whole.to_array())
    assert replace(tile, l=3).l == 3


# ---- progress


@dataclass
class Terminal:
    """A stream that says whether it is a terminal."""

    is_terminal: bool

    def __post_init__(self) -> None:
        self.text = io.StringIO()
        self.write, self.flush = self.text.write, self.text.flush

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("terminal", "shown", "expected"),
    [
        (True, None, True),
        (False, None, False),
        (True, False, False),
        (False, False, False),
        (False, True, True),
    ],
)
def test_who_sees_it(monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: bool | None, expected: bool) -> None:
    stream = Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "DELAY", 0)
    with Progress("normal", 20, shown) as bar:
        bar.add(5)
    assert ("normal" in stream.text.getvalue()) == expected


def test_nothing_before_a_second_and_nothing_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "DELAY", 1000)
    with Progress("normal", 20, stream) as bar:
        bar.add(5)
    assert stream.getvalue() == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(progress, "DELAY", 0)
    with Progress("normal", 20, stream) as bar:
        bar.add(5)
    assert stream.getvalue() == ""


def test_rate_and_time_left_count_rows_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 90, 5 and 5 rows: after the first, nine tenths of the work are done, not a third."""
    monkeypatch.setattr(progress, "DELAY", 0)
    bar = Progress("normal", 100, io.StringIO())
    shown = bar._bar
    start = shown.start_t
    for rows, seconds, expected in ((90, 9, "90.0/100 [00:09<00:01, 10.0 rows/s]"), (5, 11, "95.0/100 [00:11<")):
        shown._time = lambda now=start + seconds: now
        bar.add(rows)
        assert expected in str(shown)
    assert "8.64 rows/s" in str(shown)  # 95 rows in 11 s, whatever the last tile's rate
    bar.close()


@pytest.mark.parametrize("shown", [3, "yes", [True]])
def test_what_is_no_place_for_progress(shown: Any) -> None:
    with pytest.raises(nj.DtypeError, match="progress must be"):
        Progress("normal", 1, shown)
