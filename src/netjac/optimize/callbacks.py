"""A person's callback in any of SciPy's signatures, as a function of the result so far."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult

Callback = Callable[[OptimizeResult], Any]
"""Shown the result so far; what it returns, and StopIteration, mean what they mean to SciPy."""

Told = Callable[[OptimizeResult], bool] | None
"""Shown the result so far; True where the fit is to end."""


class Stopped(StopIteration):
    """A person's callback raised StopIteration, or returned True where that ends the fit."""


def by_result(callback: Callable[..., Any], *, with_state: bool = False) -> Callback:
    """The callback as a function of the result so far.

    Parameters
    ----------
    callback
        ``callback(intermediate_result)``, by that name, or ``callback(x)``.
    with_state
        Whether the second is ``callback(x, state)`` instead, as for trust-constr.
    """
    if set(inspect.signature(callback).parameters) == {"intermediate_result"}:
        return lambda result: callback(intermediate_result=_copied(result))
    if with_state:
        return lambda result: callback(np.copy(result.x), result)
    return lambda result: callback(np.copy(result.x))


def _copied(result: OptimizeResult) -> OptimizeResult:
    """With an x of the person's own: SciPy's is the one that it goes on from."""
    shown = OptimizeResult(result)
    shown.x = np.copy(result.x)
    return shown


def stops(callback: Callable[..., Any] | None) -> Told:
    """The callback as a function that returns True where the fit is to end, for raising StopIteration or True."""
    if callback is None:
        return None
    shown = by_result(callback)

    def call(result: OptimizeResult) -> bool:
        try:
            answer = shown(result)
        except StopIteration:
            return True
        return isinstance(answer, bool | np.bool_) and bool(answer)

    return call


def raising(told: Callable[[OptimizeResult], bool]) -> Callable[..., None]:
    """A callback for SciPy, which knows StopIteration alone."""

    def callback(intermediate_result: OptimizeResult) -> None:
        if told(intermediate_result):
            raise Stopped

    return callback
