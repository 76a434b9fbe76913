"""A fit on disk: what another process needs to go on with it, in a file that is whole at every moment.

The file is an ``.npz`` archive: arrays as they are, each with the archive's own checksum, and one JSON text. A new one
is written beside the old under another name, forced to the disk, and renamed over it, which the file system does at
once or not at all: whoever is killed in between leaves the old file whole.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netjac.errors import DataError, NetjacError
from netjac.optimize.control import State
from netjac.optimize.identity import Identity, differences
from netjac.optimize.losses import Vector
from netjac.optimize.monitor import History
from netjac.optimize.options import OptionError

FORMAT = 2
"""Version of the file's content."""

_RELATIVE, _ABSOLUTE = 1e-3, 1e-6
"""By how much the cost at the saved parameters may differ: relative to itself, and to the largest of the history. It
tells other data from the rounding of another machine, not more."""

_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError),
    RuntimeError,  # of zipfile, where a flag says that a member is encrypted
    *(ValueError, TypeError, LookupError, ArithmeticError, MemoryError),
)
"""What reading raises where bytes are missing or wrong."""


class CheckpointNotFoundError(NetjacError, FileNotFoundError):
    """There is no checkpoint under the name to resume from."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Which fit it is: what must agree for one process to go on where another ended.

    Attributes
    ----------
    identity
        See `netjac.optimize.identity`; a fit goes on only where all of it agrees.
    tolerances
        What may change: those of the tests that end the fit.
    """

    identity: Identity
    tolerances: Sequence[float | None] = ()

    def differences(self, saved: Identity) -> list[str]:
        """What a saved identity does not agree in with this one, in words."""
        return differences(saved, json.loads(json.dumps(self.identity)))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Where a fit stands.

    Attributes
    ----------
    theta : (M,) float64
        The last iterate.
    best : (M,) float64
        The point of least cost.
    cost : float
        There.
    history
        Up to the last iterate.
    state
        Of netjac's own solver; None for the others.
    """

    theta: Vector
    best: Vector
    cost: float
    history: History
    state: State | None = None

    def check_cost(self, cost: float) -> None:
        """Refuse to go on with other data than those of the snapshot.

        Parameters
        ----------
        cost
            At the best point, as it is now.

        Raises
        ------
        DataError
        """
        largest = float(np.max(np.abs(self.history.cost[np.isfinite(self.history.cost)]), initial=0.0))
        if not abs(cost - self.cost) <= _RELATIVE * abs(self.cost) + _ABSOLUTE * largest:
            raise DataError(
                "the checkpoint is of a fit to other data, or of another model. Parameters, targets, bounds and "
                f"options agree, but at its best parameters the cost was {self.cost:.6g}, and here it is {cost:.6g}: "
                "so x differs, or the network's layers (an activation, a constant), or the function from outside."
            )


def check_path(path: Any, name: str) -> Path | None:
    """The path of an option, or None.

    Raises
    ------
    OptionError, CheckpointNotFoundError
        If it is no path, or its folder does not exist.
    """
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"{name} must be a path, and is {path!r}.")
    made = Path(os.fspath(path))
    if not made.parent.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {str(made.parent)!r} for the {name} {made.name!r}: make it.")
    return made


def check_interval(seconds: Any) -> float:
    """Refuse an interval between checkpoints that is no number of seconds from 0 on."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float | np.number) or not 0 <= seconds < math.inf:
        raise OptionError(f"checkpoint_every must be a number of seconds, 0 for every iterate, and is {seconds!r}.")
    return float(seconds)


def save(path: Path, fit: Fit, snapshot: Snapshot) -> None:
    """Write a snapshot, so that the file is the old one or the new one whenever the process or the machine dies.

    Parameters
    ----------
    path
        Of the file; a file of this name and ``.partial`` behind it is written first.
    fit, snapshot
        What to write.

    Raises
    ------
    OSError
        If the disk is full, or the folder cannot be written to; the old file stays.
    """
    text = json.dumps({"format": FORMAT, "identity": fit.identity, "tolerances": list(fit.tolerances)})
    arrays: dict[str, Any] = {
        "about": np.frombuffer(text.encode(), np.uint8),
        "theta": snapshot.theta,
        "best": snapshot.best,
        "cost": np.float64(snapshot.cost),
        "history": snapshot.history.to_array(),
    }
    if snapshot.state is not None:
        arrays |= {f"state.{key}": value for key, value in asdict(snapshot.state).items() if value is not None}
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def load(path: Path, fit: Fit) -> Snapshot:
    """Read a snapshot of the same fit.

    Parameters
    ----------
    path
        Of a file that `save` wrote.
    fit
        What it must be of.

    Raises
    ------
    CheckpointNotFoundError
        A FileNotFoundError: there is no such file.
    DataError
        If it is damaged, no checkpoint at all, of a later format, or of another fit: the message says what differs.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
        about = json.loads(arrays["about"].tobytes())
        version = int(about["format"])
        if version == FORMAT:
            different = fit.differences(about["identity"])
            snapshot = _snapshot(arrays)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"there is no checkpoint {str(path)!r} to resume from: start the fit without resume=."
        ) from None
    except _DAMAGE as error:
        raise DataError(f"{str(path)!r} is damaged, or no checkpoint of a fit ({error}).") from error
    if version != FORMAT:
        raise DataError(f"the checkpoint {str(path)!r} has format {version}, and this netjac reads format {FORMAT}.")
    if different:
        lines = "\n  ".join(different)
        raise DataError(f"the checkpoint {str(path)!r} (there) is of another fit than this one (here):\n  {lines}")
    if snapshot.state is not None and about["tolerances"] != list(fit.tolerances):
        return replace(snapshot, state=replace(snapshot.state, met=None))  # other tests decide about its last step
    return snapshot


def _snapshot(arrays: Mapping[str, NDArray[Any]]) -> Snapshot:
    prefix = "state."
    stored: dict[str, Any] = {
        key.removeprefix(prefix): value if value.ndim else value.item()
        for key, value in arrays.items()
        if key.startswith(prefix)
    }
    state = State(**stored) if stored else None
    history = History.from_array(arrays["history"])
    return Snapshot(arrays["theta"], arrays["best"], arrays["cost"].item(), history, state)


def _sync_folder(folder: Path) -> None:
    """Force the renaming to the disk, where folders can be opened for that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
