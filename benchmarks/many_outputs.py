"""Peak memory of Jacobians of networks with many outputs, held whole and within a budget.

    python -m benchmarks.many_outputs [--memory "64 MiB"] [--only NETWORK]

Each row is measured in a process of its own, after calls with the least memory that works, which compile. The figures
are the growth of the resident set to its peak, and the time, of computing the factors and using them once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.memory import PeakMemory

VERBS = ("J.T @ u", "column_norms", "to_array", "scaled")
MEBIBYTE = 1 << 20


def classifier() -> tuple[Any, tuple[int, ...]]:
    import keras

    layers = [keras.layers.Dense(256, "tanh"), keras.layers.Dense(1000)]
    return keras.Sequential([keras.Input((64,)), *layers]), (64, 64)


def segmentation() -> tuple[Any, tuple[int, ...]]:
    import keras

    layers = [keras.layers.Conv2D(c, 3, padding="same", activation=a) for c, a in ((8, "tanh"), (8, "tanh"), (1, None))]
    return keras.Sequential([keras.Input((32, 32, 3)), *layers]), (16, 32, 32, 3)


NETWORKS: dict[str, Callable[[], tuple[Any, tuple[int, ...]]]] = {
    "64-256-1000, n = 64": classifier,
    "convolutions to 32 × 32 × 1, n = 16": segmentation,
}


def measure(network: str, verb: str, memory: str | None) -> dict[str, Any]:
    """Peak growth and seconds of one verb."""
    import numpy as np

    import netjac as nj
    from netjac.tensorflow import extractor

    extractor.PROBE_BYTES = 1  # what the probe takes would be there to be used again
    model, shape = NETWORKS[network]()
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    try:
        nj.jacobian(model, x[:1], memory=1)
    except nj.MemoryBudgetError as error:
        least = error.least
    first = nj.jacobian(model, x[:1], memory=least)
    name = model.layers[-1].name + "/bias"
    out = np.ones((len(x) * first.l, first.columns(name).m), np.float32)  # of memory that is there already
    u = rng.normal(size=(len(x), first.l)).astype(np.float32)

    def work(x: Any, memory: str | int | None) -> Any:
        J = nj.jacobian(model, x, memory=memory)
        rows = slice(0, J.shape[0])
        if verb == "J.T @ u":
            J.T @ u[: len(x)].reshape(-1)
        elif verb == "column_norms":
            J.column_norms()
        elif verb == "to_array":
            J.columns(name).to_array(out=out[rows])
        else:
            J.scaled(u[: len(x), None]).T @ np.ones(len(x), np.float32)
        return J

    work(x[:1], least)
    with PeakMemory() as peak:
        start = time.perf_counter()
        J = work(x, memory)
        seconds = time.perf_counter() - start
    return {"MiB": None if peak.growth is None else peak.growth / MEBIBYTE, "s": seconds, "J": repr(J)}


def main() -> None:
    """Measure every row in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="64 MiB")
    parser.add_argument("--only", default="", help="part of a network's name")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(measure(*json.loads(given.row))))
        return
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    print(f"| network | verb | whole, MiB | whole, s | within {given.memory}, MiB | within {given.memory}, s |")
    print("|---|---|---|---|---|---|")
    for network in NETWORKS:
        tiled = ""
        for verb in VERBS if given.only in network else ():
            cells = []
            for memory in (None, given.memory):
                row = json.dumps([network, verb, memory])
                command = [sys.executable, "-m", "benchmarks.many_outputs", "--row", row]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                cells += ["?" if found["MiB"] is None else f"{found['MiB']:.0f}", f"{found['s']:.2f}"]
                tiled = found["J"]
            print(f"| {network} | `{verb}` | {' | '.join(cells)} |", flush=True)
        if tiled:
            print(f"\n{tiled}\n", flush=True)


if __name__ == "__main__":
    main()
