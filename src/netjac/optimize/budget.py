"""What a fit takes in memory, and how a budget is shared by the factors and the matrices that steps come from.

Factors are there at two points at once: those of the best point, and those of a trial point while they are computed.
Where they do not fit beside the matrices, they are computed tile by tile in what the matrices leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from netjac import algebra, normal, planning
from netjac import memory as system
from netjac.errors import MemoryBudgetError


@dataclass(frozen=True)
class Need:
    """Bytes of the factors of a residual's derivative.

    Attributes
    ----------
    held : int
        At one θ, once they are there; weighted copies counted.
    peak : int
        At the worst moment of computing them whole.
    least : int
        Of the smallest tiles that every verb works with.
    layers : int
        Of the Kronecker factors that conjugate gradients are preconditioned by.
    """

    held: int
    peak: int
    least: int
    layers: int = 0

    def __add__(self, other: Need) -> Need:
        layers = self.layers + other.layers
        return Need(self.held + other.held, self.peak + other.peak, self.least + other.least, layers)

    def part(self, memory: int, of: Need) -> int:
        """The share of these factors in the budget of several, ``of`` in all."""
        if memory >= of.peak:
            return self.peak
        return self.least + (memory - of.least) * self.peak // max(1, of.peak)


@dataclass(frozen=True)
class Share:
    """Bytes that the factors of one evaluation may take, and all that steps are computed with; None without limit."""

    factors: int | None = None
    steps: int | None = None


def need_of(evaluator: Any, rows: int, copies: int, samples: int | None = None) -> Need | None:
    """What the factors of a network take, None where its evaluator keeps to no budget.

    ``copies`` is how many times factors of so many rows are there once more, as for weights; ``samples`` how many there
    are, by default those of the evaluator.
    """
    footprint = getattr(evaluator, "footprint", None)
    if footprint is None:
        return None
    n, l = evaluator.n if samples is None else samples, evaluator.output_space.size
    demanding = footprint.combined(l)
    least = (demanding if evaluator.dtype.itemsize == 8 else demanding.widened()).need(1, 1)
    held = footprint.held(n, l) + copies * rows * footprint.row
    return Need(held, footprint.peak(n, l), least, evaluator.layer_bytes)


def evaluated(evaluator: Any, theta: Any, memory: int | None) -> Any:
    """Outputs and Jacobian at θ, within a budget where there is one."""
    return evaluator.evaluate(theta) if memory is None else evaluator.evaluate(theta, memory)


def steps_bytes(name: str, rows: int, m: int, layers: int = 0) -> int:
    """Bytes at the worst moment of computing steps, for residuals and parameters of so many.

    Parameters
    ----------
    name
        One of `netjac.optimize.routes.LINEAR_SOLVERS`; "explicit" for J Jᵀ from an explicit J; "diagonal" for products
        without Kronecker factors; or the form in which SciPy gets the Jacobian, "dense" or "operator".
    rows, m
        Residuals and parameters.
    layers
        Bytes of Kronecker factors.

    Examples
    --------
    >>> steps_bytes("normal", rows=100_000, m=1000) // 2**20
    37
    """
    vectors = 8 * (VECTORS * m + ROW_VECTORS * rows)
    if name == "normal":
        return vectors + 16 * m**2 + normal.normal_work(m, 8).usual
    if name == "gram":
        return vectors + 16 * rows**2 + algebra.gram_work(1, 1, 8 * rows**2, 8).usual
    if name == "explicit":
        return vectors + 16 * rows * m + 32 * rows**2
    if name == "svd":
        return vectors + 48 * rows * m + 24 * min(rows, m) ** 2
    if name == "dense":
        return vectors + 40 * rows * m + 24 * m**2
    return vectors + (layers if name == "products" else 0)


QUICK = 4
"""A share of all factors that makes few tiles: computing these costs little more than computing their rows."""

VECTORS, ROW_VECTORS = 16, 8
"""Vectors of parameters and of residuals that a fit holds at once."""


def share(budget: int, need: Need | None, rows: int, m: int, names: Sequence[str]) -> tuple[str, Share]:
    """The first of some ways to compute steps that fits a budget, and what factors and steps may take.

    Parameters
    ----------
    budget
        Bytes for both.
    need
        Of the factors; None where they keep to a budget of their own.
    rows, m
        Residuals and parameters.
    names
        As for `steps_bytes`, the best first.

    Raises
    ------
    MemoryBudgetError
        None fits; the message states the least that works.

    Examples
    --------
    >>> need = Need(held=10**6, peak=3 * 10**6, least=10**4)
    >>> share(10**9, need, 1000, 100, ["normal", "products"])
    ('normal', Share(factors=3000000, steps=996000000))
    >>> share(10**6, need, 1000, 100, ["normal", "products"])
    ('products', Share(factors=923200, steps=76800))
    """
    for name in names:
        steps = steps_bytes(name, rows, m, 0 if need is None else need.layers)
        if need is None:
            if steps <= budget:
                return name, Share(None, budget)
        elif need.held + need.peak + steps <= budget:
            return name, Share(need.peak, budget - need.held - need.peak)
        elif need.least + steps <= budget:
            return name, Share(min(budget - steps, need.peak - 1), steps)
    least = steps_bytes(names[-1], rows, m) + (0 if need is None else need.least)
    more = "" if need is None else f", and {planning.in_words(least + need.peak // QUICK)} is many times as fast"
    raise MemoryBudgetError(
        f"a fit of {rows} residuals and {m} parameters needs {planning.in_words(least)} of memory, more than the "
        f"budget of {planning.in_words(budget)}; the least that works is memory={least}{more}.",
        least=least,
    )


def of_factors(memory: int | None, need: Need | None, m: int, rows: int = 0) -> int | None:
    """What the factors of one evaluation may take of a budget, beside vectors; None without limit.

    ``memory`` is None where no budget is given.
    """
    limit = default(need, rows, m, ["operator"]) if memory is None else memory
    return None if limit is None else share(limit, need, rows, m, ["operator"])[1].factors


def default(need: Need | None, rows: int, m: int, names: Sequence[str]) -> int | None:
    """The budget where none is given: half of what is free; None where all is well within that."""
    wanted = steps_bytes(names[0], rows, m) + (0 if need is None else need.held + need.peak + need.layers)
    if wanted <= system.SMALL:
        return None
    budget = system.default_budget()
    if budget is None or wanted <= budget:
        return None
    return max(budget, steps_bytes(names[-1], rows, m) + (0 if need is None else need.least))
