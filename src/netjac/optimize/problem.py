"""A network as a nonlinear least-squares problem for an optimiser that knows nothing of networks.

With outputs f(x; θ) (n, l), targets y (n, l) or a function from outside that turns outputs into residuals, weights w
and a Gaussian prior of means θ₀ and standard deviations σ, the residual is

    r(θ) = [√w ∘ r_d(f(x; θ)); (θ − θ₀) / σ],    r_d = f − y by default,

flattened sample-major, the prior's rows last, and

    cost(θ) = ½ ‖r(θ)‖²,    ∂r/∂θ = R,    gradient = Rᵀ r,    Gauss–Newton Hessian = Rᵀ R.

One evaluation at a θ gives both r and (the factors of) R, so whoever asks for the derivative at a point whose value was
asked for before pays nothing more than the form wanted: an array, or an operator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TextIO, final

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike

from netjac import planning
from netjac.errors import DataError
from netjac.optimize import budget, callbacks, losses, methods, minimizer, names, options, sources, targets
from netjac.optimize.base import network_evaluator
from netjac.optimize.checkpoint import Fit
from netjac.optimize.evaluations import Evaluator
from netjac.optimize.fitting import Fitting
from netjac.optimize.hessian import CURVATURES
from netjac.optimize.identity import fingerprint, named
from netjac.optimize.levenberg import MESSAGES
from netjac.optimize.losses import Loss, Vector
from netjac.optimize.sources import Source
from netjac.optimize.squares import Squares
from netjac.optimize.watch import Watch


@final
class LeastSquares(Squares):
    """Residuals of a model and their derivative over θ, for `scipy.optimize.least_squares` and everything like it.

    θ (M,) holds the model's parameters and then the extra ones.

    Parameters
    ----------
    model
        Keras model, layer, ``tf.Module``, or a callable together with ``variables``; as for `netjac.jacobian`.
    x
        Inputs, n samples.
    y
        Targets in the structure of the model's outputs: an array (n, ...), or a list or dict of arrays. With one output
        a sample, (n,) will do. The residual is then f(x) − y. Either y or ``residual`` is given.
    residual
        A function from outside, ``residual(outputs) → (r, dr)``: the outputs come as float64 arrays that cannot be
        written to, in the model's own structure; r is an array of any shape; dr its derivative with respect to the
        outputs, (n, q, l) with r (n, q) where a row depends on the outputs of one sample, or, where d rows depend on
        all of them, (d, n*l) as an array, a sparse matrix or a LinearOperator, or an array (d, n, l). With ``extra``:
        ``residual(outputs, extra) → (r, dr, d_extra)``, extra a dict of values, d_extra a dict of derivatives, (*shape
        of r, *shape of the value) each.
    variables
        The parameters, for a model that is a plain callable.
    trainable
        Names or patterns of the variables that are fitted; the others are constants. By default all are fitted.
    weights : (n,), (n, l) or of the shape of the residual, optional
        Not negative; the cost is ½ Σ w r².
    prior
        Dict from a name or pattern to σ, or to (σ, mean): numbers, or arrays that broadcast to the variable's shape.
        The mean is 0 by default. Each parameter with a prior adds the row (θ − mean) / σ to the residual.
    bounds
        Dict from a name or pattern to (lower, upper): numbers, None, or arrays that broadcast to the variable's shape;
        or `scipy.optimize.Bounds` or a pair (lower, upper) over θ.
    extra
        Dict of names and starting values, numbers or arrays: parameters of the function from outside that are fitted
        beside the network's.
    jac
        What `jac` returns: "dense", a float64 array (rows, M); "operator", a float64 `LinearOperator` on the factors;
        "auto", an array up to 64 MiB and an operator beyond.
    curvature : {"gauss-newton", "difference", "exact"}
        What `hessp` and `hess` return: Rᵀ R; central differences of the gradient; or Rᵀ R and the second derivatives of
        the network through TensorFlow, where the residual is f(x) − y. Those are checked at the first use, and refused
        where they are wrong (LayerNormalization).
    dtype : "float64" or None
        What a model is evaluated in for the fit: float64 whatever it was built in, or its own type. Its weights keep
        their type.
    check
        Whether the derivative from outside is compared with central differences of r at the first call (up to twelve
        more calls).
    memory : number of bytes or str, optional
        Most that a fit may take, such as ``"2 GiB"``: the factors at the best point and at a trial point, and the
        matrices that steps are computed with. Where the factors do not fit beside those they are computed tile by tile;
        where a matrix does not fit, steps are computed in another way. By default half of what the system has free. See
        docs/memory.md.

    Raises
    ------
    ShapeError, DataError, DtypeError, OptionError, NameLookupError
        If y does not fit the model's outputs, has another number of samples than x, or is not finite; if a name fits
        no parameter, or what is given for it does not fit.
    DerivativeError
        At the first evaluation, if the derivative from outside disagrees with the difference.
    ModelError
        If the model has nothing to train, or was never built.
    MemoryBudgetError
        If ``memory`` is too little for any way to fit; the message states the least that works.

    Notes
    -----
    SciPy works in float64. With ``dtype=None`` a float32 model evaluates residuals to about 1e-7 of the outputs, so
    differences of cost below that are rounding: tolerances (``ftol``, ``xtol``, ``gtol``) under 1e-7 then end in steps
    that no longer help, and the fit stalls.

    The last evaluation and the best one are kept. Call `forget` if anything but θ changed in between, such as the
    statistics of a normalisation layer.

    Examples
    --------
    A straight line through three points:

    >>> import numpy as np, scipy.optimize, tensorflow as tf
    >>> from netjac import LeastSquares
    >>> slope, offset = tf.Variable(0.0, dtype="float64"), tf.Variable(0.0, dtype="float64")
    >>> def line(x):
    ...     return slope * x + offset
    >>> x = np.array([[0.0], [1.0], [2.0]])
    >>> problem = LeastSquares(line, x, 3 * x + 1, variables=[slope, offset])
    >>> result = scipy.optimize.least_squares(problem.fun, problem.x0, problem.jac)
    >>> result.x.round(6)
    array([3., 1.])
    """

    def __init__(
        self,
        model: Any,
        x: Any,
        y: Any = None,
        *,
        residual: Callable[..., Any] | None = None,
        variables: Any = None,
        trainable: str | Sequence[str] | None = None,
        weights: ArrayLike | None = None,
        prior: dict[str, Any] | None = None,
        bounds: Any = None,
        extra: dict[str, Any] | None = None,
        jac: str = "auto",
        curvature: str = "gauss-newton",
        dtype: str | None = "float64",
        check: bool = True,
        memory: float | str | None = None,
    ) -> None:
        targets.check_arrays(x, "x")
        sources.check_given(y, residual, extra)
        options.check_form(jac)
        n = targets.sample_count(x)
        if n is not None and y is not None:
            targets.check_count(y, n)
        evaluator = network_evaluator(model, x, variables, trainable, dtype)
        source = sources.made(evaluator, y, residual, extra, weights, check)
        self._set_up(source, prior, bounds, jac, curvature, options.natural_scale(variables), memory)

    @classmethod
    def from_evaluator(
        cls,
        evaluator: Evaluator,
        y: Any = None,
        *,
        residual: Callable[..., Any] | None = None,
        weights: ArrayLike | None = None,
        prior: dict[str, Any] | None = None,
        bounds: Any = None,
        extra: dict[str, Any] | None = None,
        jac: str = "auto",
        curvature: str = "gauss-newton",
        check: bool = True,
        memory: float | str | None = None,
    ) -> Self:
        """A problem on anything that evaluates outputs and Jacobian at a θ, whichever framework it comes from.

        Parameters
        ----------
        evaluator
            See `netjac.optimize.evaluations.Evaluator`.
        y, residual, weights, prior, bounds, extra, jac, curvature, check
            As for the class.
        memory
            As for the class; factors count where the evaluator takes a budget, as that of a TensorFlow model does.
        """
        sources.check_given(y, residual, extra)
        source = sources.made(evaluator, y, residual, extra, weights, check)
        return cls._of(source, prior, bounds, jac, curvature, memory=memory)

    @classmethod
    def join(
        cls,
        *problems: LeastSquares | Iterable[LeastSquares],
        jac: str = "auto",
        memory: float | str | None = None,
    ) -> LeastSquares:
        """One problem of several: all their residuals, over all their parameters.

        A variable that several models hold is one parameter, and so are extra parameters of one name. Bounds hold
        together; a prior on a shared parameter is given in one of the problems.

        Parameters
        ----------
        *problems
            At least one, or a list of them; they stay usable.
        jac, memory
            As for the class.

        Returns
        -------
        LeastSquares
            Its residual holds the data's rows, problem by problem, and then the rows of all priors.

        Raises
        ------
        OptionError, DataError
            If something else is given, or nothing; if two problems have a prior on one parameter, or bounds that leave
            it nothing, or shared extra parameters that start from different values.
        """
        from netjac.optimize import joint  # which makes a problem of what it finds in these

        return joint.join(problems, jac, memory)

    @classmethod
    def _of(
        cls,
        source: Source,
        prior: Any,
        bounds: Any,
        jac: str,
        curvature: str,
        x_scale: float | None = None,
        memory: float | str | None = None,
    ) -> Self:
        problem = cls.__new__(cls)
        problem._set_up(source, prior, bounds, jac, curvature, x_scale, memory)
        return problem

    def _set_up(
        self,
        source: Source,
        prior: Any,
        bounds: Any,
        jac: str,
        curvature: str,
        x_scale: float | None,
        memory: float | str | None,
    ) -> None:
        options.check_form(jac)
        options.one_of("curvature", curvature, CURVATURES)
        if 0 in (source.size, source.space.size):
            raise DataError(f"there is nothing to fit: {source.size} residuals and {source.space.size} parameters.")
        self._source = source
        self._form, self._curvature = jac, curvature
        self._x_scale = x_scale  # of netjac's solver, where none is asked for
        self._loss: Loss = "linear"
        self._f_scale = 1.0
        self._stop: BaseException | None = None
        self._memory = None if memory is None else planning.memory_bytes(memory)
        self._prepare(source.space, source.extra, bounds, prior)
        self._factors = budget.of_factors(self._memory, source.need(0), source.space.size, source.size or 0)

    def minimizer(
        self,
        fun: Callable[..., float],
        x0: ArrayLike,
        args: tuple[Any, ...] = (),
        *,
        jac: Any = None,
        hess: Any = None,
        hessp: Any = None,
        bounds: Any = None,
        constraints: Any = (),
        callback: Any = None,
        **options: Any,
    ) -> scipy.optimize.OptimizeResult:
        """`netjac.least_squares` as a method of `scipy.optimize.minimize`, which minimises `cost`.

        Parameters
        ----------
        fun
            `cost` of this problem, or a function that equals it: the solver works on the residual behind it.
        x0, args
            As SciPy hands them over; the start is moved into the bounds.
        jac, hess, hessp
            May be given, for methods that need them; the derivative of the residual says more.
        bounds
            `scipy.optimize.Bounds` or pairs; by default the problem's own.
        constraints
            None are kept; any is an error.
        callback
            With ``intermediate_result`` or x; ends the fit by raising StopIteration or returning True.
        options
            ``tol`` (for the three that follow), ``ftol``, ``xtol``, ``gtol``, ``maxiter``, ``max_nfev``, ``x_scale``,
            ``linear_solver``, ``disp``.

        Returns
        -------
        scipy.optimize.OptimizeResult
            As of `netjac.least_squares`, but ``fun`` is the cost and ``jac`` its gradient. Status 0: ``maxiter`` or
            ``max_nfev`` is reached. The model is left as it is.

        Raises
        ------
        OptionError, ShapeError
            For constraints, for options that do not exist, for bounds that do not fit.
        DataError
            If fun is not the cost of this problem.

        Examples
        --------
        >>> import numpy as np, scipy.optimize, tensorflow as tf
        >>> from netjac import LeastSquares
        >>> rate = tf.Variable(0.5, dtype="float64")
        >>> x = np.array([[0.0], [1.0], [2.0]])
        >>> problem = LeastSquares(lambda x: tf.exp(rate * x), x, np.exp(0.3 * x), variables=[rate])
        >>> scipy.optimize.minimize(problem.cost, problem.x0, method=problem.minimizer).x.round(6)
        array([0.3])
        """
        form, linear_solver = "dense" if self._form == "dense" else "operator", options.get("linear_solver", "auto")
        return minimizer.minimize(
            self,
            fun,
            x0,
            args,
            jac=lambda theta: self._derivative(self._at(theta), form),
            bounds=bounds,
            constraints=constraints,
            callback=callback,
            memory=self._settle([form], linear_solver)[1],
            **options,
        )

    # ---- the fit

    def solve(
        self,
        method: str = "trf",
        *,
        x0: ArrayLike | None = None,
        max_nfev: int | None = None,
        ftol: float | None = 1e-8,
        xtol: float | None = 1e-8,
        gtol: float | None = 1e-8,
        x_scale: Any = None,
        loss: Loss = "linear",
        f_scale: float = 1.0,
        bounds: Any = None,
        jac: str | None = None,
        tr_solver: str | None = None,
        tr_options: dict[str, Any] | None = None,
        linear_solver: str = "auto",
        callback: Any = None,
        verbose: int = 0,
        progress: bool | TextIO = False,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: float = 10.0,
        resume: str | os.PathLike[str] | None = None,
    ) -> scipy.optimize.OptimizeResult:
        """Fit by least squares; afterwards the model holds the best parameters seen.

        Parameters
        ----------
        method : {"trf", "dogbox", "lm", "netjac"}
            A method of `scipy.optimize.least_squares`, or `netjac.least_squares`. "lm" needs as many residuals as
            parameters, and honours no bounds. Methods of `scipy.optimize.minimize` take `cost` and `grad`.
        x0 : (M,), optional
            The start, moved into the bounds; by default the model's present parameters.
        max_nfev, ftol, xtol, gtol, f_scale, tr_solver, tr_options, verbose
            Handed to the solver as they are. SciPy's remaining options concern finite differences and arguments of
            functions, and do not apply.
        x_scale
            Handed to the solver. By default "netjac" takes 1 for a network, whose weights are of one size, and "jac"
            for a formula (a callable with ``variables``), whose parameters need not be.
        linear_solver
            Of "netjac"; see `netjac.least_squares`.
        callback
            Called after every accepted step with ``intermediate_result`` (an `OptimizeResult`: x, fun, cost, nit, nfev
            and, of "netjac", more), or, under any other name of its parameter, with x. Ends the fit by raising
            StopIteration or returning True. "lm" has none in SciPy; here the Jacobian that it asks for after every
            accepted step calls it.
        loss
            Of the data's residuals; the prior's rows stay squared.
        bounds
            Instead of the problem's own, in the same forms. The start is moved into them.
        jac : {"auto", "dense", "operator"}, optional
            The form in which SciPy gets the Jacobian; None takes that of the problem. "auto" is an array for "lm", for
            ``tr_solver="exact"``, for ``x_scale="jac"`` and for anything up to 64 MiB, else an operator with
            ``tr_solver="lsmr"``; for "netjac", "auto" is the factors.
        progress
            False; True for one line on the terminal or in a notebook; or a text stream, which gets lines even if it is
            no terminal.
        checkpoint
            A file that holds the state of the fit, written after an accepted step and at the end, and whole at every
            moment.
        checkpoint_every
            Seconds from one checkpoint to the next, at least; 0 for one after every step.
        resume
            A checkpoint to go on from, of the same fit: "netjac" takes the steps that it would have taken, to the same
            end, with ``max_nfev`` counting from the first start; SciPy's methods start anew from the best point. The
            tolerances and ``max_nfev`` may be others.

        Returns
        -------
        scipy.optimize.OptimizeResult
            SciPy's, with a `History` added as ``history``. After Ctrl-C: ``success`` is False, ``status`` -3, and x the
            best point. If the code from outside raises or returns NaN in its derivative, the fit stops: ``success`` is
            False, ``status`` -4, ``error`` the exception, and x the best point before.

        Raises
        ------
        OptionError, ShapeError
            If the options exclude each other, x0 is of another size, or the method cannot honour the bounds; before
            any work.
        DataError
            If x0, or the residual or its sum of squares at the start, is not finite; if the checkpoint is damaged or of
            another fit.
        CheckpointNotFoundError
            A FileNotFoundError: there is no such checkpoint, or no folder for it.

        Notes
        -----
        Whatever else ends the fit early (an error of the model, a second Ctrl-C), the model gets the best parameters
        seen before the exception goes on. A trial point whose residual is not finite is a rejected step; "lm" cannot
        step back, and ends there.
        """
        methods.check_residuals(method)
        limits = self._bounds if bounds is None else names.bounds(self._space, bounds)
        options.check_bounds(method, limits)
        options.check_tr_options(method, tr_options)
        options.check_count(max_nfev)
        options.check_tolerances(ftol=ftol, xtol=xtol, gtol=gtol)
        f_scale = options.checked_loss(loss, f_scale)
        given = self._given(x0, resume)
        options.check_linear_solver(method, linear_solver)
        form = self._form if jac is None else jac
        if method == "netjac" and x_scale is None:
            x_scale = self._x_scale

        def which() -> Fit:
            data = {name: fingerprint(array) for name, array in self._source.known.items()}
            about = self._identity(method, limits) | {"data": data}
            about |= {"loss": named(loss), "f_scale": f_scale, "jac": form, "linear_solver": linear_solver}
            about["x_scale"] = {"x_scale": fingerprint(x_scale)} if np.ndim(x_scale) else np.asarray(x_scale).tolist()
            return Fit(about, (ftol, xtol, gtol))

        watch = Watch.opened(
            lambda: self._evaluations.best,
            which,
            progress=progress,
            max_nfev=max_nfev,
            path=checkpoint,
            every=checkpoint_every,
            resume=resume,
        )
        with self._fitting(loss, f_scale, limits, watch):
            start = self._start(limits, given)
            free = form == "auto" and tr_solver is None and not isinstance(x_scale, str) and method in ("trf", "dogbox")
            form, tr_solver = options.choose(
                self.shape, method=method, jac=form, tr_solver=tr_solver, x_scale=x_scale, loss=loss
            )
            forms = [form, "operator"] if free else [form]
            way, memory = self._settle(forms, linear_solver if method == "netjac" else None)
            if way == "operator" != form:  # the array would not fit
                form, tr_solver = "operator", "lsmr"
            self._check_start(start)
            of_data = self._prior is not None or callable(loss)
            own: dict[str, Any] = {"linear_solver": linear_solver, "memory": memory}
            if method in ("trf", "dogbox"):
                own = {"tr_solver": tr_solver, "tr_options": tr_options}
            fitting = Fitting(
                start,
                self._at,
                self._finite_fun if method == "lm" else self.fun,
                lambda evaluation: self._derivative(evaluation, form),
                lambda evaluation: self._largest(evaluation.theta, self._gradient(evaluation)),
                watch,
                callbacks.stops(callback),
            )
            try:
                result = fitting.run(
                    method,
                    own,
                    bounds=limits,
                    ftol=ftol,
                    xtol=xtol,
                    gtol=gtol,
                    x_scale=x_scale,
                    loss=losses.of_first(loss, self._at(start).data.residual.size) if of_data else loss,
                    f_scale=f_scale,
                    max_nfev=max_nfev,
                    verbose=verbose,
                )
                self._take_best(result, form)
            except BaseException as error:
                ended = self._ended(error, (-2, MESSAGES[-2]))
                if ended is None:
                    raise
                result = self._complete(ended, form)
            self._space.assign(result.x)
            result.history = watch.history
        return result

    @contextmanager
    def _fitting(self, loss: Loss, f_scale: float, limits: scipy.optimize.Bounds, watch: Watch) -> Iterator[None]:
        """The best point is judged by what the fit minimises; whatever ends it early, the model gets that point."""
        self.forget()
        factors = self._factors
        self._loss, self._f_scale, self._limits, self._watch = loss, f_scale, limits, watch
        try:
            yield
        except BaseException:
            self._keep_best()
            raise
        finally:
            self._loss, self._f_scale, self._limits, self._watch = "linear", 1.0, self._bounds, Watch()
            self._stop, self._factors = None, factors
            watch.close()

    def _finite_fun(self, theta: ArrayLike) -> Vector:
        """For a method that cannot step back."""
        residual = self.fun(theta)
        if not np.all(np.isfinite(residual)):
            self._stop = DataError("the residual is not finite at a trial point, and this method cannot step back.")
            raise self._stop
        return residual

    @property
    def _failure(self) -> BaseException | None:
        return self._stop or self._source.failure
