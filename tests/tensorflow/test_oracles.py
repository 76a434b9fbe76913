"""The comparators themselves: broken on purpose, they must fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import close, compare, tape_jacobian

import netjac as nj
from netjac.examples import linear_layer

W = tf.Variable([[0.5, -0.25], [1.5, 2.0], [-1.0, 0.75]], dtype=tf.float64, name="w")
B = tf.Variable([0.25, -0.5], dtype=tf.float64, name="b")
X = np.array([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])


def f(x: Any) -> Any:
    return tf.tanh(x @ W + B)


def test_the_oracle_is_the_formula_written_out() -> None:
    expected_w, expected_b = np.zeros((2, 2, 3, 2)), np.zeros((2, 2, 2))
    for i in range(2):
        for j in range(2):
            slope = 1 - np.tanh(X[i] @ W.numpy()[:, j] + B.numpy()[j]) ** 2
            expected_w[i, j, :, j] = slope * X[i]
            expected_b[i, j, j] = slope
    got_w, got_b = tape_jacobian(f, X, [W, B])
    np.testing.assert_allclose(got_w, expected_w.reshape(2, 2, 6), rtol=0, atol=1e-14)
    np.testing.assert_allclose(got_b, expected_b, rtol=0, atol=1e-14)


def test_the_oracle_agrees_with_central_differences() -> None:
    theta = W.numpy().copy()
    (ours,) = tape_jacobian(f, X, [W])
    for k in range(6):
        step = np.zeros(6)
        step[k] = 1e-6
        values = []
        for sign in (1, -1):
            W.assign(theta + sign * step.reshape(3, 2))
            values.append(f(X).numpy())
        W.assign(theta)
        np.testing.assert_allclose((values[0] - values[1]) / 2e-6, ours[:, :, k], atol=1e-8)


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("size", [1e-3, 1e-10])
def test_compare_fails_on_a_perturbed_matrix(block: int, size: float) -> None:
    J = nj.jacobian(f, X, variables=[W, B])
    blocks = tape_jacobian(f, X, [W, B])
    compare(J, blocks)
    blocks[block][1, 1, 1] += size * np.abs(blocks[block]).max()
    with pytest.raises(AssertionError, match=J.parameters.names[block]):
        compare(J, blocks)


def test_compare_measures_a_small_block_by_its_own_size() -> None:
    small = tf.Variable([1.0, 2.0], dtype=tf.float64, name="small")

    def g(x: Any) -> Any:
        return f(x) * 1e6 + small * x[:, :2] * 1e-3

    J = nj.jacobian(g, X, variables=[W, small])
    blocks = tape_jacobian(g, X, [W, small])
    compare(J, blocks)
    blocks[1][0, 0, 0] *= 1 + 1e-4  # a ten-billionth of the largest entry of the whole matrix
    with pytest.raises(AssertionError, match="small"):
        compare(J, blocks)


def test_compare_tries_every_verb() -> None:
    """An operator that is right as a matrix and wrong in one verb is caught."""
    J = linear_layer()
    dense = J.to_array().reshape(J.n, J.l, J.m)
    blocks = [dense[:, :, segment.slice] for segment in J.parameters.segments]
    compare(J, blocks)
    for verb in ("gram", "row_norms", "column_norms", "__matmul__"):
        with pytest.MonkeyPatch.context() as patch:
            true = getattr(type(J), verb)
            patch.setattr(type(J), verb, lambda self, *args, true=true: true(self, *args) * 1.001)
            with pytest.raises(AssertionError):
                compare(J, blocks)


def test_close_fails_on_shapes_and_on_what_is_not_finite() -> None:
    with pytest.raises(AssertionError, match="shape"):
        close(np.zeros(3), np.zeros((3, 1)), "it", 1.0)
    with pytest.raises(AssertionError, match="finite"):
        close(np.zeros(3), np.array([0, np.nan, 0]), "it", 1.0)
    with pytest.raises(AssertionError):
        close(np.array([0, np.nan, 0]), np.zeros(3), "it", 1.0)
