"""The pieces that `random_networks` draws: each keeps tensors of shape (n, t, d), t steps of d features.

Whatever a piece makes of them inside (pictures, heads, rows that are steps first and samples second), it gives back
(n, t', d').
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st
from layer_configurations import takes

L = keras.layers
Piece = Callable[[Any], Any]
Sized = tuple[Piece, int, int]
SIZES = st.integers(1, 4)
MOST = 24  # numbers in a sample between two pieces; more are cut
ACTIVATIONS = (tf.tanh, tf.nn.silu, tf.nn.gelu, tf.nn.relu, tf.sin, tf.nn.softplus, tf.identity)
COMPUTED = [
    *("softplus", "normalised", "masked", "symmetric", "joined", "tiled", "standardised", "softmax", "flat", "scaled"),
    *("clipped", "turned", "banded", "outer", "squared", "padded", "low rank"),
]


class Network(keras.Model):
    """Runs what it is given; its variables are those of the layers and weights made for it.

    Parameters
    ----------
    dtype
        Of its weights.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype=dtype)
        self.parts: list[Any] = []
        self.run: Piece = tf.identity

    def call(self, x: Any) -> Any:
        return self.run(x)


class Builder:
    """Draws pieces; collects their layers and weights in a `Network`, shared ones once.

    Parameters
    ----------
    draw
        Hypothesis's.
    seed
        Of the inputs.
    dtype
        Of weights and floating inputs.
    """

    def __init__(self, draw: Any, seed: int, dtype: str) -> None:
        self.draw, self.dtype = draw, dtype
        self.rng = np.random.default_rng(seed)
        self.network = Network(dtype)
        self.names: list[str] = []
        self.shared: dict[Any, Any] = {}
        self.table: Any = None
        self.context: list[Any] = []  # tensors that pieces may look at besides their input, set at each call
        self.context_shapes: list[tuple[int, int]] = []
        self.heavy = 0  # pieces of many operations
        self.single = dtype == "float32"

    # ---- what pieces are made of

    def one_of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def yes(self) -> bool:
        return bool(self.draw(st.booleans()))

    def activation(self) -> Piece:
        return self.one_of(*ACTIVATIONS)

    def weight(self, *shape: int) -> Any:
        trainable = self.draw(st.integers(0, 9)) < 9
        return self.network.add_weight(shape=shape, name=f"v{len(self.network.weights)}", trainable=trainable)

    def layer(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        return self.keep(getattr(L, kind)(*args, **kwargs))

    def keep(self, layer: Any) -> Any:
        layer.trainable = self.draw(st.integers(0, 9)) < 9
        self.network.parts = [*self.network.parts, layer]
        return layer

    def random(self, *shape: int) -> Any:
        return (self.rng.uniform(0.2, 1.2, shape) * self.rng.choice([-1.0, 1.0], shape)).astype(self.dtype)

    def sized(self, f: Piece, t: int, d: int) -> Sized:
        """A piece whose sizes are found by running it once, which also builds its layers; large ones are cut."""
        shape = tuple(f(tf.constant(self.random(1, t, d))).shape)
        if len(shape) == 2:
            g: Piece = lambda x: f(x)[:, None]  # noqa: E731
        elif len(shape) > 3:
            g = lambda x: tf.reshape(f(x), [-1, shape[1], int(np.prod(shape[2:]))])  # noqa: E731
        else:
            g = f
        t, d = (1, shape[1]) if len(shape) == 2 else (shape[1], int(np.prod(shape[2:])))
        if t * d <= MOST:
            return g, t, d
        keep = max(1, MOST // t)
        if keep < d:
            h: Piece = lambda x: g(x)[..., :keep]  # noqa: E731
            return h, t, keep
        return lambda x: g(x)[:, :MOST], MOST, d

    def piece(self, t: int, d: int, depth: int = 0) -> Sized:
        kinds = [name for name in vars(Builder) if name.startswith("p_")]
        kinds += [name for name in vars(Builder) if name.startswith("b_") and depth < 2]
        kind = self.draw(st.sampled_from(kinds))
        self.names.append(f"{kind[2:]}({t},{d})")
        method = getattr(self, kind)
        found: Sized = method(t, d, depth) if kind[0] == "b" else method(t, d)
        return found

    # ---- products

    def kernel(self, d: int, c: int) -> Callable[[], Any]:
        """A kernel (d, c): a variable, or something computed from one or two."""
        kind = self.one_of(*["plain"] * 5, *COMPUTED)
        self.names.append(kind)
        w = self.weight(d, c)
        if kind == "softplus":
            return lambda: tf.nn.softplus(w)
        if kind == "normalised":
            g = self.weight(c)
            return lambda: tf.nn.l2_normalize(tf.convert_to_tensor(w), 0) * g
        if kind == "low rank":
            a, b = self.weight(d, 2), self.weight(2, c)
            return lambda: w + 0.5 * tf.matmul(a, b)
        if kind == "masked":
            mask = self.rng.integers(0, 2, (d, c)).astype(self.dtype)
            return lambda: w * mask
        if kind == "symmetric":
            s = self.weight(d, d)
            return lambda: (s + tf.transpose(s)) @ w
        if kind == "joined":
            v = self.weight(d, 1)
            return lambda: tf.concat([tf.convert_to_tensor(w), tf.convert_to_tensor(v)], 1)[:, 1:]
        if kind == "tiled":
            v = self.weight(d, 1)
            return lambda: tf.tile(v, [1, c]) - w
        if kind == "standardised":
            return lambda: (w - tf.reduce_mean(w, 0)) / (tf.math.reduce_std(w, 0) + 0.3)
        if kind == "softmax":
            return lambda: tf.nn.softmax(tf.convert_to_tensor(w), 0)
        if kind == "flat":
            flat = self.weight(d * c + 1)
            return lambda: tf.reshape(flat[1:], [d, c])
        if kind == "scaled":
            return lambda: w / np.sqrt(d).astype(self.dtype)
        if kind == "clipped":
            return lambda: tf.clip_by_value(tf.convert_to_tensor(w), -0.5, 0.5)
        if kind == "turned":
            v = self.weight(c, d)
            return lambda: tf.reverse(tf.transpose(v), [0])
        if kind == "banded":
            return lambda: tf.linalg.band_part(tf.convert_to_tensor(w), -1, 0)
        if kind == "outer":
            a, b = self.weight(d, 1), self.weight(1, c)
            return lambda: tf.tanh(a * b)
        if kind == "squared":
            return lambda: tf.square(w) * 0.7 - 0.1
        if kind == "padded":
            v = self.weight(d, 1)
            return lambda: tf.pad(tf.convert_to_tensor(v), [[0, 0], [c - 1, 0]])
        return lambda: w

    def p_dense(self, t: int, d: int) -> Sized:
        c, f = self.draw(SIZES), self.activation()
        kernel, b = self.kernel(d, c), self.weight(c)
        forms: list[Piece] = [
            lambda x: f(x @ kernel() + b),
            lambda x: f(tf.tensordot(x, kernel(), 1) - b),
            lambda x: f(tf.einsum("btd,dc->btc", x, kernel())),
            lambda x: f(tf.linalg.matmul(x, tf.transpose(kernel()), transpose_b=True) * b),
            lambda x: f(tf.einsum("dc,btd->bct", kernel(), x)),
            lambda x: f(tf.nn.bias_add(tf.reshape(tf.reshape(x, [-1, d]) @ kernel(), [-1, t, c]), b)),
        ]
        return self.sized(self.one_of(*forms), t, d)

    def p_keras_dense(self, t: int, d: int) -> Sized:
        return self.sized(self.layer("Dense", self.draw(SIZES), self.one_of("tanh", "gelu", None)), t, d)

    def p_einsum_dense(self, t: int, d: int) -> Sized:
        c, h = self.draw(SIZES), self.draw(st.integers(1, 3))
        equation, shape, bias = self.one_of(
            ("btd,de->bte", (None, c), "e"),
            ("btd,dhk->bthk", (None, h, c), "hk"),
            ("btd,ts->bsd", (c, None), None),
            ("btd,td->btd", (t, d), "td"),
            ("btd,tde->bte", (None, c), None),
            ("...x,xy->...y", (t, c), "y"),
        )
        shape = tuple(size or (d if equation.endswith("sd") else t) for size in shape)
        return self.sized(self.layer("EinsumDense", equation, shape, bias_axes=bias), t, d)

    def p_time(self, t: int, d: int) -> Sized:
        s = self.draw(SIZES)
        w, b = self.weight(t, s), self.weight(s, 1)
        return self.sized(lambda x: tf.einsum("btd,ts->bsd", x, w) + b, t, d)

    def p_split(self, t: int, d: int) -> Sized:
        """Two gates from one kernel, as recurrent layers have them."""
        w, b = self.weight(d, 2 * d), self.weight(2 * d)

        def f(x: Any) -> Any:
            left, right = tf.split(tf.convert_to_tensor(w), 2, axis=1)
            gate, shift = tf.split(tf.convert_to_tensor(b), 2)
            return tf.sigmoid(x @ left + gate) * (x @ right + shift)

        return self.sized(f, t, d)

    def p_scale(self, t: int, d: int) -> Sized:
        w = self.weight(*self.one_of((), (d,), (t, 1), (t, d), (1, 1, d)))
        operation = self.one_of(
            tf.add, tf.subtract, tf.multiply, tf.divide, tf.maximum, tf.minimum, tf.math.squared_difference,
            lambda a, b: tf.where(a > b, a, b), lambda a, b: tf.nn.softplus(a) ** b,
        )  # fmt: skip
        turned = self.yes() and operation in (tf.add, tf.subtract, tf.multiply, tf.maximum)
        return self.sized((lambda x: operation(w, x)) if turned else (lambda x: operation(x, w)), t, d)

    def p_prelu(self, t: int, d: int) -> Sized:
        return self.sized(self.layer("PReLU", shared_axes=self.one_of(None, [1], [1, 2])), t, d)

    # ---- shared

    def same(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def p_shared_kernel(self, t: int, d: int) -> Sized:
        w, f = self.same(("kernel", d), lambda: self.weight(d, d)), self.activation()
        forms: list[Piece] = [
            lambda x: f(tf.linalg.matmul(x, w, transpose_b=True)),
            lambda x: f(x @ w),
            lambda x: f(f(x @ w) @ tf.transpose(w)),
            lambda x: f(tf.matmul(x, tf.reverse(tf.convert_to_tensor(w), [1]))),
        ]
        return self.sized(self.one_of(*forms), t, d)

    def p_shared_layer(self, t: int, d: int) -> Sized:
        layer = self.same(("layer", d), lambda: self.layer("Dense", d, "tanh"))
        return self.sized(self.one_of(layer, lambda x: layer(layer(x))), t, d)

    def p_shared_norm(self, t: int, d: int) -> Sized:
        layer = self.same(("norm", d), lambda: self.layer("LayerNormalization", epsilon=0.1))
        return self.sized(lambda x: layer(tf.sin(layer(x))), t, d)

    # ---- convolutions

    def p_conv1d(self, t: int, d: int) -> Sized:
        groups = self.one_of(*(g for g in (1, 1, 2, 3, 4) if d % g == 0))
        padding = self.one_of("same", "valid", "causal")
        stride, dilation = self.one_of((1, 1), (2, 1), (1, 2))
        k = self.draw(st.integers(1, 3))
        k = 1 + min(k - 1, (t - 1) // dilation)
        layer = self.layer(
            "Conv1D", groups * self.draw(st.integers(1, 2)), k, strides=stride, dilation_rate=dilation,
            padding=padding, groups=groups, use_bias=self.yes(), activation=self.one_of("tanh", None),
        )  # fmt: skip
        return self.sized(layer, t, d)

    def p_depthwise1d(self, t: int, d: int) -> Sized:
        kind = self.one_of("DepthwiseConv1D", "SeparableConv1D")
        args = (min(t, 2),) if kind == "DepthwiseConv1D" else (self.draw(SIZES), min(t, 2))
        kwargs = {"strides": self.draw(st.integers(1, 2)), "depth_multiplier": self.draw(st.integers(1, 2))}
        return self.sized(self.layer(kind, *args, padding=self.one_of("same", "valid"), **kwargs), t, d)

    def p_transposed1d(self, t: int, d: int) -> Sized:
        layer = self.layer(
            "Conv1DTranspose", self.draw(st.integers(1, 3)), self.draw(st.integers(1, 3)),
            strides=self.draw(st.integers(1, 3)), padding=self.one_of("same", "valid"),
        )  # fmt: skip
        return self.sized(layer, t, d)

    def p_picture(self, t: int, d: int) -> Sized:
        """(n, t, d) as a picture of one channel, or of as many as there are features."""
        kind = self.one_of("Conv2D", "DepthwiseConv2D", "SeparableConv2D", "Conv2DTranspose", "raw", "nested")
        channels = self.yes()
        h, w = (t, 1) if channels else (t, d)
        window = (self.draw(st.integers(1, min(h, 2))), self.draw(st.integers(1, min(w, 3))))
        stride = self.one_of(1, 1, 2)
        padding = self.one_of("same", "valid")
        if kind == "raw":
            kernel = self.weight(*window, d if channels else 1, 2)
            f: Piece = lambda x: tf.nn.conv2d(x, kernel, stride, [[0, 0], [1, 0], [0, 1], [0, 0]])  # noqa: E731
        elif kind == "nested":
            f = self.keep(L.TimeDistributed(L.Conv1D(2, window[1], padding=padding)))
        else:
            args = (window,) if kind == "DepthwiseConv2D" else (2, window)
            f = self.layer(kind, *args, strides=stride, padding=padding)
        shape = [-1, h, w, d if channels else 1]
        return self.sized(lambda x: f(tf.reshape(x, shape)), t, d)

    # ---- normalisation, attention, steps

    def p_norm(self, t: int, d: int) -> Sized:
        kind = self.one_of("Layer", "Layer time", "Batch", "Batch", "Group", "RMS", "Spectral", "raw")
        if kind == "raw":
            gain, shift = self.weight(d), self.weight(d)

            def normalised(x: Any) -> Any:
                mean, variance = tf.nn.moments(x, [1, 2], keepdims=True)
                return (x - mean) * tf.math.rsqrt(variance + 0.5) * gain + shift

            return self.sized(normalised, t, d)
        if kind == "RMS" and takes("RMSNormalization"):
            return self.sized(self.layer("RMSNormalization", epsilon=0.1), t, d)
        if kind == "Batch":
            axis = self.one_of(-1, 1)
            return self.sized(self.layer("BatchNormalization", axis=axis, scale=self.yes(), epsilon=0.1), t, d)
        if kind == "Group":
            return self.sized(self.layer("GroupNormalization", self.one_of(1, d, -1), epsilon=0.1), t, d)
        if kind == "Spectral":
            return self.sized(self.keep(L.SpectralNormalization(L.Dense(self.draw(SIZES)))), t, d)
        axis = 1 if kind == "Layer time" else self.one_of(-1, (1, 2))
        return self.sized(self.layer("LayerNormalization", axis=axis, epsilon=0.1), t, d)

    def p_attention(self, t: int, d: int) -> Sized:
        self.heavy += 1
        if self.heavy > 2:
            return self.p_dense(t, d)
        kind = self.one_of("multi", "grouped", "scaled", "additive", "raw")
        causal = self.yes()
        if kind == "multi":
            layer = self.layer("MultiHeadAttention", self.draw(st.integers(1, 2)), 2, use_bias=self.yes())
        elif kind == "grouped" and takes("GroupQueryAttention"):
            layer = self.layer("GroupQueryAttention", 2, 4, 2, use_bias=self.yes())
        elif kind == "scaled":
            layer = self.layer("Attention", use_scale=True, score_mode=self.one_of("dot", "concat"))
            return self.sized(lambda x: layer([x, tf.sin(x)], use_causal_mask=causal), t, d)
        elif kind == "additive":
            layer = self.layer("AdditiveAttention")
            return self.sized(lambda x: layer([x, x], use_causal_mask=causal), t, d)
        else:
            q, k = self.weight(d, 2), self.same(("kernel", d), lambda: self.weight(d, d))
            return self.sized(
                lambda x: tf.nn.softmax(tf.matmul(x @ q, (x @ k)[:, :, :1] * q[0], transpose_b=True)) @ x, t, d
            )
        return self.sized(lambda x: layer(x, x, use_causal_mask=causal), t, d)

    def p_across(self, t: int, d: int) -> Sized:
        """Attention to, or a gate by, another input."""
        if not self.context_shapes:
            return self.p_attention(t, d)
        i = self.draw(st.integers(0, len(self.context_shapes) - 1))
        e = self.context_shapes[i][1]
        if self.yes():
            layer = self.layer("MultiHeadAttention", 1, 2)
            other = tf.constant(self.random(1, *self.context_shapes[i]))
            self.context = [other] * len(self.context_shapes)
            return self.sized(lambda x: layer(x, self.context[i]), t, d)
        w = self.weight(e, d)
        self.context = [tf.constant(self.random(1, *shape)) for shape in self.context_shapes]
        return self.sized(lambda x: x * tf.sigmoid(tf.reduce_mean(self.context[i], 1, keepdims=True) @ w), t, d)

    def p_recurrent(self, t: int, d: int) -> Sized:
        self.heavy += 1
        if self.heavy > 2:
            return self.p_dense(t, d)
        kind = self.one_of("SimpleRNN", "LSTM", "GRU", "cells")
        c = self.draw(st.integers(1, 3))
        kwargs = {"return_sequences": self.yes(), "go_backwards": self.yes()}
        if kind == "cells":
            return self.sized(self.keep(L.RNN([L.SimpleRNNCell(c), L.GRUCell(2)], **kwargs)), t, d)
        if self.draw(st.integers(0, 2)) == 0:
            del kwargs["go_backwards"]
            merge = self.one_of("concat", "sum", "mul", "ave")
            return self.sized(self.keep(L.Bidirectional(getattr(L, kind)(c, **kwargs), merge_mode=merge)), t, d)
        return self.sized(self.layer(kind, c, **kwargs), t, d)

    def p_loop(self, t: int, d: int) -> Sized:
        """A recurrence written out, its kernel used at every step."""
        w, u, c = self.weight(d, 2), self.weight(2, 2), self.yes()

        def f(x: Any) -> Any:
            h = tf.zeros_like(x[:, 0]) @ w
            states = []
            for step in tf.unstack(x, axis=1):
                h = tf.tanh(step @ w + h @ u)
                states.append(h)
            return tf.stack(states, 1) if c else h

        return self.sized(f, t, d)

    def p_distributed(self, t: int, d: int) -> Sized:
        inner = self.one_of(L.Dense(self.draw(SIZES)), L.LayerNormalization(epsilon=0.1))
        return self.sized(self.keep(L.TimeDistributed(inner)), t, d)

    # ---- where the samples lie

    def p_time_major(self, t: int, d: int) -> Sized:
        """Through something whose first axis is time, or whose rows are steps first and samples second."""
        w = self.same(("kernel", d), lambda: self.weight(d, d))
        b = self.weight(d)
        kind = self.one_of("rows", "einsum", "dense", "both", "norm", "loop")
        self.names.append(kind)
        layer = self.layer("Dense", self.draw(SIZES)) if kind == "dense" else None
        layer = self.layer("LayerNormalization", epsilon=0.1) if kind == "norm" else layer

        def f(x: Any) -> Any:
            turned = tf.transpose(x, [1, 0, 2])
            if kind == "rows":
                turned = tf.reshape(tf.tanh(tf.reshape(turned, [-1, d]) @ w + b), [t, -1, d])
            elif kind == "einsum":
                turned = tf.sin(tf.einsum("tbd,dc->tbc", turned, w)) * b
            elif layer is not None:
                turned = layer(turned)
            elif kind == "loop":
                turned = tf.stack([tf.tanh(turned[i] @ w + b) for i in reversed(range(t))])
            else:  # features first, the samples last
                last = tf.transpose(x, [2, 1, 0])
                return tf.transpose(tf.einsum("dtb,dc->ctb", last, w) + b[:, None, None], [2, 1, 0])
            return tf.transpose(turned, [1, 0, 2])

        return self.sized(f, t, d)

    def p_folded(self, t: int, d: int) -> Sized:
        """Samples and steps merged to one axis, samples first."""
        layer, w = self.layer("Dense", self.draw(SIZES), "tanh"), self.weight(t, 1)

        def f(x: Any) -> Any:
            y = tf.reshape(layer(tf.reshape(x, [-1, d])), [-1, t, layer.units])
            return y * w

        return self.sized(f, t, d)

    def p_moved(self, t: int, d: int) -> Sized:
        """Entries moved about: no weights, or one that meets them where they went."""
        index = self.rng.integers(0, t, 3)
        start = self.draw(st.integers(0, t - 1))
        w = self.weight(d)
        forms: list[Piece] = [
            lambda x: tf.transpose(x, [0, 2, 1]),
            lambda x: tf.reshape(x, [-1, d, t]),
            lambda x: tf.reshape(x, [-1, 1, t * d]),
            lambda x: x[:, start:] * w,
            lambda x: tf.gather(x, index, axis=1) * w,
            lambda x: tf.reverse(x, [1]) + w,
            lambda x: tf.pad(x, [[0, 0], [1, 0], [0, 1]]),
            lambda x: tf.pad(x, [[0, 0], [0, t - 1], [0, 0]], "REFLECT"),
            lambda x: tf.roll(x, 1, 1) - w,
            lambda x: x[:, ::2, ::-1] * w,
            lambda x: tf.tile(x, [1, 2, 1]),
            lambda x: tf.stack(tf.unstack(x, axis=1)[::-1], 1) * w,
            lambda x: tf.repeat(x, 2, axis=1),
            lambda x: x[..., None] * w[:, None],
        ]
        return self.sized(self.one_of(*forms), t, d)

    def p_pooled(self, t: int, d: int) -> Sized:
        layer = self.one_of(
            L.MaxPooling1D(min(2, t), padding=self.one_of("same", "valid")),
            L.AveragePooling1D(min(2, t), 1, padding=self.one_of("same", "valid")),
            L.GlobalAveragePooling1D(), L.GlobalMaxPooling1D(), L.UpSampling1D(2), L.ZeroPadding1D((1, 0)),
            lambda x: tf.reduce_max(x, 1), lambda x: tf.reduce_sum(x, -1), lambda x: tf.cumsum(x, 1),
            lambda x: tf.math.reduce_logsumexp(x, 2, keepdims=True), lambda x: tf.sort(x, axis=1),
            lambda x: tf.nn.softmax(x), lambda x: tf.nn.l2_normalize(x, -1),
            lambda x: tf.matmul(x, x, transpose_a=True),
        )  # fmt: skip
        return self.sized(layer, t, d)

    def p_single(self, t: int, d: int) -> Sized:
        """A part in single precision."""
        w, dtype = self.weight(d), self.dtype
        self.single = True
        return self.sized(
            lambda x: tf.cast(tf.cast(x, "float32") * tf.cast(tf.convert_to_tensor(w), "float32"), dtype), t, d
        )

    def p_slice_of_weights(self, t: int, d: int) -> Sized:
        flat = self.weight(2 * d + 1)
        return self.sized(lambda x: x * flat[1 : d + 1] - flat[d + 1 :], t, d)

    def p_looked_up(self, t: int, d: int) -> Sized:
        """Rows of a table picked by what comes in, made an integer."""
        table = self.weight(4, 3)
        return self.sized(lambda x: tf.gather(table, tf.cast(tf.floor(tf.abs(tf.sin(x[..., 0])) * 3.99), "int32")) +
                          tf.reduce_sum(x, -1, keepdims=True), t, d)  # fmt: skip

    # ---- branches

    def b_residual(self, t: int, d: int, depth: int) -> Sized:
        f, ft, fd = self.piece(t, d, depth + 1)
        if (ft, fd) == (t, d):
            return self.sized(lambda x: x + f(x), t, d)
        w = self.weight(fd, d)
        return self.sized(lambda x: x * tf.reduce_mean(f(x), 1, keepdims=True) @ w, t, d) if fd == d else (f, ft, fd)

    def b_two(self, t: int, d: int, depth: int) -> Sized:
        """Two branches brought to one size and joined, the second fed by the input or by the first."""
        f, ft, fd = self.piece(t, d, depth + 1)
        chained = self.yes()
        g, _, gd = self.piece(*((ft, fd) if chained else (t, d)), depth + 1)
        v, w = self.weight(fd, 2), self.weight(gd, 2)
        join = self.one_of(
            tf.add, tf.multiply, lambda a, b: tf.concat([a, b], 1), lambda a, b: tf.concat([a, b], 2),
            lambda a, b: tf.stack([a, b], 2), tf.maximum,
        )  # fmt: skip

        def both(x: Any) -> Any:
            left = f(x)
            right = g(left if chained else x)
            return join(tf.reduce_mean(left @ v, 1, keepdims=True), tf.reduce_sum(right @ w, 1, keepdims=True))

        return self.sized(both, t, d)

    def b_twice(self, t: int, d: int, depth: int) -> Sized:
        """One piece used on two views of its input."""
        f, _, _ = self.piece(t, d, depth + 1)
        return self.sized(lambda x: f(x) - 0.5 * f(tf.reverse(x, [1])), t, d)
