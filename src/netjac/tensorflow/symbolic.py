"""The values of every site as tensors of the graph under construction, for any θ and x.

The program is inserted once. One backward sweep an output gives the cotangents of all sites (unrolled where outputs
and operations are few, else vectorised); A and D are brought into normal form, and what is to be summed over p is
summed at once. No gradient with respect to a weight is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from netjac.sites import SiteForm
from netjac.tensorflow.fallback import per_sample
from netjac.tensorflow.groups import Cotangent, Group
from netjac.tensorflow.match import SAMPLES, Match, NormalForm, plain_name
from netjac.tensorflow.rules import Axes
from netjac.tensorflow.trace import Trace, flat_outputs
from netjac.tensorflow.vectorise import vectorized_map
from netjac.tensorflow.weights import Mix

UNROLLED_OUTPUTS = 16
"""More outputs than this are swept by one vectorised pass: unrolling them takes long to trace."""

UNROLLED_OPERATIONS = 1000
"""The same of fewer outputs, where all their sweeps together have more operations than this: vectorised, there are as
many as in one sweep, and for attention and recurrent layers that is faster by a half."""

UNROLLED_WEIGHT = 1 << 18
"""The same where a variable has so many entries: it is then read from memory once, not once an output."""

UNROLLED_TYPES = re.compile(r".*Pool|Depthwise|(Stateless)?(While|If|Case)$")
"""Operations that are slower vectorised, or that TensorFlow may fail to vectorise."""


@dataclass(frozen=True, eq=False)
class SiteTensors:
    """The fields of `netjac.sites.SiteValues`, as tensors; sites that share an array share the tensor."""

    D: Any = None
    A: Any = None
    indices: Any = None
    scale: Any = None
    dense: Any = None


@dataclass(frozen=True, eq=False)
class Fallback:
    """A variable that is differentiated per sample, and why."""

    variable: int
    operation: str
    reason: str


def unrolls_few(trace: Trace) -> bool:
    """Whether few outputs are swept one after the other: all of it is light, or something is slower vectorised."""
    nodes = trace.program.graph_def.node
    operations = len(nodes) * trace.output_space.size
    weight = max(segment.size for segment in trace.parameters.segments)
    light = operations <= UNROLLED_OPERATIONS and weight < UNROLLED_WEIGHT
    return light or any(UNROLLED_TYPES.match(node.op) for node in nodes)


def arrange(tensor: Any, form: NormalForm, axes: Axes, order: Sequence[str], shape: Sequence[int]) -> Any:
    """Split a tensor's axes into their labels, sort them (``order``, samples first) and merge them into (n, *shape)."""
    fine = [label for axis in axes for label in axis]
    missing = [label for label in order if label not in fine]
    present = [label for label in order if label in fine]
    sizes = [-1 if label == SAMPLES else form.sizes[label] for label in fine]
    permutation = [fine.index(label) for label in present]
    if permutation != list(range(len(fine))):
        tensor = tf.transpose(tf.reshape(tensor, sizes), permutation)
    if missing:
        own = [-1 if label == SAMPLES else 1 if label in missing else form.sizes[label] for label in order]
        repeats = [form.sizes[label] if label in missing else 1 for label in order]
        tensor = tf.tile(tf.reshape(tensor, own), repeats)
    return tf.reshape(tensor, [-1, *shape])


