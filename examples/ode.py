r"""A network as the unknown right-hand side of an ordinary differential equation.

A population y(t) grows by a law that nobody knows,

    dy/dt = f(y),    y(0) = y₀,

and was measured, with noise of standard deviation σ, while it grew or died out from several initial sizes. We look for
f as a network, f(y) ≈ f(y; θ), and for the initial sizes. The equation is integrated by SciPy, which knows no network:
it is handed the values F[j] = f(x[j]; θ) on a grid of sizes x (n,), and interpolates between them by cubic splines,

    f(y) = Σ_j b_j(y) F[j],

with b_j the spline that is 1 at x[j] and 0 at the other grid points. So the network's samples are the grid points, and
each measurement depends on all of them. How the solution depends on F and on y₀, its sensitivities, is a solution too,

    d/dt ∂y/∂F[j] = f'(y) ∂y/∂F[j] + b_j(y),    ∂y/∂F[j] = 0 at t = 0,
    d/dt ∂y/∂y₀   = f'(y) ∂y/∂y₀,               ∂y/∂y₀   = 1 at t = 0,

and is integrated along. netjac takes the residuals and these sensitivities, and carries them on to the weights:
∂r/∂θ = ∂r/∂F · ∂F/∂θ.

The data follow logistic growth with an Allee effect: below a threshold of 0.3 the population dies out. The fit sees
only the data, and has to find the threshold.

    python examples/ode.py          writes ode.png
"""

from __future__ import annotations

import keras
import numpy as np
from matplotlib.figure import Figure
from scipy.integrate import solve_ivp
from scipy.interpolate import make_interp_spline
from scipy.optimize import brentq

import netjac as nj

THRESHOLD, CAPACITY, SIGMA = 0.3, 1.0, 0.02


def growth(y):
    """The law behind the data."""
    return y * (1 - y / CAPACITY) * (y / THRESHOLD - 1)


def measure(t, y0, rng):
    """Noisy sizes (starts, times) of populations that begin with y0 (starts,)."""
    solution = solve_ivp(lambda _, y: growth(y), t[[0, -1]], y0, t_eval=t, rtol=1e-9, atol=1e-9)
    return solution.y + SIGMA * rng.normal(size=solution.y.shape)


class Simulator:
    """dy/dt = Σ b_j(y) F[j], integrated with its sensitivities. NumPy and SciPy only.

    Parameters
    ----------
    grid : (n,)
        Sizes x at which the right-hand side is given; beyond them it is constant.
    t : (times,)
    data : (starts, times)
    """

    def __init__(self, grid, t, data):
        self.grid, self.t, self.data = grid, t, data
        self.basis = make_interp_spline(grid, np.eye(len(grid)))  # y ↦ b(y) (n,)
        self.slopes = self.basis.derivative()

    def integrate(self, F, y0):
        """Sizes (starts, times), and their derivatives over F, (starts, times, n), and y0, (starts, times)."""
        shape = len(y0), len(F) + 2  # for each start: y, ∂y/∂F, ∂y/∂y₀

        def rate(_, flat):
            y, sensitivity = flat.reshape(shape)[:, 0], flat.reshape(shape)[:, 1:]
            inside = np.clip(y, self.grid[0], self.grid[-1])
            b = self.basis(inside)
            slope = np.where(y == inside, self.slopes(inside) @ F, 0.0)
            out = np.empty(shape)
            out[:, 0] = b @ F
            out[:, 1:] = slope[:, None] * sensitivity
            out[:, 1:-1] += b
            return out.reshape(-1)

        begin = np.zeros(shape)
        begin[:, 0], begin[:, -1] = y0, 1.0
        solution = solve_ivp(rate, self.t[[0, -1]], begin.reshape(-1), "DOP853", self.t, rtol=1e-10, atol=1e-12)
        if not solution.success:
            raise ArithmeticError(solution.message)
        states = solution.y.reshape(*shape, -1).transpose(0, 2, 1)
        return states[:, :, 0], states[:, :, 1:-1], states[:, :, -1]

    def residual(self, outputs, extra):
        """(y − data) / σ, and its derivatives over the outputs F (n, 1) and over the extra parameter y0."""
        y, dy_dF, dy_dy0 = self.integrate(outputs[:, 0], extra["y0"])
        starts, times, n = dy_dF.shape
        by_start = np.eye(starts)[:, None, :] * dy_dy0[:, :, None]  # a start concerns its own curve
        return (
            (y - self.data) / SIGMA,
            dy_dF.reshape(starts * times, n) / SIGMA,
            {"y0": by_start / SIGMA},
        )


