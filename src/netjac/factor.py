"""From use sites to blocks: the only place that chooses a block's kind and sums over p.

Everything that follows from the sites alone is settled once, by `plan`: where the columns lie, and which sites become
one block (a kernel and its bias share their cotangents, and the bias row follows the kernel's rows: A becomes [A, 1]).
`FactorPlan.build` then turns the values of each evaluation into blocks and does little more than reshape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from netjac.blocks.base import Block, Placement, strided_placement
from netjac.blocks.dense import DenseBlock
from netjac.blocks.embedding import EmbeddingBlock
from netjac.blocks.mapped import MappedBlock
from netjac.blocks.outer import OuterBlock
from netjac.blocks.tiles import contract
from netjac.errors import ShapeError
from netjac.sites import SiteForm, SiteValues, UseSite, dense_is_smaller
from netjac.spaces import ParameterSpace

Box = tuple[slice, slice, slice]  # ranges of g, k and c


@dataclass(frozen=True, eq=False)
class _Member:
    """A use site with its columns."""

    site: int
    form: SiteForm
    columns: NDArray[np.intp]  # (g, k, c), -1 where an entry has none
    placement: Placement | None  # None: not strided, or some entries have no column
    sizes: tuple[int, int, int]  # of E
    box: Box | None  # the part of E that ``columns`` are of, where it is not all of E

    @cached_property
    def local(self) -> Placement:
        """The entries of E one after the other, for a block that is then mapped to its columns."""
        return _in_order(self.columns.shape)

    @cached_property
    def used(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Columns that occur, sorted, and for each entry of E that has one which of them it is."""
        where, index = np.unique(self.columns[self.columns >= 0], return_inverse=True)
        return where, index.reshape(-1)


@dataclass(frozen=True, eq=False)
class _Group:
    """Use sites that become one block: one site, or several that follow each other along k."""

    members: tuple[_Member, ...]
    placement: Placement | None
    rows: tuple[slice, ...]  # of k, one a member


@final
@dataclass(frozen=True, eq=False)
class FactorPlan:
    """What `plan` settled; `build` applies it to the values of an evaluation."""

    groups: tuple[_Group, ...]
    sites: int

    @property
    def joined(self) -> list[tuple[int, int]]:
        """Of each block whose A is put together from several sites, its first site and its k."""
        return [(group.members[0].site, group.rows[-1].stop) for group in self.groups if len(group.members) > 1]

    @cached_property
    def outer(self) -> tuple[Placement, ...]:
        """Where the blocks lie that may be products."""
        groups = [group for group in self.groups if group.members[0].form is SiteForm.OUTER]
        return tuple(group.placement for group in groups if group.placement is not None)

    def build(self, values: Sequence[SiteValues]) -> tuple[Block, ...]:
        """The blocks of one evaluation.

        Parameters
        ----------
        values
            One entry a site, in the order `plan` was given the sites. No array is written to; blocks may hold views.

        Raises
        ------
        ShapeError
            If the number of values or an array's shape does not fit the sites.
        """
        if len(values) != self.sites:
            raise ShapeError(f"expected the values of {self.sites} use sites, and got {len(values)}.")
        blocks: list[Block] = []
        for group in self.groups:
            if len(group.members) == 1:
                blocks.append(_build_one(group.members[0], values[group.members[0].site]))
            elif all(values[member.site].scale is None for member in group.members):
                blocks.append(_build_joined(group, values))
            else:  # a factor on one of them would change the cotangents of all
                blocks.extend(_build_one(member, values[member.site]) for member in group.members)
        return tuple(blocks)


def plan(sites: Sequence[UseSite], parameters: ParameterSpace) -> FactorPlan:
    """Settle, once a signature, how values at ``sites`` become blocks over the columns of ``parameters``.

    Parameters
    ----------
    sites
        In the order in which `FactorPlan.build` will be given their values.
    parameters
        The columns.

    Raises
    ------
    ShapeError
        If the entries of a site lie outside its variable.
    """
    members = [_member(i, site, parameters) for i, site in enumerate(sites)]
    groups: list[_Group] = []
    joinable: dict[tuple[int, int], list[_Member]] = {}
    for member, site in zip(members, sites, strict=True):
        g, k, c = member.columns.shape
        simple = member.placement is not None and member.box is None and g == 1 and k > 0 and c > 0
        if simple and site.form is SiteForm.OUTER and site.cotangent >= 0:
            joinable.setdefault((site.cotangent, c), []).append(member)
        else:
            groups.append(_group([member], member.placement))
    for run in joinable.values():
        groups.extend(_join(sorted(run, key=lambda member: int(member.columns[0, 0, 0]))))
    groups.sort(key=lambda group: group.members[0].site)
    return FactorPlan(tuple(groups), len(members))


