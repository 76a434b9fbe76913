"""The probe: the extractor against the ordinary derivative, before a first matrix is returned.

At three different samples and slightly moved parameters (so that weights that start at zero hide nothing), with random
directions u and v:

- for each sample i alone, Jᵀ u against one ordinary gradient g of u · y[i]. This holds each sample's rows to account
  separately, which a sum over the batch would not;
- for each sample, u · (J v)[i] against g · v, which a forward-mode product would have to equal. TensorFlow's own
  forward-mode products need second derivatives, which some operations lack and some get wrong; this needs none.

The two may round differently: a sum over outputs that nearly cancels, as of the saturated outputs of a softmax, is
little but rounding, and its terms are not. So where they disagree, g is taken of one output at a time, which decides.

Where there are very many outputs they enter as one combination u · y[i], with the factors of that, and one tile of
outputs a sample, drawn at random, is looked at by itself in the same way.

A wrong rule fails it, and so does every model that mixes samples. Then the forward pass is searched for the first
operation through which one sample reaches another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.errors import DataError, ModelError, ProbeError, RandomModelError
from netjac.tensorflow.linearity import refuse_nonlinear
from netjac.tensorflow.match import Graph, plain_name
from netjac.tensorflow.mixing import mixing_error, mixing_operation, refuse_mixing
from netjac.tensorflow.precision import rounded_to
from netjac.tensorflow.program import Program
from netjac.tensorflow.refusals import PYTHON, behind
from netjac.tensorflow.survey import LARGE, Survey
from netjac.tensorflow.trace import Trace, flat_outputs, vector_specs, weights
from netjac.tiled import TiledJacobian

HALF = frozenset({tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum})
STATEFUL_RANDOM = frozenset(
    [
        "RandomUniform",
        "RandomUniformInt",
        "RandomStandardNormal",
        "TruncatedNormal",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "Multinomial",
        "StatefulUniform",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniformInt",
        "StatefulUniformFullInt",
        "StatefulRandomBinomial",
    ]
)


def refuse_random(program: Program) -> None:
    """Raise if a random number drawn anew at each call reaches the outputs; constants drawn from a fixed seed may."""
    nodes = {node.name: node for node in program.graph_def.node}

    def fixed(name: str, seen: set[str]) -> bool:
        if name in seen:
            return True
        seen.add(name)
        node = nodes[name]
        if node.op in ("Placeholder", "ReadVariableOp") or node.op in STATEFUL_RANDOM:
            return False
        return all(fixed(i.partition(":")[0], seen) for i in node.input)

    for node in program.graph_def.node:
        stateless = node.op.startswith("StatelessRandom") or node.op in (
            "StatelessTruncatedNormalV2",
            "StatelessShuffle",
        )
        if node.op in STATEFUL_RANDOM or (
            stateless and not all(fixed(i.partition(":")[0], set()) for i in node.input[1:])
        ):
            raise RandomModelError(
                f"the operation {node.name!r} ({node.op}) draws random numbers at every call, so the outputs are no "
                "function of the parameters. Turn it off: call dropout and noise layers with training=False."
            )


def refuse_python(survey: Survey, graph: Graph) -> None:
    """Raise if the outputs depend on a weight through Python code: TensorFlow would take the derivative as zero.

    Not where an operation with a gradient of its own (tf.custom_gradient) stands in between.
    """
    operations = [survey.graph.get_operation_by_name(name) for name in graph.order]
    weights = {graph.parameter(i).op.name for i in range(len(survey.program.parameters))}
    python = [op for op in operations if op.type in PYTHON and weights & {a.name for a in behind(op.inputs)}]
    if not python:
        return
    outputs = [survey.graph.get_tensor_by_name(name) for name in sorted(graph.outputs)]
    made = [[tensor for tensor in op.outputs if tensor.dtype.is_floating] for op in python]
    with survey.graph.as_default():
        slopes = [tf.gradients(outputs, tensors) if tensors else [] for tensors in made]
    for operation, slope in zip(python, slopes, strict=True):
        if any(d is not None for d in slope):
            raise ModelError(
                f"the operation {plain_name(operation.name)!r} ({operation.type}) is Python code "
                f"({PYTHON[operation.type]}) that the outputs depend on weights through, and has no derivative here. "
                "Write it with TensorFlow's operations, or give it its derivative with tf.custom_gradient."
            )


def moved(theta: Sequence[NDArray[Any]], rng: np.random.Generator) -> list[NDArray[Any]]:
    """Parameters near ``theta``, none of them zero; signs are kept, so that what must be positive stays so."""
    result = []
    for value in theta:
        wide = value.astype(np.float64)
        largest = float(np.max(np.abs(wide), initial=0.0))
        scale = largest * float(np.sqrt(np.mean((wide / largest) ** 2))) if largest > 0 else 0.0
        sign = np.where(wide == 0, rng.choice([-1, 1], value.shape), np.sign(wide))
        change = 0.05 * (scale if scale > 0 else 1.0) * rng.uniform(0.5, 1.0, value.shape) * sign
        result.append((wide + change).astype(value.dtype))
    return result


@dataclass(frozen=True, eq=False)
class Expected:
    """What Jᵀ u has to be (m,), and the sizes of its terms, added up: what rounding is in proportion to."""

    value: NDArray[np.float64]
    size: NDArray[np.float64]


def cotangents(rng: np.random.Generator, n: int, l: int) -> NDArray[np.float64]:
    """Random u (n, l) of powers of two: one output times its u is rounded as that output alone."""
    return np.asarray(2.0 ** rng.integers(-1, 2, (n, l)))


class OrdinaryGradient:
    """The gradient of u · y with respect to θ, by TensorFlow alone: nothing of the factored path is used.

    Parameters
    ----------
    trace
        The network.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        specs = vector_specs(trace)
        seeds = tf.TensorSpec((None, trace.output_space.size), tf.float64)
        self._type = specs[0].dtype
        self._compiled = tf.function(self._run, autograph=False).get_concrete_function(*specs, seeds)

    def __call__(self, theta: NDArray[Any], x: Sequence[Any], u: NDArray[Any]) -> NDArray[np.float64]:
        """(m,) at the vector ``theta``, for cotangents ``u`` (n, l)."""
        return np.asarray(self._compiled(tf.constant(theta, self._type), *x, tf.constant(u, tf.float64)))

    def by_outputs(self, theta: NDArray[Any], x: Sequence[Any], u: NDArray[Any]) -> Expected:
        """The same as a sum of the gradients of one output each."""
        total, size = np.zeros(self._trace.parameters.size), np.zeros(self._trace.parameters.size)
        for j in np.flatnonzero(u.any(axis=0)):
            part = self(theta, x, u * (np.arange(u.shape[1]) == j))
            total += part
            size += np.abs(part)
        return Expected(total, size)

    def _run(self, vector: Any, *arguments: Any) -> Any:
        theta = weights(vector, self._trace)
        y = flat_outputs(self._trace.program.insert(theta, arguments[:-1], self._trace.program.outputs), self._trace)
        found = tf.gradients(y, theta, grad_ys=tf.cast(arguments[-1], y.dtype))
        dense = [tf.zeros_like(w) if d is None else tf.convert_to_tensor(d) for d, w in zip(found, theta, strict=True)]
        return tf.concat([tf.cast(tf.reshape(d, [-1]), tf.float64) for d in dense], axis=0)


