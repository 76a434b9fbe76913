"""Every kind of block obeys every law, for all small shapes, in whatever memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from netjac import testing
from netjac.blocks import tiles
from netjac.blocks.base import strided_placement
from netjac.blocks.dense import DenseBlock
from netjac.blocks.embedding import EmbeddingBlock
from netjac.blocks.mapped import MappedBlock
from netjac.blocks.outer import OuterBlock
from netjac.errors import ShapeError


@pytest.mark.parametrize("kind", ["outer", "dense", "embedding", "mapped"])
def test_laws(kind):
    @settings(max_examples=40)
    @given(testing.blocks([kind]))
    def laws(case):
        testing.check_block(*case)

    laws()


@pytest.mark.parametrize("kind", ["outer", "dense", "embedding", "mapped"])
def test_laws_whatever_the_size_of_a_tile(kind, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 7)

    @settings(max_examples=15)
    @given(testing.blocks([kind]))
    def laws(case):
        testing.check_block(*case)

    laws()


SHAPES = [  # n, l, p, g, k, c: large enough for every way of filling and every formula
    (5, 2, 1, 1, 65, 32),
    (3, 2, 1, 1, 33, 2),
    (40, 3, 1, 1, 6, 70),
    (4, 1, 1, 1, 1, 9),
    (4, 2, 1, 3, 5, 4),
    (2, 2, 2, 1, 30, 40),  # positions are the cheaper sum
    (2, 3, 9, 1, 4, 5),  # entries are
    (2, 2, 3, 4, 2, 3),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_larger_outer_blocks(shape, dtype, rng):
    n, l, p, g, k, c = shape
    A, D = testing.numbers(rng, (n, p, g, k), dtype), testing.numbers(rng, (n, l, p, g, c), dtype)
    dense = np.einsum("npgk,nlpgc->nlgkc", A.astype(float), D.astype(float))
    for columns in (
        np.arange(g * k * c).reshape(g, k, c) + 2,
        np.arange(g * k * c).reshape(c, g, k).transpose(1, 2, 0),
    ):
        block = OuterBlock(A, D, strided_placement(columns))
        testing.check_block(block, testing.spread(dense, columns, g * k * c + 3))


def test_two_ways_of_a_gram_agree(rng, monkeypatch):
    A, D = rng.standard_normal((4, 3, 2, 5)), rng.standard_normal((4, 2, 3, 2, 6))
    block = OuterBlock(A, D, strided_placement(np.arange(60).reshape(2, 5, 6)))
    J = testing.naive_outer(A, D).reshape(4, 2, 60)
    from netjac.blocks import outer

    for size in (1 << 19, 1):
        monkeypatch.setattr(tiles, "TILE", size)
        by_entries, by_positions = np.zeros((4, 2, 4, 2)), np.zeros((4, 2, 4, 2))
        outer._add_explicit_gram(A, D, A, D, by_entries)
        for g, i, j in np.ndindex(2, 3, 3):
            outer._add_hadamard(A[:, i, g], D[:, :, i, g], A[:, j, g], D[:, :, j, g], by_positions)
        for way in (by_entries, by_positions):
            testing.assert_close(way, np.einsum("nle,ste->nlst", J, J), "gram")
    out = np.zeros((4, 2, 4, 2))
    block.add_gram(block, slice(None), slice(None), out)
    testing.assert_close(out, by_entries, "gram")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("left", [0, 1e-6, 1e-3, 1])
def test_row_squares_where_positions_cancel(dtype, left, rng, monkeypatch):
    """As behind a normalisation, whose derivatives sum to nothing: D of the positions sums to little or none."""
    n, l, p, k, c = 7, 2, 3, 6, 8
    A = np.repeat(rng.standard_normal((n, 1, 1, k)), p, axis=1).astype(dtype)
    D = rng.integers(-99, 99, (n, l, p, 1, c)).astype(float)
    D[:, :, -1] = -D[:, :, :-1].sum(axis=2)
    D[1::2, :, 0] += left * rng.standard_normal(D[1::2, :, 0].shape)
    D = D.astype(dtype)
    J = np.einsum("npgk,nlpgc->nlgkc", A.astype(float), D.astype(float)).reshape(n, l, -1)
    rounding = 10 * np.finfo(dtype).eps * np.abs(D).max() * np.abs(A).max() * np.sqrt(k * c * p)
    block = OuterBlock(A, D, strided_placement(np.arange(k * c).reshape(1, k, c)))
    for size in (1 << 19, 1):
        monkeypatch.setattr(tiles, "TILE", size)
        squares = block.row_squares()
        assert (squares >= 0).all()
        norms = np.linalg.norm(J, axis=2)
        np.testing.assert_allclose(np.sqrt(squares), norms, rtol=1e-4 if dtype == np.float32 else 1e-9, atol=rounding)


def test_restricted_to_each_variable_of_a_joined_block(rng):
    A, D = rng.standard_normal((3, 1, 1, 5)), rng.standard_normal((3, 2, 1, 1, 4))
    columns = np.arange(20).reshape(1, 5, 4) + 3
    dense = testing.spread(testing.naive_outer(A, D), columns, 25)
    variables = ((0, 3), (3, 19), (19, 23), (23, 25))
    testing.check_restricted(OuterBlock(A, D, strided_placement(columns)), dense, variables)
    explicit = DenseBlock(testing.naive_outer(A, D).reshape(3, 2, 20), strided_placement(columns))
    testing.check_restricted(explicit, dense, variables)


def test_not_a_number_and_infinity_spread_as_in_numpy(rng):
    A, D = rng.standard_normal((6, 1, 1, 20)), rng.standard_normal((6, 2, 1, 1, 30))
    A[0, 0, 0, 3], A[1, 0, 0, 0], A[2] = np.nan, np.inf, 0
    D[2, 0, 0, 0, 5], D[3, 1, 0, 0, 7], D[4, 1] = np.inf, np.nan, 0
    block = OuterBlock(A, D, strided_placement(np.arange(600).reshape(1, 20, 30)))
    with np.errstate(invalid="ignore"):
        dense = (A[:, :, 0, :, None] * D[:, :, 0, 0, None, :]).reshape(6, 2, 600)
        for layout, out in testing.buffers(6, 2, 600, np.float64).items():
            block.fill(out, slice(0, 6), add=False)
            np.testing.assert_array_equal(out, dense, err_msg=layout)
        product = np.zeros((6, 2, 1))
        block.add_product(np.ones((600, 1)), product)
        assert np.array_equal(np.isfinite(product[..., 0]), np.isfinite(dense).all(axis=2))
        assert np.array_equal(np.isfinite(block.row_squares()), np.isfinite((dense**2).sum(axis=2)))


def test_embedding_ignores_what_other_rows_hold(rng):
    indices = np.array([[0, 2], [2, 2]])
    D = rng.standard_normal((2, 1, 2, 3))
    block = EmbeddingBlock(indices, D, strided_placement(np.arange(12).reshape(1, 4, 3)))
    v = np.ones((12, 1))
    v[3:6] = np.nan  # row 1 of the table, which nobody looks up
    out = np.zeros((2, 1, 1))
    block.add_product(v, out)
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("target", [np.float16, np.float32, np.float64, np.longdouble])
def test_fill_rounds_once_into_the_type_of_the_buffer(source, target, rng):
    A, D = rng.standard_normal((4, 1, 1, 7)).astype(source), rng.standard_normal((4, 2, 1, 1, 5)).astype(source)
    block = OuterBlock(A, D, strided_placement(np.arange(35).reshape(1, 7, 5)))
    wide = np.result_type(source, target)
    expected = (A[:, :, 0, :, None].astype(wide) * D[:, :, 0, 0, None, :].astype(wide)).astype(target).reshape(4, 2, 35)
    for out in testing.buffers(4, 2, 35, target).values():
        block.fill(out, slice(0, 4), add=False)
        np.testing.assert_array_equal(out, expected)


def test_shapes_that_do_not_fit_are_named():
    place = strided_placement(np.arange(6).reshape(1, 2, 3))
    A, D = np.zeros((4, 1, 1, 2)), np.zeros((4, 5, 1, 1, 3))
    with pytest.raises(ShapeError, match=r"\(4, 1, 1, 3\)"):
        OuterBlock(np.zeros((4, 1, 1, 3)), D, place)
    with pytest.raises(ShapeError):
        OuterBlock(A, D[:3], place)
    with pytest.raises(ShapeError, match=r"\(n, l, 6\)"):
        DenseBlock(np.zeros((4, 5, 7)), place)
    with pytest.raises(ShapeError):
        EmbeddingBlock(np.zeros((4, 2), int), np.zeros((4, 5, 1, 3)), place)
    with pytest.raises(ShapeError):
        MappedBlock(OuterBlock(A, D, place), np.eye(6), np.arange(5))


@pytest.mark.parametrize("size", [10, 400, 1 << 19])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0), (2, 0, 1)])
@pytest.mark.parametrize("add", [False, True])
def test_sums_over_positions_in_tiles_of_any_size(size, order, add, rng, monkeypatch):
    from netjac.blocks import outer

    monkeypatch.setattr(outer, "TILE", size)
    for columns in (np.arange(63).reshape(1, 7, 9), np.arange(63).reshape(1, 9, 7).transpose(0, 2, 1)):
        A, D = rng.standard_normal((100, 3, 1, 7)), rng.standard_normal((100, 2, 3, 1, 9))
        dense = testing.spread(np.einsum("npgk,nlpgc->nlgkc", A, D), columns, 65)
        base = np.ones([(100, 2, 65)[i] for i in order])
        out = base.transpose(np.argsort(order))
        OuterBlock(A, D, strided_placement(columns)).fill(out, slice(0, 100), add=add)
        testing.assert_close(out[..., :63], dense[..., :63] + add, "fill")
        assert np.all(out[..., 63:] == 1)
