"""The main job, run as a user runs it, through the command line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from netjac.cli import app


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("demo") / "made" / "here"
    result = CliRunner().invoke(app, ["demo", "--output", str(directory)])
    if result.exception:
        raise result.exception
    assert result.exit_code == 0
    return result.output, directory


def test_says_what_it_does(demo: tuple[str, Path]) -> None:
    output, _ = demo
    for part in [
        "scipy.optimize.least_squares(",
        "shape (331, 97)",
        "derivative agrees with central differences",
        "hidden/kernel",
        "factored",
        "iteration   0",
        "has the shape (5700, 5)",
        "entries that are not zero",
        "[[1. 1. 1.]",
        "[[1. 0. 0.]",
    ]:
        assert part in output, f"{part!r} is missing in:\n{output}"


def test_cost_falls_and_the_test_error_is_no_worse_than_a_linear_regressions(demo: tuple[str, Path]) -> None:
    output, _ = demo
    before, after = map(float, re.search(r"θ\) − y‖²: (\S+) before, (\S+) after", output).groups())
    assert after < 0.6 * before
    network, linear = map(float, re.search(r"network (\S+), linear regression (\S+);", output).groups())
    assert network <= linear


def test_saved_model_predicts_from_raw_inputs_as_printed(demo: tuple[str, Path]) -> None:
    import keras
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    output, directory = demo
    x, y = load_diabetes(return_X_y=True, scaled=False)
    _, x_test, _, y_test = train_test_split(x, y, test_size=0.25, random_state=0)
    model = keras.saving.load_model(directory / "diabetes.keras")
    error = np.sqrt(np.mean((np.asarray(model(x_test)).reshape(-1) - y_test) ** 2))
    assert f"network {error:.2f}, linear" in output


def test_picture_is_a_picture(demo: tuple[str, Path]) -> None:
    from matplotlib.image import imread

    pixels = imread(demo[1] / "diabetes.png")
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2])[::97], axis=0)) > 50


def test_a_wrong_derivative_stops_the_demonstration() -> None:
    """The demonstration checks before it prints, and the check can fail."""
    from netjac.demo import _checked

    right = np.arange(6.0).reshape(2, 3)
    assert _checked("it", right * (1 + 1e-7), right, 1e-5) < 1e-6
    for wrong in (right * 1.001, right[:, ::-1], np.full_like(right, np.nan)):
        with pytest.raises(RuntimeError, match="differs from the plain loop"):
            _checked("it", wrong, right, 1e-5)
    with pytest.raises(RuntimeError, match="differs"):
        _checked("it", np.zeros((2, 2)), np.zeros((2, 2)), 1e-5)  # equal, but the recipe of zeros must never pass
    with pytest.raises(RuntimeError, match="shape"):
        _checked("it", right.T, right, 1e-5)
