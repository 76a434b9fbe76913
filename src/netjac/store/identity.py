"""What a store is the Jacobian of, as checksums: equal if and only if a save may go on where another stopped."""

from __future__ import annotations

import hashlib

import numpy as np

from netjac import data
from netjac.jacobian import Jacobian
from netjac.operator import JacobianOperator
from netjac.store import records

PIECE = 16 << 20
"""Bytes of data that are looked at together; another number gives other checksums."""


def of_data(given: data.Sliced) -> str:
    """Of arrays: their structure, shapes, types and bytes, read piece by piece."""
    found = hashlib.blake2b(digest_size=16)
    for batch in given.batches(max(1, PIECE // max(1, given.sample_bytes))):
        pieces = data.mapped(np.asarray, batch.x)
        found.update(repr(data.mapped(lambda piece: (piece.shape, piece.dtype.str), pieces)).encode())
        for piece in data.leaves(pieces):
            found.update(np.ascontiguousarray(piece).data)
    return found.hexdigest()


def of_jacobian(J: JacobianOperator) -> str:
    """Of the outputs and names, and of the factors: all that are held, or those of the first tile and the last."""
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
