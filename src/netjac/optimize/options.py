"""Which Jacobian a SciPy method gets, decided before any work from the options and the shape alone.

`scipy.optimize.least_squares` takes a LinearOperator only in 'trf' and 'dogbox' with ``tr_solver='lsmr'`` and without
``x_scale='jac'``; MINPACK's 'lm' and the exact trust-region solver (a singular value decomposition) take arrays.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
from scipy.optimize import Bounds

from netjac.errors import NetjacError
from netjac.optimize.losses import LOSSES, Loss

METHODS = ("trf", "dogbox", "lm", "netjac")
FORMS = ("auto", "dense", "operator")
TR_SOLVERS = ("exact", "lsmr")

DENSE_LIMIT = 2**26
"""Bytes of a float64 Jacobian (64 MiB, 2,900 × 2,900) past which "auto" hands SciPy an operator. Around this size the
singular value decomposition of 'exact' takes several seconds a step, and SciPy holds three copies of the array."""


class OptionError(NetjacError, ValueError):
    """An option of the solver that does not exist, or a combination of options that cannot work."""


def dense_bytes(shape: tuple[int, int]) -> int:
    """Bytes of a float64 array of this shape."""
    return 8 * shape[0] * shape[1]


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))}, and is {value!r}.")


def check_form(jac: str) -> None:
    """Refuse a ``jac`` that is none of "auto", "dense" and "operator"."""
    one_of("jac", jac, FORMS)


def check_progress(progress: Any) -> None:
    """Refuse a ``progress`` that is neither a flag nor a stream to write lines to."""
    stream = callable(getattr(progress, "write", None)) and callable(getattr(progress, "flush", None))
    if not (stream or progress is None or isinstance(progress, bool)):
        raise OptionError(f"progress must be True, False or a text stream such as sys.stdout, and is {progress!r}.")


def checked_loss(loss: Any, f_scale: Any) -> float:
    """Refuse a loss that does not exist, and a scale that is no positive number; the scale.

    Examples
    --------
    >>> checked_loss("huber", 2)
    2.0
    """
    if not callable(loss):
        one_of("loss", loss, tuple(LOSSES))
    if not isinstance(f_scale, numbers.Real) or not 0 < float(f_scale) < np.inf:
        raise OptionError(f"f_scale must be a positive number, and is {f_scale!r}.")
    return float(f_scale)


def check_count(max_nfev: Any) -> None:
    """Refuse a number of evaluations that is none."""
    if max_nfev is not None and not (isinstance(max_nfev, numbers.Integral) and int(max_nfev) > 0):
        raise OptionError(f"max_nfev must be a positive whole number or None, and is {max_nfev!r}.")


def check_tolerances(**given: Any) -> None:
    """Refuse tolerances that are neither None nor numbers."""
    for name, value in given.items():
        if value is not None and (not isinstance(value, numbers.Real) or np.isnan(float(value))):
            raise OptionError(f"{name} must be a number or None, and is {value!r}.")


def check_tr_options(method: str, tr_options: Any) -> None:
    """Refuse options of a trust-region solver that the method does not have."""
    if tr_options and method not in ("trf", "dogbox"):
        raise OptionError(f"method {method!r} takes no tr_options, and {sorted(tr_options)} were given.")


def check_linear_solver(method: str, linear_solver: Any) -> None:
    """Refuse the choice of a linear algebra where the method makes its own."""
    if method != "netjac" and linear_solver != "auto":
        raise OptionError(f"linear_solver is of method 'netjac', and the method is {method!r}: leave it 'auto'.")


def check_bounds(method: str, bounds: Bounds) -> None:
    """Refuse bounds that the method would not keep, and such that leave a parameter nothing."""
    bounded = int(np.sum(np.isfinite(bounds.lb) | np.isfinite(bounds.ub)))
    if method == "lm" and bounded:
        raise OptionError(
            f"method 'lm' knows no bounds, and {bounded} parameters have one: use method 'trf', 'dogbox' or 'netjac'."
        )
    fixed = int(np.sum(bounds.lb == bounds.ub))
    if fixed:
        raise OptionError(
            f"{fixed} parameters have equal lower and upper bounds: leave constants out of the fit with trainable=."
        )


def default_form(jac: str, shape: tuple[int, int]) -> str:
    """The form, "dense" or "operator", where nothing but the size speaks for either."""
    if jac != "auto":
        return jac
    return "dense" if dense_bytes(shape) <= DENSE_LIMIT else "operator"


def choose(
    shape: tuple[int, int],
    *,
    method: str,
    jac: str,
    tr_solver: str | None,
    x_scale: Any,
    loss: Loss,
) -> tuple[str, str | None]:
    """The form of the Jacobian ("dense" or "operator") and SciPy's ``tr_solver`` that goes with it.

    Parameters
    ----------
    shape
        (n*l, m) of the Jacobian.
    method, jac, tr_solver, x_scale, loss
        As for `netjac.LeastSquares.solve`.

    Raises
    ------
    OptionError
        For an unknown choice, or choices that exclude each other.

    Examples
    --------
    >>> choose((400, 50), method="trf", jac="auto", tr_solver=None, x_scale=None, loss="linear")
    ('dense', 'exact')
    """
    rows, m = shape
    one_of("method", method, METHODS)
    check_form(jac)
    if tr_solver is not None:
        one_of("tr_solver", tr_solver, TR_SOLVERS)
    by_jac = isinstance(x_scale, str)
    if by_jac:
        one_of("x_scale", x_scale, ("jac",))

    if method == "netjac":
        if tr_solver is not None:
            raise OptionError(f"method 'netjac' has no tr_solver ({tr_solver!r} was given): it chooses by the shape.")
        return ("dense" if jac == "dense" else "operator"), None
    if method == "lm":
        return _choose_lm(rows, m, jac, tr_solver, loss)
    if jac == "operator":
        if tr_solver == "exact":
            raise OptionError("tr_solver='exact' needs the Jacobian as an array: use jac='dense', or tr_solver='lsmr'.")
        if by_jac:
            raise OptionError(
                "x_scale='jac' needs the Jacobian as an array: use jac='dense', or give x_scale as numbers "
                "(x_scale=1 / J.column_norms() is the same at the start)."
            )
        return "operator", "lsmr"
    if jac == "dense":
        return "dense", tr_solver or "exact"
    if tr_solver == "exact" or by_jac:
        return "dense", tr_solver or "exact"
    if tr_solver == "lsmr":
        return "operator", "lsmr"
    form = default_form(jac, shape)
    return form, "exact" if form == "dense" else "lsmr"


def _choose_lm(rows: int, m: int, jac: str, tr_solver: str | None, loss: Loss) -> tuple[str, str | None]:
    if jac == "operator":
        raise OptionError("method 'lm' needs the Jacobian as an array: use jac='dense', or method 'trf' or 'dogbox'.")
    if tr_solver is not None:
        raise OptionError(f"method 'lm' has no tr_solver ({tr_solver!r} was given): use method 'trf' or 'dogbox'.")
    if loss != "linear":
        raise OptionError(
            "method 'lm' minimises the plain sum of squares only: use method 'trf' or 'dogbox' with a loss."
        )
    if rows < m:
        raise OptionError(
            f"method 'lm' needs at least as many residuals (n·l) as parameters (m), and there are {rows} residuals "
            f"and {m} parameters: use method 'trf' or 'dogbox', more samples or a smaller model."
        )
    return "dense", None


def natural_scale(variables: Any) -> float | None:
    """The scale of netjac's solver where none is asked for, from the ``variables`` that came with the model.

    1 for a network (None), whose weights are of one size; that of the columns (None) for a formula with variables.
    """
    return 1.0 if variables is None else None
