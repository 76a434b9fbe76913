"""Where the residuals of the data come from: targets, or a function from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike, NDArray

from netjac.errors import DataError, DtypeError, ShapeError
from netjac.optimize import names, targets
from netjac.optimize.budget import Need, evaluated, need_of
from netjac.optimize.description import of_data, of_function
from netjac.optimize.evaluations import EvaluatedJacobian, Evaluator
from netjac.optimize.external import External, ResidualAnswer, read_residual
from netjac.optimize.losses import Vector
from netjac.optimize.options import OptionError
from netjac.optimize.rows import FOLDED, Coupled, Factors, Rows, Widened, rows_of
from netjac.spaces import ParameterSpace


@dataclass(frozen=True, eq=False)
class Data:
    """Residuals of the data at one θ, and their derivative, which is made when it is asked for.

    Attributes
    ----------
    residual : (d,)
    rows
        Makes the derivative (d, M).
    second
        Takes v (M,) to Σ_i r_i ∇²r_i v (M,): what the Gauss–Newton Hessian leaves out.
    """

    residual: Vector
    rows: Callable[[], Rows]
    second: Callable[[Vector], Vector]


class Source(Protocol):
    """Residuals of the data as a function of θ (M,)."""

    @property
    def space(self) -> ParameterSpace:
        """All M parameters."""

    @property
    def extra(self) -> ParameterSpace:
        """Those at its end that are not the network's."""

    @property
    def size(self) -> int | None:
        """d, where it is known before the first evaluation."""

    @property
    def known(self) -> dict[str, NDArray[Any]]:
        """The data that were given as arrays, by what they are: targets and weights."""

    @property
    def failure(self) -> BaseException | None:
        """What code from outside raised at its last call."""

    def described(self) -> list[str]:
        """A line for each network and its data; see `netjac.optimize.description`."""

    def need(self, copies: int) -> Need | None:
        """What factors take, with more copies of weighted rows; None where they keep to a budget of their own."""

    def evaluate(self, theta: Vector, memory: int | None = None) -> Data:
        """The data at θ, with factors within ``memory`` bytes where `need` is told."""


@final
class Targets:
    """f(x; θ) − y, each row times the root of its weight.

    Parameters
    ----------
    evaluator
        The network.
    y
        In the structure of its outputs.
    weights : (n,) or (n, l), optional
    """

    failure = None

    def __init__(self, evaluator: Evaluator, y: Any, weights: ArrayLike | None) -> None:
        self.space, self.extra = evaluator.parameters, names.extras(None)
        self._evaluator = evaluator
        self._y = targets.flatten(evaluator.output_space, y)
        self.size = self._y.size
        self._root = None if weights is None else _root(_of_rows(weights), self._y.shape, self.size)
        self.known: dict[str, NDArray[Any]] = {"targets": self._y}
        if self._root is not None:
            self.known["weights"] = self._root

    def described(self) -> list[str]:
        """See `Source`."""
        return [of_data(self._evaluator, "targets" if self._root is None else "targets with weights")]

    def need(self, copies: int) -> Need | None:
        """See `Source`."""
        copies += self._root is not None
        return need_of(self._evaluator, self.size, copies if self._y.shape[1] <= FOLDED else 0)

    def evaluate(self, theta: Vector, memory: int | None = None) -> Data:
        """See `Source`."""
        jacobian = evaluated(self._evaluator, theta, memory)
        if jacobian.y.shape != self._y.shape:
            raise DataError(f"the model gives outputs (n, l) = {jacobian.y.shape}, and y has {self._y.shape}.")
        residual = (jacobian.y - self._y).reshape(-1)  # float64, as the targets are
        m, root = self.space.size, self._root
        weighted = residual if root is None else root**2 * residual

        def second(v: Vector) -> Vector:
            return self._evaluator.second_product(theta, weighted.reshape(self._y.shape), v)

        if root is None:
            return Data(residual, lambda: rows_of(jacobian, m), second)
        return Data(root * residual, lambda: rows_of(jacobian, m).scaled_rows(root), second)


