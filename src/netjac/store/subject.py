"""What is saved: rows of a Jacobian that is there, or of a network at data that are read as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac import api, planning
from netjac.data import Sliced, leaves
from netjac.errors import DataError
from netjac.jacobian import Jacobian
from netjac.operator import JacobianOperator
from netjac.tiled import TiledJacobian


@dataclass(frozen=True, eq=False)
class Subject:
    """Rows to be had a tile at a time.

    Attributes
    ----------
    n : int
        Samples.
    like : JacobianOperator
        With its outputs, parameters, coverage and type; of all samples, or of the first alone.
    tile : (int, int)
        Samples and outputs to compute at once, at most.
    rows
        Takes ranges of samples and of outputs to their Jacobian.
    """

    n: int
    like: JacobianOperator
    tile: tuple[int, int]
    rows: Callable[[slice, slice], Jacobian]


def of_jacobian(J: JacobianOperator) -> Subject:
    """The rows of a Jacobian, in tiles no larger than its own."""
    shapes = [(s.stop - s.start, o.stop - o.start) for s, o in J._grid()] or [(0, 0)]
    tile = max(1, max(s for s, _ in shapes)), max(1, max(l for _, l in shapes))

    def rows(samples: slice, outputs: slice) -> Jacobian:
        return J._tile(samples, outputs) if isinstance(J, TiledJacobian) else _some(J[samples], outputs)

    return Subject(J.n, J, tile, rows)


def of_model(model: Any, data: Sliced, budget: int) -> Subject:
    """The rows of a network's Jacobian at the present parameters, in tiles that fit the budget."""
    evaluator = api._tensorflow().evaluator
    theta = api.parameters(model).ravel()
    network = evaluator(model, data[slice(0, 1)].x)
    like: JacobianOperator = network.evaluate(theta, budget)
    tile = planning.tile_sizes(data.n, like.l, network.footprint, budget)

    def rows(samples: slice, outputs: slice) -> Jacobian:
        x = data[samples].x
        for leaf in leaves(x):
            refuse_not_finite(samples, {"x": np.asarray(leaf)})
        J = evaluator(model, x).evaluate(theta, budget)
        return J._tile(slice(0, J.n), outputs) if isinstance(J, TiledJacobian) else _some(J, outputs)

    return Subject(data.n, like, tile, rows)


def _some(J: JacobianOperator, outputs: slice) -> Jacobian:
    """Some of the outputs."""
    if J.l > outputs.stop - outputs.start:
        chosen = np.eye(J.l, dtype=J.dtype)[outputs]
        J = J.scaled(np.broadcast_to(chosen, (J.n, *chosen.shape)))
    assert isinstance(J, Jacobian)
    return J


def refuse_not_finite(samples: slice, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise where an array (samples, ...) has NaN or infinity: which array, and in which samples."""
    for name, array in arrays.items():
        if array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        finite = np.isfinite(array).reshape(len(array), -1).all(axis=1)
        wrong = samples.start + np.flatnonzero(~finite)
        raise DataError(
            f"{name} is not finite in {len(wrong)} of the samples {samples.start} to {samples.stop - 1}, from sample "
            f"{wrong[0]} to {wrong[-1]}: nothing of this tile was saved, and the store is not complete. Leave these "
            "samples out, or look at what the network computes there."
        )
