"""The same Jacobian over many machines: tiles on the workers of a Dask cluster, vectors between them and the client.

Data are cut into tiles of samples, each with a worker that is its home. At a θ each home makes its tiles' factors and
keeps them; J v sends v (m,) out and brings n·l numbers back, and

    Jᵀ u = Σ_t J_tᵀ u_t,    Jᵀ J = Σ_t J_tᵀ J_t

are summed in a tree among the workers, in float64 and in one order, so that the answer does not depend on who computed
what. All that a tile is made of (network, data, θ) is known to the scheduler as tasks: a worker that dies costs the
tiles it held, which are made again elsewhere when they are needed next.

`least_squares` needs no vector of the rows at all. The step from a θ depends on r and J through Jᵀ J, Jᵀ r and ‖r‖
alone, which are those of m + 1 rows,

    r' = [‖r‖; 0],    J' = [gᵀ / ‖r‖; C],    Cᵀ C = Jᵀ J − g gᵀ / ‖r‖²,    g = Jᵀ r:

the residual and the derivative turned by one orthogonal matrix, whose rows after the first m + 1 are zero. Any solver
for small problems then takes the steps that it would take on all rows.
"""

try:
    import cloudpickle
    import dask.array
    import distributed
except ModuleNotFoundError as missing:
    if missing.name not in ("cloudpickle", "dask", "distributed"):
        raise
    raise ImportError(
        f'netjac.distributed needs Dask, and {missing.name} is not installed: pip install "netjac[dask]".'
    ) from missing

from netjac.distributed.calls import evaluator, jacobian, least_squares
from netjac.distributed.evaluation import DistributedEvaluator
from netjac.distributed.tiles import DistributedJacobian

del cloudpickle, dask, distributed

__all__ = ["jacobian", "evaluator", "least_squares", "DistributedJacobian", "DistributedEvaluator"]
