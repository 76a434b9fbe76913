"""What runs on a worker of a cluster: a network that arrives once, tiles of factors made of it, and their verbs.

A tile is the Jacobian of some samples at one θ. It is made where its data are and stays there; what its verbs return
is as large as a vector, or as Jᵀ J. Every function here is given all it needs, so that whatever was on a worker that
died can be made again on another. Sums are taken in float64. No scheduler is named here: see `netjac.distributed`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from netjac import kronecker
from netjac.blocks.base import Placement
from netjac.data import leaves, mapped
from netjac.errors import NetjacError, WorkerError
from netjac.jacobian import Jacobian
from netjac.optimize.base import network_evaluator
from netjac.optimize.evaluations import Evaluator
from netjac.optimize.problem import LeastSquares

Array = NDArray[np.float64]

MODELS = 8
"""Networks that a worker keeps unpacked, with what was compiled for them; the one not used for longest goes first."""

_unpacked: OrderedDict[str, tuple[Any, Any]] = OrderedDict()
_lock = threading.RLock()


# ---- the network


@dataclass(frozen=True)
class Network:
    """A network as it travels.

    Attributes
    ----------
    pickled
        Bytes of (model, variables), or of (function, None) where ``built``.
    built
        Whether the pickled function returns the model, or (model, variables).
    trainable, dtype
        As for `netjac.LeastSquares`.
    """

    pickled: bytes
    built: bool = False
    trainable: Any = None
    dtype: str | None = None

    @cached_property
    def digest(self) -> str:
        """What the worker's copy is known by."""
        return hashlib.sha256(self.pickled).hexdigest()

    def unpacked(self) -> tuple[Any, Any]:
        """The model and its variables: one copy in each process, so that it is traced and compiled there once."""
        with _lock:
            found = _unpacked.pop(self.digest, None)
            if found is None:
                found = self._unpack()
            _unpacked[self.digest] = found
            while len(_unpacked) > MODELS:
                _unpacked.popitem(last=False)
            return found

    def _unpack(self) -> tuple[Any, Any]:
        try:
            first, variables = pickle.loads(self.pickled)
        except Exception as error:  # unpickling runs whatever code the model brings
            raise WorkerError(
                f"the model arrived and cannot be put together here ({type(error).__name__}: {error}). The worker "
                "needs the packages that the model's code is in; or give build=, a function that makes the model on "
                "each worker."
            ) from error
        return made_by(first) if self.built else (first, variables)

    def evaluator(self, x: Any) -> Evaluator:
        """Its outputs and Jacobian at some samples."""
        model, variables = self.unpacked()
        return network_evaluator(model, x, variables, self.trainable, self.dtype)


def made_by(build: Callable[[], Any]) -> tuple[Any, Any]:
    """The model and the variables (or None) that a user's function returns."""
    made = build()
    return made if isinstance(made, tuple) else (made, None)


def limit_threads(count: int) -> None:
    """Let TensorFlow use as many threads as the worker may; without effect once it has been imported."""
    if "tensorflow" not in sys.modules:
        os.environ["TF_NUM_INTRAOP_THREADS"] = os.environ["TF_NUM_INTEROP_THREADS"] = str(count)


# ---- the data


