"""Networks whose Jacobians are saved: the model and the data are known again, and never mixed with others."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("zarr")

import zarr
from einops import rearrange

import netjac as nj
from netjac.store import chunks, subject
from netjac.store.places import partial_of
from netjac.tensorflow import model_checksum

L = keras.layers


@pytest.fixture(autouse=True)
def _memory_is_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jac.zarr"


def samples(*shape: int, n: int = 7, dtype: str = "float32") -> Any:
    return np.random.default_rng(3).normal(size=(n, *shape)).astype(dtype)


def mlp(activation: Any = "tanh", outputs: int = 3, **how: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [L.Dense(5, activation, **how), L.BatchNormalization(**how), L.Dense(outputs, **how)]
    return keras.Sequential([keras.Input((4,), dtype=how.get("dtype", "float32")), *layers])


def by_tape(model: Any, x: Any) -> np.ndarray:
    """The Jacobian (n, l, m), one sample and one output at a time."""
    cube = []
    for i in range(len(x)):
        with tf.GradientTape(persistent=True) as tape:
            parts = tf.unstack(tf.reshape(model(tf.constant(x[i : i + 1])), [-1]))
        rows = [tape.gradient(part, [v.value for v in model.trainable_variables]) for part in parts]
        cube.append([np.concatenate([np.asarray(tf.convert_to_tensor(g)).reshape(-1) for g in row]) for row in rows])
    return np.array(cube)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("memory", ["1 MiB", 4000])
@pytest.mark.parametrize("layout", ["factored", "(l m) n"])
def test_a_model_in_tiles(path, dtype, memory, layout):
    model, x = mlp(dtype=dtype), samples(4, dtype=dtype)
    nj.save(model, x, path, memory=memory, layout=layout)
    cube = by_tape(model, x)
    J = nj.open(path)
    assert J.dtype == dtype
    assert (len(list(J.tiles())) > 1) == (memory == 4000)
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(J.to_array("n l m"), cube, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(J.y, model(tf.constant(x)), rtol=tolerance, atol=tolerance)
    if layout != "factored":
        found = zarr.open_group(str(path), mode="r")["jacobian"][...]
        np.testing.assert_allclose(found, rearrange(cube, "n l m -> (l m) n"), rtol=tolerance, atol=tolerance)
    x0 = model.trainable_variables[0].path.split("/", 1)[-1]
    assert J.parameters.names[0].endswith(x0)


def test_many_outputs_and_little_memory(path):
    model, x = mlp(outputs=40), samples(4, n=2)
    nj.save(model, x, path, memory=4000)
    J = nj.open(path)
    assert all(samples.stop - samples.start == 1 for samples, _, _ in J.tiles())
    assert len(list(J.tiles())) > 2
    np.testing.assert_allclose(J.to_array("n l m"), by_tape(model, x), rtol=1e-5, atol=1e-5)


def test_images_tokens_and_several_outputs(path):
    keras.utils.set_random_seed(0)
    image, words = keras.Input((4, 4, 1), name="image"), keras.Input((5,), dtype="int32", name="words")
    a = L.Conv2D(2, 3, activation="tanh")(image)
    b = L.Embedding(30, 3)(words)
    joined = L.Concatenate()([L.Flatten()(a), L.Flatten()(b)])
    model = keras.Model(
        {"image": image, "words": words}, {"p": L.Dense(2)(joined), "q": L.Reshape((1, 1))(L.Dense(1)(joined))}
    )
    x = {"image": samples(4, 4, 1), "words": np.random.default_rng(0).integers(0, 30, (7, 5)).astype("int32")}
    nj.save(model, x, path, memory=20_000)
    J, whole = nj.open(path), nj.jacobian(model, x)
    assert len(list(J.tiles())) > 1
    np.testing.assert_allclose(J.to_array(), whole.to_array(), rtol=1e-5, atol=1e-6)
    assert J.outputs["q"].shape == (7, 1, 1)
    assert str(J.coverage) == str(whole.coverage)


def test_data_on_disk_are_read_in_parts(path, tmp_path, monkeypatch):
    x = samples(4, n=50)
    np.save(tmp_path / "x.npy", x)
    most = 0

    class Watched:
        """A memory map that notes how much is asked for at once."""

        shape, dtype = x.shape, x.dtype

        def __getitem__(self, part):
            nonlocal most
            found = np.load(tmp_path / "x.npy", mmap_mode="r")[part]
            most = max(most, len(found))
            return found

    monkeypatch.setattr("netjac.store.identity.PIECE", 10 * x[0].nbytes)
    model = mlp()
    nj.save(model, Watched(), path, memory=10_000)
    assert most <= 10
    np.testing.assert_allclose(nj.open(path).to_array("n l m"), by_tape(model, x), rtol=1e-5, atol=1e-5)
    computed = count_tiles(monkeypatch)
    for same in (x, np.load(tmp_path / "x.npy", mmap_mode="r")):  # however they are held
        nj.save(model, same, path)
    assert computed == []


def count_tiles(monkeypatch, stop_at: int | None = None) -> list[slice]:
    """Samples of the tiles that are computed from now on; Ctrl-C at one of them."""
    computed: list[slice] = []
    plain = subject.of_model

    def counting(*arguments):
        found = plain(*arguments)

        def rows(samples, outputs):
            if samples.start == stop_at:
                raise KeyboardInterrupt
            computed.append(samples)
            return found.rows(samples, outputs)

        return subject.Subject(found.n, found.like, found.tile, rows)

    monkeypatch.setattr("netjac.store.subject.of_model", counting)
    return computed


def interrupted(path, monkeypatch, model, x):
    """A save in tiles of two samples, stopped at the second."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * nj.jacobian(model, x[:1]).nbytes)
    with monkeypatch.context() as context:
        count_tiles(context, stop_at=2)
        with pytest.raises(KeyboardInterrupt):
            nj.save(model, x, path)


