"""Muon optimizer: orthogonalized momentum of whole matrices, for any sharding."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from d9d_dist import UserError, local_tensor
from d9d_dist.errors import check_choice
from d9d_loop.optimizers.groupwise import GroupwiseOptimizer, replace_
from d9d_loop.optimizers.matrix_owners import map_matrices

Scale: TypeAlias = Literal["match_rms_adamw", "original"]
"""Scaling of the update of a matrix with its shape; see `Muon`."""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the quintic Newton-Schulz iteration, which maps singular values to about 1 in few steps."""

_SCALES: Mapping[Scale, Callable[[int, int], float]] = MappingProxyType(
    {
        "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
        "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    }
)


@final
class Muon(GroupwiseOptimizer):
    """Muon (Jordan et al.: "Muon: an optimizer for hidden layers in neural networks", 2024; arXiv:2502.16982).

        m = mu m + (1 - mu) g
        u = mu m + (1 - mu) g with Nesterov, else m
        w = (1 - lr wd) w - lr scale orthogonalize(u)

    Whole matrices are orthogonalized, so results do not depend on the sharding. Matrices sharded along one mesh axis
    are distributed over its ranks; see `map_matrices` for the collectives. A parameter of more than two dims is a stack
    of matrices in its last two dims. A stack sharded only between its matrices, such as expert weights under expert
    parallelism, needs no collectives. All ranks of a mesh must have gradients for the same parameters, which holds
    after gradient reduction.

    Args:
        params: Parameters of two or more dims, or parameter groups.
        momentum: Decay mu of the momentum average.
        scale: Scaling of the update. `match_rms_adamw`: 0.2 sqrt(max(rows, columns)) (Moonshot, arXiv:2502.16982),
            which gives updates the same RMS as AdamW's, so AdamW's learning rate and weight decay can be reused.
            `original`: sqrt(max(1, rows / columns)).

    Raises:
        UserError: If a parameter has fewer than two dims, or the scaling is unknown.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        num_iterations: int = 5,
        scale: Scale = "match_rms_adamw",
    ) -> None:
        check_choice("scale", scale, Scale)
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "num_iterations": num_iterations, "scale": scale})
        for group in self.param_groups:
            _check_matrices(group)

    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Apply the equations of the class docstring. Collective as in `map_matrices`."""
        lr, mu = group["lr"], group["momentum"]
        updates: list[Tensor] = []
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            assert parameter.grad is not None
            gradient, momentum = local_tensor(parameter.grad), local_tensor(self.state[parameter]["momentum_buffer"])
            if self.gate is not None:  # in a skipped step, average the momentum with itself, which keeps its value
                gradient = torch.where(self.gate > 0, momentum, gradient)
            momentum.lerp_(gradient, 1.0 - mu)
            update = gradient.lerp(momentum, mu) if group["nesterov"] else momentum
            updates.append(update.to(_compute_dtype(update)))
        compute = partial(orthogonalize, num_iterations=group["num_iterations"])
        for index, direction in map_matrices(compute, updates, parameters):
            weight, shape = local_tensor(parameters[index]), parameters[index].shape[-2:]
            updated = weight if self.gate is None else weight.clone()
            updated.mul_(1.0 - lr * group["weight_decay"])
            updated.add_(direction, alpha=-lr * _SCALES[group["scale"]](*shape))
            if updated is not weight:
                replace_(weight, updated, gate=self.gate)


@torch.no_grad()
def orthogonalize(matrices: Tensor, *, num_iterations: int = 5) -> Tensor:
    """Orthogonalize matrices [..., rows, columns] approximately by Newton-Schulz iteration: X = U S V^T becomes U V^T.

        X = X / |X|                                     Frobenius norm
        X = a X + (b X X^T + c (X X^T)^2) X             repeated `num_iterations` times

    The resulting singular values are between about 0.7 and 1.2, which is sufficient for Muon. The computation and the
    result are in float64 for float64 input, else in bfloat16.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.to(_compute_dtype(matrices))
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x.flatten(0, -3) if x.ndim > 3 else x
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if is_tall else x
    return x.view(matrices.shape) if matrices.ndim > 3 else x


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.bfloat16


def _check_matrices(group: Mapping[str, Any]) -> None:
    names = group.get("param_names") or [f"parameter {index}" for index in range(len(group["params"]))]
    wrong = [f"{name} {list(p.shape)}" for name, p in zip(names, group["params"], strict=True) if p.ndim < 2]
    if wrong:
        raise UserError(
            f"Muon updates matrices, but got {', '.join(wrong)}. Use another optimizer for them; in a configuration: "
            '[[optimizer.groups]] with of = "vectors" and optimizer = { kind = "adamw" }.'
        )
