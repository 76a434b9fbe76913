"""Extractors are made once, serve any n and any θ, leave the model alone, and die with it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import check, randomise, tape_jacobian

import netjac as nj
from netjac.tensorflow import evaluator

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype("float32")


class Counting(keras.Model):
    """Counts how often Python runs its call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = L.Dense(5, "tanh"), L.BatchNormalization(), L.Dense(2)
        self.traces = 0

    def call(self, x: Any) -> Any:
        self.traces += 1
        return self.last(self.norm(self.first(x)))


def counting() -> Counting:
    model = Counting()
    model(X)
    randomise(model.weights)
    model.traces = 0
    return model


def small(frozen: bool = False) -> Any:
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, "tanh"), L.Dense(2)])
    model.layers[0].trainable = not frozen
    return model


def test_traced_once_for_any_number_of_samples_and_calls() -> None:
    model = counting()
    nj.jacobian(model, X)
    once = model.traces
    assert 1 <= once <= 2
    for n in (6, 1, 2, 3, 0, 5, 1000):
        J = nj.jacobian(model, np.resize(X, (n, 4)))
        assert J.shape == (2 * n, J.m)
    evaluate = evaluator(model, X)
    for _ in range(3):
        evaluate.evaluate(RNG.normal(size=J.m))
        evaluate.outputs()
    assert model.traces == once


def test_a_new_signature_is_traced_anew_and_the_old_one_kept() -> None:
    traces = []
    w = tf.Variable(np.ones((4, 2), "float32"))

    def f(x: Any) -> Any:
        traces.append(x.shape)
        return tf.reduce_sum(tf.tanh(x @ w), list(range(1, x.shape.rank - 1))) if x.shape.rank > 2 else tf.tanh(x @ w)

    for x in (X, X[:, None], X, X[:2, None], X.astype("float64").tolist()):
        nj.jacobian(f, x, variables=[w])
    assert len(set(map(str, traces))) == 2
    once = len(traces)
    nj.jacobian(f, X, variables=[w])
    assert len(traces) == once


def test_calling_changes_no_weight_and_no_statistic() -> None:
    model = counting()
    before = [np.asarray(w).copy() for w in model.weights]
    evaluate = evaluator(model, X)
    evaluate.evaluate(RNG.normal(size=evaluate.parameters.size))
    evaluate.outputs(RNG.normal(size=evaluate.parameters.size))
    nj.jacobian(model, X)
    nj.input_jacobian(model, X)
    for value, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, np.asarray(weight))


def test_at_theta_equals_assign_then_call() -> None:
    model = counting()
    evaluate = evaluator(model, X)
    theta = RNG.uniform(-0.5, 0.5, evaluate.parameters.size)
    there, y = evaluate.evaluate(theta), evaluate.outputs(theta)
    evaluate.parameters.assign(theta)
    here = evaluate.evaluate()
    np.testing.assert_array_equal(there.to_array(), here.to_array())
    np.testing.assert_allclose(y, model(X, training=False), rtol=1e-6, atol=1e-6)
    check(model, X, random=False)


def test_present_weights_and_statistics_are_used() -> None:
    model = counting()
    nj.jacobian(model, X)
    randomise(model.weights, seed=5)
    check(model, X, random=False)


def test_freezing_a_layer_changes_the_columns() -> None:
    model = small()
    full = nj.jacobian(model, X)
    model.layers[0].trainable = False
    part = check(model, X)
    assert part.parameters.names == full.parameters.names[2:]
    assert part.shape == (12, 8)
    model.layers[0].trainable = True
    assert check(model, X).shape == full.shape


def test_variables_that_replace_others_are_the_columns() -> None:
    model = small()
    first = nj.jacobian(model, X).parameters
    assert nj.jacobian(model, X).parameters is first  # laid out once
    model.layers[0].enable_lora(2)
    randomise(model.weights, seed=7)
    J = check(model, X, random=False)
    ends = [name.partition("/")[2] for name in J.parameters.names]
    assert ends == ["bias", "lora_kernel_a", "lora_kernel_b", "kernel", "bias"]


def test_unrolling_is_for_the_trace_alone(precision: str) -> None:
    model = keras.Sequential([keras.Input((3, 2)), L.LSTM(2), L.Dense(1)])
    check(model, RNG.normal(size=(2, 3, 2)))
    assert model.layers[0].unroll is False


def test_results_do_not_change_with_later_calls() -> None:
    model = small()
    J = nj.jacobian(model, X)
    before = J.to_array()
    nj.jacobian(model, 2 * X)
    model.layers[0].kernel.assign(0 * model.layers[0].kernel)
    nj.jacobian(model, X)
    np.testing.assert_array_equal(J.to_array(), before)


@pytest.mark.parametrize("kind", ["keras", "module", "function"])
def test_a_model_that_is_dropped_is_collected(kind: str) -> None:
    if kind == "keras":
        model: Any = small()
        nj.jacobian(model, X)
        nj.input_jacobian(model, X)
    elif kind == "module":
        model = Net()
        nj.jacobian(model, X)
        nj.input_jacobian(model, X)
    else:
        w = tf.Variable(np.ones((4, 2), "float32"))

        def model(x: Any) -> Any:
            return tf.tanh(x @ w)

        nj.jacobian(model, X, variables=[w])
        nj.input_jacobian(model, X)
    ghost = weakref.ref(model)
    del model
    gc.collect()
    assert ghost() is None


