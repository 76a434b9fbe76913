"""What is free, from made-up /proc and /sys: the least of the machine and of every control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from netjac import memory

GIB = 1 << 30


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": f"MemTotal: {99 << 20} kB\nMemAvailable:   {8 << 20} kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MACHINE, 8 * GIB),
        (MACHINE | {"proc/self/cgroup": "0::/a/b\n"}, 8 * GIB),
        (  # version 2: the group itself has no limit, the one around it has
            MACHINE
            | {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
            },
            3 * GIB // 2,
        ),
        (  # version 2 within a namespace: the files of the group lie at the top
            MACHINE
            | {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{GIB}\n",
            },
            GIB,
        ),
        (  # version 1
            MACHINE
            | {
                "proc/self/cgroup": "3:cpu:/x\n2:memory:/a\n0::/\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{5 * GIB}\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{2 * GIB}\n",
            },
            3 * GIB,
        ),
        (  # more than the machine has
            MACHINE
            | {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{90 * GIB}\n",
                "sys/fs/cgroup/memory.current": "0\n",
            },
            8 * GIB,
        ),
        (  # nothing left is still an amount
            MACHINE
            | {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "4096\n",
                "sys/fs/cgroup/memory.current": "8192\n",
            },
            1,
        ),
    ],
    ids=["unknown", "machine", "no limit", "outer group", "namespace", "version 1", "more than there is", "none left"],
)
def test_what_is_free(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    root = system(tmp_path, files)
    assert memory.available(root) == expected
    half = memory.default_budget(root)
    assert half == (None if expected is None else max(1, expected // 2))
