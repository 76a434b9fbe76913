"""What a Jacobian, its verbs and a fit will take, told before any work; see `netjac.plan`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from netjac import algebra, normal
from netjac.planning import in_words

TEMPORARIES = 8 << 20
"""Bytes of NumPy's temporaries that do not grow with the problem."""


@dataclass(frozen=True)
class FitPlan:
    """What a least-squares fit of f(x) − y by method "netjac" will take; part of `Plan`.

    Attributes
    ----------
    linear_solver : str
        How its steps are computed; see `netjac.least_squares`.
    steps : int
        Bytes of the matrices and vectors for that.
    budget : int or None
        Bytes that factors and matrices together may take; None where there is no limit.
    tile_shape, tiles
        As of `Plan`: of the factors, which are computed anew for each use where there are several tiles.
    peak : int
        Bytes by which memory is expected to grow while it runs.
    """

    linear_solver: str
    steps: int
    budget: int | None
    tile_shape: tuple[int, int]
    tiles: int
    peak: int

    def __str__(self) -> str:
        samples, outputs = self.tile_shape
        factors = "factors held" if self.tiles <= 1 else f"{self.tiles} tiles of up to {samples} × {outputs}"
        return f"{in_words(self.peak)}: steps by {self.linear_solver}, {factors}"


@dataclass(frozen=True)
class Plan:
    """What a Jacobian will take, told before it is computed; made by `netjac.plan`. Prints as a table.

    Attributes
    ----------
    n, l, m : int
        Samples, outputs a sample, parameters.
    dtype : str
        Of the factors.
    factors : int
        Bytes of all factors.
    dense : int
        Bytes of the explicit matrix (n*l, m).
    budget : int or None
        Bytes that the factors, and what is needed on the way to them, may take; None where there is no limit.
    tile_shape : (int, int)
        Samples and outputs of the largest tile.
    tiles : int
        Their number; 1 where everything is held at once.
    peak : int
        Bytes by which memory is expected to grow, at its worst moment, while the Jacobian is computed and (where there
        are several tiles) its products are: factors, temporaries and the outputs (n, l). Results come on top.
    fit : FitPlan or None
        What a fit takes whose residual is f(x) − y, in the same type and within the same budget; None where that is
        too little for a fit.
    """

    n: int
    l: int
    m: int
    dtype: str
    factors: int
    dense: int
    budget: int | None
    tile_shape: tuple[int, int]
    tiles: int
    peak: int
    fit: FitPlan | None = None

    @property
    def whole(self) -> bool:
        """Whether all factors are held at once."""
        return self.tiles <= 1

    @property
    def _kept(self) -> bool:
        return self.budget is None or self.peak <= self.budget

    @property
    def verbs(self) -> dict[str, int]:
        """Bytes by which memory is expected to grow while the Jacobian is computed and a verb is called once, by name.

        Results count; those of ``to_array``, ``gram`` and ``normal`` may be larger than everything else.
        """
        rows, size = self.n * self.l, np.dtype(self.dtype).itemsize
        gram = rows**2 * size
        besides = {
            "to_array": self.dense + min(TEMPORARIES, self.dense),
            "gram": gram + min(algebra.gram_work(self.l, self.l, gram, size).usual, gram),
            "normal": self.m**2 * size + min(normal.normal_work(self.m, size).usual, 2 * self.dense),
            "column_norms": self.m * size + min(TEMPORARIES, self.factors),
        }
        held = self.factors + rows * size if self.whole else self.peak
        return {verb: max(self.peak, held + more) for verb, more in besides.items()}

    def __str__(self) -> str:
        samples, outputs = self.tile_shape
        if self.whole:
            tiles = "none: all factors are held"
        else:
            tiles = f"{self.tiles} of up to {samples} samples × {outputs} outputs, computed for each product"
        rows = {
            "Jacobian": f"{self.n} samples × {self.l} outputs × {self.m} parameters, {self.dtype}",
            "factors": in_words(self.factors),
            "dense matrix": in_words(self.dense),
            "memory budget": "half of what is free" if self.budget is None else in_words(self.budget),
            "tiles": tiles,
            "predicted peak": in_words(self.peak) + ("" if self._kept else ": x and all outputs are beside the budget"),
        }
        rows |= {f"  with {verb}": in_words(peak) for verb, peak in self.verbs.items()}
        rows["  of a fit"] = "more than the budget" if self.fit is None else str(self.fit)
        return "\n".join(f"{name:<20}{text}" for name, text in rows.items())