class Net(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(RNG.normal(size=(4, 2)).astype("float32"))
        self.v = tf.Variable(RNG.normal(size=(4, 3)).astype("float32"))

    def __call__(self, x: Any) -> Any:
        return tf.tanh(x @ self.w)

    def other(self, x: Any) -> Any:
        return tf.sin(x @ self.v)

    def sized(self, x: Any, size: float = 2.0) -> Any:
        return size * tf.sin(x @ self.v)


class Slotted:
    """A callable that no weak reference can point to."""

    __slots__ = ("w",)

    def __init__(self) -> None:
        self.w = tf.Variable(RNG.normal(size=(4, 2)).astype("float32"))

    def __call__(self, x: Any) -> Any:
        return tf.tanh(x @ self.w)


def test_bound_methods_of_one_object_are_told_apart() -> None:
    net = Net()
    for _ in range(2):
        check(net, X)
        check(net.other, X, [net.v], random=False)
        check(net.sized, X, [net.v], random=False)
    assert nj.input_jacobian(net.other, X).shape == (6, 3, 4)
    assert nj.input_jacobian(net, X).shape == (6, 2, 4)


def test_a_bound_method_is_traced_once() -> None:
    traces = []

    class Model:
        def __init__(self) -> None:
            self.w = tf.Variable(np.ones((4, 2), "float32"))

        def predict(self, x: Any) -> Any:
            traces.append(1)
            return x @ self.w

    model = Model()
    nj.jacobian(model.predict, X, variables=[model.w])
    once = len(traces)
    nj.jacobian(model.predict, X, variables=[model.w])
    assert len(traces) == once


def test_other_callables() -> None:
    net = Net()
    check(lambda x: net(x), X, [net.w], random=False)
    check(tf.function(net.other), X, [net.v], random=False)
    slotted = Slotted()
    check(slotted, X, [slotted.w], random=False)
    layer = L.Dense(2)
    layer.build((None, 4))
    check(layer.call, X, [layer.kernel, layer.bias], random=False)
    check(keras.Sequential([keras.Input((4,)), layer]).call, X, [layer.kernel], random=False)


def test_two_lambdas_alike_are_two_models() -> None:
    w = tf.Variable(np.ones((4, 2), "float32"))
    for factor in (1.0, 2.0):
        J = nj.jacobian(lambda x, factor=factor: factor * (x @ w), X, variables=[w])
        np.testing.assert_allclose(J.to_array()[0, ::2], factor * X[0], rtol=1e-6)


def test_two_threads_on_one_model() -> None:
    model = counting()
    expected = np.concatenate(tape_jacobian(model, X, model.trainable_variables), axis=2).reshape(12, -1)
    model.traces = 0
    found: list[Any] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        try:
            barrier.wait()
            for _ in range(5):
                found.append(nj.jacobian(model, X).to_array())
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 10
    for array in found:
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-6)
    assert model.traces <= 2


@pytest.mark.parametrize("autograph", [True, False])
def test_inside_a_tf_function_the_error_names_what_works_there(autograph: bool) -> None:
    model = small()

    def inside(call: Any, x: Any = X) -> Any:
        return tf.function(lambda x: call(x), autograph=autograph)(x)

    for call in (
        lambda x: nj.jacobian(model, x),
        lambda x: nj.jacobian(model, X).to_array(),  # it would be a constant of the graph
        lambda x: nj.LeastSquares(model, x, np.zeros((6, 2))).x0,
    ):
        with pytest.raises(nj.ModelError, match=r"^netjac\.jacobian .* inside a tf\.function.*netjac\.jacobian_tensor"):
            inside(call)
    with pytest.raises(nj.ModelError, match=r"^netjac\.input_jacobian .* inside a tf\.function.*batch_jacobian"):
        inside(lambda x: nj.input_jacobian(model, x))
    with (
        tf.Graph().as_default(),
        pytest.raises(nj.ModelError, match=r"inside a graph of tf\.compat\.v1.*netjac\.tensorflow\.graph\.jacobian"),
    ):
        nj.jacobian(model, X)
    assert inside(lambda x: tf.py_function(lambda x: nj.jacobian(model, x).to_array(), [x], "float32")).shape == (
        12,
        23,
    )
    assert inside(lambda x: nj.jacobian_tensor(model, x)).shape == (12, 23)


def test_evaluator_knows_its_sizes() -> None:
    model = small()
    evaluate = evaluator(model, X)
    assert (evaluate.n, evaluate.parameters.size, evaluate.output_space.size) == (6, 23, 2)
    assert evaluate.outputs().shape == (6, 2)
    with pytest.raises(nj.ShapeError, match=r"\(23,\)"):
        evaluate.evaluate(np.zeros(22))


def test_tensors_as_inputs() -> None:
    model = small()
    J = nj.jacobian(model, tf.constant(X))
    np.testing.assert_array_equal(J.to_array(), nj.jacobian(model, X).to_array())
    np.testing.assert_array_equal(J.to_array(), nj.jacobian(model, tf.Variable(X)).to_array())
