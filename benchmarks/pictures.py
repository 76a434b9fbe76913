"""Plots of what was measured, each drawn from the data that the run wrote; Matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind people tell apart.
BLUE, ORANGE, GREEN, SKY, VERMILION, PURPLE, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#CC79A7", "#666666"
)  # fmt: skip

# How a contender is drawn, by the start of its name.
STYLES: dict[str, dict[str, Any]] = {
    "netjac, factored": {"color": BLUE, "linewidth": 2.2, "zorder": 5},
    "netjac, dense": {"color": BLUE, "linewidth": 1.6, "linestyle": (0, (4, 1.5)), "zorder": 4},
    "tape.jacobian": {"color": GREY},
    "vectorized_map of tape.jacobian, XLA": {"color": VERMILION},
    "vectorized_map of tape.jacobian": {"color": ORANGE},
    "torch.func": {"color": PURPLE},
    "JAX jit": {"color": GREEN},
    "BackPACK": {"color": SKY},
}
LETTERS = {"n": "samples n", "l": "outputs a sample l", "m": "parameters m"}


def scaling(data: dict[str, Any], folder: Path) -> None:
    """Time, and peak memory, against n, l and m: two figures of a panel for each sweep."""
    time, memory = _quantity("median_seconds", 1e-3), _quantity("first_call_peak_bytes", 1e6)
    _figure(data["sweeps"], time, "ms a Jacobian", folder / "scaling-time.svg")
    _figure(data["sweeps"], memory, "peak of memory, MB", folder / "scaling-memory.svg")


def _quantity(name: str, unit: float) -> Callable[[dict[str, Any]], float | None]:
    return lambda row: None if row["median_seconds"] is None or row[name] is None else row[name] / unit


def _figure(
    sweeps: list[dict[str, Any]], quantity: Callable[[dict[str, Any]], float | None], label: str, path: Path
) -> None:
    figure, axes = _canvas(len(sweeps), label, shared=True)
    for ax, sweep in zip(axes, sweeps, strict=True):
        for name in [row["contender"] for row in sweep["points"][0]["contenders"]]:
            _draw(ax, sweep, name, quantity)
        fixed = sweep["title"].partition("(")[2].rstrip(")")
        ax.set(xlabel=LETTERS[sweep["axis"]])
        ax.set_title(fixed, fontsize="medium", color="0.3")
    _save(figure, axes[0], path)


def _draw(ax: Any, sweep: dict[str, Any], name: str, quantity: Callable[[dict[str, Any]], float | None]) -> None:
    """One contender's line; a cross ends it where the next point was over a cap."""
    x, y = [], []
    for point in sweep["points"]:
        for row in point["contenders"]:
            if row["contender"] == name and (value := quantity(row)) is not None:
                x.append(point[sweep["axis"]])
                y.append(value)
    style = {"linewidth": 1.3, "color": GREY, **STYLES.get(name, {})}
    ax.plot(x, y, marker="o", markersize=3.5, label=name, **style)
    if x and x[-1] < sweep["points"][-1][sweep["axis"]]:
        ax.plot(x[-1:], y[-1:], marker="X", markersize=8, color=style["color"], markeredgecolor="white", zorder=6)


def _canvas(panels: int, label: str, shared: bool = False) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels, sharey=shared, squeeze=False)[0]
    for ax in axes:
        ax.set(xscale="log", yscale="log")
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, which="major", color="0.92")
        ax.minorticks_off()
    axes[0].set_ylabel(label)
    return figure, axes


def _save(figure: Any, named: Any, path: Path) -> None:
    from matplotlib import rc_context

    handles, labels = named.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=max(1, int(figure.get_figwidth() // 3)),
        frameon=False,
        fontsize="small",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "netjac"}):  # the same file for the same data
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def growth(data: dict[str, Any], folder: Path) -> None:
    """Time, and peak memory, of each way against n."""
    from benchmarks.growth import slope

    figure, (time, memory) = _canvas(2, "seconds")
    memory.set_ylabel("peak of memory, MB")
    colours = (BLUE, SKY, GREEN, ORANGE, VERMILION)
    for way, colour in zip(data["ways"], colours, strict=False):
        points = [point for point in way["points"] if point["median_seconds"]]
        n = [point["n"] for point in points]
        style = {"marker": "o", "markersize": 3.5, "linewidth": 1.5, "color": colour}
        label = f"{way['way']}: slope {slope(points):.2f}"
        time.plot(n, [point["median_seconds"] for point in points], label=label, **style)
        memory.plot(n, [point["peak_bytes"] / 1e6 for point in points], **style)
    for ax in (time, memory):
        ax.set(xlabel="samples n")
    _save(figure, time, folder / "growth.svg")
