"""The verbs that every kind of Jacobian has: arguments are checked here, once, and `netjac.tilewise` computes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from netjac import algebra, arguments, normal, planning
from netjac import memory as system
from netjac.errors import DataError, DtypeError, MemoryBudgetError, ShapeError
from netjac.layout import parse
from netjac.spaces import OutputSpace
from netjac.tilewise import Tilewise
from netjac.transposed import TransposedJacobian

if TYPE_CHECKING:
    from netjac.jacobian import Jacobian


class JacobianOperator(Tilewise):
    """Derivative of n samples' l outputs with respect to m parameters, as a SciPy operator of shape (n*l, m)."""

    @property
    def outputs(self) -> Any:
        """The outputs at which the derivative was taken, in the model's own structure and shapes; read-only views."""
        return self.output_space.pack(self.y)

    # ---- the operator protocol: J v, Jᵀ u

    def __matmul__(self, other: Any) -> Any:
        if type(other) is np.ndarray and 0 < other.ndim <= 2:
            return self._product(other)
        return super().__matmul__(other)

    def _matvec(self, x: Any) -> NDArray[Any]:
        return self._product(arguments.array(x))

    def _matmat(self, X: Any) -> NDArray[Any]:
        return self._product(arguments.array(X))

    def _rmatvec(self, x: Any) -> NDArray[Any]:
        return self._transposed_product(arguments.array(x))

    def _rmatmat(self, X: Any) -> NDArray[Any]:
        return self._transposed_product(arguments.array(X))

    def _transpose(self) -> TransposedJacobian:
        return TransposedJacobian(self)

    def _adjoint(self) -> TransposedJacobian:
        return TransposedJacobian(self)

    def _product(self, v: NDArray[Any]) -> NDArray[Any]:
        """J v (n*l,) or (n*l, q), for v (m,) or (m, q)."""
        if v.shape[0] != self.m:
            raise ShapeError(f"J @ v needs v of shape ({self.m},) or ({self.m}, q), m first, and got {v.shape}.")
        dtype = self.dtype
        if v.dtype != dtype:
            dtype = np.result_type(dtype, v.dtype)
            if dtype.kind == "c":
                return self._product(v.real) + 1j * self._product(v.imag)
            v = v.astype(arguments.real(dtype), copy=False)
        columns = v if v.ndim == 2 else v[:, None]
        out = np.zeros((self.n, self.l, columns.shape[1]), dtype)
        self._add_product(columns, out)
        return out.reshape((self.shape[0], *v.shape[1:]))

    def _transposed_product(self, u: NDArray[Any]) -> NDArray[Any]:
        """Jᵀ u (m,) or (m, q), for u (n*l,) or (n*l, q)."""
        rows = self.shape[0]
        if u.shape[0] != rows:
            raise ShapeError(f"J.T @ u needs u of shape ({rows},) or ({rows}, q), n*l first, and got {u.shape}.")
        dtype = self.dtype
        if u.dtype != dtype:
            dtype = np.result_type(dtype, u.dtype)
            if dtype.kind == "c":
                return self._transposed_product(u.real) + 1j * self._transposed_product(u.imag)
            u = u.astype(arguments.real(dtype), copy=False)
        width = 1 if u.ndim == 1 else u.shape[1]
        out = np.zeros((self.m, width), dtype)
        self._add_adjoint(u.reshape(self.n, self.l, width), out)
        return out if u.ndim == 2 else out[:, 0]

    def _room(
        self,
        memory: float | str | None,
        what: str,
        result: int,
        work: planning.Work = planning.NO_WORK,
        dtype: np.dtype[Any] | None = None,
        other: JacobianOperator | None = None,
    ) -> planning.Room:
        """What tiles and temporaries of a verb may take, its result of so many bytes fitting too.

        ``dtype`` is that in which the factors must be, ``other`` a second Jacobian that takes part.
        """
        if memory is None:
            free = system.available() if result > system.SMALL else None
            if free is not None and result > free:
                raise MemoryBudgetError(
                    f"{what} takes {planning.in_words(result)}, more than the {planning.in_words(free)} that are free; "
                    f"memory={result} tries it all the same.",
                    least=result,
                )
            return planning.Room(None, work.usual)
        kinds = (self,) if other is None else (self, other)
        copies = sum(J._copied(dtype or J.dtype) for J in kinds)
        least = [J._least_tile(dtype or J.dtype) for J in kinds]
        return planning.room(
            planning.memory_bytes(memory), what, result, copies, work, [tile for tile in least if tile]
        )

    # ---- the explicit matrix

    def to_array(
        self,
        layout: str = "(n l) m",
        *,
        out: NDArray[Any] | None = None,
        dtype: DTypeLike | None = None,
        threads: int | None = None,
        memory: float | str | None = None,
    ) -> NDArray[Any]:
        """Return the explicit Jacobian, its axes arranged as asked.

        Parameters
        ----------
        layout : str
            The letters n, l and m, each once, in any order and grouping: ``"(n l) m"`` is the matrix,
            ``"(l m) n"`` has a column a sample, ``"n l m"`` three axes.
        out : array, optional
            Written to and returned: of the layout's shape, real floating, any strides.
        dtype
            Real floating; by default that of ``out``, or else of the Jacobian.
        threads : int, optional
            By default every core available to the process.
        memory : number of bytes or str, optional
            Most that this call may take, such as ``"2 GiB"``: its result, unless it is ``out``, and tiles of factors
            that are computed for it. A few megabytes of temporaries come on top. By default tiles keep the budget of
            the Jacobian, and the result may take what the system has free.

        Returns
        -------
        array
            ``out``, or a new array in C order.

        Raises
        ------
        LayoutError
            Where the layout is not an arrangement of n, l and m.
        ShapeError, DtypeError, DataError
            Where ``out`` does not fit, ``dtype`` is not real floating or differs from that of ``out``, or ``out`` is
            read-only. Nothing has been written then.
        MemoryBudgetError
            ``memory``, or what is free, is too little; the message states the least that works. Before any work.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> J.to_array("(l m) n").shape, J.to_array("n l m", dtype="float64").dtype
        ((16, 3), dtype('float64'))
        """
        arrangement = parse(layout)
        workers = arguments.threads(threads)
        shape = arrangement.shape(self.n, self.l, self.m)
        given = arguments.result_type(shape, out, dtype, self.dtype, f"the layout {layout!r}")
        result = 0 if out is not None else prod(shape) * given.itemsize
        room = self._room(memory, "the explicit matrix", result)
        array = np.empty(shape, given) if out is None else out
        self._within(room.tiles)._fill(arrangement.view(np.asarray(array), self.n, self.l, self.m), workers)
        return array

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise DataError("a Jacobian is kept as factors, so an array of it is always new; ask without copy=False.")
        matrix = self.to_array()
        return matrix if dtype is None else matrix.astype(dtype, copy=False)

    # ---- parts of it

    def columns(self, names: str | Sequence[str]) -> Self:
        """Return the Jacobian with respect to the named variables alone, in the order given.

        Parameters
        ----------
        names
            One name or several; an end of a name that fits only one variable will do. With ``*``, ``?`` or ``[…]`` it
            is a pattern of one variable or more, ``"hidden/*"``, which come in their own order.

        Raises
        ------
        NameLookupError
            Where a name or pattern fits no variable, a name fits several, or is given twice; the message lists names.
        DtypeError
            Where ``names`` are no names.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> linear_layer().columns("bias")
        <Jacobian of 3 samples × 2 outputs with respect to 2 parameters: shape (6, 2), float64, ...>
        >>> linear_layer().columns(["bias", "*"]).parameters.names
        ('dense/bias', 'dense/kernel')
        """
        return self._columns(*self.parameters.select(arguments.names(names)))

    def __getitem__(self, samples: Any) -> Jacobian | Self:
        """Return the Jacobian of some samples: an integer (n = 1), a slice, integers or a boolean mask.

        Raises
        ------
        SampleIndexError
            An ``IndexError``: a sample is out of range, or a mask has another length than n.
        DtypeError
            Where ``samples`` is anything else, such as a pair of indices.
        """
        return self._samples(arguments.sample_index(samples, self.n))

    def scaled(self, B: ArrayLike) -> Jacobian | Self:
        """Return the Jacobian of B[n] · y[n], with B held fixed: rows combined per sample.

        This is the chain rule with a derivative from outside: where a function of the outputs has the derivative B,
        the result is the Jacobian of that function with respect to the parameters.

        Parameters
        ----------
        B : (n, q, l)
            Row i of sample n becomes the sum over j of ``B[n, i, j]`` times row j.

        Returns
        -------
        Jacobian
            Of shape (n*q, m); its ``y`` (n, q) is B·y, and its outputs are flat. The dtype is that of both together:
            give a float32 B to stay in float32.

        Raises
        ------
        ShapeError, DtypeError
            Where B has another shape or is not real.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> loss_gradient = np.ones((3, 2))  # (n, l), from outside
        >>> J.scaled(loss_gradient[:, None, :]).shape
        (3, 8)
        """
        b = arguments.combinations(B, self.n, self.l)
        b = b.astype(arguments.real(np.result_type(self.dtype, b.dtype)), copy=False)
        y = np.matmul(b, self.y[:, :, None].astype(b.dtype, copy=False))[:, :, 0]
        return self._scaled(b, y, OutputSpace.flat(b.shape[1], b.dtype.name))

    # ---- algebra

    def gram(
        self,
        other: JacobianOperator | None = None,
        dtype: DTypeLike | None = None,
        out: NDArray[Any] | None = None,
        threads: int | None = None,
        memory: float | str | None = None,
    ) -> NDArray[Any]:
        """Return J Jᵀ (n*l, n*l), or J otherᵀ: the empirical tangent kernel, without forming J.

        For a block with one position a sample it is the Hadamard product (A Aᵀ) ∘ (D Dᵀ) (Khatri–Rao product
        identity; Novak et al. 2022, "Fast finite width neural tangent kernel", §3.2, "structured derivatives").

        Parameters
        ----------
        other
            A Jacobian with respect to the same parameters, of other samples.
        dtype
            Real floating, of the result and of the sums; by default the Jacobians' own.
        out : (n*l, n*l of other), optional
            Written to and returned.
        threads : int, optional
            By default every core available to the process.
        memory : number of bytes or str, optional
            Most that this call may take: its result, unless it is ``out``, tiles of factors that are computed for it,
            and temporaries. By default tiles keep the budget of the Jacobian, temporaries take a tenth of the result,
            or a few megabytes if that is more, and the result may take what the system has free.

        Returns
        -------
        (n*l, n*l of other) array
            Exactly symmetric where ``other`` is None.

        Raises
        ------
        ShapeError, DtypeError
            Where ``other`` is not a Jacobian with as many parameters, or ``out`` does not fit.
        MemoryBudgetError
            ``memory``, or what is free, is too little; the message states the least that works. Before any work.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> np.allclose(J.gram(), np.asarray(J) @ np.asarray(J).T)
        True
        """
        if other is not None and not isinstance(other, JacobianOperator):
            raise DtypeError(f"gram(other) takes another Jacobian, and got {arguments.describe(other)}.")
        if other is not None and other.parameters.shapes != self.parameters.shapes:
            raise ShapeError("gram(other) needs a Jacobian of the same variables: their shapes or their order differ.")
        columns = self if other is None else other
        workers = arguments.threads(threads)
        default, shape = np.result_type(self.dtype, columns.dtype), (self.shape[0], columns.shape[0])
        given = arguments.result_type(shape, out, dtype, default, "the Gram matrix")
        size = prod(shape) * given.itemsize
        work = algebra.gram_work(self.l, columns.l, size, given.itemsize)
        room = self._room(memory, "the Gram matrix", 0 if out is not None else size, work, given, other)
        array = np.empty(shape, given) if out is None else out
        view = np.asarray(array).reshape(self.n, self.l, columns.n, columns.l)
        wide = None if other is None else other._widened(given)._within(room.tiles)
        self._widened(given)._within(room.tiles)._gram(wide, view, workers, room.work)
        return array

    def normal(
        self,
        weights: ArrayLike | None = None,
        dtype: DTypeLike | None = None,
        threads: int | None = None,
        memory: float | str | None = None,
    ) -> NDArray[Any]:
        """Return Jᵀ J (m, m), or Jᵀ diag(w) J, accumulated over tiles of samples.

        Parameters
        ----------
        weights : (n*l,), (n, l) or (n,), optional
            A weight a row, or a sample; of any sign.
        dtype
            Real floating, of the result and of the sums; by default the Jacobian's own.
        threads : int, optional
            By default every core available to the process.
        memory : number of bytes or str, optional
            Most that this call may take: its result, tiles of factors that are computed for it, and temporaries. By
            default tiles keep the budget of the Jacobian, temporaries take a tenth of the result, between 4 and 32 MiB,
            and the result may take what the system has free.

        Returns
        -------
        (m, m) array
            Exactly symmetric.

        Raises
        ------
        ShapeError, DataError, DtypeError
            Where the weights have another shape, or are not finite or not real.
        MemoryBudgetError
            ``memory``, or what is free, is too little; the message states the least that works. Before any work.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> dense = np.asarray(J)
        >>> np.allclose(J.normal(weights=[1.0, 2.0, 0.5]), dense.T @ np.diag([1, 1, 2, 2, 0.5, 0.5]) @ dense)
        True
        """
        precision = arguments.floating(self.dtype if dtype is None else dtype)
        w = None if weights is None else arguments.row_weights(weights, self.n, self.l)
        workers = arguments.threads(threads)
        work = normal.normal_work(self.m, precision.itemsize)
        room = self._room(memory, "Jᵀ J", self.m**2 * precision.itemsize, work)
        return self._within(room.tiles)._normal(w, precision, workers, room.work)

    def row_norms(self, squared: bool = False, memory: float | str | None = None) -> NDArray[Any]:
        """Return the Euclidean norm of each row (n*l,), or its square: how much each output depends on all parameters.

        ``memory`` is as for `column_norms`.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> np.allclose(J.row_norms(), np.linalg.norm(np.asarray(J), axis=1))
        True
        """
        room = self._room(memory, "the norms of the rows", self.shape[0] * self.dtype.itemsize)
        squares = self._within(room.tiles)._row_squares().reshape(-1)
        return squares if squared else np.sqrt(squares, out=squares)

    def column_norms(
        self, squared: bool = False, weights: ArrayLike | None = None, memory: float | str | None = None
    ) -> NDArray[Any]:
        """Return the Euclidean norm of each column (m,), or its square: how much each parameter moves all outputs.

        Parameters
        ----------
        squared
            Whether to return the squares.
        weights : (n*l,), (n, l) or (n,), optional
            A weight w a row, or a sample, none negative: the norms are those of diag(√w) J, and their squares the
            diagonal of ``normal(weights)``.
        memory : number of bytes or str, optional
            Most that this call may take: its result, and tiles of factors that are computed for it. A few megabytes of
            temporaries come on top. By default tiles keep the budget of the Jacobian.

        Raises
        ------
        ShapeError, DataError, DtypeError
            Where the weights have another shape, or are negative, not finite or not real.
        MemoryBudgetError
            ``memory`` is too little; the message states the least that works. Before any work.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> np.allclose(J.column_norms(), np.linalg.norm(np.asarray(J), axis=0))
        True
        """
        w = None if weights is None else arguments.row_weights(weights, self.n, self.l)
        if w is not None and w.min(initial=0) < 0:
            raise DataError(f"weights of norms must not be negative, and one is {w.min()}.")
        room = self._room(memory, "the norms of the columns", self.m * self.dtype.itemsize)
        squares = self._within(room.tiles)._column_squares(w)
        return squares if squared else np.sqrt(squares, out=squares)

    def lstsq(self, b: ArrayLike, damping: float = 0.0, memory: float | str | None = None) -> NDArray[np.float64]:
        """Return the x that minimises ‖J x − b‖² + damping ‖x‖², in double precision.

        With ``damping=0`` it is the solution of smallest norm, as of `numpy.linalg.lstsq`, J of full rank or not.
        The smaller of J Jᵀ and Jᵀ J is factorised, with iterative refinement; a badly conditioned problem is solved
        by the singular values of the explicit J, and one too large for either by LSMR.

        Parameters
        ----------
        b : (n*l,) or (n, l)
        damping : float
            Not negative. A Levenberg–Marquardt step is ``J.lstsq(-residual, damping)``.
        memory : number of bytes or str, optional
            Most that this call may take: half of it for a matrix that is factorised, where that suffices, and tiles of
            factors that are computed for it. By default tiles keep the budget of the Jacobian, and a matrix may take as
            much, or 32 MiB; what the system has free where the factors are held.

        Returns
        -------
        (m,) array of float64

        Raises
        ------
        ShapeError, DataError, DtypeError
            Where b has another shape, is not finite or not real, damping is negative or not finite, or the Jacobian
            itself is not finite.
        MemoryBudgetError
            ``memory`` is too little; the message states the least that works.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> b = np.arange(6.0)
        >>> np.allclose(J.lstsq(b), np.linalg.lstsq(np.asarray(J), b)[0])
        True
        """
        target = arguments.target(b, self.n, self.l)
        penalty = arguments.damping(damping)
        double, matrix = np.dtype(np.float64), 8 * min(self.shape) ** 2
        if memory is not None:
            work = planning.Work(matrix * 11 // 10 + system.SMALL, 0)
            room = self._room(memory, "a least-squares solution", 8 * self.m, work, double)
            return algebra.solve(self._widened(double)._within(room.tiles), target, penalty, room.work)
        limit = self._solver_bytes
        if limit is None and matrix > system.SMALL:
            limit = system.available()
        return algebra.solve(self._widened(double), target, penalty, limit)
