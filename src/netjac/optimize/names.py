"""Parameters by name: patterns over the names of a `ParameterSpace` → positions, bounds and priors over the flat θ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray

from netjac.errors import DataError, DtypeError, ShapeError
from netjac.optimize.losses import Vector
from netjac.optimize.options import OptionError
from netjac.spaces import ParameterSpace, Segment, lay_out, matching


def chosen(space: ParameterSpace, patterns: str | Iterable[str]) -> list[int]:
    """Positions of the variables that any of the patterns fits, in the model's order; see `netjac.spaces.matching`."""
    if not isinstance(patterns, Iterable) or isinstance(patterns, bytes):
        raise DtypeError(f"parameters are given by name or a list of names, and {patterns!r} is neither.")
    each = [patterns] if isinstance(patterns, str) else list(patterns)
    return sorted({i for pattern in each for i in matching(space.segments, pattern)})


def _segments(space: ParameterSpace, given: Mapping[str, Any]) -> Iterator[tuple[Segment, str, Any]]:
    for pattern, value in given.items():
        for position in matching(space.segments, pattern):
            yield space.segments[position], pattern, value


def _spread(value: Any, segment: Segment, what: str) -> Vector:
    """A number or array, broadcast to the variable's shape and flattened."""
    try:
        array = np.asarray(value, np.float64)
        return np.broadcast_to(array, segment.shape).reshape(-1)
    except (TypeError, ValueError):
        shape = f"has shape {np.shape(value)}" if isinstance(value, np.ndarray) else f"is {value!r}"
        raise ShapeError(
            f"{what} of {segment.name!r} must be a number, or an array that broadcasts to {segment.shape}, and {shape}."
        ) from None


def _pair(value: Any, pattern: str, what: str) -> tuple[Any, Any]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise OptionError(f"{what} of {pattern!r} must be a pair, and is {value!r}.")


def bounds(space: ParameterSpace, given: Any) -> scipy.optimize.Bounds:
    """Bounds over θ from names, from SciPy's `Bounds`, or from a pair (lower, upper).

    Parameters
    ----------
    space
        The parameters, M.
    given
        None; a dict from pattern to (lower, upper), each a number, None for no bound, or an array that broadcasts to
        the variable's shape, where a later entry overrides an earlier one; or Bounds or a pair over the flat θ.

    Raises
    ------
    NameLookupError, ShapeError, OptionError, DataError
        If a name or a shape does not fit, or a lower bound is above its upper bound.

    Examples
    --------
    >>> space = ParameterSpace(lay_out(["kernel", "bias"], [(2,), ()], ["float64"] * 2))
    >>> bounds(space, {"kernel": (0, None), "bias": (-1, [1])})
    Traceback (most recent call last):
    netjac.errors.ShapeError: the upper bound of 'bias' must be a number, or an array that broadcasts to (), and is [1].
    >>> bounds(space, {"kernel": (0, None), "bias": (-1, 1)})
    Bounds(array([ 0.,  0., -1.]), array([inf, inf,  1.]))
    """
    lower, upper = np.full(space.size, -np.inf), np.full(space.size, np.inf)
    if isinstance(given, Mapping):
        for segment, pattern, value in _segments(space, given):
            low, high = _pair(value, pattern, "the bounds")
            lower[segment.slice] = -np.inf if low is None else _spread(low, segment, "the lower bound")
            upper[segment.slice] = np.inf if high is None else _spread(high, segment, "the upper bound")
    elif isinstance(given, scipy.optimize.Bounds):
        lower[:], upper[:] = _flat(given.lb, space.size, "lower"), _flat(given.ub, space.size, "upper")
    elif given is not None:
        if isinstance(given, list) and space.size == 2 and [np.size(pair) for pair in given] == [2, 2]:
            raise OptionError(
                f"bounds={given!r} could be (lower, upper), or a pair for each of the two parameters: give "
                "scipy.optimize.Bounds(lower, upper), or a dict of names."
            )
        low, high = _pair(given, "theta", "the bounds")
        lower[:], upper[:] = _flat(low, space.size, "lower"), _flat(high, space.size, "upper")
    wrong = ~((lower <= upper) & (lower < np.inf) & (upper > -np.inf))  # True for NaN too
    if wrong.any():
        i = int(np.argmax(wrong))
        raise DataError(f"the bounds of {entry(space, i)} leave nothing between: lower {lower[i]}, upper {upper[i]}.")
    return scipy.optimize.Bounds(lower, upper)


def _flat(value: ArrayLike, size: int, which: str) -> NDArray[Any]:
    array = np.asarray(value, np.float64)
    if array.shape not in ((), (1,), (size,)):
        raise ShapeError(f"the {which} bounds must be a number or have the shape ({size},), and have {array.shape}.")
    return array


