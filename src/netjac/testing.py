"""The laws that every block and every Jacobian obeys, as functions to call in a test.

Each takes what is tested and a dense reference made some other way, tries every verb in several forms, and raises
`AssertionError` with the worst entries. `naive_outer`, `naive_embedding` and `spread` are references written as plain
loops. The strategies need Hypothesis, which is imported only when one is called.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy.sparse import csr_array

from netjac.blocks.base import Block, Placement, strided_placement
from netjac.blocks.dense import DenseBlock
from netjac.blocks.embedding import EmbeddingBlock
from netjac.blocks.mapped import MappedBlock
from netjac.blocks.outer import OuterBlock

LAYOUTS = tuple(itertools.permutations("nlm"))


def tolerance(dtype: DTypeLike) -> float:
    """Error allowed relative to the largest entry: 1e-5 in single precision, 1e-12 in double."""
    return 1e-12 if np.dtype(dtype).itemsize > 4 else 1e-5


def assert_close(actual: ArrayLike, expected: ArrayLike, what: str, tol: float | None = None, worst: int = 5) -> None:
    """Raise unless the arrays agree within ``tol`` times the largest finite entry; NaN and infinities must coincide.

    Parameters
    ----------
    actual, expected
        Arrays of the same shape.
    what
        Said in the message.
    tol
        Defaults to `tolerance` of the less precise of the two types.
    worst
        How many of the worst entries the message shows.

    Raises
    ------
    AssertionError
        With the worst entries.
    """
    a, e = np.asarray(actual), np.asarray(expected)
    if a.shape != e.shape:
        raise AssertionError(f"{what}: shape {a.shape}, expected {e.shape}")
    if tol is None:
        tol = max(tolerance(x.dtype) for x in (a, e))
    finite = np.isfinite(e)
    scale = float(np.max(np.abs(e), where=finite, initial=0.0))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(a.astype(np.float64) - e)
    error[(a == e) | (np.isnan(a) & np.isnan(e))] = 0
    error[~np.isfinite(error)] = np.inf
    wrong = error > tol * scale
    if not wrong.any():
        return
    count = np.count_nonzero(wrong)
    lines = [f"{what}: {count} of {wrong.size} entries differ (allowed: {tol:.1e} of {scale:.3g}); the worst:"]
    for flat in np.argsort(-error, axis=None, kind="stable")[: min(worst, count)]:
        where = tuple(int(i) for i in np.unravel_index(flat, a.shape))
        lines.append(f"  {where}: {a[where]!s}, expected {e[where]!s}")
    raise AssertionError("\n".join(lines))


# ---- references


def naive_outer(A: NDArray[Any], D: NDArray[Any]) -> NDArray[Any]:
    """Entries (n, l, g, k, c) of A (n, p, g, k) and D (n, l, p, g, c), one multiplication at a time, in float64."""
    n, p, g, k = A.shape
    l, c = D.shape[1], D.shape[4]
    J = np.zeros((n, l, g, k, c))
    for i, j, q, h, a, b in itertools.product(*map(range, (n, l, p, g, k, c))):
        J[i, j, h, a, b] += float(A[i, q, h, a]) * float(D[i, j, q, h, b])
    return J


def naive_embedding(indices: NDArray[Any], D: NDArray[Any], k: int) -> NDArray[Any]:
    """Entries (n, l, 1, k, c) of indices (n, p) and D (n, l, p, c), one addition at a time, in float64."""
    n, l, p, c = D.shape
    J = np.zeros((n, l, 1, k, c))
    for i, j, q, b in itertools.product(*map(range, (n, l, p, c))):
        J[i, j, 0, int(indices[i, q]), b] += float(D[i, j, q, b])
    return J


def spread(values: NDArray[Any], columns: NDArray[np.intp], m: int, scale: NDArray[Any] | None = None) -> NDArray[Any]:
    """Reference Jacobian (n, l, m): each entry of ``values`` (n, l, g, k, c) added to its column, times its scale."""
    J = np.zeros((*values.shape[:2], m))
    for entry in np.ndindex(*columns.shape):
        factor = 1.0 if scale is None else float(scale[entry])
        J[:, :, columns[entry]] += factor * values[(slice(None), slice(None), *entry)]
    return J


# ---- laws


def check_block(block: Block, dense: NDArray[Any], *, tol: float | None = None, seed: int = 0) -> None:
    """Check every verb of ``block`` against its explicit form ``dense`` (n, l, m).

    Parameters
    ----------
    block
        What is tested.
    dense
        The block's part of the Jacobian, zero elsewhere, made some other way.
    tol
        Error allowed relative to the largest entry of each result; by default that of the block's type.
    seed
        Of the random vectors.

    Raises
    ------
    AssertionError
        Naming the verb, with the worst entries.

    Examples
    --------
    >>> import numpy as np
    >>> from netjac.blocks.base import Placement
    >>> from netjac.blocks.dense import DenseBlock
    >>> from netjac.testing import check_block
    >>> values = np.arange(12.0).reshape(3, 2, 2)
    >>> dense = np.zeros((3, 2, 5))
    >>> dense[:, :, 1:3] = values
    >>> check_block(DenseBlock(values, Placement((2,), (1,), 1, (1, 2, 1))), dense)
    """
    rng = np.random.default_rng(seed)
    assert (block.n, block.l) == dense.shape[:2], f"n, l are {block.n, block.l}, and of the reference {dense.shape[:2]}"
    tol = tolerance(_dtype(block, dense.shape[2])) if tol is None else tol
    check_columns(block, dense)
    check_products(block, dense, tol, rng)
    check_fill(block, dense, tol, rng)
    check_squares(block, dense, tol)
    check_gram(block, dense, tol, rng)
    check_transforms(block, dense, tol, rng)


def _dtype(block: Block, m: int) -> Any:
    squares = block.row_squares()
    assert squares.shape == (block.n, block.l), f"row_squares has shape {squares.shape}"
    return squares.dtype


def check_columns(block: Block, dense: NDArray[Any]) -> None:
    """Columns are sorted, without repetition, and hold everything that is not zero."""
    columns = block.columns()
    assert columns.ndim == 1, f"columns has shape {columns.shape}"
    assert np.all(np.diff(columns) > 0), "columns are not rising"
    assert not columns.size or (columns[0] >= 0 and columns[-1] < dense.shape[2]), "columns out of range"
    others = np.setdiff1d(np.arange(dense.shape[2]), columns)
    assert not np.any(dense[:, :, others]), "the reference has entries outside the block's columns"
    assert block.nbytes >= 0


def check_products(block: Block, dense: NDArray[Any], tol: float, rng: np.random.Generator) -> None:
    """J v and Jᵀ u, of one and several vectors in different memory, are added; the dot test; linearity."""
    n, l, m = dense.shape
    for q, dtype in itertools.product((0, 1, 3), (np.float32, np.float64)):
        loose = max(tol, tolerance(dtype))
        v = rng.standard_normal((m, q)).astype(dtype)
        u = rng.standard_normal((n, l, q)).astype(dtype)
        Jv = np.einsum("nlm,mq->nlq", dense, v)
        Ju = np.einsum("nlm,nlq->mq", dense, u)
        for form, vf, uf in (
            ("C order", v, u),
            ("Fortran order", np.asfortranarray(v), np.asfortranarray(u)),
            ("strided", _strided(v), _strided(u)),
        ):
            out, back = np.ones((n, l, q)), np.ones((m, q))
            block.add_product(vf, out)
            block.add_adjoint(uf, back)
            assert_close(out - 1, Jv, f"add_product, q = {q}, {form}", 10 * loose)
            assert_close(back - 1, Ju, f"add_adjoint, q = {q}, {form}", 10 * loose)
    v, w, u = rng.standard_normal((m, 1)), rng.standard_normal((m, 1)), rng.standard_normal((n, l, 1))
    Jv, Jw, Jsum, Ju = np.zeros((n, l, 1)), np.zeros((n, l, 1)), np.zeros((n, l, 1)), np.zeros((m, 1))
    block.add_product(v, Jv)
    block.add_product(w, Jw)
    block.add_product(2 * v - 3 * w, Jsum)
    block.add_adjoint(u, Ju)
    if np.all(np.isfinite(dense)):
        assert_close(Jsum, 2 * Jv - 3 * Jw, "linearity", 100 * tol)
        size = float(np.abs(u).ravel() @ np.abs(np.einsum("nlm,mq->nlq", np.abs(dense), np.abs(v))).ravel())
        gap = abs(float(np.vdot(u, Jv)) - float(np.vdot(Ju, v)))
        assert gap <= 10 * tol * size, f"dot test: u·Jv and Jᵀu·v differ by {gap:.3e} of {size:.3e}"


def _strided(array: NDArray[Any]) -> NDArray[Any]:
    """The same numbers with gaps between them in memory."""
    wide = np.full(tuple(2 * s + 1 for s in array.shape), np.nan, array.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in array.shape)]
    view[...] = array
    return view


def buffers(n: int, l: int, m: int, dtype: DTypeLike) -> dict[str, NDArray[Any]]:
    """Buffers (n, l, m) of ones in every order of memory, and with gaps."""
    found: dict[str, NDArray[Any]] = {}
    sizes = {"n": n, "l": l, "m": m}
    for layout in LAYOUTS:
        buffer = np.ones([sizes[letter] for letter in layout], dtype)
        found[" ".join(layout)] = buffer.transpose([layout.index(letter) for letter in "nlm"])
    found["with gaps"] = _strided(np.ones((n, l, m), dtype))
    found["backwards"] = np.ones((n, l, m), dtype)[::-1, ::-1, ::-1]
    return found


def check_fill(block: Block, dense: NDArray[Any], tol: float, rng: np.random.Generator) -> None:
    """Explicit columns in every layout, written and added, whole and for some samples; other columns untouched."""
    n, l, m = dense.shape
    own = np.zeros(m, bool)
    own[block.columns()] = True
    start = n // 3
    for dtype, samples, add in itertools.product(
        (np.float32, np.float64), (slice(0, n), slice(start, n - n // 4)), (False, True)
    ):
        part = dense[samples]
        expected = np.where(own, part + 1 if add else part, 1)
        for layout, out in buffers(len(part), l, m, dtype).items():
            block.fill(out, samples, add=add)
            assert_close(
                out, expected, f"fill {layout!r}, {np.dtype(dtype)}, {samples}, add = {add}", max(tol, tolerance(dtype))
            )


def check_squares(block: Block, dense: NDArray[Any], tol: float) -> None:
    """Squared norms of rows and columns."""
    assert_close(block.row_squares(), np.einsum("nlm,nlm->nl", dense, dense), "row_squares", 10 * tol)
    columns = np.ones(dense.shape[2])
    block.add_column_squares(columns)
    assert_close(columns - 1, np.einsum("nlm,nlm->m", dense, dense), "add_column_squares", 10 * tol)


def check_gram(block: Block, dense: NDArray[Any], tol: float, rng: np.random.Generator) -> None:
    """J Jᵀ with itself and with another selection of samples and outputs, whole and in part."""
    n, l, _ = dense.shape
    index = rng.integers(0, n, 3 if n else 0)
    b = rng.standard_normal((len(index), l + 1, l))
    other, other_dense = block.take(index).scaled(b), b @ dense[index]
    for what, theirs, reference in (("itself", block, dense), ("another", other, other_dense)):
        s = len(reference)
        for rows, columns in ((slice(0, n), slice(0, s)), (slice(n // 2, n), slice(0, s // 2))):
            expected = np.einsum("nlm,stm->nlst", dense[rows], reference[columns])
            out = np.ones(expected.shape)
            block.add_gram(theirs, rows, columns, out)
            assert_close(out - 1, expected, f"add_gram with {what}, {rows}, {columns}", 10 * tol)


def check_transforms(block: Block, dense: NDArray[Any], tol: float, rng: np.random.Generator) -> None:
    """take, scaled, restricted and pickling give blocks of the expected explicit form."""
    n, l, m = dense.shape
    index = np.sort(rng.integers(0, n, 4)) if n else np.zeros(0, np.intp)
    for what, samples in (("indices", index), ("a slice", slice(n // 2, n)), ("none", slice(0, 0))):
        _check_explicit(block.take(samples), dense[samples], f"take {what}", tol)
        _check_explicit(
            block.take(samples, slice(l // 3, l)), dense[samples][:, l // 3 :], f"take outputs, {what}", tol
        )
    for q in (0, 1, l + 2):
        b = rng.standard_normal((n, q, l))
        _check_explicit(block.scaled(b), b @ dense, f"scaled to {q} rows", 10 * tol)
    w = rng.standard_normal((n, l))
    _check_explicit(block.weighted(w), w[:, :, None] * dense, "weighted", 10 * tol)
    for columns in (1, 7, max(1, m)):
        total = np.zeros_like(dense)
        pieces = block.pieces(columns)
        for piece in pieces:
            assert (piece.n, piece.l) == (n, l)
            piece.fill(total, slice(0, n), add=False)
        assert sum(len(piece.columns()) for piece in pieces) == len(block.columns()), "pieces share columns"
        assert_close(total, dense, f"pieces of {columns} columns", tol)
    _check_explicit(pickle.loads(pickle.dumps(block)), dense, "pickled", tol)
    check_restricted(block, dense, ((0, m),), tol)


def check_restricted(
    block: Block, dense: NDArray[Any], variables: Sequence[tuple[int, int]], tol: float | None = None
) -> None:
    """Each variable's columns alone (``variables`` are their borders), moved to the front and to the back."""
    m = dense.shape[2]
    tol = tolerance(_dtype(block, m)) if tol is None else tol
    for start, stop in variables:
        for shift in (-start, 5):
            part = block.restricted(start, stop, shift)
            reference = np.zeros((*dense.shape[:2], m + 5))
            reference[:, :, start + shift : stop + shift] = dense[:, :, start:stop]
            if part is None:
                columns = block.columns()
                assert not np.any((columns >= start) & (columns < stop)), f"restricted lost columns {start}:{stop}"
            else:
                _check_explicit(part, reference, f"restricted to {start}:{stop}, moved by {shift}", tol)


