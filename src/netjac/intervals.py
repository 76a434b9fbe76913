"""What a fit says about its parameters and predictions: numbers as dataclasses that print; `netjac.plots` draws.

`netjac.uncertainty` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.noise import Noise
from netjac.optimize.options import OptionError

Vector = NDArray[np.float64]
_SHOWN = 6  # entries of a variable that are printed one by one


@dataclass(frozen=True, eq=False)
class Summary:
    """Estimates and their standard errors, as a table.

    Attributes
    ----------
    estimates, std_errors, lower, upper : dict
        Name → array in the variable's shape.
    level : float
        Of the interval from lower to upper.
    noise : Noise
    """

    estimates: dict[str, NDArray[Any]]
    std_errors: dict[str, NDArray[Any]]
    lower: dict[str, NDArray[Any]]
    upper: dict[str, NDArray[Any]]
    level: float
    noise: Noise

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("parameter", "estimate", "std. error", f"{100 * self.level:g} % interval")]
        for name, estimate in self.estimates.items():
            columns = (estimate, self.std_errors[name], self.lower[name], self.upper[name])
            if estimate.size > _SHOWN:
                error = columns[1]
                shape = " × ".join(map(str, estimate.shape))
                middle = f"{error.min():.3g} … {np.median(error):.3g} … {error.max():.3g}"
                lines.append((f"{name}  {shape}", "", middle, "least, median, largest"))
                continue
            for index in np.ndindex(*estimate.shape):
                value, std, low, high = (float(column[index]) for column in columns)
                label = name + (f"[{', '.join(map(str, index))}]" if index else "")
                lines.append((label, f"{value:.6g}", f"{std:.3g}", f"[{low:.6g}, {high:.6g}]"))
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*(line.rstrip() for line in table), str(self.noise)])


@dataclass(frozen=True, eq=False)
class Prediction:
    """Outputs at new inputs, with what the uncertainty of the parameters makes of them.

    Attributes
    ----------
    mean : (n, l)
        f(x; θ̂).
    std : (n, l)
        Standard error of the mean, √(A cov(θ̂) Aᵀ); infinite where the data leave the output undetermined.
    noise_std : (n, l) or None
        Standard deviation of the noise of one new observation, σ / √weight; None where the residual is not f(x) − y,
        or the loss is robust: a new observation then has no known distribution.
    noise : Noise
    """

    mean: Vector
    std: Vector
    noise_std: Vector | None
    noise: Noise

    def interval(self, level: float = 0.95, observation: bool = False) -> tuple[Vector, Vector]:
        """Lower and upper limit (n, l), each output for itself.

        Parameters
        ----------
        level
            Of the interval: Student's t with the fit's degrees of freedom, normal where σ is known.
        observation
            False: the confidence interval, of the mean f(x). True: the prediction interval, of a new observation y.

        Raises
        ------
        OptionError
            If level is not between 0 and 1, or ``noise_std`` is None and an observation is asked for.
        """
        std = self.observation_std if observation else self.std
        margin = self.noise.margin(std, level)
        return self.mean - margin, self.mean + margin

    @property
    def observation_std(self) -> Vector:
        """Standard deviation of a new observation about the mean, √(std² + noise_std²), (n, l)."""
        if self.noise_std is None:
            raise OptionError(
                "the noise of a new observation is unknown: the residual is a function from outside, or the loss is "
                "robust. The interval of the mean (observation=False) holds."
            )
        return np.hypot(self.std, self.noise_std)

    def __str__(self) -> str:
        n, l = self.mean.shape
        return (
            f"prediction of {n} samples × {l} outputs, {self.noise}\n"
            f"  standard error of the mean  {self.std.min():.3g} … {np.median(self.std):.3g} … {self.std.max():.3g}"
            "  (least, median, largest)"
        )


@dataclass(frozen=True, eq=False)
class Conditioning:
    """How well the data determine the parameters.

    Attributes
    ----------
    singular_values : (min(d, M),)
        Of the data rows J alone, weights included, in falling order.
    rank : int
        Number of those above rounding: combinations of parameters that the data see.
    condition : float
        Largest over smallest, as `numpy.linalg.cond`; infinite where the rank is not full.
    effective : float
        Trace of the hat matrix J (Jᵀ J + diag(π²))⁻¹ Jᵀ: the number of parameters the fit takes from the data rather
        than from the prior. Equals the rank where there is no prior.
    parameters : int
        M.
    """

    singular_values: Vector
    rank: int
    condition: float
    effective: float
    parameters: int

    def __str__(self) -> str:
        return (
            f"{self.parameters} parameters, of which the data see {self.rank} combinations\n"
            f"  effective parameters  {self.effective:.6g}\n"
            f"  condition number      {self.condition:.3g}"
        )
