"""JAX: optimistix' Levenberg–Marquardt, and SciPy fed from ``jit(vmap(jacrev))``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix
from numpy.typing import NDArray

from benchmarks.fitting.frameworks import scipy_fit
from benchmarks.fitting.task import FitTask, Goal, PreparedFit, Watch, joined, split

PACKAGES = ("jax", "jaxlib", "optimistix", "lineax", "equinox", "numpy", "scipy")


class _Setting:
    """Data, start, and the residual of a flat θ (m,)."""

    def __init__(self, task: FitTask) -> None:
        jax.config.update("jax_enable_x64", task.dtype == "float64")
        x, y, self.start = task.load()
        self.x, self.y = jnp.asarray(x), jnp.asarray(y)
        self.theta = jnp.asarray(joined(self.start), task.dtype)

    def outputs(self, theta: Any, x: Any) -> Any:
        """(n, l)."""
        *hidden, last = self._layers(theta)
        for kernel, bias in hidden:
            x = jnp.tanh(x @ kernel + bias)
        return x @ last[0] + last[1]

    def _layers(self, theta: Any) -> list[tuple[Any, Any]]:
        values, first = [], 0
        for like in self.start.values():
            values.append(theta[first : first + like.size].reshape(like.shape))
            first += like.size
        return list(zip(values[::2], values[1::2], strict=True))

    def residual(self, theta: Any) -> Any:
        """(n·l,)."""
        return (self.outputs(theta, self.x) - self.y).ravel()

    def prepared(self, fit: Callable[[Goal], Watch], ended: Callable[[], NDArray[Any]]) -> PreparedFit:
        """With the outputs at the start, and ``ended`` the θ where the last fit did."""
        return PreparedFit(
            fit,
            lambda: np.asarray(self.outputs(self.theta, self.x)),
            lambda: split(np.asarray(ended()), self.start),
        )


class _ToGoal(optimistix.LevenbergMarquardt):  # type: ignore[misc]
    """Ends at a sum of squares or a number of steps, which come as ``args`` and are therefore not compiled in."""

    def terminate(self, fn: Any, y: Any, args: Any, options: Any, state: Any, tags: Any) -> Any:
        goal, steps = args
        known = state.num_accepted_steps > 0  # the residual of a point is there once it was accepted
        reached = known & (jnp.sum(state.f_info.residual**2) <= goal)
        return reached | (state.num_steps > steps), state.result


def levenberg(task: FitTask, normal: bool) -> PreparedFit:
    """`optimistix.LevenbergMarquardt`, with its own QR or with Cholesky of the normal equations.

    The Jacobian is made backwards where there are fewer residuals than parameters, else forwards, which is its default.
    """
    setting = _Setting(task)
    solver = _ToGoal(rtol=0.0, atol=0.0, linear_solver=lineax.Normal(lineax.Cholesky()) if normal else lineax.QR())
    rows, m = setting.y.size, setting.theta.size
    options = {"jac": "bwd" if rows < m else "fwd"}
    ended, a_step, compiled = setting.theta, 0.0, None

    @jax.jit
    def run(theta: Any, goal: Any, steps: Any) -> Any:
        solution = optimistix.least_squares(
            lambda t, _: setting.residual(t), solver, theta, (goal, steps), options, max_steps=10**6, throw=False
        )
        state = solution.state
        return solution.value, jnp.sum(state.f_info.residual**2), state.num_accepted_steps, state.num_steps

    def fit(goal: Goal) -> Watch:
        nonlocal ended, a_step, compiled
        watch = Watch(goal)
        if compiled is None:  # in the first fit, and not in what its step is found to take
            compiled = run.lower(setting.theta, goal.mse * rows, goal.steps).compile()
        # Everything runs in one compiled loop: time turns into a number of steps beforehand.
        limit = min(goal.steps, int(goal.seconds / a_step) + 1 if a_step else goal.steps)
        began = time.perf_counter()
        ended, squares, accepted, steps = jax.block_until_ready(compiled(setting.theta, goal.mse * rows, limit))
        a_step = (time.perf_counter() - began) / max(int(steps), 1)
        watch.steps, watch.evaluations = int(accepted) - 1, int(steps)  # the start is its first accepted step
        if not watch.over(float(squares) / rows):
            watch.ended = f"after {int(steps)} steps"
        return watch

    return setting.prepared(fit, lambda: ended)


def scipy(task: FitTask, method: str) -> PreparedFit:
    """`scipy.optimize.least_squares` with ``jit(vmap(jacrev))`` over samples."""
    setting = _Setting(task)
    ended = theta = np.asarray(setting.theta, np.float64)
    residual = jax.jit(setting.residual)

    @jax.jit
    def derivative(theta: Any) -> Any:
        one = jax.jacrev(lambda t, sample: setting.outputs(t, sample[None])[0])
        return jax.vmap(one, in_axes=(None, 0))(theta, setting.x).reshape(-1, theta.size)

    def fun(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(residual(theta.astype(task.dtype)), np.float64)

    def jac(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(derivative(theta.astype(task.dtype)), np.float64)

    def fit(goal: Goal) -> Watch:
        nonlocal ended
        ended, watch = scipy_fit.fit(fun, jac, theta, goal, method, task.bound)
        return watch

    return setting.prepared(fit, lambda: ended)


CONTENDERS: dict[str, Callable[[FitTask], PreparedFit]] = {
    "optimistix-qr": partial(levenberg, normal=False),
    "optimistix-cholesky": partial(levenberg, normal=True),
    **{f"scipy-{method}": partial(scipy, method=method) for method in ("trf", "dogbox", "lm")},
}
