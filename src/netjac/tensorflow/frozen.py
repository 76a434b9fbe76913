"""A network at one x and one θ, whose rows can be had again: what a `netjac.TiledJacobian` takes its tiles from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never, Self, final

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac import planning
from netjac.blocks.base import Block
from netjac.errors import ModelError, PicklingError

if TYPE_CHECKING:
    from netjac.tensorflow.extractor import Extractor


@final
class FrozenNetwork:
    """Rows of the Jacobian of one network at fixed parameters; see `netjac.tiled.Source`.

    Parameters
    ----------
    extractor
        Of the network.
    x
        Its inputs, as tensors.
    theta : (m,)
        Not copied.
    """

    def __init__(self, extractor: Extractor, x: Sequence[Any], theta: NDArray[Any]) -> None:
        self._extractor = extractor
        self._x = list(x)
        self._theta = theta
        self._state = _state(extractor.trace.program.captured)
        self.footprint = extractor.footprint
        self.dtype = extractor.dtype

    def __reduce__(self) -> Never:
        raise PicklingError(
            "a TiledJacobian computes its tiles with a live network and cannot be pickled. Save the model (model.save) "
            "and x, and call netjac.jacobian(model, x, memory=...) again; or save what is held: the array "
            "J.to_array(), or a Jacobian of some samples, J[samples], which pickles where it fits the budget."
        )

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        return self  # nothing of it changes

    def outputs(self, budget: int) -> NDArray[Any]:
        """The flat outputs (n, l), some samples at a time."""
        tiles = planning.tiles(int(self._x[0].shape[0]), self.footprint.sample_work, budget)
        y: NDArray[Any] | None = None
        for tile in tiles:
            part = self._extractor.outputs([leaf[tile] for leaf in self._x], self._theta)
            if y is None:
                y = np.empty((tiles[-1].stop, part.shape[1]), part.dtype)
            y[tile] = part
        assert y is not None  # there are samples
        return y

    def blocks(self, samples: NDArray[np.intp], rows: slice | NDArray[Any] | None) -> tuple[Block, ...]:
        """The factors of some samples: all outputs, a range of them, or the combinations (samples, q, l)."""
        if _state(self._extractor.trace.program.captured) != self._state:
            raise ModelError(
                "variables of the model that are not trained have changed since this TiledJacobian was made, and its "
                "tiles depend on them; call netjac.jacobian again."
            )
        if len(samples) and samples[-1] - samples[0] + 1 == len(samples) and np.all(np.diff(samples) == 1):
            x = [leaf[int(samples[0]) : int(samples[-1]) + 1] for leaf in self._x]
        else:
            x = [tf.gather(leaf, samples) for leaf in self._x]
        seeds: NDArray[Any] | None = None
        if isinstance(rows, slice):
            seeds = np.arange(rows.start, rows.stop, dtype=np.int32)
        elif rows is not None:
            seeds = rows.transpose(1, 0, 2)
        return self._extractor.factors(self._theta, x, seeds)[1]


def _state(captured: Mapping[str, Any]) -> list[bytes]:
    """Values of the variables that the program reads where they are."""
    values = []
    for handle in captured.values():
        data = getattr(handle, "_handle_data", None)
        if handle.dtype != tf.resource or data is None or not data.is_set or not data.shape_and_type:
            continue  # a constant, or a table
        dtype = tf.as_dtype(data.shape_and_type[0].dtype)
        if dtype.is_floating or dtype.is_integer or dtype.is_bool:
            values.append(np.asarray(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)).tobytes())
    return values
