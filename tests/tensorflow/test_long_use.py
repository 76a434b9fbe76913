"""Long use of one process: thousands of calls, hundreds of models, several threads; nothing is traced twice or kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import compare, flat_row, randomise, tape_jacobian
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.framework.func_graph import FuncGraph

import netjac as nj
from netjac.tensorflow.evaluator import _KEPT

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype("float32")
STATM = Path("/proc/self/statm")


# ---------------------------------------------------------------- what may pile up


@dataclass(frozen=True)
class Kept:
    """How much of everything the process holds on to."""

    graphs: int
    functions: int  # in the library that eager execution looks names up in
    gradients: int  # in TensorFlow's registry
    models: int
    jacobians: int

    @classmethod
    def now(cls) -> Kept:
        while gc.collect() > 100:  # finalisers of functions free further ones
            pass
        alive = [type(thing) for thing in gc.get_objects()]
        return cls(
            sum(issubclass(kind, FuncGraph) for kind in alive),
            # Not the single operations that eager execution wraps, each once a process.
            sum("__wrapped__" not in name for name in context.context().list_function_names()),
            len(ops.gradient_registry.list()),
            len(_KEPT),
            sum(issubclass(kind, nj.Jacobian) for kind in alive),
        )


def megabytes() -> float:
    """Memory of this process that is in use; 0 where the system does not tell."""
    return int(STATM.read_text().split()[1]) * 4096 / 1e6 if STATM.exists() else 0.0


# ---------------------------------------------------------------- one model, many calls


class Counting(keras.Model):
    """Counts how often Python runs its call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = L.Dense(64, "silu"), L.Dense(3)
        self._traces = 0

    def call(self, x: Any) -> Any:
        self._traces += 1
        return self.last(self.first(x))


