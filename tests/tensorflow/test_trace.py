"""What cannot be differentiated is refused before any work: netjac's class, the standard class, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from oracles import check

import netjac as nj

L = keras.layers
X = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
W = tf.Variable(np.random.default_rng(1).normal(size=(4, 3)).astype("float32"), name="w")
IDS = tf.Variable(np.arange(3), name="ids", trainable=False)
OPEN = tf.Variable(W, shape=(4, None), name="open")


def model() -> Any:
    return keras.Sequential([keras.Input((4,)), L.Dense(3, "tanh"), L.Dense(2)])


def two_inputs() -> Any:
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    return keras.Model({"a": a, "b": b}, L.Dense(2)(L.Concatenate()([a, b])))


class NeverCalled(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def partly_built() -> Any:
    class Partly(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = L.Dense(4), L.Dense(2, name="second")

        def build(self, shape: Any) -> None:
            self.first.build(shape)

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

    result = Partly()
    result.build((None, 4))
    return result


class ModuleWithoutCall(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(W)


def frozen() -> Any:
    result = model()
    result.trainable = False
    return result


def linear(x: Any) -> Any:
    return x @ W


def eager(x: Any) -> Any:
    return tf.constant(x.numpy()) @ W


def nan_in(x: np.ndarray, value: float = np.nan) -> np.ndarray:
    result = x.copy()
    result[1, 2] = value
    return result


def with_variables(variables: Any) -> Callable[[], Any]:
    return lambda: nj.jacobian(linear, X, variables=variables)


BAD: dict[str, tuple[Callable[[], Any], type[Exception], type[Exception], str]] = {
    "a callable without variables": (lambda: nj.jacobian(linear, X), nj.ModelError, ValueError, r"write variables=\["),
    "all layers frozen": (lambda: nj.jacobian(frozen(), X), nj.ModelError, ValueError, "trainable = True"),
    "an empty list of variables": (with_variables([]), nj.ModelError, ValueError, r"give variables=\["),
    "a variable twice": (with_variables([W, W]), nj.ModelError, ValueError, "listed twice"),
    "an array for a variable": (with_variables([W.numpy()]), nj.DtypeError, TypeError, "one is ndarray"),
    "a tensor for a variable": (
        with_variables([W + 0]),
        nj.DtypeError,
        TypeError,
        r"must be tf\.Variable or keras\.Var",
    ),
    "a name for a variable": (with_variables(["w"]), nj.DtypeError, TypeError, "one is str"),
    "a number for the variables": (with_variables(3), nj.DtypeError, TypeError, "variables must be"),
    "None among the variables": (with_variables([W, None]), nj.DtypeError, TypeError, "one is NoneType"),
    "an integer variable": (with_variables([W, IDS]), nj.DtypeError, TypeError, "'ids' has dtype int64"),
    "never built, Sequential": (
        lambda: nj.jacobian(keras.Sequential([L.Dense(2)]), X),
        nj.ModelError,
        ValueError,
        r"model\.build",
    ),
    "never built, a subclass": (lambda: nj.jacobian(NeverCalled(), X), nj.ModelError, ValueError, "never built"),
    "never built, a layer": (lambda: nj.jacobian(L.Dense(2), X), nj.ModelError, ValueError, "never built"),
    "never built, parameters": (lambda: nj.parameters(NeverCalled()), nj.ModelError, ValueError, "never built"),
    "never built, some layers of a model": (
        lambda: nj.jacobian(partly_built(), X),
        nj.ModelError,
        ValueError,
        r"'second' \(Dense\)\. Call model\(x\) once",
    ),
    "a variable of open shape": (
        lambda: nj.jacobian(lambda x: x @ OPEN, X, variables=[OPEN]),
        nj.ShapeError,
        ValueError,
        "leaves sizes open",
    ),
    "x is a dataset": (
        lambda: nj.jacobian(model(), tf.data.Dataset.from_tensors(X)),
        nj.DtypeError,
        TypeError,
        "x must be an array of all samples.*Dataset.*netjac.stream",
    ),
    "x is a sparse matrix of SciPy": (
        lambda: nj.jacobian(model(), scipy.sparse.csr_array(X)),
        nj.DtypeError,
        TypeError,
        "csr_array",
    ),
    "not a model": (lambda: nj.jacobian(3, X), nj.ModelError, ValueError, "int"),
    "a module that cannot be called": (
        lambda: nj.jacobian(ModuleWithoutCall(), X),
        nj.ModelError,
        ValueError,
        "ModuleWithoutCall",
    ),
    "wrong number of features": (
        lambda: nj.jacobian(model(), X[:, :3]),
        nj.ShapeError,
        ValueError,
        r"samples of shape \(4,\).*samples of shape \(3,\)",
    ),
    "one axis too many": (lambda: nj.jacobian(model(), X[None]), nj.ShapeError, ValueError, r"\(5, 4\)"),
    "wrong number of features, a callable": (
        lambda: nj.jacobian(linear, X[:, :3], variables=[W]),
        nj.ModelError,
        ValueError,
        r"\(n, 3\) float32",
    ),
    "a key is missing": (lambda: nj.jacobian(two_inputs(), {"a": X}), nj.ShapeError, ValueError, "takes 2 inputs"),
    "a key is wrong": (
        lambda: nj.jacobian(two_inputs(), {"a": X, "c": X[:, :2]}),
        nj.ModelError,
        ValueError,
        "structure the model takes",
    ),
    "inputs of different n": (
        lambda: nj.jacobian(two_inputs(), {"a": X, "b": X[:3, :2]}),
        nj.ShapeError,
        ValueError,
        r"\[5, 3\]",
    ),
    "NaN in x": (lambda: nj.jacobian(model(), nan_in(X)), nj.DataError, ValueError, "remove or replace"),
    "infinity in x": (lambda: nj.jacobian(model(), nan_in(X, np.inf)), nj.DataError, ValueError, "NaN or infinite"),
    "masked x": (lambda: nj.jacobian(model(), np.ma.masked_less(X, 0)), nj.DataError, ValueError, "masked entries"),
    "NaN in a tensor": (
        lambda: nj.jacobian(model(), tf.constant(nan_in(X))),
        nj.DataError,
        ValueError,
        "remove or replace",
    ),
    "x is a scalar": (lambda: nj.jacobian(model(), 1.0), nj.ShapeError, ValueError, r"x\[None\]"),
    "x is None": (lambda: nj.jacobian(model(), None), nj.DtypeError, TypeError, "None"),
    "a None among the inputs": (lambda: nj.jacobian(two_inputs(), [X, None]), nj.DtypeError, TypeError, "None"),
    "x is empty": (lambda: nj.jacobian(model(), []), nj.ShapeError, ValueError, r"\(n, \.\.\.\)|samples"),
    "x is an empty dict": (lambda: nj.jacobian(model(), {}), nj.ShapeError, ValueError, "holds no array"),
    "x is a string": (lambda: nj.jacobian(model(), np.array(["a", "b"])), nj.DtypeError, TypeError, "floating-point"),
    "x is a tensor of strings": (
        lambda: nj.jacobian(model(), tf.constant(["a"])),
        nj.DtypeError,
        TypeError,
        "dtype string",
    ),
    "x is complex": (lambda: nj.jacobian(model(), X * 1j), nj.DtypeError, TypeError, "complex"),
    "x holds objects": (lambda: nj.jacobian(model(), np.array([{}, {}])), nj.DtypeError, TypeError, "object"),
    "x is ragged": (
        lambda: nj.jacobian(model(), tf.ragged.constant([[1.0], [2.0, 3.0]])),
        nj.DtypeError,
        TypeError,
        "padded",
    ),
    "x is a ragged list": (lambda: nj.jacobian(model(), [[1.0], [2.0, 3.0]]), nj.ShapeError, ValueError, "same length"),
    "x is sparse": (
        lambda: nj.jacobian(model(), tf.sparse.from_dense(X)),
        nj.DtypeError,
        TypeError,
        "SparseTensor",
    ),
    "integer outputs": (
        lambda: nj.jacobian(lambda x: tf.argmax(x @ W, -1), X, variables=[W]),
        nj.DtypeError,
        TypeError,
        "int64",
    ),
    "a scalar output": (
        lambda: nj.jacobian(lambda x: tf.reduce_mean(x @ W), X, variables=[W]),
        nj.ShapeError,
        ValueError,
        "one value per sample",
    ),
    "outputs that are no samples": (
        lambda: nj.jacobian(lambda x: tf.transpose(x @ W), X, variables=[W]),
        nj.ShapeError,
        ValueError,
        "number of samples",
    ),
    "outputs that hold the weights alone": (
        lambda: nj.jacobian(lambda x: W * 2, X, variables=[W]),
        nj.ShapeError,
        ValueError,
        "number of samples",
    ),
    "no output": (lambda: nj.jacobian(lambda x: None, X, variables=[W]), nj.NetjacError, Exception, "returns"),
    "not traceable": (lambda: nj.jacobian(eager, X, variables=[W]), nj.ModelError, ValueError, "numpy"),
    "an error of its own": (
        lambda: nj.jacobian(lambda x: tf.reshape(x, [-1, 7]) @ W, X, variables=[W]),
        nj.ModelError,
        ValueError,
        "could not be traced",
    ),
    "integers to input_jacobian": (
        lambda: nj.input_jacobian(linear, np.arange(8).reshape(2, 4)),
        nj.DtypeError,
        TypeError,
        "astype",
    ),
    "NaN to input_jacobian": (
        lambda: nj.input_jacobian(linear, nan_in(X)),
        nj.DataError,
        ValueError,
        "remove or replace",
    ),
    "a scalar output of input_jacobian": (
        lambda: nj.input_jacobian(lambda x: tf.reduce_sum(x), X),
        nj.ShapeError,
        ValueError,
        "one value per sample",
    ),
    "wrong features to input_jacobian": (
        lambda: nj.input_jacobian(model(), X[:, :3]),
        nj.ShapeError,
        ValueError,
        r"\(3,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_advice(name: str) -> None:
    action, ours, standard, message = BAD[name]
    with pytest.raises(ours, match=message) as caught:
        action()
    assert isinstance(caught.value, standard)
    assert isinstance(caught.value, nj.NetjacError)


def test_a_refusal_leaves_nothing_behind() -> None:
    m = model()
    with pytest.raises(nj.ShapeError):
        nj.jacobian(m, X[:, :3])
    check(m, X)


class NotAllCalled(keras.Model):
    """A model with layers that its call leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.used = L.Dense(2)
        self.unused = [L.Dense(3), keras.Sequential([L.LSTM(2)])]

    def call(self, x: Any) -> Any:
        return self.used(x)


