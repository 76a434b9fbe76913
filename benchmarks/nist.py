"""``python -m benchmarks.nist``: NIST's nonlinear-regression problems, netjac beside SciPy, as a Markdown table.

Everybody starts from both of NIST's points and gets the same residuals and the same derivative, those of
`netjac.LeastSquares` on the formula. Digits are −log₁₀ of the largest relative error, of the parameters or of their
standard deviations, against NIST's certified values, which have 11.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
from numpy.typing import NDArray
from tests import nist

import netjac as nj
from benchmarks import report
from benchmarks.process import ROOT

MOST_DIGITS = 11.0
ENOUGH = 6.0
TOLERANCE, LM_TOLERANCE = 1e-15, 2.3e-16  # MINPACK asks for more than the machine precision, and stops early with more
MOST_EVALUATIONS = 3000
STARTS = ("far", "near")

Solver = Callable[..., scipy.optimize.OptimizeResult]


def _tolerances(value: float) -> dict[str, float]:
    return dict.fromkeys(("ftol", "xtol", "gtol"), value)


SOLVERS: dict[str, Solver] = {
    "netjac": partial(nj.least_squares, **_tolerances(TOLERANCE)),
    "SciPy trf": partial(scipy.optimize.least_squares, method="trf", x_scale="jac", **_tolerances(TOLERANCE)),
    "SciPy lm": partial(scipy.optimize.least_squares, method="lm", **_tolerances(LM_TOLERANCE)),
}


@dataclass(frozen=True)
class Fit:
    """One solver from one start.

    Attributes
    ----------
    digits, deviation_digits : float
        Correct digits of the parameters and of their standard deviations, 0 to 11.
    evaluations : int
        Of the residual.
    failure : str
        What was raised, or empty.
    """

    digits: float
    deviation_digits: float
    evaluations: int
    failure: str = ""

    @property
    def solved(self) -> bool:
        return self.digits >= ENOUGH


Table = dict[str, dict[tuple[str, str], Fit]]
"""By problem, by solver and start."""


def digits(found: NDArray[np.float64], certified: NDArray[np.float64]) -> float:
    """Correct digits of the worst entry, 0 to `MOST_DIGITS`; 0 where one is not finite."""
    error = float(np.max(np.abs(found - certified) / np.abs(certified)))
    if not np.isfinite(error):
        return 0.0
    return MOST_DIGITS if error == 0 else float(np.clip(-np.log10(error), 0.0, MOST_DIGITS))


def deviations(J: NDArray[np.float64], residual_sum: float) -> NDArray[np.float64]:
    """Standard deviations √diag(s² (JᵀJ)⁻¹) with s² = residual_sum / (rows − m), through R of J = Q R.

    Columns are scaled to norm 1 first: parameters of NIST's problems differ by ten orders of magnitude.
    """
    rows, m = J.shape
    norms = np.linalg.norm(J, axis=0)
    if not (np.all(np.isfinite(norms)) and np.all(norms > 0)):
        return np.full(m, np.nan)
    R = scipy.linalg.qr(J / norms, mode="r")[0][:m]
    if np.any(np.diag(R) == 0):
        return np.full(m, np.inf)
    inverse = scipy.linalg.solve_triangular(R, np.eye(m))
    return np.sqrt(residual_sum / (rows - m)) * np.linalg.norm(inverse, axis=1) / norms


def fit(problem: nist.Problem, squares: nj.LeastSquares, start: NDArray[np.float64], solver: Solver) -> Fit:
    """One fit, judged."""
    evaluations = 0

    def fun(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        nonlocal evaluations
        evaluations += 1
        return squares.fun(theta)

    squares.forget()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # far starts overflow, for everybody
        try:
            result = solver(fun, start, squares.jac, max_nfev=MOST_EVALUATIONS)
        except (ValueError, np.linalg.LinAlgError) as error:
            return Fit(0.0, 0.0, evaluations, f"{type(error).__name__}: {error}".split("\n")[0])
        found = deviations(np.asarray(squares.jac(result.x)), 2 * result.cost)
        return Fit(digits(result.x, problem.certified), digits(found, problem.deviations), evaluations)


def run(names: Sequence[str] | None = None) -> Table:
    """All problems, or those named."""
    table: Table = {}
    for name in names or sorted(nist.FORMULAS):
        problem = nist.load(name)
        f, variables = nist.model(name, problem.starts[1])
        squares = nj.LeastSquares(f, problem.x, problem.y, variables=variables, jac="dense")
        table[name] = {
            (label, start): fit(problem, squares, theta, solver)
            for start, theta in zip(STARTS, problem.starts, strict=True)
            for label, solver in SOLVERS.items()
        }
    return table


def as_markdown(table: Table) -> str:
    """The page."""
    columns = [(label, start) for start in STARTS for label in SOLVERS]
    names = [f"{label}, {start}" for label, start in columns]
    rows = [(name, *(_cell(fits[column]) for column in columns)) for name, fits in table.items()]
    deviation_rows = [
        (name, *(f"{fits[column].deviation_digits:.1f}" if fits[column].solved else "" for column in columns))
        for name, fits in table.items()
    ]
    parts = [
        f"# NIST's nonlinear-regression problems, {date.today().isoformat()}, commit {report.commit()}",
        f"Tolerances {TOLERANCE:g}, for lm {LM_TOLERANCE:g}; x_scale='jac' for trf, as lm has it by itself; at most "
        f"{MOST_EVALUATIONS:,} evaluations. All get the residuals and the float64 derivative of `netjac.LeastSquares` "
        "on the formula. Certified values have 11 digits, so 11 is all there is to reach.",
        "## Summary\n\n" + report.table(("", *names), _summary(table, columns)),
        "## Parameters: correct digits of the worst one / evaluations of the residual\n\n"
        f"✗: fewer than {ENOUGH:.0f} digits.\n\n" + report.table(("", *names), rows),
        "## Standard deviations, from Jᵀ J at the solution: correct digits of the worst one\n\n"
        "Of fits solved above. Lanczos1's data fit to 13 digits: its residuals, and with them the scale of "
        "the standard deviations, are rounding in float64.\n\n" + report.table(("", *names), deviation_rows),
    ]
    failures = [
        f"- {name}, {label}, {start}: {each.failure}"
        for name, fits in table.items()
        for (label, start), each in fits.items()
        if each.failure
    ]
    if failures:
        parts.append("## Errors\n\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n"


def _cell(each: Fit) -> str:
    if each.failure:
        return "✗ error"
    return f"{'' if each.solved else '✗ '}{each.digits:.1f} / {each.evaluations}"


def _summary(table: Table, columns: list[tuple[str, str]]) -> list[tuple[str, ...]]:
    by_column = [[fits[column] for fits in table.values()] for column in columns]
    solved = [[each for each in fits if each.solved] for fits in by_column]
    everywhere = [name for name, fits in table.items() if all(each.solved for each in fits.values())]
    shared = [sum(table[name][column].evaluations for name in everywhere) for column in columns]

    def row(what: str, values: list[Any], form: str) -> tuple[str, ...]:
        return (what, *(format(value, form) for value in values))

    return [
        row(f"parameters to {ENOUGH:.0f} digits, of {len(table)}", [len(fits) for fits in solved], "d"),
        row(
            f"standard deviations to {ENOUGH:.0f} digits as well",
            [sum(each.deviation_digits >= ENOUGH for each in fits) for fits in solved],
            "d",
        ),
        row("fewest digits of those", [min((each.digits for each in fits), default=0.0) for fits in solved], ".1f"),
        row("evaluations, all problems", [sum(each.evaluations for each in fits) for fits in by_column], "d"),
        row(f"evaluations, the {len(everywhere)} that all solve from both starts", shared, "d"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write; 1 if netjac misses a problem from the near start."""
    parser = argparse.ArgumentParser("python -m benchmarks.nist", description="NIST's regression problems.")
    parser.add_argument("--results", type=Path, help="the page to write (default benchmarks/results/<date>-nist.md)")
    options = parser.parse_args(arguments)
    if not nist.DIRECTORY.is_dir():
        print("NIST's data files are not beside this repository (shared/data/nist-strd): nothing is run.")
        return 0
    table = run()
    text = as_markdown(table)
    page = options.results or ROOT / "benchmarks" / "results" / f"{date.today().isoformat()}-nist.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    print(text)
    return int(not all(fits["netjac", "near"].solved for fits in table.values()))


if __name__ == "__main__":
    raise SystemExit(main())
