"""A small Jacobian made without any framework, for documentation and for trying things out."""

from __future__ import annotations

import numpy as np

from netjac import factor
from netjac.jacobian import Jacobian
from netjac.sites import Coverage, CoverageEntry, SiteForm, SiteValues, Treatment, UseSite
from netjac.spaces import OutputSpace, ParameterSpace, lay_out


def linear_layer(n: int = 3) -> Jacobian:
    """Jacobian of a Dense layer y = x W + b with 3 inputs and 2 outputs, in double precision.

    Parameters
    ----------
    n
        Number of samples.

    Returns
    -------
    Jacobian
        Of shape (n*2, 8): ``"dense/kernel"`` (3, 2), then ``"dense/bias"`` (2,).

    Examples
    --------
    >>> from netjac.examples import linear_layer
    >>> linear_layer(n=1).to_array()
    array([[1., 0., 2., 0., 3., 0., 1., 0.],
           [0., 1., 0., 2., 0., 3., 0., 1.]])
    """
    x = np.resize([1.0, 2.0, 3.0, 0.5, 1.0, -1.0, 2.0, 4.0, 0.0, 1.0], (n, 3))
    space = ParameterSpace(lay_out(["dense/kernel", "dense/bias"], [(3, 2), (2,)], ["float64"] * 2))
    D = np.broadcast_to(np.eye(2)[:, None], (n, 2, 1, 2))  # ∂y/∂z: the layer is the last one
    sites = [
        UseSite(0, "MatMul", SiteForm.OUTER, np.arange(6).reshape(1, 3, 2), cotangent=0),
        UseSite(1, "BiasAdd", SiteForm.OUTER, np.arange(2).reshape(1, 1, 2), cotangent=0),
    ]
    blocks = factor.plan(sites, space).build([SiteValues(A=x[:, None, None, :], D=D), SiteValues(D=D)])
    coverage = Coverage(
        (
            CoverageEntry("dense/kernel", (3, 2), Treatment.FACTORED, "dense/MatMul", "MatMul"),
            CoverageEntry("dense/bias", (2,), Treatment.FACTORED, "dense/BiasAdd", "BiasAdd"),
        )
    )
    y = x @ np.array([[1.0, 0.0], [0.5, -1.0], [0.0, 2.0]]) + np.array([0.1, -0.1])
    return Jacobian(space, OutputSpace.flat(2, "float64"), y, blocks, coverage)
