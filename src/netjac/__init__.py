r"""Jacobians of neural networks, kept as layer factors.

Notation
--------
A network turns n samples x into outputs y = f(x; θ): n samples, l outputs a sample, m parameters θ. The outputs of a
sample are flattened in C order, one output after the other; the parameters are the trainable variables in the model's
order, each flattened in C order. The Jacobian has the entries

    J[n, l, m] = ∂y[n, l] / ∂θ[m],

as a matrix (n·l, m) with rows sample-major: row n·(number of outputs) + l. Sample n's outputs depend on sample n's
inputs alone; a network that mixes samples has no such Jacobian, and is refused.

Factors
-------
Nearly every parameter meets the samples in operations that are linear in it, its *use sites*. At a site,

    z[n, p, g, c] = Σ_k A[n, p, g, k] · E[g, k, c],

with E the parameter (reshaped, perhaps transposed, sliced or scaled), A what comes in, p the positions that share the
parameter (time steps, pixels), g groups that do not mix, k what is summed over, and c what comes out. Let

    D[n, l, p, g, c] = ∂y[n, l] / ∂z[n, p, g, c]

be the cotangents: what one backward pass per output gives, for the activations only. The chain rule then reads

    J[n, l, (g, k, c)] = Σ_p A[n, p, g, k] · D[n, l, p, g, c],                                          (1)

and J at column m is the sum of (1) over all sites whose E holds θ[m], times ∂E[g, k, c] / ∂θ[m] where that is not 1.

For p = 1 this is the Khatri–Rao product of A and D: k + l·c numbers a sample instead of l·k·c. A bias is a site with
k = 1 and A ≡ 1; an embedding is a site whose A is one-hot over k, kept as indices; the scale of a normalisation is a
site with k = c = 1 and one group a feature. A site whose factors would be larger than what they stand for is summed
over p at once, and a parameter used in a way no rule covers is differentiated per sample; both are then kept as the
explicit array on the left of (1). A variable that does not reach the outputs has zero columns. `Jacobian.coverage`
says which became what.

Products
--------
Everything is computed from (1) without J being formed. With v (m,) cut up like E, and u (n, l),

    (J v)[n, l]         = Σ_p,g,c D[n, l, p, g, c] · (Σ_k A[n, p, g, k] v[g, k, c]),
    (Jᵀ u)[g, k, c]     = Σ_n,p A[n, p, g, k] · (Σ_l u[n, l] D[n, l, p, g, c]),
    (J Jᵀ)[nl, n'l']    = Σ_p,p',g (Σ_k A[n, p, g, k] A[n', p', g, k]) · (Σ_c D[n, l, p, g, c] D[n', l', p', g, c]),

summed over sites; two sites of one variable add their cross terms to the last.

Layouts
-------
`Jacobian.to_array` arranges the axes in any way: ``"(n l) m"`` is the matrix, ``"(l m) n"`` has one column a sample,
``"n l m"`` keeps three axes.

Examples
--------
::

    import netjac as nj

    J = nj.jacobian(model, x)              # a SciPy LinearOperator, (n*l, m)
    J.to_array("(l m) n")                  # any arrangement of n, l, m
    J.lstsq(-residual, damping=1e-3)       # a Levenberg–Marquardt step

    problem = nj.LeastSquares(model, x, y)
    result = scipy.optimize.least_squares(problem.fun, problem.x0, problem.jac)
    print(nj.uncertainty(problem, result).summary())  # standard errors by name
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any as _Any

from netjac.api import input_jacobian, jacobian, jacobian_tensor, parameters, plan
from netjac.errors import (
    DataError,
    DerivativeError,
    DtypeError,
    LayoutError,
    MemoryBudgetError,
    ModelError,
    NameLookupError,
    NetjacError,
    PicklingError,
    ProbeError,
    RandomModelError,
    SampleIndexError,
    SampleMixingError,
    ShapeError,
    StoreError,
    WorkerError,
)
from netjac.jacobian import Jacobian
from netjac.optimize import LeastSquares, Objective, OutputConstraint, least_squares
from netjac.sites import Coverage
from netjac.spaces import OutputSpace, ParameterSpace
from netjac.store import StoredJacobian, open, save
from netjac.streaming import stream
from netjac.tiled import TiledJacobian
from netjac.uncertainty import uncertainty

try:
    __version__ = version("netjac")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

del PackageNotFoundError, version


def __getattr__(name: str) -> _Any:
    """`netjac.distributed`, which loads Dask when it is asked for."""
    if name == "distributed":
        return _import_module("netjac.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "jacobian",
    "input_jacobian",
    "jacobian_tensor",
    "parameters",
    "plan",
    "stream",
    "Jacobian",
    "TiledJacobian",
    "StoredJacobian",
    "LeastSquares",
    "Objective",
    "OutputConstraint",
    "least_squares",
    "uncertainty",
    "save",
    "open",
    "ParameterSpace",
    "OutputSpace",
    "Coverage",
    "NetjacError",
    "DataError",
    "DerivativeError",
    "DtypeError",
    "LayoutError",
    "MemoryBudgetError",
    "ModelError",
    "NameLookupError",
    "PicklingError",
    "ProbeError",
    "RandomModelError",
    "SampleIndexError",
    "SampleMixingError",
    "ShapeError",
    "StoreError",
    "WorkerError",
    "__version__",
]
