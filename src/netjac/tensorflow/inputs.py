"""Derivatives of the outputs with respect to the inputs, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.errors import DtypeError
from netjac.spaces import ParameterSpace
from netjac.tensorflow import probe
from netjac.tensorflow.match import Graph
from netjac.tensorflow.mixing import mixing_error, refuse_mixing
from netjac.tensorflow.survey import LARGE, Survey
from netjac.tensorflow.symbolic import sweeps
from netjac.tensorflow.trace import Signature, argument_specs, flat_outputs, trace


class InputExtractor:
    """One compiled function x → d outputs / d x of each sample, for one model and signature.

    Parameters
    ----------
    model, signature, leaves
        As for `netjac.tensorflow.extractor.Extractor`.
    """

    def __init__(self, model: Any, signature: Signature, leaves: Sequence[Any]) -> None:
        for name in signature.dtypes:
            if not tf.as_dtype(name).is_floating:
                raise DtypeError(
                    f"an input has dtype {name}, for which no derivative exists. If its values are real numbers, "
                    "convert them to floating point (x.astype('float32')); if they are indices, differentiate with "
                    "respect to the embedding's output: split the model there and pass the second part."
                )
        self._signature = signature
        self._trace = trace(model, signature, ParameterSpace((), ()))
        probe.refuse_random(self._trace.program)
        self._compiled = tf.function(self._run, autograph=False).get_concrete_function(*argument_specs(self._trace))
        self._check(leaves)

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