def _member(i: int, site: UseSite, parameters: ParameterSpace) -> _Member:
    segment = parameters.segments[site.variable]
    entries = np.asarray(site.entries, np.intp)
    if entries.ndim != 3:
        raise ShapeError(f"the entries of {site.operation!r} must have shape (g, k, c), and have {entries.shape}.")
    if entries.size and not (entries.min() >= -1 and entries.max() < segment.size):
        raise ShapeError(
            f"{site.operation!r} uses entries {entries.min()} to {entries.max()} of {segment.name!r}, "
            f"which has {segment.size}."
        )
    columns = np.where(entries < 0, -1, entries + segment.start)
    g, k, c = columns.shape
    box = _box(columns >= 0) if (entries < 0).any() else None
    if box is not None and (site.form is not SiteForm.EMBEDDING or box[1] == slice(0, k)):
        columns = columns[box]
    else:
        box = None
    return _Member(i, site.form, columns, None if (columns < 0).any() else strided_placement(columns), (g, k, c), box)


def _box(present: NDArray[np.bool]) -> Box | None:
    """The box (of g, k, c) that ``present`` is true in, if it is one: a kernel's part along k, say."""
    ranges = []
    for others in ((1, 2), (0, 2), (0, 1)):
        found = np.flatnonzero(present.any(axis=others))
        if not len(found):
            return None
        ranges.append(slice(int(found[0]), int(found[-1]) + 1))
    box = (ranges[0], ranges[1], ranges[2])
    return box if present[box].all() else None


def _group(members: list[_Member], placement: Placement | None) -> _Group:
    rows, start = [], 0
    for member in members:
        rows.append(slice(start, start + member.columns.shape[1]))
        start = rows[-1].stop
    return _Group(tuple(members), placement, tuple(rows))


def _join(run: list[_Member]) -> list[_Group]:
    """Join neighbours (sorted by column) as long as their concatenation along k is strided."""
    groups: list[_Group] = []
    joined, placement = [run[0]], run[0].placement
    for member in run[1:]:
        longer = strided_placement(np.concatenate([*(m.columns for m in joined), member.columns], axis=1))
        if longer is None:
            groups.append(_group(joined, placement))
            joined, placement = [member], member.placement
        else:
            joined, placement = [*joined, member], longer
    return [*groups, _group(joined, placement)]


def _crop(values: SiteValues, sizes: tuple[int, int, int], box: Box) -> SiteValues:
    """The values of a part of E."""
    (g, k, c), (gs, ks, cs) = sizes, box
    D, A, dense = values.D, values.A, values.dense
    if D is not None:
        n, l, p = D.shape[:3]
        D = D.reshape(n, l, p, g, c)[..., gs, cs].reshape(n, l, p, (gs.stop - gs.start) * (cs.stop - cs.start))
    if dense is not None:
        n, l = dense.shape[:2]
        part = dense.reshape(n, l, g, k, c)[:, :, gs, ks, cs]
        dense = part.reshape(n, l, prod(part.shape[2:]))
    return SiteValues(
        D=D,
        A=None if A is None else A[:, :, gs, ks],
        indices=values.indices,
        scale=None if values.scale is None else values.scale[box],
        dense=dense,
    )


def _real(array: NDArray[Any]) -> NDArray[Any]:
    """The array in single or double precision: half precision widened, integers and flags made single."""
    if array.dtype.char in "fd":
        return array
    return array.astype(np.float64 if array.dtype.kind == "f" and array.dtype.itemsize > 4 else np.float32)


def _cotangents(values: SiteValues, g: int, c: int) -> NDArray[Any]:
    """D as (n, l, p, g, c)."""
    if values.D is None:
        raise ShapeError("a use site with factors came without its cotangents D.")
    n, l, p, width = values.D.shape
    if width != g * c:
        raise ShapeError(f"expected cotangents D (n, l, p, {g * c}), and got {values.D.shape}.")
    return _real(values.D).reshape(n, l, p, g, c)