def _check_explicit(block: Block, dense: NDArray[Any], what: str, tol: float) -> None:
    out = np.zeros(dense.shape)
    block.fill(out, slice(0, len(dense)), add=False)
    assert_close(out, dense, what, tol)
    product = np.zeros((*dense.shape[:2], 1))
    block.add_product(np.ones((dense.shape[2], 1)), product)
    assert_close(product[..., 0], dense.sum(axis=2), f"{what}: add_product", 100 * tol)


def check_operator(operator: Any, dense: NDArray[Any], *, tol: float | None = None, seed: int = 0) -> None:
    """Check a SciPy ``LinearOperator`` against ``dense`` (rows, columns) in every form of argument.

    Raises
    ------
    AssertionError
        Naming the form, with the worst entries.
    """
    rng = np.random.default_rng(seed)
    rows, columns = dense.shape
    assert tuple(operator.shape) == dense.shape, f"shape {operator.shape}, expected {dense.shape}"
    tol = tolerance(operator.dtype) if tol is None else tol
    scale = 100 * tol
    for name, forward, reference, size in (
        ("J", operator, dense, columns),
        ("J.T", operator.T, dense.T, rows),
        ("J.H", operator.H, dense.T, rows),
    ):
        vector: NDArray[Any] = rng.standard_normal((size,))
        matrix = rng.standard_normal((size, 3))
        for form, x in {
            "a vector": vector,
            "a column": vector[:, None],
            "a matrix": matrix,
            "a Fortran-ordered matrix": np.asfortranarray(matrix),
            "a transposed matrix": np.ascontiguousarray(matrix.T).T,
            "a strided vector": _strided(vector),
            "float32": vector.astype(np.float32),
            "integers": np.arange(size),
            "a read-only vector": _read_only(vector),
        }.items():
            loose = max(scale, 100 * tolerance(np.float32)) if form == "float32" else scale
            assert_close(forward @ x, reference @ x, f"{name} @ {form}", loose)
        assert_close(forward.matvec(vector), reference @ vector, f"{name}.matvec", scale)
        assert_close(forward.rmatvec(reference @ vector), reference.T @ (reference @ vector), f"{name}.rmatvec", scale)
        assert_close(forward.matmat(matrix), reference @ matrix, f"{name}.matmat", scale)
        assert_close(forward.rmatmat(reference @ matrix), reference.T @ (reference @ matrix), f"{name}.rmatmat", scale)
    v = np.asarray(rng.standard_normal(columns))
    u = np.asarray(rng.standard_normal(rows))
    size = float(np.abs(u) @ (np.abs(dense) @ np.abs(v)))
    gap = abs(float(u @ (operator @ v)) - float((operator.T @ u) @ v))
    assert gap <= 10 * tol * size, f"dot test: u·Jv and Jᵀu·v differ by {gap:.3e} of {size:.3e}"
    again = pickle.loads(pickle.dumps(operator))
    assert_close(again @ v, dense @ v, "pickled", scale)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


