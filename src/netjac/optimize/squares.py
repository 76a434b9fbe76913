"""What a least-squares problem says at a θ: residual, cost, and derivatives of both.

One evaluation gives all of them; see `netjac.optimize.problem` for what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray

from netjac.errors import DataError
from netjac.optimize import budget, hessian, losses, options, routes
from netjac.optimize.base import Problem
from netjac.optimize.description import counted
from netjac.optimize.losses import Loss, Vector
from netjac.optimize.residual import ResidualJacobian
from netjac.optimize.sources import Data, Source


@final
@dataclass(frozen=True, eq=False)
class Evaluation:
    """Everything about one θ; its derivative is made when it is asked for."""

    theta: Vector  # (M,), a copy of ours
    data: Data
    residual: Vector  # (rows,), the prior's last
    cost: float
    prior: Vector | None

    @cached_property
    def jacobian(self) -> ResidualJacobian:
        """∂r/∂θ (rows, M)."""
        return ResidualJacobian(self.data.rows(), self.prior)


class Squares(Problem[Evaluation]):
    """A problem whose cost is half a sum of squares, or of losses of squares."""

    _source: Source
    _form: str  # of the derivative that SciPy gets
    _curvature: str
    _loss: Loss  # of the fit that is running, as its scale
    _f_scale: float
    _memory: int | None  # the budget, where one was given
    _factors: int | None = None  # what of it those of one evaluation may take

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the residual, the prior's included, and parameters; evaluates once where only that can tell."""
        size = self._source.size
        if size is None:
            size = self._at(self.x0).data.residual.size
        return size + (0 if self._prior is None else int(np.count_nonzero(self._prior))), self._space.size

    def _described(self) -> tuple[str, list[str]]:
        size, below = self._source.size, 0 if self._prior is None else int(np.count_nonzero(self._prior))
        rows = "residuals that were not evaluated yet" if size is None else counted(size, "residual")
        return rows + (f" and {below} of the prior" if below else ""), self._source.described()

    # ---- value and derivatives

    def fun(self, theta: ArrayLike) -> Vector:
        """Residual r(θ), flattened sample-major, the prior's rows last.

        Parameters
        ----------
        theta : (M,)
            The parameters; the model's own are left as they are.

        Returns
        -------
        (rows,) float64, the caller's own.
        """
        return self._at(theta).residual.copy()

    def jac(self, theta: ArrayLike) -> NDArray[np.float64] | ResidualJacobian:
        """Jacobian of the residual, ∂r/∂θ; costs no second evaluation at the θ `fun` was asked for last.

        Parameters
        ----------
        theta : (M,)
            The parameters.

        Returns
        -------
        (rows, M) float64, as an array or a `LinearOperator`; see ``jac`` of the class.
        """
        form = options.default_form(self._form, self.shape)
        if self._form == "auto" and form == "dense" and self._memory is not None:
            form, _ = self._shared(["dense", "operator"])
        return self._derivative(self._at(theta), form)

    def cost(self, theta: ArrayLike) -> float:
        """½ ‖r(θ)‖², for optimisers that take a value."""
        return self._at(theta).cost

    def grad(self, theta: ArrayLike) -> Vector:
        """Gradient of the cost, Rᵀ r (M,)."""
        return self._gradient(self._at(theta))

    def hessp(self, theta: ArrayLike, v: ArrayLike) -> Vector:
        """Hessian of the cost at θ times v (M,), or what stands for it; see ``curvature`` of the class."""
        evaluation, vector = self._at(theta), np.asarray(v, np.float64).reshape(-1)
        if self._curvature == "difference":
            return hessian.by_difference(lambda t: self._gradient(self._make(t)), evaluation.theta, vector)
        product: Vector = evaluation.jacobian.rmatvec(evaluation.jacobian.matvec(vector))
        return product + evaluation.data.second(vector) if self._curvature == "exact" else product

    def hess(self, theta: ArrayLike) -> NDArray[np.float64]:
        """The same as an array (M, M)."""
        if self._curvature != "gauss-newton":
            return hessian.explicit(lambda v: self.hessp(theta, v), self._space.size)
        R = self._at(theta).jacobian
        normal: NDArray[np.float64] = R.normal()
        if R.prior is not None:
            normal[np.diag_indices(len(normal))] += R.prior**2
        return normal

    # ---- for those who fit

    def _make(self, theta: Vector) -> Evaluation:
        data = self._source.evaluate(theta, self._factors)
        prior = self._prior_residual(theta)
        cost = losses.cost(data.residual, self._loss, self._f_scale) + losses.cost(prior)
        residual = np.concatenate([data.residual, prior]) if prior.size else data.residual
        self._watch.evaluated()
        return Evaluation(theta, data, residual, cost, self._prior)

    def _shared(self, ways: Sequence[str]) -> tuple[str, budget.Share]:
        """The first way to compute steps that the budget allows, and what that leaves for factors and steps.

        ``ways`` are those of `netjac.optimize.budget.steps_bytes`.
        """
        need, (rows, m) = self._source.need(int(self._loss != "linear")), self.shape
        memory = budget.default(need, rows, m, ways) if self._memory is None else self._memory
        return (ways[0], budget.Share()) if memory is None else budget.share(memory, need, rows, m, ways)

    def _settle(self, forms: Sequence[str], linear_solver: str | None) -> tuple[str, int | None]:
        """How a fit that begins is shared: the form or way that fits, and the bytes for steps.

        ``forms`` are those of the Jacobian that would do, the best first; ``linear_solver`` is of netjac's own solver,
        where that gets an operator.
        """
        if linear_solver is not None and forms[0] == "operator":
            limits = self._limits
            bounded = bool(np.isfinite(limits.lb).any() or np.isfinite(limits.ub).any())
            forms = routes.ways(*self.shape, linear_solver, bounded)
        way, share = self._shared(forms)
        self._factors = share.factors
        return way, share.steps

    def _derivative(self, evaluation: Evaluation, form: str) -> NDArray[np.float64] | ResidualJacobian:
        return evaluation.jacobian if form == "operator" else evaluation.jacobian.to_array()

    def _gradient(self, evaluation: Evaluation) -> Vector:
        """Of the cost, whatever its loss."""
        d = evaluation.data.residual.size
        data = losses.weighted(evaluation.data.residual, self._loss, self._f_scale)
        gradient: Vector = evaluation.jacobian.rmatvec(np.concatenate([data, evaluation.residual[d:]]))
        return gradient

    def _check_start(self, start: Vector) -> None:
        at = self._at(start)
        bad = at.residual.size - int(np.isfinite(at.residual).sum())
        if bad:
            raise DataError(
                f"{bad} of {at.residual.size} residuals are not finite at the start; start the fit from parameters at "
                "which the outputs are."
            )
        if not np.isfinite(at.cost):
            largest = float(np.abs(at.residual).max(initial=0.0))
            raise DataError(
                f"the residuals are finite at the start (the largest is {largest:.1e}), and the cost is {at.cost}: "
                "bring weights, priors, the loss and the residuals to a scale at which squares do not overflow."
            )

    def _take_best(self, result: scipy.optimize.OptimizeResult, form: str) -> None:
        """Put the best point into the result if the solver ended on another.

        MINPACK rejects a step that lowers the cost by far less than its model predicted, though the point is better;
        and a callback may have written into the vector it was shown.
        """
        best = self._evaluations.best
        if best is not None and best.cost <= result.cost and not np.array_equal(best.theta, result.x):
            self._complete(result, form)

    def _complete(self, result: scipy.optimize.OptimizeResult, form: str) -> scipy.optimize.OptimizeResult:
        """What the solver would have said of the best point."""
        best = self._evaluations.best
        assert best is not None
        result.x, result.fun, result.cost = best.theta.copy(), best.residual.copy(), best.cost
        result.jac, result.grad = self._derivative(best, form), self._gradient(best)
        result.optimality = float(np.abs(result.grad).max())
        return result