@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called")  # Keras, of the layers left out
def test_layers_that_are_never_called_are_no_obstacle() -> None:
    m = NotAllCalled()
    m(X)
    check(m, X)
    assert nj.parameters(m).size == 10
    assert nj.input_jacobian(m, X).shape == (len(X), 2, 4)
    assert nj.jacobian_tensor(m, X).shape == (2 * len(X), 10)


def test_a_layer_serves_as_a_model() -> None:
    layer = L.Dense(3, "tanh")
    layer.build((None, 4))
    check(layer, X)


def test_a_keras_variable_and_a_single_variable_may_be_given() -> None:
    m = model()
    kernel = m.layers[1].kernel
    J = check(m, X, [kernel])
    assert J.shape == (10, 6)
    alone = nj.jacobian(m, X, variables=kernel)
    np.testing.assert_array_equal(alone.to_array(), J.to_array())


def test_variables_that_are_not_trained_may_be_asked_for() -> None:
    m = keras.Sequential([keras.Input((4,)), L.BatchNormalization(), L.Dense(2)])
    check(m, X, [m.layers[0].moving_mean, m.layers[0].moving_variance, m.layers[0].gamma])


def test_the_order_of_variables_is_the_order_of_columns() -> None:
    b = tf.Variable([1.0, 2.0, 3.0], name="b")

    def f(x: Any) -> Any:
        return tf.tanh(x @ W + b)

    one, two = check(f, X, [W, b], random=False), check(f, X, [b, W], random=False)
    np.testing.assert_array_equal(one.to_array()[:, 12:], two.to_array()[:, :3])
    assert two.parameters.names == ("b", "w")


