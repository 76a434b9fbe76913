"""NetKet: its Jacobian, and its quantum geometric tensor Jᵀ C J / N with C = 1 − (1/N) 1 1ᵀ, as a product.

NetKet differentiates functions with one output a sample: the outputs here are made samples (x, j) of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import netket as nk

from benchmarks.frameworks.gram import by_tiles, prepared
from benchmarks.frameworks.jax_peers import Setting
from benchmarks.task import Prepared, Task

PACKAGES = ("netket", "jax", "jaxlib", "numpy")


class _Scalar(Setting):
    """The network as a function of (x, j), and the pairs, sample-major."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        l = task.network.outputs
        column = jnp.tile(jnp.arange(l, dtype=self.x.dtype), task.n)[:, None]
        self.pairs = jnp.concatenate([jnp.repeat(self.x, l, axis=0), column], axis=1)

    def apply(self, variables: dict[str, Any], pairs: Any) -> Any:
        """Output j at x, for each pair."""
        y = self.function(variables["params"], pairs[:, :-1])
        return jnp.take_along_axis(y, pairs[:, -1:].astype(int), axis=1)[:, 0]


def gram(task: Task) -> Prepared:
    """J Jᵀ from the dense matrices that ``nk.jax.jacobian`` gives of some samples."""
    setting = _Scalar(task)
    l, apply = task.network.outputs, setting.apply
    batch = jax.jit(setting.function)
    multiply = jax.jit(lambda a, b: a @ b.T)

    def form(samples: slice) -> tuple[Any, Any]:
        pairs = setting.pairs[samples.start * l : samples.stop * l]
        rows = nk.jax.jacobian(apply, setting.weights, pairs, {}, mode="real", dense=True)
        return batch(setting.weights, setting.x[samples]), rows

    return prepared(task, lambda: by_tiles(task, form, multiply))


def centred(task: Task) -> Prepared:
    """Product of ``QGTOnTheFly``."""
    setting = _Scalar(task)
    state = SimpleNamespace(
        _apply_fun=setting.apply,
        parameters=setting.weights,
        model_state={},
        samples=setting.pairs,
        chunk_size=None,
    )
    tensor, v = nk.optimizer.qgt.QGTOnTheFly(state), setting.direction
    rows = task.n * task.network.outputs
    return Prepared(
        lambda: jax.block_until_ready(tensor @ v),
        lambda result: {"centred": rows * setting.columns(result)},
    )


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {"gram": gram, "centred": centred}
