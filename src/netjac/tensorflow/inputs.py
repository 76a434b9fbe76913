"""Derivatives of the outputs with respect to the inputs: sample by sample, or of every sample to every other."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.errors import DtypeError, SampleMixingError
from netjac.spaces import ParameterSpace
from netjac.tensorflow import probe
from netjac.tensorflow.linearity import refuse_nonlinear
from netjac.tensorflow.match import Graph
from netjac.tensorflow.mixing import mixing_error, refuse_mixing
from netjac.tensorflow.survey import LARGE, Survey
from netjac.tensorflow.symbolic import sweeps
from netjac.tensorflow.trace import Signature, Trace, argument_specs, flat_outputs, trace
from netjac.tensorflow.vectorise import vectorized_map

TILE = 2**22  # numbers of the matrix that are computed at a time


class InputExtractor:
    """One compiled function x → d outputs / d x of each sample, for one model and signature.

    Parameters
    ----------
    model, signature, leaves
        As for `netjac.tensorflow.extractor.Extractor`.
    """

    def __init__(self, model: Any, signature: Signature, leaves: Sequence[Any]) -> None:
        self._signature = signature
        self._trace = _trace(model, signature)
        self._compiled = tf.function(self._run, autograph=False).get_concrete_function(*argument_specs(self._trace))
        try:
            self._check(leaves)
        except SampleMixingError as error:
            raise SampleMixingError(
                f"{error} For the derivative of each sample's outputs with respect to all samples' inputs, write "
                "input_jacobian(..., across_samples=True)."
            ) from None

    def __call__(self, leaves: Sequence[Any]) -> list[NDArray[Any]]:
        """One array (n, l, *shape of a sample) a leaf of x."""
        n, rows = leaves[0].shape[0], self._trace.output_space.size
        if n == 0:
            pairs = zip(self._signature.shapes, self._signature.dtypes, strict=True)
            return [np.zeros((0, rows, *shape), dtype) for shape, dtype in pairs]
        pairs = zip(leaves, self._signature.dtypes, strict=True)
        return [np.asarray(d) for d in self._compiled(*(tf.cast(leaf, dtype) for leaf, dtype in pairs))]

    def _run(self, *x: Any) -> list[Any]:
        outputs = self._trace.program.insert([], x, self._trace.program.outputs)
        return sweeps(outputs, [segment.size for segment in self._trace.output_space.segments], x, list)

    def _check(self, leaves: Sequence[Any]) -> None:
        """No sample's outputs may depend on another sample: three gradients, each of one sample's outputs alone."""
        leaves = [np.asarray(tf.cast(x, dtype)) for x, dtype in zip(leaves, self._signature.dtypes, strict=True)]
        survey = Survey(self._trace.program, argument_specs(self._trace), [], leaves)
        graph = Graph(survey)
        refuse_mixing(survey, graph)
        refuse_nonlinear(survey)
        rng = np.random.default_rng(20150)
        u = rng.uniform(0.5, 1.5, (LARGE, self._trace.output_space.size))

        def run(*x: Any) -> list[Any]:
            y = flat_outputs(self._trace.program.insert([], x, self._trace.program.outputs), self._trace)
            seeds = [tf.constant(u * (np.arange(LARGE) == i)[:, None], y.dtype) for i in range(LARGE)]
            rows = [tf.gradients(y, list(x), grad_ys=seed) for seed in seeds]
            return [
                [tf.zeros_like(a) if d is None else tf.convert_to_tensor(d) for d, a in zip(r, x, strict=True)]
                for r in rows
            ]

        compiled = tf.function(run, autograph=False).get_concrete_function(*argument_specs(self._trace))
        for i, row in enumerate(compiled(*survey.batch)):
            for gradient in row:
                sizes = np.abs(np.asarray(gradient, np.float64)).reshape(LARGE, -1).max(axis=1, initial=0)
                if np.any(np.delete(sizes, i) > 1e-6 * max(sizes[i], np.finfo(np.float32).tiny)):
                    raise mixing_error(survey, graph)


class CrossExtractor:
    """One compiled function x → d outputs / d x, of every sample's outputs with respect to every sample's inputs.

    A row of the matrix is one ordinary backward pass; rows are vectorised by tiles where TensorFlow can, and taken one
    by one otherwise. Nothing is assumed about how samples depend on each other, so that there is nothing to probe.

    Parameters
    ----------
    model, signature
        As for `InputExtractor`.
    """

    def __init__(self, model: Any, signature: Signature) -> None:
        self._signature = signature
        self._trace = _trace(model, signature)
        self._vectorised = not self._trace.program.has_control_flow  # whose derivatives TensorFlow cannot vectorise
        try:
            self._compiled = self._compile()
        except (ValueError, TypeError, NotImplementedError):  # nor those of some other operations
            if not self._vectorised:
                raise
            self._vectorised = False
            self._compiled = self._compile()

    def __call__(self, leaves: Sequence[Any]) -> list[NDArray[Any]]:
        """One array (n, l, n, *shape of a sample) a leaf of x."""
        signature = self._signature
        x = [tf.cast(leaf, dtype) for leaf, dtype in zip(leaves, signature.dtypes, strict=True)]
        n, rows = int(x[0].shape[0]), self._trace.output_space.size
        found = [
            np.empty((n * rows, n, *shape), tf.as_dtype(dtype).as_numpy_dtype)
            for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
        ]
        step = max(1, TILE // max(1, n * sum(prod(shape) for shape in signature.shapes))) if self._vectorised else 1
        for start in range(0, n * rows, step):
            tile = slice(start, min(start + step, n * rows))
            for array, part in zip(found, self._compiled(tf.range(tile.start, tile.stop), *x), strict=True):
                array[tile] = np.asarray(part)
        return [array.reshape(n, rows, *array.shape[1:]) for array in found]

    def _compile(self) -> Any:
        numbers = tf.TensorSpec((None,), tf.int32)
        return tf.function(self._run, autograph=False).get_concrete_function(numbers, *argument_specs(self._trace))

    def _run(self, numbers: Any, *x: Any) -> list[Any]:
        """The rows of those numbers, one array (rows, n, *shape) a leaf."""
        program = self._trace.program
        y = tf.reshape(flat_outputs(program.insert([], x, program.outputs), self._trace), [-1])

        def one(number: Any) -> list[Any]:
            gradients = tf.gradients(y, list(x), grad_ys=tf.one_hot(number, tf.size(y), dtype=y.dtype))
            pairs = zip(gradients, x, strict=True)
            return [tf.zeros_like(leaf) if d is None else tf.convert_to_tensor(d) for d, leaf in pairs]

        if self._vectorised:
            rows: list[Any] = vectorized_map(one, numbers)
            return rows
        return [part[None] for part in one(numbers[0])]


def _trace(model: Any, signature: Signature) -> Trace:
    """The model without parameters, refused where an input has no derivative or the model draws random numbers."""
    for name in signature.dtypes:
        if not tf.as_dtype(name).is_floating:
            raise DtypeError(
                f"an input has dtype {name}, for which no derivative exists. If its values are real numbers, "
                "convert them to floating point (x.astype('float32')); if they are indices, differentiate with "
                "respect to the embedding's output: split the model there and pass the second part."
            )
    traced = trace(model, signature, ParameterSpace((), ()))
    probe.refuse_random(traced.program)
    return traced
