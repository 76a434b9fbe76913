"""The law kit notices: a block that breaks any one law is caught, and the message says which and where."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy.sparse.linalg import aslinearoperator

from netjac import testing
from netjac.blocks.base import Placement
from netjac.blocks.outer import OuterBlock


@pytest.fixture
def case(rng):
    A, D = rng.standard_normal((4, 1, 1, 3)), rng.standard_normal((4, 2, 1, 1, 5))
    columns = np.arange(15).reshape(1, 3, 5) + 1
    return OuterBlock(A, D, Placement((3, 5), (5, 1), 1, (1, 3, 5))), testing.spread(
        testing.naive_outer(A, D), columns, 18
    )


def test_a_right_block_passes(case):
    testing.check_block(*case)


def test_a_wrong_reference_is_noticed_and_the_worst_entry_named(case):
    block, dense = case
    dense[2, 1, 7] += 0.5
    with pytest.raises(AssertionError, match=r"\(2, 1, 7\)|\(2, 1, 0\)"):
        testing.check_block(block, dense)


def off(name):
    """A verb that adds a little too much to one number."""
    right = getattr(OuterBlock, name)

    def wrong(self, *arguments, **keywords):
        result = right(self, *arguments, **keywords)
        out = result if isinstance(result, np.ndarray) else keywords.get("out", arguments[0 if name == "fill" else -1])
        if isinstance(out, np.ndarray) and out.size:
            out[(0,) * out.ndim if name != "fill" else (0, 0, 1)] += 1e-6
        return result

    return wrong


@pytest.mark.parametrize(
    "name", ["add_product", "add_adjoint", "fill", "add_gram", "row_squares", "add_column_squares"]
)
def test_each_verb_is_watched(name, case, monkeypatch):
    monkeypatch.setattr(OuterBlock, name, off(name))
    with pytest.raises(AssertionError, match=name.removeprefix("add_")):
        testing.check_block(*case)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("take", lambda self, samples: OuterBlock(self.A[samples], self.D[samples][::-1], self.placement)),
        ("scaled", lambda self, b: OuterBlock(self.A, (2 * b @ self._D)[:, :, None, None], self.placement)),
        ("restricted", lambda self, start, stop, shift: None),
        ("pieces", lambda self, columns: [self, self]),
        ("__getstate__", lambda self: {**self.__dict__, "A": 2 * self.A, "_A": 2 * self._A}),
        ("columns", lambda self: np.arange(14)),
        ("columns", lambda self: np.arange(16)[::-1]),
    ],
)
def test_each_transform_is_watched(name, wrong, case, monkeypatch):
    monkeypatch.setattr(OuterBlock, name, wrong, raising=False)
    with pytest.raises(AssertionError):
        testing.check_block(*case)


def test_writing_where_others_write_is_noticed(case, monkeypatch):
    right = OuterBlock.fill

    def wrong(self, out, samples, *, add):
        right(self, out, samples, add=add)
        out[..., -1] = 0

    monkeypatch.setattr(OuterBlock, "fill", wrong)
    with pytest.raises(AssertionError, match="fill"):
        testing.check_block(*case)


def test_a_right_operator_passes_and_a_wrong_one_does_not(rng):
    dense = rng.standard_normal((6, 4))
    testing.check_operator(aslinearoperator(dense), dense)
    other = dense.copy()
    other[3, 2] += 1e-6
    with pytest.raises(AssertionError, match="J @ "):
        testing.check_operator(aslinearoperator(other), dense)
    with pytest.raises(AssertionError, match="shape"):
        testing.check_operator(aslinearoperator(dense.T), dense)


def test_assert_close():
    a = np.array([1.0, np.nan, np.inf, 0.0])
    testing.assert_close(a, a.copy(), "same")
    testing.assert_close(np.zeros((0, 3)), np.zeros((0, 3)), "empty")
    for i, value in enumerate([1.1, 0.0, -np.inf, np.nan]):
        b = a.copy()
        b[i] = value
        with pytest.raises(AssertionError, match=rf"that: 1 of 4 .*\n  \({i},\): "):
            testing.assert_close(b, a, "that")
    with pytest.raises(AssertionError, match="shape"):
        testing.assert_close(np.zeros(3), np.zeros((3, 1)), "shapes")
    testing.assert_close(np.float32([1, 1 + 1e-6]), [1, 1], "single precision")
    with pytest.raises(AssertionError):
        testing.assert_close([1, 1 + 1e-6], [1, 1], "double precision")


def test_references_by_hand():
    A, D = np.array([[[[2.0, 3.0]]]]), np.array([[[[[5.0, 7.0]]]]])
    np.testing.assert_array_equal(testing.naive_outer(A, D), [[[[[10, 14], [15, 21]]]]])
    D = np.array([[[[1.0], [10.0]]]])
    np.testing.assert_array_equal(testing.naive_embedding(np.array([[1, 1]]), D, 3), [[[[[0], [11], [0]]]]])
    values = np.array([[[[[1.0, 2.0]]]]])
    np.testing.assert_array_equal(
        testing.spread(values, np.array([[[2, 2]]]), 4, np.array([[[1, 3]]])), [[[0, 0, 7, 0]]]
    )


def test_the_kit_needs_no_hypothesis_until_a_strategy_is_asked_for():
    code = "import sys; sys.modules['hypothesis'] = None; import netjac.testing"
    subprocess.run([sys.executable, "-c", code], check=True)
