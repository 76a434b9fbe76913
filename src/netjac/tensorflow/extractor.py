"""From a model to Jacobians: trace, survey, match, evaluate, factor and probe, put together for one signature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

from netjac import factor, kronecker, planning
from netjac.allocation import Limit, attempt
from netjac.blocks.base import Block
from netjac.jacobian import Jacobian
from netjac.sites import SiteForm, SiteValues, UseSite
from netjac.spaces import OutputSpace, ParameterSpace
from netjac.tensorflow import probe
from netjac.tensorflow.assembly import assemble
from netjac.tensorflow.evaluate import CompiledSites
from netjac.tensorflow.footprint import footprint
from netjac.tensorflow.frozen import FrozenNetwork
from netjac.tensorflow.recheck import Recheck, suspect
from netjac.tensorflow.trace import Signature, Trace, trace
from netjac.tiled import TiledJacobian

PROBE_BYTES = 256 << 20
"""Factors of the probe's few samples may take that much; the probe tiles more."""

PROBE_OUTPUTS = 256
"""With more outputs a sample the probe tiles as well: it looks at their combinations, and at few of them alone."""

PROBE_TILE = 32
"""Outputs of such a tile."""


class Extractor:
    """Jacobians of one model for inputs of one signature, any number of samples.

    It holds no reference to the model, only to its variables, so that a model that is dropped can be collected.

    Parameters
    ----------
    model, variables
        As for `netjac.jacobian`.
    signature, leaves
        Of the first x; a few of its samples serve for the survey and the probe.
    parameters
        The columns.
    wide
        Whether to evaluate in float64, whatever the model computes in; ``signature`` is then what the model takes,
        and every x is given in float64.
    """

    def __init__(
        self, model: Any, signature: Signature, leaves: Sequence[Any], parameters: ParameterSpace, wide: bool = False
    ) -> None:
        self._trace = trace(model, signature, parameters, wide)
        self.parameters = self._trace.parameters
        self.output_space: OutputSpace = self._trace.output_space
        theta = [np.asarray(variable) for variable in parameters.variables or ()]
        if wide:
            theta = [value.astype(np.float64) for value in theta]
        found = assemble(self._trace, theta, leaves)
        self._sites = CompiledSites(self._trace, found.groups, found.fallbacks)
        self.coverage = found.coverage
        self.footprint = footprint(self._trace, found)
        wide = any(segment.dtype == "float64" for segment in self.output_space.segments)
        self.dtype = np.dtype(np.float64 if wide else np.float32)
        self._plan = factor.plan(self._sites.sites, parameters)
        probe.check(self._trace, found.survey, found.graph, theta, self._probed)
        operation = suspect(found.survey, found.graph)
        self._recheck = None if operation is None else Recheck(self._trace, operation)

    @property
    def trace(self) -> Trace:
        """What was traced."""
        return self._trace

    @property
    def sites(self) -> CompiledSites:
        """The sites, compiled, and what builds them in other graphs."""
        return self._sites

    def evaluate(
        self,
        x: Sequence[Any],
        theta: ArrayLike | None = None,
        memory: float | str | None = None,
        limit: Limit | None = None,
    ) -> Jacobian | TiledJacobian:
        """The Jacobian at ``x`` (tensors) and the vector ``theta`` (m,), or at the variables' present values.

        Tiled where its factors would take more than ``memory``, or cannot be allocated, which ``limit`` then knows.
        """
        budget = None if memory is None else planning.memory_bytes(memory)
        limit = Limit() if limit is None else limit
        n, l = int(x[0].shape[0]), self.output_space.size
        if n == 0:
            return self._empty()
        vector = self._vector(theta)
        peak = self.footprint.peak(n, l)
        found: Jacobian | TiledJacobian | None = None
        if budget is None or peak <= budget:
            what = f"the factors of {n} samples × {l} outputs"
            found = attempt(lambda *_: self._jacobian(vector, x), slice(0, n), slice(0, l), what, limit)
            budget = max(peak // 2, self.least)
        if found is None:
            found = self._tiled(np.array(vector), x, budget, limit)
        if self._recheck is not None:
            self._recheck(vector, x, found)
        return found

    def outputs(self, x: Sequence[Any], theta: ArrayLike | None = None) -> NDArray[Any]:
        """The flat outputs (n, l) alone."""
        if x[0].shape[0] == 0:
            return self._empty().y
        with allocations():
            return _wide(self._sites.outputs(self._vector(theta), x))

    def _vector(self, theta: ArrayLike | None) -> NDArray[Any]:
        return self.parameters.ravel() if theta is None else self.parameters.vector(theta)

    def factors(
        self, theta: NDArray[Any], x: Sequence[Any], seeds: NDArray[Any] | None = None
    ) -> tuple[NDArray[Any], tuple[Block, ...]]:
        """Outputs (n, l) and blocks; ``seeds`` as for `netjac.tensorflow.evaluate.CompiledSites`."""
        with allocations():
            y, values = self._sites(theta, x, seeds)
        return _wide(y), self._plan.build(values)

    def _jacobian(self, theta: NDArray[Any], x: Sequence[Any]) -> Jacobian:
        y, blocks = self.factors(theta, x)
        return Jacobian(self.parameters, self.output_space, y, blocks, self.coverage)

    @property
    def factors_plan(self) -> factor.FactorPlan:
        """How the sites' values become blocks."""
        return self._plan

    @property
    def layer_bytes(self) -> int:
        """Most bytes of the layers' Kronecker factors and their eigenvectors."""
        return sum(map(kronecker.layer_bytes, self._plan.outer))

    @property
    def least(self) -> int:
        """The smallest budget in bytes that works for every verb."""
        return self.most_demanding.need(1, 1)

    def _tiled(self, theta: NDArray[Any], x: Sequence[Any], budget: int, limit: Limit | None = None) -> TiledJacobian:
        planning.tile_sizes(1, 1, self.most_demanding, budget)  # refused before any work
        source = FrozenNetwork(self, x, theta)
        y = source.outputs(budget)
        return TiledJacobian(source, self.parameters, self.output_space, y, self.coverage, budget, limit=limit)

    @property
    def most_demanding(self) -> planning.Footprint:
        """What any verb of a `TiledJacobian` needs: combinations of outputs, in double precision."""
        combined = self.footprint.combined(self.output_space.size)
        return combined if self.dtype == np.float64 else combined.widened()

    def _probed(self, theta: NDArray[Any], x: Sequence[Any]) -> Jacobian | TiledJacobian:
        """What the probe looks at: tiled where the outputs are so many that even its few samples take much."""
        l = self.output_space.size
        if l <= PROBE_OUTPUTS and self.footprint.peak(len(x[0]), l) <= PROBE_BYTES:
            return self._jacobian(theta, x)
        some = min(PROBE_BYTES, self.footprint.need(1, PROBE_TILE))
        return self._tiled(theta, x, max(some, self.least))

    def _empty(self) -> Jacobian:
        rows = self.output_space.size
        dtype = np.result_type(np.float32, *(s.dtype for s in self.parameters.segments if "16" not in s.dtype))
        values = [_empty_values(site, rows, dtype) for site in self._sites.sites]
        y = np.zeros((0, rows), dtype)
        return Jacobian(self.parameters, self.output_space, y, self._plan.build(values), self.coverage)


@contextmanager
def allocations() -> Iterator[None]:
    """TensorFlow's error for memory that it could not have, as Python's."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise MemoryError(f"TensorFlow could not allocate the memory it needed: {error.message}") from error


def _wide(y: NDArray[Any]) -> NDArray[Any]:
    """Half precision as float32: NumPy and SciPy compute in nothing narrower."""
    return y if y.dtype in (np.float32, np.float64) else y.astype(np.float32)


def _empty_values(site: UseSite, rows: int, dtype: Any) -> SiteValues:
    g, k, c = site.entries.shape
    if site.form is SiteForm.DENSE:
        return SiteValues(dense=np.zeros((0, rows, g * k * c), dtype))
    d = np.zeros((0, rows, 1, g * c), dtype)
    if site.form is SiteForm.EMBEDDING:
        return SiteValues(D=d, indices=np.zeros((0, 1), np.int64))
    return SiteValues(D=d, A=np.zeros((0, 1, g, k), dtype))
