"""The flat graph: nested functions inlined, side effects dropped, weights given from outside."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import check

import netjac as nj
from netjac.tensorflow.program import Program
from netjac.tensorflow.trace import parameter_space, signature_of, trace

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4))
W = tf.Variable(RNG.normal(size=(4, 4)), name="w")
B = tf.Variable(RNG.normal(size=4), name="b")


def program(f: Any, x: Any, variables: Any) -> Program:
    parameters = parameter_space(f, variables)
    signature, _ = signature_of(x, "float64")
    return trace(f, signature, parameters).program


def run(flat: Program, theta: list[Any], x: list[Any]) -> list[np.ndarray]:
    """Insert the program into a fresh graph and run it."""
    specs = [tf.TensorSpec(np.shape(a), tf.as_dtype(np.asarray(a).dtype)) for a in (*theta, *x)]
    count = len(theta)
    wrapped = tf.function(lambda *a: flat.insert(a[:count], a[count:], flat.outputs), autograph=False)
    arguments = [tf.convert_to_tensor(a) for a in (*theta, *x)]
    return [np.asarray(y) for y in wrapped.get_concrete_function(*specs)(*arguments)]


@tf.function
def inner(x: Any) -> Any:
    return tf.tanh(x @ W) + B


@tf.function
def outer(x: Any) -> Any:
    return inner(inner(x) * 2) @ tf.transpose(W)


@tf.function(jit_compile=True)
def compiled(x: Any) -> Any:
    return tf.tanh(x @ W) + B


@pytest.mark.parametrize(
    "f", [inner, outer, compiled, lambda x: outer(x) + inner(x)], ids=["one", "two", "jit", "both"]
)
def test_nested_functions_are_inlined(f: Any) -> None:
    flat = program(f, X, [W, B])
    types = {node.op for node in flat.graph_def.node}
    assert not types & {"PartitionedCall", "StatefulPartitionedCall", "ReadVariableOp", "VarHandleOp"}
    assert not flat.captured
    np.testing.assert_allclose(run(flat, [W, B], [X])[0], f(tf.constant(X)), rtol=1e-14)


def test_nested_functions_factor() -> None:
    for f in (outer, compiled):
        assert check(f, X, [W, B], random=False).coverage.counts[nj.sites.Treatment.FALLBACK] == 0


def test_values_at_other_weights_are_those_after_assign() -> None:
    flat = program(outer, X, [W, B])
    w, b = W.numpy().copy(), B.numpy().copy()
    new = [RNG.normal(size=w.shape), RNG.normal(size=b.shape)]
    ours = run(flat, new, [X])[0]
    np.testing.assert_array_equal(W, w)
    try:
        W.assign(new[0])
        B.assign(new[1])
        np.testing.assert_allclose(ours, outer(tf.constant(X)), rtol=1e-14)
    finally:
        W.assign(w)
        B.assign(b)


def test_side_effects_are_dropped() -> None:
    calls, shown = tf.Variable(0, trainable=False), []

    def f(x: Any) -> Any:
        y = x @ W
        calls.assign_add(1)
        W.assign_add(tf.ones_like(W))
        tf.py_function(lambda: shown.append(1), [], [])
        tf.print("never seen", output_stream="file:///dev/null")
        tf.debugging.assert_greater(tf.reduce_sum(x), tf.constant(1e9, x.dtype))
        return y

    before = W.numpy()
    nj.jacobian(f, X, variables=[W])
    assert int(calls) == 0
    np.testing.assert_array_equal(W, before)
    assert not shown
    kept = {node.op for node in program(f, X, [W]).graph_def.node}
    assert kept <= {"Placeholder", "MatMul", "Identity"}


def test_control_dependencies_do_not_count() -> None:
    state = tf.Variable(1.0, trainable=False)

    def f(x: Any) -> Any:
        with tf.control_dependencies([state.assign(2.0)]):
            return tf.identity(x @ W)

    check(lambda x: f(x), X, [W], random=False)
    state.assign(1.0)
    nj.jacobian(f, X, variables=[W])
    assert float(state) == 1.0


def test_a_value_assigned_and_then_read_is_refused() -> None:
    """The outputs depend on a side effect on the very variable: there is no function of θ then."""

    def f(x: Any) -> Any:
        W.assign(2 * W)
        return x @ W

    before = W.numpy().copy()
    with contextlib.suppress(nj.NetjacError):
        nj.jacobian(f, X, variables=[W])
    np.testing.assert_array_equal(W, before)


def test_variables_that_are_not_trained_keep_their_present_value() -> None:
    scale = tf.Variable([1.0, 2.0, 3.0, 4.0], trainable=False, dtype=tf.float64)

    def f(x: Any) -> Any:
        return tf.tanh(x @ W) * scale

    check(f, X, [W], random=False)
    scale.assign(-3 * scale)
    check(f, X, [W], random=False)


def test_variables_looked_up_by_reference() -> None:
    table = tf.Variable(RNG.normal(size=(7, 3)), name="table")
    i = np.array([[0, 6], [2, 2], [5, 1]], "int32")
    for f in (lambda i: tf.gather(table, i), lambda i: tf.gather_nd(table, i[..., None])):
        kinds = {node.op for node in program(f, i, [table]).graph_def.node}
        assert not kinds & {"ResourceGather", "ResourceGatherNd"}
        check(f, i, [table], random=False)


def test_a_batched_look_up_of_a_variable() -> None:
    table = tf.Variable(RNG.normal(size=(3, 4, 2)), name="table")
    i = np.array([[0, 3, 1], [2, 2, 0]], "int32")
    check(lambda i: tf.transpose(tf.gather(table, tf.transpose(i), batch_dims=1), [1, 0, 2]), i, [table], random=False)


def test_saved_functions(tmp_path: Path) -> None:
    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(W)
            self.b = tf.Variable(B)

        @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float64)])
        def __call__(self, x: Any) -> Any:
            return tf.tanh(x @ self.w) + self.b

    tf.saved_model.save(Net(), str(tmp_path))
    restored = tf.saved_model.load(str(tmp_path))
    check(lambda x: restored(x), X, [restored.w, restored.b], random=False)


def test_a_program_is_inserted_as_often_as_needed() -> None:
    flat = program(outer, X, [W, B])

    @tf.function
    def twice(x: Any) -> Any:
        (first,) = flat.insert([W, B], [x], flat.outputs)
        (second,) = flat.insert([2 * W, B], [first], flat.outputs)
        return second

    first = run(flat, [W, B], [X])[0]
    np.testing.assert_allclose(twice(tf.constant(X)), run(flat, [2 * W, B], [first])[0], rtol=1e-14)


def test_a_name_that_is_fed_can_be_fetched() -> None:
    flat = program(lambda x: {"x": x, "y": x * 2}, X, [B])
    got = run(flat, [B], [X])
    np.testing.assert_array_equal(got[0], X)
    np.testing.assert_array_equal(got[1], 2 * X)
