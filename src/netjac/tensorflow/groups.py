"""Matches → groups: uses of one variable that add up, and what is kept of each.

Unrolled steps and repeated layers use the same entries of a variable in the same way: they are one site with more
positions p. Whether a group stays factored or is summed over p is arithmetic on sizes, known before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from netjac.sites import SiteForm, dense_is_smaller
from netjac.tensorflow.match import WITHOUT_DERIVATIVE, Graph, Match, is_differentiable
from netjac.tensorflow.survey import Survey
from netjac.tensorflow.weights import Mix

RESHAPES = frozenset({"Reshape", "Squeeze", "ExpandDims", "Identity"})
SUMS = frozenset({"BiasAdd", "Add", "AddV2", "Sub"})


@dataclass(frozen=True)
class Cotangent:
    """D of one z: read from the cotangent of ``root``, which has z's entries in z's order.

    Two z with equal `Cotangent` have the same D, whatever the data: a MatMul and the BiasAdd behind it.
    """

    root: str
    fine: tuple[int, ...]  # sizes of z's fine axes, 0 standing for the samples
    order: tuple[int, ...]  # of the fine axes, to (n, p…, g…, c…); empty if they are in order already
    shape: tuple[int, int]  # (p, g·c)
    mix: Mix | None = None  # what it is then multiplied by


@dataclass(frozen=True, eq=False)
class Group:
    """Uses of one variable with the same entries.

    Attributes
    ----------
    members, cotangents
        The uses, and where each one's D comes from.
    form
        What is kept. `SiteForm.DENSE`: the sum over p.
    sizes
        p (of all members together), g, k, c.
    """

    members: tuple[Match, ...]
    cotangents: tuple[Cotangent, ...]
    form: SiteForm
    sizes: tuple[int, int, int, int]

    @property
    def first(self) -> Match:
        """A member; what all have in common can be read from it."""
        return self.members[0]

    @property
    def constant(self) -> bool:
        """Whether A is identically 1."""
        return self.first.product.build is None


def transparent_root(survey: Survey, graph: Graph, tensor: Any) -> Any:
    """The last tensor with the cotangent of ``tensor``, entry by entry: through sums and reshapes, to a branch."""
    while tensor.name not in graph.outputs:
        edges = [
            (operation, i)
            for operation in graph.consumers(tensor)
            if operation.type not in WITHOUT_DERIVATIVE
            and any(survey.known(t) and is_differentiable(t.dtype) for t in operation.outputs)
            for i, operand in enumerate(operation.inputs)
            if operand.name == tensor.name
        ]
        if len(edges) != 1:
            break
        ((operation, operand),) = edges
        output = operation.outputs[0]
        if "_gradient_op_type" in operation.node_def.attr:
            break
        is_sum = operation.type in SUMS and (operand == 0 or operation.type in ("Add", "AddV2"))
        same = survey.shape(tensor) == survey.shape(output) and survey.batched(tensor) == survey.batched(output)
        if not ((is_sum and same) or (operation.type in RESHAPES and operand == 0)):
            break
        tensor = output
    return tensor


def cotangent(survey: Survey, graph: Graph, matched: Match) -> Cotangent:
    """Where the D of a match comes from."""
    root = transparent_root(survey, graph, matched.operation.outputs[0])
    form = matched.form
    fine = [label for axis in form.z for label in axis]
    target = ["n", *form.p, *form.g, *form.c]
    order = tuple(fine.index(label) for label in target)
    in_order = order == tuple(range(len(order)))
    shape = (form.size(form.p), form.size(form.g) * form.size(form.c))
    sizes = (0, *shape) if in_order else tuple(form.sizes.get(label, 0) for label in fine)
    mix = matched.mix if matched.mix is not None and matched.mix.side == "c" else None
    return Cotangent(root.name, sizes, () if in_order else order, shape, mix)


def group(survey: Survey, graph: Graph, matches: Sequence[Match], outputs: int) -> list[Group]:
    """Merge and decide; ``outputs`` is l."""
    merged: dict[Any, list[tuple[Match, Cotangent]]] = {}
    for matched in matches:
        alone = id(matched) if matched.scaled else None
        kind = (matched.product.build is None, matched.product.gather)
        key = (matched.variable, matched.entries.shape, matched.entries.tobytes(), kind, alone, matched.mix)
        merged.setdefault(key, []).append((matched, cotangent(survey, graph, matched)))
    groups = []
    for pairs in merged.values():
        pairs.sort(key=lambda pair: graph.order[pair[0].operation.name])
        members, cotangents = zip(*pairs, strict=True)
        g, k, c = members[0].entries.shape
        sizes = (sum(m.form.size(m.form.p) for m in members), g, k, c)
        form = SiteForm.EMBEDDING if members[0].looks_up else SiteForm.OUTER
        if form is SiteForm.EMBEDDING:
            dense = outputs * k * c < sizes[0] * (1 + outputs * c)
        else:
            dense = dense_is_smaller(*sizes, outputs)
        groups.append(Group(members, cotangents, SiteForm.DENSE if dense and sizes[0] != 1 else form, sizes))
    # D is held anyway where a kernel with the same D stays factored: its bias then costs nothing.
    held = {g.cotangents for g in groups if g.form is SiteForm.OUTER and not g.constant}
    return [
        replace(g, form=SiteForm.OUTER) if g.constant and g.sizes[1] == 1 and g.cotangents in held else g
        for g in groups
    ]
