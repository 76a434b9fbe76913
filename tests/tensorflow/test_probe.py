"""The probe refuses networks that mix samples or draw random numbers, and catches rules that are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import check, randomise

import netjac as nj
from netjac.tensorflow import groups, match, rules, weights

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype("float32")
X3 = RNG.normal(size=(5, 6, 4)).astype("float32")
W = tf.Variable(RNG.normal(size=(4, 3)).astype("float32"), name="w")


class Wrapped(keras.Model):
    """A dense layer, ``layer`` called with training=True, a dense layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.first, self.layer, self.last = L.Dense(4, "tanh"), layer, L.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(self.layer(self.first(x), training=True))


def wrapped(layer: Any, x: Any) -> Any:
    model = Wrapped(layer)
    model(x)
    randomise(model.weights)
    return model


def refused(model: Any, x: Any, error: type[Exception], variables: Any = None) -> str:
    """Message of the refusal; weights and statistics must be as before."""
    weights = model.weights if hasattr(model, "weights") else variables
    before = [np.asarray(w).copy() for w in weights]
    with pytest.raises(error) as caught:
        nj.jacobian(model, x, variables=variables)
    assert isinstance(caught.value, ValueError)
    for value, weight in zip(before, weights, strict=True):
        np.testing.assert_array_equal(value, np.asarray(weight))
    return str(caught.value)


def test_batch_statistics_are_refused_and_not_updated() -> None:
    message = refused(wrapped(L.BatchNormalization(), X), X, nj.SampleMixingError)
    assert "batch_normalization" in message.lower()
    assert "training=True" in message


def test_batch_statistics_over_pixels_are_refused() -> None:
    x = RNG.normal(size=(3, 4, 4, 2)).astype("float32")
    assert "batch_norm" in refused(wrapped(L.BatchNormalization(), x), x, nj.SampleMixingError).lower()


