"""Operations that touch weights alone, between a variable and the data: which entries of the variable come out.

One that moves entries about (reshape, transpose, split) is applied to an array of positions. One that acts entry by
entry (cast, scale, softplus) keeps the positions and leaves a slope. A product of two weights (a low-rank adapter)
makes a weight of its own; its Jacobian is the same two factors, one of them multiplied by the other weight:

    E = a b,  J_E[n, l, (k, c)] = sum_p A[n, p, k] D[n, l, p, c]
    J_a[n, l, (k, r)] = sum_p A[n, p, k] (D bᵀ)[n, l, p, r],   J_b[n, l, (r, c)] = sum_p (A a)[n, p, r] D[n, l, p, c].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from netjac.tensorflow.rules import Unsupported, issue
from netjac.tensorflow.survey import Survey

MOVES = frozenset(
    [
        "Reshape",
        "ExpandDims",
        "Squeeze",
        "Transpose",
        "Slice",
        "StridedSlice",
        "Split",
        "SplitV",
        "Unpack",
        "Tile",
        "BroadcastTo",
        "ReverseV2",
        "Roll",
        "Gather",
        "GatherV2",
        "GatherNd",
        "ConcatV2",
        "Pack",
        "Pad",
        "PadV2",
        "MirrorPad",
        "MatrixBandPart",
        "MatrixDiagV3",
        "MatrixDiagPartV3",
        "Identity",
        "Snapshot",
    ]
)
ENTRYWISE = frozenset(
    [
        "Cast",
        "Neg",
        "Softplus",
        "Square",
        "Exp",
        "Sqrt",
        "Rsqrt",
        "Reciprocal",
        "Inv",
        "Abs",
        "Sigmoid",
        "Tanh",
        "Relu",
        "LeakyRelu",
        "Elu",
        "Selu",
        "Log",
        "Log1p",
        "Expm1",
        "Sin",
        "Cos",
        "Erf",
        "Add",
        "AddV2",
        "Sub",
        "Mul",
        "RealDiv",
        "Div",
        "Maximum",
        "Minimum",
        "Pow",
        "SquaredDifference",
        "BiasAdd",
        "ClipByValue",
    ]
)
EXACT = frozenset({"Cast", "Identity"})  # entrywise with slope 1
SHAPES = frozenset({"Shape", "Size", "Rank", "ShapeN"})


@dataclass(frozen=True)
class Mix:
    """A factor to be multiplied from the right by a weight: A (n, p, k) or D (n, l, p, c) times a matrix, times a gain.

    Attributes
    ----------
    side
        ``"k"`` for A, ``"c"`` for D.
    matrix
        The weight's name in the program.
    transposed
        Whether its transpose is meant.
    gain
        A constant factor.
    """

    side: str
    matrix: str
    transposed: bool
    gain: float = 1.0


@dataclass(frozen=True, eq=False)
class WeightProduct:
    """E = left right, both weights, of which the variable is one.

    Attributes
    ----------
    entries : (rows, inner) or (inner, columns) integers
        Positions in the variable, of the operand it is.
    is_left
        Which operand that is.
    other, transposed
        Name of the other operand in the program, and whether the product takes its transpose.
    gain
        Constant factor picked up since.
    """

    entries: NDArray[np.int64]
    is_left: bool
    other: str
    transposed: bool
    gain: float = 1.0

    def mix(self, k_is_rows: bool) -> tuple[NDArray[np.int64], Mix]:
        """Entries (k, c) and the factor to mix, where k runs over E's rows (or its columns)."""
        entries = self.entries if k_is_rows else self.entries.T
        side = "c" if self.is_left == k_is_rows else "k"
        return entries, Mix(side, self.other, self.transposed != self.is_left, self.gain)


@dataclass(frozen=True, eq=False)
class Origin:
    """What a weight-only tensor is made of.

    Attributes
    ----------
    entries
        Positions in the flattened variable, or in the flattened ``product`` if there is one; -1 for what is neither.
    scaled
        Whether a slope was picked up.
    product
        The product of weights that the tensor was made from.
    gain
        The slope, where it is one constant; None where it is not.
    """

    entries: NDArray[np.int64]
    scaled: bool
    product: WeightProduct | None = None
    gain: float | None = 1.0


