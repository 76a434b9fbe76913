"""What a function from outside TensorFlow returns, checked: shapes at every call, the derivative at the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, final

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator

from netjac.arguments import describe
from netjac.errors import DataError, DerivativeError, DtypeError, ShapeError
from netjac.optimize import names, targets
from netjac.optimize.description import counted
from netjac.optimize.losses import Vector
from netjac.spaces import OutputSpace, ParameterSpace

STEPS = (1e-4, 1e-6, 1e-3, 1e-2)
"""Relative steps of the difference: a row agrees if it does at one of them. The first suits smooth code in double
precision, the second crosses fewer kinks, the others see through a simulator's own error."""

NEGLIGIBLE = 1e-5
"""Of the largest row, what an error must exceed: sensitivities that have decayed below the accuracy of an integrator
are not held against it."""

TOLERANCE = 1e-3
"""Relative error of a derivative that is called wrong."""


class Answer(Protocol):
    """What an external function said at some outputs y (n, l) and extra parameters (p,)."""

    @property
    def values(self) -> Vector:
        """(d,): the residual; or the value alone, d = 1."""

    def change(self, along: NDArray[Any], extra: Vector) -> Vector:
        """Derivative of the values (d,) along a direction (n, l) of the outputs and (p,) of the extra parameters."""

    def adjoint(self, rows: Vector) -> tuple[NDArray[Any], Vector]:
        """Combination of rows (d,) of the derivative: with respect to the outputs (n, l) and extra parameters (p,)."""

    def spread(self, along: NDArray[Any], extra: Vector) -> Vector:
        """How large that derivative would be if its terms did not cancel (d,)."""

    def check_derivative(self) -> None:
        """Raise where the values are finite and the derivative is not."""


A = TypeVar("A", bound=Answer)


