"""Writing outer products and copies into buffers of any strides: every way gives the numbers of a plain product."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netjac.blocks import tiles

WAYS = ("_direct", "_buffered", "_across", "_outer", "_joined")


def case(rng, n, l, k, c, dtype):
    return rng.standard_normal((n, 1, k, 1)).astype(dtype), rng.standard_normal((n, l, 1, c)).astype(dtype)


def buffers(shape, dtype):
    for order in itertools.permutations(range(4)):
        base = np.full([shape[i] for i in order], np.nan, dtype)
        yield base.transpose(np.argsort(order))


@given(st.tuples(*[st.integers(0, 5)] * 4), st.sampled_from([np.float32, np.float64]), st.integers(0, 23))
def test_small_shapes(shape, dtype, which):
    a, d = case(np.random.default_rng(0), *shape, dtype)
    out = next(itertools.islice(buffers(shape, dtype), which, None))
    tiles.multiply_into(a, d, out)
    np.testing.assert_array_equal(out, a * d)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3, 2, 67, 40), (3, 2, 70, 2), (2, 3, 5, 1030), (130, 5, 9, 3), (500, 1, 3, 4)])
def test_large_shapes_in_every_layout(shape, dtype, rng):
    a, d = case(rng, *shape, dtype)
    for out in buffers(shape, dtype):
        tiles.multiply_into(a, d, out)
        np.testing.assert_array_equal(out, a * d)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_by_itself(way, rng, monkeypatch):
    a, d = case(rng, 7, 3, 61, 37, np.float32)
    out = np.empty((7, 3, 61, 37), np.float32)
    monkeypatch.setattr(tiles, "_BLAS_ALONE", 500)
    for size in (1, 1 << 19):
        monkeypatch.setattr(tiles, "TILE", size)
        out.fill(np.nan)
        getattr(tiles, way)(a, d, out)
        np.testing.assert_array_equal(out, a * d)
    narrow = np.empty((61, 37), np.float32)
    getattr(tiles, way)(a[0, 0], d[0, 0], narrow)
    np.testing.assert_array_equal(narrow, a[0, 0] * d[0, 0])


def test_every_way_is_chosen_somewhere():
    chosen = set()
    for sizes in itertools.product((2, 500), (1, 5), (3, 70, 300), (2, 40, 2000)):
        for order in itertools.permutations(range(4)):
            shape = [sizes[i] for i in order]
            strides = tuple(np.cumprod([4, *shape[:0:-1]])[::-1][np.argsort(order)].tolist())
            n, l, k, c = sizes
            chosen.add(tiles._strategy((n, 1, k, 1), (n, l, 1, c), sizes, strides, 4)[-1].__name__)
    assert chosen == set(WAYS)


def test_ufunc_buffers_are_left_as_they_were(rng):
    before = np.getbufsize()
    a, d = case(rng, 2, 2, 3, 2000, np.float64)
    tiles.multiply_into(a, d, np.empty((2, 2, 3, 2000)))
    with pytest.raises(ValueError, match="broadcast"):
        tiles._direct(a, d, np.empty((5, 5)))
    assert np.getbufsize() == before


@given(st.permutations(range(3)), st.permutations(range(3)), st.tuples(*[st.sampled_from([0, 1, 3, 20, 150])] * 3))
def test_copies_between_any_two_orders_of_memory(one, other, shape):
    def laid(order):
        return np.zeros([shape[i] for i in order]).transpose(np.argsort(order))

    source, target = laid(one), laid(other)
    source[...] = np.arange(source.size).reshape(shape)
    tiles.copy_into(target, source)
    np.testing.assert_array_equal(target, np.arange(source.size).reshape(shape))


def test_sample_tiles_cover_everything_once():
    for n, numbers, budget in itertools.product((0, 1, 7, 20), (0, 1, 3, 100), (1, 10, 10**6)):
        parts = list(tiles.sample_tiles(n, numbers, budget))
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(n))
        assert all((p.stop - p.start) * numbers <= budget or p.stop - p.start == 1 for p in parts)


@pytest.mark.parametrize("inner", [0, 1, 4])
def test_product_is_a_matrix_product(inner, rng):
    x, y = rng.standard_normal((3, 5, inner)), rng.standard_normal((3, inner, 2))
    np.testing.assert_allclose(tiles.product(x, y), x @ y)
