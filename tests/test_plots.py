"""The pictures show the numbers they are given; drawn without a screen."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from netjac import plots
from netjac.errors import DataError, ShapeError
from netjac.factor import plan
from netjac.intervals import Prediction
from netjac.jacobian import Jacobian
from netjac.noise import Noise
from netjac.optimize import History
from netjac.sites import Coverage, SiteForm, SiteValues, UseSite
from netjac.spaces import OutputSpace, ParameterSpace, lay_out


def axes() -> object:
    return Figure().subplots()


def dense_layer(n: int, k: int, c: int, zero: int | None = None) -> Jacobian:
    """y = a W + b by its factors, D the identity; one column of W's derivative zero if asked."""
    rng = np.random.default_rng(0)
    parameters = ParameterSpace(lay_out(["layer/kernel", "layer/bias"], [(k, c), (c,)], ["float64"] * 2))
    sites = [
        UseSite(0, "kernel", SiteForm.OUTER, np.arange(k * c).reshape(1, k, c), 0),
        UseSite(1, "bias", SiteForm.OUTER, np.arange(c).reshape(1, 1, c), 0),
    ]
    A, D = rng.normal(size=(n, 1, 1, k)), np.broadcast_to(np.eye(c)[None, :, None], (n, c, 1, c))
    if zero is not None:
        A[..., zero] = 0
    blocks = plan(sites, parameters).build([SiteValues(A=A, D=D), SiteValues(D=D)])
    return Jacobian(parameters, OutputSpace.flat(c, "float64"), np.zeros((n, c)), blocks, Coverage())


def test_fit_shows_every_point_and_the_error() -> None:
    measured, predicted = np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 4.0])
    ax = plots.fit({"train": (measured, predicted), "test": ([[5.0]], [[4.0]])}, axes())
    np.testing.assert_array_equal(ax.collections[0].get_offsets(), np.stack([measured, predicted], axis=1))
    np.testing.assert_array_equal(ax.collections[1].get_offsets(), [[5.0, 4.0]])
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["train: rms error 0.577", "test: rms error 1"]
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[1, 1], [5, 5]])


def test_fit_refuses_what_numpy_would_broadcast() -> None:
    with pytest.raises(ShapeError, match=r"'train': measured has shape \(3,\) and predicted \(3, 1\)"):
        plots.fit({"train": (np.zeros(3), np.zeros((3, 1)))}, axes())


def test_convergence_shows_cost_and_gradient() -> None:
    history = History(np.array([1, 3]), np.array([4.0, 1.0]), np.array([2.0, 0.0]), np.array([0.0, 0.5]), np.ones(2))
    ax = plots.convergence(history, axes())
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[1, 4], [3, 1]])
    right = next(other for other in ax.figure.axes if other is not ax)
    np.testing.assert_array_equal(right.lines[0].get_ydata(), [2.0, np.nan])  # zero has no logarithm
    assert ax.get_yscale() == right.get_yscale() == "log"


def test_convergence_without_a_history() -> None:
    none = np.zeros(0)
    with pytest.raises(DataError, match="nothing was evaluated"):
        plots.convergence(History(none.astype(np.intp), none, none, none, none), axes())


def band(collection: object) -> np.ndarray:
    """Corners (q, 2) of what `fill_between` drew."""
    return np.concatenate([path.vertices for path in collection.get_paths()])


def test_prediction_shows_both_bands_in_order_of_x() -> None:
    noise = Noise(2.0, np.inf, 0.0, True)
    mean, std = np.array([[5.0, 50.0], [4.0, 40.0], [6.0, 60.0]]), np.array([[1.0, 3], [2.0, 3], [np.inf, 3]])
    predicted = Prediction(mean, std, np.full((3, 2), 2.0), noise)
    ax = plots.prediction(predicted, [[3.0], [1.0], [4.0]], ([1.0, 2.0], [4.5, 5.5]), level=0.9, ax=axes())
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[1, 4], [3, 5], [4, 6]])
    wide, narrow, points = ax.collections
    quantile = 1.6448536269514722
    for shape, std in ((narrow, [2, 1]), (wide, np.hypot([2, 1], 2))):
        corners = {tuple(corner) for corner in band(shape).round(9)}
        for x, centre, margin in zip([1, 3], [4, 5], quantile * np.array(std), strict=True):
            assert {(x, round(centre - margin, 9)), (x, round(centre + margin, 9))} <= corners
        assert max(x for x, _ in corners) == 3, "nothing is drawn where the band is infinite"
    np.testing.assert_array_equal(points.get_offsets(), [[1, 4.5], [2, 5.5]])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["new observation, 90 %", "mean, 90 %", "observed", "predicted"]
    second = plots.prediction(predicted, [3.0, 1.0, 4.0], output=1, ax=axes())
    np.testing.assert_array_equal(second.lines[0].get_ydata(), [40, 50, 60])
    only = plots.prediction(Prediction(mean, std=np.ones((3, 2)), noise_std=None, noise=noise), range(3), ax=axes())
    assert len(only.collections) == 1


def test_prediction_of_another_shape() -> None:
    predicted = Prediction(np.zeros((3, 1)), np.ones((3, 1)), None, Noise(1.0, 4, 4.0, False))
    with pytest.raises(ShapeError, match=r"needs x of shape \(3,\) and an output below 1; x has \(2,\)"):
        plots.prediction(predicted, [1.0, 2.0], ax=axes())
    with pytest.raises(ShapeError, match="the output is 1"):
        plots.prediction(predicted, [1.0, 2.0, 3.0], output=1, ax=axes())


def test_jacobian_picture_holds_the_entries() -> None:
    J = dense_layer(4, 3, 2, zero=1)
    ax = plots.jacobian(J, axes())
    shown = ax.images[0].get_array()
    dense = np.abs(J.to_array())
    assert shown.shape[0] == J.shape[0]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["layer/kernel 3 × 2", "layer/bias 2"]
    edge = round(ax.lines[0].get_xdata()[0] + 0.5)  # where the bias begins
    for part, columns in [(shown[:, :edge], dense[:, :6]), (shown[:, edge:], dense[:, 6:])]:
        for row, expected in zip(part, columns, strict=True):
            assert set(row.compressed()) <= set(expected)
            assert row.max() == expected.max()
    assert shown.mask.any(), "zeros are marked, not drawn as small numbers"


def test_a_large_jacobian_is_thinned_and_keeps_its_maximum() -> None:
    J = dense_layer(3000, 400, 3)
    ax = plots.jacobian(J, axes())
    shown = ax.images[0].get_array()
    assert shown.shape[0] <= 400
    assert shown.shape[1] <= 802
    assert "samples of 3000" in ax.get_ylabel()
    some = J[np.unique(np.linspace(0, 2999, 133).astype(int))]
    assert shown.max() == np.abs(some.to_array()).max()


def test_a_jacobian_of_zeros_and_an_empty_one() -> None:
    J = dense_layer(2, 1, 1)
    plots.jacobian(J.scaled(np.zeros((2, 1, 1))), axes())
    with pytest.raises(DataError, match="nothing to draw"):
        plots.jacobian(J[:0], axes())


def test_current_axes_are_the_default() -> None:
    import matplotlib.pyplot as plt

    history = History(np.array([1]), np.array([4.0]), np.array([2.0]), np.array([0.0]), np.ones(1))
    try:
        plt.figure()
        assert plots.convergence(history) is plt.gcf().axes[0]
    finally:
        plt.close("all")


def test_matplotlib_is_loaded_only_to_draw() -> None:
    code = "import sys, netjac.plots; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
