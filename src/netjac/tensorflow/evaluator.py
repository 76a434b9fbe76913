"""What `netjac.jacobian` and the solvers call: extractors, made once and kept as long as their model lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

from netjac import planning
from netjac.allocation import Limit
from netjac.errors import ModelError
from netjac.jacobian import Jacobian
from netjac.plans import Plan
from netjac.progress import Shown, hidden
from netjac.spaces import ParameterSpace
from netjac.tensorflow import forecast
from netjac.tensorflow.extractor import Extractor
from netjac.tensorflow.fingerprint import fingerprint
from netjac.tensorflow.inputs import CrossExtractor, InputExtractor
from netjac.tensorflow.layers import is_layer
from netjac.tensorflow.precision import requested, wide_tensor
from netjac.tensorflow.second import SecondProduct
from netjac.tensorflow.trace import Signature, floating_type, parameter_space, signature_of
from netjac.tiled import TiledJacobian

_KEPT: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_COLUMNS: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], tuple[ParameterSpace, Any]]] = (
    weakref.WeakKeyDictionary()
)
_LOCK = threading.RLock()
T = TypeVar("T")


def _keep(model: Any, key: Any, make: Callable[[], T]) -> T:
    """The result of ``make``, kept with the model under ``key`` until what it was made of changes in Python.

    Made anew where a model can be kept with nothing.
    """
    owner, part = getattr(model, "__self__", model), getattr(model, "__func__", None)
    with _LOCK:
        try:
            kept = _KEPT.setdefault(owner, {})
        except TypeError:  # neither hashable nor weakly referable
            kept = {}
        found = kept.get((part, key))
        if found is None or found[1] != fingerprint(model):
            made = make()
            found = kept[part, key] = (made, fingerprint(model))  # after the trace, which may count its own calls
        result: T = found[0]
        return result


def _columns(model: Any) -> ParameterSpace:
    """The columns of a layer or a model, laid out once for as long as it trains the same variables."""
    variables = tuple(model.trainable_variables)
    key = tuple(map(id, variables))
    with _LOCK:
        kept = _COLUMNS.setdefault(model, {})
        if not variables or key not in kept:
            kept[key] = (parameter_space(model), variables)  # these too, so that none of their ids is another's later
        return kept[key][0]


class Evaluator:
    """The Jacobian of one model at one x, for any θ: what a solver calls at each step.

    Attributes
    ----------
    parameters : ParameterSpace
        The columns, live.
    output_space : OutputSpace
        The rows.
    coverage : Coverage
        What becomes of each variable.
    dtype : numpy.dtype
        Of the factors.
    n : int
        Samples in x.
    """

    def __init__(self, extractor: Extractor, leaves: Sequence[Any]) -> None:
        self._extractor = extractor
        self._x = [tf.convert_to_tensor(leaf) for leaf in leaves]
        self.n = int(self._x[0].shape[0])
        self.parameters = extractor.parameters
        self.output_space = extractor.output_space
        self.coverage = extractor.coverage
        self.dtype = extractor.dtype
        self._limit = Limit()
        self._second: SecondProduct | None = None

    def evaluate(self, theta: ArrayLike | None = None, memory: float | str | None = None) -> Jacobian | TiledJacobian:
        """The Jacobian at the vector ``theta`` (m,), or at the present weights; the model's weights are not touched.

        ``memory`` as for `netjac.jacobian`. What once could not be allocated is not tried again.
        """
        return self._extractor.evaluate(self._x, theta, memory, self._limit)

    @property
    def footprint(self) -> planning.Footprint:
        """Bytes that the factors of some samples and outputs take."""
        return self._extractor.footprint

    @property
    def layer_bytes(self) -> int:
        """Most bytes of the layers' Kronecker factors, for conjugate gradients."""
        return self._extractor.layer_bytes

    def default_budget(self) -> int | None:
        """Bytes that `netjac.jacobian` allows itself where it is not told; None where all is well within that."""
        return forecast.default_budget(self._extractor, self.n)

    def plan(self, n: int, budget: int | None) -> Plan:
        """What the Jacobian of ``n`` samples within a budget in bytes will take; the default budget for None."""
        if budget is None:
            budget = forecast.default_budget(self._extractor, n)
        return forecast.make(self._extractor, n, budget)

    def outputs(self, theta: ArrayLike | None = None) -> NDArray[Any]:
        """The flat outputs (n, l) alone, at ``theta`` or at the present weights."""
        return self._extractor.outputs(self._x, theta)

    def second_product(self, theta: ArrayLike, u: ArrayLike, v: ArrayLike) -> NDArray[Any]:
        """Σ u[n, l] ∇²y[n, l] v (m,), for u (n, l) and v (m,): what a Gauss–Newton Hessian leaves out.

        By two backward passes; compiled at the first call, and compared there with a difference of first derivatives.

        Raises
        ------
        ProbeError
            Where TensorFlow's second derivatives are wrong: some of its operations hold a mean or a variance fixed.
        ModelError, DtypeError
            Where an operation has none, and where the network is not evaluated in float64.
        """
        point = np.asarray(theta, np.float64)
        if self._second is None:
            found = SecondProduct(self._extractor.trace)
            found.check(point, self._x, lambda at, rows: self._extractor.evaluate(self._x, at).T @ rows)
            self._second = found
        return self._second(point, np.asarray(u), np.asarray(v), self._x)