@final
@dataclass(frozen=True)
class MappedFile:
    """Some rows of an array in a file, C order, by its path."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def __getitem__(self, samples: slice) -> MappedFile:
        start, stop, _ = samples.indices(self.shape[0])
        row = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=self.offset + start * row)

    def read(self) -> NDArray[Any]:
        """The rows, in memory."""
        if not self.shape[0]:
            return np.empty(self.shape, self.dtype)
        return np.array(np.memmap(self.path, self.dtype, "r", self.offset, self.shape))


@final
@dataclass(frozen=True)
class Stored:
    """Some rows of an array that travels as a reference to where it is stored, such as one of Zarr."""

    array: Any
    samples: slice

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return tuple(self.array.shape)

    def __getitem__(self, samples: slice) -> Stored:
        return replace(self, samples=samples)

    def read(self) -> NDArray[Any]:
        """The rows, in memory."""
        return np.asarray(self.array[self.samples])


def read(parts: Any, samples: slice) -> Any:
    """A structure of arrays out of one of arrays and references."""
    with located(samples):
        return mapped(lambda leaf: leaf.read() if isinstance(leaf, MappedFile | Stored) else leaf, parts)


# ---- errors


def name(samples: slice) -> str:
    """A range of samples, for a message."""
    return f"samples {samples.start} to {samples.stop - 1}"


@contextmanager
def located(samples: slice) -> Iterator[None]:
    """Errors name the samples; those of netjac keep their class."""
    try:
        yield
    except NetjacError as error:
        raise type(error)(f"{name(samples)}: {error}") from error
    except Exception as error:  # of a person's model or function; said again with the samples
        raise WorkerError(f"{name(samples)}: {type(error).__name__}: {error}") from error


# ---- tiles


@final
@dataclass(frozen=True, eq=False)
class Tile:
    """The Jacobian of some samples, with the range of the data that they are in."""

    jacobian: Jacobian
    samples: slice

    def __sizeof__(self) -> int:  # what a scheduler is told about the cost of moving it
        return self.jacobian.nbytes + self.jacobian.y.nbytes


@final
@dataclass(frozen=True, eq=False)
class Residuals:
    """The residual of some samples and its derivative, None where outputs are not finite."""

    values: Array
    derivative: Any
    samples: slice

    def __sizeof__(self) -> int:
        data = getattr(self.derivative, "data", None)
        return int(self.values.nbytes) + int(getattr(data, "nbytes", 0))


@dataclass(frozen=True)
class Fit:
    """What `netjac.LeastSquares` takes beside the model and arrays: residual and extra."""

    residual: Any = None
    extra: Any = None


def first_look(network: Network, x: Any) -> Jacobian:
    """The Jacobian of a few samples: its spaces, coverage, type and bytes a sample."""
    with located(slice(0, len(leaves(x)[0]))):
        found: Any = network.evaluator(x).evaluate()
        return found


def evaluate(network: Network, x: Any, theta: Array, samples: slice) -> Tile:
    """The tile of the samples ``x`` at ``theta`` (m,)."""
    with located(samples):
        found: Any = network.evaluator(x).evaluate(theta)
        return Tile(found, samples)


def second_product(network: Network, x: Any, theta: Array, u: Array, v: Array, samples: slice) -> Array:
    """Their part of Σ u[n, l] ∇²y[n, l] v (m,)."""
    with located(samples):
        return np.asarray(network.evaluator(x).second_product(theta, u, v), np.float64)


def residuals(network: Network, x: Any, given: Any, fit: Fit, theta: Array, check: bool, samples: slice) -> Residuals:
    """Residual and derivative of the samples ``x`` at ``theta`` (M,); ``given`` holds their targets and weights."""
    with located(samples):
        evaluator = network.evaluator(x)
        found = evaluator.evaluate(theta[: evaluator.parameters.size])
        if not np.all(np.isfinite(found.y)):
            return Residuals(np.full(1, np.nan), None, samples)
        y, weights = given
        problem = LeastSquares.from_evaluator(
            _Evaluated(evaluator, found),
            y,
            residual=fit.residual,
            weights=weights,
            extra=fit.extra,
            jac="operator",
            check=check,
        )
        return Residuals(problem.fun(theta), problem.jac(theta), samples)


class _Evaluated:
    """An evaluator at the one θ where its Jacobian is there already."""

    def __init__(self, evaluator: Evaluator, found: Any) -> None:
        self.parameters, self.output_space = evaluator.parameters, evaluator.output_space
        self.second_product = evaluator.second_product
        self._found = found

    def evaluate(self, theta: Any = None) -> Any:
        return self._found


def run(verb: Callable[..., Any], tile: Tile | Residuals, *arguments: Any) -> Any:
    """A verb of a tile; errors name its samples."""
    with located(tile.samples):
        return verb(tile, *arguments)


def outputs(tile: Tile) -> NDArray[Any]:
    """y (n, l)."""
    return tile.jacobian.y


def jacobian(tile: Tile) -> Jacobian:
    """The factors themselves."""
    return tile.jacobian


def take(tile: Tile, samples: Any) -> Tile:
    """Some of its samples."""
    return Tile(tile.jacobian[samples], tile.samples)


def scaled(tile: Tile, B: NDArray[Any]) -> Tile:
    """Rows combined per sample."""
    return Tile(tile.jacobian.scaled(B), tile.samples)


def columns(tile: Tile, positions: Sequence[int]) -> Tile:
    """Some variables, by position: a worker's copy of a model may call them otherwise."""
    J = tile.jacobian
    return Tile(J.columns([J.parameters.names[i] for i in positions]), tile.samples)


