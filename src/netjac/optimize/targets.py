"""Targets y in the model's own output structure → one array (n, l), with everything that can be wrong said early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.data import refuse_batches
from netjac.errors import DataError, DtypeError, ShapeError
from netjac.spaces import OutputSpace, Segment


def leaves(tree: Any) -> Iterator[Any]:
    """The arrays in nested dicts, lists and tuples of arrays; a list of plain numbers is one array."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)) and any(_holds_arrays(item) for item in tree):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def _holds_arrays(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return any(_holds_arrays(inner) for inner in item)
    return isinstance(item, dict) or bool(getattr(item, "shape", ()))


def sample_count(x: Any) -> int | None:
    """Length of the sample axis of the inputs, or None where the inputs do not tell (the evaluator will)."""
    for leaf in leaves(x):
        shape = getattr(leaf, "shape", None)
        if shape is None:
            try:
                shape = np.shape(leaf)
            except ValueError:  # ragged
                return None
        return int(shape[0]) if len(shape) and shape[0] is not None else None
    return None


def check_arrays(given: Any, name: str) -> None:
    """Refuse batches: the samples of a fit are needed together, as arrays.

    Raises
    ------
    DtypeError
    """
    refuse_batches(
        given,
        name,
        " Of data larger than memory, netjac.stream(model, batches) computes Jᵀ J, Jᵀ r and norms in one pass, and "
        "netjac.distributed.least_squares fits memory maps and Zarr arrays over a cluster.",
    )


def check_values(y: Any) -> None:
    """Refuse targets that are not finite real numbers, before anything is built.

    Raises
    ------
    DtypeError, DataError
    """
    for leaf in leaves(y):
        try:
            array = np.asarray(leaf)
        except ValueError as error:
            raise ShapeError(f"y is ragged: its samples do not all have one shape ({error}).") from None
        if array.dtype.kind not in "fiub":
            raise DtypeError(f"y must hold real numbers, and has dtype {array.dtype}.")
        check_unmasked(leaf, "y")
        finite = np.isfinite(array)
        if not finite.all():
            first = tuple(int(i) for i in np.argwhere(~finite)[0])
            raise DataError(
                f"y holds {array.size - int(finite.sum())} values that are not finite, the first at {first}; "
                "drop those samples, or fill them in."
            )


def check_unmasked(given: Any, what: str) -> None:
    """Refuse masked entries, which `numpy.asarray` would count as any other.

    Raises
    ------
    DataError
    """
    if np.ma.is_masked(given):
        hidden = int(np.ma.getmaskarray(given).sum())
        raise DataError(
            f"{what} has {hidden} masked entries: leave those samples out, or fill them in and give them the weight 0."
        )


def check_count(y: Any, n: int) -> None:
    """Refuse targets with a number of samples other than n.

    Raises
    ------
    DataError
    """
    for leaf in leaves(y):
        shape = np.shape(leaf)
        if not shape:
            raise ShapeError("y is a single number; expected an array with one row a sample.")
        if shape[0] != n:
            raise DataError(f"x has {n} samples and y has {shape[0]} (shape {shape}); they must be pairs.")


def flatten(space: OutputSpace, y: Any, where: str = "y") -> NDArray[np.float64]:
    """Targets in the structure of the model's outputs → (n, l) float64, outputs one after the other in C order.

    Parameters
    ----------
    space
        The model's outputs.
    y
        An array (n, *shape) for a model with one output, else a dict, list or tuple like the model's own. An output of
        one number a sample may be given as (n,).
    where
        What it is called in messages.

    Raises
    ------
    ShapeError
        If the structure or a shape differs from the model's: what was expected, and what came.

    Examples
    --------
    >>> flatten(OutputSpace.flat(1), [2.0, 3.0])
    array([[2.],
           [3.]])
    """
    pieces: list[NDArray[np.float64] | None] = [None] * len(space.segments)
    _collect(space.template, y, space, pieces, where)
    columns = [piece for piece in pieces if piece is not None]
    counts = sorted({piece.shape[0] for piece in columns})
    if len(counts) > 1:
        raise DataError(f"the outputs in {where} have different numbers of samples: {counts}.")
    return np.ascontiguousarray(np.concatenate(columns, axis=1)) if len(columns) > 1 else columns[0]


def _collect(template: Any, y: Any, space: OutputSpace, pieces: list[NDArray[np.float64] | None], where: str) -> None:
    if isinstance(template, dict):
        if not isinstance(y, dict) or set(y) != set(template):
            came = f"a dict with the keys {sorted(map(str, y))}" if isinstance(y, dict) else f"a {type(y).__name__}"
            raise ShapeError(f"{where} must be a dict with the keys {sorted(map(str, template))}, and is {came}.")
        for key, part in template.items():
            _collect(part, y[key], space, pieces, f"{where}[{key!r}]")
    elif isinstance(template, (list, tuple)):
        if not isinstance(y, (list, tuple)) or len(y) != len(template):
            came = f"{len(y)} items" if isinstance(y, (list, tuple)) else f"a {type(y).__name__}"
            raise ShapeError(
                f"{where} must be a list of {len(template)} arrays, one for each of the outputs "
                f"{', '.join(space.names)}, and is {came}."
            )
        for i, part in enumerate(template):
            _collect(part, y[i], space, pieces, f"{where}[{i}]")
    else:
        pieces[template] = _one(space.segments[template], y, where)


def _one(segment: Segment, y: Any, where: str) -> NDArray[np.float64]:
    if isinstance(y, dict):
        raise ShapeError(
            f"{where} is a dict, and the model has one output there ({segment.name}): give the array itself."
        )
    array = np.array(y, dtype=np.float64)  # a copy: what the caller does to y later changes no residual
    shape = segment.shape
    fits = array.ndim >= 1 and (array.shape[1:] == shape or (segment.size == 1 and array.shape[1:] in ((), (1,))))
    if not fits:
        expected = ", ".join(["n", *map(str, shape)]) + ("," if not shape else "")
        also = " or (n,)" if segment.size == 1 and shape else ""
        raise ShapeError(
            f"{where} must have the shape ({expected}){also} of the output {segment.name!r}, and has {array.shape}."
        )
    return array.reshape(array.shape[0], segment.size)