MIXING: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "softmax over the batch": (lambda x: tf.nn.softmax(x @ W, axis=0), X, ""),
    "mean over the batch": (lambda x: x @ W - tf.reduce_mean(x @ W, 0, name="centre"), X, "centre"),
    "attention across the batch": (lambda x: tf.matmul(tf.nn.softmax(x @ tf.transpose(x)), x @ W), X, "MatMul"),
    "largest of the batch": (lambda x: (x @ W) / tf.reduce_max(tf.abs(x @ W), name="largest"), X, "largest"),
    "samples and time swapped": (
        lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]) @ W, [-1, 6, 3], name="swap"), X3, "swap",
    ),
    "neighbours": (lambda x: x @ W + tf.roll(x @ W, 1, 0, name="rolled"), X, "rolled"),
    "reversed": (lambda x: tf.reverse(x, [0]) @ W, X, "ReverseV2"),
    "sorted": (lambda x: tf.sort(x @ W, axis=0), X, ""),
    "running sum": (lambda x: tf.cumsum(x @ W, 0, name="running"), X, "running"),
    "first sample": (lambda x: x @ W + (x @ W)[:1], X, ""),
    "norm of the batch": (lambda x: (x @ W) * tf.sqrt(tf.reduce_sum(x**2)), X, "Sum"),
    "inputs alone are mixed": (lambda x: (x - tf.reduce_mean(x, 0, name="mean_x")) @ W, X, "mean_x"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("n", [1, 5])
def test_what_mixes_samples_is_refused_by_name(name: str, n: int) -> None:
    f, x, operation = MIXING[name]
    message = refused(f, x[:n], nj.SampleMixingError, variables=[W])
    assert operation in message
    assert "mixes samples" in message


def derivative_of_a_mean(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        mean = tf.reduce_mean(tf.tanh(x @ W))
    return tape.gradient(mean, x)


def place(x: Any) -> Any:
    return tf.cast(tf.range(tf.shape(x)[0])[:, None], x.dtype)


PLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "over n": (lambda x: tf.divide(x @ W, tf.cast(tf.shape(x)[0], x.dtype), name="share"), "share"),
    "over a count": (lambda x: tf.divide(x @ W, tf.reduce_sum(tf.ones_like(x[:, :1])), name="share"), "share"),
    "derivative of a mean": (derivative_of_a_mean, "RealDiv"),
    "numbered": (lambda x: x @ W * (1 + 0.01 * place(x)), ""),
    "the first doubled": (lambda x: tf.concat([2 * x[:1], x[1:]], 0, name="doubled") @ W, "doubled"),
    "one added to": (lambda x: tf.tensor_scatter_nd_add(x @ W, [[0, 0]], [1.0]), "TensorScatterAdd"),
}


@pytest.mark.parametrize("name", PLACED)
def test_what_depends_on_the_number_of_samples_or_their_place_is_refused_by_name(name: str) -> None:
    f, operation = PLACED[name]
    message = refused(f, X, nj.SampleMixingError, variables=[W])
    assert operation in message
    assert "the number of samples, or on its place" in message
    with pytest.raises(nj.SampleMixingError, match="the number of samples"):
        nj.input_jacobian(f, X)


@pytest.mark.parametrize("size", [1e-7, 1.0])
def test_what_a_network_magnifies_out_of_rounding_is_no_place(size: float) -> None:
    last = tf.Variable(RNG.normal(size=(3, 2)).astype("float32"), name="last")

    def f(x: Any) -> Any:
        z = tf.tanh(x @ W)
        return 1e4 * ((z / 3 + size * place(x)) * 3 - z) @ last

    if size == 1:
        refused(f, X, nj.SampleMixingError, variables=[last])
    else:
        assert nj.jacobian(f, X, variables=[last]).shape == (10, 6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_weak_mixing_is_refused(size: float, dtype: str) -> None:
    w = tf.Variable(W.numpy().astype(dtype))

    def f(x: Any) -> Any:
        z = x @ w
        return z + size * tf.reduce_mean(z, 0, name="leak")

    assert "leak" in refused(f, X.astype(dtype), nj.SampleMixingError, variables=[w])


def test_weak_mixing_in_a_large_network_is_refused() -> None:
    """Only one small gate sees the other samples; the gradient of everything else is untouched."""
    g = tf.Variable([1e-3], name="g")

    def f(x: Any) -> Any:
        z = tf.tanh(x @ W)
        return z * 10 + g * tf.reduce_mean(z[:, :1], 0, name="leak")

    assert "leak" in refused(f, X, nj.SampleMixingError, variables=[W, g])


def test_mixing_in_a_small_output_beside_large_ones_is_refused() -> None:
    def f(x: Any) -> Any:
        z = x @ W
        return {"large": 1e8 * z, "small": 1e-3 * tf.stop_gradient(tf.nn.softmax(z, axis=0)) * z}

    assert "mixes samples" in refused(f, X, nj.SampleMixingError, variables=[W])


def test_mixing_that_a_stopped_gradient_hides_is_refused() -> None:
    def f(x: Any) -> Any:
        z = x @ W
        return z * (1 + tf.stop_gradient(tf.reduce_mean(z, 0, name="hidden")))

    assert "hidden" in refused(f, X, nj.SampleMixingError, variables=[W])


RANDOM: dict[str, Callable[[Any], Any]] = {
    "normal": lambda x: x @ W + tf.random.normal((3,)),
    "uniform": lambda x: x @ W + tf.random.uniform(tf.shape(x @ W)),
    "dropout": lambda x: tf.nn.dropout(x @ W, 0.5),
    "shuffled features": lambda x: x @ tf.random.shuffle(W),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_callables_are_refused(name: str) -> None:
    assert "draws random numbers" in refused(RANDOM[name], X, nj.RandomModelError, variables=[W])
    with pytest.raises(nj.RandomModelError):
        nj.input_jacobian(RANDOM[name], X)


@pytest.mark.parametrize(
    "layer",
    [L.Dropout(0.5), L.GaussianNoise(0.1), L.GaussianDropout(0.5), L.AlphaDropout(0.5), L.SpatialDropout1D(0.5)],
    ids=lambda layer: type(layer).__name__,
)
def test_random_layers_left_on_are_refused_and_draw_nothing(layer: Any) -> None:
    x = X3 if isinstance(layer, L.SpatialDropout1D) else X
    model = wrapped(layer, x)
    seeds = [np.asarray(v).copy() for v in layer.variables]
    message = refused(model, x, nj.RandomModelError)
    assert "training=False" in message
    for before, variable in zip(seeds, layer.variables, strict=True):
        np.testing.assert_array_equal(before, np.asarray(variable))


def test_random_layers_are_off_in_a_model_that_asks() -> None:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            L.Dense(5, "tanh"),
            L.Dropout(0.5),
            L.GaussianNoise(1.0),
            L.BatchNormalization(),
            L.Dense(2),
        ]
    )
    before = [np.asarray(w).copy() for w in model.non_trainable_weights]
    check(model, X)
    randomised = [np.asarray(w).copy() for w in model.non_trainable_weights]
    nj.jacobian(model, X)
    for now, value in zip(model.non_trainable_weights, randomised, strict=True):
        np.testing.assert_array_equal(np.asarray(now), value)
    assert len(before) == len(randomised)


def test_constants_drawn_from_a_fixed_seed_are_no_random_numbers() -> None:
    check(lambda x: x @ W + tf.random.stateless_normal((3,), (1, 2)), X, [W], random=False)


def saturated(outputs: int) -> tuple[Any, Any]:
    """A classifier that is nearly sure: its outputs' derivatives are as small as the rounding of the outputs."""
    dtype = keras.config.floatx()
    model = keras.Sequential(
        [keras.Input((12,)), L.Dense(16, "tanh"), L.Dense(outputs, "softmax", kernel_initializer="zeros")]
    )
    hidden, last = np.random.default_rng(3).normal(size=(12, 16)), np.random.default_rng(4).normal(size=(16, outputs))
    x = np.random.default_rng(5).normal(size=(6, 12)).astype(dtype)
    gaps = np.sort(np.tanh(x @ hidden) @ last, axis=1)
    last *= -np.log(3 * np.finfo(dtype).eps) / np.median(gaps[:, -1] - gaps[:, -2])
    model.set_weights([hidden, np.zeros(16), last, np.zeros(outputs)])
    return model, x


@pytest.mark.parametrize("precision", ["float32", "float64"], indirect=True)
@pytest.mark.parametrize("outputs", [4, 10, 30])
def test_saturated_classifiers_are_told_from_faults(precision: str, outputs: int) -> None:
    model, x = saturated(outputs)
    J = check(model, x, random=False)
    assert np.median(J.row_norms()) < 100 * np.finfo(precision).eps
    tiled = nj.jacobian(model, x, memory=J.nbytes)
    assert isinstance(tiled, nj.TiledJacobian)
    np.testing.assert_allclose(tiled.to_array(), J.to_array(), rtol=1e-4, atol=10 * np.finfo(precision).eps)


def test_a_wrong_rule_is_seen_in_a_saturated_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.RULES, "MatMul", broken("MatMul", scaled(1.01)))
    model, x = saturated(10)
    with pytest.raises(nj.ProbeError, match="dense"):
        nj.jacobian(model, x)


