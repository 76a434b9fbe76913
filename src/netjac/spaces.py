"""What the two sides of a Jacobian are called: columns (parameters) and rows (outputs, sample-major).

A space is a list of named segments laid one after the other, each flattened in C order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from netjac.errors import DataError, DtypeError, NameLookupError, ShapeError


@dataclass(frozen=True)
class Segment:
    """A named array inside a flat vector: ``vector[start:stop].reshape(shape)``."""

    name: str
    shape: tuple[int, ...]
    start: int
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.size

    @property
    def slice(self) -> slice:
        """The positions in the flat vector."""
        return slice(self.start, self.stop)


def lay_out(names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> tuple[Segment, ...]:
    """Put segments one after the other; a name that occurs again gets ``_1``, ``_2``, … appended."""
    segments: list[Segment] = []
    taken: set[str] = set()
    start = 0
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        unique, count = name, 0
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        taken.add(unique)
        segments.append(Segment(unique, tuple(shape), start, dtype))
        start += segments[-1].size
    return tuple(segments)


def find(segments: Sequence[Segment], name: str, what: str) -> int:
    """Position of the segment called ``name``: its full name, or an end of it that fits only one.

    Ends are cut at ``/`` or ``.``: ``"dense/kernel"`` finds ``"encoder/dense/kernel"`` but not ``"my_dense/kernel"``.
    """
    if not isinstance(name, str):
        raise DtypeError(f"a {what} is found by its name, and {name!r} is a {type(name).__name__}.")
    exact = [i for i, segment in enumerate(segments) if segment.name == name]
    fits = exact or [i for i, s in enumerate(segments) if name and s.name.endswith(("/" + name, "." + name))]
    if len(fits) == 1:
        return fits[0]
    if not fits:
        raise NameLookupError(f"no {what} is called {name!r}; choose one of: {_listing(segments)}.")
    raise NameLookupError(f"{name!r} fits several {what}s; choose one of: {_listing([segments[i] for i in fits])}.")


def matching(segments: Sequence[Segment], pattern: str, what: str = "parameter") -> list[int]:
    """Positions of the segments that a pattern fits: a full name, or an end of one, with ``*``, ``?`` and ``[…]``.

    Ends are cut as for `find`: ``"dense*/kernel"`` fits ``"encoder/dense_1/kernel"`` but not ``"my_dense/kernel"``.
    A segment that is called exactly like the pattern is the only one.

    Raises
    ------
    NameLookupError
        If it fits none; the message lists the names.

    Examples
    --------
    >>> segments = lay_out(["a/dense/kernel", "a/dense/bias", "out/kernel"], [(2,)] * 3, ["float64"] * 3)
    >>> matching(segments, "kernel"), matching(segments, "dense/*"), matching(segments, "out/kernel")
    ([0, 2], [0, 1], [2])
    """
    if not isinstance(pattern, str):
        raise DtypeError(f"{what}s are given by name, and {pattern!r} is a {type(pattern).__name__}.")
    exact = [i for i, segment in enumerate(segments) if segment.name == pattern]
    patterns = (pattern, f"*/{pattern}", f"*.{pattern}")
    found = exact or [i for i, s in enumerate(segments) if any(fnmatchcase(s.name, each) for each in patterns)]
    if not found:
        raise NameLookupError(f"the pattern {pattern!r} fits no {what}; they are called {_listing(segments)}.")
    return found


def _listing(segments: Sequence[Segment]) -> str:
    return ", ".join(repr(segment.name) for segment in segments) or "(none)"


class ParameterSpace:
    """The columns: trainable variables in the model's order, each flattened in C order.

    Parameters
    ----------
    segments
        Names, shapes and places of the variables.
    variables
        The live variables, each with ``assign(value)``, and convertible by ``numpy.asarray`` themselves or what their
        ``value()`` gives; None for a space that came out of a pickle or describes no live model.

    Attributes
    ----------
    size : int
        m, the number of parameters.
    names, shapes : tuple
        One entry a variable.
    """

    def __init__(self, segments: Iterable[Segment], variables: Sequence[Any] | None = None) -> None:
        self.segments = tuple(segments)
        self.variables = None if variables is None else tuple(variables)
        self.size = self.segments[-1].stop if self.segments else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Full name of each variable."""
        return tuple(segment.name for segment in self.segments)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each variable."""
        return tuple(segment.shape for segment in self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __getitem__(self, name: str) -> Segment:
        return self.segments[self.find(name)]

    def __repr__(self) -> str:
        lines = [f"ParameterSpace: {len(self)} variables, m = {self.size}"]
        lines += [f"  [{s.start}:{s.stop}]  {s.name}  {s.shape}  {s.dtype}" for s in self.segments]
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return {"segments": self.segments, "variables": None, "size": self.size}

    def find(self, name: str) -> int:
        """Position of the variable called ``name`` (its full name or an unambiguous end of it)."""
        return find(self.segments, name, "parameter")

    def ravel(self, values: Sequence[ArrayLike] | None = None, dtype: Any = None) -> NDArray[Any]:
        """One vector (m,) of ``values`` (one array a variable), or of the variables' present values.

        ``dtype`` is float32 by default, float64 where a variable is.
        """
        if values is None:
            values = [_value(variable) for variable in self._live()]
        if len(values) != len(self.segments):
            raise ShapeError(f"expected {len(self.segments)} arrays, one a variable, and got {len(values)}.")
        arrays = [np.asarray(value) for value in values]
        for segment, array in zip(self.segments, arrays, strict=True):
            if array.shape != segment.shape:
                raise ShapeError(
                    f"{segment.name!r} has shape {segment.shape}, and the value given for it {array.shape}."
                )
        if dtype is None:
            dtype = np.float64 if any(segment.dtype == "float64" for segment in self.segments) else np.float32
        out = np.empty(self.size, dtype)
        for segment, array in zip(self.segments, arrays, strict=True):
            out[segment.slice] = array.reshape(-1)
        return out

    def vector(self, theta: ArrayLike) -> NDArray[Any]:
        """``theta`` as an array, after a check that it is a vector (m,) of real numbers."""
        vector = np.asarray(theta)
        if vector.shape != (self.size,):
            raise ShapeError(
                f"theta must be a vector of shape ({self.size},), one entry a parameter, and has {vector.shape}."
            )
        if vector.dtype.kind not in "fiu":
            raise DataError(f"theta must hold real numbers, and has dtype {vector.dtype}.")
        return vector

    def unravel(self, theta: ArrayLike) -> list[NDArray[Any]]:
        """The vector ``theta`` (m,) cut into one view a variable, each in the variable's shape."""
        vector = self.vector(theta)
        return [vector[segment.slice].reshape(segment.shape) for segment in self.segments]

    def assign(self, theta: ArrayLike) -> None:
        """Write the vector ``theta`` (m,) into the live variables, each in its own type, or, on error, nothing."""
        variables = self._live()
        vector = self.vector(theta)
        if not np.all(np.isfinite(vector)):
            raise DataError("theta holds values that are not finite; the variables were left as they were.")
        before = [_value(variable).copy() for variable in variables]
        try:
            for variable, value in zip(variables, self.unravel(vector), strict=True):
                variable.assign(value)
        except BaseException:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            raise

    def select(self, names: Sequence[str]) -> tuple[ParameterSpace, list[int]]:
        """The space of the named variables alone, in the order given, and their positions here.

        Parameters
        ----------
        names
            Each the name of one variable, as for `find`; or, with ``*``, ``?`` or ``[…]``, a pattern of one or more,
            which come in the order they have here. What several patterns fit comes once.

        Raises
        ------
        NameLookupError
            If a name or pattern fits none, a name fits several, or a variable is named twice.
        DtypeError
            If something else than names is given.

        Examples
        --------
        >>> space = ParameterSpace(lay_out(["hidden/kernel", "hidden/bias", "out/bias"], [(2,)] * 3, ["float64"] * 3))
        >>> space.select(["out/bias", "hidden/*"])[1]
        [2, 0, 1]
        """
        if isinstance(names, str):
            raise DtypeError(f"select takes a list of names, and got {names!r}: write [{names!r}].")
        found = [self._fitting(name) for name in names]
        alone = [fits[0] for name, fits in zip(names, found, strict=True) if not self._is_pattern(name)]
        if len(set(alone)) != len(alone):
            raise NameLookupError(f"a parameter is named twice in {list(names)!r}.")
        positions = list(dict.fromkeys(chain.from_iterable(found)))
        chosen = [self.segments[i] for i in positions]
        segments = lay_out([s.name for s in chosen], [s.shape for s in chosen], [s.dtype for s in chosen])
        variables = None if self.variables is None else [self.variables[i] for i in positions]
        return ParameterSpace(segments, variables), positions

    def _is_pattern(self, name: str) -> bool:
        return isinstance(name, str) and not set(name).isdisjoint("*?[") and name not in self.names

    def _fitting(self, name: str) -> list[int]:
        """The variable of that name, or those that a pattern fits."""
        return matching(self.segments, name) if self._is_pattern(name) else [self.find(name)]

    def _live(self) -> tuple[Any, ...]:
        if self.variables is None:
            raise DataError(
                "this ParameterSpace describes no live model (it was unpickled); use netjac.parameters(model)."
            )
        return self.variables