def check(
    trace: Trace,
    survey: Survey,
    graph: Graph,
    theta: Sequence[NDArray[Any]],
    jacobian_at: Callable[[NDArray[Any], Sequence[Any]], Any],
) -> None:
    """Raise unless the Jacobian that ``jacobian_at(theta, x)`` gives agrees with the ordinary derivative."""
    refuse_python(survey, graph)
    refuse_mixing(survey, graph)
    rng = np.random.default_rng(20150)
    u = cotangents(rng, LARGE, trace.output_space.size)
    v = rng.standard_normal(trace.parameters.size)
    alone = [u * (np.arange(LARGE) == i)[:, None] for i in range(LARGE)]
    gradient = OrdinaryGradient(trace)
    for candidate in (moved(theta, rng), list(theta)):
        vector = np.concatenate([value.astype(np.float64).reshape(-1) for value in candidate])
        expected = [gradient(vector, survey.batch, seed) for seed in alone]
        finite = all(np.isfinite(g).all() for g in expected)
        if finite:
            break

    def compare(
        rows: Any, seeds: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]], place: Any = ...
    ) -> dict[str, float]:
        """Disagreements of some rows with the gradients ``found`` of ``seeds``, of which ``place`` are theirs."""
        own = [seed[place] for seed in seeds]
        if not _disagreement(trace, rows, own, v, _sizes(found)):
            return {}
        return _disagreement(trace, rows, own, v, [gradient.by_outputs(vector, survey.batch, seed) for seed in seeds])

    jacobian = jacobian_at(vector, survey.batch)
    if isinstance(jacobian, TiledJacobian):
        combined = jacobian.scaled(u[:, None])  # one row a sample
        ones = [np.ones((LARGE, 1)) * (np.arange(LARGE) == i)[:, None] for i in range(LARGE)]
        wrong = _disagreement(trace, combined, ones, v, _sizes(expected))
        for samples, outputs in _one_tile_a_sample(jacobian, rng):
            seed = np.zeros_like(u)
            seed[samples, outputs] = u[samples, outputs]
            part = [gradient(vector, survey.batch, seed)]
            wrong |= compare(jacobian._tile(samples, outputs), [seed], part, (samples, outputs))
    else:
        wrong = compare(jacobian, alone, expected)
    if wrong and not finite:
        raise DataError(
            "at some of the samples the outputs or their derivatives are not finite, so that the factors cannot be "
            "checked; look at model(x), and leave those samples out of the first call."
        )
    if wrong:
        _refuse(survey, graph, wrong)


