"""Small networks drawn at random from pieces, against the tape: what no list of layers thinks of."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import check

Piece = Callable[[Any], Any]
FUZZ = int(os.environ.get("NETJAC_FUZZ", "0"))  # so many fresh networks, in place of 30 that are always the same


class Builder:
    """Draws pieces that keep tensors of shape (n, t, d); collects their variables, the shared ones once."""

    def __init__(self, draw: Any, seed: int) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(seed)
        self.variables: list[Any] = []
        self.kernels: dict[int, Any] = {}

    def weight(self, *shape: int) -> Any:
        value = self.rng.uniform(0.2, 0.7, shape) * self.rng.choice([-1.0, 1.0], shape)
        self.variables.append(tf.Variable(value, name=f"v{len(self.variables)}"))
        return self.variables[-1]

    def activation(self) -> Piece:
        return self.draw(st.sampled_from([tf.tanh, tf.nn.silu, tf.nn.gelu, tf.sin, tf.identity]))

    def piece(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        """A piece and the sizes that come out of it."""
        kinds = ["dense", "time", "conv", "norm", "shared", "time_major", "slice", "scale", "split", "attention"]
        kind = self.draw(st.sampled_from(kinds + ["residual", "sum"] * (depth < 2)))
        return getattr(self, kind)(t, d, depth)

    def dense(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        c, f = self.draw(st.integers(1, 4)), self.activation()
        w = self.weight(d, c) if self.draw(st.booleans()) else tf.nn.softplus
        if not isinstance(w, tf.Variable):  # a kernel made positive, kept transposed
            raw = self.weight(c, d)
            return lambda x: f(tf.tensordot(x, tf.transpose(tf.nn.softplus(raw)), 1)), t, c
        b = self.weight(c)
        return lambda x: f(x @ w + b), t, c

    def time(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        s = self.draw(st.integers(1, 4))
        w, b = self.weight(t, s), self.weight(s, 1)
        return lambda x: tf.einsum("btd,ts->bsd", x, w) + b, s, d

    def conv(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        k, c = self.draw(st.integers(1, min(t, 3))), self.draw(st.integers(1, 3))
        stride, padding = self.draw(st.integers(1, 2)), self.draw(st.sampled_from(["SAME", "VALID"]))
        w, f = self.weight(k, d, c), self.activation()
        out = -(-t // stride) if padding == "SAME" else (t - k) // stride + 1
        return lambda x: f(tf.nn.conv1d(x, w, stride, padding)), out, c

    def norm(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        gain, shift = self.weight(d), self.weight(d)

        def normalised(x: Any) -> Any:
            mean, variance = tf.nn.moments(x, [1, 2], keepdims=True)
            return (x - mean) * tf.math.rsqrt(variance + 0.5) * gain + shift

        return normalised, t, d

    def shared_kernel(self, d: int) -> Any:
        if d not in self.kernels:
            self.kernels[d] = self.weight(d, d)
        return self.kernels[d]

    def shared(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        return self.shared_layer(d), t, d

    def shared_layer(self, d: int) -> Piece:
        w, f = self.shared_kernel(d), self.activation()
        return (
            (lambda x: f(tf.linalg.matmul(x, w, transpose_b=True))) if self.draw(st.booleans()) else lambda x: f(x @ w)
        )

    def time_major(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        """Through a matrix whose rows are steps first and samples second."""
        w, b = self.shared_kernel(d), self.weight(d)

        def f(x: Any) -> Any:
            rows = tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, d])
            return tf.transpose(tf.reshape(tf.tanh(rows @ w + b), [t, -1, d]), [1, 0, 2])

        return f, t, d

    def slice(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        start = self.draw(st.integers(0, t - 1))
        flat, size = self.weight(2 * d + 1), d
        return lambda x: x[:, start:] * flat[1 : size + 1] - flat[size + 1 :], t - start, d

    def scale(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        shape = self.draw(st.sampled_from([(), (d,), (t, 1), (t, d), (1, 1, d)]))
        w = self.weight(*shape)
        operation = self.draw(st.sampled_from([tf.add, tf.subtract, tf.multiply, tf.divide, tf.maximum]))
        turned = self.draw(st.booleans()) and operation is not tf.divide
        return (lambda x: operation(w, x)) if turned else (lambda x: operation(x, w)), t, d

    def split(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        """Two gates from one kernel, as recurrent layers have them."""
        w, b = self.weight(d, 2 * d), self.weight(2 * d)

        def f(x: Any) -> Any:
            left, right = tf.split(w, 2, axis=1)
            gate, shift = tf.split(b, 2)
            return tf.sigmoid(x @ left + gate) * (x @ right + shift)

        return f, t, d

    def attention(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        q, k = self.weight(d, 2), self.shared_kernel(d)
        return lambda x: tf.nn.softmax(tf.matmul(x @ q, (x @ k)[:, :, :1] * q[0], transpose_b=True)) @ x, t, d

    def residual(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        inner = self.shared_layer(d)
        return lambda x: x + inner(x), t, d

    def sum(self, t: int, d: int, depth: int) -> tuple[Piece, int, int]:
        """Two branches brought to one size and added."""
        (f, _, fd), (g, _, gd) = self.piece(t, d, depth + 1), self.piece(t, d, depth + 1)
        v, w = self.weight(fd, 2), self.weight(gd, 2)
        return lambda x: tf.reduce_mean(f(x) @ v, 1, keepdims=True) + tf.reduce_sum(g(x) @ w, 1, keepdims=True), 1, 2


@st.composite
def networks(draw: Any) -> tuple[Piece, np.ndarray, list[Any]]:
    """A function of a batch, a batch, and the function's variables."""
    seed = draw(st.integers(0, 2**16))
    n, t, d = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    builder = Builder(draw, seed)
    tokens = draw(st.booleans())
    pieces: list[Piece] = []
    if tokens:
        table = builder.weight(6, d)
        x = builder.rng.integers(0, 6, (n, t)).astype("int32")
        pieces.append(lambda i: tf.gather(table, i))
    else:
        x = builder.rng.normal(size=(n, t, d))
    for _ in range(draw(st.integers(1, 4))):
        piece, t, d = builder.piece(t, d, 0)
        pieces.append(piece)
    if not builder.variables or draw(st.booleans()):
        l = draw(st.sampled_from([1, 2, 18]))
        head = builder.weight(t * d, l)
        size = t * d
        pieces.append(lambda h: tf.reshape(h, [-1, size]) @ head)

    def network(x: Any) -> Any:
        for piece in pieces:
            x = piece(x)
        return x

    return network, x, builder.variables


@settings(
    max_examples=FUZZ or 30, deadline=None, derandomize=not FUZZ, suppress_health_check=list(HealthCheck), database=None
)
@given(networks())
def test_random_networks_equal_the_tape(drawn: tuple[Piece, np.ndarray, list[Any]]) -> None:
    network, x, variables = drawn
    # Deep products are ill-conditioned now and then: a hundred times the usual rounding is still far from any mistake.
    check(network, x, variables, tol=1e-10, random=False)
