"""What a Jacobian is compared with: one sample at a time through the model, and TensorFlow's own tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import netjac as nj
from netjac.sites import Treatment


def randomise(variables: Sequence[Any], seed: int = 1) -> None:
    """Weights away from zero and from each other: |w| in [0.2, 0.8], random signs; all positive for variances."""
    rng = np.random.default_rng(seed)
    for variable in variables:
        if not tf.as_dtype(variable.dtype).is_floating:
            continue
        value = rng.uniform(0.2, 0.8, variable.shape)
        path = getattr(variable, "path", variable.name)
        if "variance" not in path:
            value *= rng.choice([-1.0, 1.0], variable.shape)
        variable.assign(value.astype(tf.as_dtype(variable.dtype).as_numpy_dtype))


def resources(variables: Sequence[Any]) -> list[Any]:
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]


def call(model: Any, x: Any) -> Any:
    return model(x, training=False) if isinstance(model, keras.layers.Layer) else model(x)


def flat_row(structure: Any) -> Any:
    """All outputs of one sample, flattened one after the other, in the widest of their types."""
    leaves = tf.nest.flatten(structure)
    widest = max((leaf.dtype for leaf in leaves), key=lambda d: d.size)
    return tf.concat([tf.cast(tf.reshape(leaf, [-1]), widest) for leaf in leaves], 0)


def sample(x: Any, i: int) -> Any:
    return tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf[i : i + 1]), x)


def count(x: Any) -> int:
    return int(tf.nest.flatten(x)[0].shape[0])


def tape_jacobian(model: Any, x: Any, variables: Sequence[Any]) -> list[np.ndarray]:
    """One array (n, l, size) a variable: each sample alone through the model, each output alone.

    What ``tape.jacobian(y, variables, experimental_use_pfor=False)`` does, for variables of several types too.
    """
    wanted = resources(variables)
    blocks: list[list[np.ndarray]] = [[] for _ in wanted]
    for i in range(count(x)):
        with tf.GradientTape(persistent=True) as tape:
            for variable in wanted:
                tape.watch(variable)
            y = flat_row(call(model, sample(x, i)))
        rows = [
            tape.gradient(
                y, wanted, output_gradients=tf.one_hot(j, len(y), dtype=y.dtype), unconnected_gradients="zero"
            )
            for j in range(len(y))
        ]
        for block, found in zip(blocks, zip(*rows, strict=True), strict=True):
            block.append(np.stack([np.asarray(tf.convert_to_tensor(d), np.float64).reshape(-1) for d in found]))
    return [np.stack(block) for block in blocks]


def limit(*dtypes: Any) -> float:
    """Error allowed in the least precise of the types: 1e-5 in single precision, 1e-12 in double."""
    return max(1e-12 if np.dtype(dtype) == np.float64 else 1e-5 for dtype in dtypes)


def close(actual: Any, expected: Any, what: str, tol: float, floor: float = 0.0) -> None:
    """Every entry within ``tol`` of the largest of ``expected``, or within ``floor``."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert a.shape == e.shape, f"{what}: shape {a.shape}, expected {e.shape}"
    if not e.size:
        return
    assert np.isfinite(e).all(), f"{what}: the oracle is not finite"
    allowed = max(tol * np.abs(e).max(), floor)
    worst = np.unravel_index(np.argmax(np.abs(a - e)), e.shape)
    error = np.abs(a[worst] - e[worst])
    found = f"at {worst} {a[worst]!r}, expected {e[worst]!r} (off by {error:.1e}, allowed {allowed:.1e})"
    assert error <= allowed, f"{what}: {found}"


def compare(J: Any, blocks: Sequence[np.ndarray], tol: float | None = None) -> None:
    """Every verb of ``J`` against the explicit ``blocks`` (n, l, size), one a variable.

    Entries are measured against the largest of their own variable's block. Where a block is nothing but rounding (the
    bias in front of a normalisation, the key bias of attention) 16 units of rounding of the whole matrix are allowed.
    """
    types = [J.dtype, *(segment.dtype for segment in J.parameters.segments)]
    tol = limit(*types) if tol is None else tol
    n, l = blocks[0].shape[:2]
    whole = np.concatenate([b.reshape(n * l, -1) for b in blocks], axis=1)
    assert J.shape == whole.shape
    rounding = max(2.0**-7 if t == "bfloat16" else float(np.finfo(t).eps) for t in types)
    floor = 16 * rounding * np.abs(whole).max(initial=0.0)
    dense = J.to_array()
    for segment, block in zip(J.parameters.segments, blocks, strict=True):
        expected = block.reshape(n * l, -1)
        table = f"{segment.name}\n{J.coverage}"
        close(dense[:, segment.slice], expected, table, tol, floor)
        one = J.columns(segment.name)
        close(one.to_array(), expected, f"columns of {table}", tol, floor)
        size = np.sqrt(segment.size * max(n * l, 1))
        close(one.column_norms(), np.linalg.norm(expected, axis=0), f"column norms of {table}", tol, floor * size)
        close(one.row_norms(), np.linalg.norm(expected, axis=1), f"row norms of {table}", 10 * tol, floor * size)
    rng = np.random.default_rng(3)
    v, u = rng.standard_normal((J.m, 2)), rng.standard_normal((n * l, 2))
    close(J.to_array("(l m) n"), whole.reshape(n, -1).T, "(l m) n", tol, floor)
    # A sum's rounding is that of its terms, so products are measured against the sum of magnitudes.
    spread = np.abs(whole) @ np.abs(v)
    close(J @ v, whole @ v, "J @ v", 0, tol * spread.max(initial=0.0))
    close(J @ v[:, 0], whole @ v[:, 0], "J @ v, a vector", 0, tol * spread.max(initial=0.0))
    spread = np.abs(whole.T) @ np.abs(u)
    close(J.T @ u, whole.T @ u, "J.T @ u", 0, tol * spread.max(initial=0.0))
    close(J.gram(), whole @ whole.T, "gram", 10 * tol)
    close(J.row_norms(), np.linalg.norm(whole, axis=1), "row norms", 10 * tol)
    close(J.column_norms(), np.linalg.norm(whole, axis=0), "column norms", 10 * tol)


def check(
    model: Any,
    x: Any,
    variables: Sequence[Any] | None = None,
    tol: float | None = None,
    random: bool = True,
    jacobian: Callable[..., Any] = nj.jacobian,
) -> Any:
    """Jacobian of ``model`` at ``x``, compared with the tape in everything it can do; at random weights."""
    given = list(model.trainable_variables) if variables is None else list(variables)
    if random:
        randomise(getattr(model, "weights", given))
    J = jacobian(model, x, variables=variables)
    blocks = tape_jacobian(model, x, given)
    compare(J, blocks, tol)
    y = np.stack([np.asarray(flat_row(call(model, sample(x, i))), np.float64) for i in range(count(x))])
    close(J.y, y, "outputs", limit(J.dtype, *(s.dtype for s in J.parameters.segments)) if tol is None else tol)
    for entry in J.coverage.entries:
        assert entry.reason or entry.treatment is Treatment.FACTORED, f"no reason given: {entry}"
    return J


def treatments(J: Any) -> dict[str, set[str]]:
    """For each variable, how its uses were treated."""
    return {name: {t.value for t in J.coverage.treatment(name)} for name in J.parameters.names}
