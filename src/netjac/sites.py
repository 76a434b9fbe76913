"""Use sites: where a parameter meets the samples, told without naming any framework.

At a use site the network is linear in the parameter (with A, what comes in, held fixed):

    z[n, p, g, c] = sum_k A[n, p, g, k] * E[g, k, c]

Letters, here and everywhere: n samples, l outputs per sample, m parameters, p positions that share the
parameter (time steps, pixels), g groups that do not mix, k what is summed over, c what comes out. With the
cotangents D[n, l, p, g, c] = d y[n, l] / d z[n, p, g, c],

    J[n, l, (g, k, c)] = sum_p A[n, p, g, k] * D[n, l, p, g, c].

E is the variable after the operations that touch weights alone. Those are recorded as ``UseSite.entries`` (which
entry of the flattened variable each entry of E is) and ``SiteValues.scale`` (d E / d that entry, when not 1).

A framework's folder produces `UseSite` (once a signature) and `SiteValues` (once an evaluation); nothing to the
right of this module knows which framework it was.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SiteForm(Enum):
    """How a site's values come: as two factors, as indices and one factor, or as an explicit matrix."""

    OUTER = "outer"  # A and D
    EMBEDDING = "embedding"  # A one-hot over k: indices and D
    DENSE = "dense"  # contracted or differentiated per sample: explicit


@dataclass(frozen=True, eq=False)
class UseSite:
    """One use of one variable; uses with the same ``entries`` (unrolled steps) come merged along p.

    Attributes
    ----------
    variable
        Position of the variable in the `ParameterSpace`.
    operation
        Name of the operation in the user's graph.
    form
        What `SiteValues` hold.
    entries : (g, k, c) integers
        ``entries[g, k, c]`` is the position, in the flattened variable, of the entry that E[g, k, c] is made of.
        Positions may repeat (a weight that was tiled) or be missing (a weight that was sliced); -1 where the entry of E
        comes from elsewhere (a kernel put together from several variables).
    cotangent
        Sites with the same number have the same D, so that a kernel and its bias become one block; -1 where there
        is no D.
    """

    variable: int
    operation: str
    form: SiteForm
    entries: NDArray[np.intp]
    cotangent: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class SiteValues:
    """What one evaluation gives for one `UseSite`; arrays are read-only for whoever receives them.

    Attributes
    ----------
    D : (n, l, p, g*c) or None
        Cotangents of z, g major. None for `SiteForm.DENSE`.
    A : (n, p, g, k) or None
        What comes in. For `SiteForm.OUTER`, None stands for A identically 1 (a bias: g = k = 1).
    indices : (n, p) integers
        For `SiteForm.EMBEDDING`: A[n, p, 0, k] = 1 where k == indices[n, p], else 0; g = 1.
    scale : (g, k, c) or None
        d E[g, k, c] / d variable[entries[g, k, c]]; None stands for 1 everywhere.
    dense : (n, l, g*k*c)
        For `SiteForm.DENSE`: the derivative with respect to E.
    """

    D: NDArray[Any] | None = None
    A: NDArray[Any] | None = None
    indices: NDArray[Any] | None = None
    scale: NDArray[Any] | None = None
    dense: NDArray[Any] | None = None


def dense_is_smaller(p: int, g: int, k: int, c: int, l: int) -> bool:
    """Whether the explicit block of a site (l·g·k·c numbers a sample) is smaller than its factors, p·g·(k + l·c)."""
    return l * g * k * c < p * g * (k + l * c)


class Treatment(Enum):
    """What became of one use of a variable, as `Coverage` shows it."""

    FACTORED = "factored"  # kept as A and D
    COLLAPSED = "collapsed"  # summed over p, because the explicit block is smaller than its factors
    FALLBACK = "fallback"  # differentiated per sample, because no rule covers the operation
    UNREACHED = "unreached"  # does not reach the outputs: zero columns


@dataclass(frozen=True)
class CoverageEntry:
    """One line of the coverage table: one use of one variable."""

    variable: str
    shape: tuple[int, ...]
    treatment: Treatment
    operation: str = ""
    operation_type: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Coverage:
    """Which operations use each variable and how each use was turned into columns of the Jacobian.

    Prints as a table; iterate over ``entries`` for the same as data. ``notes`` tell what concerns the network as a
    whole, such as operations whose derivative is zero wherever it exists (rounding).
    """

    entries: tuple[CoverageEntry, ...] = field(default_factory=tuple)
    notes: tuple[str, ...] = ()

    def treatment(self, variable: str) -> tuple[Treatment, ...]:
        """Treatments of every use of ``variable`` (its full name)."""
        return tuple(entry.treatment for entry in self.entries if entry.variable == variable)

    def of(self, variables: Collection[str]) -> Coverage:
        """The lines of some of the variables alone (their full names)."""
        return Coverage(tuple(entry for entry in self.entries if entry.variable in variables))

    @property
    def counts(self) -> dict[Treatment, int]:
        """Number of uses by treatment, every treatment listed."""
        return {t: sum(entry.treatment is t for entry in self.entries) for t in Treatment}

    def __str__(self) -> str:
        header = ("variable", "shape", "treatment", "operation", "why")
        rows = [
            (
                entry.variable,
                " × ".join(map(str, entry.shape)) or "scalar",
                entry.treatment.value,
                f"{entry.operation_type} {entry.operation}".strip(),
                entry.reason,
            )
            for entry in self.entries
        ]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
        ]
        summary = ", ".join(f"{count} {t.value}" for t, count in self.counts.items() if count) or "no variables"
        return "\n".join([lines[0], "  ".join("─" * w for w in widths), *lines[1:], summary, *self.notes])
