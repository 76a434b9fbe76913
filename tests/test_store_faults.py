"""What can go wrong with a Jacobian on disk, each fault brought about: what happens, and what is left."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zarr")

import zarr
from zarr.storage import LocalStore

import netjac as nj
from netjac.store import manifest
from netjac.store.places import partial_of
from stored import explicit, factored, tiled

TESTS = Path(__file__).parent


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jac.zarr"


def contents(path):
    """All files of a store with their bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def is_not_there(path):
    """No reader takes for whole what is not: neither netjac nor Zarr finds anything at its place."""
    with pytest.raises(nj.StoreError, match="was never finished"):
        nj.open(path)
    with pytest.raises(FileNotFoundError):
        zarr.open_group(str(path), mode="r")
    return True


def run(code, *arguments, check=True, **how):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        **how,
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


# ---- kill -9

EVERYWHERE = """
import os, signal, sys, shutil
from pathlib import Path
import netjac as nj, netjac.store.files
from netjac.store import places
from stored import explicit, factored, tiled

folder, layout, replacing = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
path = folder / "jac.zarr"
J, before = factored(5), explicit(2, 2, 3)
os.fsync = lambda file: None
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree"}
count = last = 0

def hook(event, arguments):  # called before each operation on a file
    global count
    if event in EVENTS and str(arguments[0]).startswith(str(path)):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)

def save():
    nj.save(tiled(J, 2), path, layout=layout, overwrite=replacing)

def apart(work, kill_at=0):  # Zarr's thread does not survive a fork, so it must not run before one
    global count, last
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count, last = 0, kill_at
    try:
        work()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os.write(counted[1], f"{count}\\n".encode())
    os._exit(0)

def fresh():
    for name in os.listdir(folder):
        shutil.rmtree(folder / name)
    if replacing:
        assert apart(lambda: nj.save(before, path)) == 0

def files():
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

def old_or_new():  # what can be opened is whole
    try:
        found = nj.open(path)
    except nj.StoreError:
        assert not path.exists()
        return
    wanted = J if found.n == J.n else before
    assert replacing or found.n == J.n
    assert (found.to_array() == wanted.to_array()).all()

counted = os.pipe()
fresh()
assert apart(save) == 0
total, whole = int(os.read(counted[0], 100).split()[-1]), files()
stops = range(1, total + 1, int(sys.argv[4]))
for stop in stops:
    fresh()
    ended = apart(save, stop)
    assert ended == signal.SIGKILL or (ended == 0 and stop > total - 9), stop  # Zarr's threads may need one less
    assert apart(old_or_new) == 0, stop
    apart(save, 1 + stop * 7 % total)  # and once more on the way
    assert apart(old_or_new) == 0, stop
    assert apart(save) == 0, stop
    left = files()
    assert left.keys() == whole.keys(), (stop, left.keys() ^ whole.keys())
    assert left == whole, (stop, [k for k in left if left[k] != whole[k]])
print(len(stops))
"""


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("layout", "replacing"), [("factored", False), ("(l m) n", False), ("n l m", True)])
def test_killed_before_any_operation_on_a_file(tmp_path, layout, replacing, every):
    """Killed, killed again while it is resumed, resumed: file for file what an undisturbed save leaves."""
    done = run(EVERYWHERE, tmp_path, layout, replacing, every)
    assert int(done.stdout) >= 80 // every


