"""What a Jacobian will take, before it is computed: the plan of its tiles and the memory of the largest of them."""

from __future__ import annotations

import os
from math import ceil, prod
from typing import Any

import numpy as np
import tensorflow as tf

from netjac import memory as system
from netjac import planning
from netjac.plans import Plan
from netjac.tensorflow.extractor import Extractor
from netjac.tensorflow.liveness import peak_and_results
from netjac.tensorflow.trace import vector_specs, weights

BESIDES = 1.05
"""What is taken for each byte of tensors: whole pages, small buffers, stacks."""


def growth(extractor: Extractor, samples: int, outputs: int) -> int:
    """Bytes by which memory is expected to grow while the factors of some samples and outputs are computed.

    In which order the operations run is not determined where TensorFlow has several threads for them: the mean of what
    one thread needs and of what all of them do. What the graph returns is still there while A is put together from
    several of its arrays.
    """
    graph, joined = _graph(extractor, samples, outputs)
    many = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
    found = [peak_and_results(graph, graph.inputs, graph.outputs, threads) for threads in (1, many)]
    return ceil(BESIDES * sum(max(peak, results + joined) for peak, results in found) / 2)


def _graph(extractor: Extractor, samples: int, outputs: int) -> tuple[Any, int]:
    """The graph that computes them, all its shapes known, and bytes of what is then put together of its results."""
    trace, build, joined = extractor.trace, extractor.sites.build, 0
    vector, *x = vector_specs(trace)
    specs = [vector, *(tf.TensorSpec((samples, *spec.shape[1:]), spec.dtype) for spec in x)]
    seeds = [] if outputs == trace.output_space.size else [np.arange(outputs, dtype=np.int32)]

    def run(theta: Any, *x: Any) -> Any:
        nonlocal joined
        y, sites = build(weights(theta, trace), x, *map(tf.constant, seeds))
        for site, k in extractor.factors_plan.joined:
            joined += samples * int(sites[site].D.shape[2]) * k * extractor.dtype.itemsize
        tensors = [y] + [tensor for s in sites for tensor in (s.D, s.A, s.indices, s.scale, s.dense)]
        return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())

    return tf.function(run, autograph=False).get_concrete_function(*specs).graph, joined


def make(extractor: Extractor, n: int, budget: int | None) -> Plan:
    """The plan of the Jacobian of ``n`` samples within ``budget`` bytes.

    Raises
    ------
    MemoryBudgetError
        One output of one sample is above the budget.
    """
    space, footprint = extractor.output_space, extractor.footprint
    l, m, size = space.size, extractor.parameters.size, extractor.dtype.itemsize
    shape, tiles = (n, l), 1
    if budget is not None and not whole(extractor, n, budget):
        planning.tile_sizes(1, 1, extractor.most_demanding, budget)
        tiles, shape = planning.tile_count_and_shape(n, l, footprint, budget)
    peak = growth(extractor, *shape) + n * _input_bytes(extractor) if n * l else 0
    if tiles > 1:  # one tile is held while the next is computed, and so are all outputs, and θ: ours and TensorFlow's
        peak += footprint.held(*shape) + n * l * size + 2 * m * size
    return Plan(n, l, m, extractor.dtype.name, footprint.held(n, l), n * l * m * size, budget, shape, tiles, peak)


def _input_bytes(extractor: Extractor) -> int:
    """Of one sample of x."""
    _, *x = vector_specs(extractor.trace)
    return sum(prod(spec.shape[1:].as_list()) * spec.dtype.size for spec in x if spec.shape[1:].is_fully_defined())


def whole(extractor: Extractor, n: int, budget: int) -> bool:
    """Whether all factors of ``n`` samples are computed within ``budget`` bytes, as `Extractor.evaluate` decides it."""
    return extractor.footprint.peak(n, extractor.output_space.size) <= budget


def default_budget(extractor: Extractor, n: int) -> int | None:
    """The budget where none is given: a share of what is free; None where everything is well within that."""
    rows = extractor.output_space.size
    most = extractor.footprint.peak(n, rows)
    if most <= system.SMALL:
        return None
    budget = system.default_budget()
    if budget is None or most <= budget:
        return None
    if extractor.footprint.held(n, rows) <= budget and growth(extractor, n, rows) <= budget:
        return None  # the footprint is an upper bound
    return max(budget, extractor.least)
