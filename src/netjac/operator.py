"""What the Jacobian held as factors and the one recomputed tile by tile have in common: every verb, over their tiles.

Arguments are checked here, once. What the two differ in is where a tile comes from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy.sparse.linalg import LinearOperator

from netjac import algebra, arguments, materialise
from netjac.errors import DataError, DtypeError, ShapeError
from netjac.layout import parse
from netjac.progress import Progress, Shown
from netjac.sites import Coverage
from netjac.spaces import OutputSpace, ParameterSpace
from netjac.transposed import TransposedJacobian

if TYPE_CHECKING:
    from netjac.jacobian import Jacobian


class JacobianOperator(LinearOperator, ABC):
    """Derivative of n samples' l outputs with respect to m parameters, as a SciPy operator of shape (n*l, m).

    Parameters
    ----------
    parameters, output_space, coverage
        As for `netjac.Jacobian`.
    y : (n, l)
        The outputs the derivative belongs to; kept as a read-only view.
    dtype
        Real floating.
    """

    def __init__(
        self,
        parameters: ParameterSpace,
        output_space: OutputSpace,
        y: ArrayLike,
        coverage: Coverage,
        dtype: DTypeLike | None = None,
    ) -> None:
        outputs = np.asarray(y).view()
        if outputs.ndim != 2 or outputs.shape[1] != output_space.size:
            raise ShapeError(f"y must have shape (n, {output_space.size}), and has {outputs.shape}.")
        outputs.flags.writeable = False
        n, l = outputs.shape
        self.y = outputs
        self.n, self.l, self.m = n, l, parameters.size
        self.parameters = parameters
        self.output_space = output_space
        self.coverage = coverage
        super().__init__(arguments.floating(outputs.dtype if dtype is None else dtype), (n * l, parameters.size))

    # ---- where the two kinds differ

    @abstractmethod
    def _grid(self) -> Sequence[tuple[slice, slice]]:
        """Ranges of samples and of outputs that together are all rows, each row once."""

    @abstractmethod
    def _tile(self, samples: slice, outputs: slice) -> Jacobian:
        """The rows of one of these ranges."""

    @abstractmethod
    def _widened(self, dtype: np.dtype[Any]) -> Self:
        """The same Jacobian in a wider precision; itself where that is not wider."""

    @abstractmethod
    def _add_product(self, v: NDArray[Any], out: NDArray[Any]) -> None:
        """out (n, l, q) += J v, for v (m, q)."""

    @abstractmethod
    def _add_adjoint(self, u: NDArray[Any], out: NDArray[Any]) -> None:
        """out (m, q) += Jᵀ u, for u (n, l, q)."""

    progress: Shown = None
    """Whether verbs that take several tiles show how far they are: None, with a bar on standard error after a second if
    that is a terminal; False, not; True, whatever standard error is; or on a text stream."""

    _solver_bytes: int | None = None  # most that `lstsq` may spend on an explicit matrix, where that is limited

    # ---- what it is

    def tiles(self) -> Iterator[tuple[slice, slice, Jacobian]]:
        """Iterate over (samples, outputs, the Jacobian of those alone); together they are all rows, each once.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> total = np.zeros(J.m)
        >>> for samples, outputs, tile in J.tiles():  # Jᵀ y, whatever the number of tiles
        ...     total += tile.T @ J.y[samples, outputs].reshape(-1)
        >>> np.allclose(total, J.T @ J.y.reshape(-1))
        True
        """
        for samples, outputs in self._grid():
            yield samples, outputs, self._tile(samples, outputs)

    def _shown(self, what: str) -> Iterator[tuple[slice, slice, Jacobian]]:
        """The tiles, with the rows of those that were used counted where that is to be seen."""
        with Progress(what, self.shape[0], self.progress if len(self._grid()) > 1 else False) as bar:
            for samples, outputs, tile in self.tiles():
                yield samples, outputs, tile
                bar.add(tile.shape[0])
                del tile

    @property
    def outputs(self) -> Any:
        """The outputs at which the derivative was taken, in the model's own structure and shapes; read-only views."""
        return self.output_space.pack(self.y)

    def _combined(self, B: ArrayLike) -> tuple[NDArray[Any], NDArray[Any], OutputSpace]:
        """For `scaled`: B (n, q, l) in the type of the result, B·y (n, q), and what the new rows are called."""
        b = arguments.combinations(B, self.n, self.l)
        dtype = arguments.real(np.result_type(self.dtype, b.dtype))
        b = b.astype(dtype, copy=False)
        y = np.matmul(b, self.y[:, :, None].astype(dtype, copy=False))[:, :, 0]
        return b, y, OutputSpace.flat(b.shape[1], dtype.name)

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

    # ---- the explicit matrix

    def to_array(
        self,
        layout: str = "(n l) m",
        *,
        out: NDArray[Any] | None = None,
        dtype: DTypeLike | None = None,
        threads: int | None = None,
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
        out = arguments.buffer(shape, out, dtype, self.dtype, f"the layout {layout!r}")
        view = arrangement.view(np.asarray(out), self.n, self.l, self.m)
        for samples, outputs, tile in self._shown("to_array"):
            materialise.fill(tile.blocks, tile.cover, view[samples, outputs], threads=workers)
        return out

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise DataError("a Jacobian is kept as factors, so an array of it is always new; ask without copy=False.")
        matrix = self.to_array()
        return matrix if dtype is None else matrix.astype(dtype, copy=False)

    # ---- algebra

    def gram(
        self,
        other: JacobianOperator | None = None,
        dtype: DTypeLike | None = None,
        out: NDArray[Any] | None = None,
        threads: int | None = None,
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
            Tiles worked on at once; by default one, because BLAS spreads the products in it over the cores.

        Returns
        -------
        (n*l, n*l of other) array
            Exactly symmetric where ``other`` is None. Peak memory is that of the result and a tenth of
            it, or a few megabytes if that is more.

        Raises
        ------
        ShapeError, DtypeError
            Where ``other`` is not a Jacobian with as many parameters, or ``out`` does not fit.

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
        workers = 1 if threads is None else arguments.threads(threads)
        default = np.result_type(self.dtype, columns.dtype)
        out = arguments.buffer((self.shape[0], columns.shape[0]), out, dtype, default, "the Gram matrix")
        view = np.asarray(out).reshape(self.n, self.l, columns.n, columns.l)
        wide = None if other is None else other._widened(out.dtype)
        _gram(self._widened(out.dtype), wide, view, workers)
        return out

    def normal(
        self,
        weights: ArrayLike | None = None,
        dtype: DTypeLike | None = None,
        threads: int | None = None,
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

        Returns
        -------
        (m, m) array
            Exactly symmetric.

        Raises
        ------
        ShapeError, DataError, DtypeError
            Where the weights have another shape, or are not finite or not real.

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
        total = np.zeros((self.m, self.m), precision)
        for samples, outputs, tile in self._widened(precision)._shown("normal"):
            algebra.add_normal(tile.parts, None if w is None else w[samples, outputs], total, workers)
        algebra.mirror(total)
        return total

    def row_norms(self, squared: bool = False) -> NDArray[Any]:
        """Return the Euclidean norm of each row (n*l,), or its square: how much each output depends on all parameters.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> np.allclose(J.row_norms(), np.linalg.norm(np.asarray(J), axis=1))
        True
        """
        by_sample = np.zeros((self.n, self.l), self.dtype)
        for samples, outputs, tile in self._shown("row_norms"):
            algebra.add_row_squares(tile.parts, by_sample[samples, outputs])
        squares = by_sample.reshape(-1)
        return squares if squared else np.sqrt(squares, out=squares)

    def column_norms(self, squared: bool = False) -> NDArray[Any]:
        """Return the Euclidean norm of each column (m,), or its square: how much each parameter moves all outputs.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> np.allclose(J.column_norms(), np.linalg.norm(np.asarray(J), axis=0))
        True
        """
        squares = np.zeros(self.m, self.dtype)
        for _, _, tile in self._shown("column_norms"):
            algebra.add_column_squares(tile.parts, squares)
        return squares if squared else np.sqrt(squares, out=squares)

    def lstsq(self, b: ArrayLike, damping: float = 0.0) -> NDArray[np.float64]:
        """Return the x that minimises ‖J x − b‖² + damping ‖x‖², in double precision.

        With ``damping=0`` it is the solution of smallest norm, as of `numpy.linalg.lstsq`, J of full rank or not.
        The smaller of J Jᵀ and Jᵀ J is factorised, with iterative refinement; a badly conditioned problem is solved
        by the singular values of the explicit J, and one too large for either by LSMR.

        Parameters
        ----------
        b : (n*l,) or (n, l)
        damping : float
            Not negative. A Levenberg–Marquardt step is ``J.lstsq(-residual, damping)``.

        Returns
        -------
        (m,) array of float64

        Raises
        ------
        ShapeError, DataError, DtypeError
            Where b has another shape, is not finite or not real, damping is negative or not finite, or the Jacobian
            itself is not finite.

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
        wide = self._widened(np.dtype(np.float64))
        return algebra.solve(wide, target, penalty, self._solver_bytes)


def _gram(rows: JacobianOperator, columns: JacobianOperator | None, out: NDArray[Any], threads: int) -> None:
    """Write J Jᵀ, or J otherᵀ, into ``out`` (n, l, n of other, l of other), at most two tiles in memory at once."""
    symmetric = columns is None
    other = rows if columns is None else columns
    with Progress("gram", out.size, rows.progress if len(rows._grid()) > 1 else False, "entries") as bar:
        for r, i in rows._grid():
            upper = rows._tile(r, i)
            if symmetric:
                algebra.gram(upper.parts, None, out[r, i, r, i], threads)
                bar.add(out[r, i, r, i].size)
            for c, j in other._grid():
                if symmetric and (c, j) == (r, i):
                    break
                part = out[r, i, c, j]
                algebra.gram(upper.parts, other._tile(c, j).parts, part, threads)
                if symmetric:
                    out[c, j, r, i] = part.transpose(2, 3, 0, 1)
                bar.add(part.size * (2 if symmetric else 1))