def test_killed_from_outside_it_goes_on_where_it_was(path):
    code = """
    import sys, time
    import netjac as nj
    from stored import factored, tiled
    nj.save(tiled(factored(40), 1, before=lambda samples: time.sleep(0.05)), sys.argv[1])
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], env=os.environ | {"PYTHONPATH": str(TESTS)}
    )
    journal = partial_of(path) / manifest.JOURNAL
    while child.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 6):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert is_not_there(path)
    lines = journal.read_bytes().count(b"\n") - 2  # two lines are of arrays, not of tiles
    computed = []
    nj.save(tiled(factored(40), 1, before=lambda samples: computed.extend(samples)), path)
    assert set(range(lines, 40)) <= set(computed)  # the first and the last are looked at to know the Jacobian again
    assert set(computed) <= {0, *range(lines, 40)}
    np.testing.assert_array_equal(nj.open(path).to_array(), factored(40).to_array())


def test_a_line_of_the_journal_that_was_cut_short(path):
    J = factored(6)
    with pytest.raises(KeyboardInterrupt):
        nj.save(tiled(J, 2, before=interrupt_at(2)), path)
    journal = partial_of(path) / manifest.JOURNAL
    good = journal.read_bytes()
    for cut in range(1, len(good.splitlines(keepends=True)[-1])):
        journal.write_bytes(good[:-cut])
        with manifest.Journal(journal) as opened:
            assert len(opened.entries) == good.count(b"\n") - 1
        assert journal.read_bytes() == b"".join(good.splitlines(keepends=True)[:-1])
    nj.save(tiled(J, 2), path)
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())


@pytest.mark.parametrize("lose", [Path.unlink, lambda file: file.write_bytes(b"")], ids=["gone", "empty"])
def test_chunks_that_never_reached_the_disk_are_written_again(path, lose):
    """After a power failure, say: noted, and gone."""
    J = factored(9)
    with pytest.raises(KeyboardInterrupt):
        nj.save(tiled(J, 2, before=interrupt_at(4)), path)
    lost = sorted(p for p in (partial_of(path) / "factors").rglob("c/**/*") if p.is_file())
    assert len(lost) == 4
    lose(lost[0])
    nj.save(tiled(J, 2), path)
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())


@pytest.mark.parametrize("name", ["y/zarr.json", "factors/0/block0_A/zarr.json"])
def test_arrays_that_never_reached_the_disk_are_made_again(path, name):
    J = factored(6)
    with pytest.raises(KeyboardInterrupt):
        nj.save(tiled(J, 2, before=interrupt_at(2)), path)
    (partial_of(path) / name).unlink()
    nj.save(tiled(J, 2), path)
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())


def test_two_at_once(path):
    with pytest.raises(KeyboardInterrupt):
        nj.save(tiled(factored(6), 2, before=interrupt_at(2)), path)
    with (
        manifest.Journal(partial_of(path) / manifest.JOURNAL),
        pytest.raises(nj.StoreError, match="is being written by another process"),
    ):
        nj.save(tiled(factored(6), 2), path)
    nj.save(tiled(factored(6), 2), path)


# ---- Ctrl-C


def interrupt_at(sample):
    """Ctrl-C where the tile that holds ``sample`` is computed; not the first or last, which are looked at before."""

    def before(samples):
        if sample in samples:
            signal.raise_signal(signal.SIGINT)

    return before


@pytest.mark.parametrize("layout", ["factored", "(l m) n"])
def test_interrupted(path, layout):
    J = explicit(n=9, l=2, m=3)
    with pytest.raises(KeyboardInterrupt) as stopped:
        nj.save(tiled(J, 2, before=interrupt_at(4)), path, layout=layout)
    assert stopped.value.__notes__ == [f"{partial_of(path)} keeps 2 of 5 tiles; the same call goes on after them."]
    assert is_not_there(path)
    nj.save(tiled(J, 2), path, layout=layout)
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())
    assert not partial_of(path).exists()


def test_resumed_with_other_memory_its_chunks_stay(path):
    J = explicit(n=9, l=2, m=3)
    source = tiled(J, 2, before=interrupt_at(4))
    with pytest.raises(KeyboardInterrupt):
        nj.save(source, path, layout="n l m")
    nj.save(tiled(J, 2), path, layout="n l m", memory=4 * 24)
    assert zarr.open_group(str(path), mode="r")["jacobian"].chunks == (2, 2, 3)


# ---- disk full


@pytest.mark.parametrize("after", [0, 1, 4, 7, 11])
def test_disk_full(path, monkeypatch, after):
    J = factored(9)
    room = [after]
    plain = LocalStore.set

    async def full(self, key, value):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), key)
        room[0] -= 1
        await plain(self, key, value)

    monkeypatch.setattr(LocalStore, "set", full)
    with pytest.raises(OSError, match="No space left on device") as stopped:
        nj.save(tiled(J, 2), path)
    assert stopped.value.errno == errno.ENOSPC
    assert after == 0 or "the same call goes on after them" in stopped.value.__notes__[0]
    assert is_not_there(path)
    room[0] = 1000
    nj.save(tiled(J, 2), path)
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())


def test_a_disk_that_takes_no_more_bytes(path):
    """The system's own error: a file may not grow beyond a limit, and chunks do."""
    code = """
    import errno, resource, sys
    import netjac as nj
    from stored import explicit, tiled
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    J = explicit(n=8, l=2, m=1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        nj.save(tiled(J, 4), sys.argv[1], layout="n l m")
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        print(error.__notes__[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        nj.open(sys.argv[1])
    except nj.StoreError:
        nj.save(tiled(J, 4), sys.argv[1], layout="n l m")
        assert (nj.open(sys.argv[1]).to_array() == J.to_array()).all()
        print("and then whole")
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    lines = run(code, path).stdout.splitlines()
    assert lines == [f"{partial_of(path)} keeps 0 of 2 tiles; the same call goes on after them.", "and then whole"]


# ---- what was right on disk, and is no more


def chunk_files(path):
    return sorted(p for p in path.rglob("c/**/*") if p.is_file())


@pytest.mark.parametrize("layout", ["factored", "(l m) n"])
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("damage", ["a bit", "cut", "missing", "another's"])
def test_a_damaged_chunk(path, layout, compression, damage):
    J = factored(6)
    nj.save(tiled(J, 2), path, layout=layout, compression=compression)
    files = chunk_files(path)
    assert len(files) == (9 if layout == "factored" else 6)
    for i, file in enumerate(files):
        good = file.read_bytes()
        if damage == "a bit":
            bad = bytearray(good)
            bad[len(bad) // 2] ^= 4
            file.write_bytes(bad)
        elif damage == "cut":
            file.write_bytes(good[:-1])
        elif damage == "missing":
            file.unlink()
        else:  # a whole chunk, in another's place
            file.write_bytes(files[(i + 1) % len(files)].read_bytes())
        with pytest.raises(nj.StoreError) as found:
            nj.open(path).to_array()
        assert repr(str(file.relative_to(path))) in str(found.value)
        if damage == "a bit":  # and readers of Zarr see it too
            with pytest.raises((ValueError, RuntimeError)):
                zarr.open_group(str(path), mode="r")[str(file.relative_to(path)).split("/c/")[0]][...]
        file.write_bytes(good)
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())


def test_other_tiles_are_still_read(path):
    J = factored(6)
    nj.save(tiled(J, 2), path)
    bad = path / "factors/0/block0_A/c/2/0/0/0"
    bad.write_bytes(bytes(bad.stat().st_size))
    S = nj.open(path)
    np.testing.assert_array_equal(S[:4].to_array(), J[:4].to_array())
    for verb in (lambda: S[4:], S.gram, S.normal, S.column_norms, lambda: S @ np.ones(S.m), lambda: S.T @ np.ones(12)):
        with pytest.raises(nj.StoreError, match="block0_A/c/2/0/0/0"):
            verb()


def test_a_truncated_manifest(path):
    J = factored(4)
    nj.save(J, path)
    file = path / manifest.MANIFEST
    good = file.read_bytes()
    for bad in (b"", good[:1], good[:-1], good[: len(good) // 2], good.replace(b'"n": 4', b'"n": 3'), b"[]", b"null"):
        assert bad != good
        file.write_bytes(bad)
        for call in (lambda: nj.open(path), lambda: nj.save(J, path)):
            with pytest.raises(nj.StoreError, match="truncated or damaged"):
                call()
    file.unlink()
    with pytest.raises(nj.StoreError, match=r"no store of netjac\.save"):
        nj.open(path)
    file.write_bytes(b"")
    nj.save(J, path, overwrite=True)
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())


def test_a_truncated_start(path):
    J = factored(6)
    with pytest.raises(KeyboardInterrupt):
        nj.save(tiled(J, 2, before=interrupt_at(2)), path)
    start = partial_of(path) / manifest.START
    start.write_bytes(start.read_bytes()[:-5])
    with pytest.raises(nj.StoreError, match="truncated or damaged"):
        nj.save(tiled(J, 2), path)
    nj.save(tiled(J, 2), path, overwrite=True)
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())


def test_a_later_format(path, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", 2)
    nj.save(factored(2), path)
    monkeypatch.undo()
    with pytest.raises(nj.StoreError, match="is of format 2, and this netjac reads format 1"):
        nj.open(path)


# ---- something else than before


def test_what_changed_between_runs_is_not_mixed(path):
    first, second = explicit(n=9, l=2, m=3), explicit(n=9, l=2, m=3)
    second.blocks[0].values[...] *= 2
    with pytest.raises(KeyboardInterrupt):
        nj.save(tiled(first, 2, before=interrupt_at(4)), path)
    before = contents(partial_of(path))
    with pytest.raises(nj.StoreError, match=r"begun with another Jacobian \(jacobian changed\).*overwrite=True begins"):
        nj.save(tiled(second, 2), path)
    with pytest.raises(nj.StoreError, match="layout 'factored' instead of 'n l m'"):
        nj.save(tiled(first, 2), path, layout="n l m")
    assert contents(partial_of(path)) == before
    nj.save(tiled(second, 2), path, overwrite=True)
    np.testing.assert_array_equal(nj.open(path).to_array(), second.to_array())


def test_overwriting_goes_on_with_its_own_start(path):
    J, computed = explicit(n=9, l=2, m=3), []
    nj.save(factored(2), path)
    with pytest.raises(KeyboardInterrupt):
        nj.save(tiled(J, 2, before=interrupt_at(4)), path, overwrite=True)
    np.testing.assert_array_equal(nj.open(path).to_array(), factored(2).to_array())  # the old one, until then
    nj.save(tiled(J, 2, before=lambda samples: computed.append(int(samples[0]))), path, overwrite=True)
    assert computed == [0, 8, 4, 6, 8]  # the first two to know the Jacobian again
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())


# ---- not a number


@pytest.mark.parametrize("layout", ["factored", "(l m) n"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_a_number_in_one_batch(path, layout, value):
    def change(samples, blocks):
        if 5 in samples:
            values = blocks[0].values.copy()
            values[samples == 5, 1, 2] = value
            blocks = (type(blocks[0])(values, blocks[0].placement),)
        return blocks

    J = explicit(n=12, l=2, m=3)
    with pytest.raises(nj.DataError, match=r"1 of the samples 4 to 7, from sample 5 to 5.*the store is not complete"):
        nj.save(tiled(J, 4, change=change), path, layout=layout)
    assert is_not_there(path)
    nj.save(tiled(J, 4), path, layout=layout)  # it was the machine: what is sound is kept
    np.testing.assert_array_equal(nj.open(path).to_array(), J.to_array())


def test_outputs_that_are_not_numbers(path):
    J = explicit(n=6, l=2, m=3)
    y = J.y.copy()
    y[3:5] = np.nan
    bad = nj.Jacobian(J.parameters, J.output_space, y, J.blocks, J.coverage)
    with pytest.raises(nj.DataError, match="y is not finite in 2 of the samples 0 to 5, from sample 3 to 4"):
        nj.save(bad, path)
    assert is_not_there(path)


# ---- no Zarr


def test_without_zarr_the_message_says_what_to_install(path):
    code = """
    import sys
    sys.modules["zarr"] = None
    import netjac as nj
    from netjac.examples import linear_layer
    for call in (lambda: nj.save(linear_layer(), sys.argv[1]), lambda: nj.open(sys.argv[1])):
        try:
            call()
        except ImportError as error:
            print(error)
    """
    assert run(code, path).stdout.count('pip install "netjac[zarr]"') == 2
    assert not path.parent.exists() or not list(path.parent.iterdir())
