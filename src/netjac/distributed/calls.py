"""What users call: each places a network and its data on a cluster, and hands on what to do there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult

from netjac.data import leaves
from netjac.distributed import worker
from netjac.distributed.evaluation import DistributedEvaluator
from netjac.distributed.fit import OnWorkers
from netjac.distributed.placing import TILE_BYTES, place
from netjac.distributed.tiles import DistributedJacobian
from netjac.optimize.options import OptionError, natural_scale
from netjac.optimize.problem import LeastSquares
from netjac.optimize.sources import check_weights


def jacobian(
    model: Any,
    x: Any,
    *,
    client: Any = None,
    tiles: int | None = None,
    memory: float | str = TILE_BYTES,
    variables: Sequence[Any] | None = None,
    dtype: str | None = None,
    build: Callable[[], Any] | None = None,
) -> DistributedJacobian:
    """Jacobian of a network at its present parameters, its factors held by the workers of a Dask cluster.

    Parameters
    ----------
    model
        As for `netjac.jacobian`; or None where ``build`` makes it. It is pickled (a Keras model as its .keras file) and
        travels to each worker once.
    x
        Inputs of n samples, an array or a dict or list of arrays. NumPy arrays travel in tiles, through the scheduler.
        Memory maps, the paths of .npy files and of Zarr arrays, and Zarr arrays travel as references that each worker
        opens, so that they must be found there under the same path. Dask arrays are computed where their tiles are.
    client : distributed.Client, optional
        By default the one that was made last.
    tiles : int, optional
        Number of tiles; by default as many as keep each within ``memory``, and a multiple of the workers' threads; for
        a Dask array its own chunks of samples.
    memory : number of bytes or str
        Most that the factors of one tile may take.
    variables, dtype
        As for `netjac.jacobian`.
    build : callable, optional
        For models that cannot be pickled: a function without arguments that returns the model, or (model, variables);
        called once on each worker. Its parameters' values do not matter, for θ travels; all else must be the same at
        each call.

    Returns
    -------
    DistributedJacobian

    Raises
    ------
    ModelError
        The model cannot be pickled, or is another one on the workers; and as for `netjac.jacobian`.
    WorkerError, ShapeError, DtypeError, DataError, …
        As for `netjac.jacobian`, from a worker; the message names the samples.
    OptionError
        There is no client, or ``tiles`` is no positive number.

    Examples
    --------
    ::

        with distributed.LocalCluster(n_workers=4, threads_per_worker=1) as cluster, cluster.get_client() as client:
            J = nj.distributed.jacobian(model, x, client=client)
            J.T @ u                  # (m,), summed among the workers
            J.to_dask("(l m) n")     # a Dask array, computed chunk by chunk
    """
    return evaluator(
        model, x, client=client, tiles=tiles, memory=memory, variables=variables, dtype=dtype, build=build
    ).evaluate()


def evaluator(
    model: Any,
    x: Any,
    *,
    client: Any = None,
    tiles: int | None = None,
    memory: float | str = TILE_BYTES,
    variables: Sequence[Any] | None = None,
    trainable: str | Sequence[str] | None = None,
    dtype: str | None = "float64",
    build: Callable[[], Any] | None = None,
) -> DistributedEvaluator:
    """The network on the workers at any θ: for `netjac.LeastSquares.from_evaluator`, with residuals of your own.

    A fit by it has everything that `netjac.LeastSquares` has. Vectors of n·l numbers are then on the client: residuals,
    targets, J v. Where those are too many, use `least_squares` of this module.

    Parameters
    ----------
    model, x, client, tiles, memory, variables, build
        As for `jacobian`.
    trainable, dtype
        As for `netjac.LeastSquares`.

    Examples
    --------
    ::

        network = nj.distributed.evaluator(model, x, client=client)
        problem = nj.LeastSquares.from_evaluator(network, y)
        problem.solve(method="netjac")
    """
    placed = place(model, x, None, client, tiles, memory, variables, trainable, dtype, build)
    return DistributedEvaluator(placed)


def least_squares(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    residual: Callable[..., Any] | None = None,
    weights: Any = None,
    prior: dict[str, Any] | None = None,
    bounds: Any = None,
    extra: dict[str, Any] | None = None,
    check: bool = True,
    client: Any = None,
    tiles: int | None = None,
    memory: float | str = TILE_BYTES,
    variables: Sequence[Any] | None = None,
    trainable: str | Sequence[str] | None = None,
    dtype: str | None = "float64",
    build: Callable[[], Any] | None = None,
    method: str = "netjac",
    **options: Any,
) -> OptimizeResult:
    """Fit by least squares on a cluster; afterwards the model holds the best parameters seen.

    Residuals and factors stay on the workers. At each trial θ (m,) goes out and ‖r‖² comes back; at each accepted point
    Jᵀ r, and up to some thousand parameters Jᵀ J, (m, m). With more, steps come from conjugate gradients, each of whose
    iterations sends a vector v (m,) and brings back Jᵀ J v.

    Parameters
    ----------
    model, x, client, tiles, memory, variables, build
        As for `jacobian`. With ``build`` and no model the parameters start from those of a model built here, and end in
        ``result.x``.
    y, weights : arrays (n, ...)
        As for `netjac.LeastSquares`, in any of the forms of x.
    residual, extra, check
        As for `netjac.LeastSquares`. The function is called on the workers with the outputs of one tile of samples, so
        that each of its rows must depend on one sample alone.
    prior, bounds, trainable, dtype
        As for `netjac.LeastSquares`.
    method, **options
        As for `netjac.LeastSquares.solve`; of the losses "linear" alone.

    Returns
    -------
    scipy.optimize.OptimizeResult
        As of `netjac.LeastSquares.solve`, but ``fun`` and ``jac`` are of the m + 1 rows that stand for all (see the
        module), followed by those of the prior.

    Raises
    ------
    OptionError
        A loss other than "linear"; and as for `jacobian`.
    ShapeError, DataError, DtypeError, DerivativeError, WorkerError
        As for `netjac.LeastSquares`, from a worker; the message names the samples.

    Notes
    -----
    Working with Jᵀ J squares the condition number of J: directions whose singular value is under 1e-8 of the largest
    are lost in rounding.

    Examples
    --------
    ::

        result = nj.distributed.least_squares(model, "x.zarr", "y.zarr", client=client)
        result.cost
    """
    if options.get("loss", "linear") != "linear":
        raise OptionError(
            f"loss={options['loss']!r} weighs single rows, which stay on the workers: use "
            "netjac.LeastSquares.from_evaluator(netjac.distributed.evaluator(...), y).solve(loss=...)."
        )
    if (y is None) == (residual is None):
        raise OptionError(f"give either targets y or a function residual=, and not {'both' if residual else 'none'}.")
    given = (y, check_weights(weights) if isinstance(weights, np.ndarray | list | tuple) else weights)
    placed = place(model, x, given, client, tiles, memory, variables, trainable, dtype, build)
    known = {
        f"{what}[{i}]": leaf
        for what, part in zip(("targets", "weights"), given, strict=True)
        for i, leaf in enumerate(leaves(part))
        if isinstance(leaf, np.ndarray)
    }
    source = OnWorkers(placed, worker.Fit(residual, extra), check, known)
    problem = LeastSquares._of(
        source, prior, bounds, "dense" if method != "netjac" else "operator", "gauss-newton", natural_scale(variables)
    )
    return problem.solve(method, **options)
