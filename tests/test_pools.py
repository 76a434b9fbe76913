"""BLAS libraries held at a number of threads, and given back; `threads=` is what BLAS and tiles take together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from netjac import materialise, normal, pools, reductions
from netjac.blocks.outer import OuterBlock
from netjac.examples import linear_layer
from netjac.jacobian import Jacobian
from netjac.pools import LIBRARIES, at_most, one_thread
from netjac.streaming import Stream, Tile


def threads(owner: str = "") -> list[int]:
    """Threads of each BLAS library, or of those that come with an owner alone."""
    found = [library for library in threadpool_info() if library["user_api"] == "blas"]
    own = [library["num_threads"] for library in found if f"{owner}.libs" in library["filepath"]]
    return own or [library["num_threads"] for library in found]


def test_libraries_are_held_and_given_back_whatever_happens() -> None:
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        assert 2 in before
        with one_thread(*LIBRARIES):
            assert set(threads()) == {1}
            with one_thread("numpy"):
                assert set(threads()) == {1}
            assert set(threads()) == {1}
        assert threads() == before
        with pytest.raises(RuntimeError, match="inside"), one_thread("scipy"):
            raise RuntimeError("inside")
        assert threads() == before
        with one_thread():
            assert threads() == before


def test_a_lower_number_is_left_alone() -> None:
    with threadpool_limits(1, user_api="blas"):
        with one_thread(*LIBRARIES):
            assert set(threads()) == {1}
        assert set(threads()) == {1}
        with at_most(5, *LIBRARIES):
            assert set(threads()) == {1}


def test_the_smallest_limit_counts() -> None:
    with threadpool_limits(4, user_api="blas"):
        before = threads()
        with at_most(3, *LIBRARIES):
            assert set(threads()) == {3}
            with at_most(2, *LIBRARIES):
                assert set(threads()) == {2}
                with at_most(3, *LIBRARIES):
                    assert set(threads()) == {2}
            assert set(threads()) == {3}
        assert threads() == before


def elsewhere(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in another thread, which goes on living until the end of the test."""
    found: list[Any] = []
    done = threading.Event()

    def run() -> None:
        found.append(work())
        done.set()
        over.wait(60)

    over = threading.Event()
    threading.Thread(target=run, daemon=True).start()
    assert done.wait(60)
    return found[0]


def test_what_two_threads_hold_ends_with_the_number_there_was_whoever_ends_first() -> None:
    with threadpool_limits(4, user_api="blas"):
        before = threads()
        mine, other = at_most(3, *LIBRARIES), at_most(2, *LIBRARIES)
        mine.__enter__()
        elsewhere(other.__enter__)
        assert set(threads()) == {2}
        mine.__exit__()
        assert set(threads()) == {2}
        elsewhere(lambda: other.__exit__())
        assert threads() == before


def test_a_thread_that_held_a_library_leaves_it_to_others() -> None:
    """threadpoolctl from 3.8 on ignores all threads but the one that set a number first, as long as it lives."""

    def hold() -> list[int]:
        with at_most(1, *LIBRARIES):
            return threads()

    with threadpool_limits(3, user_api="blas"):
        for _ in range(2):
            assert set(elsewhere(hold)) == {1}
        assert set(hold()) == {1}
        assert set(threads()) == {3}


class OwnNumbers:
    """A controller as of a BLAS on OpenMP: every thread has its own number of threads."""

    threading_layer = "openmp"

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def num_threads(self) -> int:
        return getattr(self._local, "number", 4)

    def set_num_threads(self, number: int) -> None:
        self._local.number = number


