"""A model of any floating type in float64: against the same model built in float64, and TensorFlow's tape on that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf
from layer_configurations import CONFIGURATIONS, built_in, data, tokens
from oracles import close, compare, randomise, tape_jacobian, treatments

import netjac as nj
from netjac.tensorflow import evaluator
from netjac.tensorflow.precision import widen

L = keras.layers
EXACT = 2.0**-10
"""An ε that float32 holds exactly."""
Build = Callable[[], Any]


def sequential(shape: tuple[int, ...], *layers: Any) -> keras.Sequential:
    return keras.Sequential([keras.Input(shape), *layers])


class Forces(keras.Model):
    """An energy, and minus its gradient with respect to the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = sequential((3,), L.Dense(5, "tanh"), L.Dense(1))
        self(data(3))

    def call(self, x: Any) -> Any:
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = self.net(x)
        return {"energy": energy, "forces": -tape.gradient(energy, x)}


def attention() -> Any:
    x = keras.Input((4, 6))
    return keras.Model(x, L.Dense(2)(L.LayerNormalization(epsilon=EXACT)(x + L.MultiHeadAttention(2, 4)(x, x))))


def recurrent_loop() -> Any:
    """A recurrent layer whose length is not known: it stays a loop, over a list of tensors."""
    x = keras.Input((4, 3))
    cut = L.Lambda(lambda t: t[:, : tf.shape(t)[1]], output_shape=(None, 3))(x)
    return keras.Model(x, L.Dense(2)(L.LSTM(3)(cut)))


# Shape of a sample, the model, and the error allowed: more than rounding where a constant was rounded to float32.
MODELS: dict[str, tuple[tuple[int, ...], Build, float]] = {
    "perceptron": ((3,), lambda: sequential((3,), L.Dense(6, "tanh"), L.Dense(2)), 1e-12),
    "convolutions": (
        (7, 7, 2),
        lambda: sequential(
            (7, 7, 2), L.Conv2D(3, 3), L.BatchNormalization(epsilon=EXACT), L.Activation("relu"), L.MaxPooling2D(2),
            L.DepthwiseConv2D(2), L.Flatten(), L.Dense(2),
        ),
        1e-12,
    ),
    "a grouped convolution": (
        (5, 5, 4), lambda: sequential((5, 5, 4), L.Conv2D(6, 2, groups=2), L.Flatten(), L.Dense(2)), 1e-12
    ),
    "layer normalisation": (
        (4,), lambda: sequential((4,), L.Dense(5), L.LayerNormalization(epsilon=EXACT), L.Dense(2, "softmax")), 1e-12
    ),
    "an epsilon of 1e-3": (
        (4, 4, 2), lambda: sequential((4, 4, 2), L.Conv2D(3, 2), L.BatchNormalization(), L.Flatten(), L.Dense(2)), 1e-9
    ),
    "gelu": ((3,), lambda: sequential((3,), L.Dense(5, "gelu"), L.Dense(2)), 1e-12),
    "attention": ((4, 6), attention, 1e-12),
    "an unrolled LSTM": ((4, 3), lambda: sequential((4, 3), L.LSTM(3), L.Dense(2)), 1e-12),
    "an LSTM in a loop": ((4, 3), recurrent_loop, 1e-12),
    "self-differentiating": ((3,), Forces, 1e-12),
}  # fmt: skip


def pair(build: Build, policy: str = "float32") -> tuple[Any, Any]:
    """The model under a policy, with random weights, and built in float64 with the same values."""
    with built_in("float32"):
        keras.config.set_dtype_policy(policy)
        narrow = build()
    randomise(narrow.weights)
    with built_in("float64"):
        wide = build()
    wide.set_weights(narrow.get_weights())
    return narrow, wide


def outputs(model: Any, x: Any) -> np.ndarray:
    y = [np.asarray(leaf) for leaf in tf.nest.flatten(model(x, training=False))]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in y], axis=1)