@final
class FromOutside:
    """The residual of a function from outside, of the outputs and of the extra parameters.

    Parameters
    ----------
    evaluator
        The network.
    function
        See `netjac.LeastSquares`.
    extra
        Names and values.
    weights : (n,), or of the shape of the residual, optional
    check
        Whether its derivative is compared with differences.
    """

    def __init__(self, evaluator: Evaluator, function: Any, extra: Any, weights: ArrayLike | None, check: bool) -> None:
        self.extra = names.extras(extra)
        self.space = names.together(evaluator.parameters, self.extra)
        self.size: int | None = None
        self._evaluator = evaluator
        self._m = evaluator.parameters.size
        self._weights = None if weights is None else _of_rows(weights)
        self.known: dict[str, NDArray[Any]] = {} if self._weights is None else {"weights": self._weights}
        self._external = External(function, read_residual, evaluator.output_space, self.extra, check)

    @property
    def failure(self) -> BaseException | None:
        """See `Source`."""
        return self._external.failure

    def described(self) -> list[str]:
        """See `Source`."""
        weighted = "" if self._weights is None else " with weights"
        return [of_data(self._evaluator, of_function(self._external.function) + weighted)]

    def need(self, copies: int) -> Need | None:
        """See `Source`; as many rows as outputs are taken for granted until they are known."""
        network = self._evaluator
        outputs = getattr(network, "n", 0) * network.output_space.size
        return need_of(network, outputs if self.size is None else self.size, 1 + copies)

    def evaluate(self, theta: Vector, memory: int | None = None) -> Data:
        """See `Source`."""
        jacobian = evaluated(self._evaluator, theta[: self._m], memory)
        if not np.all(np.isfinite(jacobian.y)):  # a trial point too far away; the function need not see that
            if self.size is None:
                raise DataError("the outputs are not finite at these parameters, so the residual cannot be computed.")
            return Data(np.full(self.size, np.nan), self._no_rows, _no_second)
        answer = self._external(jacobian.y, theta[self._m :])
        self.size = answer.values.size
        root = None
        if self._weights is not None:
            by_sample = answer.coupling is None
            root = _root(self._weights, (jacobian.y.shape[0], -1) if by_sample else (-1, -1), self.size)
        residual = answer.values if root is None else root * answer.values
        return Data(residual, lambda: _chain(jacobian, self._m, answer, root), _no_second)

    def _no_rows(self) -> Rows:
        raise DataError("the outputs are not finite at these parameters, so there is no derivative.")


def check_given(y: Any, residual: Any, extra: Any) -> None:
    """Refuse targets beside a function from outside, neither of them, and targets that are no numbers."""
    if callable(y):
        raise OptionError("y must be targets, and is a function: one that makes residuals of outputs is residual=.")
    targets.check_arrays(y, "y")
    if (y is None) == (residual is None):
        raise OptionError(f"give either targets y or a function residual=, and not {'both' if residual else 'none'}.")
    if residual is None and extra:
        raise OptionError("extra parameters belong to a function from outside: give residual=, not y.")
    if residual is None:
        targets.check_values(y)


def made(evaluator: Evaluator, y: Any, residual: Any, extra: Any, weights: Any, check: bool) -> Source:
    """The source that a problem's arguments ask for."""
    if residual is None:
        return Targets(evaluator, y, weights)
    return FromOutside(evaluator, residual, extra, weights, check)


def _chain(jacobian: EvaluatedJacobian, m: int, answer: ResidualAnswer, root: Vector | None) -> Rows:
    """The chain rule, times the weights: per-sample blocks are folded into the factors, a coupling is multiplied."""
    rows, blocks, extra = rows_of(jacobian, m), answer.blocks, answer.extra
    if blocks is None:
        rows = Coupled(rows, answer.coupling)
    else:
        if root is not None:
            blocks, extra, root = root.reshape(*blocks.shape[:2], 1) * blocks, root[:, None] * extra, None
        if isinstance(rows, Factors):
            rows = Factors(rows.jacobian.scaled(blocks.astype(jacobian.dtype)))
        else:
            rows = Coupled(rows, scipy.sparse.block_diag(blocks, format="csr"))
    if extra.shape[1]:
        rows = Widened(rows, extra)
    return rows if root is None else rows.scaled_rows(root)


def _no_second(v: Vector) -> Vector:
    raise OptionError(
        "curvature='exact' needs second derivatives of the residual, which a function from outside does not give: use "
        "curvature='difference'."
    )


def check_weights(weights: ArrayLike) -> NDArray[np.float64]:
    """Weights as an array of finite numbers, none negative.

    Raises
    ------
    DtypeError, DataError
    """
    array = np.asarray(weights)
    if array.dtype.kind not in "fiub":
        raise DtypeError(f"weights must be real numbers, and have dtype {array.dtype}.")
    targets.check_unmasked(weights, "weights")
    if not array.ndim:
        raise ShapeError("weights must be of shape (n,) or (n, l), one for each sample or residual, and is one number.")
    if not (np.all(np.isfinite(array)) and np.all(array >= 0)):
        raise DataError("weights must be finite and not negative: each multiplies the square of its residual.")
    return array.astype(np.float64)


def _of_rows(weights: ArrayLike) -> NDArray[np.float64]:
    """Weights of residuals that are to be fitted."""
    array = check_weights(weights)
    if not array.any():
        raise DataError("all weights are zero, so there is nothing to fit: leave these data out.")
    return array


def _root(weights: NDArray[np.float64], shape: tuple[int, int], size: int) -> Vector:
    """√w of each row, from one a row; or from one a sample, where shape is (n, rows a sample) and not (-1, -1)."""
    n = shape[0]
    if weights.size == size and (weights.ndim == 1 or n < 0 or len(weights) == n):
        return np.sqrt(weights).reshape(-1)
    if n > 0 and weights.shape == (n,):
        return np.repeat(np.sqrt(weights), size // n)
    by_sample = f" or ({n},), one a sample," if n > 0 else ""
    raise ShapeError(f"weights must have {size} entries, one a residual{by_sample} and have {weights.shape}.")
