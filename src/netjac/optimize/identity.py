"""Which fit a checkpoint is of, in a form that a file holds, and in words where two of them differ.

An identity is a dict that JSON holds: choices as they are, parameters as pairs of name and shape, and arrays as
fingerprints, each under the name of what it belongs to. What is said in words calls the checkpoint *there*, the fit
that would go on *here*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from netjac.spaces import ParameterSpace

Identity = Mapping[str, Any]

_OF_A_METHOD = ("jac", "linear_solver", "x_scale")


def digest(*arrays: ArrayLike) -> str:
    """A short fingerprint of arrays: of their shapes, types and bytes.

    Examples
    --------
    >>> digest([1.0, 2.0]) == digest([1.0, 2.0]), digest([1.0, 2.0]) == digest([[1.0, 2.0]])
    (True, False)
    """
    made = hashlib.sha256()
    for each in arrays:
        array = np.ascontiguousarray(each)
        made.update(f"{array.dtype.str}{np.shape(each)}".encode())
        made.update(array.data if array.size else b"")
    return made.hexdigest()[:16]


def fingerprint(*arrays: ArrayLike) -> dict[str, Any]:
    """The digest of arrays, and the shape of the first."""
    return {"shape": list(np.shape(arrays[0])), "digest": digest(*arrays)}


def by_variable(space: ParameterSpace, held: NDArray[np.bool_], *vectors: NDArray[Any]) -> dict[str, Any]:
    """The fingerprints of parts of vectors over θ (M,), by variable, of the variables that ``held`` (M,) has any of."""
    return {
        segment.name: fingerprint(*(vector[segment.slice].reshape(segment.shape) for vector in vectors))
        for segment in space
        if held[segment.slice].any()
    }


def named(value: Any) -> Any:
    """A choice as an identity holds it: a callable by its name."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else value


def differences(there: Identity, here: Identity) -> list[str]:
    """What two identities do not agree in, each in words.

    Examples
    --------
    >>> there = {"method": "trf", "data": {"targets": fingerprint([1.0, 2.0])}, "bounds": {}}
    >>> here = {"method": "lm", "data": {"targets": fingerprint([1.0])}, "bounds": {"kernel": fingerprint([0.0])}}
    >>> for line in differences(there, here):
    ...     print(line)
    method: 'trf' there, 'lm' here
    targets: shape (2,) there, (1,) here
    bounds of 'kernel': none there
    """
    lines: list[str] = []
    apart = there.get("method") != here.get("method")  # whose own options, by default or given, then say nothing
    for key in dict.fromkeys([*here, *there]):
        before, now = there.get(key), here.get(key)
        if before == now or (apart and key in _OF_A_METHOD):
            continue
        if key == "parameters" and before and now:
            lines += _of_parameters(before, now)
        elif isinstance(before, Mapping) and isinstance(now, Mapping):
            lines += _of_arrays(key, before, now)
        else:
            lines.append(f"{key}: {_short(before)} there, {_short(now)} here")
    return lines


def _of_parameters(there: Iterable[Any], here: Iterable[Any]) -> list[str]:
    before, now = ({name: tuple(shape) for name, shape in each} for each in (there, here))
    if list(before.values()) == list(now.values()):  # the same network but for names, or but for their order
        pairs = [(a, b) for a, b in zip(before, now, strict=True) if a != b]
        return [f"parameters: {_listed([f'{a!r} there is {b!r} here' for a, b in pairs])}"]
    both = [name for name in before if now.get(name, before[name]) != before[name]]
    found = [f"{name!r} has shape {before[name]} there, {now[name]} here" for name in both]
    found += [f"{name!r} {before[name]} is there alone" for name in before if name not in now]
    found += [f"{name!r} {now[name]} is here alone" for name in now if name not in before]
    return [f"parameters: {_listed(found) if found else 'the same, in another order'}"]


def _of_arrays(key: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in dict.fromkeys([*here, *there]):
        before, now = there.get(name), here.get(name)
        if before == now:
            continue
        label = {"data": name, "x_scale": key}.get(key, f"{key} of {name!r}")
        if before is None or now is None:
            said = f"none {'there' if before is None else 'here'}"
        elif before["shape"] != now["shape"]:
            said = f"shape {tuple(before['shape'])} there, {tuple(now['shape'])} here"
        else:
            said = f"other values (fingerprint {before['digest'][:8]} there, {now['digest'][:8]} here)"
        lines.append(f"{label}: {said}")
    return lines


def _listed(found: list[str], most: int = 5) -> str:
    more = f", and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an array"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:120]} … {text[-60:]}"
