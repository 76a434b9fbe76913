"""Networks that differentiate themselves inside their call: each kernel is used forwards and, transposed, backwards.

The oracle is TensorFlow's tape around the network's own tapes, sample by sample and output by output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_configurations import data
from oracles import check, randomise, tape_jacobian, treatments

import netjac as nj

L = keras.layers
pytestmark = pytest.mark.usefixtures("precision")


def mlp(*widths: int, activation: str = "tanh") -> keras.Sequential:
    return keras.Sequential(
        [keras.Input((widths[0],)), *(L.Dense(w, activation) for w in widths[1:-1]), L.Dense(widths[-1])]
    )


class Physics(keras.Model):
    """A network inside, and a call that differentiates it."""

    def __init__(self, net: Any, inputs: int) -> None:
        super().__init__()
        self.net = net
        self(data(inputs))


class Forces(Physics):
    """Energy of positions, and minus its gradient."""

    def call(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = self.net(x)
        return {"energy": energy, "forces": -tape.gradient(energy, x)}


class PairForces(Physics):
    """Atoms in space: an energy of their distances, summed; forces of shape (n, atoms, 3)."""

    def call(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            apart = x[:, :, None] - x[:, None]
            distance = tf.sqrt(tf.reduce_sum(apart**2, -1) + 0.1)
            energy = tf.reduce_sum(self.net(distance[..., None]), [1, 2, 3])
        return -tape.gradient(energy, x)


class Capacity(Physics):
    """A voltage V(Q) and its slope dV/dQ, whose inverse is the incremental capacity dQ/dV."""

    def call(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            voltage = self.net(x)
        slope = tape.gradient(voltage, x)[:, :1]
        return tf.concat([voltage, slope, 1 / (tf.nn.softplus(slope) + 0.5)], 1)


class Heat(Physics):
    """Residual u_t − u_xx of a solution u(t, x)."""

    def call(self, points: Any) -> Any:
        t, x = points[:, :1], points[:, 1:]
        with tf.GradientTape() as second:
            second.watch(x)
            with tf.GradientTape(persistent=True) as first:
                first.watch([t, x])
                u = self.net(tf.concat([t, x], 1))
            u_t, u_x = first.gradient(u, [t, x])
        return u_t - second.gradient(u_x, x)


class Hamiltonian(Physics):
    """dq/dt = ∂H/∂p, dp/dt = −∂H/∂q."""

    def call(self, state: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(state)
            H = self.net(state)
        dq, dp = tf.split(tape.gradient(H, state), 2, axis=1)
        return tf.concat([dp, -dq], 1)


class Divergence(Physics):
    """Trace of the network's own Jacobian, one direction at a time (a continuous flow's log-density)."""

    def call(self, x: Any) -> Any:
        total = 0.0
        for i in range(x.shape[1]):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = self.net(x)[:, i]
            total += tape.gradient(y, x)[:, i : i + 1]
        return total


class ByForwardMode(Physics):
    """A directional derivative taken by a forward accumulator."""

    def call(self, x: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
            y = self.net(x)
        return y + forward.jvp(y)


class OneStep(Physics):
    """One gradient step on the input, then the network again (an implicit or denoising layer)."""

    def call(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(self.net(x) ** 2, -1)
        return self.net(x - 0.1 * tape.gradient(loss, x))


NETWORKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "forces": lambda: (Forces(mlp(3, 5, 4, 1), 3), data(3)),
    "forces with a relu": lambda: (Forces(mlp(3, 5, 4, 1, activation="relu"), 3), data(3)),
    "a capacity": lambda: (Capacity(mlp(2, 5, 1), 2), data(2)),
    "a heat equation": lambda: (Heat(mlp(2, 5, 4, 1), 2), data(2)),
    "a Hamiltonian": lambda: (Hamiltonian(mlp(4, 5, 1), 4), data(4)),
    "a divergence": lambda: (Divergence(mlp(2, 4, 2), 2), data(2)),
    "one step down": lambda: (OneStep(mlp(2, 4, 2), 2), data(2)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_exact_and_without_fallback(name: str) -> None:
    J = check(*NETWORKS[name]())
    assert set().union(*treatments(J).values()) <= {"factored", "collapsed", "unreached"}, str(J.coverage)


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
def test_in_single_precision(precision: str) -> None:
    check(Heat(mlp(2, 4, 1), 2), data(2))


def test_pairs_of_atoms() -> None:
    model = keras.Sequential([keras.Input((3, 3, 1)), L.Dense(4, "tanh"), L.Dense(1)])

    class Atoms(PairForces):
        def __init__(self) -> None:
            keras.Model.__init__(self)
            self.net = model
            self(data(3, 3))

    J = check(Atoms(), data(3, 3))
    assert set().union(*treatments(J).values()) <= {"factored", "collapsed", "unreached"}, str(J.coverage)
    assert J.output_space.size == 9


def test_forward_accumulator() -> None:
    """Refused by TensorFlow's own tracing or exact, never wrong: the tape cannot check it, central differences can."""
    model, x = ByForwardMode(mlp(2, 4, 2), 2), data(2)
    randomise(model.weights)
    J = nj.jacobian(model, x).to_array()
    np.testing.assert_allclose(J, central_differences(model, x), rtol=1e-6, atol=1e-8)