class SiteBuilder:
    """Puts the sites of one trace into graphs.

    Parameters
    ----------
    trace, groups, fallbacks
        What to build.
    """

    def __init__(self, trace: Trace, groups: Sequence[Group], fallbacks: Sequence[Fallback]) -> None:
        self._trace = trace
        self._groups = tuple(groups)
        self._fallbacks = tuple(fallbacks)
        self._nodes = {node.name: node for node in trace.program.graph_def.node}
        self._unrolled = unrolls_few(trace)

    def __call__(self, theta: Sequence[Any], x: Sequence[Any], seeds: Any = None) -> tuple[Any, list[SiteTensors]]:
        """Outputs (n, l) and the tensors of each site: the groups' first, then the fallbacks'.

        Parameters
        ----------
        theta, x
            Tensors, one a variable and one a leaf of x.
        seeds : (q, n, l) or (q,) integers, optional
            Cotangents of the outputs to sweep instead of the l unit ones: the rows are then q combinations of outputs.
            Integers stand for the unit cotangents of these outputs.
        """
        program = self._trace.program
        members = [member for g in self._groups for member in g.members]
        roots = list(dict.fromkeys(c.root for g in self._groups for c in g.cotangents))
        names = [*program.outputs, *(plain_name(root) for root in roots)]
        names += [name for m in members for name in self._operand_names(m)]
        needed = list(dict.fromkeys([*names, *(m.mix.matrix for m in members if m.mix is not None)]))
        tensor = dict(zip(needed, program.insert(theta, x, needed), strict=True))
        outputs = [tensor[name] for name in program.outputs]
        y = flat_outputs(outputs, self._trace)

        incoming: dict[Any, Any] = {}
        factors = [
            None if g.constant else _joined([self._incoming(m, tensor, incoming) for m in g.members])
            for g in self._groups
        ]
        kept = list(dict.fromkeys(g.cotangents for g in self._groups if g.form is not SiteForm.DENSE))
        collapsed = [(g, factor) for g, factor in zip(self._groups, factors, strict=True) if g.form is SiteForm.DENSE]

        def sweep(gradients: Sequence[Any]) -> list[Any]:
            """From the cotangents of the roots for one output to what is kept of them."""
            d = dict(zip(roots, gradients, strict=True))
            whole = [_joined([_normal(c, d[c.root], tensor) for c in key]) for key in kept]
            return whole + [
                contract(g, f, _joined([_normal(c, d[c.root], tensor) for c in g.cotangents])) for g, f in collapsed
            ]

        stacked: list[Any] = []
        if roots and seeds is None:
            sizes = [segment.size for segment in self._trace.output_space.segments]
            stacked = sweeps(outputs, sizes, [tensor[plain_name(root)] for root in roots], sweep, self._unrolled)
        elif roots:
            stacked = seeded_sweeps(y, seeds, [tensor[plain_name(root)] for root in roots], sweep)
        dense = iter(stacked[len(kept) :])
        sites = []
        slopes = self._slopes(theta, x)
        for g, factor in zip(self._groups, factors, strict=True):
            scale = slopes.get(g)
            if g.form is SiteForm.DENSE:
                sites.append(SiteTensors(dense=next(dense), scale=scale))
                continue
            d = stacked[kept.index(g.cotangents)]
            sites.append(
                SiteTensors(D=d, indices=factor, scale=scale)
                if g.form is SiteForm.EMBEDDING
                else SiteTensors(D=d, A=factor, scale=scale)
            )
        if self._fallbacks:
            explicit = per_sample(self._trace, theta, x, [f.variable for f in self._fallbacks], seeds)
            sites += [SiteTensors(dense=matrix) for matrix in explicit]
        return y, sites

    def _incoming(self, member: Match, tensor: dict[str, Any], made: dict[Any, Any]) -> Any:
        """A (n, p, g, k) of one use, or the indices (n, p) of a look-up; ``made`` keeps what several uses share."""
        names = self._operand_names(member)
        form = member.form
        assert form.a is not None
        assert member.product.build is not None
        # The other operand as it stands, or something made of this operation's operands: not the same, under one name.
        source = names[1 - member.operand] if _is_plain(member) else (names[-1],)
        mix = member.mix if member.mix is not None and member.mix.side == "k" else None
        key = (source, form.a, form.p, form.g, form.k, mix)
        if key not in made:
            inputs = [tensor[name] for name in names]
            built = member.product.build(inputs[:-1], inputs[-1])
            if member.product.gather:
                made[key] = arrange(built, form, form.a, (SAMPLES, *form.p), (form.size(form.p),))
            else:
                order = (SAMPLES, *form.p, *form.g, *form.k)
                made[key] = arrange(built, form, form.a, order, [form.size(x) for x in (form.p, form.g, form.k)])
            if mix is not None and member.product.gather:
                made[key] = _looked_up(made[key], mix, tensor, inputs[-1].dtype)
            elif mix is not None:
                made[key] = _times(made[key], mix, tensor)
        return made[key]

    def _operand_names(self, member: Match) -> list[str]:
        """Program names of an operation's operands and of its output."""
        name = plain_name(member.operation.name)
        inputs = [i if ":" in i else i + ":0" for i in self._nodes[name].input]
        return [*inputs, name + ":0"]

    def _slopes(self, theta: Sequence[Any], x: Sequence[Any]) -> dict[Group, Any]:
        """d E[g, k, c] / d variable[entries[g, k, c]] of the groups that have one, each as (g, k, c).

        What the weights are computed by is put into the graph again, apart from all else: TensorFlow looks through
        everything behind a tensor for each derivative it takes with respect to it.
        """
        scaled = [g for g in self._groups if g.first.scaled]
        if not scaled:
            return {}
        names = [self._operand_names(g.first)[g.first.operand] for g in scaled]
        apart = [tf.identity(weight) for weight in theta]
        found = self._trace.program.part(names).insert(apart, x, names)
        return {g: _slope(apart[g.first.variable], weight, g.first) for g, weight in zip(scaled, found, strict=True)}


