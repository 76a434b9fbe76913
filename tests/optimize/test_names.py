"""Bounds, priors and parameters by name, against vectors written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize

from netjac.errors import DataError, DtypeError, NameLookupError, ShapeError
from netjac.optimize import OptionError, names
from netjac.spaces import ParameterSpace, lay_out

NAMES = ["encoder/dense/kernel", "encoder/dense/bias", "encoder/dense_1/kernel", "my_dense/kernel", "scale"]
SHAPES: list[tuple[int, ...]] = [(2, 3), (3,), (3, 1), (1, 2), ()]
SPACE = ParameterSpace(lay_out(NAMES, SHAPES, ["float64"] * 5))  # sizes 6, 3, 3, 2, 1
INF = np.inf


def test_chosen_in_the_models_order() -> None:
    assert names.chosen(SPACE, ["scale", "dense/*", "dense/bias"]) == [0, 1, 4]
    assert names.chosen(SPACE, "dense*/kernel") == [0, 2]
    for wrong in (3, b"scale", None):
        with pytest.raises(DtypeError, match=r"by name or a list of names, and .* is neither"):
            names.chosen(SPACE, wrong)  # type: ignore[arg-type]


def test_bounds_by_name() -> None:
    found = names.bounds(
        SPACE,
        {
            "*": (-9, None),
            "dense*/kernel": (0, None),
            "encoder/dense/bias": ([-1, -2, -3], 1.5),
            "dense_1/kernel": (np.array([[1.0], [2.0], [3.0]]), [[4.0], [INF], [6.0]]),
            "scale": (None, 7),
        },
    )
    lower = [0, 0, 0, 0, 0, 0, -1, -2, -3, 1, 2, 3, -9, -9, -INF]
    upper = [INF] * 6 + [1.5] * 3 + [4, INF, 6, INF, INF, 7]
    np.testing.assert_array_equal(found.lb, lower)
    np.testing.assert_array_equal(found.ub, upper)
    row = names.bounds(SPACE, {"encoder/dense/kernel": ([1, 2, 3], None)})  # broadcast over the first axis
    np.testing.assert_array_equal(row.lb[:6], [1, 2, 3, 1, 2, 3])


@pytest.mark.parametrize("given", [scipy.optimize.Bounds(-1, 2), (-1, 2), ([-1.0] * 15, np.full(15, 2.0))])
def test_bounds_over_the_flat_vector(given: Any) -> None:
    found = names.bounds(SPACE, given)
    np.testing.assert_array_equal(found.lb, np.full(15, -1.0))
    np.testing.assert_array_equal(found.ub, np.full(15, 2.0))
    free = names.bounds(SPACE, None)
    assert np.all(free.lb == -INF)
    assert np.all(free.ub == INF)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dens": (0, 1)}, NameLookupError, "'dens' fits no parameter"),
        ({"scale": 3}, OptionError, "the bounds of 'scale' must be a pair, and is 3"),
        ({"scale": (2, 1)}, DataError, r"'scale' leave nothing between: lower 2.0, upper 1.0"),
        (
            {"dense/kernel": (np.full((2, 3), 5.0), [[9, 9, 9], [9, 4, 9]])},
            DataError,
            r"'encoder/dense/kernel'\[1, 1\]",
        ),
        ({"scale": (np.nan, 1)}, DataError, "leave nothing"),
        ({"dense/kernel": (np.zeros(2), None)}, ShapeError, r"broadcasts to \(2, 3\), and has shape \(2,\)"),
        ({"scale": ("low", 1)}, ShapeError, "is 'low'"),
        ((np.zeros(3), 1), ShapeError, r"lower bounds must be a number or have the shape \(15,\), and have \(3,\)"),
        (7, OptionError, "must be a pair"),
    ],
)
def test_bounds_that_do_not_fit(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        names.bounds(SPACE, given)


def test_priors_by_name() -> None:
    found = names.prior(
        SPACE, {"kernel": 2.0, "my_dense/kernel": ([[1.0, 4.0]], [3.0, 5.0]), "scale": (0.5, -1), "dense/bias": INF}
    )
    assert found is not None
    scale, mean = found
    np.testing.assert_array_equal(scale, [0.5] * 6 + [0] * 3 + [0.5] * 3 + [1, 0.25, 2])
    np.testing.assert_array_equal(mean, [0] * 12 + [3, 5, -1])
    assert names.prior(SPACE, None) is None
    assert names.prior(SPACE, {"*": INF}) is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"scale": 0}, DataError, "must be positive, and is 0"),
        ({"scale": (-1, 0)}, DataError, "must be positive"),
        ({"scale": np.nan}, DataError, "must be positive"),
        ({"scale": (1, INF)}, DataError, "the mean of 'scale' must be finite"),
        ({"scale": (1, 2, 3)}, OptionError, "must be a pair"),
        ({"dense/bias": [1.0, 2.0]}, ShapeError, r"broadcasts to \(3,\)"),
        ({"x": 1}, NameLookupError, "'x' fits no parameter"),
        (1.0, OptionError, "prior must be a dict"),
    ],
)
def test_priors_that_do_not_fit(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        names.prior(SPACE, given)


def test_extra_parameters_are_live() -> None:
    space = names.extras({"k": 2, "rates": [[1.0, 2.0]]})
    assert space.names == ("k", "rates")
    np.testing.assert_array_equal(space.ravel(dtype=np.float64), [2, 1, 2])
    space.assign([5.0, 6.0, 7.0])
    np.testing.assert_array_equal(space.ravel(dtype=np.float64), [5, 6, 7])
    values = names.values(space, np.array([5.0, 6.0, 7.0]))
    assert values["k"] == 5.0
    assert isinstance(values["k"], float)
    np.testing.assert_array_equal(values["rates"], [[6.0, 7.0]])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"k": np.nan}, DataError, "'k' must be finite"),
        ({"k": "fast"}, DtypeError, "real numbers"),
        ({"k": 1j}, DtypeError, "complex"),
        ([1, 2], OptionError, "extra must be a dict"),
    ],
)
def test_extra_parameters_that_cannot_be(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        names.extras(given)


def test_an_extra_parameter_may_not_take_a_name() -> None:
    with pytest.raises(OptionError, match="a parameter called 'scale' already"):
        names.together(SPACE, names.extras({"scale": 1.0}))
