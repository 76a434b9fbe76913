"""The functions users call first. Each hands the work to the framework the model belongs to, imported only then."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any, TextIO

import numpy as np

from netjac.data import Sliced, source
from netjac.errors import DataError, MemoryBudgetError
from netjac.jacobian import Jacobian
from netjac.optimize.forecast import of_targets
from netjac.planning import memory_bytes
from netjac.plans import Plan
from netjac.spaces import ParameterSpace
from netjac.tiled import TiledJacobian


def jacobian(
    model: Any,
    x: Any,
    *,
    variables: Sequence[Any] | None = None,
    memory: float | str | None = None,
    dtype: Any = None,
    progress: bool | TextIO | None = None,
) -> Jacobian | TiledJacobian:
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
    memory : number of bytes or str, optional
        Most memory that the factors may take, such as ``"512 MiB"`` or ``"2 GB"``. Where they need more, a
        `TiledJacobian` computes them some samples and outputs at a time, anew for each product. By default half of
        what the system has free (the limits of control groups counted). See `plan` and docs/memory.md.
    dtype : "float64", optional
        Compute in float64 whatever the model was built in: its weights, x and constants are widened, and every
        operation is computed in double precision. By default the model's own type. See docs/precision.md.
    progress : bool or text stream, optional
        Of a `TiledJacobian`: by default verbs that take more than a second show a bar on standard error, if that is a
        terminal and tqdm is installed. False shows none, True shows it whatever standard error is, a stream shows it
        there.

    Returns
    -------
    Jacobian, or TiledJacobian where ``memory`` is too little for all
        A SciPy ``LinearOperator`` of shape (n*l, m), kept as layer factors, with the outputs in ``J.outputs``.

    Raises
    ------
    ModelError
        The model is not built, has nothing to train, has outputs that are not floating, cannot be traced, or uses an
        operation that TensorFlow cannot compute in ``dtype``; its outputs use a value that it assigns to a variable
        on the way; or this was called inside a ``tf.function`` (see `jacobian_tensor`).
    ShapeError, DtypeError, DataError
        The inputs do not fit the model, or hold values that are not finite; ``dtype`` is another type.
    SampleMixingError
        A sample's outputs depend on other samples (batch statistics in training mode, attention across the batch).
    RandomModelError
        The model draws random numbers at every call.
    ProbeError
        The factors disagree with an ordinary derivative; no matrix is returned then.
    MemoryBudgetError
        ``memory`` is too little for one output of one sample; the message states the least that works.
    ImportError
        TensorFlow is not installed.

    Notes
    -----
    Factors that cannot be allocated are tried again in smaller tiles, with a ``RuntimeWarning``.

    The model's variables are left as they are. What its call assigns to variables (a step counter, running
    statistics) is not carried out; ``J.coverage.notes`` lists such assignments.

    Examples
    --------
    ::

        import keras, numpy as np, netjac as nj

        model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(2)])
        J = nj.jacobian(model, np.random.rand(5, 10))
        J.shape               # (5*2, m)
        J.to_array("(l m) n")  # one column a sample
    """
    result: Jacobian | TiledJacobian = _tensorflow().jacobian(
        model, x, variables=variables, memory=memory, dtype=dtype, progress=progress
    )
    return result


def plan(
    model: Any,
    x: Any,
    memory: float | str | None = None,
    *,
    variables: Sequence[Any] | None = None,
    dtype: Any = None,
    n: int | None = None,
) -> Plan:
    """What the Jacobian of a network will take, told before it is computed.

    The model is traced and probed at a few samples, as on the first use of `jacobian`; nothing that grows with n is
    computed.

    Parameters
    ----------
    model, variables, dtype
        As for `jacobian`.
    x
        As for `jacobian`, or arrays of which slices can be read (a memory map, a Zarr array): a few samples are read.
    memory : number of bytes or str, optional
        As for `jacobian`.
    n : int, optional
        Samples to plan for; by default as many as x has.

    Returns
    -------
    Plan
        A dataclass that prints as a table: sizes, tiles and the predicted peak, in bytes.

    Raises
    ------
    MemoryBudgetError
        As for `jacobian`.
    DataError, DtypeError
        x is neither an array nor a structure of arrays, or has no samples; n is no number of samples.

    Notes
    -----
    The peak is that of the tensors in the order in which TensorFlow runs its operations. Where it has several threads
    that order varies, and the peak with it by a fifth; oneDNN, and the C library, keep memory that was freed.

    Examples
    --------
    ::

        print(nj.plan(model, x[:10], n=10**6, memory="2 GiB"))
    """
    data = source(x)
    if not isinstance(data, Sliced) or not data.n:
        raise DataError("plan needs x as an array (n, ...) of one sample or more, or a dict or list of such arrays.")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0):
        raise DataError(f"n must be a number of samples, and is {n!r}.")
    few, count = data[slice(0, min(data.n, 4))].x, data.n if n is None else int(n)
    budget = None if memory is None else memory_bytes(memory)
    network = _tensorflow().evaluator(model, few, variables, dtype=dtype)
    found: Plan = network.plan(count, budget)
    with suppress(MemoryBudgetError):
        return replace(found, fit=of_targets(network, count, budget))
    return found


