"""The demonstration behind ``netjac demo``: a network fitted to real data by SciPy, and two questions answered.

Everything printed as a check is checked first, against plain loops of automatic differentiation, and the run fails if
a check does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

import netjac as nj
from netjac import plots
from netjac.diagnostics import check_derivative
from netjac.optimize.monitor import History, Monitor

Write = Callable[[str], None]
Array = NDArray[np.float64]

SEED = 0
DECAYS = (3.0, 10.0, 30.0)
"""Weight decays tried; one is chosen on held-out training samples."""


def run(output: Path, write: Write = print) -> None:
    """Fit the diabetes data, write ``diabetes.keras`` and ``diabetes.png`` into ``output``, answer the two questions.

    Parameters
    ----------
    output
        A directory; made if it is not there.
    write
        Gets every line.

    Raises
    ------
    RuntimeError
        If a result differs from the plain loop it is checked against.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # it announces itself, and float64 has no use for it
    output.mkdir(parents=True, exist_ok=True)
    write("━━ A Keras network fitted by scipy.optimize.least_squares ━━")
    fit_diabetes(output, write)
    write("\n━━ Question 1: the whole matrix of derivatives, by sample ━━")
    first_question(write)
    write("\n━━ Question 2: a matrix where tf.gradients gives a sum ━━")
    second_question(write)


# ---------------------------------------------------------------- the fit