def product(tile: Tile, V: NDArray[Any]) -> NDArray[Any]:
    """J V (n, l, q)."""
    J = tile.jacobian
    out: NDArray[Any] = (J @ V).reshape(J.n, J.l, -1)
    return out


def adjoint(tile: Tile, U: NDArray[Any]) -> Array:
    """Jᵀ U (m, q) for U (n, l, q)."""
    return np.asarray(tile.jacobian.T @ U.reshape(tile.jacobian.shape[0], -1), np.float64)


def normal(tile: Tile, weights: Array | None, dtype: np.dtype[Any]) -> Array:
    """Jᵀ diag(w) J (m, m) for weights (n, l)."""
    return np.asarray(tile.jacobian.normal(weights, dtype, threads=1), np.float64)


def normal_product(tile: Tile, v: Array, weights: NDArray[Any] | None) -> Array:
    """Jᵀ diag(w) J v (m, q) for v (m, q) and weights (n, l)."""
    return np.asarray(tile.jacobian._normal_product(v, weights), np.float64)


def places(tile: Tile, limit: int | None) -> list[Placement]:
    """Where the layers lie whose Kronecker factors `layers` gives, within so many bytes."""
    return kronecker.places(tile.jacobian.parts, limit)


def layers(tile: Tile, weights: Array | None, places: Sequence[Placement]) -> Array:
    """Kronecker factors of the layers there, of rows with weights (n, l), as one vector."""
    found = kronecker.nothing(places)
    kronecker.add(found, tile.jacobian.parts, weights, inputs=True)
    return kronecker.packed(found)


def column_squares(tile: Tile, weights: Array | None) -> Array:
    """Squared norm of each column (m,), the squares times weights (n, l)."""
    return np.asarray(tile.jacobian.column_norms(squared=True, weights=weights), np.float64)


def row_squares(tile: Tile) -> NDArray[Any]:
    """Squared norm of each row (n*l,)."""
    return tile.jacobian.row_norms(squared=True)


def dense(tile: Tile, samples: slice, layout: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Some of its samples as an array."""
    return tile.jacobian[samples].to_array(layout, dtype=dtype, threads=1)


def squares(tile: Residuals) -> Array:
    """‖r‖², and the number of residuals."""
    return np.array([tile.values @ tile.values, tile.values.size])


def gradient(tile: Residuals) -> Array:
    """Rᵀ r (M,)."""
    return np.asarray(tile.derivative.rmatvec(tile.values))


def residual_normal(tile: Residuals) -> Array:
    """Rᵀ R (M, M)."""
    return np.asarray(tile.derivative.normal())


def residual_column_squares(tile: Residuals) -> Array:
    """Squared norm of each column of R (M,)."""
    return np.asarray(tile.derivative.column_norms(squared=True))


def residual_places(tile: Residuals, limit: int | None) -> list[Placement]:
    """Where the layers lie whose Kronecker factors `residual_layers` gives, within so many bytes."""
    return [layer.placement for layer in tile.derivative.rows.kronecker(limit)]


def residual_layers(tile: Residuals, places: Sequence[Placement]) -> Array:
    """Kronecker factors of the layers there, of the rows of R, as one vector."""
    found = {layer.placement: layer for layer in tile.derivative.rows.kronecker()}
    return kronecker.packed([found[place] for place in places])


def residual_normal_product(tile: Residuals, v: Array) -> Array:
    """Rᵀ R v (M,)."""
    R = tile.derivative
    return np.asarray(R.rmatvec(R.matvec(v)))


def total(parts: Sequence[Array]) -> Array:
    """Their sum, taken in the order given."""
    out = np.array(parts[0], np.float64)
    for part in parts[1:]:
        out += part
    return out
