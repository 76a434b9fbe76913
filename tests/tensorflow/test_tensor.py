"""The Jacobian as a tensor: its values, and the derivatives that go through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import close, limit, randomise, tape_jacobian

import netjac as nj

L = keras.layers
LAYOUTS = ["(n l) m", "n l m", "(l m) n", "m (n l)", "l (m n)", "(n l m)", "n (m l)"]
BOTH = pytest.mark.parametrize("precision", ["float32", "float64"], indirect=True)
DOUBLE = pytest.mark.parametrize("precision", ["float64"], indirect=True)


def mlp(l: int = 2) -> Any:
    return keras.Sequential([keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(l)])


def convolution() -> Any:
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            L.Conv2D(3, 3, activation="tanh"),
            L.DepthwiseConv2D(2),
            L.Flatten(),
            L.Dense(2),
        ]
    )


def sequence() -> Any:
    return keras.Sequential([keras.Input((4, 3)), L.Dense(3, "tanh"), L.LSTM(3), L.Dense(2, "sigmoid")])


def normalised() -> Any:
    return keras.Sequential([keras.Input((3,)), L.Dense(4, "tanh"), L.LayerNormalization(), L.Dense(2)])


def words() -> Any:
    return keras.Sequential([keras.Input((4,), dtype="int32"), L.Embedding(5, 3), L.Flatten(), L.Dense(2, "tanh")])


def wide() -> Any:
    """More outputs than are swept one by one."""
    return mlp(20)


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "mlp": (mlp, (3,)),
    "convolution": (convolution, (5, 5, 2)),
    "sequence": (sequence, (4, 3)),
    "normalised": (normalised, (3,)),
    "words": (words, (4,)),
    "wide": (wide, (3,)),
}


def made(name: str, n: int = 3) -> tuple[Any, Any]:
    build, shape = MODELS[name]
    model = build()
    randomise(model.weights)
    rng = np.random.default_rng(7)
    if name == "words":
        return model, tf.constant(rng.integers(0, 5, (n, *shape)), tf.int32)
    return model, tf.constant(rng.uniform(-1, 1, (n, *shape)), keras.config.floatx())


def expected(model: Any, x: Any, variables: Any = None) -> np.ndarray:
    """(n, l, m)."""
    return np.concatenate(tape_jacobian(model, x, variables or model.trainable_variables), axis=2)


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_values_eagerly_and_in_a_function(name: str, precision: str) -> None:
    model, x = made(name)
    wanted = expected(model, x)
    symbolic = tf.function(lambda x: nj.jacobian_tensor(model, x, "n l m"))
    close(symbolic(x), wanted, "in a function, probed at made-up samples", limit(precision))
    eager = nj.jacobian_tensor(model, x, "n l m")
    assert isinstance(eager, tf.Tensor)
    assert eager.dtype.name == precision
    close(eager, wanted, "eagerly", limit(precision))


@DOUBLE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 3])
def test_every_layout_is_that_of_to_array(layout: str, n: int, precision: str) -> None:
    model, x = made("mlp", n)
    J = nj.jacobian(model, x)
    wanted = J.to_array(layout)
    close(nj.jacobian_tensor(model, x, layout), wanted, layout, 1e-13)

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float64)])
    def symbolic(x: Any) -> Any:
        found = nj.jacobian_tensor(model, x, layout)
        assert found.shape.rank == wanted.ndim
        sizes = [s for s, axis in zip(found.shape, nj.layout.parse(layout).axes, strict=True) if "n" not in axis]
        assert None not in sizes
        return found

    close(symbolic(x), wanted, layout, 1e-13)


def test_no_samples_and_one() -> None:
    for n in (0, 1):
        model, x = made("mlp", n)
        assert nj.jacobian_tensor(model, x, "n l m").shape == (n, 2, 26)
        assert tf.function(lambda x, model=model: nj.jacobian_tensor(model, x))(x).shape == (2 * n, 26)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(nj.jacobian_tensor(model, x[:0]) ** 2)
    for gradient in tape.gradient(loss, model.trainable_variables):
        assert not np.any(gradient)


def test_the_present_values_are_read_each_time() -> None:
    model, x = made("mlp")
    symbolic = tf.function(lambda x: nj.jacobian_tensor(model, x, "n l m"))
    for seed in (1, 2):
        randomise(model.weights, seed)
        wanted = expected(model, x)
        close(symbolic(x), wanted, f"seed {seed}", 1e-5)
        close(nj.jacobian_tensor(model, x, "n l m"), wanted, f"seed {seed}", 1e-5)


def test_one_trace_serves_all_batches_and_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made("mlp", 5)
    nj.jacobian_tensor(model, x)
    monkeypatch.setattr(nj.tensorflow.extractor, "trace", None)
    nj.jacobian_tensor(model, x[:2], "(l m) n")
    nj.jacobian(model, x[:1])
    tf.function(lambda x: nj.jacobian_tensor(model, x))(x)


# Derivatives through it ---------------------------------------------------------------------------------------------


def weighted(J: Any) -> Any:
    """A loss of the Jacobian that tells its entries apart."""
    u = tf.reshape(tf.cos(tf.range(tf.size(J), dtype=J.dtype)), tf.shape(J))
    return tf.reduce_sum(u * J**2)


def second(model: Any, x: Any, variables: Any) -> tuple[Any, list[Any]]:
    """The same loss and its derivatives by a tape of a tape."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape(persistent=True) as inner:
            y = model(x)
            y = tf.reshape(y, [y.shape[0], -1])
        blocks = inner.jacobian(y, variables, experimental_use_pfor=False, unconnected_gradients="zero")
        J = tf.concat([tf.reshape(tf.convert_to_tensor(b), [*y.shape, -1]) for b in blocks], axis=2)
        loss = weighted(J)
    return loss, outer.gradient(loss, [*variables, x], unconnected_gradients="zero")


