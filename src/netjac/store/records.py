"""A block as named arrays and a description, and back.

The description is plain JSON. It is the same for every tile of a store, so that the arrays of a block, put one after
the other along the samples, are one array each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from netjac.blocks.base import Block, Placement
from netjac.blocks.dense import DenseBlock
from netjac.blocks.embedding import EmbeddingBlock
from netjac.blocks.mapped import MappedBlock
from netjac.blocks.outer import OuterBlock
from netjac.store.manifest import digest

AXES = {
    "outer": {"A": "npgk", "D": "nlpgc"},
    "embedding": {"indices": "np", "D": "nlpc"},
    "dense": {"values": "nle"},
}
"""The arrays of each kind of block, and their axes."""


def prefix(block: int) -> str:
    """What the names of a block's arrays begin with."""
    return f"block{block}_"


def location(place: int, name: str) -> str:
    """Path in the store of an array of the factors of one range of outputs."""
    return f"factors/{place}/{name}"


@dataclass(frozen=True)
class Record:
    """A block taken apart.

    Attributes
    ----------
    structure
        What it is, as JSON: kind, placement, and the shape and dtype of each array.
    arrays
        By name; the first axis is n.
    constants
        By name; the same for all samples.
    """

    structure: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    constants: dict[str, NDArray[Any]]


def record(block: Block, start: str = "") -> Record:
    """Take a block apart; names of arrays begin with ``start``."""
    if isinstance(block, MappedBlock):
        inner = record(block.inner, start)
        T = block.T
        constants = {"T_data": T.data, "T_indices": T.indices, "T_indptr": T.indptr, "where": block.where}
        own = {start + name: np.ascontiguousarray(array) for name, array in constants.items()}
        structure = {
            "kind": "mapped",
            "inner": inner.structure,
            "shape": [int(size) for size in T.shape],
            "constants": {name: [array.dtype.str, len(array), digest(array)] for name, array in own.items()},
        }
        return Record(structure, inner.arrays, inner.constants | own)
    assert isinstance(block, OuterBlock | EmbeddingBlock | DenseBlock)
    kind = _kind(block)
    fields = {start + name: (axes, np.asarray(getattr(block, name))) for name, axes in AXES[kind].items()}
    placement = block.placement
    structure = {
        "kind": kind,
        "placement": {
            "shape": list(placement.shape),
            "strides": list(placement.strides),
            "offset": placement.offset,
            "sizes": list(placement.sizes),
        },
        "arrays": {name: [axes, list(a.shape[1:]), a.dtype.str] for name, (axes, a) in fields.items()},
    }
    return Record(structure, {name: array for name, (_, array) in fields.items()}, {})


def _kind(block: Block) -> str:
    kinds = {OuterBlock: "outer", EmbeddingBlock: "embedding", DenseBlock: "dense"}
    return kinds[type(block)]


def arrays_of(structure: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Axes, shape a sample and dtype of the arrays of a block, by name."""
    found: dict[str, list[Any]] = arrays_of(structure["inner"]) if "inner" in structure else structure["arrays"]
    return found


def constants_of(structure: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dtype, length and digest of what is the same for all samples, by name."""
    inner = constants_of(structure["inner"]) if "inner" in structure else {}
    return inner | structure.get("constants", {})


def rebuild(structure: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], start: str = "") -> Block:
    """The block that `record` took apart, of the samples that ``arrays`` (constants among them) are of."""
    if structure["kind"] == "mapped":
        T = csr_array(tuple(arrays[start + name] for name in ("T_data", "T_indices", "T_indptr")), structure["shape"])
        return MappedBlock(rebuild(structure["inner"], arrays, start), T, arrays[start + "where"])
    given = structure["placement"]
    g, k, c = given["sizes"]
    placement = Placement(tuple(given["shape"]), tuple(given["strides"]), given["offset"], (g, k, c))
    fields = [arrays[start + name] for name in AXES[structure["kind"]]]
    if structure["kind"] == "outer":
        return OuterBlock(fields[0], fields[1], placement)
    if structure["kind"] == "embedding":
        return EmbeddingBlock(fields[0], fields[1], placement)
    return DenseBlock(fields[0], placement)
