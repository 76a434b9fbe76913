"""What a problem says of itself, against text written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import netjac as nj
from formulas import Array, Network, X, Y
from netjac.optimize import description
from netjac.spaces import ParameterSpace, lay_out

PARAMETERS = "parameters: hidden/kernel (1, 4), hidden/bias (4,), out/kernel (4, 1), out/bias (1,)"


def shifted(outputs: Array, extra: dict[str, Any]) -> Any:
    return outputs[:, 0] - Y - extra["shift"], np.ones((25, 1)), {"shift": -np.ones(25)}


def half_squares(outputs: Array) -> tuple[float, Array]:
    r = outputs - Y[:, None]
    return 0.5 * float(np.sum(r**2)), r


def test_everything_that_can_be_said() -> None:
    slope = tf.Variable([[1.0]], dtype="float64", name="slope")
    offset = tf.Variable([0.0], dtype="float64", name="offset")
    problem = nj.LeastSquares(
        lambda x: x @ slope + offset,
        X[:, None],
        Y,
        variables=[slope, offset],
        weights=np.ones(25),
        prior={"*": 3.0},
        bounds={"slope": (0, None)},
    )
    assert repr(problem) == (
        "LeastSquares: 25 residuals and 2 of the prior, m = 2 parameters\n"
        "  data: n = 25 samples, l = 1 output, targets with weights; evaluated in float64\n"
        "  parameters: slope (1, 1), offset (1,)\n"
        "  bounds: 1 parameter, of slope\n"
        "  prior: 2 parameters, of slope, offset"
    )
    scale = tf.Variable([1.0, 2.0], name="scale")
    own = nj.LeastSquares(lambda x: scale * x, np.ones((1, 1), "f4"), [[1.0, 2.0]], variables=[scale], dtype=None)
    assert repr(own).splitlines()[1] == "  data: n = 1 sample, l = 2 outputs, targets; evaluated in float32"


def test_a_function_from_outside_and_extra_parameters() -> None:
    model = Network(X)
    problem = nj.LeastSquares.from_evaluator(model, residual=shifted, extra={"shift": 0.5}, weights=np.ones(25))
    rest = f"\n  data: l = 1 output, shifted(outputs) with weights\n  {PARAMETERS}\n  extra: shift ()"
    assert repr(problem) == "LeastSquares: residuals that were not evaluated yet, m = 14 parameters" + rest
    assert model.count == 0  # nothing is evaluated for it
    problem.fun(problem.x0)
    assert repr(problem) == "LeastSquares: 25 residuals, m = 14 parameters" + rest


def test_objectives() -> None:
    model = Network(X)
    objective = nj.Objective.from_evaluator(model, half_squares, prior={"out/*": 1.0})
    assert repr(objective) == (
        "Objective: a value from outside, m = 13 parameters\n"
        "  data: l = 1 output, half_squares(outputs)\n"
        f"  {PARAMETERS}\n"
        "  prior: 5 parameters, of out/kernel, out/bias"
    )
    assert model.count == 0


def test_several_problems_as_one() -> None:
    first, second = Network(X), Network(X)
    second.parameters.variables = first.parameters.variables
    parts = [nj.LeastSquares.from_evaluator(first, Y), nj.LeastSquares.from_evaluator(second, Y, weights=np.ones(25))]
    assert repr(nj.LeastSquares.join(parts)) == (
        "LeastSquares: 50 residuals, m = 13 parameters\n"
        "  data: l = 1 output, targets\n"
        "  data: l = 1 output, targets with weights\n"
        f"  {PARAMETERS}"
    )


def test_many_variables_are_not_all_listed() -> None:
    names = [f"v{i}" for i in range(20)]
    space = ParameterSpace(lay_out(names, [(2,)] * 20, ["float64"] * 20))
    held = {"bounds": np.ones(40, bool), "prior": np.zeros(40, bool)}
    said = description.of_problem("LeastSquares", "1 residual", [], space, 0, held).splitlines()
    assert said[1].endswith("v6 (2,), v7 (2,), and 12 more")
    assert said[2:] == ["  bounds: 40 parameters, of v0, v1, v2, v3, v4, v5, v6, v7, and 12 more"]