def test_names_of_a_keras_model_lose_the_models_own() -> None:
    assert nj.parameters(keras.Sequential([keras.Input((2,)), L.Dense(2, name="d")])).names == ("d/kernel", "d/bias")


def test_names_in_a_module_are_paths() -> None:
    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = [tf.Variable(W), tf.Variable([[1.0], [2.0], [3.0]])]
            self.inner = {"gain": tf.Variable(2.0)}

        def __call__(self, x: Any) -> Any:
            return tf.tanh(x @ self.steps[0] * self.inner["gain"]) @ self.steps[1]

    net = Net()
    assert set(nj.parameters(net).names) == {"inner.gain", "steps.0", "steps.1"}
    check(net, X)


def test_lists_of_numbers_are_inputs() -> None:
    J = nj.jacobian(linear, [[1.0, 2.0, 3.0, 4.0]], variables=[W])
    assert J.shape == (3, 12)
    np.testing.assert_allclose(J.outputs, np.array([[1, 2, 3, 4]]) @ W.numpy(), rtol=1e-6)


def test_outputs_keep_the_models_structure() -> None:
    def f(x: Any) -> Any:
        z = x @ W
        return {"b": (z, [tf.reshape(z, [-1, 3, 1])]), "a": z[:, 0]}

    J = check(f, X, [W], random=False)
    z = X @ W.numpy()
    np.testing.assert_allclose(J.outputs["b"][0], z, rtol=1e-5)
    np.testing.assert_allclose(J.outputs["b"][1][0], z[:, :, None], rtol=1e-5)
    np.testing.assert_allclose(J.outputs["a"], z[:, 0], rtol=1e-5)
    assert J.output_space.names == ("a", "b/0", "b/1/0")


def test_python_control_flow_on_tensors_is_traced() -> None:
    gain = tf.Variable(2.0, name="gain")

    def f(x: Any) -> Any:
        h = x @ W
        if gain > 0:
            h = h * gain
        return h

    check(f, X, [W, gain], random=False)


def test_float64_weights_take_float64_inputs_from_lists_and_float32_arrays() -> None:
    w = tf.Variable(np.ones((4, 2)))
    J = nj.jacobian(lambda x: x @ w, X, variables=[w])
    assert J.dtype == np.float64
    np.testing.assert_allclose(J.to_array()[0, ::2], X[0].astype(np.float64), rtol=1e-15)
