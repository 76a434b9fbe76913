"""BLAS libraries held at one thread, and given back."""

from __future__ import annotations

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from netjac.pools import LIBRARIES, one_thread


def threads() -> list[int]:
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


def test_libraries_are_held_and_given_back_whatever_happens() -> None:
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        assert 2 in before
        with one_thread(*LIBRARIES):
            assert set(threads()) == {1}
            with one_thread("numpy"):
                assert set(threads()) == {1}
            assert set(threads()) == {1}
        assert threads() == before
        with pytest.raises(RuntimeError, match="inside"), one_thread("scipy"):
            raise RuntimeError("inside")
        assert threads() == before
        with one_thread():
            assert threads() == before


def test_a_lower_number_is_left_alone() -> None:
    with threadpool_limits(1, user_api="blas"):
        with one_thread(*LIBRARIES):
            assert set(threads()) == {1}
        assert set(threads()) == {1}
