"""What a fit did: one row an iterate, as arrays for a convergence plot and as a line on the screen."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class History:
    """One row for each point at which the solver asked for a derivative: the start and every accepted step.

    Attributes
    ----------
    nfev : (q,) integers
        Evaluations of the model up to there, rejected steps included.
    cost : (q,) float64
        The cost: half the sum of squares, or the loss asked for.
    optimality : (q,) float64
        Largest entry of the gradient, ‖Jᵀ (ρ' ∘ r)‖_∞.
    time : (q,) float64
        Seconds since the start.
    """

    nfev: NDArray[np.intp]
    cost: NDArray[np.float64]
    optimality: NDArray[np.float64]
    time: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.cost)


class Monitor:
    """Collects the history and shows it.

    Parameters
    ----------
    progress
        False: nothing is shown. True: one line, rewritten as the fit goes (tqdm where it is installed), if standard
        error is a terminal. A text stream: the same there, or one printed line an iterate if it is no terminal.
    max_nfev
        Evaluations allowed, for the bar.
    """

    def __init__(self, progress: bool | TextIO = False, max_nfev: int | None = None) -> None:
        self.nfev = 0
        self._rows: list[tuple[int, float, float, float]] = []
        self._start = time.perf_counter()
        stream = sys.stderr if progress is True else progress
        self._stream: TextIO | None = stream or None
        self._terminal = bool(stream) and bool(getattr(stream, "isatty", lambda: False)())
        if progress is True and not self._terminal:
            self._stream = None
        self._bar = _bar(self._stream, max_nfev) if self._stream and self._terminal else None

    def evaluated(self) -> None:
        """Count one evaluation of the model."""
        self.nfev += 1
        if self._bar is not None:
            self._bar.update(1)

    def iterate(self, cost: float, optimality: float) -> None:
        """Record a point the solver goes on from."""
        seconds = time.perf_counter() - self._start
        self._rows.append((self.nfev, cost, optimality, seconds))
        text = f"cost {cost:.6e}  optimality {optimality:.2e}"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif self._stream is not None:
            line = f"step {len(self._rows) - 1:3d}  evaluations {self.nfev:3d}  {text}  {seconds:6.2f} s"
            if self._terminal:
                self._stream.write("\r" + line)
            else:
                self._stream.write(line + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the last line standing."""
        if self._bar is not None:
            self._bar.close()
        elif self._stream is not None and self._terminal:
            self._stream.write("\n")

    @property
    def history(self) -> History:
        """What was recorded so far."""
        table = np.array(self._rows, dtype=np.float64).reshape(-1, 4)
        return History(table[:, 0].astype(np.intp), table[:, 1].copy(), table[:, 2].copy(), table[:, 3].copy())


def _bar(stream: TextIO, total: int | None) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, file=stream, desc="fit", unit=" evaluations", leave=True)
