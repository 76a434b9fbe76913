"""A network in NumPy behind the evaluator protocol: fits without TensorFlow, also in a process of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.spaces import OutputSpace, ParameterSpace, lay_out

Array = NDArray[np.float64]


class Variable:
    """A live variable as far as ParameterSpace can tell."""

    def __init__(self, value: Any) -> None:
        self.value = np.array(value, dtype=np.float64)

    def assign(self, value: Any) -> None:
        self.value = np.array(value, dtype=np.float64).reshape(self.value.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.value, dtype=dtype)


class Plain:
    """A Jacobian with products and an array, and no other verb."""

    def __init__(self, array: Array, y: Array) -> None:
        self.array, self.y, self.dtype = array, y, array.dtype

    def matmat(self, V: Array) -> Array:
        return self.array @ V

    def rmatmat(self, U: Array) -> Array:
        return self.array.T @ U

    def to_array(self, layout: str = "(n l) m", *, dtype: Any = None) -> Array:
        return self.array.astype(dtype)


@dataclass
class Evaluated:
    """A dense Jacobian with its outputs."""

    J: Array
    y: Array

    @property
    def dtype(self) -> Any:
        return self.J.dtype

    def matmat(self, V: Array) -> Array:
        return self.J @ V

    def rmatmat(self, U: Array) -> Array:
        return self.J.T @ U

    def matvec(self, v: Array) -> Array:
        return self.J @ v

    def rmatvec(self, u: Array) -> Array:
        return self.J.T @ u

    def to_array(self, layout: str = "(n l) m", *, dtype: Any = None) -> Array:
        return self.J.astype(dtype)


class Network:
    """1-h-1 with tanh, m = 3 h + 1; ``before`` is called with the number of each evaluation, from 1 on."""

    def __init__(self, x: Array, hidden: int = 4, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.x, self.hidden, self.count = x, hidden, 0
        self.before: Callable[[int], None] = lambda count: None
        shapes = [(1, hidden), (hidden,), (hidden, 1), (1,)]
        self.variables = [Variable(rng.normal(size=shape)) for shape in shapes]
        names = ["hidden/kernel", "hidden/bias", "out/kernel", "out/bias"]
        self.parameters = ParameterSpace(lay_out(names, shapes, ["float64"] * 4), self.variables)
        self.output_space = OutputSpace(lay_out(["y"], [(1,)], ["float64"]))

    def evaluate(self, theta: Array | None = None) -> Evaluated:
        self.count += 1
        self.before(self.count)
        w, b, v, c = np.split(self.parameters.ravel() if theta is None else theta, np.arange(1, 4) * self.hidden)
        z = np.tanh(self.x[:, None] * w + b)
        d = (1 - z**2) * v
        J = np.concatenate([self.x[:, None] * d, d, z, np.ones((len(self.x), 1))], axis=1)
        return Evaluated(J, (z @ v + c)[:, None])


X = np.linspace(-2, 2, 25)
Y = np.sin(2 * X) + 0.1 * np.cos(9 * X)  # what a small network cannot fit is there too
