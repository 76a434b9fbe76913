"""Small runs of a `Program` that tell what its graph alone does not: which axes hold the samples, and where.

A tensor holds the samples on an axis whose size grows with n. Sizes at n = 2 and n = 3 tell the axis and its factor s
(size = s·n); where s > 1, the entries that change when one sample alone changes tell how the samples lie within it:
(n, s) sample-major, (s, n) time-major, or between. Each sample is changed in its turn, for some of a sample's entries
may never change (padding). Where that leaves several ways (no sample changes anything in a backward pass through a
linear layer), the entries that each sample's outputs depend on tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.errors import ModelError
from netjac.tensorflow.lifetime import adopt_functions
from netjac.tensorflow.program import Program

SMALL, LARGE = 2, 3  # the two numbers of samples
PREFIX = "netjac/"


@dataclass(frozen=True)
class SampleAxis:
    """An axis of size outer · n · inner."""

    outer: int
    inner: int


def distinct_samples(leaves: Sequence[Any], count: int, rng: np.random.Generator) -> list[NDArray[Any]]:
    """``count`` samples like those of x, no two alike where that can be had: rows of x, changed where they repeat."""
    batch = []
    for leaf in leaves:
        array = np.asarray(leaf)
        n = array.shape[0]
        rows = np.array(array[np.arange(count) % n]) if n else np.zeros((count, *array.shape[1:]), array.dtype)
        for i in range(count):
            if i >= n or any(np.array_equal(rows[i], rows[j]) for j in range(i)):
                rows[i] = _changed(rows[i], rng)
        batch.append(rows)
    return batch


def _changed(sample: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """A sample near this one, in the same domain: signs kept, integers taken from the sample itself."""
    if np.issubdtype(sample.dtype, np.floating) or sample.dtype.kind == "V":  # V: bfloat16
        factor = rng.uniform(0.8, 1.25, sample.shape)
        floor = 0.01 * rng.uniform(size=sample.shape)
        values = sample.astype(np.float64)
        return np.asarray(np.where(values == 0, floor, values * factor)).astype(sample.dtype)
    if sample.dtype == bool:
        return rng.permutation(sample.reshape(-1)).reshape(sample.shape)
    moved = rng.permutation(sample.reshape(-1)).reshape(sample.shape)
    return moved if not np.array_equal(moved, sample) else np.maximum(sample - 1, 0).astype(sample.dtype)


def _with_changed(batch: NDArray[Any], i: int, rng: np.random.Generator, beyond: bool) -> NDArray[Any]:
    """The batch with sample i changed; ``beyond``: to values that x does not have, if there is no other way."""
    copy = batch.copy()
    copy[i] = _changed(batch[i], rng)
    if beyond and batch.dtype.kind in "iub" and np.array_equal(copy[i], batch[i]):
        copy[i] = ~batch[i] if batch.dtype == bool else batch[i] + 1
    return copy


def _agreeing(ways: Sequence[int], touched: Sequence[NDArray[np.bool_]]) -> list[int]:
    """The outer sizes with which what each sample touches, along an axis, is its own."""

    def own(outer: int, i: int) -> bool:
        return not np.delete(touched[i].reshape(outer, LARGE, -1), i, axis=1).any()

    return [outer for outer in ways if all(own(outer, i) for i in range(len(touched)))]


class Survey:
    """The program's graph to walk over, with the sizes of every tensor at two numbers of samples.

    Parameters
    ----------
    program
        What to run.
    specs
        TensorSpecs of the parameters, then of the inputs.
    theta, leaves
        Values to run at: parameters, and x flattened.
    """

    def __init__(self, program: Program, specs: Sequence[Any], theta: Sequence[Any], leaves: Sequence[Any]) -> None:
        self.program = program
        self._theta = list(theta)
        rng = np.random.default_rng(0)
        self._large = distinct_samples(leaves, LARGE, rng)
        self._varied = self._vary(beyond=True)
        count = len(program.parameters)

        def run(*arguments: Any) -> Any:
            return program.insert(arguments[:count], arguments[count:], program.outputs)

        self._wrapped = tf.compat.v1.wrap_function(run, list(specs))
        adopt_functions(self._wrapped.graph)
        self._feeds = self._wrapped.inputs[: len(specs)]
        self.graph = self._wrapped.graph
        # Placeholders that were fed stay behind in the graph, unused.
        used = (op for op in self.graph.get_operations() if op.name.startswith(PREFIX) and op.type != "Placeholder")
        self._tensors = [t for op in used for t in op.outputs]
        self._sizes = self._measure([*self._tensors, *self._feeds])
        self._values: dict[str, tuple[NDArray[Any], ...]] = {}

    @property
    def batch(self) -> list[Any]:
        """The three samples, as tensors."""
        feeds = self._feeds[len(self._theta) :]
        return [tf.convert_to_tensor(array, feed.dtype) for array, feed in zip(self._large, feeds, strict=True)]

    def _run(
        self, tensors: Sequence[Any], *batches: Sequence[Any], theta: Sequence[Any] | None = None
    ) -> list[list[NDArray[Any]]]:
        """Values of the tensors for each batch, by default at the parameters of the survey."""
        if not tensors:
            return [[] for _ in batches]
        pruned = self._wrapped.prune(self._feeds, list(tensors))
        adopt_functions(pruned.graph)
        results = []
        for batch in batches:
            pairs = zip([*(self._theta if theta is None else theta), *batch], self._feeds, strict=True)
            try:
                values = pruned(*(tf.convert_to_tensor(value, feed.dtype) for value, feed in pairs))
            except tf.errors.InvalidArgumentError as error:
                reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
                raise ModelError(
                    f"the model cannot be run on {len(batch[0])} samples like those of x: {reason.strip()}\n"
                    "Outputs must be there for any number of samples: a reshape to a fixed number of rows must say -1, "
                    "and a model built with batch_size=... must be built without."
                ) from error
            results.append([np.asarray(value) for value in values])
        return results

    def _measure(self, tensors: Sequence[Any]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        sizes = {}
        unknown = []
        for tensor in tensors:
            if tensor.dtype in (tf.resource, tf.variant):
                continue
            if tensor.shape.is_fully_defined():
                sizes[tensor.name] = (tuple(tensor.shape), tuple(tensor.shape))
            else:
                unknown.append(tensor)
        with self.graph.as_default():
            shapes = [tf.shape(tensor) for tensor in unknown]
        small, large = self._run(shapes, [batch[:SMALL] for batch in self._large], self._large)
        for tensor, s, t in zip(unknown, small, large, strict=True):
            sizes[tensor.name] = (tuple(int(d) for d in s), tuple(int(d) for d in t))
        return sizes

    def name(self, tensor: Any) -> str:
        """The tensor's name in the program."""
        names = (*self.program.parameters, *self.program.inputs)
        fed = {feed.name: name for feed, name in zip(self._feeds, names, strict=True)}
        return fed.get(tensor.name, tensor.name.removeprefix(PREFIX))

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """Sizes at n = 3; equal to those at any n on the axes without samples."""
        return self._sizes[tensor.name][1]

    def known(self, tensor: Any) -> bool:
        """Whether the tensor has sizes at all (resources and tensor lists have none)."""
        return tensor.name in self._sizes

    def batched(self, tensor: Any) -> tuple[int, ...]:
        """The axes whose size depends on n; an impossible (-1,) where even the rank does."""
        if tensor.name not in self._sizes:
            return ()
        small, large = self._sizes[tensor.name]
        if len(small) != len(large):
            return (-1,)
        return tuple(axis for axis, (s, t) in enumerate(zip(small, large, strict=True)) if s != t)

    def multiple(self, tensor: Any, axis: int) -> int | None:
        """How many entries of an axis belong to each sample; None if its size is not a multiple of n."""
        small, large = (sizes[axis] for sizes in self._sizes[tensor.name])
        factor = large - small
        return factor if factor > 0 and factor * LARGE == large else None

    def sample_axis(self, tensor: Any, axis: int) -> SampleAxis | None:
        """How the samples lie within an axis; None if its size is not a multiple of n."""
        factor = self.multiple(tensor, axis)
        if factor is None:
            return None
        large = factor * LARGE
        if factor == 1:
            return SampleAxis(1, 1)
        if tensor.name not in self._values:  # one run for all that will be asked about: each takes its time to start
            self.fetch([t for t in (*self._tensors, tensor) if t.name == tensor.name or self._is_folded(t)])
        before, *after = self.values(tensor)
        ways = [d for d in range(1, factor + 1) if factor % d == 0]  # sample-major first
        ways = _agreeing(ways, [np.moveaxis(before != a, axis, 0).reshape(large, -1).any(axis=1) for a in after])
        if len(ways) > 1 and tensor.dtype.is_floating:
            slopes = self._slopes(tensor)
            ways = _agreeing(ways, [np.moveaxis(d != 0, axis, 0).reshape(large, -1).any(axis=1) for d in slopes])
        return SampleAxis(ways[0], factor // ways[0]) if ways else None

    def _slopes(self, tensor: Any) -> list[NDArray[Any]]:
        """For each sample, the derivative with respect to the tensor of its outputs, summed with random weights."""
        fed = (*self.program.parameters, *self.program.inputs)
        outputs = [self.graph.get_tensor_by_name(PREFIX + name) for name in self.program.outputs if name not in fed]
        rng = np.random.default_rng(0)
        found = []
        with self.graph.as_default():
            for i in range(LARGE):
                seeds = [np.zeros(self.shape(y)) for y in outputs]
                for seed in seeds:
                    seed[i] = rng.uniform(0.5, 1.5, seed[i].shape)
                found += tf.gradients(
                    outputs, tensor, [tf.constant(seed, y.dtype) for seed, y in zip(seeds, outputs, strict=True)]
                )
            found = [tf.convert_to_tensor(slope) for slope in found if slope is not None]
        return self._run(found, self._large)[0]

    def _is_folded(self, tensor: Any) -> bool:
        """Whether a sample has several entries on the samples' axis."""
        axes = self.batched(tensor)
        return len(axes) == 1 and axes[0] >= 0 and (self.multiple(tensor, axes[0]) or 1) > 1

    def values(self, tensor: Any) -> tuple[NDArray[Any], ...]:
        """The tensor's values at three samples, and with each of the three changed in its turn."""
        if tensor.name not in self._values:
            self.fetch([tensor])
        return self._values[tensor.name]

    def _vary(self, beyond: bool) -> list[list[NDArray[Any]]]:
        """The batch with each sample changed in its turn."""
        rng = np.random.default_rng(1)
        return [[_with_changed(batch, i, rng, beyond) for batch in self._large] for i in range(LARGE)]

    def fetch(self, tensors: Sequence[Any]) -> None:
        """Have `values` ready for many tensors in one run."""
        try:
            found = self._run(tensors, self._large, *self._varied)
        except ModelError:  # perhaps at an index beyond a table
            self._varied = self._vary(beyond=False)
            found = self._run(tensors, self._large, *self._varied)
        self._values |= {t.name: values for t, *values in zip(tensors, *found, strict=True)}

    def responses(self, tensors: Sequence[Any]) -> tuple[list[NDArray[Any]], list[list[NDArray[Any]]]]:
        """`values` of many tensors, run anew: before, and for each changed sample."""
        self.fetch(tensors)
        before, *after = ([self._values[t.name][i] for t in tensors] for i in range(1 + LARGE))
        return before, after

    def placed(self, tensors: Sequence[Any], order: Sequence[int]) -> list[NDArray[Any]]:
        """Values of the tensors for some of the three samples, in another order."""
        return self._run(tensors, [batch[list(order)] for batch in self._large])[0]

    def nudged(self, tensors: Sequence[Any]) -> list[NDArray[Any]]:
        """Values of the tensors with every parameter and input moved by two units of rounding."""
        rng = np.random.default_rng(2)
        theta = [_nudged(np.asarray(value), rng) for value in self._theta]
        return self._run(tensors, [_nudged(batch, rng) for batch in self._large], theta=theta)[0]


def _nudged(values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    if values.dtype.kind not in "fV":
        return values
    return (values.astype(np.float64) * (1 + unit(values.dtype) * rng.choice([-1, 1], values.shape))).astype(
        values.dtype
    )


def unit(dtype: np.dtype[Any]) -> float:
    """Unit of rounding: the relative distance of neighbouring numbers, or half of it in bfloat16."""
    return 2.0**-8 if dtype.kind == "V" else float(np.finfo(dtype).eps)  # V: bfloat16
