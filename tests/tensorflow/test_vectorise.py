"""Vectorised sweeps with oneDNN's kernels on, as TensorFlow comes; in a process of their own, for crashes end one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

import netjac as nj
from netjac.tensorflow import symbolic
from netjac.tensorflow.vectorise import vectorized_map

PRELUDE = """
import sys
sys.path.insert(0, sys.argv[1])
import keras
import numpy as np
import tensorflow as tf
from oracles import compare, tape_jacobian
import netjac as nj

L = keras.layers
rng = np.random.default_rng(0)
i = keras.Input((6, 8))

def check(h, n, outputs=20, **given):
    model = keras.Model(i, L.Dense(outputs)(L.Flatten()(h)))
    x = rng.normal(size=(n, 6, 8)).astype(np.float32)
    compare(nj.jacobian(model, x, **given), tape_jacobian(model, x, model.trainable_variables), 1e-4)
    return model, x
"""

CASES = {
    "attention": "[check(L.MultiHeadAttention(2, 4)(i, i), n) for n in (1, 3)]",
    "a product of every sample": "[check(L.Attention()([L.Dense(8)(i), L.Dense(8)(i)]), 1) for _ in range(10)]",
    "tile by tile": """
        model, x = check(L.MultiHeadAttention(2, 4)(i, i), 8, outputs=40)
        J = nj.jacobian(model, x)
        try:
            nj.jacobian(model, x, memory=1)
        except nj.MemoryBudgetError as error:
            tiled = nj.jacobian(model, x, memory=4 * error.least)
        u = rng.normal(size=J.shape[0])
        for _ in range(3):
            np.testing.assert_allclose(tiled.T @ u, J.T @ u, rtol=0, atol=1e-4 * np.abs(J.T @ u).max())
    """,
    "sample by sample": """
        W, V, s = (tf.Variable(rng.normal(size=shape).astype(np.float32)) for shape in ((8, 8), (8, 4), (4,)))
        f = lambda x: tf.reduce_sum(tf.matmul(tf.sin(tf.matmul(x, tf.linalg.inv(W)[None])), V) * s, 1)
        x = rng.normal(size=(30, 6, 8)).astype(np.float32)
        J = nj.jacobian(f, x, variables=[W, V, s])
        assert "fallback" in {t.value for t in J.coverage.treatment(J.parameters.names[0])}
        compare(J, tape_jacobian(f, x, [W, V, s]), 1e-4)
    """,
    "of inputs": """
        W = tf.constant(rng.normal(size=(8, 7)).astype(np.float32))
        f = lambda x: tf.matmul(tf.tanh(x), W[None])
        x = rng.normal(size=(1, 6, 8)).astype(np.float32)
        with tf.GradientTape(persistent=True) as tape:
            t = tf.constant(x)
            tape.watch(t)
            y = f(t)
        expected = tape.jacobian(y, t, experimental_use_pfor=False).numpy().reshape(42, 48)
        np.testing.assert_allclose(nj.input_jacobian(f, x).reshape(42, 48), expected, atol=1e-4)
    """,
}


@pytest.mark.parametrize("name", CASES)
def test_with_onednn(name: str) -> None:
    script = PRELUDE + textwrap.dedent(CASES[name]) + "\nprint('right')"
    environment = os.environ | {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)], env=environment, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr[-3000:]


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("adjoint", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("over", ["first", "second", "both"])
def test_products_of_all_kinds(rank: int, adjoint: tuple[bool, bool], over: str) -> None:
    rng = np.random.default_rng(rank)
    batch = (3, 2)[: rank - 2]
    a, b = (4, *batch, 5, 6), (4, *batch, 6, 7)
    x, y = rng.normal(size=a), rng.normal(size=b)
    if adjoint[0]:
        x = x.swapaxes(-1, -2)
    if adjoint[1]:
        y = y.swapaxes(-1, -2)

    def one(pair: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        left = x[0] if over == "second" else pair[0]
        right = y[0] if over == "first" else pair[1]
        return tf.raw_ops.BatchMatMulV2(x=left, y=right, adj_x=adjoint[0], adj_y=adjoint[1])

    found = vectorized_map(one, (tf.constant(x), tf.constant(y))).numpy()
    expected = [one((x[i], y[i])) for i in range(4)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_tensorflows_own_way_is_left_as_it_was() -> None:
    before = dict(pfor._pfor_converter_registry)
    vectorized_map(lambda v: tf.matmul(v, v), tf.ones((2, 3, 4, 4)))
    with pytest.raises(Exception, match="division by zero"):
        vectorized_map(lambda v: 1 / 0, tf.ones((2, 3)))
    assert pfor._pfor_converter_registry == before


def test_what_cannot_be_vectorised_fills_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "UNROLLED_OUTPUTS", 0)
    logger, records = tf.get_logger(), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        scanned = nj.input_jacobian(lambda x: tf.transpose(tf.scan(running, tf.transpose(x))), np.ones((3, 2)))
        np.testing.assert_allclose(scanned[:, 0], [[1, 0]] * 3, atol=1e-12)
        assert not records
        logger.error("something else")
        assert [record.getMessage() for record in records] == ["something else"]
    finally:
        logger.removeHandler(handler)


def running(total: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.tanh(total + x)