def evaluator(model: Any, x: Any, variables: Sequence[Any] | None = None, *, dtype: Any = None) -> Evaluator:
    """The `Evaluator` of ``model`` at ``x``; traced and probed on the first use of a model and signature.

    Parameters
    ----------
    model, x, variables, dtype
        As for `netjac.jacobian`. With ``dtype="float64"`` each ``theta`` is used in full precision, and
        ``evaluator.parameters.assign`` writes it back in the variables' own types.

    Examples
    --------
    ::

        network = netjac.tensorflow.evaluator(model, x, dtype="float64")
        theta = network.parameters.ravel()  # float64
        J = network.evaluate(theta + 1e-9)  # a step that float32 would lose
    """
    _refuse_graphs("jacobian", "use netjac.jacobian_tensor(model, x), a tensor that can be differentiated again")
    extractor, leaves, _ = _extractor(model, x, variables, requested(dtype))
    return Evaluator(extractor, leaves)


def extractor_of(model: Any, x: Any, variables: Sequence[Any] | None = None) -> tuple[Extractor, list[Any]]:
    """The `Extractor` that is kept for ``model`` and the signature of ``x``, and the leaves of ``x``."""
    extractor, leaves, _ = _extractor(model, x, variables)
    return extractor, leaves


def kept_with(model: Any, x: Any, variables: Sequence[Any] | None, make: Callable[[Extractor], T]) -> T:
    """What ``make`` makes of that extractor, kept as long as it is."""
    extractor, _, key = _extractor(model, x, variables)
    return _keep(model, (make, key), lambda: make(extractor))


def _extractor(
    model: Any, x: Any, variables: Sequence[Any] | None, dtype: str | None = None
) -> tuple[Extractor, list[Any], Any]:
    whole = variables is None and is_layer(model) and model.built
    parameters = _columns(model) if whole else parameter_space(model, variables)
    own = floating_type(parameters)
    signature, leaves = signature_of(x, dtype or own)
    if dtype is not None:  # traced in the model's own type
        signature = replace(signature, dtypes=tuple(own if d == dtype else d for d in signature.dtypes))
        leaves = [wide_tensor(leaf) for leaf in leaves]
    key = (tuple(id(variable) for variable in parameters.variables or ()), signature.key, dtype)
    make = partial(Extractor, model, signature, leaves, parameters, wide=dtype is not None)
    return _keep(model, key, make), leaves, key


def _refuse_graphs(name: str, instead: str) -> None:
    """Say what to call instead where a graph is under construction, and nothing has a value."""
    if tf.executing_eagerly():
        return
    where = "a tf.function"
    if not tf.compat.v1.get_default_graph().building_function:
        where, instead = "a graph of tf.compat.v1", "use netjac.tensorflow.graph.jacobian(ys, xs)"
    error = ModelError(
        f"netjac.{name} computes numbers, and was called inside {where}, where nothing has a value yet. "
        f"Call it outside; or, inside, {instead}."
    )
    error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph then leaves the error as it is
    raise error


def jacobian(
    model: Any,
    x: Any,
    variables: Sequence[Any] | None = None,
    memory: float | str | None = None,
    *,
    dtype: Any = None,
    progress: Shown = None,
) -> Jacobian | TiledJacobian:
    """See `netjac.jacobian`."""
    hidden(progress)
    network = evaluator(model, x, variables, dtype=dtype)
    J = network.evaluate(memory=network.default_budget() if memory is None else memory)
    J.progress = progress
    return J


def input_jacobian(model: Any, x: Any, across_samples: bool = False) -> Any:
    """See `netjac.input_jacobian`."""
    _refuse_graphs("input_jacobian", "use TensorFlow's own tape.batch_jacobian(y, x)")
    variables = getattr(model, "trainable_variables", None)
    signature, leaves = signature_of(x, floating_type(parameter_space(model)) if variables else None)

    def extractor(given: Signature) -> InputExtractor | CrossExtractor:
        return CrossExtractor(model, given) if across_samples else InputExtractor(model, given, leaves)

    def make() -> InputExtractor | CrossExtractor:
        try:
            return extractor(signature)
        except ModelError:  # a callable does not say which type it computes in
            if variables or set(signature.dtypes) not in ({"float32"}, {"float64"}):
                raise
            other = "float32" if "float64" in signature.dtypes else "float64"
            with suppress(ModelError):
                return extractor(replace(signature, dtypes=(other,) * len(leaves)))
            raise

    found = _keep(model, ("inputs", across_samples, signature.key), make)(leaves)
    return tf.nest.pack_sequence_as(signature.structure, found)


parameters = parameter_space
