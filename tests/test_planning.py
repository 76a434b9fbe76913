"""Tiles cover the samples once, in order, evenly, within the budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netjac import planning
from netjac.errors import DataError, DtypeError, MemoryBudgetError

counts = st.integers(0, 2000)


def check(n: int, tiles: list[slice]) -> None:
    """Assert that the tiles are the samples 0 … n - 1 in order, none empty."""
    assert [i for tile in tiles for i in range(tile.start, tile.stop)] == list(range(n))
    assert all(tile.stop > tile.start for tile in tiles)


@given(counts, st.integers(1, 300))
def test_row_tiles_cover_every_sample_once_and_evenly(n, count):
    tiles = planning.row_tiles(n, count)
    check(n, tiles)
    assert len(tiles) == min(n, count)
    lengths = {tile.stop - tile.start for tile in tiles}
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_the_comparison_fails_for_a_gap_and_for_an_overlap():
    for wrong in ([slice(0, 2), slice(3, 4)], [slice(0, 3), slice(2, 4)], [slice(0, 0), slice(0, 4)]):
        try:
            check(4, wrong)
        except AssertionError:
            continue
        raise RuntimeError(f"{wrong} was accepted")


@given(counts, st.integers(0, 5000), st.integers(0, 100_000), st.integers(1, 5))
def test_tiles_stay_within_the_budget_unless_one_sample_is_above_it(n, sample_bytes, budget, at_least):
    tiles = planning.tiles(n, sample_bytes, budget, at_least)
    check(n, tiles)
    assert all((tile.stop - tile.start) * sample_bytes <= budget or tile.stop - tile.start == 1 for tile in tiles)
    assert len(tiles) >= min(n, at_least)
    assert tiles == planning.tiles(n, sample_bytes, budget, at_least)


@given(counts, st.integers(1, 5000), st.integers(1, 100_000))
def test_there_are_no_more_tiles_than_needed(n, sample_bytes, budget):
    count = planning.tile_count(n, sample_bytes, budget)
    assert count <= -(-n // max(1, budget // sample_bytes))


@given(st.integers(1, 10_000), st.integers(0, 10**9))
def test_the_square_tile_is_the_largest_that_fits(pair_bytes, budget):
    side = planning.square_tile(pair_bytes, budget)
    assert side * side * pair_bytes <= budget or side == 1
    assert (side + 1) ** 2 * pair_bytes > budget


# ---- memory


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("512 MiB", 512 << 20),
        ("2 GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("  3kib ", 3072),
        ("7 kB", 7000),
        ("7 K", 7000),
        ("1 TiB", 1 << 40),
        ("2 TB", 2 * 10**12),
        ("100 B", 100),
        ("100", 100),
        (".5 MB", 500_000),
        (4096, 4096),
        (np.int64(4096), 4096),
        (2e9, 2 * 10**9),
        (np.float32(1.5), 1),
    ],
)
def test_amounts_of_memory(memory, expected):
    assert planning.memory_bytes(memory) == expected


@pytest.mark.parametrize(
    "memory", ["", "MB", "1 XB", "-1 MB", "1 iB", "1,5 GB", "1e3", "nan", "0 MB", 0, -5, float("inf"), 0.5]
)
def test_what_is_no_amount_of_memory(memory):
    with pytest.raises(DataError, match="memory"):
        planning.memory_bytes(memory)


@pytest.mark.parametrize("memory", [None, True, [1], b"1 MB", 1j])
def test_what_cannot_be_an_amount_of_memory(memory):
    with pytest.raises(DtypeError, match="memory must be a number of bytes"):
        planning.memory_bytes(memory)


@given(st.integers(1, 1 << 50))
def test_bytes_in_words_are_no_less_and_not_much_more(size):
    again = planning.memory_bytes(planning.in_words(size))
    assert size <= again <= size + max(size * 0.11, 1)


sizes = st.integers(0, 10**5)
footprints = st.builds(planning.Footprint, sizes, st.integers(1, 10**5), sizes, sizes)


@given(st.integers(1, 200), st.integers(1, 200), footprints, st.integers(1, 10**7))
def test_tiles_of_samples_and_outputs(n, l, footprint, budget):
    least = footprint.need(1, 1)
    if least > budget:
        with pytest.raises(MemoryBudgetError) as caught:
            planning.tile_sizes(n, l, footprint, budget)
        assert caught.value.least == least
        budget = least
    samples, rows = planning.tile_sizes(n, l, footprint, budget)
    assert footprint.need(samples, rows) <= budget
    assert rows == l or samples == 1  # whole outputs before some
    assert samples == n or footprint.need(samples + 1, l) > budget
    assert rows == l or footprint.need(1, rows + 1) > budget
    seen = np.zeros((n, l), int)
    for s, r in planning.tile_grid(n, l, footprint, budget):
        assert s.stop - s.start <= samples
        assert r.stop - r.start <= rows
        seen[s, r] += 1
    assert (seen == 1).all()


@given(n=st.integers(1, 40), l=st.integers(1, 40), budget=st.integers(400, 30_000))
def test_tiles_are_counted_as_they_are_made(n, l, budget):
    footprint = planning.Footprint(sample=100, row=40, sample_work=20, row_work=10)
    grid = planning.tile_grid(n, l, footprint, budget)
    sizes = [(s.stop - s.start, o.stop - o.start) for s, o in grid]
    assert planning.tile_count_and_shape(n, l, footprint, budget) == (len(grid), max(sizes))


@given(footprints, st.integers(1, 50), st.integers(1, 50))
def test_a_footprint_in_double_precision_and_of_combinations(footprint, samples, rows):
    wide, combined = footprint.widened(), footprint.combined(rows)
    assert wide.held(samples, rows) == 2 * footprint.held(samples, rows)
    assert wide.peak(samples, rows) == footprint.peak(samples, rows) + 2 * footprint.held(samples, rows)
    assert combined.held(samples, rows) == footprint.held(samples, rows)
    assert combined.peak(samples, 1) == footprint.peak(samples, 1) + 24 * samples * rows
