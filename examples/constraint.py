r"""A calibration curve that must rise: a fit with constraints on the outputs and on their slopes.

A sensor answers a concentration x with a signal. For its calibration the signals y of n known concentrations are
measured, with noise of standard deviation σ, and a curve f(x; θ) is fitted; later it is read backwards, from a signal
to the concentration. So it has to rise everywhere; and no concentration gives no negative signal:

    minimise    ½ Σ ((f(x; θ) - y) / σ)² + ½ ‖θ / 2‖²
    subject to  f(0; θ) ≥ 0    and    ∂f/∂x (x_c; θ) ≥ s    at points x_c, with a small s > 0.

A network of 31 weights does neither by itself. `netjac.Objective` gives SciPy's optimisers the value, gradient and
Gauss–Newton Hessian, from a function in NumPy that knows no network; `netjac.OutputConstraint` gives them the limits
and their derivatives ∂f/∂θ and ∂²f/∂x∂θ.

    python examples/constraint.py          writes constraint.png
"""

from __future__ import annotations

import keras
import numpy as np
from matplotlib.figure import Figure

import netjac as nj

SIGMA, LEAST_SLOPE = 0.08, 0.02


def response(x):
    """The sensor behind the data: a Hill curve."""
    return x**4 / (0.3**4 + x**4)


def network():
    """1-10-1, with inputs scaled to where tanh bends."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Rescaling(6, offset=-3),
            keras.layers.Dense(10, "tanh", name="hidden"),
            keras.layers.Dense(1, name="signal"),
        ]
    )


def half_chi_squared(y):
    """The function from outside: outputs f (n, 1) → value, derivative (n, 1), second derivative (n, 1, 1)."""

    def external(f):
        r = (f - y) / SIGMA
        return 0.5 * np.sum(r**2), r / SIGMA, np.full((len(r), 1, 1), 1 / SIGMA**2)

    return external


def draw(x, y, fits, path):
    """Left: the curves. Right: their slopes."""
    fine = np.linspace(0, 1, 401)[:, None]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(fine, response(fine), color="black", linewidth=1.5, linestyle="--", label="true curve")
    left.plot(x, y, "o", color="0.6", markersize=4, label="measured")
    for (name, (f, slope)), color, style in zip(fits.items(), ("C0", "C3", "C1"), ("-", "-", ":"), strict=True):
        left.plot(fine, f, color=color, linestyle=style, linewidth=2, label=name)
        right.plot(fine, slope, color=color, linestyle=style, linewidth=2)
    bottom = right.get_ylim()[0]
    right.axhspan(bottom, 0, color="0.93", linewidth=0, zorder=0)
    right.text(1, bottom / 2, "falling: cannot be read backwards", color="0.4", ha="right", va="center")
    left.set(xlabel="concentration x", ylabel="signal", title="Calibration curve")
    right.set(xlabel="concentration x", ylabel="slope ∂f/∂x", title="Its slope", ylim=(bottom, None))
    left.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


def main():
    """Calibrate without and with constraints, and look at the curves between the points x_c too."""
    x = np.linspace(0, 1, 24)[:, None]
    y = response(x) + SIGMA * np.random.default_rng(2).normal(size=x.shape)
    x_c = np.linspace(0, 1, 61)[:, None]
    fine = np.linspace(0, 1, 401)[:, None]

    model = network()
    objective = nj.Objective(model, x, half_chi_squared(y), prior={"*": 2.0})
    limits = [
        nj.OutputConstraint(model, [[0.0]], lower=0, problem=objective),
        nj.OutputConstraint(model, x_c, lower=LEAST_SLOPE, of="input_jacobian", problem=objective),
    ]

    objective.minimize("BFGS")
    fits = {"unconstrained (BFGS)": (model(fine), nj.input_jacobian(model, fine))}
    start = objective.x0  # the present weights
    for method in ("SLSQP", "trust-constr"):
        objective.parameters.assign(start)
        objective.minimize(method, constraints=limits, options={"maxiter": 1000})
        fits[f"constrained ({method})"] = model(fine), nj.input_jacobian(model, fine)

    fits = {name: (np.ravel(f), np.ravel(slope)) for name, (f, slope) in fits.items()}
    for name, (f, slope) in fits.items():
        error = np.sqrt(np.mean((f - response(fine[:, 0])) ** 2))
        print(f"{name}: least slope {slope.min():.3f}, value at 0 {f[0]:.4f}, error of the curve {error:.4f}")
    draw(x, y, fits, "constraint.png")


if __name__ == "__main__":
    main()
