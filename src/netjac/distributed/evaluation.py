"""A network on a cluster as what `netjac.LeastSquares` evaluates."""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from netjac.distributed import worker
from netjac.distributed.placing import Placed
from netjac.distributed.tiles import DistributedJacobian
from netjac.spaces import OutputSpace


@final
class DistributedEvaluator:
    """Outputs and Jacobian of one network at one x, for any θ, on a cluster; made by `evaluator`.

    Attributes
    ----------
    parameters : ParameterSpace
        The columns, with the live variables of the model here.
    output_space : OutputSpace
        The rows.
    n : int
        Samples.
    samples : list of slice
        The tiles.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self.parameters = placed.parameters
        self.output_space: OutputSpace = placed.look.output_space
        self.n = placed.n
        self.samples = list(placed.samples)

    def evaluate(self, theta: ArrayLike | None = None) -> DistributedJacobian:
        """The Jacobian at ``theta`` (m,), or at the model's present parameters; its factors stay on the workers."""
        placed = self._placed
        vector = self.parameters.ravel() if theta is None else self.parameters.vector(theta)
        held = placed.each(worker.evaluate, placed.vector(vector))
        y = np.concatenate(placed.cluster.gather(held.each(worker.outputs)))
        return DistributedJacobian(held, self.parameters, self.output_space, y, placed.look.coverage, placed.look.dtype)

    def second_product(self, theta: ArrayLike, u: ArrayLike, v: ArrayLike) -> NDArray[np.float64]:
        """Σ u[n, l] ∇²y[n, l] v (m,), for u (n, l) and v (m,)."""
        placed, rows = self._placed, np.asarray(u, np.float64)
        cut = [rows[samples] for samples in self.samples]
        held = placed.each(worker.second_product, placed.vector(theta), cut, placed.vector(v))
        return placed.cluster.total(held.tiles)