def test_on_openmp_each_thread_is_held_apart() -> None:
    controller = OwnNumbers()
    library = pools._Library(controller)
    library.hold(3)

    def hold() -> list[int]:
        seen = [controller.num_threads]
        library.hold(2)
        seen.append(controller.num_threads)
        library.release(2)
        return [*seen, controller.num_threads]

    assert elsewhere(hold) == [4, 2, 4]
    assert controller.num_threads == 3
    library.release(3)
    assert controller.num_threads == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_it_does_not_have() -> None:
    with one_thread("numpy"):
        (library, *_) = pools._libraries(("numpy",))
    with library._lock:
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        with one_thread("numpy"):
            os._exit(0 if threads("numpy") == [1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- the threads a caller asks for


class Watch:
    """How many threads work at once, times the most that BLAS may take."""

    def __init__(self) -> None:
        self.most = self.calls = 0
        self._inside = 0
        self._lock = threading.Lock()

    def around(self, function: Callable[..., Any], owner: str) -> Callable[..., Any]:
        """The function, which computes with the BLAS of ``owner``, watched."""

        def watched(*args: Any, **options: Any) -> Any:
            with self._lock:
                self._inside += 1
                self.calls += 1
                self.most = max(self.most, self._inside * max(threads(owner)))
            try:
                return function(*args, **options)
            finally:
                with self._lock:
                    self._inside -= 1

        return watched


PLACES = (
    (OuterBlock, "fill", "numpy"),
    (OuterBlock, "add_gram", "numpy"),
    (OuterBlock, "add_product", "numpy"),
    (OuterBlock, "add_adjoint", "numpy"),
    (OuterBlock, "add_column_squares", "numpy"),
    (normal, "_add_normal_tile", "numpy"),
    (reductions, "inverse_root", "scipy"),
)
ALONE = linear_layer(20_000)  # two megabytes: not filled by the calling thread alone
SHARED = Jacobian(ALONE.parameters, ALONE.output_space, ALONE.y, ALONE.blocks * 2, ALONE.coverage)
FEW = slice(0, 300)


def stream(J: Jacobian, count: int) -> Stream:
    """A stream over the rows of a Jacobian that is there."""
    made = object.__new__(Stream)
    made.m, made._threads = J.m, count
    made._source = SimpleNamespace(repeatable=True, n=J.n)
    tiles = [Tile(slice(i, i + 1000), slice(0, J.l), J.l, J[i : i + 1000]) for i in range(0, J.n, 1000)]
    made._walk = lambda what, wide=False: (tile for tile in tiles)
    return made


VERBS: dict[str, Callable[[Jacobian, int], Any]] = {
    "to_array": lambda J, count: J.to_array(threads=count),
    "to_array of little": lambda J, count: J[FEW].to_array(threads=count),
    "to_array, by columns": lambda J, count: J.to_array("m (n l)", threads=count),
    "gram": lambda J, count: J[FEW].gram(threads=count),
    "gram with another": lambda J, count: J[FEW].gram(J[:5], threads=count),
    "normal": lambda J, count: J.normal(threads=count),
    "normal, weighted": lambda J, count: J.normal(np.linspace(-1, 1, J.n), threads=count),
    "stream": lambda J, count: stream(J, count).reduce(
        normal=True, adjoint=np.ones(J.shape[0]), column_norms=True, sketch=3
    ),
    "stream, gaussian": lambda J, count: stream(J, count).sketch(3, kind="gaussian"),
    "stream, leverage": lambda J, count: stream(J, count).leverage(),
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("J", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("verb", VERBS)
def test_no_more_threads_than_asked_for(verb: str, J: Jacobian, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    for place, name, owner in PLACES:
        monkeypatch.setattr(place, name, watch.around(getattr(place, name), owner))
    with threadpool_limits(4, user_api="blas"):
        before = threads()
        VERBS[verb](J, count)
        assert threads() == before
    assert watch.calls
    assert watch.most <= count


def test_one_tile_leaves_all_threads_to_blas() -> None:
    seen = []
    with threadpool_limits(4, user_api="blas"):
        for items in (range(1), range(2), range(3), range(7)):
            own: set[int] = set()
            materialise.for_each(lambda _, own=own: own.add(max(threads("numpy"))), items, 3)
            seen.append(own)
    assert seen == [{3}, {1}, {1}, {1}]