@DOUBLE
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inside", [True, False])
def test_derivatives_agree_with_a_tape_of_a_tape(name: str, inside: bool, precision: str) -> None:
    model, x = made(name)
    variables = [v.value for v in model.trainable_variables]
    loss, wanted = second(model, x, variables)

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = weighted(nj.jacobian_tensor(model, x, "n l m"))
        return found, tape.gradient(found, [*variables, x], unconnected_gradients="zero")

    found, gradients = (tf.function(run) if inside else run)(x)
    close(found, loss, "loss", 1e-11)
    for variable, ours, theirs in zip([*variables, x], gradients, wanted, strict=True):
        close(
            tf.convert_to_tensor(ours), tf.convert_to_tensor(theirs), str(getattr(variable, "name", "x")), 1e-10, 1e-13
        )


@DOUBLE
def test_derivatives_agree_with_central_differences(precision: str) -> None:
    model, x = made("sequence")
    space = nj.parameters(model)
    theta = space.ravel()

    def loss_at(vector: Any, x: Any) -> float:
        space.assign(vector)
        return float(weighted(tf.constant(nj.jacobian(model, x).to_array("n l m"))))

    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = weighted(nj.jacobian_tensor(model, x, "n l m"))
    gradients = tape.gradient(loss, [*(v.value for v in model.trainable_variables), x])
    flat = np.concatenate([np.asarray(tf.convert_to_tensor(g)).reshape(-1) for g in gradients[:-1]])
    rng = np.random.default_rng(0)
    for _ in range(3):
        v = rng.standard_normal(theta.size)
        step = 1e-5
        slope = (loss_at(theta + step * v, x) - loss_at(theta - step * v, x)) / (2 * step)
        np.testing.assert_allclose(flat @ v, slope, rtol=1e-6, atol=1e-8)
        w = rng.standard_normal(x.shape)
        slope = (loss_at(theta, x + step * w) - loss_at(theta, x - step * w)) / (2 * step)
        np.testing.assert_allclose(np.sum(np.asarray(gradients[-1]) * w), slope, rtol=1e-6, atol=1e-8)


@DOUBLE
def test_a_loss_on_the_jacobian_can_be_trained(precision: str) -> None:
    model, x = made("mlp")
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(nj.jacobian_tensor(model, x) ** 2)
        variables = model.trainable_variables[:-1]  # the last bias has no part in the Jacobian
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    losses = [float(step(x)) for _ in range(20)]
    assert np.all(np.diff(losses) < 0)
    assert losses[-1] < losses[0] - 1


def test_plain_callables_and_what_is_made_of_weights() -> None:
    """Slopes of a weight (softplus), a tiled weight, a part of a weight, a table, and no use at all."""
    rng = np.random.default_rng(0)
    s, tiled, part, unused = (tf.Variable(rng.uniform(0.2, 0.8, shape)) for shape in ((3, 2), (1, 2), (5, 2), (2, 2)))

    def f(x: Any) -> Any:
        a = tf.tanh(x @ tf.nn.softplus(s))
        return a * tf.sin(tf.tile(tiled, [1, 1])) + x @ part[1:4] + x[:, :2] @ tf.tile(tiled, [2, 1])

    variables = [s, tiled, part, unused]
    x = tf.constant(rng.uniform(-1, 1, (4, 3)))
    loss, wanted = second(f, x, variables)
    with tf.GradientTape() as tape:
        tape.watch(x)
        J = nj.jacobian_tensor(f, x, "n l m", variables)
        found = weighted(J)
    close(J, expected(f, x, variables), "values", 1e-12)
    close(found, loss, "loss", 1e-12)
    gradients = tape.gradient(found, [*variables, x], unconnected_gradients="zero")
    for ours, theirs in zip(gradients, wanted, strict=True):
        close(tf.convert_to_tensor(ours), tf.convert_to_tensor(theirs), "gradient", 1e-11)


