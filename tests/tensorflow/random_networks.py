"""Small networks drawn at random from every supported piece, for the comparison with the tape.

`networks` draws the pieces (see `random_pieces`), the inputs and the form in which netjac is given the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st
from layer_configurations import built_in
from oracles import randomise
from random_pieces import SIZES, Builder, Network, Piece

LEAVES = ["floats", "tokens", "both", "pair"]


class SelfDifferentiating(keras.Model):
    """A network's outputs, and the gradient of a function of them with respect to its floating inputs."""

    def __init__(self, network: Network, dtype: str) -> None:
        super().__init__(dtype=dtype)
        self.network = network

    def call(self, x: Any) -> Any:
        leaves = [leaf for leaf in tf.nest.flatten(x) if leaf.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            y = self.network(x)
            energy = tf.add_n([tf.reduce_sum(tf.sin(part)) for part in tf.nest.flatten(y)])
        forces = tape.gradient(energy, leaves, unconnected_gradients="zero")
        return {"y": y, "forces": [-f for f in forces]}


@dataclass
class Drawn:
    """A network, its batch, and what an example prints of it."""

    network: Any
    x: Any
    variables: list[Any] | None
    model: Any
    tol: float
    pieces: list[str] = field(default_factory=list)


def inputs(builder: Builder, n: int, kind: str) -> tuple[Any, Piece, int, int]:
    """x of n samples; how to begin with it, and the sizes that gives."""
    t, d = builder.draw(SIZES), builder.draw(SIZES)
    floats = builder.random(n, t, d)
    table = builder.weight(5, d)
    tokens = builder.rng.integers(0, 5, (n, t)).astype(builder.one_of("int32", "int64"))
    ways: list[Callable[[], Piece]] = [
        lambda: builder.layer("Embedding", 5, d),
        lambda: lambda i: tf.gather(table, i),
        lambda: lambda i: tf.one_hot(i, 5, dtype=builder.dtype) @ table,
    ]
    builder.table = table
    embed: Piece = tf.identity
    if kind in ("tokens", "both"):
        embed = builder.one_of(*ways)()
        embed(tokens[:1])
    if kind == "tokens":
        return tokens, embed, t, d
    if kind == "both":
        return {"tokens": tokens, "floats": floats}, lambda x: embed(x["tokens"]) * x["floats"], t, d
    if kind == "pair":
        other = builder.random(n, 2, 3)
        builder.context_shapes = [(2, 3)]

        def begin(x: Any) -> Any:
            builder.context = [x[1]]
            return x[0]

        return [floats, other], begin, t, d
    return floats, tf.identity, t, d


def ending(builder: Builder, t: int, d: int, heavy: bool) -> Piece:
    """From (n, t, d) to outputs: as they are, through a head, the tied table, or several at once."""
    size = t * d
    few = [1, 2] if heavy else [1, 2, 3, 17, 20]  # over 16 are swept at once
    kinds = ["head", "head", "several"] + ["plain"] * (size <= (3 if heavy else 5) or 16 < size <= 20)
    kinds += ["tied"] * (builder.table.shape[1] == d and t == 1 and not heavy)
    kind = builder.one_of(*kinds)
    builder.names.append(kind)
    if kind == "plain":
        return tf.identity
    if kind == "tied":
        return lambda x: tf.linalg.matmul(x, builder.table, transpose_b=True)
    head = builder.weight(size, builder.one_of(*few))
    if kind == "head":
        return lambda x: tf.reshape(x, [-1, size]) @ head
    mean = builder.weight(d)
    return lambda x: {
        "head": tf.reshape(x, [-1, size]) @ head[:, :2],
        "rest": [tf.reduce_mean(x * mean, [1, 2]), x[:, :1, :1]],
    }


@st.composite
def networks(draw: Any) -> Drawn:
    """A network, a batch, and the form in which netjac is given it."""
    seed = draw(st.integers(0, 2**16))
    dtype = draw(st.sampled_from(["float64", "float64", "float64", "float32"]))
    with built_in(dtype):
        builder = Builder(draw, seed, dtype)
        kind = draw(st.sampled_from(LEAVES))
        x, begin, t, d = inputs(builder, draw(st.integers(1, 7)), kind)
        pieces: list[Piece] = []
        depth = draw(st.integers(1, 6))
        for _ in range(depth):
            piece, t, d = builder.piece(t, d)
            pieces.append(piece)
        end = ending(builder, t, d, heavy=builder.heavy > 0)

        def run(x: Any) -> Any:
            h = begin(x)
            for piece in pieces:
                h = piece(h)
            return end(h)

        network = builder.network
        network.run = run
        first = tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf[:1]), x)
        network(first)
        model: Any = network
        form = draw(st.sampled_from(["model", "model", "function", "functional", "gradient"]))
        if form == "gradient" and (depth > 2 or kind == "tokens" or builder.heavy or len(builder.names) > 6):
            form = "model"
        if form == "gradient":
            model = SelfDifferentiating(network, dtype)
            model(first)
        elif form == "functional":
            names = iter(sorted(x) if isinstance(x, dict) else "ab")
            given = tf.nest.map_structure(
                lambda leaf: keras.Input(leaf.shape[1:], dtype=leaf.dtype.name, name=next(names)), x
            )
            model = keras.Model(given, network(given))
        randomise(model.weights, seed)
        builder.names.append(form)
    variables = list(model.trainable_variables)
    as_function = form == "function"
    return Drawn(
        (lambda x: network(x)) if as_function else model,
        x,
        variables if as_function else None,
        model,
        1e-3 if builder.single else 1e-9,
        builder.names,
    )


def oracle(model: Any, x: Any, variables: Sequence[Any]) -> list[np.ndarray]:
    """One array (n, l, size) a variable: the tape around each sample alone, one output at a time, compiled once."""
    leaves = tf.nest.flatten(x)
    specs = [tf.TensorSpec((1, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    resources = [v.value for v in variables]

    @tf.function(autograph=False)
    def row(j: Any, *sample: Any) -> Any:
        with tf.GradientTape() as tape:
            parts = tf.nest.flatten(model(tf.nest.pack_sequence_as(x, list(sample))))
            y = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
            picked = tf.reduce_sum(y * tf.one_hot(j, tf.size(y), dtype=y.dtype))
        found = tape.gradient(picked, resources, unconnected_gradients="zero")
        return y, [tf.reshape(tf.convert_to_tensor(d), [-1]) for d in found]

    compiled = row.get_concrete_function(tf.TensorSpec((), tf.int32), *specs)
    blocks: list[list[list[np.ndarray]]] = [[] for _ in resources]
    for i in range(len(leaves[0])):
        sample = [tf.constant(leaf[i : i + 1]) for leaf in leaves]
        y, _ = compiled(tf.constant(0), *sample)
        rows = [compiled(tf.constant(j), *sample)[1] for j in range(len(y))]
        for block, found in zip(blocks, zip(*rows, strict=True), strict=True):
            block.append([np.asarray(d, np.float64) for d in found])
    return [np.asarray(block) for block in blocks]