def follow(survey: Survey, operation: Any, origins: dict[str, Origin]) -> list[Origin]:
    """Through an operation that touches weights alone."""
    found = [origins.get(tensor.name) for tensor in operation.inputs]
    known = [origin for origin in found if origin is not None]
    made_from = known[0].product
    if len(known) > 1 and any(origin.product is not None for origin in known):
        raise Unsupported("a weight computed from the same variable in several ways")
    scaled = any(origin.scaled for origin in known)
    gain = known[0].gain if len(known) == 1 else None
    if "_gradient_op_type" in operation.node_def.attr:
        raise Unsupported("it has a gradient of its own (tf.custom_gradient)")
    if operation.type in MOVES and all(o is None or t.dtype.is_floating for o, t in _pairs(found, operation)):
        # Position + 1, so that what comes from elsewhere (other weights, padding) is 0.
        operands = [
            origin.entries + 1
            if origin is not None
            else np.zeros(survey.shape(tensor), np.int64)
            if tensor.dtype.is_floating
            else _constant(survey, tensor)
            for origin, tensor in _pairs(found, operation)
        ]
        with tf.Graph().as_default() as graph:
            inputs = [tf.constant(operand) for operand in operands]
            made = issue(operation, inputs)
            with tf.compat.v1.Session(graph=graph) as session:
                return [
                    Origin(np.asarray(entries, np.int64) - 1, scaled, made_from, gain) for entries in session.run(made)
                ]
    if operation.type in ENTRYWISE:
        shape = survey.shape(operation.outputs[0])
        entries = np.broadcast_to(known[0].entries, shape)
        for origin in known[1:]:
            other = np.broadcast_to(origin.entries, shape)
            if np.any((entries != other) & (entries >= 0) & (other >= 0)):
                raise Unsupported("a weight computed from several entries of the same variable")
            entries = np.maximum(entries, other)
        if operation.type in EXACT or (len(known) == 1 and _adds(operation, found)):
            return [replace(known[0], entries=entries, scaled=scaled)]
        gain = _gain(operation, found) if len(known) == 1 else None
        if made_from is None:
            whole = None if gain is None or known[0].gain is None else gain * known[0].gain
            return [Origin(entries, True, gain=whole)]
        if gain is None:
            raise Unsupported("a product of weights, changed entry by entry")
        return [Origin(entries, scaled, replace(made_from, gain=made_from.gain * gain))]
    if operation.type == "MatMul" or (operation.type == "BatchMatMulV2" and _are_matrices(survey, operation)):
        return [_product(survey, operation, found)]
    raise Unsupported("a weight computed by an operation that is not entry by entry")


def _pairs(found: Sequence[Origin | None], operation: Any) -> list[tuple[Origin | None, Any]]:
    return list(zip(found, operation.inputs, strict=True))


def _adds(operation: Any, found: Sequence[Origin | None]) -> bool:
    """Whether the operation adds something to the weight, so that its slope is 1."""
    return operation.type in ("Add", "AddV2", "BiasAdd") or (operation.type == "Sub" and found[0] is not None)


def _constant(survey: Survey, tensor: Any) -> NDArray[Any]:
    """The value of a tensor that is the same at every evaluation: made of constants and of shapes."""
    value = tf.get_static_value(tensor)
    if value is None:
        pending, seen = [tensor.op], set()
        while pending:
            operation = pending.pop()
            if operation.type in ("Placeholder", "ReadVariableOp"):
                raise Unsupported("values of weights or of data decide which entries it takes")
            if operation.name not in seen and operation.type not in SHAPES:
                seen.add(operation.name)
                pending.extend(t.op for t in operation.inputs)
        value = survey.values(tensor)[0]
    return np.asarray(value, tensor.dtype.as_numpy_dtype)


def _are_matrices(survey: Survey, operation: Any) -> bool:
    return all(len(survey.shape(tensor)) == 2 for tensor in operation.inputs)


def _product(survey: Survey, operation: Any, found: Sequence[Origin | None]) -> Origin:
    """A product of two weights, one of them the variable."""
    own = [i for i, origin in enumerate(found) if origin is not None]
    origin = found[own[0]]
    assert origin is not None
    if len(own) > 1 or origin.gain is None or origin.product is not None:
        raise Unsupported("a product of weights computed from this variable")
    names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    flags = [bool(operation.get_attr(name)) for name in names]
    entries = origin.entries.T if flags[own[0]] else origin.entries
    other = survey.name(operation.inputs[1 - own[0]])
    shape = survey.shape(operation.outputs[0])
    product = WeightProduct(entries, own[0] == 0, other, flags[1 - own[0]], origin.gain)
    return Origin(np.arange(np.prod(shape, dtype=int)).reshape(shape), False, product)


def _gain(operation: Any, found: Sequence[Origin | None]) -> float | None:
    """The constant that an operation multiplies a weight by; None where it does something else."""
    if operation.type in ("Neg", "Sub"):
        return -1.0
    own = 0 if found[0] is not None else 1
    value = tf.get_static_value(operation.inputs[1 - own]) if len(found) == 2 else None
    if value is None or np.size(value) != 1:
        return None
    if operation.type == "Mul":
        return float(np.reshape(value, ()))
    return 1 / float(np.reshape(value, ())) if operation.type in ("RealDiv", "Div") and own == 0 else None
