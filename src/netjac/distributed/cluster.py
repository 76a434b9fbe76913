"""Tasks on a Dask cluster: where they run, and sums of what they return."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, final

import dask
import distributed
import numpy as np
from numpy.typing import NDArray

from netjac.distributed.worker import limit_threads, total
from netjac.optimize.options import OptionError

WAIT = 60
"""Seconds to wait for a first worker."""

FAN_IN = 8
"""Results that one task of a reduction adds up."""


class Threads(distributed.WorkerPlugin):
    """Tells each worker's process, old or new, how many threads TensorFlow may use there."""

    name = "netjac-threads"
    idempotent = True

    def __init__(self) -> None:
        self._here = (socket.gethostname(), os.getpid())

    def setup(self, worker: Any) -> None:
        """Called by Dask in each worker, before any task."""
        if self._here != (socket.gethostname(), os.getpid()):  # not a worker inside the client's own process
            limit_threads(worker.state.nthreads)


def homes_may_be_gone() -> distributed.SchedulerPlugin:
    """Lets tasks whose homes have died go to any worker that comes, also where none was left for a while.

    Dask allows other workers only while it decides where a task goes; a task that found none at all would wait for
    its own home for ever. The class is made here so that it travels as a whole: the scheduler may not have netjac.
    """

    class HomesMayBeGone(distributed.SchedulerPlugin):
        name = "netjac-homes"
        idempotent = True

        def add_worker(self, scheduler: Any, worker: str) -> None:
            """Called by Dask before it looks which of the waiting tasks the new worker can do."""
            waiting = [task for task in scheduler.unrunnable if task.loose_restrictions]
            gone = [task.key for task in waiting if scheduler.workers.keys().isdisjoint(task.worker_restrictions or ())]
            scheduler.set_restrictions(dict.fromkeys(gone))

    return HomesMayBeGone()


@final
class Cluster:
    """Tasks on a Dask cluster, those of a tile at its home."""

    def __init__(self, client: Any) -> None:
        if client is None:
            try:
                client = distributed.default_client()
            except ValueError:
                raise OptionError(
                    "there is no Dask client: give client=distributed.Client(...), of a LocalCluster or of the address "
                    "of a scheduler."
                ) from None
        if not isinstance(client, distributed.Client):
            raise OptionError(f"client must be a distributed.Client or None, and is a {type(client).__name__}.")
        if client.asynchronous:
            raise OptionError("the Dask client is asynchronous; give one made with asynchronous=False.")
        self.client = client
        client.register_plugin(Threads())
        client.register_plugin(homes_may_be_gone())

    def slots(self) -> list[str]:
        """Address of a worker, once for each of its threads."""
        threads = self.client.nthreads()
        if not threads:
            self.client.wait_for_workers(1, timeout=WAIT)
            threads = self.client.nthreads()
        return [address for address in sorted(threads) for _ in range(threads[address])]

    def submit(self, function: Callable[..., Any], *given: Any, home: str | None = None) -> Any:
        """A task, at its home if that is alive, and its result as a future."""
        place = {} if home is None else {"workers": [home], "allow_other_workers": True}
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TiB"}):  # tiles of data are large
            return self.client.submit(function, *given, pure=False, **place)

    def total(self, parts: Sequence[Any]) -> NDArray[np.float64]:
        """The sum of futures, added up in a tree whose shape depends on their number alone."""
        level = list(parts)
        while len(level) > 1:
            groups = [level[i : i + FAN_IN] for i in range(0, len(level), FAN_IN)]
            level = [self.submit(total, group) for group in groups]
        out: NDArray[np.float64] = np.asarray(self.client.gather(level)[0], np.float64)
        return out

    def gather(self, futures: Sequence[Any]) -> list[Any]:
        """Their results."""
        found: list[Any] = self.client.gather(list(futures))
        return found


@final
class Homes:
    """The worker that each tile belongs to: the same as long as it lives and has no more than its share."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self._cluster = cluster
        slots = cluster.slots()
        self._homes: list[str] = [slots[i * len(slots) // count] for i in range(count)]

    def now(self) -> list[str]:
        """Addresses for work that is about to be begun; new workers get their share."""
        slots = self._cluster.slots()
        most = {home: -(-len(self._homes) * slots.count(home) // len(slots)) for home in slots}
        held = dict.fromkeys(most, 0)
        moving = []
        for i, home in enumerate(self._homes):
            if held.get(home, 0) < most.get(home, 0):
                held[home] += 1
            else:
                moving.append(i)
        for i in moving:
            home = self._homes[i] = min(held, key=lambda home: held[home] / most[home])
            held[home] += 1
        return list(self._homes)
