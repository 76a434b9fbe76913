"""Models whose call assigns to variables: the assignment is left out and told, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import compare, tape_jacobian

import netjac as nj

X = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")


class Assigning(tf.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.w = tf.Variable(0.1 * np.arange(8, dtype="float32").reshape(4, 2), name="w")
        self.state = tf.Variable(2.0, name="state", trainable=False)
        self._rule = call

    def __call__(self, x: Any) -> Any:
        return self._rule(self, x)


def counter(m: Assigning, x: Any) -> Any:
    m.state.assign_add(1.0)
    return tf.tanh(x @ m.w)


def read_before(m: Assigning, x: Any) -> Any:
    y = tf.tanh(x @ m.w) * m.state
    m.state.assign(tf.reduce_mean(y))
    return y


def the_value_itself(m: Assigning, x: Any) -> Any:
    new = m.state + 1.0
    m.state.assign(new)
    return tf.tanh(x @ m.w) * new


def in_a_nested_function(m: Assigning, x: Any) -> Any:
    @tf.function
    def count() -> None:
        m.state.assign_add(1.0)

    y = tf.tanh(x @ m.w) * m.state
    count()
    return y


def in_an_unused_branch(m: Assigning, x: Any) -> Any:
    tf.cond(m.state > 0, lambda: m.state.assign_sub(1.0), lambda: m.state.assign(0.0))
    return tf.tanh(x @ m.w)


LEFT_OUT = [counter, read_before, the_value_itself, in_a_nested_function, in_an_unused_branch]


@pytest.mark.parametrize("call", LEFT_OUT)
def test_an_assignment_the_outputs_do_not_use_is_left_out_and_told(call: Callable[..., Any]) -> None:
    model = Assigning(call)
    for value in (2.0, 3.0):
        model.state.assign(value)
        J = nj.jacobian(model, X)
        assert float(model.state) == value
        assert J.coverage.notes == ("the assignment to 'state' in the model's call is not carried out",)
        assert "not carried out" in str(J.coverage)
        expected = []
        for i in range(3):  # sample by sample, from the same state
            model.state.assign(value)
            expected.append(tape_jacobian(model, X[i : i + 1], [model.w])[0])
        model.state.assign(value)
        compare(J, [np.concatenate(expected)])


def read_after(m: Assigning, x: Any) -> Any:
    m.state.assign_add(1.0)
    return tf.tanh(x @ m.w) * m.state


def result_of_the_assignment(m: Assigning, x: Any) -> Any:
    return tf.tanh(x @ m.w) * m.state.assign_add(1.0)


def assigned_in_a_nested_function(m: Assigning, x: Any) -> Any:
    in_a_nested_function(m, x)
    return tf.tanh(x @ m.w) * m.state


def read_in_a_nested_function(m: Assigning, x: Any) -> Any:
    m.state.assign_add(1.0)
    return tf.function(lambda: tf.tanh(x @ m.w) * m.state)()


def read_in_a_loop(m: Assigning, x: Any) -> Any:
    m.state.assign_add(1.0)
    return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(h) * m.state), (0, x @ m.w))[1]


def assigned_in_a_branch(m: Assigning, x: Any) -> Any:
    return tf.cond(m.state > 0, lambda: tf.tanh(x @ m.w) * m.state.assign_add(1.0), lambda: x @ m.w)


def assigned_in_a_loop(m: Assigning, x: Any) -> Any:
    def body(i: Any, h: Any) -> Any:
        m.state.assign_add(1.0)
        return i + 1, tf.tanh(h)

    return tf.while_loop(lambda i, h: i < 2, body, (0, x @ m.w))[1]


REFUSED = [
    read_after,
    result_of_the_assignment,
    assigned_in_a_nested_function,
    read_in_a_nested_function,
    read_in_a_loop,
    assigned_in_a_branch,
    assigned_in_a_loop,
]


@pytest.mark.parametrize("call", REFUSED)
def test_outputs_that_use_an_assigned_value_are_refused(call: Callable[..., Any]) -> None:
    model = Assigning(call)
    for differentiate in (nj.jacobian, nj.input_jacobian):
        with pytest.raises(nj.ModelError, match=r"assigns to the variable 'state' in its call.* uses? the new value"):
            differentiate(model, X)
    assert float(model.state) == 2.0


def test_a_trained_variable_that_is_constrained_in_the_call() -> None:
    def clipped_first(m: Assigning, x: Any) -> Any:
        m.w.assign(tf.clip_by_value(m.w, -0.3, 0.3))
        return x @ m.w

    with pytest.raises(nj.ModelError, match="assigns to the variable 'w'"):
        nj.jacobian(Assigning(clipped_first), X)

    def clipped_last(m: Assigning, x: Any) -> Any:
        y = x @ m.w
        m.w.assign(tf.clip_by_value(m.w, -0.3, 0.3))
        return y

    model = Assigning(clipped_last)
    before = model.w.numpy()
    J = nj.jacobian(model, X)
    assert J.coverage.notes == ("the assignment to 'w' in the model's call is not carried out",)
    np.testing.assert_array_equal(model.w.numpy(), before)


def test_models_that_assign_nothing_have_no_such_note() -> None:
    assert nj.jacobian(Assigning(lambda m, x: tf.tanh(x @ m.w) * m.state), X).coverage.notes == ()
