"""How far a long computation is, on standard error: rows done, their rate, and the time that is left.

Rows are counted, not tiles, which may differ in size; the rate is the mean since the start.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self, TextIO, final

from netjac.errors import DtypeError

DELAY = 1.0
"""Seconds before anything is shown."""

Shown = bool | TextIO | None
"""Where: None, on standard error if that is a terminal; False, nowhere; True, on standard error; or a text stream."""


@final
class Progress:
    """A bar of tqdm, which appears after a second, where tqdm is installed and somebody looks.

    Parameters
    ----------
    what
        Which computation it is.
    total
        Rows in all; None where that is not known: then rate and time are shown.
    shown
        None: on standard error if that is a terminal. False: not. True: on standard error whatever it is. A text
        stream: there.
    unit
        What is counted.

    Raises
    ------
    DtypeError
        Where ``shown`` is none of these.

    Examples
    --------
    >>> with Progress("to_array", 100, shown=False) as bar:
    ...     bar.add(40)
    """

    def __init__(self, what: str, total: int | None, shown: Shown = None, unit: str = "rows") -> None:
        self._bar = _bar(what, total, shown, unit)

    def add(self, rows: int) -> None:
        """Count rows that are done."""
        if self._bar is not None:
            self._bar.update(rows)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def hidden(shown: Shown) -> Shown:
    """Nowhere, after a check of what was asked for."""
    if shown is not None and not isinstance(shown, bool) and not hasattr(shown, "write"):
        raise DtypeError(f"progress must be None, True, False or a text stream, and is a {type(shown).__name__}.")
    return False


def _bar(what: str, total: int | None, shown: Shown, unit: str) -> Any:
    hidden(shown)
    stream = sys.stderr if shown is None or shown is True else shown
    if not stream or (shown is None and not getattr(stream, "isatty", lambda: False)()):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(
        desc=what, total=total, file=stream, unit=f" {unit}", unit_scale=True, smoothing=0, delay=DELAY, leave=False
    )
