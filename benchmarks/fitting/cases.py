"""The problems, and who fits them."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fitting.runner import FitCase, FitContender

DTYPES = ("float64", "float32")
NO_BOUNDS = "has no bounds"
MORE_ROWS = "needs as many residuals as parameters"


def _both(label: str, role: str, module: str, name: str) -> list[FitContender]:
    return [FitContender(label, role, module, name, dtype) for dtype in DTYPES]


NETJAC = _both("netjac", "netjac", "netjac_fits", "netjac")
BASE = NETJAC[0]
"""The default of netjac, which all others are compared with."""

LEVENBERG = [
    *_both("tf-levenberg-marquardt", "peer", "tensorflow_fits", "qr"),
    *_both("tf-levenberg-marquardt, cholesky", "peer", "tensorflow_fits", "cholesky"),
    *_both("torch-levenberg-marquardt", "peer", "torch_fits", "qr"),
    *_both("torch-levenberg-marquardt, cholesky", "peer", "torch_fits", "cholesky"),
    *_both("optimistix LevenbergMarquardt", "peer", "jax_fits", "optimistix-qr"),
    *_both("optimistix LevenbergMarquardt, cholesky", "peer", "jax_fits", "optimistix-cholesky"),
]
"""Their linear solvers: QR, which all three take by default, and Cholesky, which is faster."""


def _scipy(method: str, excluded: str = "") -> list[FitContender]:
    from_jax = FitContender(f"SciPy {method}, J from JAX", "peer", "jax_fits", f"scipy-{method}", "float64", excluded)
    from_netjac = replace(from_jax, label=f"SciPy {method}, J from netjac", module="netjac_fits")
    return [from_netjac, from_jax]


def _case(
    name: str,
    sizes: tuple[int, ...],
    n: int,
    goal: float,
    bound: float | None = None,
    alone: bool = False,
    levenberg: list[FitContender] = LEVENBERG,
) -> FitCase:
    case = FitCase(name, "", sizes, n, goal, (), bound, alone)
    rows, m = case.shape
    kept = "" if bound is None else f", every parameter within ± {bound:g}"
    title = f"{'-'.join(map(str, sizes))}, n = {n:,}: {rows:,} residuals, {m:,} parameters{kept}; to an mse of {goal:g}"
    if bound is None:
        methods = _scipy("trf") + _scipy("lm", "" if rows >= m else MORE_ROWS)
    else:
        methods = _scipy("trf") + _scipy("dogbox")
        levenberg = [replace(contender, excluded=NO_BOUNDS) for contender in levenberg]
    return replace(case, title=title, contenders=(*NETJAC, *levenberg, *methods))


# Where a dense J has 9 GB in float64, one linear solver is enough: 1,000 × 1,000 costs next to nothing beside J.
LARGE = [contender for contender in LEVENBERG if "cholesky" in contender.label]

CASES = (
    _case("sinc-n2000", (1, 20, 1), 2_000, 1e-6),
    _case("sinc-n20000", (1, 20, 1), 20_000, 1e-6),
    _case("wide-n500", (8, 64, 64, 1), 500, 1e-6),
    _case("million-n1000", (100, 1024, 1024, 1), 1_000, 1e-6, alone=True, levenberg=LARGE),
    _case("bounded-n250", (13, 37, 37, 2), 250, 1e-6, bound=0.375),
)

MILLION = "million-n1000"
