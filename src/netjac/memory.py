"""How much memory the process may still take: what the machine has free, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SHARE = 0.5
"""Part of what is free that a Jacobian takes when it is not told how much."""

SMALL = 64 << 20
"""What needs no more than this is not worth asking the system about."""

_ROOT = Path("/")


def default_budget(root: Path = _ROOT) -> int | None:
    """Half of `available`; None where the system does not tell."""
    free = available(root)
    return None if free is None else max(1, int(SHARE * free))


def available(root: Path = _ROOT) -> int | None:
    """Bytes that the process can still be given: the least of what the machine and each control group have left.

    Read from /proc and /sys below ``root`` as Linux has them (control groups of version 2 and 1); None elsewhere.

    Examples
    --------
    >>> free = available()
    >>> free is None or free > 0
    True
    """
    machine = _field(root / "proc/meminfo", "MemAvailable:")
    found = [*(() if machine is None else (machine * 1024,)), *_left(root)]
    return max(1, min(found)) if found else None


def _left(root: Path) -> Iterator[int]:
    """What each control group that the process is in has left, up to the outermost."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = top / path.strip("/")
        for group in (inner, *inner.parents):
            limit, used = _number(group / names[0]), _number(group / names[1])
            if limit is not None and used is not None:
                # Files that were read and can be forgotten count as used.
                yield limit - used + min(used, _field(group / "memory.stat", names[2]) or 0)
            if group == top:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None
