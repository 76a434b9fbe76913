"""ResidualJacobian, over every kind of rows, against explicit matrices put together by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from formulas import Plain
from netjac import algebra
from netjac.errors import DataError, ShapeError
from netjac.examples import linear_layer
from netjac.jacobian import Jacobian
from netjac.optimize import rows as rows_module
from netjac.optimize.residual import ResidualJacobian
from netjac.optimize.rows import Coupled, Factors, Products, Rows, Stacked, Weighted, Widened, rows_of
from netjac.testing import assert_close

RNG = np.random.default_rng(3)
J = linear_layer(5)  # (10, 8)
A = np.asarray(J)
C = RNG.normal(size=(4, 10))
TALL = RNG.normal(size=(25, 10))
E = RNG.normal(size=(10, 3))
OTHER = linear_layer(2)


def single(jacobian: Jacobian) -> Jacobian:
    """The same in float32."""
    blocks = [algebra.widened(block, np.dtype(np.float32)) for block in jacobian.blocks]
    y = jacobian.y.astype(np.float32)
    return Jacobian(jacobian.parameters, jacobian.output_space, y, blocks, jacobian.coverage)


def stacked() -> tuple[Rows, np.ndarray]:
    """Three parts over ten parameters, two of them over the same, one with a shared half."""
    same, moved = np.array([9, 1, 2, 3, 4, 5, 6, 7]), np.array([0, 8, 2, 1, 4, 5, 6, 7])
    dense = np.zeros((10 + 4 + 4, 10))
    dense[:10, same], dense[10:14, same], dense[14:, moved] = A, np.asarray(OTHER), C @ A
    parts = [(Factors(J), same), (Factors(OTHER), same), (Coupled(Factors(J), C), moved)]
    return Stacked(parts, 10), dense


KINDS: dict[str, Callable[[], tuple[Rows, np.ndarray]]] = {
    "factors": lambda: (Factors(J), A),
    "scaled": lambda: (Factors(J.scaled(C.reshape(5, 4, 2)[:, :3])), np.asarray(J.scaled(C.reshape(5, 4, 2)[:, :3]))),
    "weighted": lambda: (Weighted(Factors(J), E[:, 0]), E[:, :1] * A),
    "weighted products": lambda: (Weighted(Products(Plain(A, J.y), 8), E[:, 0]), E[:, :1] * A),
    "products": lambda: (rows_of(Plain(A, J.y), 8), A),
    "array": lambda: (Coupled(Factors(J), C), C @ A),
    "sparse": lambda: (Coupled(Factors(J), scipy.sparse.csr_array(C)), C @ A),
    "operator": lambda: (Coupled(Factors(J), aslinearoperator(C)), C @ A),
    "tall": lambda: (Coupled(Factors(J), TALL), TALL @ A),
    "widened": lambda: (Widened(Factors(J), E), np.hstack([A, E])),
    "coupled and widened": lambda: (Widened(Coupled(Factors(J), C), E[:4]), np.hstack([C @ A, E[:4]])),
    "stacked": stacked,
}


@pytest.fixture(params=KINDS)
def kind(request: Any) -> tuple[Rows, np.ndarray]:
    return KINDS[request.param]()


@pytest.fixture(params=["no prior", "some", "all"])
def prior(request: Any, kind: tuple[Rows, np.ndarray]) -> np.ndarray | None:
    scale = RNG.uniform(0.5, 2, kind[1].shape[1])
    return {"no prior": None, "some": scale * (np.arange(scale.size) % 3 != 0), "all": scale}[request.param]


def check(R: ResidualJacobian, data: np.ndarray, prior: np.ndarray | None, tol: float = 1e-12) -> None:
    """Every verb against the explicit matrices."""
    rng = np.random.default_rng(0)
    below = np.zeros((0, data.shape[1])) if prior is None else np.diag(prior)[prior > 0]
    dense = np.vstack([data, below])
    assert R.shape == dense.shape
    assert R.dtype == np.float64
    assert R.data_rows == len(data)
    v, u = rng.normal(size=R.shape[1]), rng.normal(size=R.shape[0])
    V, U = rng.normal(size=(R.shape[1], 3)), rng.normal(size=(R.shape[0], 3))
    for what, actual, expected in [
        ("J v", R @ v, dense @ v),
        ("Jᵀ u", R.T @ u, dense.T @ u),
        ("J V", R @ V, dense @ V),
        ("Jᵀ U", R.T @ U, dense.T @ U),
        ("J v of integers", R @ np.arange(R.shape[1]), dense @ np.arange(R.shape[1])),
        ("array", R.to_array(), dense),
        ("data array", R.data.to_array(), data),
        ("data product", R.data @ v, data @ v),
        ("gram", R.gram(), data @ data.T),
        ("normal", R.normal(), data.T @ data),
        ("weighted normal", R.normal(u[: len(data)]), data.T @ (u[: len(data), None] * data)),
        ("column norms", R.column_norms(), np.linalg.norm(data, axis=0)),
        ("squares", R.column_norms(squared=True), np.sum(data**2, axis=0)),
    ]:
        assert np.asarray(actual).dtype == np.float64 or tol > 1e-10, what
        assert_close(actual, expected, what, tol)
    for array in (R.to_array(np.float32), R.gram(np.float32), R.normal(dtype=np.float32)):
        assert array.dtype == np.float32
    np.testing.assert_array_equal(R @ np.zeros(R.shape[1]), np.zeros(R.shape[0]))
    np.testing.assert_array_equal(R.T @ np.zeros(R.shape[0]), np.zeros(R.shape[1]))


def test_every_verb(kind: tuple[Rows, np.ndarray], prior: np.ndarray | None) -> None:
    rows, dense = kind
    R = ResidualJacobian(rows, prior)
    check(R, dense, prior)
    w = RNG.uniform(-1, 2, len(dense))
    scaled = R.scaled_rows(w)
    check(scaled, w[:, None] * dense, prior)
    check(scaled.scaled_rows(w), w[:, None] ** 2 * dense, prior)
    every = np.concatenate([w, RNG.uniform(1, 2, R.shape[0] - len(w))])  # prior rows too
    np.testing.assert_allclose(R.scaled_rows(every).to_array(), every[:, None] * R.to_array(), rtol=1e-12, atol=1e-14)


def test_what_it_is_compared_with_can_fail() -> None:
    wrong = A.copy()
    wrong[3, 2] += 1e-6
    with pytest.raises(AssertionError):
        check(ResidualJacobian(Factors(J)), wrong, None)


def test_few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the rows of a coupled derivative are the same, chunk by chunk."""
    monkeypatch.setattr(rows_module, "CHUNK_BYTES", 8 * 10 * 3)
    for coupling in (C, scipy.sparse.csr_array(C), aslinearoperator(C)):
        check(ResidualJacobian(Coupled(Factors(J), coupling)), C @ A, None)


