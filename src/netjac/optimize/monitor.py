"""What a fit did: one row an iterate, as arrays for a convergence plot and as a line on the screen."""

from __future__ import annotations

import sys
import time
from dataclasses import astuple, dataclass
from typing import Any, Self, TextIO

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class History:
    """One row for each iterate: the start and every point that the optimiser went on to.

    Attributes
    ----------
    nfev : (q,) integers
        Evaluations of the model up to there, rejected steps included.
    cost : (q,) float64
        What is minimised: half the sum of squares, the loss asked for, or the value of an objective.
    optimality : (q,) float64
        Largest entry of the gradient, ‖∇F‖_∞, those left out that push a parameter against its bound; NaN where the
        optimiser takes no gradient.
    time : (q,) float64
        Seconds since the start.
    damping : (q,) float64
        λ of Levenberg and Marquardt at the point, for method "netjac" from the first step on; else NaN.
    """

    nfev: NDArray[np.intp]
    cost: NDArray[np.float64]
    optimality: NDArray[np.float64]
    time: NDArray[np.float64]
    damping: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.cost)

    def to_array(self) -> NDArray[np.float64]:
        """All as one table (q, 5), a column an attribute."""
        return np.stack([np.asarray(column, np.float64) for column in astuple(self)], axis=1)

    @classmethod
    def from_array(cls, table: NDArray[np.float64]) -> Self:
        """The history that a table (q, 5) was made of."""
        nfev, *others = (column.copy() for column in table.T)
        return cls(nfev.astype(np.intp), *others)


class Monitor:
    """Collects the history and shows it.

    Parameters
    ----------
    progress
        False: nothing is shown. True: one line, rewritten as the fit goes (tqdm where it is installed), if standard
        error is a terminal or this is a notebook. A text stream: the same there, or one printed line an iterate if it
        is no terminal.
    max_nfev
        Evaluations allowed, for the bar.
    before
        Of a fit that this one continues.
    """

    def __init__(
        self, progress: bool | TextIO = False, max_nfev: int | None = None, before: History | None = None
    ) -> None:
        self._rows = [] if before is None else before.to_array().tolist()
        self.nfev = int(self._rows[-1][0]) if self._rows else 0
        self._start = time.perf_counter() - (self._rows[-1][3] if self._rows else 0.0)
        stream = sys.stderr if progress is True else progress
        self._stream: TextIO | None = stream or None
        self._one_line = bool(stream) and bool(getattr(stream, "isatty", lambda: False)())
        if progress is True and not self._one_line:
            self._one_line = _in_notebook()
            self._stream = self._stream if self._one_line else None
        self._bar = _bar(self._stream, max_nfev, self.nfev) if self._stream and self._one_line else None
        self._width = 0

    def evaluated(self) -> None:
        """Count one evaluation of the model."""
        self.nfev += 1
        if self._bar is not None:
            self._bar.update(1)

    def iterate(self, cost: float, optimality: float, damping: float = np.nan, nfev: int | None = None) -> None:
        """Record a point the optimiser goes on from; ``nfev`` where it counts evaluations itself."""
        seconds = time.perf_counter() - self._start
        self._rows.append([self.nfev if nfev is None else nfev, cost, optimality, seconds, damping])
        if self._stream is None:
            return
        iteration, text = len(self._rows) - 1, f"cost {cost:.6e}"
        text += "" if np.isnan(optimality) else f"  optimality {optimality:.2e}"
        text += "" if np.isnan(damping) else f"  damping {damping:.1e}"
        if self._bar is not None:
            self._bar.set_postfix_str(f"iteration {iteration}  {text}")
            return
        line = f"iteration {iteration:3d}  evaluations {self.nfev:3d}  {text}  {seconds:6.2f} s"
        # A line that is shorter than the one it is written over leaves nothing of that.
        self._stream.write("\r" + line.ljust(self._width) if self._one_line else line + "\n")
        self._width = len(line)
        self._stream.flush()

    def close(self) -> None:
        """Leave the last line standing."""
        if self._bar is not None:
            self._bar.close()
        elif self._stream is not None and self._one_line:
            self._stream.write("\n")

    @property
    def history(self) -> History:
        """What was recorded so far."""
        return History.from_array(np.array(self._rows, dtype=np.float64).reshape(-1, 5))


def _in_notebook() -> bool:
    """Whether an IPython kernel shows what is written: a notebook, no terminal, yet it knows how to rewrite a line."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def _bar(stream: TextIO, total: int | None, done: int) -> Any:
    try:
        from tqdm.auto import tqdm

        return tqdm(total=total, initial=done, file=stream, desc="fit", unit=" evaluations", leave=True)
    except ImportError:  # no tqdm, or in a notebook without the widgets that its bar is made of
        return None
