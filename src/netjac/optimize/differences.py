"""Derivatives by finite differences, for a solver that was given none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from netjac.optimize.losses import Vector

SCHEMES = ("2-point", "3-point", "cs")

_STEPS = {"2-point": 1 / 2, "3-point": 1 / 3, "cs": 1 / 2}
"""The power of the machine precision that balances truncation and rounding (Nocedal and Wright 2006, §8.1)."""


def jacobian(
    fun: Callable[[Any], NDArray[Any]],
    x: Vector,
    f: Vector,
    scheme: str,
    bounds: tuple[Vector, Vector],
    relative_step: ArrayLike | None = None,
    precision: DTypeLike = np.float64,
) -> NDArray[np.float64]:
    """∂fun/∂x (q, m), every evaluation within the bounds.

    Parameters
    ----------
    fun
        x (m,) → (q,); for "cs" it must take and give complex numbers.
    x, f
        The point (m,) and the value there (q,).
    scheme : {"2-point", "3-point", "cs"}
        Forward (backward at an upper bound), central (one-sided at a bound), or complex steps.
    bounds : (lower, upper)
        (m,) each; x lies within.
    relative_step : float or (m,), optional
        Relative to max(1, |x|); by default what balances rounding with truncation.
    precision
        Type in which ``fun`` rounds.
    """
    kind = np.dtype(precision)
    rounding = np.finfo(kind if kind.kind == "f" else np.float64).eps
    step = float(rounding) ** _STEPS[scheme] if relative_step is None else np.asarray(relative_step, float)
    h = np.broadcast_to(np.abs(step) * np.maximum(1.0, np.abs(x)), x.shape)
    columns = np.empty((len(f), len(x)))
    for i in range(len(x)):
        columns[:, i] = _column(fun, x, f, scheme, bounds[0][i], bounds[1][i], i, float(h[i]))
    return columns


def _column(
    fun: Callable[[Any], NDArray[Any]], x: Vector, f: Vector, scheme: str, low: float, high: float, i: int, h: float
) -> NDArray[np.float64]:
    def moved(by: Any) -> NDArray[Any]:
        point = x.astype(complex) if isinstance(by, complex) else x.copy()
        point[i] += by
        return np.asarray(fun(point))

    if scheme == "cs":
        return np.asarray(moved(1j * h).imag / h, np.float64)
    above, below = high - x[i], x[i] - low
    if scheme == "3-point" and min(above, below) >= h:
        return np.asarray((moved(h) - moved(-h)) / ((x[i] + h) - (x[i] - h)), np.float64)
    sign = 1.0 if above >= below else -1.0
    if scheme == "2-point":
        h = h if above >= h else min(h, max(above, below)) * sign
        return np.asarray((moved(h) - f) / ((x[i] + h) - x[i]), np.float64)
    h = sign * min(h, max(above, below) / 2)
    one, two = (x[i] + h) - x[i], (x[i] + 2 * h) - x[i]
    # Second order from one side, for steps as they are after rounding.
    return np.asarray((two**2 * (moved(h) - f) - one**2 * (moved(2 * h) - f)) / (one * two * (two - one)), np.float64)
