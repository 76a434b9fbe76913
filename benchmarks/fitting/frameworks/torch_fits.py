"""PyTorch: torch-levenberg-marquardt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch_levenberg_marquardt.training import LevenbergMarquardtModule

from benchmarks.fitting.task import FitTask, Goal, PreparedFit, Watch

PACKAGES = ("torch", "torch-levenberg-marquardt", "numpy")


def levenberg(task: FitTask, solve: str) -> PreparedFit:
    """``LevenbergMarquardtModule.training_step`` on the whole batch; ``solve`` is its ``solve_method``."""
    torch.set_num_threads(task.threads)
    x, y, start = task.load()
    layers: list[nn.Module] = []
    for before, after in pairwise(task.sizes):
        layers += [nn.Linear(before, after, dtype=getattr(torch, task.dtype)), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    training = LevenbergMarquardtModule(model, solve_method=solve)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    theta = torch.from_numpy(np.concatenate([np.ascontiguousarray(value.T).ravel() for value in start.values()]))

    def begin() -> None:
        training.flat_params.copy_(theta)  # the model's parameters are views of it
        training.backup_parameters()
        training.reset()

    def outputs() -> NDArray[Any]:
        begin()
        with torch.no_grad():
            return model(inputs).numpy()

    def fit(goal: Goal) -> Watch:
        begin()
        watch = Watch(goal)
        stopped = False
        while not (watch.ended or stopped):
            _, loss, stopped, logs = training.training_step(inputs, targets)
            watch.steps += 1
            watch.evaluations += 1 + int(logs["attempts"])
            watch.over(float(loss))
        watch.ended = watch.ended or "stopped by itself: its damping reached the maximum"
        return watch

    def weights() -> dict[str, NDArray[Any]]:
        values = [parameter.detach().numpy().T for parameter in model.parameters()]
        return dict(zip(start, values, strict=True))

    return PreparedFit(fit, outputs, weights)


CONTENDERS: dict[str, Callable[[FitTask], PreparedFit]] = {
    "qr": partial(levenberg, solve="qr"),
    "cholesky": partial(levenberg, solve="cholesky"),
}
