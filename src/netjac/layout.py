"""Layouts: how the axes n (samples), l (outputs) and m (parameters) of a Jacobian are arranged in an array.

A layout is written as in einops: the letters n, l, m in the order of the array's axes, letters in parentheses
sharing one axis, the last of them varying fastest. ``"(n l) m"`` is the usual matrix; ``"(l m) n"`` has one column a
sample. A pattern is parsed once and applied many times; applying it never copies, because an axis of any stride can
be split into a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from numpy.typing import NDArray

from netjac.errors import LayoutError

LETTERS = ("n", "l", "m")

_EXAMPLES = 'for example "(n l) m", "(l m) n" or "n l m"'


@dataclass(frozen=True)
class Layout:
    """A parsed layout pattern.

    Attributes
    ----------
    pattern : str
        As the user wrote it.
    axes : tuple of tuple of str
        The letters of each axis of the array, slowest first.
    """

    pattern: str
    axes: tuple[tuple[str, ...], ...]

    def shape(self, n: int, l: int, m: int) -> tuple[int, ...]:
        """Shape of an array in this layout.

        Examples
        --------
        >>> parse("(l m) n").shape(n=5, l=2, m=7)
        (14, 5)
        """
        sizes = {"n": n, "l": l, "m": m}
        return tuple(prod(sizes[letter] for letter in axis) for axis in self.axes)

    def view(self, array: NDArray[Any], n: int, l: int, m: int) -> NDArray[Any]:
        """The array, of `shape` and any strides, seen as (n, l, m): no copy, so that writing to it writes the array.

        Examples
        --------
        >>> import numpy as np
        >>> array = np.zeros((6, 2))
        >>> parse("(l m) n").view(array, n=2, l=2, m=3)[1, 0, 2] = 1.0
        >>> array[0 * 3 + 2, 1]
        np.float64(1.0)
        """
        sizes = {"n": n, "l": l, "m": m}
        order = [letter for axis in self.axes for letter in axis]
        split = array.reshape([sizes[letter] for letter in order])
        return split.transpose([order.index(letter) for letter in LETTERS])


def parse(pattern: str) -> Layout:
    """Read a layout pattern.

    Parameters
    ----------
    pattern : str
        Each of the letters n, l and m once, apart from each other or grouped in parentheses.

    Raises
    ------
    LayoutError
        Where a letter is unknown, missing or written twice, or the parentheses do not pair; the message names it.

    Examples
    --------
    >>> parse("(l m) n").axes
    (('l', 'm'), ('n',))
    >>> parse("(l k) n")
    Traceback (most recent call last):
    ...
    netjac.errors.LayoutError: the layout '(l k) n' has an unknown letter 'k'; the letters are n (samples), ...
    """
    if not isinstance(pattern, str):
        raise LayoutError(f"a layout is a string, {_EXAMPLES}, and got {pattern!r}.")
    return _parse(pattern)


@lru_cache(maxsize=256)
def _parse(pattern: str) -> Layout:
    axes: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in _tokens(pattern):
        if token == "(":
            if group is not None:
                raise _error(pattern, "opens a parenthesis inside another")
            group = []
        elif token == ")":
            if group is None:
                raise _error(pattern, "closes a parenthesis that was not opened")
            if not group:
                raise _error(pattern, "has empty parentheses")
            axes.append(tuple(group))
            group = None
        elif group is not None:
            group.append(token)
        else:
            axes.append((token,))
    if group is not None:
        raise _error(pattern, "leaves a parenthesis open")
    _check_letters(pattern, [letter for axis in axes for letter in axis])
    return Layout(pattern, tuple(axes))


def _tokens(pattern: str) -> list[str]:
    return pattern.replace("(", " ( ").replace(")", " ) ").split()


def _check_letters(pattern: str, letters: list[str]) -> None:
    for letter in letters:
        if letter not in LETTERS:
            apart = " ".join(letter)
            hint = f" (write {apart!r} for several letters)" if set(letter) <= set(LETTERS) else ""
            raise _error(pattern, f"has an unknown letter {letter!r}{hint}")
        if letters.count(letter) > 1:
            raise _error(pattern, f"has the letter {letter!r} {letters.count(letter)} times")
    missing = [letter for letter in LETTERS if letter not in letters]
    if missing:
        raise _error(pattern, "lacks the letter" + "s" * (len(missing) > 1) + " " + ", ".join(map(repr, missing)))


def _error(pattern: str, problem: str) -> LayoutError:
    return LayoutError(
        f"the layout {pattern!r} {problem}; the letters are n (samples), l (outputs a sample) and m (parameters), "
        f"each once, {_EXAMPLES}."
    )