def test_a_variable_that_falls_back_is_differentiated_too() -> None:
    w = tf.Variable(np.random.default_rng(0).uniform(0.2, 0.8, (3, 3)))

    def f(x: Any) -> Any:
        return tf.tanh(x @ tf.linalg.inv(w + tf.eye(3, dtype=w.dtype)))

    x = tf.constant(np.random.default_rng(1).uniform(-1, 1, (4, 3)))
    assert {t.value for t in nj.jacobian(f, x, variables=[w]).coverage.treatment("Variable")} == {"fallback"}
    _, wanted = second(f, x, [w])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = weighted(nj.jacobian_tensor(f, x, "n l m", [w]))
    for ours, theirs in zip(tape.gradient(loss, [w, x]), wanted, strict=True):
        close(tf.convert_to_tensor(ours), tf.convert_to_tensor(theirs), "gradient", 1e-10)


def test_structures_variables_and_lists_as_inputs() -> None:
    w = tf.Variable(np.ones((3, 2), "float32"))
    x = tf.Variable([[1.0, 7.0, 5.0]])
    both = {"a": x, "b": np.ones((1, 2))}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(nj.jacobian_tensor(lambda x: tf.sin(x["a"]) @ w + x["b"], both, variables=[w]))
    close(tape.gradient(loss, x), 2 * np.cos([[1.0, 7.0, 5.0]]), "d loss / d x", 1e-6)
    found = nj.jacobian_tensor(lambda x: x @ w, [[1.0, 7.0, 5.0]], variables=[w])
    np.testing.assert_array_equal(found, [[1, 0, 7, 0, 5, 0], [0, 1, 0, 7, 0, 5]])


def test_symbolic_beside_given_inputs() -> None:
    w = tf.Variable(np.ones((3, 2), "float32"))
    given = tf.constant([[1.0, 2.0], [3.0, 4.0]])

    @tf.function
    def run(x: Any) -> Any:
        return nj.jacobian_tensor(lambda x: x[0] @ w * x[1], (x, given), "n l m", [w])

    x = tf.constant([[1.0, 7.0, 5.0], [2.0, 3.0, 4.0]])
    close(run(x), expected(lambda x: x[0] @ w * x[1], (x, given), [w]), "values", 1e-6)


def test_statistics_of_normalisation_stay_as_they_are() -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(4), L.BatchNormalization(), L.Dropout(0.5), L.Dense(2)])
    randomise(model.weights)
    x = tf.constant(np.random.default_rng(0).uniform(-1, 1, (4, 3)).astype("float32"))
    before = [np.asarray(v) for v in model.weights]
    close(nj.jacobian_tensor(model, x, "n l m"), expected(model, x), "values", 1e-5)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, np.asarray(variable))


@pytest.mark.parametrize("symbolic", [True, False])
def test_what_mixes_or_draws_is_refused(symbolic: bool) -> None:
    w = tf.Variable(np.ones((3, 2), "float32"))
    x = tf.constant([[1.0, 7.0, 5.0], [2.0, 3.0, 4.0]])
    refusals = [
        (lambda x: tf.nn.softmax(x @ w, axis=0), nj.SampleMixingError),
        (lambda x: tf.nn.dropout(x @ w, 0.5), nj.RandomModelError),
    ]
    for f, error in refusals:

        def run(x: Any, f: Any = f) -> Any:
            return nj.jacobian_tensor(f, x, variables=[w])

        with pytest.raises(error):
            (tf.function(run) if symbolic else run)(x)


def test_errors_say_what_to_do() -> None:
    w = tf.Variable(np.ones((3, 2), "float32"))
    with pytest.raises(nj.LayoutError):
        nj.jacobian_tensor(lambda x: x @ w, [[1.0, 7.0, 5.0]], "(n l) k", [w])
    with tf.Graph().as_default(), pytest.raises(nj.ModelError, match=r"graph\.jacobian"):
        nj.jacobian_tensor(lambda x: x @ w, tf.compat.v1.placeholder(tf.float32, (None, 3)), variables=[w])

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.float32)])
    def unknown(x: Any) -> Any:
        return nj.jacobian_tensor(lambda x: x @ w, x, variables=[w])

    with pytest.raises(nj.ShapeError, match="ensure_shape"):
        unknown(tf.ones((1, 3)))
