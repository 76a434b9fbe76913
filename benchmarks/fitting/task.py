"""What a worker fits, and what a framework's module hands back for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.networks import Network, mlp


@dataclass(frozen=True)
class FitTask:
    """One network, its data and its start.

    Attributes
    ----------
    sizes
        Widths of the layers, the input first; tanh between them.
    path
        .npz file with x (n, d), y (n, l) and the start weights by name, kernels (in, out).
    dtype
        "float32" or "float64": what everything is computed in.
    bound
        Every parameter lies within ± this; None for no bounds.
    """

    sizes: tuple[int, ...]
    path: str
    dtype: str
    threads: int
    bound: float | None = None

    @property
    def network(self) -> Network:
        """The architecture."""
        return mlp(*self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FitTask:
        """Inverse of `to_json`."""
        return cls(**{**data, "sizes": tuple(data["sizes"])})

    def load(self) -> tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]:
        """x (n, d), y (n, l) and the start weights by name in the network's order, in ``dtype``."""
        with np.load(self.path) as arrays:
            x, y, *values = (arrays[name].astype(self.dtype) for name in arrays.files)
            return x, y, dict(zip(arrays.files[2:], values, strict=True))


def save(path: Path, x: NDArray[Any], y: NDArray[Any], weights: dict[str, NDArray[Any]]) -> None:
    """Write what `FitTask.load` reads."""
    np.savez(path, x=x, y=y, **weights)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Goal:
    """When a fit is over: at a mean squared error, after that many steps, or after that many seconds."""

    mse: float
    steps: int
    seconds: float


@dataclass
class Watch:
    """Counts a fit's work and says when it is over; every contender asks it with the loss it computed itself.

    ``evaluations`` are those of the residual, ``steps`` the derivatives that steps started from; ``ended`` says why the
    fit is over, ``note`` what else there is to say of it.
    """

    goal: Goal
    evaluations: int = 0
    steps: int = 0
    ended: str = ""
    note: str = ""
    _began: float = field(default_factory=time.perf_counter)

    def over(self, mse: float) -> bool:
        """Whether the fit ends here: at the goal, or after more steps or time than it was given."""
        if mse <= self.goal.mse:
            self.ended = "reached"
        elif self.steps >= self.goal.steps:
            self.ended = f"after {self.steps} steps"
        elif time.perf_counter() - self._began > self.goal.seconds:
            self.ended = f"after {self.goal.seconds:.0f} s"
        return bool(self.ended)


@dataclass(frozen=True)
class PreparedFit:
    """A contender ready to fit.

    Attributes
    ----------
    fit
        One fit from the start weights; what is timed.
    outputs
        (n, l) at the start weights.
    weights
        Where the last fit ended, by name, kernels (in, out).
    """

    fit: Callable[[Goal], Watch]
    outputs: Callable[[], NDArray[Any]]
    weights: Callable[[], dict[str, NDArray[Any]]]


def split(vector: NDArray[Any], like: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """θ (m,) as the weights it holds one after the other."""
    parts = np.split(vector, np.cumsum([value.size for value in like.values()])[:-1])
    return {name: part.reshape(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


def joined(weights: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Inverse of `split`, in float64."""
    return np.concatenate([value.ravel() for value in weights.values()]).astype(np.float64)
