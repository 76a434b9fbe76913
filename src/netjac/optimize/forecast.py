"""What a fit will take, before it begins: the way its steps will be computed, its tiles, and its peak."""

from __future__ import annotations

from typing import Any

from netjac import memory as system
from netjac.optimize import budget, routes
from netjac.plans import FitPlan


def of_targets(evaluator: Any, n: int, memory: int | None) -> FitPlan:
    """The plan of a fit of f(x) − y by method "netjac".

    Parameters
    ----------
    evaluator
        Of the network, with some samples of x; see `netjac.tensorflow.Evaluator`.
    n
        Samples of the fit.
    memory
        The budget in bytes; None for that of a fit that is given none.

    Raises
    ------
    MemoryBudgetError
        It, or what is free, is too little for any way to compute steps.
    """
    l, m, size = evaluator.output_space.size, evaluator.parameters.size, evaluator.dtype.itemsize
    rows = n * l
    need = budget.need_of(evaluator, rows, 0, n)
    assert need is not None
    ways = routes.ways(rows, m)
    limit = memory
    if memory is None:
        limit, free = budget.default(need, rows, m, ways), system.available()
        if limit is not None and free is not None and limit > free:
            limit = free  # what a fit without a budget takes at the least is more
    way, share = (ways[0], budget.Share()) if limit is None else budget.share(limit, need, rows, m, ways)
    factors = evaluator.plan(n, need.peak if share.factors is None else share.factors)
    steps = budget.steps_bytes(way, rows, m, need.layers)
    # The factors at the best point while those at the next are computed, and the outputs at both.
    peak = factors.peak + steps + 2 * rows * size + (need.held if factors.whole else 0)
    name = "products" if way == "diagonal" else way
    return FitPlan(name, steps, limit, factors.tile_shape, factors.tiles, peak)
