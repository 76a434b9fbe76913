"""A network that may not be negative, fitted by Ipopt through cyipopt.

cyipopt needs the Ipopt library beside it; conda installs both:

    conda install -c conda-forge cyipopt
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import netjac as nj


class Problem:
    """What cyipopt asks for: value, gradient, constraints, and their derivative as one dense array."""

    def __init__(self, objective: nj.Objective, constraint: nj.OutputConstraint) -> None:
        self.fit, self.limits = objective, constraint

    def objective(self, theta: np.ndarray) -> float:
        """The value."""
        return self.fit.fun(theta)

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        """Its gradient (M,)."""
        return self.fit.grad(theta)

    def constraints(self, theta: np.ndarray) -> np.ndarray:
        """What is limited (rows,)."""
        return self.limits.fun(theta)

    def jacobian(self, theta: np.ndarray) -> np.ndarray:
        """Its derivative (rows, M), row by row."""
        return self.limits.jac(theta).reshape(-1)


def problem() -> Problem:
    """sin(3 x), to be fitted by a network whose outputs stay at or above zero."""
    keras.utils.set_random_seed(0)
    x = np.linspace(-1, 1, 40)[:, None]
    y = np.sin(3 * x)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])

    def squares(outputs: np.ndarray) -> tuple[float, np.ndarray]:
        r = outputs - y
        return 0.5 * float(np.sum(r**2)), r

    objective = nj.Objective(model, x, squares)
    return Problem(objective, nj.OutputConstraint(model, x, 0, None, problem=objective))


def main() -> None:
    """Fit, and write the weights into the network."""
    try:
        import cyipopt
    except ImportError:
        sys.exit("this example needs cyipopt and the Ipopt library: conda install -c conda-forge cyipopt")

    given = problem()
    bounds, limits = given.fit.bounds, given.limits
    solver = cyipopt.Problem(
        n=len(bounds.lb),
        m=len(limits.lb),
        problem_obj=given,
        lb=bounds.lb,
        ub=bounds.ub,
        cl=limits.lb,
        cu=limits.ub,
    )
    solver.add_option("hessian_approximation", "limited-memory")
    solver.add_option("print_level", 0)
    solver.add_option("max_iter", 500)
    theta, info = solver.solve(given.fit.x0)
    given.fit.parameters.assign(theta)
    print(f"half the sum of squares {info['obj_val']:.4f}, lowest output {limits.fun(theta).min():.3f}")


if __name__ == "__main__":
    main()
