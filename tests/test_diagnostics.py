"""A right derivative passes, and each way of being wrong fails: the check itself is what is tested."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from netjac.diagnostics import check_derivative
from netjac.errors import DataError

MATRIX = np.random.default_rng(0).normal(size=(7, 4))


def problem(wrong: Any = lambda J: J, dtype: str = "float64") -> SimpleNamespace:
    """f(θ) = sin(M θ), its derivative passed through ``wrong``."""

    def fun(theta: np.ndarray) -> np.ndarray:
        return np.sin(MATRIX.astype(dtype) @ theta.astype(dtype)).astype(float)

    def jac(theta: np.ndarray) -> Any:
        return wrong(np.cos(MATRIX @ theta)[:, None] * MATRIX)

    return SimpleNamespace(x0=np.full(4, 0.3), fun=fun, jac=jac)


def test_a_right_derivative_passes() -> None:
    check = check_derivative(problem())
    assert check.passed
    assert check.relative_errors.max() < 1e-8
    assert "derivative agrees with central differences along 5 random directions" in str(check)
    assert check_derivative(problem(aslinearoperator), theta=np.zeros(4), directions=2).passed


def test_a_float32_function_needs_its_own_step_and_tolerance() -> None:
    assert check_derivative(problem(dtype="float32"), precision="float32").passed


@pytest.mark.parametrize(
    "wrong",
    [
        lambda J: np.zeros_like(J),
        lambda J: -J,
        lambda J: 1.001 * J,
        lambda J: J[::-1],
        lambda J: J[:, ::-1],
        lambda J: np.where(np.arange(4) == 2, 0, J),
        lambda J: np.full_like(J, np.nan),
        lambda J: LinearOperator(J.shape, matvec=lambda v: J @ v, rmatvec=lambda u: 1.01 * J.T @ u, dtype=float),
    ],
    ids=["zeros", "sign", "scale", "rows", "columns", "one column", "nan", "transpose"],
)
def test_every_kind_of_wrong_fails(wrong: Any) -> None:
    check = check_derivative(problem(wrong))
    assert not check.passed
    assert "DISAGREES" in str(check)


def test_lost_derivatives_are_named() -> None:
    assert "exactly zero, though the function changes" in str(check_derivative(problem(np.zeros_like)))


def test_a_constant_has_the_derivative_zero() -> None:
    constant = SimpleNamespace(x0=np.zeros(2), fun=lambda t: np.ones(3), jac=lambda t: np.zeros((3, 2)))
    assert check_derivative(constant).passed


def test_a_function_that_is_not_finite() -> None:
    root = SimpleNamespace(x0=np.zeros(2), fun=lambda t: np.where(t < 0, np.nan, t), jac=lambda t: np.eye(2))
    with pytest.raises(DataError, match="no difference can be taken"):
        check_derivative(root)