def input_jacobian(model: Any, x: Any, across_samples: bool = False) -> Any:
    r"""Derivative of each sample's outputs with respect to that sample's inputs, or to those of all samples.

    Parameters
    ----------
    model
        As for `jacobian`.
    x
        Floating inputs of n samples; a list or dict of arrays gives the same structure back.
    across_samples : bool
        Whether to differentiate with respect to all samples' inputs: for models in which one sample's outputs depend on
        other samples (batch statistics in training mode, a softmax or attention across the batch). The result is n
        times as large, and takes one backward pass for each of its n·l rows.

    Returns
    -------
    array (n, l, \*input shape), or the structure of ``x`` with one such array a leaf
        l counts all outputs of a sample, flattened. With ``across_samples``, arrays (n, l, n, \*input shape):
        ``array[i, j, k]`` is the derivative of output j of sample i with respect to the input of sample k.

    Raises
    ------
    DtypeError
        An input is not floating, so that no derivative exists.
    SampleMixingError
        A sample's outputs depend on other samples, and ``across_samples`` is False.
    ModelError, ShapeError, DataError, RandomModelError, ImportError
        As for `jacobian`.

    Examples
    --------
    ::

        import tensorflow as tf, netjac as nj

        W = tf.Variable(tf.ones((3, 3)))
        nj.input_jacobian(lambda x: x @ W, [[1.0, 7.0, 5.0]])[0]  # the 3 × 3 matrix of ones, not [3, 3, 3]

        centred = lambda x: x - tf.reduce_mean(x, axis=0)
        nj.input_jacobian(centred, [[1.0], [2.0]], across_samples=True)[:, 0, :, 0]  # [[0.5, -0.5], [-0.5, 0.5]]
    """
    return _tensorflow().input_jacobian(model, x, across_samples)


def jacobian_tensor(model: Any, x: Any, layout: str = "(n l) m", variables: Sequence[Any] | None = None) -> Any:
    """The Jacobian at the variables' present values as a ``tf.Tensor`` that can be differentiated again.

    For losses made of the Jacobian, eagerly under a ``tf.GradientTape`` or inside a ``tf.function`` of one's own. For
    anything else `jacobian` is better: it never forms the matrix.

    Parameters
    ----------
    model, variables
        As for `jacobian`. The variables are read when the tensor is computed.
    x
        As for `jacobian`; its arrays may be symbolic tensors (n, ...), all sizes but n known. On the first use of a
        model and signature the model is probed: at ``x`` if that has values, at made-up samples if it is symbolic
        (floating numbers in (0.1, 0.9), integers 0). To probe at real data, call it once eagerly.
    layout : str
        Arrangement of the letters n (samples), l (outputs of a sample) and m (parameters), as for
        `Jacobian.to_array`.

    Returns
    -------
    tf.Tensor
        In the given layout; float64 if a variable or output is, else float32. Derivatives go through it to the
        variables and to ``x``, if those are tensors or variables; they are TensorFlow's own second derivatives, exact
        where its operations have exact ones (not for ``tf.nn.moments`` and the Keras ``LayerNormalization``, which
        stop the gradient of the mean).

    Raises
    ------
    LayoutError
        The layout is no arrangement of n, l and m.
    ModelError, ShapeError, DtypeError, DataError, SampleMixingError, RandomModelError, ProbeError, ImportError
        As for `jacobian`.

    Examples
    --------
    ::

        import tensorflow as tf, netjac as nj

        W = tf.Variable(tf.ones((3, 2)))

        @tf.function
        def penalty(x):
            J = nj.jacobian_tensor(lambda x: tf.tanh(x @ W), x, variables=[W])  # (n*l, m)
            return tf.reduce_sum(J**2)

        x = tf.constant([[0.1, 0.7, 0.5]])
        with tf.GradientTape() as tape:
            loss = penalty(x)
        tape.gradient(loss, W)  # (3, 2)
    """
    return _tensorflow().jacobian_tensor(model, x, layout, variables)


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
        import tensorflow  # noqa: F401 - only to tell, in words of our own, that it is missing
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":  # it is there, and something it needs is not
            raise
        raise ImportError(
            "netjac takes the derivative from TensorFlow, which is not installed: "
            'pip install "netjac[tensorflow-cpu]" (or "netjac[tensorflow]" for a GPU).'
        ) from error
    import netjac.tensorflow

    return netjac.tensorflow
