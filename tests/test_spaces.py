"""Parameters found by their names, by ends of names, and by patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netjac.errors import DtypeError, NameLookupError
from netjac.spaces import ParameterSpace, lay_out, matching

NAMES = ["encoder/dense/kernel", "encoder/dense/bias", "encoder/dense_1/kernel", "my_dense/kernel", "scale"]
SHAPES: list[tuple[int, ...]] = [(2, 3), (3,), (3, 1), (1, 2), ()]
SPACE = ParameterSpace(lay_out(NAMES, SHAPES, ["float64"] * 5), list("abcde"))  # sizes 6, 3, 3, 2, 1

PATTERNS: list[tuple[str, list[int]]] = [
    ("dense*/kernel", [0, 2]),
    ("dense/*", [0, 1]),
    ("kernel", [0, 2, 3]),
    ("*kernel", [0, 2, 3]),
    ("*", [0, 1, 2, 3, 4]),
    ("scale", [4]),
    ("encoder/dense/kernel", [0]),
    ("dense_[0-9]/kernel", [2]),
    ("dense_?/kernel", [2]),
]


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS)
def test_patterns(pattern: str, expected: list[int]) -> None:
    assert matching(SPACE.segments, pattern) == expected


def test_an_exact_name_is_that_one_alone() -> None:
    space = ParameterSpace(lay_out(["kernel", "a/kernel", "b[0]/kernel"], [(1,)] * 3, ["float64"] * 3))
    assert matching(space.segments, "kernel") == [0]
    assert matching(space.segments, "b[0]/kernel") == [2]  # no set of characters
    assert matching(space.segments, "*kernel") == [0, 1, 2]
    assert space.select(["b[0]/kernel"])[1] == [2]
    assert space.select(["kernel"])[1] == [0]


def test_a_pattern_that_fits_nothing_lists_the_names() -> None:
    with pytest.raises(
        NameLookupError, match=r"'dens/kernel' fits no parameter; they are called 'encoder/dense/kernel'"
    ):
        matching(SPACE.segments, "dens/kernel")
    with pytest.raises(NameLookupError, match=r"'hidden/\*' fits no parameter; they are called .*'scale'\."):
        SPACE.select(["hidden/*"])
    with pytest.raises(DtypeError, match="3 is a int"):
        matching(SPACE.segments, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["scale", "dense*/*"], [4, 0, 1, 2]),
        (["dense_?/kernel", "encoder/*"], [2, 0, 1]),  # what both fit comes once, where it came first
        (["*kernel", "dense_1/kernel"], [0, 2, 3]),
        (["dense/bias", "*"], [1, 0, 2, 3, 4]),
        ([], []),
    ],
)
def test_a_selection_keeps_the_order_given(names: list[str], expected: list[int]) -> None:
    part, positions = SPACE.select(names)
    assert positions == expected
    assert part.names == tuple(NAMES[i] for i in expected)
    assert part.variables == tuple("abcde"[i] for i in expected)
    sizes = [int(np.prod(SHAPES[i], dtype=int)) for i in expected]
    assert [segment.start for segment in part] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert part.size == sum(sizes)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["kernel"], NameLookupError, "'kernel' fits several parameters; choose one of: .*'my_dense/kernel'"),
        (["scale", "*", "scale"], NameLookupError, "named twice"),
        (["dense/bias", "encoder/dense/bias"], NameLookupError, "named twice"),
        (["nothing"], NameLookupError, "no parameter is called 'nothing'; choose one of: 'encoder"),
        ([""], NameLookupError, "no parameter is called ''"),
        ("scale", DtypeError, r"write \['scale'\]"),
        ([3], DtypeError, "found by its name, and 3 is a int"),
    ],
)
def test_selections_that_cannot_be(names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SPACE.select(names)


def test_one_variable_by_its_name() -> None:
    assert SPACE["bias"].slice == slice(6, 9)
    with pytest.raises(DtypeError, match="found by its name, and 3 is a int"):
        SPACE[3]  # type: ignore[index]
    with pytest.raises(NameLookupError, match="several"):
        SPACE["kernel"]
