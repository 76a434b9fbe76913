"""Small networks drawn at random from pieces, against the tape: what no list of layers thinks of."""

from __future__ import annotations

import os

import einops
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracles import close, compare
from random_networks import Drawn, networks, oracle

import netjac as nj

FUZZ = int(os.environ.get("NETJAC_FUZZ", "0"))  # so many fresh networks, in place of 30 that are always the same
LAYOUTS = ["n l m", "m (n l)", "l n m", "(m n) l", "(m l n)"]


def agree(drawn: Drawn, layout: str) -> None:
    """Every verb of the network's Jacobian against the tape, a layout against einops, and the coverage complete."""
    given = list(drawn.model.trainable_variables)
    assume(given)
    try:
        blocks = oracle(drawn.model, drawn.x, given)
    except LookupError:  # an operation that TensorFlow cannot differentiate twice
        assume(False)
    finite = all(np.isfinite(block).all() and np.abs(block).max(initial=0.0) < 1e8 for block in blocks)
    assume(finite)
    J = nj.jacobian(drawn.network, drawn.x, variables=drawn.variables)
    compare(J, blocks, drawn.tol)
    dense = J.to_array().reshape(J.n, J.l, J.m)
    close(J.to_array(layout), einops.rearrange(dense, f"n l m -> {layout}"), layout, 0.0)
    assert {entry.variable for entry in J.coverage.entries} == set(J.parameters.names)
    assert all(entry.reason or entry.treatment.value == "factored" for entry in J.coverage.entries)


@pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module inside strategies",  # Keras names its layers and seeds so
    "ignore:You are using a softmax over axis",  # of one step
)
@settings(
    max_examples=FUZZ or 30, deadline=None, derandomize=not FUZZ, suppress_health_check=list(HealthCheck), database=None
)
@given(networks(), st.sampled_from(LAYOUTS))
def test_random_networks_equal_the_tape(drawn: Drawn, layout: str) -> None:
    agree(drawn, layout)
