"""The table of Keras layers: how the uses of their weights are treated, and how exactly.

Run this file to rewrite docs/layers.md.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # the tests have these set before TensorFlow is loaded
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401

from layer_configurations import ABSTRACT, CONFIGURATIONS, built_in, layer_classes, present
from oracles import compare, randomise, tape_jacobian

import netjac as nj
from netjac.sites import Treatment

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
DTYPES = ("float32", "float64")
INTRODUCTION = """\
# Keras layers with trainable weights

Each layer below was built in the named configurations, its weights drawn at random, and its Jacobian compared with
TensorFlow's own tape, one sample and one output at a time. *Treatment* says what became of the uses of its weights:

- **factored**: kept as the two factors A and D;
- **collapsed**: summed over the positions that share the weight (pixels, time steps) at once, because the explicit
  block is smaller than its factors; which of the two depends on the sizes, and those of the tests are small;
- **fallback**: differentiated one sample at a time, because no rule covers the operation.

*float32* and *float64* give the largest error of any entry over all configurations, relative to the largest entry of
its variable's block, or of the whole matrix where a block is nothing but rounding (the bias of attention's keys).
Errors at this level are rounding, and differ from machine to machine.

"""


@dataclass(frozen=True)
class Measured:
    """What came of one configuration in one precision."""

    treatments: tuple[Treatment, ...]
    reasons: tuple[str, ...]
    error: float


@functools.cache
def measured(layer: str, label: str, dtype: str) -> Measured:
    """Compare a configuration with the tape in every verb; raises where they differ."""
    with built_in(dtype):
        model, x = CONFIGURATIONS[layer][label]()
        randomise(model.weights)
        J = nj.jacobian(model, x)
        blocks = tape_jacobian(model, x, model.trainable_variables)
    assert J.dtype == dtype
    compare(J, blocks)
    whole = max(np.abs(block).max() for block in blocks)
    noise = 16 * np.finfo(dtype).eps * whole
    errors = []
    for name, block in zip(J.parameters.names, blocks, strict=True):
        largest = np.abs(block).max()
        off = np.abs(J.columns(name).to_array().reshape(block.shape) - block).max()
        errors.append(off / (largest if largest > noise else whole))
    entries = J.coverage.entries
    fallen = {e.reason for e in entries if e.treatment is Treatment.FALLBACK}
    return Measured(
        tuple(sorted({e.treatment for e in entries}, key=list(Treatment).index)), tuple(sorted(fallen)), max(errors)
    )


def row(layer: str) -> tuple[str, str, str]:
    """Layer, configurations and treatments, as they stand in the table."""
    results = [measured(layer, label, "float64") for label in CONFIGURATIONS[layer]]
    found = [t.value for t in Treatment if any(t in r.treatments for r in results)]
    reasons = sorted({reason for r in results for reason in r.reasons})
    return layer, ", ".join(CONFIGURATIONS[layer]), ", ".join(found) + (f" ({'; '.join(reasons)})" if reasons else "")


def worst(layer: str, dtype: str) -> float:
    return max(measured(layer, label, dtype).error for label in CONFIGURATIONS[layer])


def committed(page: str) -> list[tuple[str, str, str]]:
    """The rows of a page, without the accuracies."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(layer.strip("`"), configurations, treatment) for layer, configurations, treatment, *_ in cells]


def page() -> str:
    layers = list(present())
    count = sum(len(labels) for labels in present().values())
    fallen = [layer for layer in layers if any(measured(layer, c, "float64").reasons for c in CONFIGURATIONS[layer])]
    lines = ["| layer | configurations | treatment | float32 | float64 |", "|---|---|---|---|---|"]
    for layer in layers:
        cells = [f"`{layer}`", *row(layer)[1:], *(f"{worst(layer, dtype):.0e}" for dtype in DTYPES)]
        lines.append("| " + " | ".join(cells) + " |")
    limits = ", ".join(f"{max(worst(layer, dtype) for layer in layers):.0e} in {dtype}" for dtype in DTYPES)
    without = [
        f"`{name}` ({ABSTRACT[name]})" for names in layer_classes().values() for name in names if name in ABSTRACT
    ]
    summary = (
        f"{len(layers)} layers, {count} configurations, {len(fallen)} layers with a fallback; largest error {limits}."
    )
    aliases = "Aliases (`Convolution2D`) are the same classes. Without a row: " + ", ".join(without) + "."
    more = (
        "Layers without weights (activations, pooling, reshaping, merging, preprocessing) need no rule. Recurrent "
        "layers stay loops, and fall back, where their length is not known before they run, and where a mask comes in "
        "under `zero_output_for_mask=True`."
    )
    return INTRODUCTION + "\n".join([summary, "", *lines, "", aliases, more]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
