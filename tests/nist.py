"""NIST's nonlinear-regression problems as TensorFlow formulas (https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml).

``load(name)`` reads a file; ``model(name, values)`` gives (f, variables): f takes x (n, predictors) and returns (n,).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

DIRECTORY = Path(__file__).parents[2] / "shared" / "data" / "nist-strd"


@dataclass(frozen=True, eq=False)
class Problem:
    """One file.

    Attributes
    ----------
    x : (n, predictors) float64
    y : (n,) float64
        The response, as the formula gives it (for Nelson, its logarithm).
    starts : (2, m)
        The far start and the near one.
    certified, deviations : (m,)
        Certified parameters and their standard deviations.
    residual_sum : float
        Certified sum of squares of the residuals.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    starts: np.ndarray
    certified: np.ndarray
    deviations: np.ndarray
    residual_sum: float


def _gauss(b: Any, x: Any) -> Any:
    first = b[2] * tf.exp(-((x - b[3]) ** 2) / b[4] ** 2)
    return b[0] * tf.exp(-b[1] * x) + first + b[5] * tf.exp(-((x - b[6]) ** 2) / b[7] ** 2)


def _lanczos(b: Any, x: Any) -> Any:
    return b[0] * tf.exp(-b[1] * x) + b[2] * tf.exp(-b[3] * x) + b[4] * tf.exp(-b[5] * x)


def _cubics(b: Any, x: Any) -> Any:
    return (b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3) / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def _enso(b: Any, x: Any) -> Any:
    y = b[0]
    for cosine, sine, period in ((b[1], b[2], 12.0), (b[4], b[5], b[3]), (b[7], b[8], b[6])):
        angle = 2 * math.pi * x / period
        y = y + cosine * tf.cos(angle) + sine * tf.sin(angle)
    return y


def _saturation(b: Any, x: Any) -> Any:
    return b[0] * (1 - tf.exp(-b[1] * x))


def _chwirut(b: Any, x: Any) -> Any:
    return tf.exp(-b[0] * x) / (b[1] + b[2] * x)


# b: the parameters, each a scalar; x: (n,), or two of them.
FORMULAS: dict[str, Callable[..., Any]] = {
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": _saturation,
    "Chwirut1": _chwirut,
    "Chwirut2": _chwirut,
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "ENSO": _enso,
    "Eckerle4": lambda b, x: b[0] / b[1] * tf.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Gauss1": _gauss,
    "Gauss2": _gauss,
    "Gauss3": _gauss,
    "Hahn1": _cubics,
    "Kirby2": lambda b, x: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Lanczos1": _lanczos,
    "Lanczos2": _lanczos,
    "Lanczos3": _lanczos,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda b, x: b[0] * tf.exp(b[1] / (x + b[2])),
    "MGH17": lambda b, x: b[0] + b[1] * tf.exp(-x * b[3]) + b[2] * tf.exp(-x * b[4]),
    "Misra1a": _saturation,
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x: b[0] * b[1] * x * (1 + b[1] * x) ** -1,
    "Nelson": lambda b, x1, x2: b[0] - b[1] * x1 * tf.exp(-b[2] * x2),
    "Rat42": lambda b, x: b[0] / (1 + tf.exp(b[1] - b[2] * x)),
    "Rat43": lambda b, x: b[0] / (1 + tf.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Roszman1": lambda b, x: b[0] - b[1] * x - tf.atan(b[2] / (x - b[3])) / math.pi,
    "Thurber": _cubics,
}


def load(name: str, directory: Path = DIRECTORY) -> Problem:
    """Read a file."""
    text = (directory / f"{name}.dat").read_text(encoding="ascii")
    rows = re.findall(r"^\s*b\d+\s*=\s*(\S+)\s+(\S+)\s+(\S+)\s+(\S+)\s*$", text, re.MULTILINE)
    parameters = np.array(rows, float)
    residual_sum = re.search(r"Residual Sum of Squares:\s*(\S+)", text)
    lines = text.splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("Data:"))
    data = np.array([line.split() for line in lines[last + 1 :] if line.strip()], float)
    assert residual_sum is not None
    y = np.log(data[:, 0]) if name == "Nelson" else data[:, 0]
    return Problem(
        name, data[:, 1:], y, parameters[:, :2].T, parameters[:, 2], parameters[:, 3], float(residual_sum[1])
    )


def model(name: str, values: Sequence[float], one_vector: bool = False) -> tuple[Callable[[Any], Any], list[Any]]:
    """The formula as a function of x (n, predictors), with a variable a parameter (or one for all) at ``values``."""
    if one_vector:
        variables = [tf.Variable(np.asarray(values, np.float64), name="b")]
    else:
        variables = [tf.Variable(float(v), dtype=tf.float64, name=f"b{i + 1}") for i, v in enumerate(values)]

    def f(x: Any) -> Any:
        b = tf.unstack(variables[0]) if one_vector else variables
        return FORMULAS[name](b, *tf.unstack(x, axis=1))

    return f, variables
