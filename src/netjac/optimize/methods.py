"""What each method of `scipy.optimize.minimize` takes: derivatives, bounds, constraints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, NonlinearConstraint

from netjac.optimize.options import OptionError


@dataclass(frozen=True)
class Method:
    """Attributes
    ----------
    gradient : bool
    hessian : {"", "product", "matrix"}
    bounds, constraints : bool
        Whether they are honoured; SciPy drops bounds with a warning otherwise.
    """

    gradient: bool = True
    hessian: str = ""
    bounds: bool = False
    constraints: bool = False


METHODS = {
    "Nelder-Mead": Method(gradient=False, bounds=True),
    "Powell": Method(gradient=False, bounds=True),
    "CG": Method(),
    "BFGS": Method(),
    "L-BFGS-B": Method(bounds=True),
    "TNC": Method(bounds=True),
    "SLSQP": Method(bounds=True, constraints=True),
    "Newton-CG": Method(hessian="product"),
    "trust-ncg": Method(hessian="product"),
    "trust-krylov": Method(hessian="product"),
    "dogleg": Method(hessian="matrix"),
    "trust-exact": Method(hessian="matrix"),
    "trust-constr": Method(hessian="product", bounds=True, constraints=True),
    "COBYLA": Method(gradient=False, bounds=True, constraints=True),
    "COBYQA": Method(gradient=False, bounds=True, constraints=True),
}
"""SciPy's methods, as they are spelled there."""

_CUSTOM = Method(hessian="product", bounds=True, constraints=True)


def choose(method: Any, bounds: Bounds, constraints: Any) -> Method:
    """What the method takes; a callable of one's own gets everything.

    Raises
    ------
    OptionError
        If there is no such method, or it cannot honour the bounds or the constraints.
    """
    if callable(method):
        return _CUSTOM
    known = {name.lower(): kind for name, kind in METHODS.items()}
    kind = known.get(method.lower()) if isinstance(method, str) else None
    if kind is None:
        raise OptionError(f"method must be one of {', '.join(map(repr, METHODS))}, or a callable, and is {method!r}.")
    bounded = int(np.sum(np.isfinite(bounds.lb) | np.isfinite(bounds.ub)))
    if bounded and not kind.bounds:
        able = ", ".join(repr(name) for name, other in METHODS.items() if other.bounds)
        raise OptionError(
            f"method {method!r} knows no bounds, and {bounded} parameters have one; these methods keep them: {able}."
        )
    if not kind.constraints and not _nothing(constraints):
        able = ", ".join(repr(name) for name, other in METHODS.items() if other.constraints)
        raise OptionError(f"method {method!r} knows no constraints; these methods keep them: {able}.")
    return kind


def check(constraints: Any, settings: Any) -> None:
    """Refuse constraints that are none of SciPy's kinds, and options that are no dict.

    Raises
    ------
    OptionError
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise OptionError(f"options must be a dict, and is {settings!r}.")
    for constraint in constraints if isinstance(constraints, list | tuple) else (constraints,):
        written = isinstance(constraint, Mapping) and {"type", "fun"} <= set(constraint)
        if not (constraint is None or written or isinstance(constraint, LinearConstraint | NonlinearConstraint)):
            raise OptionError(
                "a constraint is a netjac.OutputConstraint, a NonlinearConstraint or LinearConstraint of SciPy, or a "
                f"dict with type and fun, and not {constraint!r}."
            )


def _nothing(constraints: Any) -> bool:
    return constraints is None or (isinstance(constraints, list | tuple) and not constraints)