def _value(variable: Any) -> NDArray[Any]:
    """What a live variable holds now; ``value()`` first, for TensorFlow converts a variable five times as slowly."""
    read = getattr(variable, "value", None)
    return np.asarray(read() if callable(read) else variable)


class OutputSpace:
    """The rows: per sample, all outputs flattened in C order, one output after the other.

    Parameters
    ----------
    segments
        Names, shapes per sample and places of the outputs; their sizes add up to l.
    template
        The model's own output structure (nested dicts, lists, tuples) with the position of a segment at each leaf.
    """

    def __init__(self, segments: Iterable[Segment], template: Any = 0) -> None:
        self.segments = tuple(segments)
        self.template = template
        self.size = self.segments[-1].stop if self.segments else 0

    @classmethod
    def flat(cls, size: int, dtype: str = "float32") -> OutputSpace:
        """One output of ``size`` numbers a sample."""
        return cls(lay_out(["output"], [(size,)], [dtype]))

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each output."""
        return tuple(segment.name for segment in self.segments)

    def __repr__(self) -> str:
        return f"OutputSpace: l = {self.size}: " + ", ".join(f"{s.name} {s.shape}" for s in self.segments)

    def pack(self, y: NDArray[Any]) -> Any:
        """Flat outputs (n, l) in the model's own structure and shapes, as views."""
        arrays = [y[:, s.slice].reshape(y.shape[0], *s.shape) for s in self.segments]
        return _fill(self.template, arrays)


def _fill(template: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(template, dict):
        return {key: _fill(value, arrays) for key, value in template.items()}
    if isinstance(template, tuple) and hasattr(template, "_fields"):  # a named tuple
        return type(template)(*(_fill(value, arrays) for value in template))
    if isinstance(template, (list, tuple)):
        return type(template)(_fill(value, arrays) for value in template)
    return arrays[template]