def _slope(variable: Any, weight: Any, member: Match) -> Any:
    """The slope of one weight: a forward-mode product with ones, for each entry of E depends on one entry of the
    variable.
    """
    seed = tf.zeros_like(weight)
    back = tf.convert_to_tensor(tf.gradients(weight, variable, grad_ys=seed)[0])
    slope = tf.gradients(back, seed, grad_ys=tf.ones_like(variable))[0]
    if slope is None:
        slope = tf.zeros_like(weight)
    form = member.form
    axes: Axes = tuple(member.product.e)
    fine = [label for axis in axes for label in axis if form.sizes.get(label, 0) != 1]
    order = [label for label in (*form.g, *form.k, *form.c)]
    slope = tf.reshape(slope, [form.sizes[label] for label in fine])
    slope = tf.reshape(tf.transpose(slope, [fine.index(label) for label in order]), member.entries.shape)
    return -slope if member.product.negative else slope


def contract(g: Group, factor: Any, d: Any) -> Any:
    """sum_p A[n, p, g, k] D[n, p, g, c] for one output, as (n, g·k·c); ``d`` is (n, p, g·c)."""
    _, groups, k, c = g.sizes
    if factor is None:
        return tf.reduce_sum(d, axis=1)
    if g.members[0].looks_up:
        return tf.reshape(tf.matmul(tf.one_hot(factor, k, dtype=d.dtype), d, transpose_a=True), [-1, k * c])
    if groups == 1:
        return tf.reshape(tf.matmul(factor[:, :, 0], d, transpose_a=True), [-1, k * c])
    split = tf.reshape(d, [-1, g.sizes[0], groups, c])
    if k == 1 or c == 1:
        return tf.reshape(tf.reduce_sum(factor[..., :, None] * split[..., None, :], axis=1), [-1, groups * k * c])
    return tf.reshape(tf.einsum("npgk,npgc->ngkc", factor, split), [-1, groups * k * c])


def _is_plain(member: Match) -> bool:
    """Whether A is the other operand as it stands."""
    return member.operation.type in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Mul")


def _joined(parts: Sequence[Any]) -> Any:
    """Merge the uses of a group along p."""
    return parts[0] if len(parts) == 1 else tf.concat(list(parts), axis=1)


def _normal(source: Cotangent, d: Any, tensor: Mapping[str, Any]) -> Any:
    """A root's cotangent as D (n, p, g·c) of one z."""
    if source.order:
        fine = tf.reshape(d, [-1 if size == 0 else size for size in source.fine])
        d = tf.transpose(fine, source.order)
    d = tf.reshape(d, [-1, *source.shape])
    return d if source.mix is None else _times(d, source.mix, tensor)


