"""BLAS threads: NumPy's and SciPy's wheels bring a library each, with a pool of spinning threads each.

On small matrices two pools of two threads on two cores wait for each other: what takes a millisecond on one takes
five. `one_thread` holds the libraries at one thread for the length of a `with` statement, where the matrices are too
small to share. It never raises a number that was set lower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401  loads its library, so that it is found
import scipy.linalg  # noqa: F401  the same
from threadpoolctl import ThreadpoolController

LIBRARIES = ("numpy", "scipy")


@cache
def _libraries() -> dict[str, tuple[Any, ...]]:
    """The BLAS libraries that come with NumPy and with SciPy; one that is neither's belongs to both."""
    found = [c for c in ThreadpoolController().lib_controllers if c.user_api == "blas"]
    own = {id(c): {name for name in LIBRARIES if f"{name}.libs" in Path(c.filepath).parts} for c in found}
    return {name: tuple(c for c in found if not own[id(c)] or name in own[id(c)]) for name in LIBRARIES}


@contextmanager
def one_thread(*names: str) -> Iterator[None]:
    """Hold the BLAS libraries of ``names`` ("numpy", "scipy") at one thread.

    Examples
    --------
    >>> with one_thread("numpy", "scipy"):
    ...     int(np.trace(np.eye(3) @ np.eye(3)))
    3
    """
    held = {id(c): c for name in names for c in _libraries()[name]}.values()
    before = [(c, c.num_threads) for c in held]
    for library, threads in before:
        if threads > 1:
            library.set_num_threads(1)
    try:
        yield
    finally:
        for library, threads in before:
            if threads > 1:
                library.set_num_threads(threads)
