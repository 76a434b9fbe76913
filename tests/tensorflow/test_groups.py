"""Uses that add up become one site; what is kept of each follows from sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import check

from netjac.blocks.dense import DenseBlock
from netjac.blocks.outer import OuterBlock
from netjac.sites import SiteForm, dense_is_smaller
from netjac.tensorflow.groups import Group, group
from netjac.tensorflow.match import Graph, match
from netjac.tensorflow.survey import Survey
from netjac.tensorflow.trace import argument_specs, parameter_space, signature_of, trace

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 6))
W = tf.Variable(RNG.normal(size=(6, 6)), name="w")
B = tf.Variable(RNG.normal(size=6), name="b")


def groups_of(f: Any, x: Any, variables: Any) -> list[Group]:
    parameters = parameter_space(f, variables)
    signature, leaves = signature_of(x, "float64")
    traced = trace(f, signature, parameters)
    survey = Survey(traced.program, argument_specs(traced), [v.numpy() for v in variables], leaves)
    graph = Graph(survey)
    matches, unmatched = match(survey, graph)
    assert not unmatched
    return group(survey, graph, matches, traced.output_space.size)


def test_steps_of_one_kernel_are_one_site_with_more_positions() -> None:
    def f(x: Any) -> Any:
        for _ in range(3):
            x = tf.tanh(x @ W + B)
        return x[:, :1]

    kernel, bias = groups_of(f, X, [W, B])
    assert kernel.sizes == (3, 1, 6, 6)
    assert bias.sizes == (3, 1, 1, 6)
    assert len(kernel.members) == len(kernel.cotangents) == 3
    assert kernel.cotangents == bias.cotangents
    assert kernel.form is bias.form is SiteForm.OUTER
    check(f, X, [W, B], random=False)


def test_a_kernel_and_its_bias_are_one_block() -> None:
    J = check(lambda x: tf.tanh(x @ W + B) @ tf.ones((6, 2), tf.float64), X, [W, B], random=False)
    (block,) = J.blocks
    assert isinstance(block, OuterBlock)
    assert block.A.shape == (3, 1, 1, 7)


def test_an_activation_between_kernel_and_bias_keeps_them_apart() -> None:
    first, second = groups_of(lambda x: tf.tanh(x @ W) + B, X, [W, B])
    assert first.cotangents != second.cotangents


@pytest.mark.parametrize(
    ("between", "same"),
    [
        (lambda z: z + 1, True),
        (lambda z: z - tf.ones((3,), tf.float64)[0], True),
        (lambda z: tf.reshape(tf.reshape(z, [-1, 2, 3]), [-1, 6]), True),
        (lambda z: 1 - z, False),
        (lambda z: 2 * z, False),
        (lambda z: z + tf.square(z), False),
        (lambda z: z + z, False),
        (lambda z: tf.transpose(tf.transpose(z)), False),
    ],
)
def test_what_a_cotangent_passes_unchanged(between: Any, same: bool) -> None:
    kernel, bias = groups_of(lambda x: tf.tanh(between(x @ W) + B), X, [W, B])
    assert (kernel.cotangents == bias.cotangents) == same
    check(lambda x: tf.tanh(between(x @ W) + B), X, [W, B], random=False)


def test_an_output_that_is_used_further_is_not_passed() -> None:
    def f(x: Any) -> Any:
        z = x @ W
        return {"z": z, "y": tf.tanh(z + B)}

    kernel, bias = groups_of(f, X, [W, B])
    assert kernel.cotangents != bias.cotangents
    check(f, X, [W, B], random=False)


def test_different_cuts_of_one_variable_are_different_sites() -> None:
    found = groups_of(lambda x: tf.tanh(x[:, :3] @ W[:3]) + tf.sin(x[:, 3:] @ W[3:]), X, [W])
    assert [len(g.members) for g in found] == [1, 1]
    assert not np.intersect1d(found[0].first.entries, found[1].first.entries).size


@pytest.mark.parametrize(("positions", "features", "l"), [(1, 5, 1), (4, 5, 1), (20, 2, 1), (20, 3, 4), (2, 30, 2)])
def test_a_site_is_summed_where_that_is_smaller(positions: int, features: int, l: int) -> None:
    x = RNG.normal(size=(2, positions, features))
    w = tf.Variable(RNG.normal(size=(features, 4)), name="w")
    head = tf.constant(RNG.normal(size=(4, l)))

    def f(x: Any) -> Any:
        return tf.reduce_sum(tf.tanh(x @ w), 1) @ head

    J = check(f, x, [w], random=False)
    (block,) = J.blocks
    summed = positions != 1 and dense_is_smaller(positions, 1, features, 4, l)
    assert isinstance(block, DenseBlock if summed else OuterBlock)
    assert J.nbytes <= 8 * 2 * min(l * features * 4, positions * (features + l * 4))
