"""Every way a model comes: each form against the tape, with the names of its columns and rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_configurations import built_in, data, tokens
from oracles import check, compare, randomise, tape_jacobian, treatments

import netjac as nj

L = keras.layers
pytestmark = pytest.mark.usefixtures("precision")


# Keras models -------------------------------------------------------------------------------------------------------


def test_sequential_without_an_input_layer() -> None:
    model, x = keras.Sequential([L.Dense(4, "tanh", name="a"), L.Dense(2, name="b")], name="s"), data(3)
    model(x)
    J = check(model, x)
    assert J.parameters.names == ("a/kernel", "a/bias", "b/kernel", "b/bias")


def test_several_inputs_in_a_list() -> None:
    i, j = keras.Input((3,)), keras.Input((2, 2))
    model = keras.Model([i, j], L.Dense(2)(L.Concatenate()([L.Dense(2, "tanh")(i), L.Flatten()(L.Dense(3)(j))])))
    check(model, [data(3), data(2, 2)])


def test_several_outputs_have_row_names_in_the_order_tensorflow_flattens() -> None:
    i = keras.Input((3,))
    outputs = {"z": L.Dense(2)(i), "a": [L.Reshape((2, 2))(L.Dense(4, "tanh")(i)), L.Dense(1)(i)]}
    J = check(keras.Model(i, outputs), data(3))
    assert J.output_space.names == ("a/0", "a/1", "z")
    assert [segment.shape for segment in J.output_space.segments] == [(2, 2), (1,), (2,)]
    assert J.shape[0] == 2 * 7
    assert set(J.outputs) == {"a", "z"}
    assert J.outputs["a"][0].shape == (2, 2, 2)
    np.testing.assert_array_equal(J.outputs["a"][0].reshape(2, 4), J.y[:, :4])


def test_nested_inputs_and_outputs() -> None:
    class Nested(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = L.Dense(2, "tanh"), L.Dense(3)

        def call(self, x: Any) -> Any:
            a, (b, c) = x["a"], x["b"]
            return [self.first(a) * b, {"u": (self.second(c), self.first(a))}]

    model = Nested()
    x = {"a": data(3), "b": [data(2, seed=8), data(4, seed=9)]}
    model(x)
    J = check(model, x)
    assert J.output_space.names == ("0", "1/u/0", "1/u/1")


@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (2, 1, 3), (1, 2, 1, 2)])
def test_outputs_of_any_rank(shape: tuple[int, ...]) -> None:
    W = tf.Variable(tf.zeros((3, int(np.prod(shape))), tf.float64), name="W")
    randomise([W])
    J = check(lambda x: tf.reshape(tf.tanh(x @ W), (-1, *shape)), data(3), [W])
    assert J.output_space.segments[0].shape == shape
    assert J.outputs.shape == (2, *shape)


def test_nested_models_and_shared_layers() -> None:
    block = keras.Sequential([keras.Input((3,)), L.Dense(3, "tanh")], name="block")
    i = keras.Input((3,))
    inner = keras.Model(i, i + block(i), name="inner")
    model = keras.Sequential([keras.Input((3,)), inner, block, L.Dense(2)], name="outer")
    J = check(model, data(3))
    assert len(J.parameters.names) == 4
    assert len(J.coverage.treatment(J.parameters.names[0])) == 2  # one kernel, used twice


class Shared(keras.Model):
    """Two submodules that hold the same layer, and a weight of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        shared = L.Dense(3, "tanh", name="shared")
        self.left = keras.Sequential([shared, L.Dense(3, name="left")])
        self.right = keras.Sequential([shared, L.Dense(3, name="right")])
        self.gain = self.add_weight(shape=(3,), name="gain")
        self.count = self.add_weight(shape=(), name="count", trainable=False, initializer="zeros")

    def call(self, x: Any, scale: float = 1.0, training: bool = True) -> Any:
        if training:
            self.count.assign_add(1.0)
        return self.left(x) * self.gain + scale * self.right(self.right(x))


def test_subclassed_with_shared_layers_and_state() -> None:
    model, x = Shared(), data(3)
    model(x, training=False)
    J = check(model, x, random=False)
    assert len(set(J.parameters.names)) == len(J.parameters.names) == 7
    assert float(model.count.numpy()) == 0.0


def test_extra_arguments_through_a_lambda() -> None:
    model, x = Shared(), data(3)
    model(x, training=False)
    randomise(model.trainable_variables)
    J = check(lambda x: model(x, scale=0.3, training=False), x, list(model.trainable_variables))
    plain = nj.jacobian(model, x)
    assert not np.allclose(J.to_array(), plain.to_array())