def central_differences(model: Any, x: Any, step: float = 1e-5) -> np.ndarray:
    """(n·l, m), moving one parameter at a time."""
    space = nj.parameters(model)
    start = space.ravel()
    columns = []
    for i in range(len(start)):
        sides = []
        for sign in (1, -1):
            moved = start.copy()
            moved[i] += sign * step
            space.assign(moved)
            flat = [np.asarray(y).reshape(len(x), -1) for y in tf.nest.flatten(model(x))]
            sides.append(np.concatenate(flat, axis=1).reshape(-1))
        columns.append((sides[0] - sides[1]) / (2 * step))
    space.assign(start)
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("name", ["forces", "a heat equation"])
def test_central_differences_agree(name: str) -> None:
    """A third opinion, with no automatic derivative of derivatives."""
    model, x = NETWORKS[name]()
    randomise(model.weights)
    np.testing.assert_allclose(nj.jacobian(model, x).to_array(), central_differences(model, x), rtol=1e-5, atol=1e-7)


def test_each_kernel_is_used_forwards_and_transposed() -> None:
    J = check(Forces(mlp(3, 5, 4, 1), 3), data(3))
    for name in J.parameters.names:
        uses = [entry for entry in J.coverage.entries if entry.variable == name]
        if name.endswith("kernel"):
            assert len(uses) >= 2, str(J.coverage)
            assert len({entry.operation for entry in uses}) == len(uses)
        else:
            assert all(entry.operation_type in ("BiasAdd", "Add", "AddV2") for entry in uses)


def test_a_weight_that_only_the_energy_sees() -> None:
    """The last bias shifts the energy and no force: zero columns where forces are all that is returned."""

    class OnlyForces(Forces):
        def call(self, x: Any) -> Any:
            return super().call(x)["forces"]

    J = check(OnlyForces(mlp(3, 4, 1), 3), data(3))
    last = J.parameters.names[-1]
    assert treatments(J)[last] == {"unreached"}
    assert not J.columns(last).to_array().any()


def test_a_plain_function_with_nested_tapes() -> None:
    W, b, v = (
        tf.Variable(tf.zeros(s, tf.float64), name=name) for name, s in (("W", (1, 4)), ("b", (4,)), ("v", (4, 1)))
    )
    randomise([W, b, v])

    def f(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.sin(x @ W + b) @ v
            slope = inner.gradient(y, x)
        return tf.concat([y, slope, outer.gradient(slope, x)], 1)

    x = data(1)
    J = check(f, x, [W, b, v])
    assert set().union(*treatments(J).values()) <= {"factored", "collapsed"}, str(J.coverage)
    # y'' = −Σ v W² sin(x W + b): the derivative with respect to v, by hand.
    expected = -(W.numpy() ** 2) * np.sin(x @ W.numpy() + b.numpy())
    np.testing.assert_allclose(J.columns("v").to_array()[2::3], expected, rtol=1e-12)


def test_a_batch_jacobian_in_the_call() -> None:
    """TensorFlow vectorises it: rows by output, then by sample, and in the last layer the same for every sample."""
    W, b, v = (
        tf.Variable(tf.zeros(s, tf.float64), name=name) for name, s in (("W", (3, 4)), ("b", (4,)), ("v", (4, 2)))
    )
    randomise([W, b, v])

    def f(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ W + b) @ v
        return tape.batch_jacobian(y, x)

    J = check(f, data(3), [W, b, v])
    assert set().union(*treatments(J).values()) <= {"factored", "collapsed", "unreached"}, str(J.coverage)
    assert not J.coverage.notes  # sizes are computed by integer division, which is no rounding of numbers


def test_the_oracle_sees_the_inner_tape() -> None:
    """Against a derivative by hand: y = d/dx (w x²) = 2 w x, so dy/dw = 2 x."""
    w = tf.Variable([0.7], dtype=tf.float64)

    def f(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = w * x**2
        return tape.gradient(y, x)

    x = data(1)
    np.testing.assert_allclose(tape_jacobian(f, x, [w])[0][:, 0], 2 * x, rtol=1e-15)
