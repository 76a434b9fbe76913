"""What to say of models made for one number of samples, and of Python code inside a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from netjac.errors import ShapeError

PYTHON = {"PyFunc": "tf.numpy_function", "PyFuncStateless": "tf.numpy_function", "EagerPyFunc": "tf.py_function"}
"""Operations that call Python, and what makes them."""

FIXED = (
    "Build the model for any number of samples: keras.Input(shape) without batch_size (or batch_shape=(None, ...)), "
    "and -1 for the samples in every reshape."
)


def refuse_output(tensor: Any) -> NoReturn:
    """Raise for an output that is not (n, ...) with n any number and all other sizes known."""
    python = next((op for op in behind([tensor]) if op.type in PYTHON), None)
    known = tensor.shape.rank is not None and all(size is not None for size in tensor.shape[1:])
    if not known and python is not None:
        raise ShapeError(
            f"the shape of the output {tensor.name!r} is not known: the operation {python.name!r} ({python.type}, a "
            f"{PYTHON[python.type]}) does not state what it returns. State it: y = tf.ensure_shape(y, (None, ...)), "
            "with n left open and all other sizes given."
        )
    if tensor.shape.rank == 0:
        raise ShapeError(
            "the model returns a scalar, not one value per sample; return outputs of shape (n, ...), before any mean "
            "or sum over the samples."
        )
    if known and tensor.shape[0] is not None:
        raise ShapeError(
            f"the output {tensor.name!r} has shape {tuple(tensor.shape)} whatever the number of samples, and should be "
            f"(n, ...). Is it made for {tensor.shape[0]} samples, or did it lose them in a sum or a mean? {FIXED}"
        )
    shape = "that is not known" if tensor.shape.rank is None else tuple(tensor.shape)
    raise ShapeError(
        f"an output has a shape {shape}; expected (n, ...) with n the number of samples and all other sizes known."
    )


def fixed_samples(model: Any) -> str:
    """What to say of a model built for one number of samples; nothing of others."""
    found = {int(t.shape[0]) for t in getattr(model, "inputs", None) or () if len(t.shape) and t.shape[0] is not None}
    numbers = ", ".join(map(str, sorted(found)))
    return f"\nThe model was built for {numbers} samples, no more and no fewer. {FIXED}" if found else ""


def behind(tensors: Sequence[Any]) -> Iterable[Any]:
    """All operations that the tensors are computed by, nearest first."""
    pending = [tensor.op for tensor in tensors]
    seen = {op.name for op in pending}
    while pending:
        operation = pending.pop(0)
        yield operation
        new = [t.op for t in operation.inputs if t.op.name not in seen]
        seen |= {op.name for op in new}
        pending += new
