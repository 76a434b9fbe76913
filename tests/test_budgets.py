"""Verbs within a budget: what they take, what they refuse, and what they do where memory runs out."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import netjac as nj
from netjac import algebra, memory
from netjac.blocks.outer import OuterBlock
from netjac.tensorflow.evaluate import CompiledSites

L = keras.layers
N, OUTPUTS = 12, 3


@pytest.fixture(scope="module")
def model() -> Any:
    return keras.Sequential([keras.Input((4,)), L.Dense(6, "tanh"), L.Dense(OUTPUTS)])


@pytest.fixture(scope="module")
def x() -> Any:
    return np.random.default_rng(3).normal(size=(N, 4)).astype("float32")


@pytest.fixture(scope="module")
def held(model: Any, x: Any) -> nj.Jacobian:
    return nj.jacobian(model, x)


@pytest.fixture
def J(model: Any, x: Any) -> nj.TiledJacobian:
    return nj.jacobian(model, x, memory="4 kB")


def tied() -> nj.Jacobian:
    """A weight that is used twice, so that rows have to be formed."""
    w = tf.Variable(np.random.default_rng(0).normal(size=(4, 4)).astype("float32"))
    x = np.random.default_rng(3).normal(size=(N, 4)).astype("float32")
    return nj.jacobian(lambda x: tf.tanh(x @ w) @ tf.transpose(w), x, variables=[w])


def close(found: Any, expected: Any) -> None:
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


rng = np.random.default_rng(0)
U, V, B = rng.normal(size=(N * OUTPUTS, OUTPUTS)), rng.normal(size=(51, 2)), rng.normal(size=(N, 2, OUTPUTS))
WEIGHTS = rng.normal(size=(N, OUTPUTS))

VERBS: dict[str, Callable[..., Any]] = {
    "to_array": lambda J, **memory: J.to_array("(l m) n", **memory),
    "gram": lambda J, **memory: J.gram(**memory),
    "gram in float64": lambda J, **memory: J.gram(dtype="float64", **memory),
    "gram of two": lambda J, **memory: J.gram(J, **memory),
    "normal": lambda J, **memory: J.normal(WEIGHTS, **memory),
    "normal in float64": lambda J, **memory: J.normal(dtype="float64", **memory),
    "row_norms": lambda J, **memory: J.row_norms(**memory),
    "column_norms": lambda J, **memory: J.column_norms(**memory),
    "lstsq": lambda J, **memory: J.lstsq(np.arange(36.0), damping=0.5, **memory),
}
PRODUCTS: dict[str, Callable[..., Any]] = {
    "J @ V": lambda J: J @ V,
    "J.T @ U": lambda J: J.T @ U,
    "J.T @ u": lambda J: J.T @ U[:, 0],
    "scaled": lambda J: J.scaled(B).to_array(),
    "samples": lambda J: J[2:].to_array(),
    "columns": lambda J: J.columns(J.parameters.names[0]).to_array(),
}


# ---- what they take and what they refuse


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["held", "tiled"])
def test_the_least_that_works_works_and_one_byte_less_does_not(
    kind: str, verb: str, held: Any, J: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, expected = {"held": held, "tiled": J}[kind], VERBS[verb](held)
    with pytest.raises(nj.MemoryBudgetError, match="least that works is memory=") as caught:
        VERBS[verb](of, memory=1)
    least = caught.value.least
    for budget in (least, least + 100, "1 MB"):
        close(VERBS[verb](of, memory=budget), expected)
    monkeypatch.setattr(CompiledSites, "__call__", None)  # before any work
    with pytest.raises(nj.MemoryBudgetError):
        VERBS[verb](of, memory=least - 1)


@pytest.mark.parametrize("verb", VERBS)
def test_tiles_take_what_the_result_leaves(
    verb: str, held: Any, J: Any, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, computed = CompiledSites.__call__, []

    def call(self: CompiledSites, theta: Any, x: Any, seeds: Any = None) -> Any:
        computed.append((len(x[0]), OUTPUTS if seeds is None else len(seeds)))
        return original(self, theta, x, seeds)

    monkeypatch.setattr(CompiledSites, "__call__", call)
    with pytest.raises(nj.MemoryBudgetError) as caught:
        VERBS[verb](J, memory=1)
    result = 0 if verb == "lstsq" else np.asarray(VERBS[verb](held)).nbytes
    for more in (0, 2000, 8000):
        computed.clear()
        budget = caught.value.least + more
        close(VERBS[verb](J, memory=budget), VERBS[verb](held))
        largest = max(J.footprint.need(*size) for size in computed)
        assert result + largest <= budget
    assert largest > J.footprint.need(1, 2)  # and more is used where there is more


def test_the_result_does_not_count_where_it_is_the_callers(J: Any, held: Any) -> None:
    least = J.footprint.combined(OUTPUTS).need(1, 1)
    out = np.empty(held.shape, "float32")
    close(J.to_array(out=out, memory=least), held.to_array())
    with pytest.raises(nj.MemoryBudgetError):
        J.to_array(memory=least)
    square = np.empty((36, 36), "float32")
    close(J.gram(out=square, memory=2 * least + 1000), held.gram())


def test_by_default_results_may_take_what_is_free(held: Any, J: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALL", 0)
    for free, works in ((36 * 36 * 4, True), (36 * 36 * 4 - 1, False)):
        monkeypatch.setattr(memory, "available", lambda *_, free=free: free)
        for of in (held, J):
            if works:
                close(of.gram(), held.to_array(memory="1 MB") @ held.to_array(memory="1 MB").T)
                continue
            with pytest.raises(nj.MemoryBudgetError, match=r"the Gram matrix takes .* more than .* that are free") as e:
                of.gram()
            of.gram(memory=10 * e.value.least)
    monkeypatch.setattr(memory, "available", lambda *_: None)
    held.gram()


@pytest.mark.parametrize("amount", ["much", 0, True, [1]])
def test_amounts_that_are_none(held: Any, amount: Any) -> None:
    for verb in VERBS.values():
        with pytest.raises(nj.NetjacError, match="memory"):
            verb(held, memory=amount)


def traced(work: Callable[[], Any]) -> int:
    """Most bytes that NumPy held at once while the work was done, its result included."""
    work()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def wide() -> nj.Jacobian:
    model = keras.Sequential([keras.Input((20,)), L.Dense(40, "tanh"), L.Dense(40, "tanh"), L.Dense(30)])
    x = np.random.default_rng(3).normal(size=(60, 20)).astype("float32")
    return nj.jacobian(model, x)


def test_temporaries_keep_to_the_budget() -> None:
    J = wide()  # (1800, 3710): 13 MB for J Jᵀ, 55 MB for Jᵀ J
    for verb, result in ((J.gram, 1800**2 * 4), (J.normal, 3710**2 * 4)):
        for room in (300_000, 3_000_000):
            budget = result + room
            assert traced(lambda verb=verb, budget=budget: verb(memory=budget)) < result + 1.2 * room + 1_000_000
    assert traced(lambda: J.normal(memory=3710**2 * 4 + 100_000)) < traced(J.normal) - 2_000_000


# ---- memory that cannot be had


ERRORS = [MemoryError("no room"), tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")]


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Exception], list[int]]:
    """Make evaluations of more than so many rows fail, with the error given."""
    original = CompiledSites.__call__

    def limit(rows: int, error: Exception) -> list[int]:
        failures: list[int] = []

        def call(self: CompiledSites, theta: Any, x: Any, seeds: Any = None) -> Any:
            count = len(x[0]) * (OUTPUTS if seeds is None else len(seeds))
            if count > rows:
                failures.append(count)
                raise error
            return original(self, theta, x, seeds)

        monkeypatch.setattr(CompiledSites, "__call__", call)
        return failures

    return limit


@pytest.mark.parametrize("error", ERRORS, ids=["Python", "TensorFlow"])
@pytest.mark.parametrize("verb", [*VERBS, *PRODUCTS])
def test_every_verb_is_tried_again_in_smaller_tiles(
    verb: str, error: Exception, model: Any, x: Any, held: Any, scarce: Any
) -> None:
    J = nj.jacobian(model, x, memory="4 kB")
    assert isinstance(J, nj.TiledJacobian)
    work = (VERBS | PRODUCTS)[verb]
    expected = work(held)
    failures = scarce(1, error)
    with pytest.warns(RuntimeWarning, match="could not be allocated, and is tried again in smaller tiles") as caught:
        close(work(J), expected)
    assert {warning.filename for warning in caught} == {__file__}
    assert 0 < len(failures) < 5
    failures.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(work(J), expected)  # what failed once is not tried again
    assert not failures


def test_whole_factors_that_once_could_not_be_had_are_not_tried_again(model: Any, x: Any, scarce: Any) -> None:
    network = nj.tensorflow.evaluator(model, x)
    expected = network.evaluate().to_array()
    failures = scarce(8, ERRORS[0])
    with pytest.warns(RuntimeWarning):
        close(network.evaluate().to_array(), expected)
    failures.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(network.evaluate().to_array(), expected)
    assert not failures


def of_rows(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Make explicit rows of more than so many fail."""
    original, failures = algebra.Parts.rows, []

    def rows(self: Any, samples: slice, dtype: Any, threads: int = 1, outputs: Any = None) -> Any:
        count = (samples.stop - samples.start) * (self.l if outputs is None else outputs.stop - outputs.start)
        if count > most:
            failures.append(count)
            raise MemoryError
        return original(self, samples, dtype, threads, outputs)

    monkeypatch.setattr(algebra.Parts, "rows", rows)
    return failures


