"""Which linear algebra computes the steps, decided once from the shape and from what came as the derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import LinearOperator

from netjac.errors import MemoryBudgetError
from netjac.optimize.budget import steps_bytes
from netjac.optimize.control import Control, Damped, Region, State
from netjac.optimize.direct import GramSystem, NormalSystem, SpectralSystem, column_groups
from netjac.optimize.iterative import ProductSystem
from netjac.optimize.linear import Linearisation, Mask, System, Trial, is_operator
from netjac.optimize.losses import Vector
from netjac.optimize.options import OptionError
from netjac.optimize.precondition import Preconditioner
from netjac.planning import in_words

LINEAR_SOLVERS = ("auto", "gram", "normal", "svd", "products")

DIRECT_SIZE = 6000
"""Largest matrix that is factorised: 288 MB, a second or so a factorisation on two cores."""

EXPLICIT_BYTES = 2**28
"""Most bytes of an explicit Jacobian that is formed where the factors do not do."""

_SPECTRAL_WORK = 10**6
"""rows · m · min(rows, m) up to which singular values cost no more than what is around them."""

_FALLBACK_WORK = 2 * 10**8
"""The same, up to which they are the way down from a Cholesky factor that cannot be trusted; beyond, more damping."""


_ONE_THREAD = 1500
"""Order of a matrix that LAPACK factorises faster on one thread than on two that wait for NumPy's."""

_ONE_THREAD_ENTRIES, _ONE_THREAD_WORK = 2 * 10**7, 2 * 10**9
"""Entries of J, and entries times min(rows, m), below which products are faster on one thread."""


def small_libraries(shape: tuple[int, int]) -> tuple[str, ...]:
    """Which BLAS libraries are better held at one thread for steps with a Jacobian of this shape.

    Examples
    --------
    >>> small_libraries((2000, 61)), small_libraries((1000, 1_154_049))
    (('numpy', 'scipy'), ('scipy',))
    """
    rows, m = shape
    small = min(rows, m)
    products = rows * m < _ONE_THREAD_ENTRIES and rows * m * small < _ONE_THREAD_WORK
    return (("numpy",) if products else ()) + (("scipy",) if small < _ONE_THREAD else ())


_INEXACT, _EXACT = 1e-2, 1e-10
"""Relative residual at which conjugate gradients end: the loosest and the tightest."""


@dataclass(frozen=True, eq=False)
class Route:
    """A way to compute steps.

    Attributes
    ----------
    name, reason : str
        Which, and why.
    by_columns : bool
        Whether the columns of J are at hand, so that their norms are the natural scale.
    system
        Makes the `System` of one point, from the model there, the scale and the state.
    control
        How the length of steps is chosen.
    """

    name: str
    reason: str
    by_columns: bool
    system: Callable[[Linearisation, Vector, State], System]
    control: Control


class _Safe(System):
    """A Cholesky solve, and singular values where that cannot be trusted."""

    def __init__(self, at: Linearisation, scale: Vector, first: type[System]) -> None:
        super().__init__(at, scale)
        self._first = first(at, scale)
        self._second: System | None = None

    def solve(self, damping: float, free: Mask | None = None, shift: Vector | None = None) -> Trial | None:
        if self._second is None:
            trial = self._first.solve(damping, free, shift)
            if trial is not None:
                return trial
            self._second = SpectralSystem(self.at, self.scale)
        return self._second.solve(damping, free, shift)

    def inverse(self, t: Vector) -> Vector:
        return (self._second or self._first).inverse(t)


def ways(rows: int, m: int, linear_solver: str = "auto", bounded: bool = False) -> list[str]:
    """Ways to compute the steps of a fit, the best first, as `netjac.optimize.budget.steps_bytes` calls them.

    Parameters
    ----------
    rows, m
        Residuals and parameters.
    linear_solver
        As asked for.
    bounded
        Whether J Jᵀ has to be made of the explicit J.

    Examples
    --------
    >>> ways(100, 10_000)
    ['gram', 'products', 'diagonal']
    """
    at_hand = 8 * rows * m <= EXPLICIT_BYTES
    auto = [name for name, _ in _preferred(rows, m, at_hand, at_hand or not bounded)]
    names = auto if linear_solver == "auto" else [linear_solver]
    named = ["explicit" if name == "gram" and bounded else name for name in names]
    return [*named, "diagonal"] if named[-1] == "products" else named


def _preferred(rows: int, m: int, columns_at_hand: bool, gram_works: bool) -> list[tuple[str, str]]:
    """Ways and what speaks for each, the cheapest first."""
    found = []
    if rows * m * min(rows, m) <= _SPECTRAL_WORK and columns_at_hand:
        found.append(("svd", "small enough for singular values at every point"))
    if rows < m and rows <= DIRECT_SIZE and gram_works:
        found.append(("gram", "fewer residuals than parameters"))
    if m <= DIRECT_SIZE:
        found.append(("normal", "few parameters"))
    return [*found, ("products", "too large for a matrix that can be factorised")]


