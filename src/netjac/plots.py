"""Pictures of a fit and of a Jacobian. The only file that imports Matplotlib, and only when a picture is drawn.

Every function draws into ``ax`` (by default Matplotlib's current axes) and returns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from netjac.errors import DataError, ShapeError
from netjac.intervals import Prediction
from netjac.jacobian import Jacobian
from netjac.optimize.monitor import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PICTURE_ROWS = 400  # more than a screen shows
_PICTURE_COLUMNS = 800


def fit(groups: dict[str, tuple[ArrayLike, ArrayLike]], ax: Axes | None = None) -> Axes:
    """Predicted against measured values, with the diagonal on which both agree.

    Parameters
    ----------
    groups
        Name → (measured, predicted), arrays of one shape; such as ``{"train": (y, f(x)), "test": …}``. The legend
        shows each group's root mean square error.
    ax
        Where to draw.

    Raises
    ------
    ShapeError
        If measured and predicted differ in shape.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> ax = fit({"train": ([1.0, 2.0, 3.0], [1.1, 1.9, 3.2])}, Figure().subplots())
    >>> ax.get_xlabel()
    'measured'
    """
    ax = _axes(ax)
    low, high = np.inf, -np.inf
    for position, (name, pair) in enumerate(groups.items()):
        measured, predicted = (np.asarray(values, dtype=np.float64) for values in pair)
        if measured.shape != predicted.shape:
            raise ShapeError(f"{name!r}: measured has shape {measured.shape} and predicted {predicted.shape}.")
        error = float(np.sqrt(np.mean((predicted - measured) ** 2)))
        ax.scatter(
            measured,
            predicted,
            s=14,
            alpha=0.6,
            linewidths=0,
            color=f"C{position}",
            label=f"{name}: rms error {error:.3g}",
        )
        low, high = min(low, measured.min(), predicted.min()), max(high, measured.max(), predicted.max())
    ax.plot([low, high], [low, high], color="0.4", linewidth=1, zorder=0)
    ax.set(xlabel="measured", ylabel="predicted", title="Fit")
    ax.legend(frameon=False, loc="upper left")
    return ax


def convergence(history: History, ax: Axes | None = None) -> Axes:
    """Cost and largest gradient entry over the evaluations of the model, on logarithmic axes.

    Parameters
    ----------
    history
        ``result.history`` of `netjac.LeastSquares.solve`.
    ax
        Where to draw.

    Raises
    ------
    DataError
        If the history is empty.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> cost, optimality, seconds = np.array([9.0, 1.0]), np.array([3.0, 0.1]), np.array([0.0, 0.1])
    >>> history = History(np.array([1, 2]), cost, optimality, seconds, np.full(2, np.nan))
    >>> ax = convergence(history, Figure().subplots())
    >>> ax.get_ylabel()
    'cost'
    """
    if not len(history):
        raise DataError("the history is empty: nothing was evaluated.")
    ax = _axes(ax)
    (cost,) = ax.plot(history.nfev, _positive(history.cost), color="C0", marker=".", label="cost")
    ax.set(xlabel="evaluations", ylabel="cost", title="Convergence", yscale="log")
    right = ax.twinx()
    (gradient,) = right.plot(
        history.nfev, _positive(history.optimality), color="C1", marker=".", linewidth=1, label="‖gradient‖∞"
    )
    right.set(ylabel="‖gradient‖∞", yscale="log")
    for side, line in ((ax, cost), (right, gradient)):
        side.yaxis.label.set_color(line.get_color())
    ax.legend(handles=[cost, gradient], frameon=False, loc="upper right")
    return ax


def prediction(
    predicted: Prediction,
    x: ArrayLike,
    observed: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    output: int = 0,
    level: float = 0.95,
    ax: Axes | None = None,
) -> Axes:
    """A prediction over x, with the band of its mean and, where the noise is known, that of a new observation.

    Each band holds its value at each x by itself with probability ``level``; where the data leave the output
    undetermined there is none.

    Parameters
    ----------
    predicted
        From `netjac.uncertainty.Uncertainty.predict`.
    x : (n,)
        Where; in any order.
    observed
        Data shown as points, (x, y).
    output
        Which of the l outputs.
    level
        Of the bands.
    ax
        Where to draw.

    Raises
    ------
    ShapeError
        If x has not one number a sample, or there is no such output.
    """
    ax = _axes(ax)
    n, l = predicted.mean.shape
    across = np.asarray(x, dtype=np.float64).reshape(-1)
    if across.shape != (n,) or not -l <= output < l:
        raise ShapeError(
            f"a prediction of {n} samples × {l} outputs needs x of shape ({n},) and an output below {l}; x has "
            f"{np.shape(x)} and the output is {output}."
        )
    order = np.argsort(across)
    across = across[order]
    share = f"{100 * level:g} %"
    kinds = [(False, f"mean, {share}", 0.35)]
    if predicted.noise_std is not None:
        kinds.insert(0, (True, f"new observation, {share}", 0.15))
    for observation, label, alpha in kinds:
        low, high = (limit[order, output] for limit in predicted.interval(level, observation))
        known = np.isfinite(low) & np.isfinite(high)
        ax.fill_between(across, low, high, where=known, color="C0", alpha=alpha, linewidth=0, label=label)
    if observed is not None:
        ax.scatter(*observed, s=14, color="0.25", linewidths=0, label="observed")
    ax.plot(across, predicted.mean[order, output], color="C0", label="predicted")
    ax.set(xlabel="x", ylabel="y", title="Prediction")
    ax.legend(frameon=False)
    return ax


def jacobian(J: Jacobian, ax: Axes | None = None) -> Axes:
    """|J| as an image on a logarithmic scale: rows are outputs by sample, columns parameters by variable.

    A large Jacobian is drawn from evenly spaced samples, and each pixel shows the largest entry of the columns under
    it. Widths go with the square root of the number of parameters, so that a bias is seen beside its kernel.

    Parameters
    ----------
    J
        From `netjac.jacobian`.
    ax
        Where to draw.

    Raises
    ------
    DataError
        If J has no rows or no columns.
    """
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    if 0 in J.shape:
        raise DataError(f"a Jacobian of shape {J.shape} has nothing to draw.")
    ax = _axes(ax)
    count = min(J.n, max(1, _PICTURE_ROWS // J.l))
    samples = np.unique(np.linspace(0, J.n - 1, count).astype(np.intp))
    part = J[samples]
    widths = _widths([segment.size for segment in J.parameters])
    strips = [
        _strip(np.abs(part.columns(segment.name).to_array()), width)
        for segment, width in zip(J.parameters, widths, strict=True)
    ]
    picture = np.concatenate(strips, axis=1)
    top = float(picture.max()) or 1.0
    colours = colormaps["viridis"].with_extremes(under="black", bad="black")
    image = ax.imshow(
        np.ma.masked_less_equal(picture, 0),
        norm=LogNorm(max(top * 1e-5, float(picture[picture > 0].min(initial=top)) * 0.999), top, clip=False),
        cmap=colours,
        aspect="auto",
        interpolation="nearest",
    )
    ax.figure.colorbar(image, ax=ax, label="|∂y / ∂θ|  (black: zero)", pad=0.02)
    edges = np.cumsum([0, *widths])
    for edge in edges[1:-1]:
        ax.axvline(edge - 0.5, color="white", linewidth=1)
    names = [f"{s.name} {' × '.join(map(str, s.shape))}" for s in J.parameters]
    ax.set_xticks((edges[:-1] + edges[1:] - 1) / 2, names, rotation=30, ha="right", fontsize="small")
    shown = "" if len(samples) == J.n else f", {len(samples)} samples of {J.n}"
    ax.set(ylabel=f"outputs by sample{shown}", title=f"Jacobian, {J.shape[0]} × {J.shape[1]}")
    return ax


def _widths(sizes: list[int]) -> list[int]:
    """Pixels for each variable, in proportion to the square root of its size."""
    share = np.sqrt(np.array(sizes, dtype=np.float64))
    return [max(1, round(width)) for width in _PICTURE_COLUMNS * share / share.sum()]


def _strip(block: NDArray[Any], width: int) -> NDArray[Any]:
    """Columns of ``block`` (rows, q) stretched or, by their maximum, squeezed to ``width``."""
    q = block.shape[1]
    if q <= width:
        return block[:, np.arange(width) * q // width]
    return np.maximum.reduceat(block, np.arange(width) * q // width, axis=1)


def _positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Zeros left out, which a logarithmic axis cannot show."""
    return np.where(values > 0, values, np.nan)


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.gca()