def _build_joined(group: _Group, values: Sequence[SiteValues]) -> Block:
    """One block of several sites with the same D and g = 1, their A side by side along k."""
    assert group.placement is not None
    _, k, c = group.placement.sizes
    D = _cotangents(values[group.members[0].site], 1, c)
    n, l, p = D.shape[:3]
    given = [values[member.site].A for member in group.members]
    wide = D.dtype.char == "d" or any(A is not None and _real(A).dtype.char == "d" for A in given)
    A = np.empty((n, p, 1, k), np.float64 if wide else np.float32)
    for part, rows in zip(given, group.rows, strict=True):
        A[..., rows] = 1 if part is None else part
    if dense_is_smaller(p, 1, k, c, l):
        return DenseBlock(contract(A, D).reshape(n, l, k * c), group.placement)
    return OuterBlock(A, D, group.placement)


def _build_one(member: _Member, values: SiteValues) -> Block:
    """The block of one site: its factors or their sum over p, spread over its columns."""
    if member.box is not None:
        values = _crop(values, member.sizes, member.box)
    place = member.placement or member.local
    scale = None if values.scale is None else _real(values.scale)
    block: OuterBlock | EmbeddingBlock | DenseBlock
    if member.form is SiteForm.DENSE:
        block, scale = _dense(values, scale, place), None
    elif member.form is SiteForm.EMBEDDING:
        block, scale = _embedding(values, scale, place), None
    else:
        A, D, scale = _fold(values, scale, place.sizes)
        g, k, c = place.sizes
        n, l, p = D.shape[:3]
        if A is None:
            sums = D.sum(axis=2) if p != 1 else D
            block = DenseBlock(sums.reshape(n, l, g * c), place)
        elif dense_is_smaller(p, g, k, c, l):
            block = DenseBlock(contract(A, D).reshape(n, l, g * k * c), place)
        else:
            block = OuterBlock(A, D, place if scale is None else member.local)
        if scale is not None and isinstance(block, DenseBlock):
            block, scale = DenseBlock(block.values * scale.reshape(-1), place), None
    if scale is None and member.placement is not None:
        return block
    where, index = member.used
    present = member.columns.reshape(-1) >= 0
    dtype = block.values.dtype if isinstance(block, DenseBlock) else block.D.dtype
    data = np.ones(len(index), dtype) if scale is None else scale.reshape(-1)[present]
    T = csr_array((data, index, np.append(0, np.cumsum(present))), shape=(len(present), len(where)))
    return MappedBlock(block, T, where)


def _dense(values: SiteValues, scale: NDArray[Any] | None, place: Placement) -> DenseBlock:
    if values.dense is None:
        raise ShapeError("a use site of explicit form came without its values.")
    explicit = _real(values.dense)
    return DenseBlock(explicit if scale is None else explicit * scale.reshape(-1), place)


def _embedding(values: SiteValues, scale: NDArray[Any] | None, place: Placement) -> EmbeddingBlock | DenseBlock:
    """Kept as indices and D; explicit where that is smaller (a small table and many tokens)."""
    if values.indices is None:
        raise ShapeError("an embedding came without its indices.")
    _, k, c = place.sizes
    D = _cotangents(values, 1, c)[:, :, :, 0]
    n, l, p = D.shape[:3]
    if scale is not None:
        D = D * scale[0][values.indices][:, None]
    block = EmbeddingBlock(values.indices, D, place)
    if l * k * c >= p * (1 + l * c):
        return block
    explicit = np.empty((n, l, k * c), D.dtype)
    EmbeddingBlock(values.indices, D, _in_order(place.sizes)).fill(explicit, slice(0, n), add=False)
    return DenseBlock(explicit, place)


def _in_order(sizes: tuple[int, int, int]) -> Placement:
    """Entries of E one after the other from column 0."""
    g, k, c = sizes
    return Placement((g, k, c), (k * c, c, 1), 0, sizes)


def _fold(
    values: SiteValues, scale: NDArray[Any] | None, sizes: tuple[int, int, int]
) -> tuple[NDArray[Any] | None, NDArray[Any], NDArray[Any] | None]:
    """A (n, p, g, k), D (n, l, p, g, c) and what is left of the scale after folding it into one of them.

    A factor that is the same for all c belongs to A, one that is the same for all k to D.
    """
    D = _cotangents(values, sizes[0], sizes[2])
    A = None if values.A is None else _real(values.A)
    if scale is not None and np.array_equal(scale, np.broadcast_to(scale[:, :1], sizes)):
        return A, D * scale[:, 0], None
    if scale is not None and A is not None and np.array_equal(scale, np.broadcast_to(scale[:, :, :1], sizes)):
        return A * scale[:, :, 0], D, None
    return A, D, scale