def choose_route(
    model: Linearisation, name: str, *, x_scale: Vector | str | None, bounded: bool, memory: int | None = None
) -> Route:
    """The route for a derivative like this one.

    Parameters
    ----------
    model
        At the start.
    name
        One of `LINEAR_SOLVERS`.
    x_scale
        As asked for: "jac", a number for each parameter, or None.
    bounded
        Whether some parameters may be held at bounds.
    memory
        Bytes that it may take; None for no limit.

    Raises
    ------
    OptionError
        For a name that does not exist, or a way that the derivative does not allow.
    MemoryBudgetError
        For a way that takes more memory.
    """
    if name not in LINEAR_SOLVERS:
        raise OptionError(f"linear_solver must be one of {', '.join(map(repr, LINEAR_SOLVERS))}, and is {name!r}.")
    rows, m = model.data, model.shape[1]
    J = model.J
    if isinstance(x_scale, str) and isinstance(J, LinearOperator) and not hasattr(J, "column_norms"):
        raise OptionError("x_scale='jac' needs the columns of the Jacobian, and this operator gives products alone.")
    small = min(rows, m)
    explicit = 8 * rows * m <= EXPLICIT_BYTES and (memory is None or 16 * rows * m <= memory)
    array = not isinstance(J, LinearOperator) and (explicit or not scipy.sparse.issparse(J))
    verbs = is_operator(J)
    scale = None if isinstance(x_scale, str) else np.ones(m) if x_scale is None else x_scale
    by_factors = verbs and not bounded and scale is not None and column_groups(model, scale) is not None
    columns_at_hand = array or (verbs and explicit)
    gram_works = columns_at_hand or by_factors
    size = f"{rows} residuals, {m} parameters"

    def taken(name: str) -> int:
        needed = {"gram": "gram" if by_factors else "explicit", "products": "diagonal"}
        return steps_bytes(needed.get(name, name), rows, m)

    def fits(*names: str) -> bool:
        return memory is None or sum(map(taken, names)) <= memory

    if name == "gram" and not gram_works:
        raise OptionError(
            "linear_solver='gram' needs the explicit Jacobian for bounds, and for x_scale and priors that differ "
            f"within a variable, and {size} are too large for it: use linear_solver='products'."
        )
    if name in ("gram", "normal", "svd") and not array and not verbs:
        raise OptionError(
            f"linear_solver={name!r} needs the Jacobian as an array or as a netjac.Jacobian, and this operator gives "
            "products alone: use linear_solver='products'."
        )
    if name == "auto":
        if not array and not verbs:
            name, why = "products", "the derivative is an operator that gives products alone"
        else:
            found = _preferred(rows, m, columns_at_hand, gram_works)
            name, why = next((way for way in found if fits(way[0])), found[-1])
            if name != found[0][0] and memory is not None:
                why = f"{found[0][0]!r} would take {in_words(taken(found[0][0]))}, more than {in_words(memory)}"
        reason = f"{why} ({size})"
    else:
        reason = f"asked for ({size})"
    if not fits(name) and memory is not None:
        raise MemoryBudgetError(
            f"linear_solver={name!r} needs {in_words(taken(name))} of memory for {size}, more than the "
            f"{in_words(memory)} that are left of the budget; the least that works is memory={taken(name)}.",
            least=taken(name),
        )
    if name == "products":
        return _products(model, reason, None if memory is None else memory - steps_bytes("diagonal", rows, m))
    if name == "svd":
        return Route(name, reason, True, lambda at, scale, _: SpectralSystem(at, scale), Region())
    direct: type[System] = NormalSystem if name == "normal" else GramSystem
    if columns_at_hand and rows * m * small <= _FALLBACK_WORK and fits(name, "svd"):
        return Route(name, reason, name == "normal", lambda at, scale, _: _Safe(at, scale, direct), Region())
    return Route(name, reason, name == "normal", lambda at, scale, _: direct(at, scale), Region())


def _products(model: Linearisation, reason: str, limit: int | None) -> Route:
    kind = Preconditioner(model.J, limit).kind

    def make(at: Linearisation, scale: Vector, state: State) -> System:
        # Tighter as the gradient falls: the outer iteration keeps its speed (Dembo, Eisenstat and Steihaug 1982).
        fallen = float(np.linalg.norm(at.g)) / state.gradient if state.gradient else 1.0
        return ProductSystem(at, scale, Preconditioner(at.J, limit), tolerance=min(_INEXACT, max(fallen**0.5, _EXACT)))

    return Route("products", f"{reason}; conjugate gradients preconditioned by {kind}", False, make, Damped())


def column_norms(model: Linearisation) -> Vector:
    """Norm of each column of J (m,), prior rows included; ones where products are all there is."""
    J: Any = model.J
    if scipy.sparse.issparse(J):
        return np.sqrt(np.asarray(J.multiply(J).sum(axis=0), np.float64).reshape(-1))
    if isinstance(J, np.ndarray):
        return np.sqrt(np.einsum("nm,nm->m", J, J))
    if not hasattr(J, "column_norms"):
        return np.ones(model.shape[1])
    squares = np.asarray(J.column_norms(squared=True), np.float64)
    return np.sqrt(squares if model.prior is None else squares + model.prior**2)
