"""Several least-squares problems as one: residuals below each other, parameters that are shared counted once.

A variable of two models is shared if it is the same object; extra parameters are shared if they have one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from netjac.errors import DataError
from netjac.optimize import names
from netjac.optimize.budget import Need
from netjac.optimize.losses import Vector
from netjac.optimize.options import OptionError
from netjac.optimize.problem import LeastSquares
from netjac.optimize.rows import Stacked
from netjac.optimize.sources import Data, Source
from netjac.spaces import ParameterSpace, Segment, lay_out


@final
class Joint:
    """The residuals of several sources, one below the other.

    Parameters
    ----------
    sources
        At least one.

    Attributes
    ----------
    columns
        For each source, where its parameters stand among all.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        network, places = _merge([_network(source) for source in sources])
        extra, extra_places = _merge([source.extra for source in sources], by_name=True)
        self.extra = extra
        self.space = names.together(network, extra)
        self.columns = [
            np.concatenate([own, network.size + other]) for own, other in zip(places, extra_places, strict=True)
        ]

    @property
    def size(self) -> int | None:
        """See `Source`."""
        sizes = [source.size for source in self._sources]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    @property
    def known(self) -> dict[str, NDArray[Any]]:
        """See `Source`."""
        return {
            f"{name} of problem {i}": array
            for i, source in enumerate(self._sources, 1)
            for name, array in source.known.items()
        }

    @property
    def failure(self) -> BaseException | None:
        """See `Source`."""
        return next((source.failure for source in self._sources if source.failure is not None), None)

    def described(self) -> list[str]:
        """See `Source`."""
        return [line for source in self._sources for line in source.described()]

    def need(self, copies: int) -> Need | None:
        """See `Source`."""
        own = [need for source in self._sources if (need := source.need(copies)) is not None]
        return sum(own[1:], own[0]) if own else None

    def evaluate(self, theta: Vector, memory: int | None = None) -> Data:
        """See `Source`."""
        whole, parts = self.need(0), []
        for source, columns in zip(self._sources, self.columns, strict=True):
            need = None if memory is None else source.need(0)
            share = None if need is None or memory is None or whole is None else need.part(memory, whole)
            parts.append(source.evaluate(theta[columns], share))

        def rows() -> Stacked:
            each = [(part.rows(), columns) for part, columns in zip(parts, self.columns, strict=True)]
            return Stacked(each, self.space.size)

        def second(v: Vector) -> Vector:
            total = np.zeros(self.space.size)
            for part, columns in zip(parts, self.columns, strict=True):
                total[columns] += part.second(v[columns])
            return total

        return Data(np.concatenate([part.residual for part in parts]), rows, second)


def join(
    problems: Sequence[LeastSquares | Iterable[LeastSquares]], jac: str, memory: float | str | None
) -> LeastSquares:
    """See `netjac.LeastSquares.join`."""
    given = _listed(problems)
    curvatures = sorted({problem._curvature for problem in given})
    if len(curvatures) > 1:
        raise OptionError(
            f"the problems must agree on their curvature, and have {' and '.join(map(repr, curvatures))}."
        )
    source = Joint([problem._source for problem in given])
    size = source.space.size
    lower, upper = np.full(size, -np.inf), np.full(size, np.inf)
    scale, mean = np.zeros(size), np.zeros(size)
    for problem, columns in zip(given, source.columns, strict=True):
        lower[columns] = np.maximum(lower[columns], problem._bounds.lb)
        upper[columns] = np.minimum(upper[columns], problem._bounds.ub)
        if problem._prior is not None:
            held = problem._prior > 0
            own = columns[held]
            if scale[own].any():
                name = names.entry(source.space, int(own[np.argmax(scale[own] > 0)]))
                raise OptionError(f"two of the problems have a prior on {name}: give it in one of them.")
            scale[own], mean[own] = problem._prior[held], problem._mean[held]
    prior = _by_variable(source.space, scale, mean) if scale.any() else None
    x_scale = 1.0 if all(problem._x_scale for problem in given) else None  # one scale for networks and formulas
    return LeastSquares._of(source, prior, (lower, upper), jac, curvatures[0], x_scale, memory)


def _listed(problems: Sequence[Any]) -> tuple[LeastSquares, ...]:
    """The problems of ``join(p, q)`` or ``join([p, q])``."""
    [first, *others] = problems or [()]
    one_list = not others and isinstance(first, Iterable)
    given = tuple(first) if one_list else tuple(problems)
    wrong = [type(problem).__name__ for problem in given if not isinstance(problem, LeastSquares)]
    if wrong or not given:
        came = f"a {wrong[0]} is among what it got" if wrong else "it got none"
        raise OptionError(f"join takes LeastSquares problems, join(p, q) or join([p, q]), at least one, and {came}.")
    return given


def _by_variable(space: ParameterSpace, scale: Vector, mean: Vector) -> dict[str, Any]:
    with np.errstate(divide="ignore"):
        sigma = 1 / scale
    cut = zip(space, space.unravel(sigma), space.unravel(mean), strict=True)
    return {segment.name: (deviation, centre) for segment, deviation, centre in cut}


def _network(source: Source) -> ParameterSpace:
    """A source's parameters without the extra ones at their end."""
    count = len(source.space) - len(source.extra)
    return ParameterSpace(source.space.segments[:count], (source.space.variables or ())[:count])


@final
class _Shared:
    """Extra parameters of one name in several problems: assigned together."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = tuple(variables)

    def assign(self, value: ArrayLike) -> None:
        for variable in self.variables:
            variable.assign(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.variables[0], dtype)


def _merge(spaces: Sequence[ParameterSpace], by_name: bool = False) -> tuple[ParameterSpace, list[NDArray[np.intp]]]:
    """One space of several, what they share once; and where the parameters of each stand in it."""
    found: dict[Any, list[tuple[Segment, Any]]] = {}
    for space in spaces:
        for segment, variable in zip(space, space.variables or (), strict=True):
            found.setdefault(segment.name if by_name else id(variable), []).append((segment, variable))
    first = [uses[0][0] for uses in found.values()]
    segments = lay_out([s.name for s in first], [s.shape for s in first], [s.dtype for s in first])
    merged = ParameterSpace(segments, [_one(uses) for uses in found.values()])
    place = dict(zip(found, segments, strict=True))
    columns = [
        np.concatenate(
            [
                np.arange(target.start, target.stop)
                for segment, variable in zip(space, space.variables or (), strict=True)
                for target in [place[segment.name if by_name else id(variable)]]
            ]
            or [np.zeros(0, np.intp)]
        )
        for space in spaces
    ]
    return merged, columns


def _one(uses: list[tuple[Segment, Any]]) -> Any:
    (segment, variable), *others = uses
    if not isinstance(variable, names.Extra) or not others:
        return variable
    for other, another in others:
        if other.shape != segment.shape or not np.array_equal(another.value, variable.value):
            raise DataError(
                f"the problems share the extra parameter {segment.name!r}, and start it from {variable.value} and "
                f"{another.value}: give one value."
            )
    return _Shared([variable for _, variable in uses])
