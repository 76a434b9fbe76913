"""The noise of a fit: its estimate from the residuals, and what a robust loss makes of it.

A robust loss ρ with scale C has the derivatives ψ(r) = ρ'(z) r and ψ'(r) = ρ' + 2 z ρ'', z = (r / C)². Its M-estimate
has, for d data rows of which p degrees of freedom are spent, the covariance (Huber 1981, Robust Statistics, §7.6,
eq. 6.5)

    K² · [Σ ψ² / (d − p)] / ψ̄'² · (Jᵀ J)⁻¹,    K = 1 + p / d · var(ψ') / ψ̄'²,

ψ̄' the mean of ψ'. That is least squares with the pseudo-residuals ψ / ψ̄' and σ multiplied by K. Near the fit, with
prior residuals q, the cost is ½ ψ̄' (‖J s + ψ / ψ̄'‖² + ‖(π ∘ s + q) / √ψ̄'‖²): prior rows are divided by √ψ̄'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from netjac.errors import DataError
from netjac.optimize import losses
from netjac.optimize.losses import LOSSES, Loss
from netjac.optimize.options import OptionError
from netjac.optimize.residual import ResidualJacobian

Vector = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Noise:
    """What the residuals say about the noise.

    Attributes
    ----------
    sigma : float
        Standard deviation of a residual of weight 1; 1 where it is known, infinite where there are no degrees of
        freedom to estimate it from.
    dof : float
        Degrees of freedom of the estimate; infinite where it is known.
    residual_sum : float
        ‖r‖², prior rows included; with a robust loss that of the pseudo-residuals.
    known : bool
        Whether σ was given.
    """

    sigma: float
    dof: float
    residual_sum: float
    known: bool

    def quantile(self, level: float) -> float:
        """Half width of a two-sided interval in standard errors: Student's t, or normal where σ is known."""
        if not 0 < level < 1:
            raise OptionError(f"level must be between 0 and 1, as 0.95, and is {level!r}.")
        p = 0.5 * (1 + level)
        if np.isinf(self.dof):
            return float(ndtri(p))
        return float(stdtrit(self.dof, p)) if self.dof > 0 else np.inf

    def margin(self, std: Vector, level: float) -> Vector:
        """Half width of the interval of something with a standard error; infinite where that is."""
        out = np.full(std.shape, np.inf)
        np.multiply(self.quantile(level), std, out=out, where=np.isfinite(std))
        return out

    def __str__(self) -> str:
        if self.known:
            return f"σ = {self.sigma:.6g} (known)"
        return f"σ = {self.sigma:.6g} ({self.dof:g} degrees of freedom)"


def estimate(residual: Vector, rows: int, spent: int, spread: float = 0.0, *, known: bool = False) -> Noise:
    """σ from all residuals, prior rows included.

    Parameters
    ----------
    residual : (rows,)
        Or pseudo-residuals.
    rows, spent
        d, and the degrees of freedom p the fit takes from them.
    spread
        var(ψ') / ψ̄'²; 0 for least squares.
    known
        Whether σ is 1 instead.
    """
    residual_sum = float(residual @ residual)
    dof = rows - spent
    if known:
        return Noise(1.0, np.inf, residual_sum, True)
    if dof <= 0:
        return Noise(np.inf, 0.0, residual_sum, False)
    return Noise((1 + spent / rows * spread) * float(np.sqrt(residual_sum / dof)), float(dof), residual_sum, False)


def observations(residual: Vector, R: ResidualJacobian) -> NDArray[np.bool_]:
    """Which data rows (d,) are observations: all but those, as of weight 0, of zero residual and zero derivative.

    Of a derivative that is zero, a random product is zero; of any other, almost surely not.
    """
    zero = residual == 0
    if not zero.any():
        return ~zero
    return ~(zero & (R.rows.matvec(np.random.default_rng(0).normal(size=R.shape[1])) == 0))


def pseudo_residuals(
    residual: Vector, R: ResidualJacobian, loss: Loss, f_scale: float, observed: NDArray[np.bool_]
) -> tuple[Vector, ResidualJacobian, float]:
    """ψ / ψ̄' and the prior's residuals / √ψ̄'; the rows to go with them; and var(ψ') / ψ̄'².

    Raises
    ------
    DataError
        If the loss is on average not convex at these residuals.
    """
    data, below = np.split(residual, [R.data_rows])
    z = (data / f_scale) ** 2
    of_rows = loss if callable(loss) else LOSSES[loss]
    _, slope, bend = of_rows(z)
    slopes = (slope + 2 * z * bend)[observed]
    mean = float(slopes.mean())
    if mean <= 0:
        raise DataError(
            f"the loss is not convex at these residuals: the mean of its second derivative is {mean:.3g}. A larger "
            "f_scale, or fewer outliers, would make it positive."
        )
    prior = None if R.prior is None else R.prior / np.sqrt(mean)
    pseudo = np.concatenate([slope * data / mean, below / np.sqrt(mean)])
    return pseudo, ResidualJacobian(R.rows, prior), float(slopes.var()) / mean**2


def check_loss(result: Any, data_rows: int, loss: Loss, f_scale: float) -> None:
    """The cost in a result of `least_squares` must be that of its residuals under the loss.

    Raises
    ------
    OptionError
        If it is not.
    """
    cost, fun = getattr(result, "cost", None), getattr(result, "fun", None)
    if cost is None or fun is None:
        return
    data, below = np.split(np.asarray(fun, np.float64), [data_rows])
    expected = losses.cost(data, loss, f_scale) + losses.cost(below)
    if not np.isclose(cost, expected, rtol=1e-6, atol=0):
        raise OptionError(
            f"the result's cost is {cost:.6g}, and with loss={loss!r} and f_scale={f_scale} its residuals would have "
            f"{expected:.6g}: give the loss and the f_scale of the fit."
        )