def test_float32_factors_give_float64() -> None:
    jacobian = single(J)
    assert jacobian.dtype == np.float32
    for rows, dense in [(Factors(jacobian), A), (Coupled(Factors(jacobian), C), C @ A)]:
        R = ResidualJacobian(rows, np.ones(8))
        check(R, dense, np.ones(8), tol=1e-5)
        for result in (R @ np.ones(8), R.T @ np.ones(R.shape[0]), R.to_array(), R.gram(), R.normal(), R.column_norms()):
            assert result.dtype == np.float64


def test_rows_stay_factored() -> None:
    R = ResidualJacobian(rows_of(J, 8), np.ones(8))
    assert R.data is J
    assert isinstance(R.scaled_rows(np.arange(10.0)).data, Jacobian)
    assert isinstance(rows_of(Plain(A, J.y), 8), Products)


def test_weights_of_many_outputs_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number a row, and not one for every pair of outputs; sums over them take some samples at once."""
    monkeypatch.setattr(rows_module, "FOLDED", 1)
    monkeypatch.setattr(rows_module, "CHUNK_BYTES", 8 * 2 * 2 * 2)
    scaled = ResidualJacobian(rows_of(J, 8)).scaled_rows(E[:, 0])
    assert isinstance(scaled.rows, Weighted)
    check(scaled, E[:, :1] * A, None)


def test_a_coupling_is_multiplied_and_not_formed() -> None:
    """Products with a LinearOperator take one product each way, whatever its size."""
    counted: list[str] = []

    class Counted(LinearOperator):
        def __init__(self) -> None:
            super().__init__(np.float64, C.shape)

        def _matmat(self, X: Any) -> Any:
            counted.append("C")
            return C @ X

        def _rmatmat(self, X: Any) -> Any:
            counted.append("Cᵀ")
            return C.T @ X

    R = ResidualJacobian(Coupled(Factors(J), Counted()))
    R @ np.ones(8)
    R.T @ np.ones(4)
    assert counted == ["C", "Cᵀ"]


def test_prior_of_nothing_is_no_prior() -> None:
    R = ResidualJacobian(Factors(J), np.zeros(8))
    assert R.prior is None
    assert R.shape == (10, 8)


def test_scipy_takes_it() -> None:
    """trf by products: one linear problem, solved in closed form beside it."""
    scale = np.full(8, 0.3)
    target = RNG.normal(size=10)
    R = ResidualJacobian(Factors(J), scale)
    dense = R.to_array()
    rhs = np.concatenate([target, np.zeros(8)])
    found = scipy.optimize.least_squares(
        lambda t: dense @ t - rhs, np.zeros(8), lambda t: R, tr_solver="lsmr", xtol=1e-14, ftol=1e-14, gtol=1e-14
    )
    np.testing.assert_allclose(found.x, np.linalg.lstsq(dense, rhs)[0], atol=1e-9)


def test_wrong_sizes() -> None:
    R = ResidualJacobian(Factors(J), np.ones(8))
    with pytest.raises(ShapeError, match=r"prior must have the shape \(8,\).*\(7,\)"):
        ResidualJacobian(Factors(J), np.ones(7))
    with pytest.raises(ShapeError, match=r"w must have the shape \(10,\), one a data row, and has \(17,\)"):
        R.scaled_rows(np.ones(17))
    with pytest.raises(DataError, match="positive numbers, and one is 0"):
        R.scaled_rows(np.arange(18.0)[::-1])
    with pytest.raises(ShapeError, match=r"weights must have the shape \(10,\)"):
        R.normal(np.ones(8))
