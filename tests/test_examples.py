"""The examples, run as a reader runs them: as scripts, in a folder of their own, with every warning an error."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.interpolate import CubicSpline

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, folder: Path) -> str:
    """What the script prints; it must leave its picture in the folder."""
    from matplotlib.image import imread

    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == [f"{name}.png"]
    pixels = imread(folder / f"{name}.png")
    assert pixels.shape[:2] == (480, 1200)
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """The groups of the one line that fits."""
    [found] = re.findall(pattern, text)
    return [float(part) for part in (found if isinstance(found, tuple) else (found,))]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ode_recovers_the_law_with_either_solver(tmp_path: Path) -> None:
    output = run("ode", tmp_path)
    costs = []
    for method in ("trf", "netjac"):
        before, after = numbers(rf"{method}: cost (\S+) to (\S+),", output)
        assert after < 0.5 * before
        costs.append(after)
    assert costs[0] == pytest.approx(costs[1], rel=0.03)
    # Half a χ² of 175 residuals: 87.5 ± 9.4 at the true law, and a little less at the fitted one.
    assert 55 < costs[1] < 105
    rough, fitted = numbers(r"error of the law: (\S+) from differences, (\S+) fitted", output)
    assert fitted < 0.75 * rough
    assert fitted < 0.06
    [threshold] = numbers(r"threshold: (\S+) ", output)
    assert threshold == pytest.approx(0.3, abs=0.02)


def test_ode_sensitivities_are_derivatives_of_an_independent_integration() -> None:
    """The same equation through SciPy's CubicSpline and Radau, and central differences of it."""
    ode = load("ode")
    grid, t = np.linspace(-0.2, 1.4, 9), np.linspace(0, 3, 5)
    F, y0 = ode.growth(grid), np.array([0.2, 0.5])
    simulator = ode.Simulator(grid, t, np.zeros((2, 5)))

    def sizes(F: np.ndarray, y0: np.ndarray) -> np.ndarray:
        f = CubicSpline(grid, F)  # not-a-knot, as make_interp_spline
        return solve_ivp(lambda _, y: f(y), (0, 3), y0, "Radau", t, rtol=1e-11, atol=1e-12).y

    y, dy_dF, dy_dy0 = simulator.integrate(F, y0)
    np.testing.assert_allclose(y, sizes(F, y0), rtol=1e-7)
    assert np.abs(dy_dF).max() > 0.1
    step = 1e-4
    for j, unit in enumerate(np.eye(9)):
        difference = (sizes(F + step * unit, y0) - sizes(F - step * unit, y0)) / (2 * step)
        np.testing.assert_allclose(dy_dF[:, :, j], difference, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dy_dy0, (sizes(F, y0 + step) - sizes(F, y0 - step)) / (2 * step), rtol=1e-4, atol=1e-6)

    outputs = F[:, None]
    r, dr, d_extra = simulator.residual(outputs, {"y0": y0})
    assert r.shape == (2, 5)
    assert dr.shape == (10, 9)
    np.testing.assert_allclose(r, y / ode.SIGMA)
    second = step * np.array([0, 1])
    by_second = (sizes(F, y0 + second) - sizes(F, y0 - second)) / (2 * step * ode.SIGMA)
    np.testing.assert_allclose(d_extra["y0"][:, :, 1], by_second, rtol=1e-4, atol=1e-4)
    assert not d_extra["y0"][0, :, 1].any()


def test_constraint_makes_the_curve_rise_where_the_free_one_falls(tmp_path: Path) -> None:
    output = run("constraint", tmp_path)
    line = r" \({}\): least slope (\S+), value at 0 (\S+), error of the curve (\S+)"
    free, _, free_error = numbers("unconstrained" + line.format("BFGS"), output)
    assert free < -0.5
    errors = []
    for method in ("SLSQP", "trust-constr"):
        slope, at_zero, error = numbers(r"\bconstrained" + line.format(method), output)
        assert slope > 0.015  # 0.02 at the points asked for, and hardly less between them
        assert at_zero > -1e-3
        assert error < 0.9 * free_error
        errors.append(error)
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