# Rules broken on purpose --------------------------------------------------------------------------------------------


def broken(operation_type: str, change: Callable[[rules.Product], rules.Product]) -> Callable[..., Any]:
    true = rules.RULES[operation_type]
    return lambda operation, operand, survey: change(true(operation, operand, survey))


def scaled(by: float) -> Callable[[rules.Product], rules.Product]:
    def change(product: rules.Product) -> rules.Product:
        build = product.build
        assert build is not None
        return dataclasses.replace(product, build=lambda inputs, output: by * build(inputs, output))

    return change


@pytest.mark.parametrize("by", [2.0, 1.02, -1.0, 0.0])
def test_a_wrong_factor_is_caught(by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.RULES, "MatMul", broken("MatMul", scaled(by)))
    with pytest.raises(nj.ProbeError, match="No matrix is returned") as caught:
        nj.jacobian(lambda x: tf.tanh(x @ W), X, variables=[W])
    assert "w (" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_a_wrong_sign_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    b = tf.Variable([1.0, 2.0, 3.0], name="b")
    monkeypatch.setitem(
        rules.RULES, "AddV2", broken("AddV2", lambda product: dataclasses.replace(product, negative=True))
    )
    with pytest.raises(nj.ProbeError, match=r"b \("):
        nj.jacobian(lambda x: tf.tanh(x @ W + b), X, variables=[W, b])


