"""What `netjac.least_squares` minimises: residual, derivative, loss and bounds, checked once.

The cost is ½ Σ ρ(r_i(x)²); near a point it is modelled as ½ ‖w ∘ (J s) + r̃‖², with w and r̃ from the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.optimize import Bounds
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from netjac.errors import DataError, DtypeError, ShapeError
from netjac.optimize import differences, losses
from netjac.optimize.budget import steps_bytes
from netjac.optimize.linear import Linearisation, explicit, is_operator
from netjac.optimize.losses import Loss, Vector
from netjac.optimize.options import OptionError, checked_loss

_EXPLICIT_WORK = 10**8
"""rows · m · min(rows, m) up to which products with the explicit J take no longer than those with its factors."""


@dataclass(frozen=True, eq=False)
class Point:
    """A point x (m,), the residual there (q,), and the cost: infinite where a residual is not finite."""

    x: Vector
    residual: Vector
    cost: float
    precision: np.dtype[Any]  # in which the residual came


@dataclass(frozen=True, eq=False)
class Minimand:
    """Residual and derivative as functions of x, with the start, the bounds and the loss."""

    residual: Callable[[Any], NDArray[Any]]
    derivative: Callable[[Point], Any]
    x0: Vector
    lower: Vector
    upper: Vector
    loss: Loss
    f_scale: float

    @classmethod
    def checked(
        cls, fun: Any, x0: Any, jac: Any, bounds: Any, loss: Any, f_scale: float, diff_step: Any, args: Any, kwargs: Any
    ) -> Self:
        """From what a person gave; every error that can be told beforehand is raised here."""
        start = np.asarray(x0)
        if start.dtype.kind not in "fiub":
            raise OptionError(f"x0 must hold real numbers, and has dtype {start.dtype}.")
        start = np.atleast_1d(start).astype(np.float64)
        if start.ndim != 1:
            raise ShapeError(f"x0 must be a vector (m,), and has shape {start.shape}.")
        if not (callable(jac) or (isinstance(jac, str) and jac in differences.SCHEMES)):
            schemes = ", ".join(map(repr, differences.SCHEMES))
            raise OptionError(f"jac must be a callable or one of {schemes}, and is {jac!r}.")
        scale = checked_loss(loss, f_scale)
        lower, upper = _checked_bounds(bounds, start)
        kwargs = dict(kwargs or {})

        def residual(x: Any) -> NDArray[Any]:
            r = np.atleast_1d(np.asarray(fun(x, *args, **kwargs)))
            if r.ndim != 1:
                raise ShapeError(f"fun must return a vector (q,), and returned shape {r.shape}.")
            return r

        def derivative(point: Point) -> Any:
            x, r = point.x, point.residual
            if not callable(jac):
                return differences.jacobian(residual, x, r, jac, (lower, upper), diff_step, point.precision)
            J = jac(x, *args, **kwargs)
            if not (isinstance(J, LinearOperator) or scipy.sparse.issparse(J)):
                J = np.atleast_2d(np.asarray(J, np.float64))
            if J.shape != (len(r), len(x)):
                raise ShapeError(f"jac must return shape {(len(r), len(x))} (residuals, parameters), not {J.shape}.")
            return J

        return cls(residual, derivative, start, lower, upper, loss, scale)

    @property
    def bounded(self) -> bool:
        """Whether any bound is finite."""
        return bool(np.any(np.isfinite(self.lower)) or np.any(np.isfinite(self.upper)))

    def evaluate(self, x: Vector) -> Point:
        """The residual at x, and a cost that is not finite where the residual is not."""
        given = self.residual(x.copy())
        if given.dtype.kind not in "fiub":
            raise DtypeError(f"fun must return real numbers, and returned dtype {given.dtype}.")
        residual = given.astype(np.float64)
        finite = bool(np.all(np.isfinite(residual)))
        return Point(x, residual, self._cost(residual) if finite else np.inf, given.dtype)

    def _cost(self, residual: Vector) -> float:
        return losses.cost(residual, self.loss, self.f_scale)

    def linearise(self, point: Point, J: Any, memory: int | None = None) -> Linearisation:
        """The quadratic model of the cost: rows of J and residual as the loss weighs them.

        A small J is made explicit, if ``memory`` bytes allow: one array is then used by all.
        """
        small = J.shape[0] * J.shape[1] * min(J.shape) <= _EXPLICIT_WORK
        if is_operator(J) and small and (memory is None or steps_bytes("svd", *J.shape) <= memory):
            J = explicit(J)
        weights, residual = losses.linearised(point.residual, self.loss, self.f_scale)
        if weights is not None:
            J = _scaled_rows(J, weights)
        return Linearisation(J, residual, np.asarray(J.T @ residual, np.float64).reshape(-1))


def _scaled_rows(J: Any, w: Vector) -> Any:
    if hasattr(J, "scaled_rows"):
        return J.scaled_rows(w)
    if hasattr(J, "scaled") and hasattr(J, "l"):  # a Jacobian: stays one
        return J.scaled(w.reshape(-1, J.l)[:, :, None] * np.eye(J.l))
    if scipy.sparse.issparse(J):
        return scipy.sparse.diags_array(w) @ J
    if isinstance(J, LinearOperator):
        return aslinearoperator(scipy.sparse.diags_array(w)) @ J
    return J * w[:, None]


def _checked_bounds(bounds: Any, x0: Vector) -> tuple[Vector, Vector]:
    given: tuple[Any, ...]
    if isinstance(bounds, Bounds):
        given = (bounds.lb, bounds.ub)
    else:
        try:
            given = tuple(bounds)
        except TypeError:
            given = ()  # refused below
        if len(given) != 2:
            raise OptionError("bounds must be (lower, upper), or scipy.optimize.Bounds.")
    try:
        sides = [np.asarray(side, np.float64) for side in given]
        if any(side.shape not in ((), x0.shape) for side in sides):
            raise ValueError
        lower, upper = (np.broadcast_to(side, x0.shape).copy() for side in sides)
    except ValueError:
        shapes = " and ".join(str(np.shape(side)) for side in given)
        raise ShapeError(
            f"bounds must be numbers or vectors of shape {x0.shape}, as x0 is, and have {shapes}."
        ) from None
    if np.any(np.isnan(lower) | np.isnan(upper)) or np.any(lower >= upper):
        i = int(np.argmax(~(lower < upper)))
        raise OptionError(f"each lower bound must be less than the upper, and at {i} they are {lower[i]}, {upper[i]}.")
    outside = (x0 < lower) | (x0 > upper)
    if outside.any():
        i = int(np.argmax(outside))
        raise DataError(
            f"x0 is outside of the bounds at {int(outside.sum())} of {len(x0)} entries, the first at {i}: {x0[i]} is "
            f"not in [{lower[i]}, {upper[i]}]."
        )
    return lower, upper
