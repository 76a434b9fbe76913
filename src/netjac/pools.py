"""BLAS threads: NumPy's and SciPy's wheels bring a library each, with a pool of spinning threads each.

They are held here for the length of a `with` statement: at one thread where matrices are too small to share (two pools
of two threads on two cores wait for each other, and what takes a millisecond on one takes five), and at what a caller's
``threads=`` leaves them, so that threads of tiles times threads of BLAS are never more than were asked for.

A library's number of threads is that of the whole process (except where it is built on OpenMP), so that what is held is
held for everybody, and where several threads hold it the smallest number counts. One that was set lower is not raised.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np  # noqa: F401  loads its library, so that it is found
import scipy.linalg  # noqa: F401  the same
from threadpoolctl import ThreadpoolController

LIBRARIES = ("numpy", "scipy")


class _Library:
    """One library, and the limits that are in force on it."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._lock = threading.Lock()
        # On OpenMP every thread has a number of its own.
        self._state: Any = threading.local() if _by_thread(controller) else SimpleNamespace()

    def hold(self, threads: int) -> None:
        """Hold it at ``threads``, or fewer if others do or if it was set to fewer."""
        with self._lock:
            if not getattr(self._state, "limits", None):
                self._state.limits, self._state.own = [], self._controller.num_threads
            self._state.limits.append(threads)
            self._apply()

    def release(self, threads: int) -> None:
        """Take back one `hold`."""
        with self._lock:
            self._state.limits.remove(threads)
            self._apply()

    def _apply(self) -> None:
        wanted = min([self._state.own, *self._state.limits])
        if self._controller.num_threads != wanted:
            # From 3.8 on, threadpoolctl lets the thread that set a number first set it again, and no other. Here all
            # threads agree on one number, so none of them keeps that right.
            clear = getattr(self._controller, "clear_controlling_thread", _nothing)
            clear(force=True)
            self._controller.set_num_threads(wanted)
            clear(force=True)


def _by_thread(controller: Any) -> bool:
    return getattr(controller, "threading_layer", None) == "openmp"


def _nothing(force: bool) -> None:
    pass


@cache
def _libraries(names: tuple[str, ...]) -> tuple[_Library, ...]:
    """The BLAS libraries that come with any of ``names``; one that is neither NumPy's nor SciPy's belongs to both."""
    return tuple(library for library, owners in _found() if not owners or owners.intersection(names))


@cache
def _found() -> list[tuple[_Library, set[str]]]:
    """Every BLAS library that is loaded, and which of `LIBRARIES` it came with."""
    found = [c for c in ThreadpoolController().lib_controllers if c.user_api == "blas"]
    return [(_Library(c), {name for name in LIBRARIES if f"{name}.libs" in Path(c.filepath).parts}) for c in found]


def _forget() -> None:
    _libraries.cache_clear()
    _found.cache_clear()


if hasattr(os, "register_at_fork"):  # a lock may be held by a thread that the child does not have
    os.register_at_fork(after_in_child=_forget)


class at_most:
    """Hold the BLAS libraries of ``names`` ("numpy", "scipy") at ``threads`` threads or fewer, in a `with` statement.

    Examples
    --------
    >>> with at_most(2, "numpy", "scipy"):
    ...     int(np.trace(np.eye(3) @ np.eye(3)))
    3
    """

    def __init__(self, threads: int, *names: str) -> None:
        self._threads = threads
        self._held = _libraries(names) if names else ()

    def __enter__(self) -> None:
        for library in self._held:
            library.hold(self._threads)

    def __exit__(self, *_: object) -> None:
        for library in self._held:
            library.release(self._threads)


def one_thread(*names: str) -> at_most:
    """Hold the BLAS libraries of ``names`` at one thread; see `at_most`."""
    return at_most(1, *names)
