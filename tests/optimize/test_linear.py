"""Each way to solve for a step against the dense normal equations, and against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netjac.errors import ShapeError
from netjac.examples import linear_layer
from netjac.optimize.control import Region, State
from netjac.optimize.direct import GramSystem, NormalSystem, SpectralSystem
from netjac.optimize.iterative import ProductSystem, conjugate_gradients
from netjac.optimize.linear import Linearisation, System
from netjac.optimize.precondition import Preconditioner
from netjac.optimize.residual import ResidualJacobian
from netjac.optimize.rows import Factors


def products(at: Linearisation, scale: np.ndarray) -> System:
    return ProductSystem(at, scale, Preconditioner(at.J), tolerance=1e-13)


SYSTEMS = [NormalSystem, GramSystem, SpectralSystem, products]
SHAPES = [(12, 5), (5, 12), (7, 7), (1, 4), (4, 1)]


def linearisation(shape: tuple[int, int], seed: int = 0, prior: Any = None) -> Linearisation:
    rng = np.random.default_rng(seed)
    J, r = rng.normal(size=shape), rng.normal(size=shape[0])
    if prior is None:
        return Linearisation(J, r, J.T @ r)
    operator = _WithPrior(J, prior)
    residual = np.concatenate([r, rng.normal(size=np.count_nonzero(prior))])
    return Linearisation(operator, residual, operator.T @ residual)


class _WithPrior(np.lib.mixins.NDArrayOperatorsMixin):
    """A plain-array stand-in with the verbs of a ResidualJacobian."""

    def __init__(self, J: np.ndarray, prior: np.ndarray) -> None:
        held = np.flatnonzero(prior)
        self.data, self.prior = J, prior
        self.whole = np.concatenate([J, np.diag(prior)[held]])
        self.shape = self.whole.shape
        self.T = self.whole.T

    def __matmul__(self, v: np.ndarray) -> np.ndarray:
        return self.whole @ v

    def to_array(self, dtype: Any = None) -> np.ndarray:
        return self.whole

    def gram(self, dtype: Any = None) -> np.ndarray:
        return self.data @ self.data.T

    def normal(self, dtype: Any = None) -> np.ndarray:
        return self.data.T @ self.data

    def column_norms(self, squared: bool = False) -> np.ndarray:
        return np.sum(self.data**2, axis=0) ** (1 if squared else 0.5)


def dense_step(at: Linearisation, scale: np.ndarray, damping: float, free: Any = None, shift: Any = None) -> np.ndarray:
    J = at.explicit()
    chosen = np.ones(J.shape[1], bool) if free is None else free
    r = at.r if shift is None else at.r + J @ shift
    A = (J.T @ J + damping * np.diag(1 / scale**2))[np.ix_(chosen, chosen)]
    s = np.zeros(J.shape[1])
    s[chosen] = np.linalg.solve(A, -(J.T @ r)[chosen])
    return s


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("equal_scale", [True, False])
def test_every_system_solves_the_damped_normal_equations(
    system: Any, shape: tuple[int, int], equal_scale: bool
) -> None:
    at = linearisation(shape)
    scale = np.full(shape[1], 0.5) if equal_scale else np.random.default_rng(1).uniform(0.2, 3, shape[1])
    made = system(at, scale)
    for damping in (1e-3, 1.0, 50.0):
        np.testing.assert_allclose(made.step(damping), dense_step(at, scale, damping), rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("system", SYSTEMS)
def test_parameters_held_at_a_bound_stay_and_the_others_know(system: Any) -> None:
    at = linearisation((9, 6))
    scale = np.linspace(0.5, 2, 6)
    free = np.array([True, False, True, True, False, True])
    shift = np.where(free, 0.0, [0, 0.3, 0, 0, -0.7, 0])
    made = system(at, scale)
    for moved in (None, shift):
        s = made.step(0.1, free, moved)
        np.testing.assert_allclose(s, dense_step(at, scale, 0.1, free, moved), rtol=1e-8, atol=1e-11)
        assert not s[~free].any()
    assert not made.step(0.1, np.zeros(6, bool)).any()


@pytest.mark.parametrize("equal_prior", [True, False])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prior_is_what_its_rows_are(system: Any, shape: tuple[int, int], equal_prior: bool) -> None:
    prior = np.full(shape[1], 0.7) if equal_prior else np.linspace(0, 2, shape[1])
    at = linearisation(shape, prior=prior)
    scale = np.ones(shape[1])
    np.testing.assert_allclose(system(at, scale).step(0.2), dense_step(at, scale, 0.2), rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("masked", [True, False])
def test_slope_is_the_derivative_of_the_scaled_length(system: Any, masked: bool) -> None:
    at = linearisation((6, 9))
    scale = np.linspace(0.5, 2, 9)
    free = np.arange(9) % 3 > 0 if masked else None
    made = system(at, scale)

    def length(damping: float) -> float:
        return float(np.linalg.norm(made.step(damping, free) / scale))

    h = 1e-5
    difference = (length(0.3 + h) - length(0.3 - h)) / (2 * h)
    assert made.solve(0.3, free).slope() == pytest.approx(-difference, rel=1e-5)


def test_matrices_singular_to_working_precision_are_not_trusted() -> None:
    J = np.ones((4, 3))
    at = Linearisation(J, np.ones(4), J.T @ np.ones(4))
    assert NormalSystem(at, np.ones(3)).step(0.0) is None
    smallest = np.linalg.lstsq(J, -np.ones(4), rcond=None)[0]
    np.testing.assert_allclose(SpectralSystem(at, np.ones(3)).step(0.0), smallest, atol=1e-14)


def test_not_finite_is_no_step() -> None:
    J = np.array([[1.0, np.inf], [0.0, 1.0]])
    at = Linearisation(J, np.ones(2), np.ones(2))
    assert NormalSystem(at, np.ones(2)).step(1.0) is None


def test_conjugate_gradients_stop_at_a_direction_without_curvature() -> None:
    A = np.diag([1.0, -1.0])
    x = conjugate_gradients(lambda v: A @ v, np.array([1.0, 1e-3]), lambda v: v, 1e-12)
    assert x is not None
    assert 0.5 * x @ A @ x - np.array([1.0, 1e-3]) @ x <= 0


@pytest.mark.parametrize("radius", [1e-6, 0.01, 0.3, 1.0, 1e6])
@pytest.mark.parametrize("system", [NormalSystem, GramSystem, SpectralSystem])
@pytest.mark.parametrize("warm", [0.0, 1e-6, 1.0, 1e6])
def test_a_region_step_is_on_the_border_or_the_least_damped(system: Any, radius: float, warm: float) -> None:
    at = linearisation((8, 5))
    scale = np.linspace(0.5, 2, 5)
    made = system(at, scale)
    state = State(np.zeros(5), radius=radius, floor=1e-12, damping=warm)
    step, state = Region().step(made, made.solve, state)
    assert step is not None
    length = np.linalg.norm(step / scale)
    if length < radius * 0.999:
        assert state.damping <= 1e-9
        np.testing.assert_allclose(step, dense_step(at, scale, state.damping), rtol=1e-4)
    else:
        assert length <= radius * 1.001
        along = dense_step(at, scale, state.damping)
        np.testing.assert_allclose(step / length, along / np.linalg.norm(along / scale), rtol=1e-4)


# ---- factors


def test_a_jacobian_as_factors_gives_the_steps_of_its_array() -> None:
    J = linear_layer()
    r = np.random.default_rng(0).normal(size=J.shape[0])
    dense = np.asarray(J, np.float64)
    at = Linearisation(ResidualJacobian(Factors(J)), r, dense.T @ r)
    for system in SYSTEMS:
        step = system(at, np.ones(J.m)).step(0.3)
        expected = dense_step(Linearisation(dense, r, dense.T @ r), np.ones(J.m), 0.3)
        np.testing.assert_allclose(step, expected, rtol=1e-6, atol=1e-8)


def test_the_preconditioner_is_exact_for_one_sample_and_one_output() -> None:
    J = linear_layer()[:1]
    row = J.scaled(np.array([[[1.0] + [0.0] * (J.l - 1)]]))
    dense = np.asarray(row, np.float64)
    v = np.random.default_rng(0).normal(size=J.m)
    preconditioner = Preconditioner(row)
    used = "Kronecker" in preconditioner.kind
    got = preconditioner.at(np.full(J.m, 0.5))(v)
    blocks = [block.columns() for block in row.blocks]
    expected = np.empty(J.m)
    for columns in blocks:
        part = dense[:, columns]
        expected[columns] = np.linalg.solve(part.T @ part + 0.5 * np.eye(len(columns)), v[columns])
    assert used
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_a_preconditioner_of_anything_is_positive() -> None:
    rng = np.random.default_rng(0)
    for J in (rng.normal(size=(4, 6)), linear_layer()):
        inverse = Preconditioner(J).at(np.full(J.shape[1], 0.1))
        for _ in range(5):
            v = rng.normal(size=J.shape[1])
            assert v @ inverse(v) > 0


def test_shapes_are_not_guessed() -> None:
    with pytest.raises((ShapeError, ValueError)):
        Linearisation(np.ones((3, 2)), np.ones(3), np.ones(2)).apply(np.ones(3))


def test_priors_on_whole_variables_need_no_explicit_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    J = linear_layer()
    prior = np.where(np.arange(J.m) < J.parameters.segments[0].stop, 0.7, 0.0)
    operator = ResidualJacobian(Factors(J), prior)
    r = np.random.default_rng(0).normal(size=operator.shape[0])
    at = Linearisation(operator, r, operator.T @ r)
    expected = dense_step(at, np.ones(J.m), 0.3)
    monkeypatch.setattr(ResidualJacobian, "to_array", None)
    monkeypatch.setattr(type(J), "to_array", None)
    made = GramSystem(at, np.ones(J.m))
    np.testing.assert_allclose(made.step(0.3), expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(made.step(3.0), dense_step_of(operator, r, 3.0), rtol=1e-6, atol=1e-8)


def dense_step_of(operator: ResidualJacobian, r: np.ndarray, damping: float) -> np.ndarray:
    dense = operator @ np.eye(operator.shape[1])
    return np.linalg.solve(dense.T @ dense + damping * np.eye(dense.shape[1]), -dense.T @ r)


def test_bounds_on_factors_are_solved_by_their_explicit_rows() -> None:
    J = linear_layer()
    operator = ResidualJacobian(Factors(J))
    r = np.random.default_rng(0).normal(size=J.shape[0])
    at = Linearisation(operator, r, operator.T @ r)
    free = np.arange(J.m) % 2 > 0
    step = GramSystem(at, np.ones(J.m)).step(0.3, free)
    np.testing.assert_allclose(step, dense_step(at, np.ones(J.m), 0.3, free), rtol=1e-6, atol=1e-8)
