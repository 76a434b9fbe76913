"""The probe: the extractor against the ordinary derivative, before a first matrix is returned.

At three different samples and slightly moved parameters (so that weights that start at zero hide nothing), with random
directions u and v:

- for each sample alone, Jᵀ u against one ordinary gradient. This holds each sample's rows to account separately, which
  a sum over the batch would not;
- J v against one forward-mode product, taken as the transpose of the transpose.

A wrong rule fails it, and so does every model that mixes samples. Then the forward pass is searched for the first
operation through which one sample reaches another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework.ops import get_gradient_function

from netjac.errors import ProbeError, RandomModelError
from netjac.tensorflow.match import Graph
from netjac.tensorflow.mixing import mixing_error, mixing_operation, refuse_mixing
from netjac.tensorflow.program import Program
from netjac.tensorflow.survey import LARGE, Survey
from netjac.tensorflow.trace import Trace, argument_specs, flat_outputs

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


def moved(theta: Sequence[NDArray[Any]], rng: np.random.Generator) -> list[NDArray[Any]]:
    """Parameters near ``theta``, none of them zero; signs are kept, so that what must be positive stays so."""
    result = []
    for value in theta:
        wide = value.astype(np.float64)
        scale = np.sqrt(np.mean(wide**2)) if wide.size else 0.0
        sign = np.where(wide == 0, rng.choice([-1, 1], value.shape), np.sign(wide))
        change = 0.05 * (scale if scale > 0 else 1.0) * rng.uniform(0.5, 1.0, value.shape) * sign
        result.append((wide + change).astype(value.dtype))
    return result


def ordinary_products(
    trace: Trace, theta: Sequence[Any], x: Sequence[Any], u: NDArray[Any], v: NDArray[Any]
) -> tuple[list[NDArray[Any]], NDArray[Any] | None]:
    """Per sample i the ordinary gradient of u[i] · y[i], as (m,), and J v (n, l), None where TensorFlow cannot.

    ``u`` is (n, l), ``v`` (m,); nothing of the factored path is used.
    """
    count = len(trace.parameters)
    parts = trace.parameters.unravel(v)

    def run(seed: Any, *arguments: Any) -> Any:
        weights = arguments[:count]
        y = flat_outputs(trace.program.insert(weights, arguments[count:], trace.program.outputs), trace)
        seed = tf.cast(seed, y.dtype)
        found = tf.gradients(y, weights, grad_ys=seed)
        back = [tf.zeros_like(w) if d is None else tf.convert_to_tensor(d) for d, w in zip(found, weights, strict=True)]
        pairs = [(d, tf.constant(p, d.dtype)) for d, p, f in zip(back, parts, found, strict=True) if f is not None]
        try:
            _refuse_dead_ends(tf.compat.v1.get_default_graph())
            product = tf.gradients([d for d, _ in pairs], seed, grad_ys=[p for _, p in pairs])[0] if pairs else None
            product = tf.zeros_like(y) if product is None else product
        except (LookupError, ValueError, TypeError, NotImplementedError):  # an operation without a second derivative
            product = tf.fill(tf.shape(y), tf.constant(np.nan, y.dtype))
        return back, product

    specs = argument_specs(trace)
    compiled = tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec(u.shape, tf.float64), *specs)
    gradients = []
    for i in range(LARGE):
        row, product = compiled(tf.constant(u * (np.arange(LARGE) == i)[:, None]), *theta, *x)
        gradients.append(np.concatenate([np.asarray(d, np.float64).reshape(-1) for d in row]))
    forward = np.asarray(product, np.float64)
    return gradients, None if np.isnan(forward).all() else forward


def _refuse_dead_ends(graph: Any) -> None:
    """Raise LookupError where a derivative's own derivative is declared to be none, or is wrong.

    That of pooling in space counts all of several equal maxima, where the derivative takes one.
    """
    for operation in graph.get_operations():
        declared_none = operation.type.endswith("Grad") and get_gradient_function(operation) is None
        if declared_none or operation.type == "MaxPool3DGrad":
            raise LookupError(f"{operation.type} has no derivative")


def check(
    trace: Trace,
    survey: Survey,
    graph: Graph,
    theta: Sequence[NDArray[Any]],
    jacobian_at: Callable[[NDArray[Any], Sequence[Any]], Any],
) -> None:
    """Raise unless the Jacobian that ``jacobian_at(theta, x)`` gives agrees with the ordinary derivative."""
    refuse_mixing(survey, graph)
    rng = np.random.default_rng(20150)
    m, rows = trace.parameters.size, trace.output_space.size
    u, v = rng.uniform(0.5, 1.5, (LARGE, rows)), rng.standard_normal(m)
    batch = survey.batch
    low, tolerance = _precision(trace)
    for candidate in (moved(theta, rng), list(theta)):
        weights = [tf.convert_to_tensor(value) for value in candidate]
        gradients, forward = ordinary_products(trace, weights, batch, u, v)
        if all(np.isfinite(g).all() for g in gradients):
            break
    vector = np.concatenate([value.astype(np.float64).reshape(-1) for value in candidate])
    jacobian = jacobian_at(vector, batch)
    wrong: dict[str, float] = {}
    for i, gradient in enumerate(gradients):
        ours = jacobian.T @ (u * (np.arange(LARGE) == i)[:, None]).reshape(-1)
        for segment in trace.parameters.segments:
            error = _error(ours[segment.slice], gradient[segment.slice], np.linalg.norm(gradient), low)
            if error > tolerance:
                wrong[segment.name] = max(error, wrong.get(segment.name, 0.0))
    if forward is not None and not wrong:
        error = _error((jacobian @ v).reshape(LARGE, rows), forward, np.linalg.norm(forward), low)
        if error > tolerance:
            wrong["J v"] = error
    if wrong:
        _refuse(survey, graph, wrong)


def _precision(trace: Trace) -> tuple[float, float]:
    """Relative rounding error of the least precise number in the graph, and the disagreement that is still rounding."""
    types = {a.type for node in trace.program.graph_def.node for a in node.attr.values()}
    if types & HALF:
        return 1e-3, 0.2
    low = float(np.finfo(np.float32 if tf.float32.as_datatype_enum in types else np.float64).eps)
    return low, max(1e-9, 2e3 * low)


def _refuse(survey: Survey, graph: Graph, wrong: Mapping[str, float]) -> NoReturn:
    culprit = mixing_operation(survey, graph)
    if culprit is not None:
        raise mixing_error(survey, graph, culprit)
    worst = sorted(wrong.items(), key=lambda item: -item[1])[:5]
    listing = ", ".join(f"{name} ({error:.1e})" for name, error in worst)
    raise ProbeError(
        f"the factors disagree with the ordinary derivative for: {listing} (relative errors). No matrix is returned. "
        "This is a fault in netjac, or a model whose outputs depend on the number of samples; please report the model."
    )


def _error(ours: NDArray[Any], reference: NDArray[Any], whole: Any, low: float) -> float:
    """Relative error, forgiving what is rounding beside the whole; infinite where only one side is finite."""
    same = (ours == reference) | (np.isnan(ours) & np.isnan(reference))
    with np.errstate(invalid="ignore"):
        difference = float(np.linalg.norm(np.where(same, 0, ours - reference)))
    if not np.isfinite(difference):
        return float("inf")
    size = float(np.linalg.norm(np.where(same & ~np.isfinite(reference), 0, reference)))
    return max(0.0, difference - 1e3 * low * float(whole)) / max(size, np.finfo(np.float64).tiny) if difference else 0.0
