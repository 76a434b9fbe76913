"""What each method of `scipy.optimize.minimize` takes, derivatives, bounds, constraints; and methods of elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, NonlinearConstraint

from netjac.optimize import options
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

ROOT = (
    "hybr",
    "krylov",
    "anderson",
    "broyden1",
    "broyden2",
    "df-sane",
    "diagbroyden",
    "linearmixing",
    "excitingmixing",
)
"""The methods of `scipy.optimize.root`, but for 'lm', which is one of `scipy.optimize.least_squares` too."""

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
        said = f"method must be one of {', '.join(map(repr, METHODS))}, or a callable, and is {method!r}"
        if isinstance(method, str) and method in options.METHODS:
            said += f", which takes residuals: netjac.LeastSquares, with y or with residual=, has solve({method!r})"
        raise OptionError(f"{said}.")
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


def check_residuals(method: Any) -> None:
    """Refuse what is no method for residuals; if another function of SciPy's has it, say how that is called.

    Raises
    ------
    OptionError

    Examples
    --------
    >>> check_residuals("BFGS")
    Traceback (most recent call last):
    netjac.optimize.options.OptionError: method must be one of 'trf', 'dogbox', 'lm', 'netjac', and is 'BFGS'. \
scipy.optimize.minimize has that one, for values: call scipy.optimize.minimize(problem.cost, problem.x0, \
method='BFGS', jac=problem.grad); problem.parameters.assign(result.x) writes what it finds into the model.
    """
    if method in options.METHODS:
        return
    elsewhere = {name.lower(): name for name in (*METHODS, *ROOT)}
    found = elsewhere.get(method.lower()) if isinstance(method, str) else None
    hint = ""
    if found is not None:
        whose, what = ("minimize", "values") if found in METHODS else ("root", "as many residuals as parameters")
        hint = (
            f" scipy.optimize.{whose} has that one, for {what}: call {_call(found)}; "
            "problem.parameters.assign(result.x) writes what it finds into the model."
        )
    raise OptionError(f"method must be one of {', '.join(map(repr, options.METHODS))}, and is {method!r}.{hint}")


def _call(name: str) -> str:
    """A least-squares problem handed to one of SciPy's methods for something else."""
    if name not in METHODS:
        jac = ", jac=problem.jac" if name == "hybr" else ""  # the others take none
        return f"scipy.optimize.root(problem.fun, problem.x0, method={name!r}{jac})"
    kind = METHODS[name]
    given = [f"method={name!r}"] + ["jac=problem.grad"] * kind.gradient
    given += {"": [], "product": ["hessp=problem.hessp"], "matrix": ["hess=problem.hess"]}[kind.hessian]
    given += ["bounds=problem.bounds"] * kind.bounds
    return f"scipy.optimize.minimize(problem.cost, problem.x0, {', '.join(given)})"


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
