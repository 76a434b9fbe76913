"""What a worker is asked to do, and what a framework's module hands back for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.networks import NETWORKS, Network

# Entries of J up to which every sample is compared with the reference; above it, SUBSET samples spread over the batch,
# or as many as have COMPARE_MOST entries, but two.
COMPARE_ALL = 10_000_000
COMPARE_MOST = 20_000_000
SUBSET = 16


@dataclass(frozen=True)
class Task:
    """One network on n samples.

    Attributes
    ----------
    samples
        Samples whose Jacobian is compared with the reference.
    threads
        Threads of whatever takes a number of threads.
    layout
        Arrangement of a dense Jacobian, for the contenders that know layouts.
    """

    network_name: str
    n: int
    threads: int
    samples: tuple[int, ...]
    layout: str = "(n l) m"

    @property
    def network(self) -> Network:
        """The architecture."""
        return NETWORKS[self.network_name]

    def to_json(self) -> dict[str, Any]:
        """Plain data for the pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Task:
        """Inverse of `to_json`."""
        return cls(**{**data, "samples": tuple(data["samples"])})


def compared_samples(n: int, entries_per_sample: int) -> tuple[int, ...]:
    """All samples of a small Jacobian, `SUBSET` or fewer spread over the batch (first and last in) of a large one."""
    if n * entries_per_sample <= COMPARE_ALL:
        return tuple(range(n))
    count = min(n, SUBSET, max(2, COMPARE_MOST // entries_per_sample))
    return tuple(int(i) for i in np.linspace(0, n - 1, count).round())


@dataclass(frozen=True)
class Prepared:
    """A contender ready to run.

    Attributes
    ----------
    run
        One complete piece of work, finished when it returns; what is timed.
    check
        Arrays to compare with the reference, from what ``run`` returned: ``"y"`` (n, l), ``"jacobian"``
        (samples, l, m), ``"product"``, ``"residual"``; any of them.
    held
        Bytes that the returned value holds.
    """

    run: Callable[[], Any]
    check: Callable[[Any], dict[str, NDArray[Any]]]
    held: Callable[[Any], int] = lambda _: 0
