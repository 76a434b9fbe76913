"""SciPy's own tests of `scipy.optimize.least_squares`, run on `netjac.least_squares`.

They come with SciPy's wheels. What they pass for choosing among SciPy's solvers (``method``, ``tr_options``,
``jac_sparsity``) is taken off, and ``tr_solver`` becomes ``linear_solver``; tests of what is taken off are left out and
listed here.
"""

from __future__ import annotations

from typing import Any

import pytest

import netjac as nj

upstream = pytest.importorskip(
    "scipy.optimize.tests.test_least_squares", reason="SciPy was installed without its tests"
)

OF_OTHER_SOLVERS = {
    "test_exact_tr_solver": "jac_sparsity",
    "test_tr_options": "tr_options",
    "test_wrong_parameters": "tr_options",
    "test_wrong_jac_sparsity": "jac_sparsity",
    "test_workers": "worker processes for finite differences",
}
SCIPYS_OPTIONS = ("method", "tr_options", "jac_sparsity")
LINEAR_SOLVERS = {None: "auto", "exact": "svd", "lsmr": "products"}


@pytest.fixture(autouse=True)
def netjac_in_place_of_scipy(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    name = request.node.originalname
    if name in OF_OTHER_SOLVERS:
        pytest.skip(f"about an option netjac.least_squares does not have: {OF_OTHER_SOLVERS[name]}")

    def least_squares(*args: Any, **kwargs: Any) -> Any:
        for option in SCIPYS_OPTIONS:
            kwargs.pop(option, None)
        kwargs["linear_solver"] = LINEAR_SOLVERS[kwargs.pop("tr_solver", None)]
        return nj.least_squares(*args, **kwargs)

    monkeypatch.setattr(upstream, "least_squares", least_squares)


class TestNetjac(upstream.BaseMixin, upstream.BoundsMixin, upstream.SparseMixin, upstream.LossFunctionMixin):
    method = "netjac"

    # A trial point far out overflows in the test's own formula; it is a rejected step.
    test_robustness = pytest.mark.filterwarnings("ignore:overflow encountered")(
        upstream.LossFunctionMixin.test_robustness
    )


test_basic = upstream.test_basic
test_callback = upstream.test_callback
test_fp32_gh12991 = upstream.test_fp32_gh12991
test_gh_18793_and_19351 = upstream.test_gh_18793_and_19351
test_gh_19103 = upstream.test_gh_19103
