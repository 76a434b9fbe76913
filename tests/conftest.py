"""Quiet, repeatable, and polite to the machine: set before any test imports TensorFlow."""

from __future__ import annotations

import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # the same rounding on every machine
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "2")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
# The matrices are small: a second BLAS thread gains nothing, and waits long for a processor where others are at work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("MPLBACKEND", "Agg")

import numpy as np
import pytest
from hypothesis import settings

# Tracing makes the first example slow; the machine's speed is never what is tested.
settings.register_profile("netjac", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("netjac")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Every test starts from the same random numbers, in TensorFlow too if it is loaded."""
    np.random.seed(0)  # noqa: NPY002 - what third-party code draws from
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_interrupts() -> None:
    """A shell starts background jobs with SIGINT ignored, and Python then leaves it so: Ctrl-C under test needs it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
