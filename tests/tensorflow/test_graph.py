"""Jacobians in graphs of TensorFlow 1, against one gradient for each output of each sample."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracles import close, limit

import netjac as nj
from netjac.tensorflow import graph

v1 = tf.compat.v1
RNG = np.random.default_rng(0)
EAGER = tf.ones((1, 3))
BOTH_VARIABLES = pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    """Every test builds in a graph of its own."""
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(0)
        yield session


def variable(name: str, shape: Sequence[int], dtype: str = "float64", resource: bool = True, scale: float = 0.7) -> Any:
    values = scale * RNG.uniform(0.3, 1.0, shape) * RNG.choice([-1.0, 1.0], shape)
    return v1.get_variable(name, initializer=values.astype(dtype), use_resource=resource)


def start(session: Any) -> None:
    session.run(v1.global_variables_initializer())


def loop(session: Any, ys: Any, xs: Sequence[Any], samples: Sequence[bool], feed: Any, n: int) -> list[np.ndarray]:
    """(n, l, …) of each x, one output of one sample at a time."""
    l = int(np.prod(ys.shape.as_list()[1:]))
    flat = tf.reshape(ys, [-1])
    number = v1.placeholder(tf.int32, ())
    found = tf.gradients(flat[number], xs, unconnected_gradients="zero")
    found = [tf.convert_to_tensor(d) for d in found]
    rows = [[session.run(found, feed | {number: i * l + j}) for j in range(l)] for i in range(n)]
    return [
        np.stack([np.stack([row[k][i] if samples[k] else row[k] for row in rows[i]]) for i in range(n)])
        for k in range(len(xs))
    ]


def check(session: Any, ys: Any, xs: Sequence[Any], feed: Any, samples: Sequence[bool] = (), **options: Any) -> Any:
    """`graph.jacobian` of ys and xs, started and compared."""
    samples = list(samples) or [not isinstance(x, tf.Variable) for x in xs]
    blocks = graph.jacobian(ys, list(xs), **options)
    start(session)
    values = session.run(ys, feed)
    found = session.run(blocks, feed)
    for x, block, ours, theirs in zip(
        xs, blocks, found, loop(session, ys, xs, samples, feed, len(values)), strict=True
    ):
        assert block.dtype == x.dtype.base_dtype
        block.shape.assert_is_compatible_with(ours.shape)
        close(ours, theirs, x.name, limit(ours.dtype))
    return found


@BOTH_VARIABLES
@pytest.mark.parametrize("shape", [(None, 3), (1, 3)])
def test_a_matrix_of_ones(shape: tuple[Any, int], resource: bool, session: Any) -> None:
    x = v1.placeholder(tf.float32, shape)
    w = v1.get_variable("W_1", (3, 3), initializer=v1.ones_initializer(), use_resource=resource)
    layer_out = x @ w
    assert isinstance(graph.jacobian(layer_out, x), tf.Tensor)
    of_x, of_w = graph.jacobian(layer_out, [x, w])
    start(session)
    found_x, found_w = session.run([of_x, of_w], {x: [[1, 7, 5]]})
    np.testing.assert_array_equal(found_x, np.ones((1, 3, 3)))
    expected = np.zeros((1, 3, 3, 3))
    for j in range(3):
        expected[0, j, :, j] = [1, 7, 5]
    np.testing.assert_array_equal(found_w, expected)
    np.testing.assert_array_equal(session.run(tf.gradients(layer_out, x)[0], {x: [[1, 7, 5]]}), [[3, 3, 3]])


@DTYPES
@BOTH_VARIABLES
@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_network(n: int, resource: bool, dtype: str, session: Any) -> None:
    x = v1.placeholder(dtype, (None, 3))
    w, b, v = (variable(k, s, dtype, resource) for k, s in (("w", (3, 4)), ("b", (4,)), ("v", (4, 2))))
    unused = variable("unused", (2,), dtype, resource)
    h = tf.tanh(x @ w + b)
    y = tf.sigmoid(h @ v)
    values = RNG.normal(size=(n, 3)).astype(dtype)
    xs = [x, w, b, v, unused, h]
    if n == 0:
        start(session)
        shapes = [a.shape for a in session.run(graph.jacobian(y, xs), {x: values})]
        assert shapes == [(0, 2, 3), (0, 2, 3, 4), (0, 2, 4), (0, 2, 4, 2), (0, 2, 2), (0, 2, 4)]
        return
    found = check(session, y, xs, {x: values})
    assert not found[4].any()
    table = graph.coverage(y, [x, w, b, v, unused])
    assert {e.variable: e.treatment.value for e in table.entries} == {
        "w": "factored", "b": "factored", "v": "factored", "unused": "unreached",
    }  # fmt: skip
    graph.check_samples(session, y, {x: RNG.normal(size=(4, 3))})


@BOTH_VARIABLES
def test_many_outputs(resource: bool, session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w = variable("w", (3, 30), resource=resource)
    check(session, tf.reshape(tf.tanh(x @ w), [-1, 5, 6]), [x, w], {x: RNG.normal(size=(3, 3))})


@BOTH_VARIABLES
def test_a_convolution_with_statistics_that_are_captured(resource: bool, session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 5, 5, 2))
    k, gamma, mean = (variable(a, s, resource=resource) for a, s in (("k", (3, 3, 2, 3)), ("g", (3,)), ("mean", (3,))))
    keep = v1.placeholder_with_default(np.float64(0.5), ())
    h = tf.nn.conv2d(x, k, 1, "VALID")
    h = tf.nn.batch_normalization(h, mean, tf.square(mean) + 0.1, None, gamma, 1e-3) * keep
    y = tf.reduce_sum(tf.nn.relu(h), [1, 2])
    feed = {x: RNG.normal(size=(2, 5, 5, 2)), keep: 0.25}
    check(session, y, [x, k, gamma], feed)


@BOTH_VARIABLES
def test_an_embedding(resource: bool, session: Any) -> None:
    tokens = v1.placeholder(tf.int32, (None, 4))
    table, w = variable("table", (6, 3), resource=resource), variable("w", (3, 2), resource=resource)
    looked_up = tf.nn.embedding_lookup(table, tokens)
    y = tf.tanh(tf.reduce_mean(looked_up, 1) @ w)
    feed = {tokens: RNG.integers(0, 6, (3, 4))}
    check(session, y, [table, w], feed)
    with pytest.raises(nj.DtypeError, match="embedding's output"):
        graph.jacobian(y, tokens)
    graph.check_samples(session, y, feed)


def test_a_table_that_is_not_asked_for(session: Any) -> None:
    tokens = v1.placeholder(tf.int32, (None, 4))
    table, w = variable("table", (6, 3)), variable("w", (3, 2))
    looked_up = tf.nn.embedding_lookup(table, tokens)
    y = tf.tanh(tf.reduce_mean(looked_up, 1) @ w)
    check(session, y, [w, looked_up], {tokens: RNG.integers(0, 6, (3, 4))})
    assert {e.treatment.value for e in graph.coverage(y, w).entries} == {"factored"}
    assert {e.variable for e in graph.coverage(y, w).entries} == {"w"}


def test_tensors_made_of_weights_and_of_samples(session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w = variable("w", (3, 3))
    positive = tf.nn.softplus(w)
    h = x @ positive
    y = tf.tanh(h) * tf.reduce_sum(positive)
    check(session, y, [positive, w, h, x], {x: RNG.normal(size=(2, 3))}, [False, False, True, True])


@BOTH_VARIABLES
def test_what_no_rule_covers(resource: bool, session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w, v = variable("w", (3, 3), resource=resource, scale=0.2), variable("v", (3, 2), resource=resource)
    y = tf.tanh(x @ tf.linalg.inv(w + tf.eye(3, dtype=tf.float64))) @ v
    check(session, y, [w, v], {x: RNG.normal(size=(3, 3))})
    treatments = {e.variable: e.treatment.value for e in graph.coverage(y, [w, v]).entries}
    assert treatments == {"w": "fallback", "v": "factored"}


def test_a_graph_that_cannot_be_run_at_made_up_values(session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    size = v1.placeholder(tf.int32, ())  # made up, it would be 0
    w = variable("w", (3, 2))
    y = tf.tanh(tf.reshape(tf.tile(x, [1, size]), [-1, 3]) @ w)
    found = check(session, y, [w], {x: RNG.normal(size=(3, 3)), size: 1})
    assert found[0].shape == (3, 2, 3, 2)
    assert {e.treatment.value for e in graph.coverage(y, w).entries} == {"fallback"}


def test_a_loop(session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w = variable("w", (3, 3))
    _, y = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x), maximum_iterations=3)
    y = tf.ensure_shape(y, (None, 3))
    check(session, y, [x, w], {x: RNG.normal(size=(2, 3))})


def test_a_loop_of_tensorflow_1_is_refused_for_variables(session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w = variable("w", (3, 3))
    v1.disable_control_flow_v2()
    try:
        _, y = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x), maximum_iterations=3)
    finally:
        v1.enable_control_flow_v2()
    y = tf.ensure_shape(y, (None, 3))
    check(session, y, [x], {x: RNG.normal(size=(2, 3))})
    with pytest.raises(nj.ModelError, match="enable_control_flow_v2"):
        graph.jacobian(y, w)


def test_functions_are_seen_through(session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w = variable("w", (3, 2))

    @tf.function
    def layer(x: Any) -> Any:
        return tf.tanh(x @ w)

    y = layer(x)
    check(session, y, [x, w], {x: RNG.normal(size=(2, 3))})
    assert {e.treatment.value for e in graph.coverage(y, w).entries} == {"factored"}


@BOTH_VARIABLES
def test_gradients_that_operations_bring_along(resource: bool, session: Any) -> None:
    """Such a gradient is a function over tensors of the whole batch; it must be applied to the copy's own."""
    x = v1.placeholder(tf.float64, (None, 3))
    w, v, u = (variable(a, s, resource=resource, scale=0.4) for a, s in (("w", (3, 3)), ("v", (3, 2)), ("u", (3, 3))))
    slope = variable("slope", (), resource=resource)

    @tf.custom_gradient
    def doubled(z: Any) -> Any:
        return tf.sin(z), lambda d: 2 * d * tf.cos(z) * tf.identity(tf.stop_gradient(scale))

    scale = tf.square(slope)
    h = tf.nn.swish(x @ w) @ tf.linalg.inv(u + tf.eye(3, dtype=tf.float64))
    y = doubled(tf.nn.swish(h)) @ v
    feed = {x: RNG.normal(size=(3, 3))}
    check(session, y, [x, w, v, u], feed)
    treatments = {e.variable: e.treatment.value for e in graph.coverage(y, [w, v, u]).entries}
    assert treatments == {"w": "factored", "v": "factored", "u": "fallback"}


