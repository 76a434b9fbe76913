"""Jacobians and fits on a cluster of two worker processes, against loops over samples, NumPy and one process."""

import os
import pickle
import signal
import threading

import numpy as np
import pytest

pytest.importorskip("distributed")
pytest.importorskip("tensorflow")

import cloudpickle
import dask
import dask.array
import distributed
import keras
import scipy.optimize
import tensorflow as tf
from einops import rearrange

import netjac as nj
from netjac.distributed import worker
from netjac.distributed.cluster import Homes
from netjac.distributed.fit import turned
from netjac.distributed.placing import _leaf
from netjac.optimize import minimand, routes

N, L = 23, 2
LAYOUTS = ["(n l) m", "(l m) n", "n l m", "(l n) m", "m (n l)", "(m n l)"]
EXACT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.fixture(scope="module")
def client():
    # A worker that is slow to restart is waited for: Dask would strike it off after 15 s.
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "10 minutes"}):
        cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
        with cluster, cluster.get_client() as found:
            yield found


def network(seed=0):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(4, "tanh", dtype="float64"), keras.layers.Dense(L, dtype="float64")]
    return keras.Sequential([keras.Input((3,), dtype="float64"), *layers])


@pytest.fixture(scope="module")
def model():
    return network()


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(1).normal(size=(N, 3))


@pytest.fixture(scope="module")
def dense(model, x):
    """J (n, l, m), one sample and one output at a time by the tape."""
    rows = []
    for sample in x:
        for j in range(L):
            with tf.GradientTape() as tape:
                y = model(sample[None])[0, j]
            rows.append(np.concatenate([np.ravel(g) for g in tape.gradient(y, model.trainable_variables)]))
    return np.array(rows).reshape(N, L, -1)


@pytest.fixture(scope="module")
def J(client, model, x):
    return nj.distributed.jacobian(model, x, client=client, tiles=5)


# ---- the verbs


def test_products_are_those_of_the_dense_jacobian(J, dense, model, x, rng):
    matrix = dense.reshape(N * L, -1)
    assert J.shape == matrix.shape
    np.testing.assert_allclose(J.y, model(x), **EXACT)
    for width in ((), (3,)):
        v, u = rng.normal(size=(J.m, *width)), rng.normal(size=(N * L, *width))
        np.testing.assert_allclose(J @ v, matrix @ v, **EXACT)
        np.testing.assert_allclose(J.T @ u, matrix.T @ u, **EXACT)


def test_sums_over_all_rows(J, dense, rng):
    matrix, w = dense.reshape(N * L, -1), rng.normal(size=N * L)
    np.testing.assert_allclose(J.normal(), matrix.T @ matrix, **EXACT)
    np.testing.assert_allclose(J.normal(w), matrix.T @ (w[:, None] * matrix), **EXACT)
    np.testing.assert_allclose(J.column_norms(), np.linalg.norm(matrix, axis=0), **EXACT)
    np.testing.assert_allclose(J.row_norms(squared=True), np.sum(matrix**2, axis=1), **EXACT)
    np.testing.assert_allclose(J.gram(), matrix @ matrix.T, **EXACT)