@final
class External(Generic[A]):
    """A function from outside, called with outputs in the model's own structure and with the extra parameters.

    Parameters
    ----------
    function
        ``function(outputs)``, or ``function(outputs, extra)`` where there are extra parameters.
    read
        Makes an `Answer` of what it returned, given (n, l) and the extra parameters.
    outputs, extra
        What it is called with.
    check
        Whether its derivative is compared with central differences at the first call.

    Attributes
    ----------
    function
        As given.
    failure : BaseException or None
        What the last call raised, if it did.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        read: Callable[[Any, tuple[int, int], ParameterSpace], A],
        outputs: OutputSpace,
        extra: ParameterSpace,
        check: bool,
    ) -> None:
        if not callable(function):
            raise DtypeError(f"the external function must be callable, and is {describe(function)}.")
        self.function, self._read = function, read
        self._outputs, self._extra = outputs, extra
        self._unchecked = check
        self._size: int | None = None
        self.failure: BaseException | None = None

    def __call__(self, y: NDArray[Any], extra: Vector) -> A:
        """Its answer at the outputs y (n, l) and the extra parameters (p,); what it raises goes on, and is kept."""
        self.failure = None
        try:
            answer = self._ask(y, extra)
            if self._size not in (None, answer.values.size):
                raise _other_size(self._size, answer.values.size)
            self._size = answer.values.size
            if np.all(np.isfinite(answer.values)):
                answer.check_derivative()
                if self._unchecked:
                    self._compare(y, extra, answer)
                    self._unchecked = False
        except Exception as error:  # of whatever kind: the fit tells its own failures from those of the code outside
            self.failure = error
            raise
        return answer

    def _ask(self, y: NDArray[Any], extra: Vector) -> A:
        flat = np.array(y, np.float64)
        flat.flags.writeable = False
        given = (names.values(self._extra, extra),) if len(self._extra) else ()
        return self._read(self.function(self._outputs.pack(flat), *given), flat.shape, self._extra)

    def _compare(self, y: NDArray[Any], extra: Vector, answer: A) -> None:
        rng = np.random.default_rng(0)
        still, fixed = np.zeros_like(y, np.float64), np.zeros_like(extra)
        # Along its own signs a derivative cannot cancel, so what is wrong with it shows.
        slopes = answer.adjoint(rng.normal(size=answer.values.size))
        self._compare_along(y, extra, answer, (_direction(y, slopes[0], rng), fixed), "the outputs")
        if extra.size:
            along = _direction(extra[:, None], slopes[1][:, None], rng)[:, 0]
            self._compare_along(y, extra, answer, (still, along), "the extra parameters")

    def _compare_along(
        self, y: NDArray[Any], extra: Vector, answer: A, along: tuple[NDArray[Any], Vector], what: str
    ) -> None:
        claimed, spread = answer.change(*along), answer.spread(*along)
        noise = 10 * np.finfo(np.float64).eps * np.abs(answer.values)
        worst: tuple[Vector, Vector] | None = None  # difference and relative error at the first step that could be made
        agreed = np.zeros(claimed.size, bool)
        for step in STEPS:
            ends = [self._values(y + side * step * along[0], extra + side * step * along[1]) for side in (1, -1)]
            if ends[0] is None or ends[1] is None:
                continue
            for end in ends:
                if end is not None and end.size != claimed.size:
                    raise _other_size(claimed.size, end.size)
            difference = (ends[0] - ends[1]) / (2 * step)
            size = np.maximum(np.maximum(np.abs(difference), np.abs(claimed)), spread)
            error = np.abs(difference - claimed)
            agreed |= error <= TOLERANCE * size + NEGLIGIBLE * size.max(initial=0) + noise / step
            if worst is None:
                worst = difference, error / np.maximum(size, np.finfo(np.float64).tiny)
            if agreed.all():
                return
        if worst is None:  # the function is not defined beside these outputs: nothing to compare with
            return
        difference, relative = worst
        row = int(np.argmax(np.where(agreed, -1, relative)))
        raise DerivativeError(
            f"the derivative with respect to {what} disagrees with a central difference of the values, along one "
            f"random direction, in {int((~agreed).sum())} of {agreed.size} rows. Row {row}: the derivative says "
            f"{claimed[row]:.6e}, the difference {difference[row]:.6e} (relative error {relative[row]:.1e}). Correct "
            "the derivative, or pass check=False if the function is too rough for differences."
        )

    def _values(self, y: NDArray[Any], extra: Vector) -> Vector | None:
        try:
            values = self._ask(y, extra).values
        except Exception:  # beside the point it need not be defined
            return None
        return values if np.all(np.isfinite(values)) else None


def _other_size(before: int, now: int) -> ShapeError:
    return ShapeError(f"there were {before} residuals at other parameters, and now {now}: the number must stay.")


def _direction(at: NDArray[Any], slopes: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float64]:
    """Random, with the signs of the slopes, and the size of the columns of ``at``, or of 1 where they are zero."""
    overall = float(np.abs(at).max(initial=0.0)) or 1.0
    column = np.abs(at).max(axis=0, initial=0.0)
    scale = np.where(column > 1e-6 * overall, column, overall)
    signs = np.where(slopes == 0, rng.choice([-1.0, 1.0], at.shape), np.sign(slopes))
    return signs * rng.uniform(0.5, 1.5, at.shape) * scale


# ---------------------------------------------------------------- residuals


@final
@dataclass(frozen=True, eq=False)
class ResidualAnswer:
    """A residual and its derivative.

    Attributes
    ----------
    values : (d,)
    blocks : (n, q, l) or None
        The derivative, where a row depends on the outputs of one sample.
    coupling : (d, n*l) or None
        Array, sparse matrix or LinearOperator, where rows depend on all samples.
    extra : (d, p)
        Derivative with respect to the extra parameters.
    shape
        (n, l) of the outputs.
    """

    values: Vector
    blocks: NDArray[np.float64] | None
    coupling: Any
    extra: NDArray[np.float64]
    shape: tuple[int, int]

    def change(self, along: NDArray[Any], extra: Vector) -> Vector:
        """See `Answer`."""
        return self._apply(self.blocks, self.coupling, self.extra, along, extra)

    def adjoint(self, rows: Vector) -> tuple[NDArray[Any], Vector]:
        """See `Answer`."""
        if self.blocks is not None:
            return np.einsum("nql,nq->nl", self.blocks, rows.reshape(self.blocks.shape[:2])), self.extra.T @ rows
        try:
            along = self.coupling.T @ rows
        except NotImplementedError:
            raise DtypeError(
                "the derivative dr is a LinearOperator without rmatvec, and the gradient needs drᵀ u: give it rmatvec."
            ) from None
        return np.asarray(along).reshape(self.shape), self.extra.T @ rows

    def spread(self, along: NDArray[Any], extra: Vector) -> Vector:
        """See `Answer`."""
        blocks = None if self.blocks is None else self.blocks**2
        if isinstance(self.coupling, LinearOperator):  # its entries are not known: what is typical of its rows
            return np.full(self.values.size, np.sqrt(np.mean(self.change(along, extra) ** 2)))
        return np.sqrt(self._apply(blocks, _squared(self.coupling), self.extra**2, along**2, extra**2))

    def _apply(self, blocks: Any, coupling: Any, extra: Any, along: NDArray[Any], by: Vector) -> Vector:
        if blocks is not None:
            outputs = np.einsum("nql,nl->nq", blocks, along).reshape(-1)
        else:
            outputs = np.asarray(coupling @ along.reshape(-1))
        return outputs + extra @ by

    def check_derivative(self) -> None:
        """See `Answer`."""
        for part in (self.blocks, self.coupling, self.extra):
            _check_finite(part, "the residual is finite, and its derivative is not")


def read_residual(raw: Any, shape: tuple[int, int], extra: ParameterSpace) -> ResidualAnswer:
    """What a residual function returned: (r, dr), or (r, dr, d_extra) where there are extra parameters."""
    parts = _parts(raw, ("r", "dr", "d_extra") if len(extra) else ("r", "dr"), "the residual function")
    r = _real(parts[0], "the residual r")
    blocks, coupling = _residual_derivative(parts[1], r.shape, r.size, *shape)
    by_extra = _extra_derivative(parts[2], r.shape, r.size, extra) if len(extra) else np.zeros((r.size, 0))
    return ResidualAnswer(r.reshape(-1), blocks, coupling, by_extra, shape)


def _residual_derivative(dr: Any, shape: tuple[int, ...], d: int, n: int, l: int) -> tuple[Any, Any]:
    """Blocks (n, q, l), or a matrix (d, n*l) that couples samples, whose columns may be two axes, (d, n, l)."""
    if scipy.sparse.issparse(dr) or isinstance(dr, LinearOperator):
        given = dr.shape
        if given == (d, n * l):
            return None, (dr.tocsr().astype(np.float64) if scipy.sparse.issparse(dr) else dr)
    else:
        array = _real(dr, "the derivative dr")
        given = array.shape
        if len(shape) and shape[0] == n and given in ((*shape, l), (*shape, 1, l)):
            return array.reshape(n, d // n if n else 0, l), None
        if array.ndim == 3 and n and given == (n, d // n, l) and d % n == 0:
            return array, None
        # With n = 1 these are also blocks, which were taken above: both say the same of one sample.
        if given in ((d, n * l), (d, n, l), (*shape, n, l)) or (d == 1 and given in ((n, l), (n * l,))):
            return None, array.reshape(d, n * l)
    by_sample = f"({n}, {d // n}, {l}), blocks that belong to one sample each; or " if n and d % n == 0 else ""
    one = f", or ({n}, {l}) for the one residual" if d == 1 else ""
    raise ShapeError(
        f"the residual has shape {shape} and the outputs are {n} samples of {l}, so its derivative dr must have the "
        f"shape {by_sample}({d}, {n * l}) or ({d}, {n}, {l}){one}, over all outputs of all samples; it has {given}."
    )


def _extra_derivative(given: Any, shape: tuple[int, ...], d: int, extra: ParameterSpace) -> NDArray[np.float64]:
    """(d, p), from a dict of names or one array."""
    if not isinstance(given, Mapping):
        array = _real(given, "the derivative d_extra")
        if array.shape in ((d, extra.size), (*shape, extra.size)) or (extra.size == 1 and array.shape == shape):
            return array.reshape(d, extra.size)
        raise ShapeError(
            f"d_extra must be a dict of names or have the shape ({d}, {extra.size}); it has {array.shape}."
        )
    if set(given) != set(extra.names):
        raise ShapeError(f"d_extra must have the keys {sorted(extra.names)}, and has {sorted(map(str, given))}.")
    columns = []
    for segment in extra:
        array = _real(given[segment.name], f"the derivative d_extra[{segment.name!r}]")
        allowed = ((*shape, *segment.shape), (d, *segment.shape), (d, segment.size))
        if array.shape not in allowed:
            raise ShapeError(f"d_extra[{segment.name!r}] must have the shape {allowed[0]}, and has {array.shape}.")
        columns.append(array.reshape(d, segment.size))
    return np.concatenate(columns, axis=1)


# ---------------------------------------------------------------- objectives


@final
@dataclass(frozen=True, eq=False)
class ObjectiveAnswer:
    """A value and its derivatives with respect to the outputs.

    Attributes
    ----------
    values : (1,)
    gradient : (n, l)
    curvature : (n, l, l) blocks, a matrix or operator (n*l, n*l), or None
        Second derivative.
    extra : (p,)
        Derivative with respect to the extra parameters.
    """

    values: Vector
    gradient: NDArray[np.float64]
    curvature: Any
    extra: Vector

    def change(self, along: NDArray[Any], extra: Vector) -> Vector:
        """See `Answer`."""
        return np.array([np.vdot(self.gradient, along) + self.extra @ extra])

    def adjoint(self, rows: Vector) -> tuple[NDArray[Any], Vector]:
        """See `Answer`."""
        return rows[0] * self.gradient, rows[0] * self.extra

    def spread(self, along: NDArray[Any], extra: Vector) -> Vector:
        """See `Answer`."""
        return np.sqrt(np.array([np.vdot(self.gradient**2, along**2) + self.extra**2 @ extra**2]))

    def check_derivative(self) -> None:
        """See `Answer`."""
        for part in (self.gradient, self.curvature, self.extra):
            _check_finite(part, "the value is finite, and its derivative is not")


def objective_reader(space: OutputSpace) -> Callable[[Any, tuple[int, int], ParameterSpace], ObjectiveAnswer]:
    """What makes an answer of (value, gradient), (value, gradient, curvature) or (value, gradient, d_extra)."""

    def read(raw: Any, shape: tuple[int, int], extra: ParameterSpace) -> ObjectiveAnswer:
        wanted = ("value", "gradient", "d_extra") if len(extra) else ("value", "gradient", "curvature")
        parts = _parts(raw, wanted, "the objective", optional=0 if len(extra) else 1)
        value = _real(parts[0], "the value")
        if value.size != 1:
            raise ShapeError(
                f"the objective must return ({', '.join(wanted[:2])}, …): the value is a single number, and what came "
                f"first has the shape {value.shape}."
            )
        curvature = None if len(extra) or len(parts) < 3 else _curvature(parts[2], *shape)
        by_extra = _extra_derivative(parts[2], (), 1, extra)[0] if len(extra) else np.zeros(0)
        return ObjectiveAnswer(value.reshape(1), _gradient(parts[1], space, *shape), curvature, by_extra)

    return read


def _gradient(given: Any, space: OutputSpace, n: int, l: int) -> NDArray[np.float64]:
    flat = given if isinstance(given, dict | list | tuple) else _real(given, "the gradient")
    if isinstance(flat, np.ndarray) and flat.shape in ((n, l), (n * l,)):
        return flat.reshape(n, l)
    gradient = targets.flatten(space, flat, "the gradient")
    if gradient.shape != (n, l):
        raise ShapeError(f"the gradient belongs to {gradient.shape[0]} samples, and the outputs to {n}.")
    return gradient


def _curvature(given: Any, n: int, l: int) -> Any:
    if given is None:
        return None
    sparse = scipy.sparse.issparse(given)
    if not sparse and not isinstance(given, LinearOperator):
        given = _real(given, "the curvature")
        if given.shape == (n, l, l):
            return _symmetric(given)
    if given.shape != (n * l, n * l):
        raise ShapeError(
            f"the curvature must have the shape ({n}, {l}, {l}), blocks that belong to one sample each, or "
            f"({n * l}, {n * l}), and has {given.shape}."
        )
    if isinstance(given, np.ndarray):
        return _symmetric(given)
    return _symmetric(given.tocsr().astype(np.float64)) if sparse else given


def _symmetric(given: Any) -> Any:
    sparse = scipy.sparse.issparse(given)
    turned = given.T if sparse else np.swapaxes(given, -1, -2)
    odd, all_of = (abs(part.data if sparse else part).max(initial=0.0) for part in (given - turned, given))
    if odd > 1e-8 * all_of:
        raise DataError("the curvature must be symmetric, as second derivatives are.")
    return 0.5 * (given + turned)


# ---------------------------------------------------------------- arrays from outside


def _parts(raw: Any, wanted: tuple[str, ...], what: str, optional: int = 0) -> tuple[Any, ...]:
    """The items of what a function returned; the last ``optional`` of those wanted may be missing."""
    least = len(wanted) - optional
    if isinstance(raw, tuple | list) and least <= len(raw) <= len(wanted):
        return tuple(raw)
    forms = " or ".join(f"({', '.join(wanted[:count])})" for count in range(least, len(wanted) + 1))
    why = " where there are extra parameters" if "d_extra" in wanted else ""
    raise ShapeError(f"{what} must return {forms}{why}, and returned {_came(raw)}.")


def _came(raw: Any) -> str:
    """What a function returned, in words."""
    if isinstance(raw, tuple | list):
        return (
            f"{counted(len(raw), 'item')} ({', '.join(_kind(item) for item in raw[:5])}{', …' if len(raw) > 5 else ''})"
        )
    return "nothing: it ends without a return" if raw is None else f"{_kind(raw)} alone"


def _kind(item: Any) -> str:
    if item is None:
        return "None"
    shape = tuple(getattr(item, "shape", ()))
    return f"a {type(item).__name__}" + (f" of shape {shape}" if shape else "")


def _real(given: Any, what: str) -> NDArray[np.float64]:
    """A float64 copy: what the function does to its buffers later changes nothing."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise ShapeError(f"{what} is ragged ({error}).") from None
    if array.dtype.kind not in "fiub":
        raise DtypeError(f"{what} must be an array of real numbers, and is {type(given).__name__} of {array.dtype}.")
    targets.check_unmasked(given, what)
    return np.array(array, np.float64)


def _squared(matrix: Any) -> Any:
    if matrix is None:
        return None
    return matrix.multiply(matrix) if scipy.sparse.issparse(matrix) else matrix**2


def _check_finite(part: Any, what: str) -> None:
    if part is None or isinstance(part, LinearOperator):
        return
    values = part.data if scipy.sparse.issparse(part) else part
    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        raise DataError(f"{what}: {bad} of its {values.size} entries are NaN or infinite.")
