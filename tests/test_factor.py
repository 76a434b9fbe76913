"""From use sites to blocks: the sum of the blocks is the sum over the sites, entry by entry; kinds are as planned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netjac import testing
from netjac.blocks.dense import DenseBlock
from netjac.blocks.embedding import EmbeddingBlock
from netjac.blocks.mapped import MappedBlock
from netjac.blocks.outer import OuterBlock
from netjac.errors import ShapeError
from netjac.factor import plan
from netjac.sites import SiteForm, SiteValues, UseSite
from netjac.spaces import ParameterSpace, lay_out

OUTER, EMBEDDING, DENSE = SiteForm.OUTER, SiteForm.EMBEDDING, SiteForm.DENSE


def space(*shapes):
    return ParameterSpace(lay_out([f"v{i}" for i in range(len(shapes))], shapes, ["float32"] * len(shapes)))


def entries(*shape):
    return np.arange(int(np.prod(shape))).reshape(shape)


def oracle(sites, values, parameters):
    """Plain loops over the definition of a use site."""
    J = 0.0
    for site, value in zip(sites, values, strict=True):
        g, k, c = site.entries.shape
        if site.form is DENSE:
            E = np.asarray(value.dense, np.float64).reshape(*value.dense.shape[:2], g, k, c)
        else:
            n, l, p = value.D.shape[:3]
            D = np.asarray(value.D, np.float64).reshape(n, l, p, g, c)
            if site.form is EMBEDDING:
                E = testing.naive_embedding(value.indices, D[:, :, :, 0], k)
            else:
                E = testing.naive_outer(np.ones((n, p, g, k)) if value.A is None else value.A, D)
        J = J + spread_present(E, site, value.scale, parameters)
    return J


def spread_present(E, site, scale, parameters):
    start, m = parameters.segments[site.variable].start, parameters.size
    J = np.zeros((*E.shape[:2], m))
    for place in np.ndindex(*site.entries.shape):
        if site.entries[place] >= 0:
            J[:, :, start + site.entries[place]] += (1 if scale is None else scale[place]) * E[(..., *place)]
    return J


def explicit(blocks, n, l, m):
    J = np.zeros((n, l, m))
    for block in blocks:
        block.fill(J, slice(0, n), add=True)
    return J


def check(sites, values, parameters, tol=None):
    """Blocks of a plan, each checked by the laws, their sum by the oracle; gives the blocks."""
    arrays = [a for v in values for a in (v.D, v.A, v.indices, v.scale, v.dense) if a is not None]
    for array in arrays:
        array.flags.writeable = False
    some = next(a for v in values for a in (v.D, v.dense) if a is not None)
    n, l = some.shape[:2]
    expected = oracle(sites, values, parameters)
    blocks = plan(sites, parameters).build(values)
    testing.assert_close(explicit(blocks, n, l, parameters.size), expected, "sum of the blocks", tol)
    for block in blocks:
        testing.check_block(block, explicit([block], n, l, parameters.size), tol=tol)
    return blocks


def layer(rng, n, l, p, k, c, dtype=np.float64, g=1):
    D = rng.standard_normal((n, l, p, g * c)).astype(dtype)
    return SiteValues(D=D, A=rng.standard_normal((n, p, g, k)).astype(dtype)), SiteValues(D=D)


@pytest.mark.parametrize(("p", "kinds"), [(1, [OuterBlock] * 2), (4, [OuterBlock, DenseBlock]), (9, [DenseBlock] * 2)])
def test_a_kernel_and_its_bias_become_one_block(p, kinds, rng):
    parameters = space((6, 5), (5,), (5, 2), (2,))
    sites = [
        UseSite(0, "a", OUTER, entries(1, 6, 5), 0),
        UseSite(1, "a", OUTER, entries(1, 1, 5), 0),
        UseSite(2, "b", OUTER, entries(1, 5, 2), 1),
        UseSite(3, "b", OUTER, entries(1, 1, 2), 1),
    ]
    values = [*layer(rng, 4, 2, p, 6, 5), *layer(rng, 4, 2, p, 5, 2)]
    blocks = check(sites, values, parameters)
    assert [type(block) for block in blocks] == kinds
    assert [len(block.columns()) for block in blocks] == [35, 12]


def test_joined_blocks_are_cut_into_their_variables_again(rng):
    parameters = space((6, 5), (5,))
    sites = [UseSite(0, "a", OUTER, entries(1, 6, 5), 0), UseSite(1, "a", OUTER, entries(1, 1, 5), 0)]
    for p in (1, 20):
        values = [*layer(rng, 4, 2, p, 6, 5)]
        (block,) = plan(sites, parameters).build(values)
        testing.check_restricted(block, oracle(sites, values, parameters), ((0, 30), (30, 35)))


def test_a_bias_before_its_kernel_and_three_in_a_row(rng):
    # Alphabetical variables (bias, kernel); then kernel, recurrent kernel, bias of one gate.
    parameters = space((4,), (3, 4), (5, 4), (2, 4), (4,))
    first, second = layer(rng, 3, 2, 1, 3, 4), layer(rng, 3, 2, 1, 5, 4)
    third = SiteValues(D=second[0].D, A=rng.standard_normal((3, 1, 1, 2)))
    sites = [
        UseSite(1, "a", OUTER, entries(1, 3, 4), 0),
        UseSite(0, "a", OUTER, entries(1, 1, 4), 0),
        UseSite(4, "b", OUTER, entries(1, 1, 4), 1),
        UseSite(2, "b", OUTER, entries(1, 5, 4), 1),
        UseSite(3, "b", OUTER, entries(1, 2, 4), 1),
    ]
    blocks = check(sites, [*first, second[1], second[0], third], parameters)
    assert [type(block) for block in blocks] == [OuterBlock, OuterBlock]
    assert [block.k for block in blocks] == [4, 8]


def test_what_does_not_follow_on_stays_apart(rng):
    # A transposed kernel (c, k) and its bias; other cotangents; a bias of another layer in between.
    parameters = space((4, 3), (4,), (2, 4), (9,), (4,))
    sites = [
        UseSite(0, "a", OUTER, entries(1, 4, 3).transpose(0, 2, 1), 0),
        UseSite(1, "a", OUTER, entries(1, 1, 4), 0),
        UseSite(2, "b", OUTER, entries(1, 2, 4), 1),
        UseSite(4, "b", OUTER, entries(1, 1, 4), 1),
    ]
    values = [*layer(rng, 3, 2, 1, 3, 4), *layer(rng, 3, 2, 1, 2, 4)]
    blocks = check(sites, values, parameters)
    assert [type(block) for block in blocks] == [OuterBlock, DenseBlock, OuterBlock, DenseBlock]


def test_sites_without_cotangent_number_are_not_joined(rng):
    parameters = space((6, 5), (5,))
    sites = [UseSite(0, "a", OUTER, entries(1, 6, 5)), UseSite(1, "b", OUTER, entries(1, 1, 5))]
    values = [layer(rng, 3, 2, 1, 6, 5)[0], layer(rng, 3, 2, 1, 6, 5)[1]]
    assert len(check(sites, values, parameters)) == 2


def test_collapse_is_exactly_where_the_explicit_block_is_smaller(rng):
    parameters = space((4, 3))
    site = UseSite(0, "a", OUTER, entries(1, 4, 3))
    for p, l in [(1, 1), (1, 3), (2, 2), (3, 1), (2, 5), (30, 2)]:
        (block,) = plan([site], parameters).build([layer(rng, 2, l, p, 4, 3)[0]])
        assert isinstance(block, DenseBlock) == (l * 12 < p * (4 + l * 3))
        assert block.nbytes == 2 * 8 * min(l * 12, p * (4 + l * 3))


@pytest.mark.parametrize("p", [1, 7])
def test_groups_and_scales_of_normalisations(p, rng):
    # A depthwise kernel (patch, channels, multiplier) with g = channels; a layer norm's scale; a convolution's bias.
    parameters = space((4, 3, 2), (3,), (6,))
    depthwise = entries(4, 3, 2).transpose(1, 0, 2)
    sites = [
        UseSite(0, "depthwise", OUTER, depthwise, 0),
        UseSite(1, "norm", OUTER, entries(3, 1, 1), 1),
        UseSite(2, "bias", OUTER, entries(1, 1, 6), 0),
    ]
    values = [
        layer(rng, 3, 2, p, 4, 2, g=3)[0],
        layer(rng, 3, 2, p, 1, 1, g=3)[0],
        SiteValues(D=rng.standard_normal((3, 2, p, 6))),
    ]
    check(sites, values, parameters)


def test_embeddings_keep_their_indices_unless_the_table_is_small(rng):
    parameters = space((50, 3), (2, 3))
    sites = [UseSite(0, "a", EMBEDDING, entries(1, 50, 3)), UseSite(1, "b", EMBEDDING, entries(1, 2, 3))]
    values = [
        SiteValues(D=rng.standard_normal((4, 2, 5, 3)), indices=rng.integers(0, high, (4, 5)).astype(np.int32))
        for high in (50, 2)
    ]
    blocks = check(sites, values, parameters)
    assert [type(block) for block in blocks] == [EmbeddingBlock, DenseBlock]


def scales(rng, g, k, c):
    return {
        "of k": np.broadcast_to(rng.standard_normal((g, k, 1)), (g, k, c)).copy(),
        "of c": np.broadcast_to(rng.standard_normal((g, 1, c)), (g, k, c)).copy(),
        "of each": rng.standard_normal((g, k, c)),
    }


@pytest.mark.parametrize("which", ["of k", "of c", "of each"])
@pytest.mark.parametrize("p", [1, 30])
def test_scales_are_folded_into_a_factor_where_they_can_be(which, p, rng):
    parameters = space((2, 6, 5), (3, 4), (3, 4))
    scale = scales(rng, 2, 6, 5)[which]
    outer, small = layer(rng, 3, 2, p, 6, 5, g=2)[0], scales(rng, 1, 3, 4)[which]
    sites = [
        UseSite(0, "a", OUTER, entries(2, 6, 5)),
        UseSite(1, "b", EMBEDDING, entries(1, 3, 4)),
        UseSite(2, "c", DENSE, entries(1, 3, 4)),
    ]
    values = [
        SiteValues(D=outer.D, A=outer.A, scale=scale),
        SiteValues(D=rng.standard_normal((3, 2, 1, 4)), indices=rng.integers(0, 3, (3, 1)), scale=small),
        SiteValues(dense=rng.standard_normal((3, 2, 12)), scale=small),
    ]
    blocks = check(sites, values, parameters)
    first = DenseBlock if p == 30 else MappedBlock if which == "of each" else OuterBlock
    assert [type(block) for block in blocks] == [first, EmbeddingBlock, DenseBlock]


def test_a_scale_on_one_of_the_joined_parts_them(rng):
    parameters = space((6, 5), (5,))
    sites = [UseSite(0, "a", OUTER, entries(1, 6, 5), 0), UseSite(1, "a", OUTER, entries(1, 1, 5), 0)]
    kernel, bias = layer(rng, 3, 2, 1, 6, 5)
    values = [kernel, SiteValues(D=bias.D, scale=rng.standard_normal((1, 1, 5)))]
    blocks = check(sites, values, parameters)
    assert [type(block) for block in blocks] == [OuterBlock, DenseBlock]


@pytest.mark.parametrize("form", [OUTER, EMBEDDING, DENSE])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("how", ["tiled", "shuffled", "sliced", "flipped"])
def test_entries_in_any_order(form, scaled, how, rng):
    k, c = 6, 4
    parameters = space((2,), (48,))
    where = {
        "tiled": np.tile(np.arange(12), 2),
        "shuffled": rng.permutation(40)[:24],
        "sliced": np.arange(48).reshape(6, 8)[:, 2:6].reshape(-1),
        "flipped": np.arange(24)[::-1],
    }[how].reshape(1, k, c)
    D = rng.standard_normal((3, 2, 1, c))
    values = SiteValues(
        D=None if form is DENSE else D,
        A=rng.standard_normal((3, 1, 1, k)) if form is OUTER else None,
        indices=rng.integers(0, k, (3, 1)) if form is EMBEDDING else None,
        dense=rng.standard_normal((3, 2, k * c)) if form is DENSE else None,
        scale=rng.standard_normal((1, k, c)) if scaled else None,
    )
    (block,) = check([UseSite(1, "a", form, where)], [values], parameters)
    assert isinstance(block, MappedBlock) == (how in ("tiled", "shuffled") or (scaled and form is OUTER))


@pytest.mark.parametrize("form", [OUTER, EMBEDDING, DENSE])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("missing", ["k", "c", "corner", "all"])
def test_entries_that_come_from_elsewhere(form, scaled, missing, rng):
    k, c = 6, 5
    where = np.full((1, k, c), -1)
    if missing == "k":
        where[:, 2:5] = np.arange(15).reshape(3, 5)
    elif missing == "c":
        where[:, :, 1:3] = np.arange(12).reshape(6, 2)
    elif missing == "corner":
        where[...] = np.arange(30).reshape(6, 5)
        where[:, 0, 0] = -1
    values = SiteValues(
        D=None if form is DENSE else rng.standard_normal((3, 2, 1, c)),
        A=rng.standard_normal((3, 1, 1, k)) if form is OUTER else None,
        indices=rng.integers(0, k, (3, 1)) if form is EMBEDDING else None,
        dense=rng.standard_normal((3, 2, k * c)) if form is DENSE else None,
        scale=rng.standard_normal((1, k, c)) if scaled else None,
    )
    (block,) = check([UseSite(0, "a", form, where)], [values], space((30,)))
    if not scaled:
        plain = missing == "c" or (missing == "k" and form is not EMBEDDING)
        assert isinstance(block, MappedBlock) != plain


def test_two_uses_of_one_variable_add_up(rng):
    # A tied weight: once as a kernel, once transposed.
    parameters = space((4, 3))
    sites = [
        UseSite(0, "a", OUTER, entries(1, 4, 3), 0),
        UseSite(0, "b", OUTER, entries(1, 4, 3).transpose(0, 2, 1), 1),
    ]
    assert len(check(sites, [layer(rng, 3, 2, 1, 4, 3)[0], layer(rng, 3, 2, 1, 3, 4)[0]], parameters)) == 2


@pytest.mark.parametrize("p", [1, 20])
def test_half_precision_is_widened_on_arrival(p, rng):
    parameters = space((6, 5), (5,), (3, 2))
    sites = [
        UseSite(0, "a", OUTER, entries(1, 6, 5), 0),
        UseSite(1, "a", OUTER, entries(1, 1, 5), 0),
        UseSite(2, "b", OUTER, entries(1, 3, 2), 1),
    ]
    for dtype in ("float16", pytest.importorskip("ml_dtypes").bfloat16):
        values = [*layer(rng, 3, 2, p, 6, 5, dtype), layer(rng, 3, 2, p, 3, 2, dtype)[0]]
        for block in plan(sites, parameters).build(values):
            assert block.row_squares().dtype == np.float32
        check(sites, values, parameters, tol=1e-5)


def test_integers_and_mixed_precision(rng):
    parameters = space((6, 5), (5,))
    sites = [UseSite(0, "a", OUTER, entries(1, 6, 5), 0), UseSite(1, "a", OUTER, entries(1, 1, 5), 0)]
    D = rng.standard_normal((3, 2, 1, 5))
    whole = rng.integers(-3, 4, (3, 1, 1, 6))
    check(sites, [SiteValues(D=D, A=whole), SiteValues(D=D)], parameters)
    single = D.astype(np.float32)
    A = rng.standard_normal((3, 1, 1, 6))
    (block,) = check(sites, [SiteValues(D=single, A=A), SiteValues(D=single)], parameters)
    assert block.A.dtype == block.D.dtype == np.float64


def test_cotangents_are_viewed_not_copied(rng):
    parameters = space((6, 5), (5,), (7,))
    sites = [
        UseSite(0, "a", OUTER, entries(1, 6, 5), 0),
        UseSite(1, "a", OUTER, entries(1, 1, 5), 0),
        UseSite(2, "b", OUTER, entries(1, 1, 7), 1),
    ]
    values = [*layer(rng, 3, 2, 1, 6, 5), SiteValues(D=rng.standard_normal((3, 2, 1, 7)))]
    joined, bias = plan(sites, parameters).build(values)
    assert np.shares_memory(joined.D, values[0].D)
    assert np.shares_memory(bias.values, values[2].D)
    (alone,) = plan(sites[:1], parameters).build(values[:1])
    assert np.shares_memory(alone.A, values[0].A)


@given(st.tuples(*[st.integers(0, 3)] * 5), st.booleans())
def test_sizes_zero_and_one(sizes, bias):
    n, l, p, k, c = sizes
    rng = np.random.default_rng(0)
    parameters = space((k, c), (c,))
    sites = [UseSite(0, "a", OUTER, entries(1, k, c), 0), UseSite(1, "a", OUTER, entries(1, 1, c), 0)][: 1 + bias]
    check(sites, [*layer(rng, n, l, p, k, c)][: 1 + bias], parameters)


def test_a_plan_serves_every_evaluation(rng):
    parameters = space((6, 5), (5,))
    sites = [UseSite(0, "a", OUTER, entries(1, 6, 5), 0), UseSite(1, "a", OUTER, entries(1, 1, 5), 0)]
    made = plan(sites, parameters)
    (one,), (two,) = (made.build([*layer(rng, n, 2, 1, 6, 5)]) for n in (3, 8))
    assert one.placement is two.placement
    out = np.zeros((3, 2, 8, 2))
    one.add_gram(two, slice(0, 3), slice(0, 8), out)
    J, K = explicit([one], 3, 2, 35), explicit([two], 8, 2, 35)
    testing.assert_close(out, np.einsum("nlm,stm->nlst", J, K), "gram of two evaluations")


def test_no_sites():
    assert plan([], space((3,))).build([]) == ()


def test_errors_say_what_was_expected(rng):
    parameters = space((6, 5), (5,))
    site = UseSite(0, "dense/MatMul", OUTER, entries(1, 6, 5))
    with pytest.raises(ShapeError, match="dense/MatMul"):
        plan([UseSite(1, "dense/MatMul", OUTER, entries(1, 6, 5))], parameters)
    with pytest.raises(ShapeError, match=r"\(g, k, c\)"):
        plan([UseSite(0, "a", OUTER, entries(6, 5))], parameters)
    made = plan([site], parameters)
    with pytest.raises(ShapeError, match="1 use sites"):
        made.build([])
    with pytest.raises(ShapeError, match="cotangents"):
        made.build([SiteValues(A=np.zeros((2, 1, 1, 6)))])
    with pytest.raises(ShapeError, match=r"\(n, l, p, 5\)"):
        made.build([SiteValues(A=np.zeros((2, 1, 1, 6)), D=np.zeros((2, 1, 1, 4)))])
    with pytest.raises(ShapeError, match="explicit form"):
        plan([UseSite(0, "a", DENSE, entries(1, 6, 5))], parameters).build([SiteValues()])
    with pytest.raises(ShapeError, match="indices"):
        plan([UseSite(0, "a", EMBEDDING, entries(1, 6, 5))], parameters).build([SiteValues(D=np.zeros((2, 1, 1, 5)))])