def _looked_up(indices: Any, mix: Mix, tensor: Mapping[str, Any], dtype: Any) -> Any:
    """A (n, p, 1, r): the one-hot rows of ``indices`` (n, p) times the weight that goes with them."""
    matrix = tf.cast(tensor[mix.matrix], dtype) * tf.constant(mix.gain, dtype)
    return tf.gather(tf.transpose(matrix) if mix.transposed else matrix, indices)[:, :, None]


def _times(factor: Any, mix: Mix, tensor: Mapping[str, Any]) -> Any:
    """A factor (…, k or c) times the weight that goes with it."""
    matrix = tf.cast(tensor[mix.matrix], factor.dtype) * tf.constant(mix.gain, factor.dtype)
    return tf.tensordot(factor, tf.transpose(matrix) if mix.transposed else matrix, 1)


def sweeps(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    roots: Sequence[Any],
    sweep: Callable[[Sequence[Any]], list[Any]],
    unroll_few: bool = True,
) -> list[Any]:
    """Run ``sweep`` on the roots' cotangents for each of the l outputs; results stacked as (n, l, …).

    ``sizes`` are the numbers each of the ``outputs`` holds a sample; few outputs are swept one after the other, unless
    ``unroll_few`` is False.
    """
    unrolled = sum(sizes) <= (UNROLLED_OUTPUTS if unroll_few else 0)
    rows: list[list[Any]] = []
    for y, size in zip(outputs, sizes, strict=True):
        samples = tf.shape(y)[0]
        flat = tf.reshape(y, [samples, size])

        def one(j: Any, flat: Any = flat, size: int = size, samples: Any = samples) -> list[Any]:
            seed = tf.tile(tf.one_hot(j, size, dtype=flat.dtype)[None], [samples, 1])
            gradients = tf.gradients(flat, list(roots), grad_ys=seed)
            found = [
                tf.zeros_like(r) if d is None else tf.convert_to_tensor(d)
                for d, r in zip(gradients, roots, strict=True)
            ]
            return sweep(found)

        if unrolled:
            rows += [one(j) for j in range(size)]
        elif size:
            rows.append(_over_outputs(one, size))
    if not sum(sizes):  # one sweep for the shapes, of which nothing is kept
        return [part[:, None][:, :0] for part in one(0)]
    if unrolled:
        return [tf.stack(list(parts), axis=1) for parts in zip(*rows, strict=True)]
    merged = [tf.concat(list(parts), axis=0) for parts in zip(*rows, strict=True)]
    return [tf.transpose(m, [1, 0, *range(2, len(m.shape))]) for m in merged]


def _over_outputs(one: Callable[[Any], list[Any]], size: int) -> list[Any]:
    """``one`` of every output, stacked: vectorised where TensorFlow can."""
    if size == 1:
        return [part[None] for part in one(0)]
    try:
        vectorised: list[Any] = vectorized_map(one, tf.range(size))
        return vectorised
    except (ValueError, TypeError, NotImplementedError):  # its vectoriser stumbles over some operations
        return [tf.stack(list(parts)) for parts in zip(*(one(j) for j in range(size)), strict=True)]


def seeded_sweeps(y: Any, seeds: Any, roots: Sequence[Any], sweep: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """As `sweeps`, for q given cotangents of the flat outputs ``y``, (q, n, l) or (q,) integers; results (n, q, …).

    Vectorised, unless q is 1 in the graph already.
    """

    def one(seed: Any) -> list[Any]:
        if seed.dtype.is_integer:
            seed = tf.tile(tf.one_hot(seed, y.shape[1], dtype=y.dtype)[None], [tf.shape(y)[0], 1])
        gradients = tf.gradients(y, list(roots), grad_ys=tf.cast(seed, y.dtype))
        pairs = zip(gradients, roots, strict=True)
        return sweep([tf.zeros_like(r) if d is None else tf.convert_to_tensor(d) for d, r in pairs])

    if seeds.shape[0] == 1:
        return [part[:, None] for part in one(seeds[0])]
    found = vectorized_map(one, seeds)
    return [tf.transpose(part, [1, 0, *range(2, len(part.shape))]) for part in found]