def _sizes(gradients: Sequence[NDArray[Any]]) -> list[Expected]:
    return [Expected(g, np.abs(g)) for g in gradients]


def _disagreement(
    trace: Trace, jacobian: Any, seeds: Sequence[NDArray[Any]], v: NDArray[Any], expected: Sequence[Expected]
) -> dict[str, float]:
    """Relative errors that are more than rounding, by variable, and of J v."""
    low, tolerance = precision(trace)
    forward = np.asarray(jacobian @ v, np.float64).reshape(seeds[0].shape)
    every = np.asarray(jacobian.T @ np.stack([seed.reshape(-1) for seed in seeds], axis=1), np.float64)
    wrong: dict[str, float] = {}
    for seed, g, ours in zip(seeds, expected, every.T, strict=True):
        own = seed != 0
        with np.errstate(invalid="ignore", over="ignore"):
            whole = np.linalg.norm(g.size)
            along = float(seed[own] @ forward[own]) - float(g.value @ v)
            spread = float(g.size @ np.abs(v))
        for segment in trace.parameters.segments:
            error = relative_error(ours[segment.slice], g.value[segment.slice], whole, low)
            if error > tolerance:
                wrong[segment.name] = max(error, wrong.get(segment.name, 0.0))
        if np.isfinite(along) and abs(along) > tolerance * spread:
            wrong["J v"] = max(abs(along) / max(spread, np.finfo(np.float64).tiny), wrong.get("J v", 0.0))
    return wrong


def _one_tile_a_sample(jacobian: TiledJacobian, rng: np.random.Generator) -> list[tuple[slice, slice]]:
    """Samples and outputs of tiles drawn at random, one for each sample."""
    grid = jacobian._grid()
    own = [[tile for tile in grid if tile[0].start <= i < tile[0].stop] for i in range(jacobian.n)]
    return [tiles[rng.integers(len(tiles))] for tiles in own]


def precision(trace: Trace) -> tuple[float, float]:
    """Relative rounding error of the least precise number in the graph, and the disagreement that is still rounding."""
    types = {kind for node in trace.program.graph_def.node for kind in rounded_to(node)}
    if types & HALF:
        return 1e-3, 0.2
    low = float(np.finfo(np.float32 if tf.float32.as_datatype_enum in types else np.float64).eps)
    return low, max(1e-9, 2e3 * low)


def _refuse(survey: Survey, graph: Graph, wrong: Mapping[str, float]) -> NoReturn:
    culprit = mixing_operation(survey, graph)
    if culprit is not None:
        raise mixing_error(survey, graph, culprit)
    refuse_nonlinear(survey, (1e-4, 1.0, 1e4))
    worst = sorted(wrong.items(), key=lambda item: -item[1])[:5]
    listing = ", ".join(f"{name} ({error:.1e})" for name, error in worst)
    raise ProbeError(
        f"the factors disagree with the ordinary derivative for: {listing} (relative errors). No matrix is returned. "
        "This is a fault in netjac, or a model whose outputs depend on the number of samples; please report the model."
    )


def relative_error(ours: NDArray[Any], reference: NDArray[Any], whole: Any, low: float) -> float:
    """Relative error, forgiving what is rounding beside the whole; infinite where only one side is finite."""
    same = (ours == reference) | (np.isnan(ours) & np.isnan(reference))
    with np.errstate(invalid="ignore", over="ignore"):
        difference = float(np.linalg.norm(np.where(same, 0, ours - reference)))
        size = float(np.linalg.norm(np.where(same & ~np.isfinite(reference), 0, reference)))
    if not np.isfinite(difference):
        return float("inf")
    beyond = max(0.0, difference - 1e3 * low * float(whole))
    return beyond / size if size > 0 else float("inf") if beyond else 0.0