@pytest.mark.parametrize("name", MODELS)
def test_as_the_model_built_in_double_precision(name: str) -> None:
    shape, build, tol = MODELS[name]
    narrow, wide = pair(build)
    with built_in("float64"):
        x = data(*shape, n=3)
    before = narrow.get_weights()
    J = nj.jacobian(narrow, x, dtype="float64")
    assert J.dtype == J.y.dtype == np.float64
    compare(J, tape_jacobian(wide, x, wide.trainable_variables), tol)
    close(J.y, outputs(wide, x), "outputs", tol)
    assert treatments(J).keys() == treatments(nj.jacobian(narrow, x)).keys()
    for value, after in zip(before, narrow.get_weights(), strict=True):
        np.testing.assert_array_equal(value, after)
    single = nj.jacobian(narrow, x)  # kept apart from the other
    assert single.dtype == np.float32
    assert np.abs(single.to_array() - J.to_array()).max() > 1e-9


@pytest.mark.parametrize("layer", CONFIGURATIONS)
def test_every_layer(layer: str) -> None:
    """The first configuration of each Keras layer with weights; an ε that is rounded to float32 shows in some."""
    build = next(iter(CONFIGURATIONS[layer].values()))
    with built_in("float32"):
        narrow, _ = build()
    randomise(narrow.weights)
    with built_in("float64"):
        wide, x = build()
    wide.set_weights(narrow.get_weights())
    J, K = nj.jacobian(narrow, x, dtype="float64"), nj.jacobian(wide, x)
    close(J.to_array(), K.to_array(), layer, 1e-8)
    assert list(treatments(J).values()) == list(treatments(K).values())


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_half_precision(policy: str) -> None:
    """Activations are no longer rounded to half precision; the weights are what the variables hold."""
    narrow, wide = pair(MODELS["perceptron"][1], policy)
    x = data(3).astype(np.float64) + 1e-9
    given = tf.constant(x, policy) if policy == "float16" else x
    J = nj.jacobian(narrow, given, dtype="float64")
    compare(J, tape_jacobian(wide, np.asarray(given, np.float64), wide.trainable_variables), 1e-12)
    close(J.y, outputs(wide, np.asarray(given, np.float64)), "outputs", 1e-12)


def test_integers_stay_integers() -> None:
    def build() -> Any:
        return sequential((4,), L.Embedding(6, 3), L.Flatten(), L.Dense(2))

    narrow, wide = pair(build)
    x = tokens(4, 6)
    J = nj.jacobian(narrow, x, dtype="float64")
    compare(J, tape_jacobian(wide, x, wide.trainable_variables), 1e-12)


# Plain TensorFlow ---------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(4)
VALUES = RNG.normal(size=(4, 4)).astype(np.float32)
OTHERS = RNG.normal(size=(4, 4)).astype(np.float32)
FIXED = RNG.uniform(0.2, 0.8, 4).astype(np.float32)
TENTH = float(np.float32(0.1))
X = RNG.normal(size=(3, 4))


