"""Jacobians without a framework, held and tiled, for the tests of what is on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac import planning
from netjac.blocks.base import Block
from netjac.jacobian import Jacobian
from netjac.sites import Coverage, CoverageEntry, Treatment
from netjac.spaces import OutputSpace, ParameterSpace, lay_out
from netjac.tiled import TiledJacobian


def held(blocks: Sequence[Block], m: int, dtype: Any = "float64", first: int | None = None) -> Jacobian:
    """A Jacobian of some blocks, with two variables, an output of two parts where l > 1, and outputs y."""
    n, l = blocks[0].n, blocks[0].l
    first = m // 2 if first is None else first
    space = ParameterSpace(lay_out(["a/kernel", "b"], [(first,), (m - first,)], [str(np.dtype(dtype))] * 2))
    outputs = OutputSpace.flat(l, str(np.dtype(dtype)))
    if l > 1:
        outputs = OutputSpace(lay_out(["p", "q"], [(1,), (l - 1,)], [str(np.dtype(dtype))] * 2), {"p": 0, "q": (1,)})
    y = np.random.default_rng(1).standard_normal((n, l)).astype(dtype)
    entry = CoverageEntry("a/kernel", (first,), Treatment.COLLAPSED, "a/MatMul", "MatMul", "smaller so")
    return Jacobian(space, outputs, y, blocks, Coverage((entry,), ("a note",)), dtype)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a held Jacobian: what a `TiledJacobian` asks for its tiles.

    ``before`` is called with the samples of each tile before it is computed, and ``change`` may return other blocks.
    """

    J: Jacobian
    before: Callable[[NDArray[np.intp]], None] = lambda samples: None
    change: Callable[[NDArray[np.intp], tuple[Block, ...]], tuple[Block, ...]] = lambda samples, blocks: blocks

    @property
    def footprint(self) -> planning.Footprint:
        return planning.Footprint(sample=0, row=100)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.J.dtype

    def blocks(self, samples: NDArray[np.intp], rows: slice | NDArray[Any] | None) -> tuple[Block, ...]:
        self.before(samples)
        blocks = tuple(block.take(samples) for block in self.J.blocks)
        if isinstance(rows, slice):
            rows = np.broadcast_to(np.eye(self.J.l)[rows], (len(samples), rows.stop - rows.start, self.J.l))
        if rows is not None:
            blocks = tuple(block.scaled(rows.astype(self.dtype)) for block in blocks)
        return self.change(samples, blocks)


def tiled(J: Jacobian, samples: int, outputs: int | None = None, **how: Any) -> TiledJacobian:
    """The same computed tile by tile: so many samples at a time, or some outputs of one sample."""
    rows = samples * J.l if outputs is None else outputs + 1
    memory = 200 * max(1, rows) if outputs is None else 100 * rows * 2 - 100
    source = Rows(J, **how)
    return TiledJacobian(source, J.parameters, J.output_space, J.y, J.coverage, memory)


def explicit(n: int, l: int, m: int, dtype: Any = "float64") -> Jacobian:
    """A Jacobian of one block with known numbers, all different."""
    from netjac.blocks.base import Placement
    from netjac.blocks.dense import DenseBlock

    values = (1 + np.arange(n * l * m)).reshape(n, l, m).astype(dtype) / 8
    return held([DenseBlock(values, Placement((1, m, 1), (m, 1, 1), 0, (1, m, 1)))], m, dtype)


def factored(n: int, l: int = 2, k: int = 3, c: int = 2) -> Jacobian:
    """A Jacobian of an outer block."""
    from netjac.blocks.base import Placement
    from netjac.blocks.outer import OuterBlock

    rng = np.random.default_rng(0)
    A, D = rng.standard_normal((n, 1, 1, k)), rng.standard_normal((n, l, 1, 1, c))
    return held([OuterBlock(A, D, Placement((1, k, c), (k * c, c, 1), 0, (1, k, c)))], k * c, first=(k - 1) * c)