# ---- Hypothesis strategies


def columns_of(draw: Any, sizes: tuple[int, int, int]) -> tuple[NDArray[np.intp], int]:
    """Distinct, strided columns (g, k, c) in some order of memory, and m; ``draw`` is that of a composite strategy.

    The axes are permuted, k may be split around the others (as in a transposed convolution), each axis may run
    backwards, and there may be gaps.
    """
    from hypothesis import strategies as st

    g, k, c = sizes
    splits = [i for i in range(1, k + 1) if k % i == 0] or [1]
    outer = draw(st.sampled_from(splits))
    axes = {"g": g, "outer": outer, "inner": k // outer, "c": c}
    order = draw(st.permutations(tuple(axes)))
    step, offset, extra = draw(st.integers(1, 2)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    total = g * k * c
    columns = np.arange(total).reshape([axes[name] for name in order])
    columns = columns.transpose([order.index(name) for name in axes])
    for axis in range(4):
        if draw(st.booleans()):
            columns = np.flip(columns, axis)
    return offset + step * columns.reshape(g, k, c), offset + step * total + extra


def sizes_of(draw: Any) -> tuple[int, int, int, int, int, int]:
    """Small n, l, p, g, k, c, zeros and ones among them."""
    from hypothesis import strategies as st

    n, l, p, c = (draw(st.integers(0, 3)) for _ in range(4))
    g = draw(st.sampled_from([1, 1, 2, 3]))
    k = draw(st.sampled_from([0, 1, 2, 3, 4, 6]))
    return n, l, p, g, k, c


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike, strided: bool = False) -> NDArray[Any]:
    """Read-only normal numbers, with gaps in memory if ``strided``."""
    array = rng.standard_normal(shape).astype(dtype)
    array = _strided(array) if strided else array
    array.flags.writeable = False
    return array


def blocks(kinds: Sequence[str] = ("outer", "dense", "embedding", "mapped")) -> Any:
    """Strategy for pairs of a block, of one of ``kinds``, and its explicit form (n, l, m) made by plain loops."""
    from hypothesis import strategies as st

    @st.composite
    def pairs(draw: Any) -> tuple[Block, NDArray[Any]]:
        kind = draw(st.sampled_from(list(kinds)))
        n, l, p, g, k, c = sizes_of(draw)
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        dtype, strided = draw(st.sampled_from([np.float32, np.float64])), draw(st.booleans())
        if kind == "embedding":
            g = 1
            p = p if k else 0
        columns, m = columns_of(draw, (g, k, c))
        inner = kind if kind != "mapped" else draw(st.sampled_from(["outer", "dense"]))
        place = _placement(columns if kind != "mapped" else np.arange(columns.size).reshape(g, k, c))
        block: Block
        if inner == "outer":
            A, D = numbers(rng, (n, p, g, k), dtype, strided), numbers(rng, (n, l, p, g, c), dtype, strided)
            values, block = naive_outer(A, D), OuterBlock(A, D, place)
        elif inner == "dense":
            flat = numbers(rng, (n, l, g * k * c), dtype, strided)
            values, block = flat.astype(np.float64).reshape(n, l, g, k, c), DenseBlock(flat, place)
        else:
            indices, E = rng.integers(0, max(k, 1), (n, p)), numbers(rng, (n, l, p, c), dtype, strided)
            values, block = naive_embedding(indices, E, k), EmbeddingBlock(indices, E, place)
        if kind != "mapped":
            return block, spread(values, columns, m)
        columns = rng.permutation(columns.reshape(-1)).reshape(g, k, c)
        if columns.size:  # some of them repeat
            columns = rng.choice(columns.reshape(-1), columns.shape)
        where, index = np.unique(columns, return_inverse=True)
        scale = numbers(rng, (g, k, c), dtype)
        T = csr_array((scale.reshape(-1), index.reshape(-1), np.arange(scale.size + 1)), shape=(scale.size, len(where)))
        return MappedBlock(block, T, where), spread(values, columns, m, scale)

    return pairs()


def _placement(columns: NDArray[np.intp]) -> Placement:
    placement = strided_placement(columns)
    assert placement is not None
    return placement