def network():
    """The unknown law: 1-12-1, a float32 model as Keras makes it; the fit evaluates it in float64."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Rescaling(3, offset=-1.7),  # sizes to about ±2, where tanh bends
            keras.layers.Dense(12, "tanh", name="hidden"),
            keras.layers.Dense(1, name="rate"),
        ]
    )


def differences(t, data):
    """Sizes and growth (starts*(times - 1),) between one measurement and the next."""
    return ((data[:, 1:] + data[:, :-1]) / 2).reshape(-1), (np.diff(data) / np.diff(t)).reshape(-1)


def error(simulator, F):
    """Of f, relative to the true law, in the mean square between 0 and the capacity."""
    y = np.linspace(0, CAPACITY, 200)
    return np.linalg.norm(simulator.basis(y) @ F - growth(y)) / np.linalg.norm(growth(y))


def draw(simulator, F, y0, path):
    """Left: data and fitted curves. Right: the recovered law, the true one, and what differences of the data say."""
    t, data, x = simulator.t, simulator.data, simulator.grid
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    fine = np.linspace(t[0], t[-1], 200)
    curves = Simulator(x, fine, data).integrate(F, y0)[0]
    for i, (points, curve) in enumerate(zip(data, curves, strict=True)):
        left.plot(t, points, ".", color=f"C{i}", markersize=5)
        left.plot(fine, curve, color=f"C{i}", linewidth=1.5)
    left.axhline(THRESHOLD, color="0.6", linewidth=0.8, linestyle=":")
    left.text(t[-1], THRESHOLD, "true threshold", color="0.4", fontsize="small", ha="right", va="bottom")
    left.set(xlabel="time t", ylabel="size y", title="Measured (dots) and fitted (lines)")

    y = np.linspace(data.min(), data.max(), 200)
    right.plot(*differences(t, data), ".", color="0.75", markersize=4, label="differences of the data")
    right.plot(y, growth(y), color="black", linewidth=1.5, linestyle="--", label="true law")
    right.plot(y, simulator.basis(y) @ F, color="C3", linewidth=2, label="recovered")
    right.axhline(0, color="0.6", linewidth=0.8)
    right.set(xlabel="size y", ylabel="growth f(y)", title="Right-hand side")
    right.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=120)


def main():
    """Measure, fit with two solvers, compare with the truth."""
    t = np.linspace(0, 8, 25)
    data = measure(t, np.array([0.1, 0.2, 0.27, 0.33, 0.4, 0.6, 1.2]), np.random.default_rng(1))
    simulator = Simulator(np.linspace(-0.1, 1.3, 21), t, data)
    x = simulator.grid[:, None]
    prior = {"*/kernel": 1.0, "*/bias": 1.0}  # standard deviations of the weights, around 0

    for method in ("trf", "netjac"):
        # A start: f(y) from differences of the data, which needs no integration, and is rough.
        model = network()
        y, quotients = differences(t, data)
        weights = np.full(quotients.size, (t[1] - t[0]) ** 2 / (2 * SIGMA**2))  # 1 / variance
        nj.LeastSquares(model, y[:, None], quotients, weights=weights, prior=prior).solve(method, ftol=1e-3)
        rough = np.asarray(model(x), np.float64)[:, 0]

        # The fit. Its cost is half a χ²: a change of 0.03 % means nothing.
        problem = nj.LeastSquares(model, x, residual=simulator.residual, extra={"y0": data[:, 0]}, prior=prior)
        result = problem.solve(method, ftol=3e-4, x_scale=1.0)
        print(f"{method}: cost {result.history.cost[0]:.1f} to {result.cost:.1f}, {result.nfev} evaluations")

    F = np.asarray(model(x), np.float64)[:, 0]
    threshold = brentq(lambda y: simulator.basis(y) @ F, 0.15, 0.6)
    print(f"{data.size} measurements, {problem.parameters.size} parameters")
    before, after = error(simulator, rough), error(simulator, F)
    print(f"relative error of the law: {before:.3f} from differences, {after:.3f} fitted")
    print(f"threshold: {threshold:.3f} (true {THRESHOLD})")
    draw(simulator, F, problem.extra["y0"], "ode.png")


if __name__ == "__main__":
    main()