@dataclass(frozen=True)
class Diabetes:
    """Inputs (n, 10) and disease progression a year later (n,): three quarters to fit, one quarter to test."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


def _data() -> Diabetes:
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    x, y = load_diabetes(return_X_y=True, scaled=False)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.25, random_state=SEED)
    return Diabetes(x, y, x_test, y_test)


def _network(x: Array, y: Array) -> Any:
    """10-8-1 in float64; takes raw inputs and gives raw units: it holds the scales of its training data."""
    import keras

    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((x.shape[1],), dtype="float64"),
            layers.Normalization(mean=x.mean(axis=0), variance=x.var(axis=0), dtype="float64"),
            layers.Dense(8, activation="tanh", dtype="float64", name="hidden"),
            layers.Dense(1, dtype="float64", name="output"),
            layers.Rescaling(scale=float(y.std()), offset=float(y.mean()), dtype="float64"),
        ]
    )


def _least_squares(problem: nj.LeastSquares, weight: float, stream: TextIO | bool = False) -> tuple[Any, History]:
    """Minimise ½ ‖f(x; θ) − y‖² + ½ ‖weight · θ‖²: the data's rows are netjac's, the rows of the decay are ours."""
    from threadpoolctl import threadpool_limits

    m = problem.parameters.size
    monitor = Monitor(stream)

    def fun(theta: Array) -> Array:
        monitor.evaluated()
        return np.concatenate([problem.fun(theta), weight * theta])

    def jac(theta: Array) -> Array:
        J = np.vstack([problem.jac(theta), weight * np.eye(m)])
        r = np.concatenate([problem.fun(theta), weight * theta])  # no second evaluation: the problem holds this one
        monitor.iterate(_cost(r), float(np.abs(J.T @ r).max()))
        return J

    try:
        # SciPy's singular value decompositions are small here: a second thread gains nothing, and waits long for a
        # processor where others are at work.
        with threadpool_limits(1, user_api="blas"):
            result = scipy.optimize.least_squares(fun, problem.x0, jac, ftol=1e-4)
    finally:
        monitor.close()
    return result, monitor.history


_THE_CALL = """\
    problem = netjac.LeastSquares(model, x, y)

    def fun(theta):
        return np.concatenate([problem.fun(theta), weight * theta])

    def jac(theta):
        return np.vstack([problem.jac(theta), weight * np.eye(m)])

    result = scipy.optimize.least_squares(fun, problem.x0, jac, ftol=1e-4)"""


def fit_diabetes(output: Path, write: Write) -> None:
    """Fit, compare with a linear regression, write the model and the picture."""
    from sklearn.linear_model import LinearRegression

    data = _data()
    write(f"data: diabetes, {len(data.y)} samples to fit and {len(data.y_test)} to test, {data.x.shape[1]} inputs")
    decay = _choose_decay(data, write)

    model = _network(data.x, data.y)
    problem = nj.LeastSquares(model, data.x, data.y)
    J = nj.jacobian(model, data.x)
    write(f"\n{J!r}")
    write(str(J.coverage))
    write(str(check_derivative(problem)))

    weight = float(np.sqrt(decay) * data.y.std())
    before = _cost(problem.fun(problem.x0))
    write(f"\n{_THE_CALL}\n\nthe cost below counts the rows of the weight decay:")
    result, history = _least_squares(problem, weight, sys.stdout)
    problem.parameters.assign(result.x)
    write(f"{result.message} {result.nfev} evaluations of the model.")
    write(f"cost ½‖f(x; θ) − y‖²: {before:.4g} before, {_cost(problem.fun(result.x)):.4g} after")

    linear = LinearRegression().fit(data.x, data.y)
    fitted, predicted = _predict(model, data.x), _predict(model, data.x_test)
    error, linear_error = _rms(predicted - data.y_test), _rms(linear.predict(data.x_test) - data.y_test)
    write(
        f"test error (root mean square): network {error:.2f}, linear regression {linear_error:.2f}; "
        f"predicting the mean {_rms(data.y.mean() - data.y_test):.2f}"
    )

    model.save(output / "diabetes.keras")
    groups = {"train": (data.y, fitted), "test": (data.y_test, predicted)}
    _picture(output / "diabetes.png", groups, history, nj.jacobian(model, data.x))
    write(f"wrote {output / 'diabetes.keras'} and {output / 'diabetes.png'}")


def _choose_decay(data: Diabetes, write: Write) -> float:
    """The weight decay with the least error on a fifth of the training samples; the test samples have no say."""
    from sklearn.model_selection import train_test_split

    x, x_held, y, y_held = train_test_split(data.x, data.y, test_size=0.2, random_state=SEED)
    errors = []
    for decay in DECAYS:
        model = _network(x, y)
        problem = nj.LeastSquares(model, x, y)
        result, _ = _least_squares(problem, float(np.sqrt(decay) * y.std()))
        problem.parameters.assign(result.x)
        errors.append(_rms(_predict(model, x_held) - y_held))
    best = DECAYS[int(np.argmin(errors))]
    tried = ", ".join(f"{decay:g}: {error:.2f}" for decay, error in zip(DECAYS, errors, strict=True))
    write(f"weight decay and its error on {len(y_held)} held-out training samples: {tried}; {best:g} is used")
    return best


def _picture(path: Path, groups: dict[str, Any], history: History, J: nj.Jacobian) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.5])
    plots.fit(groups, left)
    plots.convergence(history, middle)
    plots.jacobian(J, right)
    figure.savefig(path, dpi=120)


def _predict(model: Any, x: Array) -> Array:
    return np.asarray(model(x)).reshape(-1)


def _cost(residual: Array) -> float:
    return float(0.5 * residual @ residual)


def _rms(error: Array) -> float:
    return float(np.sqrt(np.mean(error**2)))


# ---------------------------------------------------------------- the two questions


def first_question(write: Write) -> None:
    """A 10-64-32-2 network, 5 samples: the (l·m) × n matrix, and a derivative from outside carried to θ."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    model = keras.Sequential([keras.Input((10,)), layers.Dense(64, "tanh"), layers.Dense(32, "tanh"), layers.Dense(2)])
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=(5, 10)).astype("float32")

    J = nj.jacobian(model, x)
    matrix = J.to_array("(l m) n")
    plain = np.stack([_one_sample(tf, model, x[i : i + 1]).reshape(-1) for i in range(5)], axis=1)
    error = _checked("the matrix", matrix, plain, 1e-5)
    write(f"10-64-32-2 network, n = 5, l = 2, m = {J.m}: J.to_array('(l m) n') has the shape {matrix.shape}")
    write(f"  every entry equals tape.jacobian, sample by sample: largest relative difference {error:.1e}")
    write(
        f"  entries that are not zero: {np.count_nonzero(matrix)} of {matrix.size} "
        "(an output does not depend on the other output's last weights)"
    )

    # E = Σ log cosh(y − t) in NumPy, with its derivative over y: TensorFlow sees neither.
    t = rng.normal(size=(5, 2)).astype("float32")
    outside = np.tanh(J.y - t)  # (n, l)
    gradient = J.T @ outside.reshape(-1)  # (m,)
    with tf.GradientTape() as tape:
        E = tf.reduce_sum(tf.math.log(tf.math.cosh(model(x) - t)))
    plain = np.concatenate([np.asarray(g).reshape(-1) for g in tape.gradient(E, model.trainable_variables)])
    error = _checked("the gradient", gradient, plain, 1e-5)
    write(f"a derivative (n, l) from outside: J.T @ dE_dy.reshape(-1) is dE/dθ, shape {gradient.shape}")
    write(f"  equals the gradient of the same E written in TensorFlow: relative difference {error:.1e}")


