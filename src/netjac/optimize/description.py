"""What a problem says of itself where it is printed; evaluates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.optimize.evaluations import Evaluator
from netjac.spaces import ParameterSpace, Segment

MOST = 8
"""Names that are listed; of more, the first."""


def counted(count: int, what: str) -> str:
    """A number and its noun.

    Examples
    --------
    >>> counted(1, "sample"), counted(60, "sample")
    ('1 sample', '60 samples')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def of_data(evaluator: Evaluator, what: str) -> str:
    """One line on a network at its data: samples, outputs, what is made of them, and the type it is evaluated in.

    An evaluator of one's own need not say how many samples it has, nor its type.
    """
    n, dtype = getattr(evaluator, "n", None), getattr(evaluator, "dtype", None)
    said = [] if n is None else [f"n = {counted(n, 'sample')}"]
    said += [f"l = {counted(evaluator.output_space.size, 'output')}", what]
    return ", ".join(said) + ("" if dtype is None else f"; evaluated in {np.dtype(dtype).name}")


def of_function(function: Any) -> str:
    """The name of a function from outside.

    Examples
    --------
    >>> of_function(len)
    'len(outputs)'
    """
    return f"{getattr(function, '__name__', type(function).__name__)}(outputs)"


def of_problem(
    kind: str,
    value: str,
    data: Sequence[str],
    space: ParameterSpace,
    extra: int,
    held: dict[str, NDArray[np.bool_]],
) -> str:
    """A few lines on a problem.

    Parameters
    ----------
    kind
        Its class.
    value
        What is minimised.
    data
        A line for each network and its data.
    space
        The parameters, M.
    extra
        How many variables at its end are no network's.
    held
        What holds some of the parameters, bounds or a prior, and which (M,).

    Examples
    --------
    >>> from netjac.spaces import lay_out
    >>> space = ParameterSpace(lay_out(["kernel", "bias", "rate"], [(2, 3), (3,), ()], ["float64"] * 3))
    >>> bounded = np.arange(10) > 7
    >>> print(of_problem("Objective", "likelihood(outputs)", ["l = 3 outputs"], space, 1, {"bounds": bounded}))
    Objective: likelihood(outputs), m = 10 parameters
      data: l = 3 outputs
      parameters: kernel (2, 3), bias (3,)
      extra: rate ()
      bounds: 2 parameters, of bias, rate
    """
    segments = list(space)
    lines = [f"{kind}: {value}, m = {counted(space.size, 'parameter')}"]
    lines += [f"data: {line}" for line in data]
    lines.append(f"parameters: {_listed(_with_shape(segments[: len(segments) - extra]))}")
    if extra:
        lines.append(f"extra: {_listed(_with_shape(segments[len(segments) - extra :]))}")
    for what, which in held.items():
        if which.any():
            names = [segment.name for segment in segments if which[segment.slice].any()]
            lines.append(f"{what}: {counted(int(which.sum()), 'parameter')}, of {_listed(names)}")
    return "\n  ".join(lines)


def _with_shape(segments: Iterable[Segment]) -> list[str]:
    return [f"{segment.name} {segment.shape}" for segment in segments]


def _listed(said: list[str]) -> str:
    more = f", and {len(said) - MOST} more" if len(said) > MOST else ""
    return ", ".join(said[:MOST]) + more
