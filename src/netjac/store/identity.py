"""What a store is the Jacobian of, as checksums: equal if and only if a save may go on where another stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from netjac import api
from netjac.jacobian import Jacobian
from netjac.operator import JacobianOperator
from netjac.store import records

PIECE = 16 << 20
"""Bytes of an array that are looked at together."""


def of(source: Any, data: Any) -> dict[str, str]:
    """Checksums of a model and its data, or of a Jacobian."""
    if isinstance(source, JacobianOperator):
        return {"jacobian": of_jacobian(source)}
    return {"model": api._tensorflow().model_checksum(source, data), "data": of_data(data)}


def jacobian(model: Any, data: Any, memory: int) -> JacobianOperator:
    """`netjac.jacobian`."""
    return api.jacobian(model, data, memory=memory)


def of_data(data: Any) -> str:
    """Of the arrays in nested lists, tuples and dicts: their shapes, types, bytes and places."""
    found = hashlib.blake2b(digest_size=16)
    _add(found, data)
    return found.hexdigest()


def _add(found: Any, data: Any) -> None:
    if isinstance(data, Mapping):
        for key in sorted(data, key=str):
            found.update(f"key {key!r};".encode())
            _add(found, data[key])
    elif isinstance(data, list | tuple) and any(not isinstance(value, int | float | list) for value in data):
        found.update(f"{len(data)} entries;".encode())
        for value in data:
            _add(found, value)
    else:
        array = data if isinstance(data, np.ndarray) else np.asarray(data)
        found.update(f"array {array.dtype.str} {array.shape};".encode())
        step = max(1, PIECE * len(array) // max(1, array.nbytes)) if array.ndim else 1
        for start in range(0, len(array) if array.ndim else 0, step):
            found.update(np.ascontiguousarray(array[start : start + step]).data)
        if not array.ndim:
            found.update(array.tobytes())


def of_jacobian(J: JacobianOperator) -> str:
    """Of the outputs and names, and of the factors: all that are held, or those of the first sample and the last."""
    found = hashlib.blake2b(digest_size=16)
    found.update(repr((J.shape, J.dtype.name, J.parameters.segments, J.output_space.segments)).encode())
    found.update(np.ascontiguousarray(J.y).data)
    if isinstance(J, Jacobian):
        parts = [J]
    else:
        grid = J._grid()
        parts = [J._tile(*grid[i]) for i in sorted({0, len(grid) - 1})] if grid else []
    for part in parts:
        for block in part.blocks:
            taken = records.record(block)
            found.update(repr(taken.structure).encode())
            for array in taken.arrays.values():
                found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
