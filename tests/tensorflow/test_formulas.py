"""Formulas with parameters: NIST's nonlinear-regression models at both starts and the certified values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import netjac as nj
import nist

EPS = float(np.finfo(np.float64).eps)
pytestmark = pytest.mark.skipif(not nist.DIRECTORY.exists(), reason="the NIST files are not beside the repository")


def tape(f: Any, variables: list[Any]) -> Any:
    """x → d f(x) / d variables by TensorFlow's own tape, (n, m), traced once."""

    @tf.function
    def jacobian(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = f(x)
        return tf.concat([tf.reshape(d, [len(y), -1]) for d in tape.jacobian(y, variables)], 1)

    return jacobian


def central_differences(f: Any, variables: list[Any], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, m), and how far each column may be off: by rounding alone, eps · |y| / step."""
    columns, rounding = [], []
    for variable in variables:
        value = variable.numpy()
        step = np.cbrt(EPS) * abs(value)
        sides = []
        for moved in (value + step, value - step):
            variable.assign(moved)
            sides.append(f(x).numpy())
        variable.assign(value)
        columns.append((sides[0] - sides[1]) / (2 * step))
        rounding.append(EPS * np.abs(sides[0]).max() / step)
    return np.stack(columns, axis=1), np.array(rounding)


@pytest.mark.parametrize("name", nist.FORMULAS)
def test_jacobians_at_starts_and_certified_values(name: str) -> None:
    problem = nist.load(name)
    f, variables = nist.model(name, problem.certified)
    oracle = tape(f, variables)
    for theta in (problem.certified, *problem.starts):
        for variable, value in zip(variables, theta, strict=True):
            variable.assign(value)
        J = nj.jacobian(f, problem.x, variables=variables)
        found = J.to_array()
        assert found.shape == (len(problem.y), len(theta))
        y = f(problem.x).numpy()
        np.testing.assert_allclose(J.outputs, y, rtol=0, atol=1e-13 * np.abs(y).max())
        expected = oracle(tf.constant(problem.x)).numpy()
        largest = np.abs(expected).max(axis=0)
        assert np.all(np.abs(found - expected) <= 1e-12 * largest), str(J.coverage)
        differences, rounding = central_differences(f, variables, problem.x)
        assert np.all(np.abs(found - differences) <= 1e-6 * largest + 10 * rounding)
    assert {entry.treatment.value for entry in J.coverage.entries} == {"factored"}, str(J.coverage)


@pytest.mark.parametrize("name", ["ENSO", "Gauss2", "Hahn1", "Nelson", "Rat43"])
def test_all_parameters_in_one_variable(name: str) -> None:
    problem = nist.load(name)
    f, [b] = nist.model(name, problem.starts[1], one_vector=True)
    J = nj.jacobian(f, problem.x, variables=[b])
    expected = tape(f, [b])(tf.constant(problem.x)).numpy()
    assert np.all(np.abs(J.to_array() - expected) <= 1e-12 * np.abs(expected).max(axis=0)), str(J.coverage)


@pytest.mark.parametrize("name", nist.FORMULAS)
def test_formula_and_file_agree(name: str) -> None:
    """At the certified parameters, the certified sum of squares, and no gradient beyond what their digits leave."""
    problem = nist.load(name)
    f, _ = nist.model(name, problem.certified)
    residual = f(problem.x).numpy() - problem.y
    np.testing.assert_allclose(residual @ residual, problem.residual_sum, rtol=1e-8, atol=1e-20)


def test_every_file_is_there() -> None:
    assert sorted(path.stem for path in nist.DIRECTORY.glob("*.dat")) == sorted(nist.FORMULAS)
    assert len(nist.FORMULAS) == 27
