"""neural-tangents: the empirical tangent kernel J Jᵀ in each of its ways, and its product with a vector.

It runs on a JAX of its own; `tangents-requirements.txt` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import neural_tangents as nt
import numpy as np

from benchmarks.frameworks.gram import prepared
from benchmarks.frameworks.jax_peers import Setting, Weights
from benchmarks.task import Prepared, Task

PACKAGES = ("neural-tangents", "jax", "jaxlib", "numpy")


def gram(task: Task, implementation: nt.NtkImplementation) -> Prepared:
    """``empirical_ntk_fn`` of all outputs, made one matrix inside the same compiled function."""
    setting = Setting(task)
    kernel = nt.empirical_ntk_fn(
        setting.function, trace_axes=(), diagonal_axes=(), vmap_axes=0, implementation=implementation
    )
    rows = task.n * task.network.outputs

    @jax.jit
    def function(weights: Weights, x: Any) -> Any:
        blocks = kernel(x, None, weights)  # (n, n, l, l)
        return setting.function(weights, x), blocks.transpose(0, 2, 1, 3).reshape(rows, rows)

    return prepared(task, lambda: jax.block_until_ready(function(setting.weights, setting.x)))


def vector(task: Task) -> Prepared:
    """``empirical_ntk_vp_fn``."""
    setting = Setting(task)
    u = setting.cotangent

    @jax.jit
    def function(weights: Weights, x: Any, u: Any) -> Any:
        return nt.empirical_ntk_vp_fn(setting.function, x, None, weights)(u)

    return Prepared(
        lambda: jax.block_until_ready(function(setting.weights, setting.x, u)),
        lambda result: {"kernel": np.asarray(result)},
    )


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "jacobian-contraction": partial(gram, implementation=nt.NtkImplementation.JACOBIAN_CONTRACTION),
    "vector-products": partial(gram, implementation=nt.NtkImplementation.NTK_VECTOR_PRODUCTS),
    "structured-derivatives": partial(gram, implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES),
    "kernel": vector,
}
