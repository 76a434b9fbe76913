"""Checks of what users hand to a `Jacobian`: each returns the value in the form worked with, or says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy.sparse import issparse

from netjac import materialise
from netjac.errors import DataError, DtypeError, SampleIndexError, ShapeError


def numbers(given: Any, name: str) -> NDArray[Any]:
    """A NumPy array of what was given; errors for rows of different lengths and for masked entries."""
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise DataError(f"{name} has masked entries; fill them, or leave those rows out.")
    try:
        return np.asarray(given)
    except ValueError as error:
        raise ShapeError(f"the rows of {name} do not all have the same length.") from error


def array(x: Any) -> NDArray[Any]:
    """A NumPy array of a vector or matrix, also of a sparse one."""
    return numbers(x.toarray() if issparse(x) else x, "what J is multiplied with")


def real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a product, if it is real floating."""
    if dtype.kind != "f":
        raise DtypeError(f"a Jacobian is multiplied with real numbers, and got {dtype}.")
    return dtype


def floating(dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype asked for, if it is real floating."""
    try:
        given = np.dtype(dtype)
    except TypeError as error:
        raise DtypeError(f"dtype must be a real floating one, such as 'float64', and {dtype!r} is none.") from error
    if given.kind != "f":
        raise DtypeError(f"dtype must be a real floating one, such as 'float64', and is {given}.")
    return given


def result_type(
    shape: tuple[int, ...], out: NDArray[Any] | None, dtype: DTypeLike | None, default: np.dtype[Any], what: str
) -> np.dtype[Any]:
    """The type of a result: what was asked for, or that of ``out``, which must fit."""
    wanted = None if dtype is None else floating(dtype)
    if out is None:
        return default if wanted is None else wanted
    if not isinstance(out, np.ndarray):
        raise DtypeError(f"out must be a NumPy array, and is {describe(out)}.")
    if out.shape != shape:
        raise ShapeError(f"{what} has shape {shape}, and out has shape {out.shape}.")
    if out.dtype.kind != "f":
        raise DtypeError(f"out must have a real floating dtype, and has {out.dtype}.")
    if wanted is not None and out.dtype != wanted:
        raise DtypeError(f"dtype={wanted.name!r} was asked for, and out has dtype {out.dtype}.")
    if not out.flags.writeable:
        raise DataError("out is read-only.")
    return out.dtype


def threads(count: int | None) -> int:
    """Number of threads; None stands for every core available to the process."""
    if count is None:
        return materialise.available_cores()
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
        raise DtypeError(f"threads must be an integer or None, and is {describe(count)}.")
    if count < 1:
        raise DataError(f"threads must be 1 or more, and is {count}.")
    return int(count)


def names(given: Any) -> list[str]:
    """The names that ``J.columns(names)`` takes: one, or several."""
    several = [given] if isinstance(given, str) else given
    if isinstance(several, (bytes, dict)) or not isinstance(several, Iterable):
        raise DtypeError(f"J.columns(names) takes a name or a list of names, and got {describe(given)}; {_NAMES}.")
    found = list(several)
    for name in found:
        if not isinstance(name, str):
            raise DtypeError(f"J.columns(names) takes names, and got {describe(name)} among them; {_NAMES}.")
    return found


_NAMES = "J.parameters.names lists them, J[samples] chooses samples"


def sample_index(samples: Any, n: int) -> slice | NDArray[np.intp]:
    """What ``J[samples]`` selects among ``n`` samples: a slice, or integers (count,) of 0 … n - 1."""
    if isinstance(samples, slice):
        return samples
    if isinstance(samples, tuple):
        raise DtypeError("J[...] takes one index, over the samples; the columns are chosen by J.columns(names).")
    try:
        index = np.asarray(samples)
    except ValueError:  # a ragged list
        index = np.asarray(None)
    if isinstance(samples, list) and not samples:
        index = index.astype(np.intp)
    if index.dtype.kind == "b" and index.ndim:
        if index.shape != (n,):
            raise SampleIndexError(f"a boolean mask over the samples must have shape ({n},), and has {index.shape}.")
        return np.flatnonzero(index)
    if index.dtype.kind not in "iu" or index.ndim > 1:
        raise DtypeError(
            f"J[samples] takes an integer, a slice, or one axis of integers or booleans, and got {describe(samples)}."
        )
    index = index.reshape(-1)
    wrong = index[(index < -n) | (index >= n)]
    if wrong.size:
        raise SampleIndexError(f"sample {int(wrong[0])} is out of range: this Jacobian has {n} samples.")
    index = index.astype(np.intp)
    return np.where(index < 0, index + n, index)


def row_weights(weights: ArrayLike, n: int, l: int) -> NDArray[np.float64]:
    """Weights (n, l) of the rows, from one a row or one a sample."""
    w = numbers(weights, "weights")
    rows = n * l
    if w.shape not in ((rows,), (n, l), (n,)):
        raise ShapeError(
            f"weights must have shape ({rows},) or ({n}, {l}), one a row, or ({n},), one a sample, and have {w.shape}."
        )
    if w.dtype.kind not in "fiub":
        raise DtypeError(f"weights must be real numbers, and have dtype {w.dtype}.")
    if not np.all(np.isfinite(w)):
        raise DataError("weights must be finite.")
    if w.shape == (n,) != (rows,):
        w = np.repeat(w, l)
    return w.reshape(n, l).astype(np.float64)


def combinations(B: ArrayLike, n: int, l: int) -> NDArray[Any]:
    """What `Jacobian.scaled` takes, (n, q, l)."""
    b = numbers(B, "B")
    if b.ndim == 3 and b.shape[0] == n and b.shape[2] == l:
        return b
    hint = "; for one new row a sample write B[:, None, :]" if b.shape == (n, l) else ""
    raise ShapeError(f"B must have shape (n, q, l) = ({n}, q, {l}), and has {b.shape}{hint}.")


def target(b: ArrayLike, n: int, l: int) -> NDArray[np.float64]:
    """A right-hand side (n*l,), from that or from (n, l)."""
    given = numbers(b, "b")
    if given.shape not in ((n * l,), (n, l)):
        raise ShapeError(f"b must have shape ({n * l},) or ({n}, {l}), and has {given.shape}.")
    if given.dtype.kind not in "fiub":
        raise DtypeError(f"b must be real numbers, and has dtype {given.dtype}.")
    if not np.all(np.isfinite(given)):
        raise DataError("b must be finite.")
    return given.reshape(-1).astype(np.float64)


def damping(value: float) -> float:
    """A damping: a real number, zero or more."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise DtypeError(f"damping must be a real number, and is {describe(value)}.") from error
    if not 0 <= number < np.inf:
        raise DataError(f"damping must be a finite number, zero or more, and is {value}.")
    return number


def describe(value: Any) -> str:
    """Type and value, shortened, for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