def test_a_wrong_rule_for_a_small_weight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns are a thousandth of the others'."""
    s = tf.Variable([1.0, 2.0, 3.0], name="small")
    monkeypatch.setitem(rules.RULES, "Mul", broken("Mul", scaled(1.5)))
    with pytest.raises(nj.ProbeError, match=r"small \("):
        nj.jacobian(lambda x: 100 * tf.tanh(x @ W) + 0.1 * (tf.sin(x)[:, :3] * s), X, variables=[W, s])


def test_a_transposed_weight_taken_as_it_stands_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    w = tf.Variable(RNG.normal(size=(4, 4)).astype("float32"))
    monkeypatch.setattr(weights, "MOVES", weights.MOVES - {"Transpose"})
    monkeypatch.setattr(weights, "ENTRYWISE", weights.ENTRYWISE | {"Transpose"})
    with pytest.raises(nj.ProbeError):
        nj.jacobian(lambda x: tf.tanh(x @ (tf.transpose(w) * 1.0)), X, variables=[w])


def test_an_operation_taken_for_transparent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SUMS", groups.SUMS | {"Mul"})
    with pytest.raises(nj.ProbeError):
        nj.jacobian(lambda x: (x @ W) * tf.sin(x)[:, :3], X, variables=[W])


def test_an_edge_overlooked_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight used twice, one use forgotten."""
    true = match.Graph.consumers

    def half(self: Any, tensor: Any) -> Any:
        found = true(self, tensor)
        return found[:1] if tensor.name in {feed.name for feed in self.survey._feeds} else found

    w = tf.Variable(RNG.normal(size=(4, 4)).astype("float32"))
    monkeypatch.setattr(match.Graph, "consumers", half)
    with pytest.raises(nj.ProbeError):
        nj.jacobian(lambda x: tf.tanh(tf.tanh(x @ w) @ w), X, variables=[w])


def test_after_a_refusal_the_model_is_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any) -> Any:
        return tf.tanh(x @ W)

    with monkeypatch.context() as patch:
        patch.setitem(rules.RULES, "MatMul", broken("MatMul", scaled(2.0)))
        for _ in range(2):
            with pytest.raises(nj.ProbeError):
                nj.jacobian(f, X, variables=[W])
    check(f, X, [W], random=False)


def test_weights_of_zero_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At zero the gradient of the first layer vanishes, and a wrong rule for it would pass."""
    w, v = tf.Variable(W, name="first"), tf.Variable(np.zeros((3, 2), "float32"), name="zero")

    def f(x: Any) -> Any:
        return tf.tanh(x @ w) @ v

    check(f, X, [w, v], random=False)
    monkeypatch.setitem(rules.RULES, "MatMul", broken("MatMul", scaled(1.1)))
    with pytest.raises(nj.ProbeError, match=r"first \("):
        nj.jacobian(lambda x: f(x) * 1.0, X, variables=[w, v])