def test_damped_least_squares(J, dense, rng):
    matrix, b = dense.reshape(N * L, -1), rng.normal(size=N * L)
    stacked = np.concatenate([matrix, np.sqrt(0.1) * np.eye(J.m)])
    wanted = np.linalg.lstsq(stacked, np.concatenate([b, np.zeros(J.m)]))[0]
    np.testing.assert_allclose(J.lstsq(b, damping=0.1), wanted, rtol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_in_any_layout(J, dense, layout):
    wanted = rearrange(dense, f"n l m -> {layout}")
    np.testing.assert_allclose(J.to_array(layout), wanted, **EXACT)
    lazy = J.to_dask(layout, dtype="float32", chunk=2 * L * J.m * 4)  # two samples a chunk
    assert isinstance(lazy, dask.array.Array)
    assert lazy.shape == wanted.shape
    assert lazy.npartitions >= N // 2
    found = lazy.compute()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_parts_are_jacobians_on_the_cluster(J, dense, rng):
    B, u = rng.normal(size=(N, 3, L)), rng.normal(size=(N, 3))
    combined = np.einsum("nqj,njm->nqm", B, dense)
    np.testing.assert_allclose(J.scaled(B).T @ u.reshape(-1), np.einsum("nq,nqm->m", u, combined), **EXACT)
    some = [20, 3, 4, 22, 0, -1]
    np.testing.assert_allclose(J[some].to_array("n l m"), dense[some], **EXACT)
    np.testing.assert_allclose(J[5:21].column_norms(), np.linalg.norm(dense[5:21], axis=(0, 1)), **EXACT)
    last = J.columns(J.parameters.names[-1])
    np.testing.assert_allclose(last.to_array("n l m"), dense[:, :, -L:], **EXACT)
    np.testing.assert_allclose(J.columns("*").to_array("n l m"), dense, **EXACT)


def test_a_tree_of_two_levels(client, model, x, dense, rng):
    u = rng.normal(size=N * L)
    J = nj.distributed.jacobian(model, x, client=client, tiles=N)
    np.testing.assert_allclose(J.T @ u, dense.reshape(N * L, -1).T @ u, **EXACT)


def test_a_float32_network_in_float64(client, x):
    w = tf.Variable([[0.1], [0.2], [0.3]])  # float32
    evaluator = nj.distributed.evaluator(lambda x: tf.tanh(x @ w), x, variables=[w], client=client, tiles=2)
    theta = evaluator.parameters.ravel()
    assert theta.dtype == np.float64
    J = evaluator.evaluate(theta + 1e-10)  # a step that float32 would lose
    wanted = (1 - np.tanh(x @ (theta + 1e-10)) ** 2)[:, None] * x
    np.testing.assert_allclose(J.to_array(), wanted, rtol=1e-14, atol=1e-15)


def test_sums_are_taken_in_float64():
    parts = [np.array([value], np.float32) for value in (1e8, 1.0, -1e8)]
    assert worker.total(parts) == [1.0]


# ---- the model and the data travel


def test_one_copy_of_the_model_a_worker_traced_once(client, x):
    class Counted(tf.Module):
        def __init__(self):
            self.w = tf.Variable(np.ones((3, 2)))
            self._calls = []

        def __call__(self, x):
            self._calls.append(1)
            return tf.tanh(x @ self.w)

    def calls():
        return [len(m._calls) for m, _ in worker._unpacked.values() if hasattr(m, "_calls")]

    evaluator = nj.distributed.evaluator(Counted(), x, client=client, tiles=6)
    first = evaluator.evaluate(np.zeros(6))
    before = client.run(calls)
    second = evaluator.evaluate(np.full(6, 0.5))
    assert client.run(calls) == before
    assert all(len(copies) == 1 and copies[0] > 0 for copies in before.values())
    slope = 1 - np.tanh(x @ np.full((3, 2), 0.5)) ** 2  # d tanh(x w)
    np.testing.assert_allclose(first.y, 0, atol=0)
    np.testing.assert_allclose(second.to_array("n l m")[:, 0, 0], slope[:, 0] * x[:, 0], **EXACT)


def _npy(x, folder):
    np.save(folder / "x.npy", x)
    return folder / "x.npy"


def _memmap(x, folder):
    np.save(folder / "x.npy", np.concatenate([x[:5] + 1, x]))
    return np.load(folder / "x.npy", mmap_mode="r")[5:]


def _zarr(x, folder):
    zarr = pytest.importorskip("zarr")
    stored = zarr.create_array(str(folder / "x.zarr"), shape=x.shape, chunks=(4, 3), dtype=x.dtype)
    stored[:] = x
    return stored


def _zarr_path(x, folder):
    _zarr(x, folder)
    return str(folder / "x.zarr")


def _dask(x, folder):
    return dask.array.from_array(x, chunks=(7, 2))


@pytest.mark.parametrize("form", [_npy, _memmap, _zarr, _zarr_path, _dask])
def test_data_in_any_form(client, model, x, dense, form, tmp_path):
    J = nj.distributed.jacobian(model, form(x, tmp_path), client=client, tiles=None if form is _dask else 4)
    np.testing.assert_allclose(J.to_array("n l m"), dense, **EXACT)
    assert len(J._held.tiles) == 4


def test_maps_travel_as_references(x, tmp_path):
    mapped = _leaf(_memmap(np.tile(x, (1000, 1)), tmp_path))[100:20_000]
    assert len(pickle.dumps(mapped)) < 1000
    np.testing.assert_array_equal(mapped.read(), np.tile(x, (1000, 1))[100:20_000])


def test_tiles_fit_the_budget_and_the_workers(client, model, x):
    whole = nj.distributed.jacobian(model, x, client=client)
    small = nj.distributed.jacobian(model, x, client=client, memory=1000)
    assert len(whole._held.tiles) == 2
    assert len(small._held.tiles) > 4
    assert all(len(held) > 0 for held in client.has_what().values())


def test_a_worker_computes_with_the_threads_it_has(client):
    found = client.run(lambda: (os.environ["TF_NUM_INTRAOP_THREADS"], os.environ["TF_NUM_INTEROP_THREADS"]))
    assert os.environ["TF_NUM_INTRAOP_THREADS"] == "2"
    assert set(found.values()) == {("1", "1")}


# ---- fits


@pytest.fixture(scope="module")
def targets(x):
    return np.stack([np.sin(x[:, 0]), x[:, 1] * x[:, 2]], axis=1)


def test_a_fit_with_factors_on_the_workers(client, x, targets):
    here, there = network(), network()
    wanted = nj.LeastSquares(here, x, targets).solve("netjac", max_nfev=12)
    evaluator = nj.distributed.evaluator(there, x, client=client, tiles=4)
    problem = nj.LeastSquares.from_evaluator(evaluator, targets, jac="operator")
    found = problem.solve("netjac", max_nfev=12, x_scale=1.0)
    np.testing.assert_allclose(found.cost, wanted.cost, rtol=1e-8)
    np.testing.assert_allclose(found.x, wanted.x, rtol=1e-6)
    np.testing.assert_array_equal(nj.parameters(there).ravel(), found.x)


def test_second_derivatives_are_summed(client, model, x, rng):
    theta, v, u = nj.parameters(model).ravel(), rng.normal(size=26), rng.normal(size=(N, L))
    evaluator = nj.distributed.evaluator(model, x, client=client, tiles=4)
    step = 1e-5
    sides = [evaluator.evaluate(theta + s * v).T @ u.reshape(-1) for s in (step, -step)]
    wanted = (sides[0] - sides[1]) / (2 * step)
    np.testing.assert_allclose(evaluator.second_product(theta, u, v), wanted, rtol=1e-5, atol=1e-7)


def outputs(theta, x):
    """`network` in NumPy."""
    w, b, v, c = np.split(theta, [12, 16, 24])
    return np.tanh(x @ w.reshape(3, 4) + b) @ v.reshape(4, L) + c


@pytest.mark.parametrize("method", ["netjac", "trf"])
def test_a_fit_whose_rows_stay_on_the_workers(client, x, targets, method):
    weights = np.linspace(0.5, 2, N)
    options = {"weights": weights, "prior": {"*/kernel": 3.0}, "bounds": {"*/bias": (-0.2, 0.2)}}
    model = network()
    found = nj.distributed.least_squares(
        model, x, targets, client=client, tiles=4, method=method, max_nfev=60, gtol=1e-9, **options
    )
    kernel = np.r_[np.ones(12), np.zeros(4), np.ones(8), np.zeros(2)]

    def cost(theta):
        r = outputs(theta, x) - targets
        return 0.5 * np.sum(weights[:, None] * r**2) + 0.5 * np.sum((kernel * theta / 3) ** 2)

    np.testing.assert_allclose(found.cost, cost(found.x), rtol=1e-10)
    gradient = scipy.optimize.approx_fprime(found.x, cost, 1e-7)
    bias = np.abs(found.x[kernel == 0])
    assert bias.max() <= 0.2
    free = (kernel == 1) | (np.abs(found.x) < 0.2 - 1e-4)
    assert np.abs(gradient[free]).max() < 1e-4
    assert cost(found.x) < 0.5 * cost(nj.parameters(network()).ravel())
    np.testing.assert_array_equal(nj.parameters(model).ravel(), found.x)


def test_a_fit_with_many_parameters_moves_vectors_alone(client, x, targets, monkeypatch):
    monkeypatch.setattr(routes, "DIRECT_SIZE", 1)
    monkeypatch.setattr(minimand, "_EXPLICIT_WORK", 0)
    monkeypatch.setattr(routes, "_SPECTRAL_WORK", 0)
    prior = {"*": 10.0}
    whole = nj.distributed.evaluator(network(), x, client=client, tiles=4)
    wanted = nj.LeastSquares.from_evaluator(whole, targets, prior=prior).solve("netjac", max_nfev=5)
    monkeypatch.setattr(worker, "residual_normal", None)  # fails where it is asked for
    found = nj.distributed.least_squares(network(), x, targets, prior=prior, client=client, tiles=4, max_nfev=5)
    assert found.linear_solver == wanted.linear_solver == "products"
    np.testing.assert_allclose(found.x, wanted.x, rtol=1e-6)
    r = outputs(found.x, x) - targets
    np.testing.assert_allclose(found.cost, 0.5 * np.sum(r**2) + 0.5 * np.sum((found.x / 10) ** 2), rtol=1e-10)
    with pytest.raises(nj.WorkerError):
        found.jac.normal()


def test_a_residual_from_outside_with_a_parameter_of_its_own(client, x, targets):
    def residual(outputs, extra):
        gain, (a, b), one = extra["gain"], outputs.T, np.ones(len(outputs))
        r = np.stack([gain * a - 0.3, b - gain, a * b + 1], axis=1)
        dr = np.stack([np.stack(row, axis=1) for row in ((gain * one, 0 * one), (0 * one, one), (b, a))], axis=1)
        return r, dr, {"gain": np.stack([a, -one, 0 * one], axis=1)}

    given = {"residual": residual, "extra": {"gain": 1.5}}
    wanted = nj.LeastSquares(network(), x, **given, jac="dense").solve("netjac", max_nfev=6)
    found = nj.distributed.least_squares(network(), x, **given, client=client, tiles=3, max_nfev=6)
    assert wanted.cost > 1
    np.testing.assert_allclose(found.cost, wanted.cost, rtol=1e-9)
    np.testing.assert_allclose(found.x, wanted.x, rtol=1e-6)


@pytest.mark.parametrize("rank", [4, 2])
@pytest.mark.parametrize("residual", ["any", "zero"])
def test_few_rows_stand_for_all(rng, rank, residual):
    A = rng.normal(size=(50, rank)) @ rng.normal(size=(rank, 4))
    r = rng.normal(size=50) if residual == "any" else np.zeros(50)
    norm = np.linalg.norm(r)
    K = turned(A.T @ r, A.T @ A, norm)
    assert K.shape == (5, 4)
    np.testing.assert_allclose(K.T @ K, A.T @ A, atol=1e-12 * np.abs(A.T @ A).max())
    np.testing.assert_allclose(K[0] * norm, A.T @ r, rtol=1e-12)


# ---- a worker dies


def killed(client):
    """Kill a worker; the addresses that survive."""
    pids = client.run(os.getpid)
    victim = sorted(pids)[0]
    os.kill(pids[victim], signal.SIGKILL)
    return set(pids) - {victim}


def wait_for_two(client):
    """Until the nanny has made a new process; the tests that follow need it."""
    client.wait_for_workers(2, timeout=300)


def test_a_worker_killed_costs_its_tiles_alone(client, model, x, dense, rng):
    J = nj.distributed.jacobian(model, x, client=client, tiles=6)
    u = rng.normal(size=N * L)
    before = J.T @ u
    keys = [tile.key for tile in J._held.tiles]

    def held(dask_worker):
        return {key: id(dask_worker.data[key]) for key in keys if key in dask_worker.data}

    tiles = client.run(held)
    survivors = killed(client)
    assert sum(map(len, tiles.values())) == 6
    assert all(0 < len(part) < 6 for part in tiles.values())
    after = J.T @ u
    np.testing.assert_allclose(before, dense.reshape(N * L, -1).T @ u, **EXACT)
    np.testing.assert_array_equal(after, before)
    [survivor] = survivors
    kept = client.run(held)[survivor]
    assert tiles[survivor].items() <= kept.items()  # not one of them was made again
    wait_for_two(client)
    np.testing.assert_array_equal(J.T @ u, before)


def test_all_workers_killed_at_once(client, model, x, dense, rng):
    J = nj.distributed.jacobian(model, x, client=client, tiles=6)
    u = rng.normal(size=N * L)
    before = J.T @ u
    for pid in client.run(os.getpid).values():
        os.kill(pid, signal.SIGKILL)
    np.testing.assert_array_equal(J.T @ u, before)  # by the processes that their nannies make
    np.testing.assert_allclose(before, dense.reshape(N * L, -1).T @ u, **EXACT)
    wait_for_two(client)


def test_what_is_no_client(model, x):
    with pytest.raises(nj.NetjacError, match=r"client must be a distributed\.Client"):
        nj.distributed.jacobian(model, x, client="tcp://127.0.0.1:8786")


def test_homes_stay_and_are_shared():
    class Slots:
        def slots(self):
            return self.now

    cluster = Slots()
    cluster.now = ["a", "b", "b"]
    homes = Homes(cluster, 6)
    assert homes.now() == ["a", "a", "b", "b", "b", "b"]
    cluster.now = ["b", "b"]
    assert homes.now() == ["b"] * 6
    cluster.now = ["b", "b", "c"]
    assert homes.now() == ["b", "b", "b", "b", "c", "c"]
    cluster.now = ["c"]
    assert homes.now() == ["c"] * 6


def test_a_worker_killed_in_the_middle_of_a_fit(client, x, targets):
    wanted = nj.distributed.least_squares(network(), x, targets, client=client, tiles=4, max_nfev=10)
    deaths = []

    def callback(intermediate_result):
        if intermediate_result.nit == 3:
            deaths.append(killed(client))

    found = nj.distributed.least_squares(network(), x, targets, client=client, tiles=4, max_nfev=10, callback=callback)
    assert len(deaths) == 1
    assert found.nfev == wanted.nfev == 10
    np.testing.assert_allclose(found.x, wanted.x, rtol=1e-10)
    wait_for_two(client)


# ---- what goes wrong


def test_errors_name_the_samples(client, model, x):
    bad = x.copy()
    bad[17, 1] = np.nan
    with pytest.raises(nj.DataError, match="samples 16 to 19: "):
        nj.distributed.jacobian(model, bad, client=client, tiles=6)


def test_code_from_outside_that_fails_names_the_samples(client, x):
    def residual(outputs):
        if len(outputs) == 11:
            raise ZeroDivisionError("no such thing")
        return outputs, np.broadcast_to(np.eye(2), (len(outputs), 2, 2))

    with pytest.raises(nj.WorkerError, match=r"samples 12 to 22: ZeroDivisionError: .*no such thing"):
        nj.distributed.least_squares(network(), x, residual=residual, client=client, tiles=2)


def test_a_model_that_cannot_travel_and_one_that_is_built(client, x, dense):
    class Locked(tf.Module):
        def __init__(self):
            self.inner, self.lock = network(), threading.Lock()

        def __call__(self, x):
            with self.lock:
                return self.inner(x)

    with pytest.raises(nj.ModelError, match="build="):
        nj.distributed.jacobian(Locked(), x, client=client)

    def build():
        model = Locked()
        return model, model.inner.trainable_variables

    found = nj.distributed.jacobian(None, x, client=client, build=build, tiles=3)
    np.testing.assert_allclose(found.to_array("n l m"), dense, **EXACT)
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(nj.ModelError, match="same model each time"):
        nj.distributed.jacobian(other, x, client=client, build=build)


def test_a_model_that_cannot_be_put_together():
    class Broken:
        def __reduce__(self):
            return (int, ("x",))

    with pytest.raises(nj.WorkerError, match=r"cannot be put together here \(ValueError"):
        worker.Network(cloudpickle.dumps((Broken(), None))).unpacked()


class Opened:
    """An array in a file that is open here."""

    def __init__(self, array):
        self.shape, self.dtype, self._file = array.shape, array.dtype, threading.Lock()

    def __getitem__(self, samples):
        raise AssertionError


def test_large_arrays_travel_without_a_warning(client):
    x = np.random.default_rng(0).normal(size=(2**18, 6))  # 12 MB
    w = tf.Variable(np.ones((6, 1)))
    J = nj.distributed.jacobian(lambda x: x @ w, x, variables=[w], client=client, tiles=1)
    np.testing.assert_allclose(J.T @ np.ones(len(x)), x.sum(axis=0), rtol=1e-9, atol=1e-9)


def test_options_that_do_not_fit(client, model, x, targets, monkeypatch):
    with pytest.raises(ValueError, match="loss='huber'"):
        nj.distributed.least_squares(model, x, targets, client=client, loss="huber")
    with pytest.raises(ValueError, match="targets y or a function"):
        nj.distributed.least_squares(model, x, client=client)
    with pytest.raises(ValueError, match="tiles must be"):
        nj.distributed.jacobian(model, x, client=client, tiles=0)
    with pytest.raises(nj.DataError, match="23 samples"):
        nj.distributed.least_squares(model, x, targets[:-1], client=client)
    with pytest.raises(nj.DataError, match="no samples"):
        nj.distributed.jacobian(model, x[:0], client=client)
    with pytest.raises(nj.DataError, match="no file or folder"):
        nj.distributed.jacobian(model, "nowhere.npy", client=client)
    lazy = dask.array.from_array(x)
    with pytest.raises(nj.DataError, match="compute_chunk_sizes"):
        nj.distributed.jacobian(model, lazy[lazy[:, 0] > 0], client=client)
    with pytest.raises(nj.DtypeError, match="Opened cannot travel"):
        nj.distributed.jacobian(model, Opened(x), client=client)
    with pytest.raises(ValueError, match="give a model, or build="):
        nj.distributed.jacobian(None, x, client=client)

    def none():
        raise ValueError

    monkeypatch.setattr(distributed, "default_client", none)
    with pytest.raises(ValueError, match="there is no Dask client"):
        nj.distributed.jacobian(model, x)


def test_it_cannot_be_pickled(J):
    with pytest.raises(nj.PicklingError, match="save the model and theta"):
        pickle.dumps(J)
    assert "5 tiles" in repr(J)
