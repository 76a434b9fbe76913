"""The functions users call first. Each hands the work to the framework the model belongs to, imported only then."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from netjac.jacobian import Jacobian
from netjac.spaces import ParameterSpace


def jacobian(model: Any, x: Any, *, variables: Sequence[Any] | None = None) -> Jacobian:
    """Jacobian of a network's outputs with respect to its trainable parameters, organised by sample.

    Parameters
    ----------
    model
        A Keras model or layer, a ``tf.Module``, or any callable that TensorFlow can trace.
    x
        Inputs of n samples, the samples along the first axis, in the structure the model takes (an array; or a list
        or a dict of arrays).
    variables : sequence of ``tf.Variable``, optional
        The columns, in this order; by default the model's trainable variables in the model's order. Needed for a
        plain callable.

    Returns
    -------
    Jacobian
        A SciPy ``LinearOperator`` of shape (n*l, m), kept as layer factors, with the outputs in ``J.outputs``.

    Raises
    ------
    ModelError
        The model is not built, has nothing to train, has outputs that are not floating, or cannot be traced.
    ShapeError, DtypeError, DataError
        The inputs do not fit the model, or hold values that are not finite.
    SampleMixingError
        A sample's outputs depend on other samples (batch statistics in training mode, attention across the batch).
    RandomModelError
        The model draws random numbers at every call.
    ProbeError
        The factors disagree with an ordinary derivative; no matrix is returned then.
    ImportError
        TensorFlow is not installed.

    Examples
    --------
    ::

        import keras, numpy as np, netjac as nj

        model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(2)])
        J = nj.jacobian(model, np.random.rand(5, 10))
        J.shape               # (5*2, m)
        J.to_array("(l m) n")  # one column a sample
    """
    result: Jacobian = _tensorflow().jacobian(model, x, variables=variables)
    return result


def input_jacobian(model: Any, x: Any) -> Any:
    r"""Derivative of each sample's outputs with respect to that sample's inputs.

    Parameters
    ----------
    model
        As for `jacobian`.
    x
        Floating inputs of n samples; a list or dict of arrays gives the same structure back.

    Returns
    -------
    array (n, l, \*input shape), or the structure of ``x`` with one such array a leaf
        l counts all outputs of a sample, flattened.

    Raises
    ------
    DtypeError
        An input is not floating, so that no derivative exists.
    ModelError, ShapeError, DataError, SampleMixingError, RandomModelError, ImportError
        As for `jacobian`.

    Examples
    --------
    ::

        import tensorflow as tf, netjac as nj

        W = tf.Variable(tf.ones((3, 3)))
        nj.input_jacobian(lambda x: x @ W, [[1.0, 7.0, 5.0]])[0]  # the 3 × 3 matrix of ones, not [3, 3, 3]
    """
    return _tensorflow().input_jacobian(model, x)


def parameters(model: Any, variables: Sequence[Any] | None = None) -> ParameterSpace:
    """Names, shapes and places of a model's trainable parameters: the columns of its Jacobian.

    Parameters
    ----------
    model, variables
        As for `jacobian`.

    Returns
    -------
    ParameterSpace
        Which also reads all parameters into one vector (``ravel()``) and writes one back (``assign(theta)``).

    Raises
    ------
    ModelError
        The model is not built or has nothing to train.
    ImportError
        TensorFlow is not installed.

    Examples
    --------
    ::

        space = nj.parameters(model)
        theta = space.ravel()     # (m,)
        space.assign(0.9 * theta)
    """
    result: ParameterSpace = _tensorflow().parameters(model, variables)
    return result


def _tensorflow() -> ModuleType:
    try:
        import tensorflow  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":  # it is there, and something it needs is not
            raise
        raise ImportError(
            "netjac takes the derivative from TensorFlow, which is not installed: "
            'pip install "netjac[tensorflow-cpu]" (or "netjac[tensorflow]" for a GPU).'
        ) from error
    import netjac.tensorflow

    return netjac.tensorflow