class Functions:
    """Functions of x in one type, with the same values in each."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.W = tf.Variable(VALUES, dtype=dtype, name="W")
        self.N = tf.Variable(OTHERS, dtype=dtype, name="N")
        self.fixed = tf.Variable(FIXED, dtype=dtype, trainable=False)
        self.constant = tf.constant(FIXED[::-1].copy(), dtype)
        keys, values = tf.constant([0, 1], tf.int64), tf.constant([TENTH, 2 * TENTH], dtype)
        initial = tf.lookup.KeyValueTensorInitializer(keys, values)
        self.table = tf.lookup.StaticHashTable(initial, tf.constant(4 * TENTH, dtype))

    def captured(self, x: Any) -> Any:
        return tf.tanh(x @ self.W) * self.constant + self.fixed

    def a_constant(self, x: Any) -> Any:
        return tf.tanh(x @ self.W * tf.constant(TENTH, self.dtype)) @ self.N

    def nested(self, x: Any) -> Any:
        return tf.function(lambda h: tf.tanh(h @ self.W) + self.fixed)(x) @ self.N

    def own_gradient(self, x: Any) -> Any:
        @tf.custom_gradient
        def f(h: Any) -> Any:
            third = tf.constant(TENTH, self.dtype)
            return tf.tanh(h), lambda d: third * d * (1 - tf.tanh(h) ** 2) * self.fixed

        return f(x @ self.W) @ self.N

    def loop(self, x: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            return i + 1, tf.tanh(h @ self.W + self.fixed + self.constant) + tf.gather(self.fixed, [i])

        return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]

    def branch(self, x: Any) -> Any:
        return tf.cond(self.fixed[0] > 0, lambda: tf.tanh(x @ self.W) + self.fixed, lambda: x @ self.W)

    def list_of_tensors(self, x: Any) -> Any:
        def body(i: Any, found: Any) -> Any:
            return i + 1, found.write(i, tf.tanh(x @ self.W) * tf.cast(i, self.dtype) + self.fixed)

        found = tf.while_loop(lambda i, _: i < 3, body, (0, tf.TensorArray(self.dtype, 3)))[1]
        return tf.reduce_sum(found.stack(), 0)

    def table_of_numbers(self, x: Any) -> Any:
        return tf.tanh(x @ self.W) * self.table.lookup(tf.constant(5, tf.int64))

    def complex_numbers(self, x: Any) -> Any:
        return tf.abs(tf.signal.rfft(x @ self.W) + 1.5)

    def no_rule(self, x: Any) -> Any:
        return x @ (self.N / tf.norm(self.N)) @ self.W

    def truncated(self, x: Any) -> Any:
        return tf.cast(tf.cast(x * 100, tf.int32), self.dtype) @ self.W


NAMES = [name for name in vars(Functions) if not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_plain_functions(name: str) -> None:
    narrow, wide = Functions("float32"), Functions("float64")
    f, g = getattr(narrow, name), getattr(wide, name)
    J = nj.jacobian(f, X, variables=[narrow.W, narrow.N], dtype="float64")
    compare(J, tape_jacobian(g, X, [wide.W, wide.N]), 1e-12)
    close(J.y, np.asarray(g(tf.constant(X))), name, 1e-14)
    # The comparison would notice anything that float32 touches.
    single = nj.jacobian(f, X, variables=[narrow.W, narrow.N])
    assert np.abs(single.to_array() - J.to_array()).max() > 1e-10 or name == "truncated"


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("nested", [False, True])
def test_batch_normalisation_that_tensorflow_has_in_single_precision_alone(layout: str, nested: bool) -> None:
    shape = (-1, 2, 1, 2) if layout == "NHWC" else (-1, 2, 2, 1)
    scale, offset = (tf.Variable(v, name=n) for v, n in ((FIXED[:2], "scale"), (FIXED[2:], "offset")))
    W = tf.Variable(VALUES, name="W")
    mean, variance = np.float32([0.1, -0.2]), np.float32([1.1, 1.3])

    def normal(h: Any) -> Any:
        y = tf.raw_ops.FusedBatchNormV3(
            x=h, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=EXACT, data_format=layout,
            is_training=False,
        )[0]  # fmt: skip
        return tf.reshape(y, (-1, 4))

    def f(x: Any) -> Any:
        h = tf.reshape(x @ W, shape)
        return tf.cond(offset[0] > -9, lambda: normal(h), lambda: x) if nested else normal(h)

    wide = [tf.Variable(v, dtype=tf.float64) for v in (VALUES, FIXED[:2], FIXED[2:])]

    def g(x: Any) -> Any:
        along = (1, 1, 1, 2) if layout == "NHWC" else (1, 2, 1, 1)
        m, v, s, o = (tf.reshape(tf.cast(p, tf.float64), along) for p in (mean, variance, wide[1], wide[2]))
        return tf.reshape((tf.reshape(x @ wide[0], shape) - m) / tf.sqrt(v + EXACT) * s + o, (-1, 4))

    J = nj.jacobian(f, X, variables=[W, scale, offset], dtype="float64")
    compare(J, tape_jacobian(g, X, wide), 1e-12)


def test_module_and_saved_model(tmp_path: Path) -> None:
    class Module(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = tf.Variable(VALUES)
            self.scale = tf.Variable(FIXED, trainable=False)

        @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32)])
        def __call__(self, x: Any) -> Any:
            return tf.nn.leaky_relu(x @ self.W, 0.25) * self.scale

    W = tf.Variable(VALUES, dtype=tf.float64)
    blocks = tape_jacobian(lambda x: tf.nn.leaky_relu(x @ W, 0.25) * FIXED.astype(np.float64), X, [W])
    module = Module()
    compare(nj.jacobian(module, X, dtype="float64"), blocks, 1e-12)
    tf.saved_model.save(module, str(tmp_path))
    restored = tf.saved_model.load(str(tmp_path))
    compare(nj.jacobian(restored, X, variables=[restored.W], dtype="float64"), blocks, 1e-12)


def test_exported_keras_model(tmp_path: Path) -> None:
    shape, build, tol = MODELS["convolutions"]
    narrow, wide = pair(build)
    x = RNG.normal(size=(3, *shape))
    narrow.export(str(tmp_path), verbose=False)
    restored = tf.saved_model.load(str(tmp_path))
    named = {v.name: v for v in restored.trainable_variables}
    variables = [named.get(v.value.name, v) for v in narrow.trainable_variables]
    assert len({id(v) for v in variables} & {id(v) for v in restored.trainable_variables}) == len(variables)
    J = nj.jacobian(restored.serve, x, variables=variables, dtype="float64")
    compare(J, tape_jacobian(wide, x, wide.trainable_variables), tol)


def test_constants_drawn_from_a_seed_are_those_of_the_model() -> None:
    W = tf.Variable(VALUES)

    def f(x: Any) -> Any:
        return (x @ W) * tf.random.stateless_uniform((4,), (1, 2))

    J = nj.jacobian(f, X, variables=[W], dtype="float64")
    drawn = np.asarray(tf.random.stateless_uniform((4,), (1, 2)), np.float64)
    close(J.y, X @ VALUES.astype(np.float64) * drawn, "outputs", 1e-14)


# What a caller sees -------------------------------------------------------------------------------------------------


def small() -> tuple[Any, Any]:
    return pair(MODELS["perceptron"][1])


def test_theta_is_used_in_full_precision() -> None:
    """Central differences of the outputs, with steps that float32 would round away."""
    narrow, _ = small()
    x = RNG.normal(size=(3, 3))
    network = evaluator(narrow, x, dtype="float64")
    theta = network.parameters.ravel()
    assert theta.dtype == np.float64
    np.testing.assert_array_equal(theta, nj.parameters(narrow).ravel())
    theta = theta + 1e-9 * RNG.normal(size=theta.shape)
    A, b, C, d = network.parameters.unravel(theta)
    close(network.outputs(theta), np.tanh(x @ A + b) @ C + d, "outputs", 1e-14)
    v, step = RNG.normal(size=theta.shape), 1e-6
    difference = (network.outputs(theta + step * v) - network.outputs(theta - step * v)) / (2 * step)
    close(network.evaluate(theta) @ v, difference.reshape(-1), "J v", 1e-8)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_assign_writes_in_the_types_of_the_variables(kind: str) -> None:
    W = tf.Variable(VALUES, dtype=kind)
    network = evaluator(lambda x: x @ W, tf.constant(X, kind), [W], dtype="float64")
    theta = np.linspace(0.1, 0.9, 16)
    network.parameters.assign(theta)
    assert W.dtype.name == kind
    np.testing.assert_array_equal(np.asarray(W), tf.cast(theta.reshape(4, 4), kind).numpy())
    close(network.outputs(), np.asarray(tf.constant(X, kind), np.float64) @ np.asarray(W, np.float64), "y", 1e-14)


def test_x_of_every_kind() -> None:
    narrow, wide = small()
    x = RNG.normal(size=(3, 3))
    expected = nj.jacobian(wide, x).to_array()
    for given in (x, x.tolist(), tf.constant(x)):
        close(nj.jacobian(narrow, given, dtype="float64").to_array(), expected, type(given).__name__, 1e-13)
    rounded = x.astype(np.float32)
    expected = nj.jacobian(wide, rounded.astype(np.float64)).to_array()
    for given in (rounded, tf.constant(rounded)):
        close(nj.jacobian(narrow, given, dtype="float64").to_array(), expected, type(given).__name__, 1e-13)
    assert nj.jacobian(narrow, x[:0], dtype="float64").dtype == np.float64


def test_tiles_and_combinations_of_outputs() -> None:
    def build() -> Any:
        return sequential((8,), L.Dense(16, "tanh"), L.Dense(40))

    narrow, wide = pair(build)
    x = RNG.normal(size=(20, 8))
    tiled = nj.jacobian(narrow, x, dtype="float64", memory="64 kB")
    assert isinstance(tiled, nj.TiledJacobian)
    assert tiled.dtype == np.float64
    whole = nj.jacobian(wide, x)
    close(tiled.to_array(), whole.to_array(), "tiles", 1e-12)
    B = RNG.normal(size=(20, 2, 40))
    close(tiled.scaled(B).to_array(), whole.scaled(B).to_array(), "combinations", 1e-12)
    both = [evaluator(m, x, dtype="float64")._extractor.footprint.need(20, 40) for m in (narrow, wide)]
    assert both[0] == both[1]


def test_a_model_in_double_precision_stays_as_it_is() -> None:
    _, wide = small()
    x = RNG.normal(size=(3, 3))
    np.testing.assert_array_equal(nj.jacobian(wide, x, dtype="float64").to_array(), nj.jacobian(wide, x).to_array())


@pytest.mark.parametrize("spelling", ["float64", np.float64, np.dtype("float64"), tf.float64])
def test_spellings(spelling: Any) -> None:
    narrow, _ = small()
    assert nj.jacobian(narrow, X[:, :3], dtype=spelling).dtype == np.float64


@pytest.mark.parametrize("other", ["float32", np.float16, "int32", "double precision", 64])
def test_other_types_are_refused(other: Any) -> None:
    narrow, _ = small()
    with pytest.raises(nj.DtypeError, match=r'expected None \(the model\'s own type\) or "float64"'):
        nj.jacobian(narrow, X[:, :3], dtype=other)


IMAGES = RNG.normal(size=(2, 4, 4, 4)).astype(np.float32)


def _gradient_of_a_normalisation(h: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(h)
        ones = tf.ones(4)
        y = (
            tf.raw_ops.FusedBatchNormV3(x=h, scale=ones, offset=ones, mean=ones, variance=ones, is_training=False)[0]
            ** 2
        )
    return tape.gradient(y, h)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "ResizeBilinear": lambda h: tf.raw_ops.ResizeBilinear(images=h, size=[2, 2]),
    "LRN": tf.nn.local_response_normalization,
    "MaxPool3D": lambda h: tf.nn.max_pool3d(h[..., None], 2, 2, "VALID"),
    "PyFunc": lambda h: tf.ensure_shape(tf.numpy_function(np.sin, [h], tf.float32), h.shape),
    "Bitcast": lambda h: h * tf.cast(tf.bitcast(h, tf.int32), tf.float32),
    "FusedBatchNormGradV3": _gradient_of_a_normalisation,
    "StatelessRandomGammaV3": lambda h: h * tf.random.stateless_gamma((4,), (1, 2), alpha=tf.ones(4) / 3),
}


@pytest.mark.parametrize("operation", REFUSED)
@pytest.mark.parametrize("inside", [False, True])
def test_refused_by_name(operation: str, inside: bool) -> None:
    """In the graph, and in the body of a branch."""
    W = tf.Variable(VALUES)
    f = REFUSED[operation]

    def g(x: Any) -> Any:
        return tf.cond(W[0, 0] > -9, lambda: f(x @ W), lambda: f(x)) if inside else f(x @ W)

    with pytest.raises(nj.ModelError, match=rf"cannot be computed in float64: .*\({operation}\).*dtype=None"):
        nj.jacobian(g, IMAGES, variables=[W], dtype="float64")


def test_all_that_is_refused_is_named_at_once() -> None:
    W = tf.Variable(VALUES)
    with pytest.raises(nj.ModelError, match=r"\((LRN|MaxPool3D)\).*\((LRN|MaxPool3D)\)"):
        nj.jacobian(lambda x: REFUSED["MaxPool3D"](REFUSED["LRN"](x @ W)), IMAGES, variables=[W], dtype="float64")


def test_mixing_and_random_models_are_refused_as_ever() -> None:
    W = tf.Variable(VALUES)
    with pytest.raises(nj.SampleMixingError):
        nj.jacobian(lambda x: x @ W - tf.reduce_mean(x @ W, 0), X, variables=[W], dtype="float64")
    with pytest.raises(nj.RandomModelError):
        nj.jacobian(lambda x: x @ W * tf.random.uniform((4,)), X, variables=[W], dtype="float64")


def test_mixing_that_wakes_up_later_is_seen_in_double_precision() -> None:
    """A gate that opens after the first evaluation, so little that float32 takes it for rounding."""
    W, gate = tf.Variable(VALUES, name="W"), tf.Variable(0.0, trainable=False)

    def f(x: Any) -> Any:
        h = x @ W
        return h + gate * tf.reduce_sum(h, 0)

    networks = {dtype: evaluator(f, X, [W], dtype=dtype) for dtype in (None, "float64")}
    for network in networks.values():
        network.evaluate()
    gate.assign(1e-6)
    networks[None].evaluate()
    with pytest.raises(nj.SampleMixingError):
        networks["float64"].evaluate()


def test_l_bfgs_b_stalls_in_single_precision_and_converges_in_double() -> None:
    keras.utils.set_random_seed(1)
    x = np.linspace(-1, 1, 50)[:, None]
    y = np.sin(3 * x)
    model = sequential((1,), L.Dense(3, "tanh"), L.Dense(1))

    def fit(dtype: str | None) -> Any:
        network = evaluator(model, x, dtype=dtype)

        def cost(theta: np.ndarray) -> tuple[float, np.ndarray]:
            J = network.evaluate(theta)
            r = J.y - y
            return 0.5 * np.sum(r**2) + 0.005 * theta @ theta, J.T @ r.reshape(-1) + 0.01 * theta

        start = network.parameters.ravel(dtype="float64")
        return scipy.optimize.minimize(cost, start, jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-6})

    def independent(theta: np.ndarray) -> float:
        A, b, C, d = nj.parameters(model).unravel(theta)
        return float(0.5 * np.sum((np.tanh(x @ A + b) @ C + d - y) ** 2) + 0.005 * theta @ theta)

    single, double = fit(None), fit("float64")
    assert np.abs(single.jac).max() > 1e-5
    assert np.abs(double.jac).max() <= 1e-6
    assert double.success
    assert double.fun < single.fun - 1e-3
    assert double.fun == pytest.approx(independent(double.x), rel=1e-12)
    gradient = scipy.optimize.approx_fprime(double.x, independent, 1e-7)
    assert np.abs(gradient).max() < 1e-4


def test_attributes_that_a_saved_graph_leaves_out() -> None:
    """LeakyRelu's type is float32 where nothing is said."""
    given = tf.compat.v1.NodeDef(name="x", op="Placeholder")
    given.attr["dtype"].type = tf.float32.as_datatype_enum
    nodes = {"x": given, "y": tf.compat.v1.NodeDef(name="y", op="LeakyRelu", input=["x"])}
    widen(nodes, {})
    graph = tf.Graph()
    with graph.as_default():
        [y] = tf.graph_util.import_graph_def(
            tf.compat.v1.GraphDef(node=nodes.values()), return_elements=["y:0"], name=""
        )
    assert y.dtype == tf.float64


def test_statistics_of_each_sample_by_batch_normalisation() -> None:
    """Samples as channels, each normalised by itself: layer normalisation as some libraries write it."""

    def build(W: Any, fused: bool) -> Callable[[Any], Any]:
        def f(x: Any) -> Any:
            h = x @ W
            if not fused:
                mean, variance = tf.nn.moments(h, [1], keepdims=True)
                return (h - mean) / tf.sqrt(variance + EXACT)
            n = tf.shape(h)[0]
            y = tf.raw_ops.FusedBatchNormV3(
                x=tf.reshape(h, [1, n, 4, 1]), scale=tf.ones(n), offset=tf.zeros(n), mean=[], variance=[],
                epsilon=EXACT, data_format="NCHW", is_training=True,
            )[0]  # fmt: skip
            return tf.reshape(y, [n, 4])

        return f

    W, wide = tf.Variable(VALUES), tf.Variable(VALUES, dtype=tf.float64)
    J = nj.jacobian(build(W, True), X, variables=[W], dtype="float64")
    compare(J, tape_jacobian(build(wide, False), X, [wide]), 1e-12)