def test_a_layer_alone() -> None:
    layer, x = L.Conv1D(2, 2), data(4, 3)
    layer.build((None, 4, 3))
    J = check(layer, x)
    assert J.outputs.shape == (2, 3, 2)


def test_frozen_layers_have_no_columns_and_the_others_keep_theirs() -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(4, "tanh"), L.BatchNormalization(), L.Dense(2)])
    x = data(3)
    randomise(model.weights)
    whole = nj.jacobian(model, x)
    model.layers[0].trainable = False
    before = [w.numpy().copy() for w in model.weights]
    J = check(model, x, random=False)
    assert set(J.parameters.names) == set(whole.parameters.names[2:])
    np.testing.assert_allclose(J.to_array(), whole.to_array()[:, 16:], rtol=1e-14)
    for w, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(w.numpy(), value)
    model.layers[0].trainable = True
    assert nj.jacobian(model, x).shape == whole.shape


def test_integer_boolean_and_real_inputs_together() -> None:
    i, j, k = (
        keras.Input((4,), name="i", dtype="int32"),
        keras.Input((4,), name="j", dtype="bool"),
        keras.Input((3,), name="k"),
    )
    h = L.MultiHeadAttention(1, 2)(L.Embedding(5, 3)(i), L.Embedding(5, 3)(i), key_mask=j)
    model = keras.Model({"i": i, "j": j, "k": k}, L.Dense(2)(L.Concatenate()([L.Flatten()(h), L.Dense(2, "tanh")(k)])))
    mask = np.array([[True, True, False, False], [True, False, True, True]])
    check(model, {"i": tokens(4, 5), "j": mask, "k": data(3)})


# Plain TensorFlow ---------------------------------------------------------------------------------------------------


class Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [tf.Variable(tf.zeros(s, tf.float64)) for s in ((3, 4), (4, 2))]
        self.scale = tf.Variable(tf.zeros((), tf.float64))
        self.steps = tf.Variable(0, trainable=False, dtype=tf.int64)

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float64)])
    def __call__(self, x: Any) -> Any:
        return tf.tanh(x @ self.layers[0]) @ self.layers[1] * self.scale


def module() -> Module:
    made = Module()
    randomise(made.trainable_variables)
    return made


def test_module() -> None:
    J = check(module(), data(3), None, random=False)
    assert set(J.parameters.names) == {"layers.0", "layers.1", "scale"}


def test_callable_with_some_variables() -> None:
    made, x = module(), data(3)
    J = check(lambda x: made(x), x, [made.layers[1], made.scale])
    whole = nj.jacobian(made, x)
    np.testing.assert_allclose(J.columns(J.parameters.names[0]).to_array(), whole.columns("layers.1").to_array())


