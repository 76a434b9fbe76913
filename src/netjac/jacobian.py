"""The Jacobian: a SciPy LinearOperator made of blocks.

Nothing dense is formed until it is asked for. Public methods validate and say what is wrong; what they compute with
is in `blocks`, `materialise` and `algebra`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy.sparse.linalg import LinearOperator

from netjac import algebra, arguments, materialise
from netjac.blocks.base import Block
from netjac.errors import DataError, DtypeError, ShapeError
from netjac.layout import parse
from netjac.sites import Coverage
from netjac.spaces import OutputSpace, ParameterSpace
from netjac.transposed import TransposedJacobian


@final
class Jacobian(LinearOperator):
    """Derivative of n samples' l outputs with respect to m parameters, kept as layer factors.

    Made by `netjac.jacobian`. Rows are sample-major (row i·l + j is output j of sample i), columns are the variables
    in order, each flattened in C order.

    Parameters
    ----------
    parameters
        The columns.
    output_space
        What the l outputs of a sample are.
    y : (n, l)
        The outputs the derivative belongs to.
    blocks
        What the Jacobian is the sum of.
    coverage
        What became of each variable.
    dtype
        Of products with vectors no wider, and of `to_array`; by default that of ``y``.

    Attributes
    ----------
    shape : (n*l, m)
    dtype : numpy.dtype
    n, l, m : int
        Samples, outputs a sample, parameters.
    y : (n, l), read-only
        The outputs, flat.
    parameters, output_space, coverage
        As given.

    Examples
    --------
    >>> from netjac.examples import linear_layer
    >>> import numpy as np
    >>> J = linear_layer()  # y = x W + b
    >>> J.shape, J.n, J.l, J.m
    ((6, 8), 3, 2, 8)
    >>> v = np.ones(J.m)
    >>> np.allclose(J @ v, np.asarray(J) @ v)
    True
    """

    def __init__(
        self,
        parameters: ParameterSpace,
        output_space: OutputSpace,
        y: ArrayLike,
        blocks: Sequence[Block],
        coverage: Coverage,
        dtype: DTypeLike | None = None,
    ) -> None:
        outputs = np.asarray(y).view()
        if outputs.ndim != 2 or outputs.shape[1] != output_space.size:
            raise ShapeError(f"y must have shape (n, {output_space.size}), and has {outputs.shape}.")
        outputs.flags.writeable = False
        n, l = outputs.shape
        for block in blocks:
            if block.n != n or block.l != l:
                raise ShapeError(f"y has shape {(n, l)} and one of the blocks belongs to {(block.n, block.l)}.")
        self.y = outputs
        self.n, self.l, self.m = n, l, parameters.size
        self.parameters = parameters
        self.output_space = output_space
        self.coverage = coverage
        self.blocks = tuple(blocks)
        super().__init__(arguments.floating(outputs.dtype if dtype is None else dtype), (n * l, parameters.size))

    # ---- what it is

    @property
    def outputs(self) -> Any:
        """The outputs at which the derivative was taken, in the model's own structure and shapes; read-only views."""
        return self.output_space.pack(self.y)

    @property
    def nbytes(self) -> int:
        """Bytes of the factors held; the dense matrix would take ``n * l * m * dtype.itemsize``."""
        return sum(block.nbytes for block in self.blocks)

    def __repr__(self) -> str:
        dense = self.n * self.l * self.m * self.dtype.itemsize
        return (
            f"<Jacobian of {self.n} samples × {self.l} outputs with respect to {self.m} parameters: "
            f"shape {self.shape}, {self.dtype}, {_megabytes(self.nbytes)} factored, {_megabytes(dense)} dense>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            Jacobian,
            (self.parameters, self.output_space, self.y, self.blocks, self.coverage, self.dtype),
        )

    @cached_property
    def _cover(self) -> materialise.Cover:
        return materialise.cover_of(self.blocks, self.m)

    def _widened(self, dtype: np.dtype[Any]) -> Jacobian:
        """The same Jacobian in a wider precision; itself where that is not wider."""
        if np.can_cast(dtype, self.dtype):
            return self
        blocks = [algebra.widened(block, dtype) for block in self.blocks]
        return Jacobian(self.parameters, self.output_space, self.y, blocks, self.coverage, dtype)

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
        for block in self.blocks:
            block.add_product(columns, out)
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
        cotangents = u.reshape(self.n, self.l, width)
        for block in self.blocks:
            block.add_adjoint(cotangents, out)
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
        materialise.fill(self.blocks, self._cover, view, threads=workers)
        return out

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise DataError("a Jacobian is kept as factors, so an array of it is always new; ask without copy=False.")
        matrix = self.to_array()
        return matrix if dtype is None else matrix.astype(dtype, copy=False)

    # ---- parts of it

    def columns(self, names: str | Sequence[str]) -> Jacobian:
        """Return the Jacobian with respect to the named variables alone, in the order given.

        Parameters
        ----------
        names
            One name or several; an end of a name that fits only one variable will do.

        Raises
        ------
        NameLookupError
            Where a name fits no variable, or several, or is given twice; the message lists the names.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> linear_layer().columns("bias")
        <Jacobian of 3 samples × 2 outputs with respect to 2 parameters: shape (6, 2), float64, ...>
        """
        space, positions = self.parameters.select([names] if isinstance(names, str) else list(names))
        blocks = []
        for position, new in zip(positions, space.segments, strict=True):
            old = self.parameters.segments[position]
            parts = [block.restricted(old.start, old.stop, new.start - old.start) for block in self.blocks]
            blocks += [part for part in parts if part is not None]
        chosen = {self.parameters.segments[position].name for position in positions}
        coverage = Coverage(tuple(entry for entry in self.coverage.entries if entry.variable in chosen))
        return Jacobian(space, self.output_space, self.y, blocks, coverage, self.dtype)

    def __getitem__(self, samples: Any) -> Jacobian:
        """Return the Jacobian of some samples: an integer (n = 1), a slice, integers or a boolean mask."""
        index = arguments.sample_index(samples, self.n)
        blocks = [block.take(index) for block in self.blocks]
        return Jacobian(self.parameters, self.output_space, self.y[index], blocks, self.coverage, self.dtype)

    def scaled(self, B: ArrayLike) -> Jacobian:
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
        dtype = arguments.real(np.result_type(self.dtype, b.dtype))
        b = b.astype(dtype, copy=False)
        y = np.matmul(b, self.y[:, :, None].astype(dtype, copy=False))[:, :, 0]
        space = OutputSpace.flat(b.shape[1], dtype.name)
        return Jacobian(self.parameters, space, y, [block.scaled(b) for block in self.blocks], self.coverage, dtype)

    # ---- algebra

    def gram(
        self,
        other: Jacobian | None = None,
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
        if other is not None and not isinstance(other, Jacobian):
            raise DtypeError(f"gram(other) takes another Jacobian, and got {arguments.describe(other)}.")
        if other is not None and other.parameters.shapes != self.parameters.shapes:
            raise ShapeError("gram(other) needs a Jacobian of the same variables: their shapes or their order differ.")
        columns = self if other is None else other
        workers = 1 if threads is None else arguments.threads(threads)
        default = np.result_type(self.dtype, columns.dtype)
        out = arguments.buffer((self.shape[0], columns.shape[0]), out, dtype, default, "the Gram matrix")
        view = np.asarray(out).reshape(self.n, self.l, columns.n, columns.l)
        rows = _parts(self._widened(out.dtype))
        algebra.gram(rows, None if other is None else _parts(other._widened(out.dtype)), view, workers)
        return out

    def normal(
        self, weights: ArrayLike | None = None, dtype: DTypeLike | None = None, threads: int | None = None
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
        return algebra.normal(_parts(self._widened(precision)), w, precision, arguments.threads(threads))

    def row_norms(self, squared: bool = False) -> NDArray[Any]:
        """Return the Euclidean norm of each row (n*l,), or its square: how much each output depends on all parameters.

        Examples
        --------
        >>> from netjac.examples import linear_layer
        >>> J = linear_layer()
        >>> np.allclose(J.row_norms(), np.linalg.norm(np.asarray(J), axis=1))
        True
        """
        squares = algebra.row_squares(_parts(self)).reshape(-1)
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
        squares = algebra.column_squares(_parts(self))
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
        return algebra.solve(wide, _parts(wide), target, penalty)


def _parts(jacobian: Jacobian) -> algebra.Parts:
    borders = tuple((segment.start, segment.stop) for segment in jacobian.parameters.segments)
    J = jacobian
    return algebra.Parts(J.blocks, J._cover, borders, J.n, J.l, J.m, J.dtype)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
