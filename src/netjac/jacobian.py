"""The Jacobian: a SciPy LinearOperator made of blocks.

Nothing dense is formed until it is asked for. Its verbs are in `operator` and `tilewise`; what they compute with is
in `blocks`, `materialise` and `algebra`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from netjac import algebra, kronecker, materialise
from netjac.blocks.base import Block
from netjac.errors import ShapeError
from netjac.operator import JacobianOperator
from netjac.sites import Coverage
from netjac.spaces import OutputSpace, ParameterSpace


@final
class Jacobian(JacobianOperator):
    """Derivative of n samples' l outputs with respect to m parameters, kept as layer factors.

    Made by `netjac.jacobian`. Rows are sample-major (row i·l + j is output j of sample i), columns are the variables
    in order, each flattened in C order.

    Parameters
    ----------
    parameters
        The columns.
    output_space
        What the l outputs of a sample are.
    y : (n, l)
        The outputs the derivative belongs to.
    blocks
        What the Jacobian is the sum of.
    coverage
        What became of each variable.
    dtype
        Of products with vectors no wider, and of `to_array`; by default that of ``y``.

    Attributes
    ----------
    shape : (n*l, m)
    dtype : numpy.dtype
    n, l, m : int
        Samples, outputs a sample, parameters.
    y : (n, l), read-only
        The outputs, flat.
    parameters, output_space, coverage
        As given.

    Examples
    --------
    >>> from netjac.examples import linear_layer
    >>> import numpy as np
    >>> J = linear_layer()  # y = x W + b
    >>> J.shape, J.n, J.l, J.m
    ((6, 8), 3, 2, 8)
    >>> v = np.ones(J.m)
    >>> np.allclose(J @ v, np.asarray(J) @ v)
    True
    """

    def __init__(
        self,
        parameters: ParameterSpace,
        output_space: OutputSpace,
        y: ArrayLike,
        blocks: Sequence[Block],
        coverage: Coverage,
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(parameters, output_space, y, coverage, dtype)
        for block in blocks:
            if block.n != self.n or block.l != self.l:
                raise ShapeError(
                    f"y has shape {(self.n, self.l)} and one of the blocks belongs to {(block.n, block.l)}."
                )
        self.blocks = tuple(blocks)

    # ---- what it is

    @property
    def nbytes(self) -> int:
        """Bytes of the factors held; the dense matrix would take ``n * l * m * dtype.itemsize``."""
        return sum(block.nbytes for block in self.blocks)

    def __repr__(self) -> str:
        dense = self.n * self.l * self.m * self.dtype.itemsize
        return (
            f"<Jacobian of {self.n} samples × {self.l} outputs with respect to {self.m} parameters: "
            f"shape {self.shape}, {self.dtype}, {_megabytes(self.nbytes)} factored, {_megabytes(dense)} dense>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            Jacobian,
            (self.parameters, self.output_space, self.y, self.blocks, self.coverage, self.dtype),
        )

    @cached_property
    def cover(self) -> materialise.Cover:
        """Who of the blocks writes which columns."""
        return materialise.cover_of(self.blocks, self.m)

    @cached_property
    def parts(self) -> algebra.Parts:
        """The blocks in the form `netjac.algebra` works on."""
        borders = tuple((segment.start, segment.stop) for segment in self.parameters.segments)
        return algebra.Parts(self.blocks, self.cover, borders, self.n, self.l, self.m, self.dtype)

    def _grid(self) -> Sequence[tuple[slice, slice]]:
        return [(slice(0, self.n), slice(0, self.l))]

    def _tile(self, samples: slice, outputs: slice) -> Jacobian:
        return self

    def _widened(self, dtype: np.dtype[Any]) -> Jacobian:
        if np.can_cast(dtype, self.dtype):
            return self
        blocks = [algebra.widened(block, dtype) for block in self.blocks]
        return Jacobian(self.parameters, self.output_space, self.y, blocks, self.coverage, dtype)

    def _copied(self, dtype: np.dtype[Any]) -> int:
        return 0 if np.can_cast(dtype, self.dtype) else self.nbytes * dtype.itemsize // self.dtype.itemsize

    def _layers(self, limit: int | None = None) -> int | None:
        return len(kronecker.places(self.parts, limit))

    def _add_product(self, v: NDArray[Any], out: NDArray[Any]) -> None:
        for block in self.blocks:
            block.add_product(v, out)

    def _add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        for block in self.blocks:
            block.add_adjoint(u, out)

    # ---- parts of it

    def _columns(self, space: ParameterSpace, positions: Sequence[int]) -> Jacobian:
        blocks = []
        for position, new in zip(positions, space.segments, strict=True):
            old = self.parameters.segments[position]
            parts = [block.restricted(old.start, old.stop, new.start - old.start) for block in self.blocks]
            blocks += [part for part in parts if part is not None]
        coverage = self.coverage.of(space.names)
        return Jacobian(space, self.output_space, self.y, blocks, coverage, self.dtype)

    def _samples(self, index: slice | NDArray[np.intp]) -> Jacobian:
        blocks = [block.take(index) for block in self.blocks]
        return Jacobian(self.parameters, self.output_space, self.y[index], blocks, self.coverage, self.dtype)

    def _scaled(self, b: NDArray[Any], y: NDArray[Any], space: OutputSpace) -> Jacobian:
        return Jacobian(self.parameters, space, y, [block.scaled(b) for block in self.blocks], self.coverage, b.dtype)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
