"""Tiles cover the samples once, in order, evenly, within the budget."""

from hypothesis import given
from hypothesis import strategies as st

from netjac import plan

counts = st.integers(0, 2000)


def check(n: int, tiles: list[slice]) -> None:
    """Assert that the tiles are the samples 0 … n - 1 in order, none empty."""
    assert [i for tile in tiles for i in range(tile.start, tile.stop)] == list(range(n))
    assert all(tile.stop > tile.start for tile in tiles)


@given(counts, st.integers(1, 300))
def test_row_tiles_cover_every_sample_once_and_evenly(n, count):
    tiles = plan.row_tiles(n, count)
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
    tiles = plan.tiles(n, sample_bytes, budget, at_least)
    check(n, tiles)
    assert all((tile.stop - tile.start) * sample_bytes <= budget or tile.stop - tile.start == 1 for tile in tiles)
    assert len(tiles) >= min(n, at_least)
    assert tiles == plan.tiles(n, sample_bytes, budget, at_least)


@given(counts, st.integers(1, 5000), st.integers(1, 100_000))
def test_there_are_no_more_tiles_than_needed(n, sample_bytes, budget):
    count = plan.tile_count(n, sample_bytes, budget)
    assert count <= -(-n // max(1, budget // sample_bytes))


@given(st.integers(1, 10_000), st.integers(0, 10**9))
def test_the_square_tile_is_the_largest_that_fits(pair_bytes, budget):
    side = plan.square_tile(pair_bytes, budget)
    assert side * side * pair_bytes <= budget or side == 1
    assert (side + 1) ** 2 * pair_bytes > budget
