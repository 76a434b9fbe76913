"""Peak memory of one piece of work, from what the Linux kernel counts; None where it does not tell."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS = Path("/proc/self/status")


def _field(path: Path, name: str) -> int | None:
    """A field of a /proc status file that is given in kB, in bytes."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def resident(pid: int | str = "self") -> int | None:
    """Bytes of a process that are in memory now."""
    return _field(Path(f"/proc/{pid}/status"), "VmRSS")


def available() -> int | None:
    """Bytes the machine could still give."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def total() -> int | None:
    """Bytes the machine has."""
    return _field(Path("/proc/meminfo"), "MemTotal")


class PeakMemory:
    """Growth of the resident set between entering and its highest point before leaving.

    Memory that the allocator keeps from earlier work is given back first, so that using it again counts. ``files`` is
    the growth of what is mapped from files: the system takes such pages back when it needs them.
    """

    growth: int | None = None
    files: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present size
        except (OSError, AttributeError):
            self._before = self._files = None
            return self
        self._before, self._files = resident(), _field(_STATUS, "RssFile")
        return self

    def __exit__(self, *_: object) -> None:
        peak = _field(_STATUS, "VmHWM")
        if self._before is not None and peak is not None:
            self.growth = max(0, peak - self._before)
        files = _field(_STATUS, "RssFile")
        if self._files is not None and files is not None:
            self.files = max(0, files - self._files)