def prior(space: ParameterSpace, given: Mapping[str, Any] | None) -> tuple[Vector, Vector] | None:
    """Gaussian priors from names: 1/σ (M,), 0 where there is none, and means (M,); None where there is none at all.

    Parameters
    ----------
    space
        The parameters, M.
    given
        A dict from pattern to σ or (σ, mean), each a number or an array that broadcasts to the variable's shape; the
        mean is 0 by default, σ may be infinite. A later entry overrides an earlier one.

    Raises
    ------
    NameLookupError, ShapeError, DataError, OptionError
        If a name or a shape does not fit, σ is not positive, or a mean is not finite.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise OptionError(f"prior must be a dict from names to sigma or (sigma, mean), and is {given!r}.")
    scale, mean = np.zeros(space.size), np.zeros(space.size)
    for segment, pattern, value in _segments(space, given):
        sigma, centre = _pair(value, pattern, "the prior") if isinstance(value, tuple) else (value, 0.0)
        deviation = _spread(sigma, segment, "the standard deviation")
        if not np.all(deviation > 0):
            raise DataError(f"the standard deviation of {segment.name!r} must be positive, and is {sigma}.")
        middle = _spread(centre, segment, "the mean")
        if not np.all(np.isfinite(middle)):
            raise DataError(f"the mean of {segment.name!r} must be finite, and is {centre}.")
        scale[segment.slice], mean[segment.slice] = 1 / deviation, middle
    return (scale, mean) if scale.any() else None


def entry(space: ParameterSpace, position: int) -> str:
    """What the parameter at a position of θ is called: its variable and its place there.

    Examples
    --------
    >>> space = ParameterSpace(lay_out(["kernel", "bias"], [(2, 3), ()], ["float64"] * 2))
    >>> entry(space, 4), entry(space, 6)
    ("'kernel'[1, 1]", "'bias'")
    """
    for segment in space:
        if segment.start <= position < segment.stop:
            index = np.unravel_index(position - segment.start, segment.shape) if segment.shape else ()
            return f"{segment.name!r}" + (f"[{', '.join(str(int(i)) for i in index)}]" if index else "")
    raise IndexError(f"there are {space.size} parameters, and no position {position}.")


class Extra:
    """A parameter that is not the network's, as live as its variables are: `ParameterSpace` reads and assigns it."""

    def __init__(self, value: ArrayLike) -> None:
        self.value = np.array(value, np.float64)

    def assign(self, value: ArrayLike) -> None:
        """Take a new value of the same shape."""
        self.value = np.array(value, np.float64).reshape(self.value.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.value, dtype)


def extras(given: Mapping[str, Any] | None) -> ParameterSpace:
    """The space of the extra parameters: from a dict of names and values.

    Raises
    ------
    DataError, DtypeError
        If a value is not made of finite real numbers.
    """
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"extra must be a dict from names to values, and is a {type(given).__name__}.")
    values = dict(given or {})
    for name, value in values.items():
        if not isinstance(name, str) or not name or set(name) & set("*?["):
            raise OptionError(f"an extra parameter needs a name, without *, ? and [, and {name!r} is none.")
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise DtypeError(f"the extra parameter {name!r} must hold real numbers, and has dtype {array.dtype}.")
        if not np.all(np.isfinite(array)):
            raise DataError(f"the extra parameter {name!r} must be finite, and is {value}.")
    variables = [Extra(value) for value in values.values()]
    shapes = [variable.value.shape for variable in variables]
    return ParameterSpace(lay_out(list(values), shapes, ["float64"] * len(values)), variables)


def together(network: ParameterSpace, extra: ParameterSpace) -> ParameterSpace:
    """One space: the network's parameters, then the extra ones.

    Raises
    ------
    OptionError
        If an extra parameter is called like one of the network's.
    """
    if not len(extra):
        return network
    twice = set(network.names) & set(extra.names)
    if twice:
        raise OptionError(f"the network has a parameter called {min(twice)!r} already: name the extra one otherwise.")
    both = [*network, *extra]
    segments = lay_out([s.name for s in both], [s.shape for s in both], [s.dtype for s in both])
    return ParameterSpace(segments, [*(network.variables or ()), *(extra.variables or ())])


def values(extra: ParameterSpace, vector: NDArray[Any]) -> dict[str, Any]:
    """The extra parameters by name, from their flat vector: a float where one is a single number, else an array."""
    arrays = extra.unravel(vector)
    return {s.name: array.copy() if s.shape else float(array) for s, array in zip(extra, arrays, strict=True)}
