"""What a least-squares fit knows and does not know: standard errors, prediction intervals, leverage, conditioning.

At the fitted θ̂ (M,) the residual is r = [r_d; π ∘ (θ̂ − θ₀)] and its derivative R = [J; diag(π)], π = 1 / σ of the prior
(see `netjac.optimize.problem`). To first order in the noise

    cov(θ̂) = σ² (Jᵀ J + diag(π²))⁻¹,    σ² = ‖r‖² / dof,    dof = rows of r − rank of R

(Seber and Wild 1989, Nonlinear Regression, §2.1.2). The noise of all residuals, after the weights, has the standard
deviation σ: estimated as above, or 1 where it is known (``absolute_sigma=True``: weights are 1 / variance). A prior row
counts as one more observation, so its σ is in the same unit; a parameter with a prior takes no degree of freedom.

Anything g(θ) with derivative A has cov(g) = A cov(θ̂) Aᵀ, the delta method. None of this forms the (M, M) covariance:
see `netjac.information`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray

from netjac import information, noise, planning
from netjac.errors import DataError, DtypeError, MemoryBudgetError, NameLookupError, ShapeError
from netjac.intervals import Conditioning, Prediction, Summary
from netjac.operator import JacobianOperator
from netjac.optimize import names as patterns
from netjac.optimize.losses import Loss
from netjac.optimize.options import OptionError, checked_loss
from netjac.optimize.problem import LeastSquares
from netjac.optimize.residual import ResidualJacobian
from netjac.optimize.sources import Targets, check_weights
from netjac.spaces import ParameterSpace, Segment

Vector = NDArray[np.float64]


@final
class Uncertainty:
    """Covariance of fitted parameters and what follows from it; made by `netjac.uncertainty`.

    Parameters
    ----------
    parameters
        Names and shapes, M.
    theta : (M,)
        The fitted θ.
    residual : (rows,)
        At θ, the prior's rows last.
    R : (rows, M)
        Its derivative.
    absolute_sigma, loss, f_scale
        See `netjac.uncertainty`.
    observes
        Whether the residual is f(x) − y, so that a new observation has the noise of the residuals.

    Attributes
    ----------
    parameters, theta
        As given.
    noise : Noise
        σ and its degrees of freedom.
    """

    def __init__(
        self,
        parameters: ParameterSpace,
        theta: Vector,
        residual: Vector,
        R: ResidualJacobian,
        *,
        absolute_sigma: bool = False,
        loss: Loss = "linear",
        f_scale: float = 1.0,
        observes: bool = True,
    ) -> None:
        self.parameters, self.theta = parameters, theta
        observed = noise.observations(residual[: R.data_rows], R)
        spread = 0.0
        if loss != "linear":
            if absolute_sigma:
                raise OptionError(
                    "absolute_sigma=True says that the noise is known, and a robust loss that it is not: give one."
                )
            residual, R, spread = noise.pseudo_residuals(residual, R, loss, f_scale, observed)
        self._R = R
        self._inverse = information.inverse_of(R)
        self._observes = observes and loss == "linear"
        self.noise = noise.estimate(residual, int(observed.sum()), self._inverse.spent, spread, known=absolute_sigma)
        self._warn()

    def _warn(self) -> None:
        missing = self._R.shape[1] - self._inverse.rank
        if missing:
            warnings.warn(
                f"the data leave {missing} of {self._R.shape[1]} directions of the parameters undetermined: what "
                "depends on those has an infinite standard error. A prior on them would decide.",
                scipy.optimize.OptimizeWarning,
                stacklevel=4,
            )
        if np.isinf(self.noise.sigma):
            warnings.warn(
                "there are no more residuals than parameters determined by them, so the noise cannot be estimated and "
                "every standard error is infinite; absolute_sigma=True takes it as 1.",
                scipy.optimize.OptimizeWarning,
                stacklevel=4,
            )

    def __repr__(self) -> str:
        rows, m = self._R.shape
        return f"<Uncertainty of {m} parameters from {rows} residuals: {self.noise}, by {self._inverse.route}>"

    # ---- parameters

    def standard_errors(self, names: str | Sequence[str] | None = None) -> dict[str, NDArray[np.float64]]:
        """Standard error of each parameter.

        Parameters
        ----------
        names
            Names or patterns of the variables wanted, as ``"dense*/kernel"``; all by default.

        Returns
        -------
        dict
            Name → array in the variable's shape; infinite where the data leave a parameter undetermined.

        Raises
        ------
        NameLookupError
            If a pattern fits no variable.
        """
        segments = self._segments(names)
        std = self._scaled(self._inverse.diagonal(_positions(segments)))
        return _by_name(segments, std)

    def covariance(self, which: str | Sequence[str] | ArrayLike | None = None) -> NDArray[np.float64]:
        """Covariance of some parameters, in the order of θ for names, and as given for positions.

        Parameters
        ----------
        which
            Names or patterns of variables, or integer positions in θ (q,); all by default.

        Returns
        -------
        (q, q) float64
            For a parameter the data leave undetermined, infinite on the diagonal and NaN beside it.

        Raises
        ------
        NameLookupError, DtypeError, DataError
            If a pattern fits no variable, or positions are no integers or out of range.
        MemoryBudgetError
            If more than 20,000 parameters are asked for.
        """
        positions = self._chosen(which)
        if len(positions) > information.LARGEST:
            raise MemoryBudgetError(
                f"the covariance of {len(positions)} parameters takes {8e-9 * len(positions) ** 2:.3g} GB: ask for "
                "some of them, or for standard_errors() or predict(), which never form it.",
                8 * len(positions) ** 2,
            )
        block = self._inverse.block(positions)
        with np.errstate(invalid="ignore"):  # infinite times zero
            return np.asarray(self.noise.sigma**2 * block)

    def summary(self, names: str | Sequence[str] | None = None, level: float = 0.95) -> Summary:
        """Estimates, standard errors and intervals by name, as a table that prints.

        Parameters
        ----------
        names
            As for `standard_errors`.
        level
            Of the intervals: Student's t with the fit's degrees of freedom, normal where σ is known.
        """
        errors = self.standard_errors(names)
        segments = self._segments(names)
        estimates = {s.name: self.theta[s.slice].reshape(s.shape).copy() for s in segments}
        margins = {name: self.noise.margin(error, level) for name, error in errors.items()}
        lower = {name: estimates[name] - margin for name, margin in margins.items()}
        upper = {name: estimates[name] + margin for name, margin in margins.items()}
        return Summary(estimates, errors, lower, upper, level, self.noise)

    # ---- what depends on the parameters

    def propagate(self, derivative: ArrayLike) -> Vector:
        """Standard errors (q,) of q functions of θ, by the delta method.

        Parameters
        ----------
        derivative : (q, M)
            With respect to θ, at the fit.

        Raises
        ------
        ShapeError
            If it has another number of columns.
        """
        A = np.asarray(derivative, np.float64)
        if A.ndim != 2 or A.shape[1] != self.theta.size:
            raise ShapeError(f"the derivative must have the shape (q, {self.theta.size}), and has {A.shape}.")
        return self._scaled(self._inverse.variances(np.ascontiguousarray(A.T)))

    def predict(self, J: JacobianOperator, weights: ArrayLike | None = None) -> Prediction:
        """Outputs at new inputs, their standard errors and intervals, by the delta method.

        Parameters
        ----------
        J
            ``netjac.jacobian(model, x_new)`` with the fitted θ in the model, as `LeastSquares.solve` leaves it there;
            with ``dtype="float64"`` for a model of another type. Its variables are matched with the fitted ones;
            others were constants of the fit. ``J.scaled(B)`` gives functions of the outputs.
        weights : (n,) or (n, l), optional
            Of new observations, as those of the fit; 1 by default.

        Raises
        ------
        NameLookupError
            If J has none of the fitted variables, as that of a copy of the model, whose variables are others.
        DataError
            If the model no longer holds the fitted parameters.
        ShapeError
            If the weights do not fit.
        """
        pairs = self._matched(J)
        variances = np.empty((J.n, J.l))
        for samples in planning.tiles(J.n, 16 * J.l * max(J.m, self.theta.size), information.CHUNK_BYTES):
            rows = J[samples].to_array(dtype=np.float64)
            A = np.zeros((self.theta.size, len(rows)))
            for there, here in pairs:
                A[here.slice] = rows[:, there.slice].T
            variances[samples] = self._inverse.variances(A).reshape(-1, J.l)
        noise_std = self.noise.sigma / _roots(weights, J.n, J.l) if self._observes else None
        return Prediction(np.array(J.y, np.float64), self._scaled(variances), noise_std, self.noise)

    def _matched(self, J: JacobianOperator) -> list[tuple[Segment, Segment]]:
        """The variables J and θ share, as (segment of J, segment of θ)."""
        if not isinstance(J, JacobianOperator):
            raise DtypeError(f"predict takes a Jacobian, netjac.jacobian(model, x), and got a {type(J).__name__}.")
        own, other = self.parameters.variables, J.parameters.variables
        if own is None or other is None:  # out of a pickle
            mine: list[Any] = list(self.parameters.names)
            keys: list[Any] = list(J.parameters.names)
        else:
            mine, keys = [id(variable) for variable in own], [id(variable) for variable in other]
        fitted = dict(zip(mine, self.parameters, strict=True))
        pairs = [(segment, fitted[key]) for segment, key in zip(J.parameters, keys, strict=True) if key in fitted]
        if not pairs:
            theirs, ours = (", ".join(map(repr, space.names)) for space in (J.parameters, self.parameters))
            if set(J.parameters.names) & set(self.parameters.names):
                raise NameLookupError(
                    f"the Jacobian is of another model than the fitted one: its variables ({theirs}) are called like "
                    "those of the fit, and are not the same objects. Take it of the very model, or variables=, that "
                    "the LeastSquares problem was given."
                )
            raise NameLookupError(f"none of the Jacobian's variables was fitted: it has {theirs}, and the fit {ours}.")
        for there, here in pairs:
            if there.shape != here.shape:
                raise ShapeError(f"{there.name!r} has shape {there.shape}, and was fitted as {here.shape}.")
            if own is not None and other is not None:
                self._check_fitted(here, own[self.parameters.find(here.name)])
        return pairs

    def _check_fitted(self, segment: Segment, variable: Any) -> None:
        now = np.asarray(variable)
        theta = self.theta[segment.slice].reshape(segment.shape)
        if not np.allclose(now, theta, rtol=4 * np.finfo(now.dtype).eps, atol=0):
            raise DataError(
                f"{segment.name!r} no longer holds the fitted values: put them back with "
                "problem.parameters.assign(result.x) and take the Jacobian again."
            )

    # ---- the data

    @cached_property
    def leverage(self) -> Vector:
        """Diagonal of the hat matrix J (Jᵀ J + diag(π²))⁻¹ Jᵀ (d,): what each data row does to its own fitted value.

        Between 0 and 1, sample-major; after the weights; their sum is the number of effective parameters.
        """
        return self._inverse.leverage()

    @cached_property
    def conditioning(self) -> Conditioning:
        """Singular values, rank and condition of the data rows, and effective parameters."""
        values = information.singular_values(self._R)
        rank = int(np.sum(values > max(self._R.data_rows, self.theta.size) * np.finfo(np.float64).eps * values[0]))
        condition = float(values[0] / values[-1]) if rank == len(values) else np.inf
        return Conditioning(values, rank, condition, float(self.leverage.sum()), self.theta.size)

    # ----

    def _scaled(self, variances: Vector) -> Vector:
        """σ √v; 0 where nothing depends on the parameters, whatever σ is."""
        out = np.zeros(variances.shape)
        np.multiply(self.noise.sigma, np.sqrt(variances), out=out, where=variances > 0)
        return out

    def _segments(self, names: str | Sequence[str] | None) -> list[Segment]:
        if names is None:
            return list(self.parameters.segments)
        return [self.parameters.segments[i] for i in patterns.chosen(self.parameters, names)]

    def _chosen(self, which: Any) -> NDArray[np.intp]:
        if which is None or isinstance(which, str):
            return _positions(self._segments(which))
        array = np.asarray(which)
        if array.dtype.kind == "U":
            return _positions(self._segments(list(which)))
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise DtypeError(f"give names of parameters, or a list of integer positions in theta, and not {which!r}.")
        if array.size and not (-self.theta.size <= array.min() and array.max() < self.theta.size):
            raise DataError(f"positions in theta are below {self.theta.size}, and one is {array.max()}.")
        return array.astype(np.intp) % self.theta.size


def uncertainty(
    problem: LeastSquares,
    result: Any = None,
    *,
    absolute_sigma: bool = False,
    loss: Loss = "linear",
    f_scale: float = 1.0,
) -> Uncertainty:
    """Standard errors, covariance, prediction intervals and leverage of a least-squares fit.

    Parameters
    ----------
    problem
        The fit: network, data, weights and prior.
    result
        What the optimiser returned (``result.x`` is used, whichever optimiser it came from), or θ (M,); by default the
        model's present parameters.
    absolute_sigma
        As for `scipy.optimize.curve_fit`: False estimates σ from the residuals, so that only ratios of weights and of
        prior σ matter; True takes the noise of a residual of weight 1 as 1, so weights are 1 / variance, and a prior's
        σ is in the parameter's own unit.
    loss, f_scale
        As given to the fit. A robust loss is answered by Huber's asymptotic covariance; see the notes.

    Returns
    -------
    Uncertainty

    Raises
    ------
    OptionError
        If the problem has no residuals, the result was fitted with another loss, or ``absolute_sigma`` meets a robust
        loss.
    DataError
        If the residuals at θ are not finite, or a robust loss is on average not convex there.
    MemoryBudgetError
        If there are more than 20,000 data rows and as many parameters.

    Warns
    -----
    scipy.optimize.OptimizeWarning
        If the data leave directions of θ undetermined, or leave no degrees of freedom; what depends on those is
        infinite. A direction is undetermined where it changes no residual and has no prior.

    Notes
    -----
    Rows whose residual and derivative are both zero, as those of weight 0, are no observations.

    A robust loss is answered by the pseudo-residuals of `netjac.noise`, and tells nothing of a new observation's noise.

    Bounds are not taken into account: a parameter on its bound is treated as if it were free.

    Examples
    --------
    >>> import numpy as np, tensorflow as tf, netjac as nj
    >>> slope, offset = tf.Variable(0.0, dtype="float64", name="a"), tf.Variable(0.0, dtype="float64", name="b")
    >>> def line(x):
    ...     return slope * x + offset
    >>> x = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> problem = nj.LeastSquares(line, x, np.array([1.1, 3.9, 7.2, 9.8]), variables=[slope, offset])
    >>> u = nj.uncertainty(problem, problem.solve())
    >>> print(u.summary())
    parameter  estimate  std. error  95 % interval
    a          2.94      0.0906      [2.55038, 3.32962]
    b          1.09      0.169       [0.361084, 1.81892]
    σ = 0.202485 (2 degrees of freedom)
    >>> low, high = u.predict(nj.jacobian(line, [[4.0]], variables=[slope, offset])).interval(observation=True)
    >>> print(low.round(2), high.round(2))
    [[11.47]] [[14.23]]
    """
    if not isinstance(problem, LeastSquares):
        raise OptionError(
            f"the uncertainty is that of a least-squares fit, and a {type(problem).__name__} has no residuals."
        )
    f_scale = checked_loss(loss, f_scale)
    found = getattr(result, "x", result)
    theta = problem.x0 if found is None else np.array(found, np.float64)
    residual = problem.fun(theta)
    if not np.all(np.isfinite(residual)):
        raise DataError("the residuals are not finite at these parameters.")
    R = problem._at(theta).jacobian
    noise.check_loss(result, R.data_rows, loss, f_scale)
    return Uncertainty(
        problem.parameters,
        theta,
        residual,
        R,
        absolute_sigma=absolute_sigma,
        loss=loss,
        f_scale=f_scale,
        observes=isinstance(problem._source, Targets),
    )


def _roots(weights: ArrayLike | None, n: int, l: int) -> Vector:
    """√w (n, l) of new observations; 1 by default."""
    if weights is None:
        return np.ones((n, l))
    array = check_weights(weights)
    if array.shape not in ((n,), (n, l)):
        raise ShapeError(f"weights must have the shape ({n},) or ({n}, {l}), and have {array.shape}.")
    if not np.all(array > 0):
        raise DataError("a new observation of weight 0 has infinite noise: leave it out.")
    return np.sqrt(np.broadcast_to(array.reshape(n, -1), (n, l)))


def _positions(segments: Sequence[Segment]) -> NDArray[np.intp]:
    return np.concatenate([np.arange(s.start, s.stop) for s in segments] or [np.zeros(0, np.intp)])


def _by_name(segments: Sequence[Segment], flat: Vector) -> dict[str, NDArray[np.float64]]:
    """Name → array in the variable's shape, from one vector of all of them."""
    borders = np.cumsum([s.size for s in segments])[:-1]
    return {s.name: part.reshape(s.shape) for s, part in zip(segments, np.split(flat, borders), strict=True)}