def test_a_model_is_known_again(path, monkeypatch):
    """Rebuilt as in a new process: its layers have other names, its numbers are the same."""
    x = samples(4)
    interrupted(path, monkeypatch, mlp(), x)
    computed = count_tiles(monkeypatch)
    nj.save(mlp(), x, path)
    assert computed == [slice(2, 4), slice(4, 6), slice(6, 7)]
    np.testing.assert_allclose(nj.open(path).to_array("n l m"), by_tape(mlp(), x), rtol=1e-5, atol=1e-5)


def weights(model):
    model.layers[0].kernel.assign(model.layers[0].kernel * 1.0001)


def statistics(model):
    model.layers[1].moving_mean.assign(model.layers[1].moving_mean + 0.01)


CHANGES = {
    "weights": lambda: (mlp(), weights),
    "statistics that are not trained": lambda: (mlp(), statistics),
    "architecture": lambda: (mlp("softsign"), lambda model: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_is_not_gone_on_with(path, monkeypatch, change):
    x = samples(4)
    interrupted(path, monkeypatch, mlp(), x)
    other, alter = CHANGES[change]()
    alter(other)
    with pytest.raises(nj.StoreError, match=r"begun with another Jacobian \(model changed\)"):
        nj.save(other, x, path)
    nj.save(other, x, path, overwrite=True)
    np.testing.assert_allclose(nj.open(path).to_array("n l m"), by_tape(other, x), rtol=1e-5, atol=1e-5)
    with pytest.raises(nj.StoreError, match=r"holds another Jacobian \(model changed\)"):
        nj.save(mlp(), x, path)


@pytest.mark.parametrize(
    "other", [samples(4) + 1e-6, samples(4)[::-1], samples(4)[:6], samples(4).astype("float64")], ids=range(4)
)
def test_data_that_changed_are_not_gone_on_with(path, monkeypatch, other):
    interrupted(path, monkeypatch, mlp(), samples(4))
    with pytest.raises(nj.StoreError, match=r"begun with another Jacobian \(data changed\)"):
        nj.save(mlp(), other, path)


def test_checksums_see_what_is_computed():
    x = samples(4)
    same = {model_checksum(mlp(), x) for _ in range(2)}
    assert len(same) == 1
    w = tf.Variable(samples(3, n=4))

    def branch(sign):
        class Net(tf.Module):
            def __init__(self):
                self.w = w

            def __call__(self, x):
                return tf.cond(tf.reduce_sum(self.w) > 0, lambda: tf.tanh(x @ self.w), lambda: sign * (x @ self.w))

        return Net()

    different = [mlp(), mlp("relu"), mlp(outputs=2), mlp(dtype="float64"), branch(1.0), branch(-1.0)]
    assert len({model_checksum(model, samples(4)) for model in different}) == len(different)
    assert model_checksum(branch(2.0), x) == model_checksum(branch(2.0), x)


def test_not_a_number_in_one_batch(path):
    class Root(tf.Module):
        def __init__(self):
            self.w = tf.Variable(np.full((1, 2), 0.5, "float32"))

        def __call__(self, x):
            return tf.sqrt(x @ self.w)  # no real root below zero

    x = np.arange(1, 31, dtype="float32")[:, None]
    x[17] = -1
    model = Root()
    with pytest.raises(nj.DataError, match=r"of the samples \d+ to \d+, from sample 17 to 17"):
        nj.save(model, x, path, memory=2000)
    assert partial_of(path).exists()
    with pytest.raises(nj.StoreError, match="never finished"):
        nj.open(path)
    x[17] = 1
    with pytest.raises(nj.StoreError, match="data changed"):
        nj.save(model, x, path, memory=2000)
    nj.save(model, x, path, memory=2000, overwrite=True)
    assert np.isfinite(nj.open(path).to_array()).all()


def test_inputs_that_are_not_numbers(path):
    model, x = mlp(), samples(4, n=20)
    x[11:13, 2] = np.nan
    with pytest.raises(nj.DataError, match=r"x is not finite in . of the samples .* from sample 11 to 1[12]:"):
        nj.save(model, x, path, memory=4000)
    with pytest.raises(nj.StoreError, match="never finished"):
        nj.open(path)


def test_batches_that_come_once_are_refused(path):
    with pytest.raises(nj.DtypeError, match="data of which it can read any part"):
        nj.save(mlp(), (samples(4) for _ in range(3)), path)
    assert not path.parent.exists() or not list(path.parent.iterdir())


def test_little_memory_is_an_error_that_says_how_much_works(path):
    with pytest.raises(nj.MemoryBudgetError) as found:
        nj.save(mlp(), samples(4), path, memory=100)
    assert not partial_of(path).exists()
    nj.save(mlp(), samples(4), path, memory=found.value.least)
    np.testing.assert_allclose(nj.open(path).to_array("n l m"), by_tape(mlp(), samples(4)), rtol=1e-5, atol=1e-5)


def test_no_samples(path):
    nj.save(mlp(), samples(4)[:0], path, layout="(l m) n")
    m = nj.parameters(mlp()).size
    assert zarr.open_group(str(path), mode="r")["jacobian"].shape == (3 * m, 0)
    assert nj.open(path).shape == (0, m)