@pytest.mark.parametrize("verb", ["normal", "gram", "gram of two", "row_norms", "column_norms"])
def test_temporaries_are_tried_again_in_smaller_parts(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    J = tied()
    work = {**VERBS, "normal": lambda J: J.normal(weights)}[verb]
    weights = np.linspace(-1, 2, J.shape[0])
    expected = work(J)
    failures = of_rows(monkeypatch, 3)
    with pytest.warns(RuntimeWarning, match="explicit rows of .* could not be allocated"):
        close(work(J), expected)
    assert failures
    of_rows(monkeypatch, 0)
    with pytest.warns(RuntimeWarning), pytest.raises(MemoryError):
        work(J)


def test_a_gram_matrix_is_tried_again_in_smaller_parts(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, original, failures = held.gram(), OuterBlock.add_gram, []

    def add_gram(self: Any, other: Any, rows: slice, columns: slice, out: Any) -> None:
        if out.size > 60:
            failures.append(out.size)
            out[...] += 1  # half done
            raise MemoryError
        original(self, other, rows, columns, out)

    monkeypatch.setattr(OuterBlock, "add_gram", add_gram)
    with pytest.warns(RuntimeWarning, match=r"J Jᵀ of \d+ × 12 samples"):
        found = held.gram()
    close(found, expected)
    np.testing.assert_array_equal(found, found.T)
    assert failures


def test_least_squares_without_a_matrix_that_cannot_be_had(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = held.lstsq(np.arange(36.0), damping=0.5)

    def refuse(*_: Any, **__: Any) -> Iterator[Any]:
        raise MemoryError

    monkeypatch.setattr(nj.Jacobian, "gram", refuse)
    with pytest.warns(RuntimeWarning, match=r"36 × 36 for lstsq could not be allocated, and products are used"):
        close(held.lstsq(np.arange(36.0), damping=0.5), expected)
