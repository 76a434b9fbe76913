"""Kronecker factors of layers, and Jᵀ J v in one pass: against loops over samples and positions, whatever the tiles."""

from __future__ import annotations

from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import netjac as nj
from netjac import kronecker
from netjac.blocks.outer import OuterBlock

L = keras.layers
N = 5


def data(*shape: int) -> Any:
    return np.random.default_rng(3).normal(size=(N, *shape))


@cache
def network(kind: str) -> tuple[Any, Any]:
    layers, shape = {
        "dense": ([L.Dense(6, "tanh"), L.Dense(4, "tanh", use_bias=False), L.Dense(3)], (4,)),
        "alike": ([L.Dense(4, "tanh"), L.Dense(4, "tanh"), L.Dense(4)], (4,)),
        "sequence": ([L.Dense(6, "tanh"), L.Flatten(), L.Dense(3)], (2, 5)),
        "grouped": ([L.Conv2D(64, 3, groups=2, activation="tanh"), L.Flatten(), L.Dense(2)], (4, 4, 64)),
    }[kind]
    return keras.Sequential([keras.Input(shape), *layers]), data(*shape)


def by_loops(J: nj.Jacobian, weights: np.ndarray) -> dict[Any, tuple[np.ndarray, np.ndarray]]:
    """Σ a aᵀ and Σ w d dᵀ of each product, one sample, output, position and group at a time."""
    found = {}
    for block in J.blocks:
        if not isinstance(block, OuterBlock):
            continue
        A, D = np.zeros((block.g, block.k, block.k)), np.zeros((block.g, block.c, block.c))
        for n in range(J.n):
            for p in range(block.p):
                for g in range(block.g):
                    A[g] += np.outer(block.A[n, p, g], block.A[n, p, g])
                    for j in range(J.l):
                        D[g] += weights[n, j] * np.outer(block.D[n, j, p, g], block.D[n, j, p, g])
        found[block.placement] = A, D
    return found


def budgets(model: Any, x: Any) -> list[int]:
    """For tiles of two samples, and of one output."""
    with pytest.raises(nj.MemoryBudgetError) as caught:
        nj.jacobian(model, x, memory=1, dtype="float64")
    footprint = nj.tensorflow.evaluator(model, x, dtype="float64").footprint
    return [max(caught.value.least, footprint.need(2, model.output_shape[1])), caught.value.least]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["dense", "sequence", "grouped"])
def test_factors_are_those_of_loops_whatever_the_tiles(kind: str, weighted: bool) -> None:
    model, x = network(kind)
    held = nj.jacobian(model, x, dtype="float64")
    w = np.linspace(0.5, 2, N * held.l).reshape(N, -1) if weighted else None
    expected = by_loops(held, np.ones((N, held.l)) if w is None else w)
    assert expected
    assert held._layers() == len(expected)
    for J in (held, *(nj.jacobian(model, x, dtype="float64", memory=memory) for memory in budgets(model, x))):
        found = J._kronecker(w)
        assert {layer.placement for layer in found} <= set(expected)
        assert len(found) == len(expected) or J is not held  # with few outputs a block may be smaller summed up
        for layer in found:
            for ours, theirs in zip((layer.A, layer.D), expected[layer.placement], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * np.abs(theirs).max())
    again = kronecker.unpacked(kronecker.packed(found), [layer.placement for layer in found])
    for ours, theirs in zip(again, found, strict=True):
        np.testing.assert_array_equal(ours.A, theirs.A)
        np.testing.assert_array_equal(ours.D, theirs.D)


def test_the_factors_of_a_layer_are_those_of_its_inputs_and_cotangents() -> None:
    model, x = network("dense")
    last = nj.jacobian(model, x, dtype="float64")._kronecker()[-1]
    hidden = keras.Model(model.inputs[0], model.layers[-1].input)(x.astype("float32"))
    inputs = np.concatenate([np.asarray(hidden, np.float64), np.ones((N, 1))], axis=1)
    np.testing.assert_allclose(last.A[0], inputs.T @ inputs, rtol=1e-5)
    np.testing.assert_allclose(last.D[0], N * np.eye(3), atol=1e-12)  # of the outputs themselves


def test_a_parameter_that_is_used_twice_is_left_out() -> None:
    w = tf.Variable(data(4)[:4])
    J = nj.jacobian(lambda x: tf.tanh(x @ w) @ tf.transpose(w), data(4), variables=[w])
    assert J._kronecker() == []
    assert J._layers() == 0


@pytest.mark.parametrize("kind", ["dense", "alike"])
def test_the_smallest_layers_come_first_within_a_limit(kind: str) -> None:
    model, x = network(kind)
    J = nj.jacobian(model, x, dtype="float64")
    sizes = sorted(kronecker.layer_bytes(place) for place in kronecker.places(J.parts))
    for count in range(len(sizes) + 1):
        limit = sum(sizes[:count])
        found = J._kronecker(limit=limit)
        assert [kronecker.layer_bytes(layer.placement) for layer in found] or not count
        assert len(found) == J._layers(limit) == count
        assert sum(kronecker.layer_bytes(layer.placement) for layer in found) <= limit
        if count:
            assert len(J._kronecker(limit=limit - 1)) < count


@pytest.mark.parametrize("kind", ["dense", "sequence"])
def test_the_product_with_both_is_that_of_the_two(kind: str) -> None:
    model, x = network(kind)
    held = nj.jacobian(model, x, dtype="float64")
    dense, rng = held.to_array(), np.random.default_rng(0)
    v, w = rng.normal(size=(held.m, 2)), rng.normal(size=(N, held.l))
    for J in (held, *(nj.jacobian(model, x, dtype="float64", memory=memory) for memory in budgets(model, x))):
        np.testing.assert_allclose(J._normal_product(v), dense.T @ (dense @ v), rtol=1e-11, atol=1e-11)
        expected = dense.T @ (w.reshape(-1, 1) * (dense @ v))
        np.testing.assert_allclose(J._normal_product(v, w), expected, rtol=1e-11, atol=1e-11)
