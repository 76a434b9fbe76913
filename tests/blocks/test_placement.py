"""Where columns lie: strided structure is found exactly where there is one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from netjac import testing
from netjac.blocks.base import Placement, strided_placement


@st.composite
def strided_columns(draw):
    g, k, c = (draw(st.integers(0, 4)) for _ in range(3))
    columns, m = testing.columns_of(draw, (g, k, c))
    return columns, m


@given(strided_columns())
def test_strided_columns_are_found(case):
    columns, _ = case
    placement = strided_placement(columns)
    assert placement is not None
    assert placement.sizes == columns.shape
    np.testing.assert_array_equal(placement.indices(), columns)
    assert sum(placement.counts) == len(placement.shape)
    low, high = placement.bounds
    if columns.size:
        assert (low, high) == (columns.min(), columns.max() + 1)
        assert 1 not in placement.shape


@given(
    hnp.arrays(np.intp, hnp.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=4), elements=st.integers(0, 30))
)
def test_never_wrong_about_arbitrary_columns(columns):
    placement = strided_placement(columns)
    if placement is not None:
        np.testing.assert_array_equal(placement.indices(), columns)
        assert len(np.unique(columns)) == columns.size


@pytest.mark.parametrize(
    "columns",
    [
        [[[0, 0]]],
        [[[0, 1], [1, 2]]],  # strided, but a column repeats
        [[[0, 1, 3]]],
        [[[0, 1, 5, 6, 9, 10]]],  # runs of equal length, unequally apart
        [[[0, 1], [2, 4]]],  # the stride of c depends on k
    ],
)
def test_what_is_not_strided_or_repeats_is_refused(columns):
    assert strided_placement(np.array(columns)) is None


def test_interlocking_axes_without_repetition_are_kept():
    columns = np.array([0, 3])[None, :, None] + np.array([0, 2])
    placement = strided_placement(columns)
    assert placement is not None
    np.testing.assert_array_equal(placement.indices(), columns)


def test_transposed_convolution_kernel():
    # Variable (height, width, out, in); k = height x width x in, c = out: "in" is the fastest in memory.
    entries = np.arange(3 * 2 * 5 * 4).reshape(3, 2, 5, 4).transpose(0, 1, 3, 2).reshape(1, 24, 5)
    assert strided_placement(entries + 7) == Placement((6, 4, 5), (20, 1, 4), 7, (1, 24, 5))


@given(strided_columns())
def test_views_write_to_the_buffer(case):
    columns, m = case
    placement = strided_placement(columns)
    buffer = np.zeros((2, m))
    view = placement.view(buffer)
    assert view.shape == (2, *placement.shape)
    view[...] = np.arange(1, columns.size + 1).reshape(placement.shape)
    expected = np.zeros((2, m))
    expected[:, columns.reshape(-1)] = np.arange(1, columns.size + 1)
    np.testing.assert_array_equal(buffer, expected)
    table = np.zeros((m, 3))
    rows = placement.rows(table)
    rows += np.arange(1, columns.size + 1).reshape(*placement.shape, 1)
    np.testing.assert_array_equal(table, np.repeat(expected[:1].T, 3, axis=1))


@given(strided_columns(), st.integers(1, 20))
def test_cut_covers_the_entries_once(case, size):
    columns, _ = case
    pieces = strided_placement(columns).cut(size)
    assert len({axis for axis, _, _ in pieces}) == 1
    parts = [columns[(slice(None),) * axis + (part,)] for axis, part, _ in pieces]
    for (_, _, placement), part in zip(pieces, parts, strict=True):
        np.testing.assert_array_equal(placement.indices(), part)
    np.testing.assert_array_equal(np.concatenate(parts, axis=pieces[0][0]), columns)


def test_cut_makes_pieces_of_the_size_asked_for():
    placement = strided_placement(np.arange(1000).reshape(1, 100, 10))
    assert [p.size for _, _, p in placement.cut(250)] == [250] * 4
    assert len(placement.cut(10**6)) == 1


def test_part_of_a_joined_block():
    placement = strided_placement(np.arange(20).reshape(1, 5, 4) + 3)  # a kernel (4, 4) and its bias (4,)
    ks, kernel = placement.part(3, 19, -3)
    assert (ks, kernel) == (slice(0, 4), Placement((4, 4), (4, 1), 0, (1, 4, 4)))
    ks, bias = placement.part(19, 23, 10)
    assert (ks, bias) == (slice(4, 5), Placement((4,), (1,), 29, (1, 1, 4)))
    assert placement.part(23, 30, 0) is None
    assert placement.part(0, 3, 0) is None
    assert placement.part(0, 23, 1)[1].offset == 4
