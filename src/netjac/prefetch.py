"""The next item made in a thread while the last is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds to wait, when a walk ends early, for an item that is being made."""


def ahead(items: Iterator[T], count: int) -> Generator[T]:
    """The same items, made in a thread of their own, at most ``count`` of them beyond the one in use.

    An exception in the making is raised where the item is asked for. When the walk ends, early or not, so does the
    thread, and ``items`` is closed; only one that is still waiting for data after ten seconds is left behind, to end
    with the process. With ``count`` 0 there is no thread.

    Examples
    --------
    >>> list(ahead(iter("abc"), 1))
    ['a', 'b', 'c']
    """
    if not count:
        yield from items
        return
    room, stop = threading.Semaphore(count), threading.Event()
    ready: queue.SimpleQueue[list[T] | BaseException | None] = queue.SimpleQueue()

    def make() -> None:
        try:
            while True:
                room.acquire()
                if stop.is_set():
                    return
                box = [next(items)]
                ready.put(box)
                del box  # it is the receiver's, who empties it
        except StopIteration:
            ready.put(None)
        except BaseException as error:  # raised again where the item is asked for
            ready.put(error)

    thread = threading.Thread(target=make, name="netjac-prefetch", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            room.release()
            yield found.pop()
    finally:
        stop.set()
        room.release()
        thread.join(PATIENCE)
        close = getattr(items, "close", None)
        if close is not None and not thread.is_alive():
            with suppress(RuntimeError):  # a generator that was ending
                close()