def test_a_module_that_holds_keras_layers() -> None:
    class Mixed(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = L.Dense(3, "tanh")
            self.layer.build((None, 3))
            self.out = tf.Variable(tf.ones((3, 2), tf.float64), name="out")

        def __call__(self, x: Any) -> Any:
            return self.layer(x) @ self.out

    made = Mixed()
    variables = [*made.layer.trainable_variables, made.out]
    J = check(made, data(3), variables)
    assert "fallback" not in set().union(*treatments(J).values())


def test_bound_method() -> None:
    made, x = module(), data(3)
    np.testing.assert_array_equal(
        nj.jacobian(made.__call__, x, variables=list(made.trainable_variables)).to_array(),
        nj.jacobian(made, x).to_array(),
    )


# SavedModels --------------------------------------------------------------------------------------------------------


def saved(tmp_path: Path) -> tuple[Any, Module]:
    made = module()
    tf.saved_model.save(made, str(tmp_path), signatures=made.__call__.get_concrete_function())
    return tf.saved_model.load(str(tmp_path)), made


def test_restored_callable(tmp_path: Path) -> None:
    restored, made = saved(tmp_path)
    x = data(3)
    variables = [*restored.layers, restored.scale]
    J = check(lambda x: restored(x), x, variables)
    randomise([*made.layers, made.scale])
    original = nj.jacobian(lambda x: made(x), x, variables=[*made.layers, made.scale])
    np.testing.assert_allclose(J.to_array(), original.to_array(), rtol=1e-13)
    assert "fallback" not in set().union(*treatments(J).values())


def test_restored_object_itself(tmp_path: Path) -> None:
    restored, _ = saved(tmp_path)
    check(restored, data(3), [*restored.layers, restored.scale])


def test_signature_of_a_saved_model(tmp_path: Path) -> None:
    restored, _ = saved(tmp_path)
    signature = restored.signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    J = check(lambda x: signature(**{name: x}), data(3), [*restored.layers, restored.scale])
    assert J.output_space.names == ("output_0",)


def test_exported_keras_model(tmp_path: Path) -> None:
    model = keras.Sequential(
        [keras.Input((4, 4, 2)), L.Conv2D(4, 2, activation="tanh", groups=2), L.BatchNormalization(), L.Flatten(),
         L.Dense(2)]
    )  # fmt: skip
    randomise(model.weights)
    model.export(str(tmp_path), verbose=False)
    restored, x = tf.saved_model.load(str(tmp_path)), data(4, 4, 2)
    by_shape = {tuple(v.shape): v for v in restored.variables}
    J = check(restored.serve, x, [by_shape[(2, 2, 1, 4)], by_shape[(36, 2)]], random=False)
    names = [name for name in nj.parameters(model).names if name.endswith("kernel")]
    np.testing.assert_allclose(J.to_array(), nj.jacobian(model, x).columns(names).to_array(), rtol=1e-12, atol=1e-15)


def test_saved_and_loaded_keras_file(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(2)])
    model.save(tmp_path / "model.keras")
    loaded, x = keras.models.load_model(tmp_path / "model.keras"), data(3)
    check(loaded, x, random=False)
    np.testing.assert_array_equal(nj.jacobian(loaded, x).to_array(), nj.jacobian(model, x).to_array())


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed; no dependency")
def test_legacy_keras() -> None:
    import tf_keras

    model = tf_keras.Sequential(
        [tf_keras.layers.Input((3,)), tf_keras.layers.Dense(4, "tanh"), tf_keras.layers.Dense(2)]
    )
    J = check(lambda x: model(x, training=False), data(3).astype("float32"), list(model.trainable_variables))
    assert "fallback" not in set().union(*treatments(J).values())


# Precisions ---------------------------------------------------------------------------------------------------------

# Largest error against the same weights in float64, relative to the largest entry of the variable's block.
HALF = {"mixed_float16": 1e-2, "mixed_bfloat16": 6e-2}


def mixed(policy: str) -> Any:
    model = keras.Sequential(
        [keras.Input((6, 3)), L.Conv1D(4, 2, activation="tanh"), L.LayerNormalization(), L.Dense(4, "tanh"),
         L.GlobalAveragePooling1D(), L.Dense(2, dtype="float32" if policy.startswith("mixed") else None)]
    )  # fmt: skip
    randomise(model.weights)
    return model


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
@pytest.mark.parametrize("policy", HALF)
def test_mixed_precision(policy: str, precision: str) -> None:
    """Variables in single precision, activations in half: the Jacobian is float32, and as exact as half precision."""
    keras.config.set_dtype_policy(policy)
    model = mixed(policy)
    assert {str(layer.compute_dtype) for layer in model.layers[:3]} == {policy.removeprefix("mixed_")}
    x = data(6, 3)
    J = nj.jacobian(model, x)
    assert J.dtype == np.float32
    compare(J, tape_jacobian(model, x, model.trainable_variables), HALF[policy])
    with built_in("float64"):
        exact = mixed("float64")
        exact.set_weights(model.get_weights())
        blocks = tape_jacobian(exact, x.astype(np.float64), exact.trainable_variables)
    for name, block in zip(J.parameters.names, blocks, strict=True):
        error = np.abs(J.columns(name).to_array().reshape(block.shape) - block).max() / np.abs(block).max()
        assert error <= HALF[policy], f"{name}: {error:.1e}"


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_half_precision_throughout(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(2)])
    randomise(model.weights)
    x = tf.cast(data(3), policy)
    J = nj.jacobian(model, x)
    assert J.dtype == np.float32
    compare(J, tape_jacobian(model, x, model.trainable_variables), HALF[f"mixed_{policy}"])


def test_variables_of_several_types() -> None:
    W, b = tf.Variable(tf.zeros((3, 2)), name="W"), tf.Variable(tf.zeros((2,), tf.float64), name="b")
    randomise([W, b])
    J = check(lambda x: tf.cast(tf.cast(x, tf.float32) @ W, tf.float64) * b, data(3), [W, b])
    assert [segment.dtype for segment in J.parameters.segments] == ["float32", "float64"]
