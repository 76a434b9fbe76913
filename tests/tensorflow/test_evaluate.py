"""One compiled function: few and many outputs, sizes 0 and 1, scalars, the two ways of sweeping."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import check, compare, randomise, tape_jacobian

import netjac as nj
from netjac.tensorflow import symbolic

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3))
W = tf.Variable(RNG.normal(size=(3, 5)), name="w")
B = tf.Variable(RNG.normal(size=5), name="b")


def wide(l: int) -> Any:
    """A network with l outputs, of every kind of block: factored, collapsed, look-up, scaled, fallback."""
    v = tf.Variable(RNG.normal(size=(5, l)), name="v")
    s = tf.Variable(RNG.normal(), name="s", dtype=tf.float64)
    g = tf.Variable(RNG.normal(size=5), name="g")
    t = tf.Variable(RNG.normal(size=(30, 5)), name="t")
    n = tf.Variable(RNG.normal(size=(5, 5)), name="n")

    def f(x: Any) -> Any:
        h = tf.tanh(x @ W + B) * tf.nn.softplus(g) * s
        h = h + tf.gather(t, tf.cast(tf.abs(x[:, 0]) * 10, tf.int32))
        return tf.sin(h @ (n / tf.norm(n))) @ v

    return f, [W, B, v, s, g, t, n]


@pytest.mark.parametrize("l", [1, 2, 16, 17, 40])
def test_any_number_of_outputs(l: int) -> None:
    f, variables = wide(l)
    J = check(f, X, variables, random=False)
    assert J.l == l
    assert {t.value for t, n in J.coverage.counts.items() if n} == {"factored", "collapsed", "fallback"}


@pytest.mark.parametrize("outputs", [3, 20])
def test_vectorised_and_unrolled_are_the_same(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    f, variables = wide(outputs)
    found = []
    for most in (0, 1000):
        monkeypatch.setattr(symbolic, "UNROLLED_OUTPUTS", most)
        found.append(nj.jacobian(lambda x: f(x), X, variables=variables))
    np.testing.assert_allclose(found[0].to_array(), found[1].to_array(), rtol=1e-13, atol=1e-13)
    compare(found[0], tape_jacobian(f, X, variables))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_outputs_of_many_operations_are_vectorised(n: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    i = keras.Input((4, 6))
    h = i + L.MultiHeadAttention(2, 3)(L.LayerNormalization()(i), i)
    h = h + L.Dense(6)(L.Dense(9, "gelu")(L.LayerNormalization()(h)))
    model = keras.Model(i, {"one": L.Dense(1)(L.GlobalAveragePooling1D()(h)), "three": L.Dense(3)(L.LSTM(2)(h))})
    randomise(model.weights)
    x = RNG.normal(size=(n, 4, 6))
    found = []
    for most in (0, 10**9):
        monkeypatch.setattr(symbolic, "UNROLLED_OPERATIONS", most)
        found.append(nj.jacobian(lambda x: model(x), x, variables=model.trainable_variables))  # traced anew
    tolerance = 1e-5 if precision == "float32" else 1e-13
    np.testing.assert_allclose(found[0].to_array(), found[1].to_array(), rtol=0, atol=tolerance)
    monkeypatch.setattr(symbolic, "UNROLLED_OPERATIONS", 0)
    check(model, x, random=False)


@pytest.mark.parametrize(("width", "heavy"), [(511, False), (512, True)])
@pytest.mark.parametrize("n", [1, 3])
def test_few_outputs_of_large_weights_are_vectorised(
    width: int, heavy: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectorised = []
    over_outputs = symbolic._over_outputs
    monkeypatch.setattr(symbolic, "_over_outputs", lambda one, size: vectorised.append(size) or over_outputs(one, size))
    model = keras.Sequential([keras.Input((width,)), L.Dense(512, "tanh"), L.Dense(2, "tanh"), L.Dense(3)])
    randomise(model.weights)
    check(model, RNG.normal(size=(n, width)), random=False)
    assert bool(vectorised) == heavy


def test_poolings_and_loops_are_not_vectorised() -> None:
    assert all(
        map(symbolic.UNROLLED_TYPES.match, ("MaxPool", "AvgPool3D", "DepthwiseConv2dNative", "StatelessWhile", "If"))
    )
    assert not any(map(symbolic.UNROLLED_TYPES.match, ("Conv2D", "MatMul", "IfOfMine", "Identity")))


@pytest.mark.parametrize("kind", ["convolutions", "attention", "recurrent", "embedding"])
def test_vectorised_layers(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = RNG.normal(size=(2, 5, 5, 2))
    stack = [
        keras.Input((5, 5, 2)), L.Conv2D(4, 2, groups=2, activation="tanh"), L.MaxPooling2D(2), L.Conv2DTranspose(2, 2),
        L.BatchNormalization(), L.DepthwiseConv2D(2, activation="tanh"), L.Flatten(), L.Dense(18, "softmax"),
    ]  # fmt: skip
    if kind == "recurrent":
        x = RNG.normal(size=(2, 3, 2))
        stack = [keras.Input((3, 2)), L.LSTM(3, return_sequences=True), L.GRU(2), L.Dense(18)]
    if kind == "embedding":
        x = RNG.integers(0, 6, (3, 4)).astype("int32")
        stack = [keras.Input((4,), dtype="int32"), L.Embedding(6, 3), L.LayerNormalization(), L.Flatten(), L.Dense(18)]
    model = keras.Sequential(stack)
    if kind == "attention":
        x = RNG.normal(size=(2, 3, 6))
        i = keras.Input((3, 6))
        model = keras.Model(i, L.MultiHeadAttention(2, 3)(i, i))  # l = 18, all outputs of a sequence
    check(model, x)


def test_outputs_of_different_sizes_swept_vectorised() -> None:
    v = tf.Variable(RNG.normal(size=(5, 20)), name="v")

    def f(x: Any) -> Any:
        h = tf.tanh(x @ W + B)
        return {"one": h[:, :1], "many": tf.reshape(tf.sin(h @ v), [-1, 4, 5]), "input": x}

    J = check(f, X, [W, B, v], random=False)
    assert J.l == 24


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_samples(n: int) -> None:
    f, variables = wide(2)
    check(f, X, variables, random=False)  # made at four samples
    J = nj.jacobian(f, X[:n], variables=variables)
    assert J.shape == (2 * n, sum(int(np.prod(v.shape)) for v in variables))
    full = nj.jacobian(f, X, variables=variables)
    np.testing.assert_allclose(J.to_array(), full.to_array()[: 2 * n], rtol=1e-12, atol=1e-12)
    assert J.outputs.shape == (n, 2)


@pytest.mark.parametrize("n", [0, 1])
def test_few_samples_on_first_use(n: int) -> None:
    f, variables = wide(2)
    J = nj.jacobian(f, X[:n], variables=variables)
    assert J.shape[0] == 2 * n
    assert J.dtype == np.float64
    assert (J @ np.ones(J.m)).shape == (2 * n,)
    np.testing.assert_array_equal(J.T @ np.zeros(2 * n), np.zeros(J.m))
    assert J.gram().shape == (2 * n, 2 * n)
    check(f, X, variables, random=False)


@pytest.mark.parametrize("name", ["dense", "conv", "embedding", "norm", "recurrent"])
def test_no_sample_of_a_keras_model(name: str, precision: str) -> None:
    stacks = {
        "dense": [keras.Input((3,)), L.Dense(2), L.Dense(2)],
        "conv": [keras.Input((4, 4, 1)), L.Conv2D(2, 2), L.Flatten(), L.Dense(2)],
        "embedding": [keras.Input((3,), dtype="int32"), L.Embedding(50, 2), L.Flatten(), L.Dense(2)],
        "norm": [keras.Input((3,)), L.LayerNormalization(), L.Dense(2)],
        "recurrent": [keras.Input((3, 2)), L.LSTM(2), L.Dense(2)],
    }
    model = keras.Sequential(stacks[name])
    dtype = "int32" if name == "embedding" else precision
    J = nj.jacobian(model, np.zeros((0, *model.input_shape[1:]), dtype))
    assert J.shape == (0, model.count_params())
    assert J.to_array("(l m) n").shape == (2 * J.m, 0)
    np.testing.assert_array_equal(J.column_norms(), np.zeros(J.m))


SIZES = {
    "scalar weight": ((), lambda x, w: x * w),
    "one entry": ((1,), lambda x, w: x * w),
    "one by one": ((1, 1), lambda x, w: x[:, :1] @ w),
    "one in": ((1, 4), lambda x, w: x[:, :1] @ w),
    "one out": ((3, 1), lambda x, w: x @ w),
    "scalar weight, one output": ((), lambda x, w: x[:, 0] * w),
    "axes of one": ((1, 3, 1), lambda x, w: tf.tanh(x[:, :, None] * w)),
    "nothing in it": ((0,), lambda x, w: x * (1 + tf.reduce_sum(w))),
    "no features of some": ((4, 2), lambda x, w: tf.einsum("ni,ij->nj", x[:, :0], w[:0]) + x[:, :2] @ w[:2]),
    "none of its entries": ((4, 2), lambda x, w: tf.tanh(x[:, :0] @ w[:0]) + x[:, :2]),
    "no features": ((0, 2), lambda x, w: tf.tanh(x[:, :0] @ w) + x[:, :2]),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_one_and_none(name: str) -> None:
    shape, f = SIZES[name]
    w = tf.Variable(RNG.normal(size=shape), name="w")
    check(lambda x: f(x, w), X, [w], random=False)
    check(lambda x: f(x, w) * 2, X[:1], [w, B], random=False)


def test_outputs_without_features() -> None:
    J = nj.jacobian(lambda x: (x @ W)[:, :0], X, variables=[W])
    assert J.shape == (0, 15)
    check(lambda x: {"a": x @ W, "b": (x @ W + B)[:, :0], "c": tf.tanh(x @ W)}, X, [W, B], random=False)


def test_outputs_of_rank_one() -> None:
    J = check(lambda x: tf.reduce_sum(tf.tanh(x @ W + B), 1), X, [W, B], random=False)
    assert J.outputs.shape == (4,)


def test_inputs_of_rank_one() -> None:
    w = tf.Variable([0.5, 1.5], dtype=tf.float64)
    check(lambda x: tf.tanh(x[:, None] * w), X[:, 0], [w], random=False)


def test_half_precision_weights() -> None:
    """Computed in half precision by TensorFlow, handed out in float32; agreement to its 2⁻¹¹ and a few roundings."""
    w = tf.Variable(RNG.normal(size=(3, 4)).astype("float16"), name="w")
    J = check(lambda x: tf.tanh(tf.cast(x, tf.float16) @ w), X.astype("float32"), [w], tol=5e-3, random=False)
    assert J.dtype == np.float32


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy: str) -> None:
    """Weights in float32, layers in half: against float32 itself, to a few units of the half type's rounding."""
    mixed = keras.Sequential(
        [
            keras.Input((3,)),
            L.Dense(5, "tanh", dtype=policy),
            L.LayerNormalization(dtype=policy),
            L.Dense(2, dtype=policy),
        ]
    )
    plain = keras.Sequential([keras.Input((3,)), L.Dense(5, "tanh"), L.LayerNormalization(), L.Dense(2)])
    randomise(mixed.weights)
    plain.set_weights([np.asarray(w) for w in mixed.weights])
    x = X.astype("float32")
    J = nj.jacobian(mixed, x)
    assert J.dtype == np.float32
    expected = nj.jacobian(plain, x).to_array()
    rounding = 2.0**-11 if policy == "mixed_float16" else 2.0**-8
    assert np.abs(J.to_array() - expected).max() <= 16 * rounding * np.abs(expected).max()


def test_outputs_of_different_types() -> None:
    single = tf.Variable(RNG.normal(size=3).astype("float32"), name="single")

    def f(x: Any) -> Any:
        return {"double": tf.tanh(x @ W), "single": tf.cast(x, tf.float32) * single}

    J = check(f, X, [W, single], random=False)
    assert J.dtype == np.float64
