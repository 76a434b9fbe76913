"""Shared by the tests of the TensorFlow half: the oracles beside this file, and a precision for Keras to build in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the import mode gives test files no package to import from


@pytest.fixture
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """The type Keras builds layers in while the test runs; parametrised indirectly, float64 otherwise."""
    dtype = getattr(request, "param", "float64")
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    yield dtype
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])