def second_question(write: Write) -> None:
    """y = x W with x = [[1, 7, 5]] and W of ones: dy/dx is a matrix, and dy/dW one row an output."""
    import tensorflow as tf

    x = np.array([[1.0, 7.0, 5.0]], dtype="float32")
    W = tf.Variable(tf.ones((3, 3)), name="W")

    def f(inputs: Any) -> Any:
        return inputs @ W

    by_input = nj.input_jacobian(f, x)[0]  # (l, 3)
    by_weight = nj.jacobian(f, x, variables=[W]).to_array("n l m")[0].reshape(3, 3, 3)  # (l, *W.shape)
    plain_x, plain_W = [], []
    for j in range(3):
        watched = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(watched)
            y = f(watched)[0, j]
        gx, gW = tape.gradient(y, [watched, W])
        plain_x.append(np.asarray(gx)[0])
        plain_W.append(np.asarray(gW))
    _checked("dy/dx", by_input, np.stack(plain_x), 1e-5)
    _checked("dy/dW", by_weight, np.stack(plain_W), 1e-5)
    write(f"x = [[1, 7, 5]], W = ones (3, 3), y = x W: input_jacobian(f, x)[0] =\n{by_input}")
    write("  equals one gradient an output; tf.gradients(y, x) gives their sum, [[3, 3, 3]]")
    write(f"dy/dW has the shape (n, l, 3, 3) = (1, 3, 3, 3); for the first output:\n{by_weight[0]}")
    write("  equals one gradient an output")


def _one_sample(tf: Any, model: Any, x: Any) -> Array:
    """The derivative (l, m) of one sample by one ordinary backward pass an output."""
    with tf.GradientTape(persistent=True) as tape:
        y = model(x)
    parts = tape.jacobian(y, model.trainable_variables, experimental_use_pfor=False)
    return np.concatenate([np.asarray(part).reshape(y.shape[1], -1) for part in parts], axis=1)


def _checked(what: str, ours: NDArray[Any], plain: NDArray[Any], tolerance: float) -> float:
    """Largest difference relative to the largest entry; an error if it is over the tolerance, or all is zero."""
    if ours.shape != plain.shape:
        raise RuntimeError(f"{what} has shape {ours.shape}, and the plain loop gives {plain.shape}.")
    scale = float(np.abs(plain).max())
    error = float(np.abs(ours - plain).max()) / scale if scale else np.inf
    if not error <= tolerance:
        raise RuntimeError(f"{what} differs from the plain loop by {error:.1e}, more than {tolerance:.0e}.")
    return error
