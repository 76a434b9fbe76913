"""One compiled function of (θ, x): outputs and the values of every site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.sites import SiteForm, SiteValues, UseSite
from netjac.tensorflow.groups import Group
from netjac.tensorflow.match import plain_name
from netjac.tensorflow.symbolic import Fallback, SiteBuilder, SiteTensors
from netjac.tensorflow.trace import Trace, flat_outputs, vector_specs, weights


@dataclass(frozen=True, eq=False)
class _Slots:
    """Positions, among a compiled function's results, of the arrays of one site; None for what it has not."""

    D: int | None
    A: int | None
    indices: int | None
    scale: int | None
    dense: int | None


def use_sites(trace: Trace, groups: Sequence[Group], fallbacks: Sequence[Fallback]) -> tuple[UseSite, ...]:
    """What `SiteBuilder` builds, told without naming TensorFlow, in its order."""
    cotangents = list(dict.fromkeys(g.cotangents for g in groups if g.form is not SiteForm.DENSE))
    return tuple(
        UseSite(
            g.first.variable,
            plain_name(g.first.operation.name),
            g.form,
            g.first.entries,
            cotangents.index(g.cotangents) if g.form is not SiteForm.DENSE else -1,
        )
        for g in groups
    ) + tuple(
        UseSite(
            f.variable,
            f.operation,
            SiteForm.DENSE,
            np.arange(trace.parameters.segments[f.variable].size).reshape(1, -1, 1),
        )
        for f in fallbacks
    )


class CompiledSites:
    """The compiled functions of one model and signature.

    The one that takes unit cotangents is made at once; those for given cotangents and that for outputs alone on first
    use.

    Parameters
    ----------
    trace, groups, fallbacks
        What to evaluate.
    """

    def __init__(self, trace: Trace, groups: Sequence[Group], fallbacks: Sequence[Fallback]) -> None:
        self._trace = trace
        self.build = SiteBuilder(trace, groups, fallbacks)
        self.sites = use_sites(trace, groups, fallbacks)
        self._slots: list[_Slots] = []
        self._vector_type = vector_specs(trace)[0].dtype
        self._compiled = self._compile(lambda theta, x: self._results(*self.build(theta, x)))
        self._seeded: dict[bool, tuple[Any, bool]] = {}
        self._forward: Any = None

    def __call__(
        self, theta: NDArray[Any], x: Sequence[Any], seeds: NDArray[Any] | None = None
    ) -> tuple[Any, list[SiteValues]]:
        """Outputs (n, l) and the sites' values at the vector ``theta`` (m,) and the tensors ``x``.

        With ``seeds`` (q, n, l), rows are the q combinations of outputs that they weigh; with (q,) integers, these
        outputs.
        """
        vector = tf.constant(theta, self._vector_type)
        tensors = self._compiled(vector, *x) if seeds is None else self._with_seeds(seeds, vector, *x)
        results = [np.asarray(tensor) for tensor in tensors]

        def get(slot: int | None) -> Any:
            return None if slot is None else results[slot]

        values = [SiteValues(get(s.D), get(s.A), get(s.indices), get(s.scale), get(s.dense)) for s in self._slots]
        return results[0], values

    def outputs(self, theta: NDArray[Any], x: Sequence[Any]) -> Any:
        """Outputs (n, l) alone."""
        if self._forward is None:
            program = self._trace.program
            self._forward = self._compile(
                lambda theta, x: flat_outputs(program.insert(theta, x, program.outputs), self._trace)
            )
        return np.asarray(self._forward(tf.constant(theta, self._vector_type), *x))

    def _with_seeds(self, seeds: NDArray[Any], *arguments: Any) -> Sequence[Any]:
        """Results for seeds: all at once, or one after the other where TensorFlow cannot vectorise the sweep."""
        units = seeds.ndim == 1
        if units not in self._seeded:
            self._seeded[units] = self._compile_with_seeds(units)
        compiled, vectorised = self._seeded[units]
        given = tf.constant(seeds, tf.int32 if units else tf.float64)
        if vectorised:
            results: Sequence[Any] = compiled(*arguments, given)
            return results
        parts = [compiled(*arguments, given[i : i + 1]) for i in range(len(seeds))]
        by_row = {position for slots in self._slots for position in (slots.D, slots.dense)}
        return [
            np.concatenate(found, axis=1) if position in by_row else found[0]
            for position, found in enumerate(zip(*parts, strict=True))
        ]

    def _compile_with_seeds(self, units: bool) -> tuple[Any, bool]:
        """The compiled function for seeds of one kind, and whether it takes any number of them or one."""

        def results(theta: Sequence[Any], x: Sequence[Any]) -> list[Any]:
            return self._results(*self.build(theta, x[:-1], x[-1]))

        def spec(q: int | None) -> Any:
            return tf.TensorSpec((q,), tf.int32) if units else tf.TensorSpec((q, None, rows), tf.float64)

        rows = self._trace.output_space.size
        try:
            return self._compile(results, spec(None)), True
        except (ValueError, TypeError, NotImplementedError):  # TensorFlow's vectoriser stumbles over some operations
            return self._compile(results, spec(1)), False

    def _compile(self, function: Callable[[Sequence[Any], Sequence[Any]], Any], *more: Any) -> Any:
        """``function`` of the weights and of x (and more), as a concrete function of one vector θ and of x."""

        def run(vector: Any, *x: Any) -> Any:
            return function(weights(vector, self._trace), x)

        return tf.function(run, autograph=False).get_concrete_function(*vector_specs(self._trace), *more)

    def _results(self, y: Any, sites: Sequence[SiteTensors]) -> list[Any]:
        """What the compiled function returns: y, then every array once."""
        results = [y]

        def keep(tensor: Any) -> int | None:
            if tensor is None:
                return None
            for position, other in enumerate(results):
                if other is tensor:
                    return position
            results.append(tensor)
            return len(results) - 1

        self._slots = [_Slots(keep(s.D), keep(s.A), keep(s.indices), keep(s.scale), keep(s.dense)) for s in sites]
        return results
