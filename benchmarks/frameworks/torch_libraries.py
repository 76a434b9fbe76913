"""Libraries on PyTorch that give J Jᵀ or products with J: BackPACK, curvlinops and NNGeometry."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from backpack import backpack, extend
from backpack.extensions import SqrtGGNExact
from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
from backpack.hessianfree.lop import transposed_jacobian_vector_product
from backpack.hessianfree.rop import jacobian_vector_product
from curvlinops import GGNLinearOperator, JacobianLinearOperator
from nngeometry import GramMatrix
from torch import nn

from benchmarks.frameworks.gram import prepared
from benchmarks.frameworks.torch_peers import Setting
from benchmarks.task import Prepared, Task

PACKAGES = ("backpack-for-pytorch", "curvlinops-for-pytorch", "nngeometry", "torch")

COLUMNS = 64  # of the identity that curvlinops' J Jᵀ is multiplied with at once: 0.5 GB of Jᵀ times them


class _Module(Setting):
    """The module with its parameters inside, as these libraries take it; ``inside`` is in Keras's order.

    All three know the Hessian of a loss: that of the sum of squares is twice the identity.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.module.load_state_dict(self.parameters)
        self.module.requires_grad_(True)
        named = dict(self.module.named_parameters())
        self.inside = [named[name] for name in self.shapes]
        self.loss = nn.MSELoss(reduction="sum")
        self.goal = torch.zeros(task.n, task.network.outputs)

    def listed(self, vector: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [vector[name] for name in self.shapes]

    def flat(self, blocks: Any) -> Any:
        """A list like ``inside`` as a vector (m,) in Keras's order."""
        return self.columns({name: block.detach() for name, block in zip(self.shapes, blocks, strict=True)})


# ---- BackPACK: J as the square root of the Gauss–Newton matrix, products by differentiating twice


def backpack_jacobian(task: Task) -> Prepared:
    """The blocks (l, n, *shape) that BackPACK leaves at the parameters: √2 J, brought to J untimed."""
    setting = _Module(task)
    module, loss = extend(setting.module), extend(setting.loss)

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        y = module(setting.x)
        with backpack(SqrtGGNExact()):
            loss(y, setting.goal).backward()
        blocks = [parameter.sqrt_ggn_exact for parameter in setting.inside]
        for parameter in setting.inside:
            del parameter.sqrt_ggn_exact
            parameter.grad = None
        return y.detach(), blocks

    def check(result: tuple[torch.Tensor, list[torch.Tensor]]) -> dict[str, Any]:
        y, blocks = result
        index = torch.tensor(task.samples)
        chosen = [block[:, index].transpose(0, 1) / 2**0.5 for block in blocks]
        return {"y": y.numpy(), "jacobian": setting.flat(chosen)}

    return Prepared(run, check, lambda result: sum(block.nbytes for block in result[1]))


def backpack_gram(task: Task) -> Prepared:
    """J Jᵀ from the explicit rows of one layer after the other, each let go of when it has been multiplied."""
    setting = _Module(task)
    module, loss = extend(setting.module), extend(setting.loss)
    rows = task.n * task.network.outputs

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(rows, rows)

        def add(layer: nn.Module) -> None:
            for parameter in layer.parameters(recurse=False):
                root = parameter.sqrt_ggn_exact.reshape(rows, -1)  # (l, n, *shape): √2 J
                out.addmm_(root, root.T, alpha=0.5)
                del parameter.sqrt_ggn_exact

        module.zero_grad()
        y = module(setting.x)
        with backpack(SqrtGGNExact(), extension_hook=add):
            loss(y, setting.goal).backward()
        return y.detach(), out

    return prepared(task, run, outputs_first=True)


def backpack_jvp(task: Task) -> Prepared:
    """`jacobian_vector_product` of outputs whose graph is kept."""
    setting = _Module(task)
    y, v = setting.module(setting.x), setting.listed(setting.direction)
    return Prepared(lambda: jacobian_vector_product(y, setting.inside, v)[0], lambda result: {"jvp": result.numpy()})


def backpack_vjp(task: Task) -> Prepared:
    """`transposed_jacobian_vector_product` of outputs whose graph is kept."""
    setting = _Module(task)
    y, u = setting.module(setting.x), setting.cotangent
    return Prepared(
        lambda: transposed_jacobian_vector_product(y, setting.inside, u),
        lambda result: {"vjp": setting.flat(result)},
    )


def backpack_normal(task: Task) -> Prepared:
    """`ggn_vector_product` with the loss ½ ‖y‖², whose Hessian is the identity, on a graph that is kept."""
    setting = _Module(task)
    y, v = setting.module(setting.x), setting.listed(setting.direction)
    loss = setting.loss(y, setting.goal) / 2
    return Prepared(
        lambda: ggn_vector_product_from_plist(loss, y, setting.inside, v),
        lambda result: {"normal": setting.flat(result)},
    )


# ---- curvlinops: linear operators, recomputed in every product


def _operator(setting: _Module) -> Any:
    data = [(setting.x, setting.goal)]
    return JacobianLinearOperator(setting.module, setting.inside, data, check_deterministic=False)


def curvlinops_gram(task: Task) -> Prepared:
    """J (Jᵀ I), some columns of the identity at a time."""
    setting = _Module(task)
    kernel, rows = _operator(setting), task.n * task.network.outputs
    transposed = kernel.adjoint()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            y = setting.module(setting.x)
        identity = torch.eye(rows)
        parts = [kernel @ (transposed @ identity[:, i : i + COLUMNS]) for i in range(0, rows, COLUMNS)]
        return y, torch.cat(parts, dim=1)

    return prepared(task, run)


def curvlinops_product(task: Task, name: str) -> Prepared:
    """``J @ v``, ``J.adjoint() @ u``, one after the other, or half the Gauss–Newton matrix of the sum of squares."""
    setting = _Module(task)
    operator, v, u = _operator(setting), setting.listed(setting.direction), [setting.cotangent]
    transposed = operator.adjoint()
    if name == "jvp":
        return Prepared(lambda: operator @ v, lambda result: {name: result[0].detach().numpy()})
    if name == "vjp":
        return Prepared(lambda: transposed @ u, lambda result: {name: setting.flat(result)})
    if name == "kernel":
        return Prepared(lambda: operator @ (transposed @ u), lambda result: {name: result[0].detach().numpy()})
    data = [(setting.x, setting.goal)]
    normal = GGNLinearOperator(setting.module, setting.loss, setting.inside, data, check_deterministic=False)
    return Prepared(lambda: normal @ v, lambda result: {name: setting.flat(result) / 2})


# ---- NNGeometry: J Jᵀ from what comes into a layer and the cotangents of what comes out


def nngeometry_gram(task: Task) -> Prepared:
    """``GramMatrix``: a backward pass for each output, and for each pair of outputs, all samples at once."""
    setting = _Module(task)
    setting.module.requires_grad_(False)  # hooks take what they need; gradients of the weights would be wasted
    warnings.filterwarnings("ignore", message="Full backward hook is firing")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            y = setting.module(setting.x)
        return y, GramMatrix(setting.module, (setting.x,)).data

    return prepared(task, run, outputs_first=True)


CONTENDERS: dict[str, Callable[[Task], Prepared]] = {
    "backpack-jacobian": backpack_jacobian,
    "backpack-gram": backpack_gram,
    "backpack-jvp": backpack_jvp,
    "backpack-vjp": backpack_vjp,
    "backpack-normal": backpack_normal,
    "curvlinops-gram": curvlinops_gram,
    **{f"curvlinops-{name}": partial(curvlinops_product, name=name) for name in ("jvp", "vjp", "kernel", "normal")},
    "nngeometry-gram": nngeometry_gram,
}