def test_second_derivatives_of_gradients_that_operations_bring_along(session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w = variable("w", (3, 2))
    loss = tf.reduce_sum(tf.sin(graph.jacobian(tf.nn.swish(x @ w), w)))
    start(session)
    feed = {x: RNG.normal(size=(3, 3))}
    gradient, value = session.run([tf.gradients(loss, w)[0], w], feed)
    new = v1.placeholder(tf.float64, (3, 2))
    assign = w.assign(new)
    direction = RNG.standard_normal((3, 2))
    ends = []
    for sign in (1, -1):
        session.run(assign, {new: value + sign * 1e-5 * direction})
        ends.append(session.run(loss, feed))
    np.testing.assert_allclose(np.sum(gradient * direction), (ends[0] - ends[1]) / 2e-5, rtol=1e-6)


def test_elements_of_a_dataset(session: Any) -> None:
    values = RNG.normal(size=(4, 3))
    x = v1.data.make_one_shot_iterator(v1.data.Dataset.from_tensor_slices(values).batch(2)).get_next()
    w = variable("w", (3, 2))
    of_x, of_w = graph.jacobian(tf.tanh(x @ w), [x, w])
    start(session)
    for batch in (values[:2], values[2:]):
        found_x, found_w, kernel = session.run([of_x, of_w, w])
        slope = 1 - np.tanh(batch @ kernel) ** 2  # (n, l)
        close(found_x, slope[:, :, None] * kernel.T[None], "x", 1e-12)
        close(found_w, np.einsum("nl,nk,lj->nlkj", slope, batch, np.eye(2)), "w", 1e-12)


def test_constants_and_named_inputs(session: Any) -> None:
    x = tf.constant([[1.0, 7.0, 5.0]])
    w = variable("w", (3, 3), "float32")
    y = x @ w
    check(session, y, [x, w], {})
    check(session, y, [w], {}, inputs=x)
    with pytest.raises(nj.ModelError, match="inputs="):
        graph.jacobian(y, w)


def test_an_input_of_its_own_kind_beside_the_samples(session: Any) -> None:
    """A vector of unknown length that holds no samples: said by ``inputs``."""
    x, shift = v1.placeholder(tf.float64, (None, 3)), v1.placeholder(tf.float64, (None,))
    w = variable("w", (3, 2))
    y = tf.tanh(x @ w + tf.reduce_sum(shift))
    check(session, y, [x, w], {x: RNG.normal(size=(2, 3)), shift: RNG.normal(size=5)}, inputs=[x])


# In a loss ------------------------------------------------------------------------------------------------------------


@BOTH_VARIABLES
def test_derivatives_through_it_agree_with_central_differences(resource: bool, session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w, v = variable("w", (3, 4), resource=resource), variable("v", (4, 2), resource=resource)
    y = tf.sigmoid(tf.tanh(x @ w) @ v)
    blocks = graph.jacobian(y, [x, w, v])
    start(session)
    feed = {x: RNG.normal(size=(3, 3))}
    session.run(blocks, feed)  # gradients may be asked for after a run
    loss = tf.add_n([tf.reduce_sum(tf.cos(b) * b) for b in blocks])
    gradients = session.run(tf.gradients(loss, [w, v, x]), feed)
    for target, gradient in zip([w, v], gradients[:2], strict=True):
        direction, step = RNG.standard_normal(gradient.shape), 1e-5
        value = session.run(target)
        new = v1.placeholder(tf.float64, value.shape)
        assign = target.assign(new)
        ends = []
        for sign in (1, -1):
            session.run(assign, {new: value + sign * step * direction})
            ends.append(session.run(loss, feed))
        session.run(assign, {new: value})
        np.testing.assert_allclose(np.sum(gradient * direction), (ends[0] - ends[1]) / (2 * step), rtol=1e-6)
    direction = RNG.standard_normal((3, 3))
    ends = [session.run(loss, {x: feed[x] + sign * 1e-5 * direction}) for sign in (1, -1)]
    np.testing.assert_allclose(np.sum(gradients[2] * direction), (ends[0] - ends[1]) / 2e-5, rtol=1e-6)


@BOTH_VARIABLES
def test_a_loss_on_the_jacobian_can_be_trained(resource: bool, session: Any) -> None:
    x = v1.placeholder(tf.float32, (None, 3))
    w = variable("w", (3, 3), "float32", resource)
    loss = tf.reduce_sum(graph.jacobian(tf.tanh(x @ w), x, "(n l) m") ** 2)
    step = v1.train.GradientDescentOptimizer(0.05).minimize(loss)
    start(session)
    losses = [session.run([loss, step], {x: [[0.1, 0.7, 0.5], [0.3, -0.2, 0.4]]})[0] for _ in range(20)]
    assert np.all(np.diff(losses) < 0)


@pytest.mark.parametrize("layout", ["(n l) m", "n l m", "(l m) n", "m (n l)", "(n l m)"])
@pytest.mark.parametrize("n", [None, 3])
def test_layouts(layout: str, n: int | None, session: Any) -> None:
    x = v1.placeholder(tf.float64, (n, 2, 3))
    w = variable("w", (3, 4))
    y = tf.tanh(x @ w)
    blocks = graph.jacobian(y, [w, x])
    arranged = graph.jacobian(y, [w, x], layout)
    start(session)
    feed = {x: RNG.normal(size=(3, 2, 3))}
    of_w, of_x, found = session.run([*blocks, arranged], feed)
    dense = np.concatenate([of_w.reshape(3, 8, -1), of_x.reshape(3, 8, -1)], axis=2)
    expected = np.zeros(nj.layout.parse(layout).shape(3, 8, 18))
    nj.layout.parse(layout).view(expected, 3, 8, 18)[...] = dense
    np.testing.assert_array_equal(found, expected)
    arranged.shape.assert_is_compatible_with(found.shape)


# Refusals -------------------------------------------------------------------------------------------------------------

MIXING: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda y: tf.nn.softmax(y, axis=0),
    "centred": lambda y: y - tf.reduce_mean(y, 0),
    "reversed": lambda y: tf.reverse(y, [0]),
    "behind a stopped gradient": lambda y: y * tf.stop_gradient(tf.reduce_max(y)),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing(name: str, session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w = variable("w", (3, 2))
    y = MIXING[name](x @ w)
    with pytest.raises(nj.SampleMixingError):
        graph.jacobian(y, w)
    start(session)
    with pytest.raises(nj.SampleMixingError, match="mixes samples"):
        graph.check_samples(session, y, {x: RNG.normal(size=(3, 3))})
    with pytest.raises(nj.DataError, match="two samples"):
        graph.check_samples(session, y, {x: np.ones((1, 3))})
    with pytest.raises(nj.DataError, match="two samples"):
        graph.check_samples(session, y, {x: np.ones((3, 3))})


def test_random_numbers(session: Any) -> None:
    x = v1.placeholder(tf.float64, (None, 3))
    w = variable("w", (3, 2))
    y = tf.nn.dropout(x @ w, rate=0.5)
    with pytest.raises(nj.RandomModelError):
        graph.jacobian(y, w)
    of_x = graph.jacobian(y, x)  # the derivative of the draw
    start(session)
    values, found, kernel = session.run([y, of_x, w], {x: RNG.normal(size=(4, 3))})
    close(found, 2 * (values != 0)[:, :, None] * kernel.T, "of the same draw", 1e-12)
    with pytest.raises(nj.RandomModelError):
        graph.check_samples(session, y, {x: RNG.normal(size=(40, 3))})


def test_errors_say_what_to_do() -> None:
    x = v1.placeholder(tf.float32, (None, 3))
    w = variable("w", (3, 2), "float32")
    y = x @ w
    with pytest.raises(nj.ShapeError, match="expected"):
        graph.jacobian(tf.reduce_sum(y), x)
    with pytest.raises(nj.ShapeError, match="all other sizes known"):
        graph.jacobian(v1.placeholder(tf.float32, (None, None)), x)
    with pytest.raises(nj.DtypeError, match="floating"):
        graph.jacobian(tf.argmax(y, 1), x)
    with pytest.raises(nj.ShapeError, match="no axis of samples"):
        graph.jacobian(y, tf.reduce_sum(x))
    with pytest.raises(nj.LayoutError):
        graph.jacobian(y, x, "n k")
    unknown = v1.placeholder(tf.float32)
    with pytest.raises(nj.ShapeError, match="inputs="):
        graph.jacobian(tf.ensure_shape(unknown, (None, 3)) @ w, w)
    with pytest.raises(nj.ShapeError, match="all sizes but the first"):
        graph.jacobian(tf.ensure_shape(v1.placeholder(tf.float32, (None, None)), (None, 3)) @ w, w)
    with tf.Graph().as_default():
        elsewhere = tf.compat.v1.placeholder(tf.float32, (None, 3))
    with pytest.raises(nj.ModelError, match="belongs to another graph"):
        graph.jacobian(y, elsewhere)
    with pytest.raises(nj.ModelError, match="jacobian_tensor"):
        graph.jacobian(EAGER, EAGER)


def test_a_number_of_samples_that_is_fixed(session: Any) -> None:
    x = v1.placeholder(tf.float64, (4, 6))
    w = variable("w", (3, 2))
    y = tf.reshape(tf.reshape(x, [4, 2, 3]) @ w, [4, 4])
    check(session, y, [x], {x: RNG.normal(size=(4, 6))})
    with pytest.raises(nj.ModelError, match="fixed"):
        graph.jacobian(y, w)


CODE = """
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
from netjac.tensorflow import graph
x = tf.placeholder(tf.float32, (None, 3))
for name, resource in (("a", True), ("b", False)):
    w = tf.get_variable(name, (3, 3), initializer=tf.ones_initializer(), use_resource=resource)
    of_x, of_w, dense = *graph.jacobian(x @ w, [x, w]), graph.jacobian(x @ w, w, "(n l) m")
    loss = tf.gradients(tf.reduce_sum(graph.jacobian(tf.tanh(x @ w), w) ** 2), w)[0]
    fallback = graph.jacobian(x @ tf.linalg.inv(w + tf.eye(3)), w)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        found = session.run([of_x, of_w, dense, loss, fallback], {x: [[1, 7, 5]]})
        graph.check_samples(session, x @ w, {x: [[1, 7, 5], [2, 3, 4]]})
    assert (found[0] == np.ones((1, 3, 3))).all()
    assert (found[1][0, 0] == [[1, 0, 0], [7, 0, 0], [5, 0, 0]]).all()
    assert found[2].shape == (3, 9) and np.isfinite(found[3]).all() and found[4].shape == (1, 3, 3, 3)
assert not isinstance(tf.TensorShape([1])[0], int)
"""


def test_where_the_behaviour_of_tensorflow_2_is_switched_off() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
