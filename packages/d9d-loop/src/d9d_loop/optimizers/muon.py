"""Muon: momentum of which every matrix is made orthogonal, the whole matrix, however it is split over ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from d9d_dist import UserError
from d9d_loop.optimizers.groupwise import GroupwiseOptimizer, local_part
from d9d_loop.optimizers.matrix_owners import map_matrices

Scale: TypeAlias = Literal["match_rms_adamw", "original"]
"""How the step of a matrix depends on its shape."""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that the iteration repeats; they raise small singular values fast, and leave all near 1."""

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

    The whole matrix is made orthogonal, so that results do not depend on the layout. Matrices that are split over an
    axis of the mesh are dealt out to its ranks, each of which makes its own orthogonal; see `map_matrices` for the
    collectives. Parameters of more than two dims are stacks of matrices, the last two dims; a stack that is only split
    between its matrices, such as that of a rank's experts, stays where it is. Ranks of a mesh must have gradients for
    the same parameters, as they do after they were reduced.

    Args:
        params: Parameters of two or more dims, or groups of them.
        lr: The learning rate.
        momentum: Decay of the momentum's average.
        nesterov: Whether to look a step ahead.
        weight_decay: Decoupled.
        num_iterations: Repetitions of the iteration that makes a matrix orthogonal.
        scale: With `match_rms_adamw` updates are as large as those of AdamW, 0.2 sqrt(max(rows, columns)) (Moonshot,
            arXiv:2502.16982), so that its learning rates and decays fit; `original` is sqrt(max(1, rows / columns)).

    Raises:
        UserError: If a parameter has fewer than two dims.
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
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "num_iterations": num_iterations, "scale": scale})
        for group in self.param_groups:
            _check_matrices(group)

    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Follow the equations above."""
        lr, mu = group["lr"], group["momentum"]
        updates: list[Tensor] = []
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            assert parameter.grad is not None
            gradient, momentum = local_part(parameter.grad), local_part(self.state[parameter]["momentum_buffer"])
            momentum.lerp_(gradient, 1.0 - mu)
            update = gradient.lerp(momentum, mu) if group["nesterov"] else momentum
            updates.append(update.to(_compute_dtype(update)))
        compute = partial(orthogonalize, num_iterations=group["num_iterations"])
        for index, direction in map_matrices(compute, updates, parameters):
            weight, shape = local_part(parameters[index]), parameters[index].shape[-2:]
            weight.mul_(1.0 - lr * group["weight_decay"])
            weight.add_(direction, alpha=-lr * _SCALES[group["scale"]](*shape))


@torch.no_grad()
def orthogonalize(matrices: Tensor, *, num_iterations: int = 5) -> Tensor:
    """Nearly the orthogonal matrices next to some: with X = U S V^T about U V^T, by an iteration of Newton and Schulz.

        X = X / |X|                                     Frobenius
        X = a X + (b X X^T + c (X X^T)^2) X             repeated

    Singular values end between about 0.7 and 1.2, which serves as well as 1.

    Args:
        matrices: [..., rows, columns]. Float64 is computed in float64, all else in bfloat16.
        num_iterations: Repetitions.

    Returns:
        A tensor of the same shape, in the dtype of the computation.
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
            f"Muon updates matrices, but got {', '.join(wrong)}. Give them to another optimizer; in a configuration: "
            '[[optimizer.groups]] with of = "vectors" and optimizer = { kind = "adamw" }.'
        )