def many_calls(calls: int, n: int) -> None:
    model = Counting()
    model(np.zeros((1, 40), "float32"))
    problem = nj.LeastSquares(model, RNG.normal(size=(n, 40)), np.zeros((n, 3)))

    def call(i: int) -> None:
        x = RNG.normal(size=(n - i % 3, 40)).astype("float32")
        model.first.kernel.assign(0.01 * RNG.normal(size=(40, 64)).astype("float32"))
        J = nj.jacobian(model, x)
        np.testing.assert_allclose(J.outputs, flat_outputs(model, x), rtol=1e-4, atol=1e-5)
        assert nj.input_jacobian(model, x).shape == (len(x), 3, 40)
        theta = 0.1 * RNG.normal(size=J.m)
        assert problem.fun(theta).shape == (3 * n,)
        assert problem.jac(theta).shape == (3 * n, J.m)

    for i in range(5):
        call(i)
    traces, before = model._traces, Kept.now()
    for i in range(calls // 2):
        call(i)
    halfway = megabytes()
    for i in range(calls // 2):
        call(i)
    grown = megabytes() - halfway
    after = Kept.now()
    assert model._traces == traces
    assert after == before
    # One J more a call would be calls / 2 · n · (40 + 64 · 4 + …) · 4 bytes: many times this.
    assert grown < 30


def flat_outputs(model: Any, x: Any) -> np.ndarray:
    """A forward pass outside Keras, which would count as one more trace."""
    hidden = x @ np.asarray(model.first.kernel) + np.asarray(model.first.bias)
    hidden = hidden / (1 + np.exp(-hidden))
    return hidden @ np.asarray(model.last.kernel) + np.asarray(model.last.bias)


def test_a_thousand_calls_trace_nothing_and_keep_nothing() -> None:
    many_calls(1000 // 4, n=300)  # four calls of netjac each


@pytest.mark.slow
def test_ten_thousand_calls_trace_nothing_and_keep_nothing() -> None:
    many_calls(10_000 // 4, n=300)


# ---------------------------------------------------------------- many models


class Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(0.3 * np.eye(4, dtype="float32") + 0.1, name="w")


class Loop(Module):
    def __call__(self, x: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ self.w)), (0, x))[1]


class Branch(Module):
    def __call__(self, x: Any) -> Any:
        return tf.cond(tf.reduce_sum(self.w) > 0, lambda: tf.tanh(x @ self.w), lambda: x @ (2 * self.w))


class BranchInLoop(Module):
    def __call__(self, x: Any) -> Any:
        w = tf.convert_to_tensor(self.w)

        def body(i: Any, h: Any) -> Any:
            return i + 1, tf.cond(i % 2 == 0, lambda: tf.tanh(h @ w), lambda: 2 * h)

        return tf.while_loop(lambda i, h: i < 3, body, (0, x))[1]


class OwnGradient(Module):
    def __call__(self, x: Any) -> Any:
        @tf.custom_gradient
        def squashed(h: Any) -> Any:
            y = tf.tanh(h)
            return y, lambda d: d * (1 - y * y)

        return squashed(x @ self.w)


class Nested(Module):
    def __call__(self, x: Any) -> Any:
        step = tf.function(lambda h: tf.tanh(h @ self.w))
        return step(step(x))


def sequential() -> Any:
    return keras.Sequential([keras.Input((4,)), L.Dense(3, "tanh"), L.Dense(2)])


def own_activation() -> Any:
    return keras.Sequential([keras.Input((4,)), L.Dense(3, "silu"), L.Dense(2)])


KINDS: dict[str, Callable[[], Any]] = {
    "layers": sequential,
    "layers with gradients of their own": own_activation,
    "a loop": Loop,
    "a branch": Branch,
    "a branch in a loop": BranchInLoop,
    "a gradient of its own": OwnGradient,
    "a nested function": Nested,
}


def use(model: Any) -> None:
    """Everything that traces or compiles."""
    J = nj.jacobian(model, X)
    with pytest.raises(nj.MemoryBudgetError) as refused:
        nj.jacobian(model, X, memory=1)
    tiled = nj.jacobian(model, X, memory=refused.value.least)
    assert isinstance(tiled, nj.TiledJacobian)
    np.testing.assert_allclose(tiled.T @ np.ones(J.shape[0]), J.T @ np.ones(J.shape[0]), rtol=1e-4, atol=1e-6)
    nj.input_jacobian(model, X)
    nj.input_jacobian(model, X, across_samples=True)
    problem = nj.LeastSquares(model, X, np.zeros((J.n, J.l)))
    problem.solve(max_nfev=2)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(nj.jacobian_tensor(model, X) ** 2)
    tape.gradient(loss, model.trainable_variables)


def made_and_dropped(build: Callable[[], Any], models: int, warm_up: int, work: Callable[[Any], Any]) -> None:
    for _ in range(warm_up):
        work(build())
    before = Kept.now()
    references = []
    for _ in range(models):
        model = build()
        work(model)
        references.append(weakref.ref(model))
        del model
    after = Kept.now()
    assert [r for r in references if r() is not None] == []
    assert after == before


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_are_dropped_leave_nothing(kind: str) -> None:
    made_and_dropped(KINDS[kind], models=3, warm_up=1, work=lambda model: nj.jacobian(model, X))


@pytest.mark.parametrize("kind", ["layers with gradients of their own", "a loop"])
def test_no_verb_leaves_anything(kind: str) -> None:
    made_and_dropped(KINDS[kind], models=1, warm_up=1, work=use)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_models_that_are_dropped_leave_nothing(kind: str) -> None:
    before = megabytes()
    made_and_dropped(KINDS[kind], models=200, warm_up=3, work=lambda model: nj.jacobian(model, X))
    assert megabytes() - before < 200


def test_live_models_are_what_is_kept() -> None:
    """The figures above do grow with what is alive, and go back."""
    sequential_use = [own_activation(), BranchInLoop()]
    for model in sequential_use:
        nj.jacobian(model, X)
    del model
    alive = Kept.now()
    sequential_use.clear()
    after = Kept.now()
    assert after.models == alive.models - 2
    assert after.graphs < alive.graphs
    assert after.functions < alive.functions
    assert after.gradients < alive.gradients


def test_a_function_of_the_users_outlives_the_model_it_was_made_of() -> None:
    """What `jacobian_tensor` put into the user's graph needs its loops and gradients as long as that graph lives."""
    w = tf.Variable(0.3 * np.eye(4, dtype="float32"))

    def traced() -> Any:
        loop = BranchInLoop()
        loop.w = w

        def model(x: Any) -> Any:
            square = tf.custom_gradient(lambda h: (h * h, lambda d: 2 * h * d))
            return square(loop(x))

        loss = tf.function(lambda x: tf.reduce_sum(nj.jacobian_tensor(model, x, variables=[w]) ** 2))
        return weakref.ref(model), loss.get_concrete_function(tf.TensorSpec((None, 4), "float32"))

    def gradient(loss: Any) -> np.ndarray:
        with tf.GradientTape() as tape:
            value = loss(tf.constant(X))
        return np.asarray(tape.gradient(value, w))

    _, loss = traced()
    expected = gradient(loss)  # the backward pass is compiled here, with the model alive or not
    reference, loss = traced()
    Kept.now()
    assert reference() is None
    use(BranchInLoop())
    np.testing.assert_allclose(gradient(loss), expected, rtol=1e-5)
    assert np.abs(expected).max() > 0


# ---------------------------------------------------------------- several threads


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Results of functions started at the same moment, each in a thread of its own."""
    barrier = threading.Barrier(len(works))
    found: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        barrier.wait()
        try:
            found[i] = works[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def batches(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(i).normal(size=(2 + i % 3, 4)).astype("float32") for i in range(count)]


@pytest.mark.parametrize("kind", ["layers with gradients of their own", "a branch in a loop"])
def test_threads_on_one_model_first_calls_included(kind: str) -> None:
    model = KINDS[kind]()
    randomise(model.trainable_variables)
    given = batches(6)
    results = in_threads([lambda x=x: [nj.jacobian(model, x) for _ in range(4)] for x in given])
    for x, found in zip(given, results, strict=True):
        expected = tape_jacobian(model, x, model.trainable_variables)
        for J in found:
            compare(J, expected)
        np.testing.assert_array_equal(found[0].to_array(), nj.jacobian(model, x).to_array())


def test_threads_on_different_models_first_calls_included() -> None:
    models = [build() for build in KINDS.values()]
    for model in models:
        randomise(model.trainable_variables)
    given = batches(len(models))
    works = [lambda m=m, x=x: [nj.jacobian(m, x) for _ in range(3)] for m, x in zip(models, given, strict=True)]
    for model, x, found in zip(models, given, in_threads(works), strict=True):
        expected = tape_jacobian(model, x, model.trainable_variables)
        for J in found:
            compare(J, expected)


def test_threads_with_every_verb_on_one_model() -> None:
    """Whatever is compiled on first use is compiled by two threads at once."""
    model = own_activation()
    randomise(model.trainable_variables)
    with pytest.raises(nj.MemoryBudgetError) as refused:
        nj.jacobian(own_activation(), X, memory=1)
    problem = nj.LeastSquares(model, X, np.zeros((5, 2)))
    verbs: list[Callable[[], Any]] = [
        lambda: nj.jacobian(model, X).to_array(),
        lambda: nj.jacobian(model, X, memory=refused.value.least).to_array(),
        lambda: nj.input_jacobian(model, X),
        lambda: nj.input_jacobian(model, X, across_samples=True),
        lambda: np.asarray(nj.jacobian_tensor(model, X)),
        lambda: problem.jac(problem.x0),
    ]
    results = in_threads([*verbs, *verbs])
    J = np.concatenate(tape_jacobian(model, X, model.trainable_variables), axis=2).reshape(10, -1)
    for dense in (results[i] for i in (0, 1, 4, 5, 6, 7, 10, 11)):
        np.testing.assert_allclose(dense, J, rtol=1e-4, atol=1e-5)
    x = tf.constant(X)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        ys = [tf.reduce_sum(tf.map_fn(flat_row, model(x))[:, j]) for j in range(2)]
    inputs = np.stack([np.asarray(tape.gradient(y, x)) for y in ys], axis=1)
    for found in (results[2], results[8]):
        np.testing.assert_allclose(found, inputs, rtol=1e-4, atol=1e-5)
    for found in (results[3], results[9]):
        np.testing.assert_allclose(found.sum(axis=2), inputs, rtol=1e-4, atol=1e-5)
