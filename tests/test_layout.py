"""Layouts against einops, which parses the same patterns on its own."""

from itertools import permutations

import numpy as np
import pytest
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st

from netjac.errors import LayoutError, NetjacError
from netjac.layout import parse

GROUPINGS = ("{} {} {}", "({} {}) {}", "{} ({} {})", "({} {} {})", "({}) {} ({})")
PATTERNS = [grouping.format(*letters) for letters in permutations("nlm") for grouping in GROUPINGS]

patterns = st.sampled_from(PATTERNS)
sizes = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


def check(pattern: str, cube: np.ndarray, array: np.ndarray) -> None:
    """Assert that ``array`` is ``cube`` (n, l, m) in the layout, einops being the judge."""
    np.testing.assert_array_equal(array, rearrange(cube, f"n l m -> {pattern}"), strict=True)


@given(patterns, sizes)
def test_a_view_written_to_gives_what_einops_gives(pattern, size):
    cube = np.arange(float(np.prod(size))).reshape(size)
    layout = parse(pattern)
    array = np.full(layout.shape(*size), -1.0)
    view = layout.view(array, *size)
    assert view.shape == size
    view[...] = cube
    check(pattern, cube, array)


@given(patterns, st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)), st.data())
def test_any_strides_are_viewed_and_never_copied(pattern, size, data):
    layout = parse(pattern)
    shape = layout.shape(*size)
    steps = data.draw(st.lists(st.sampled_from([1, 2, 3, -1, -2]), min_size=len(shape), max_size=len(shape)))
    order = data.draw(st.permutations(range(len(shape))))
    base = np.zeros([shape[axis] * abs(steps[axis]) for axis in order])
    array = base.transpose(np.argsort(order))[tuple(slice(None, None, step) for step in steps)]
    array = array[tuple(slice(0, size) for size in shape)]
    view = layout.view(array, *size)
    assert np.shares_memory(view, base)
    cube = np.arange(1.0, np.prod(size) + 1).reshape(size)
    view[...] = cube
    check(pattern, cube, array)


def test_the_comparison_fails_for_another_layout():
    cube = np.arange(24.0).reshape(2, 3, 4)
    with pytest.raises(AssertionError):
        check("(l m) n", cube, rearrange(cube, "n l m -> (m l) n"))


@pytest.mark.parametrize("pattern", ["(l m) n", " ( l m )n ", "(l\tm)\n n", "(l m)(n)"])
def test_white_space_does_not_matter(pattern):
    assert parse(pattern).axes == (("l", "m"), ("n",))


def test_a_pattern_is_parsed_once():
    assert parse("m (n l)") is parse("m (n l)")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(l k) n", "unknown letter 'k'"),
        ("n l M", "unknown letter 'M'"),
        ("nl m", "unknown letter 'nl' (write 'n l'"),
        ("n l m ...", "unknown letter '...'"),
        ("n l 1 m", "unknown letter '1'"),
        ("(n l)", "lacks the letter 'm'"),
        ("n", "lacks the letters 'l', 'm'"),
        ("", "lacks the letters 'n', 'l', 'm'"),
        ("n l m n", "has the letter 'n' 2 times"),
        ("(n l m", "leaves a parenthesis open"),
        ("n l) m", "closes a parenthesis that was not opened"),
        ("((n l) m)", "opens a parenthesis inside another"),
        ("n () l m", "has empty parentheses"),
        (None, "a layout is a string"),
        (["n", "l", "m"], "a layout is a string"),
    ],
)
def test_a_wrong_pattern_is_named(pattern, words):
    with pytest.raises(LayoutError) as caught:
        parse(pattern)
    assert words in str(caught.value)
    assert '"(l m) n"' in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NetjacError)
