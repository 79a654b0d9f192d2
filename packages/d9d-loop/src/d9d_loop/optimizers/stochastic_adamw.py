"""AdamW for bfloat16 parameters without a float32 copy of them: what is stored is rounded stochastically."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from d9d_dist import UserError, canonical_name, stream_key
from d9d_loop.optimizers.groupwise import GroupwiseOptimizer, local_part
from d9d_loop.optimizers.local_box import IndexRule, global_indices, index_rules
from d9d_loop.optimizers.random_bits import bits_at, draw
from d9d_loop.optimizers.stochastic_copy import CHUNK, has_kernel, round_stochastically


@dataclass(frozen=True, slots=True)
class AdamWNumbers:
    """What one step of AdamW does to every element alike.

    Attributes:
        lr: The learning rate.
        beta1: Decay of the gradients' average m.
        beta2: Decay of the squares' average v.
        eps: Added to the denominator.
        weight_decay: Decoupled.
        step: Which step this is, from 1; corrects the averages' bias.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def step_size(self) -> float:
        """The learning rate over the correction of m."""
        return self.lr / (1.0 - self.beta1**self.step)

    @property
    def square_correction(self) -> float:
        """The square root of the correction of v."""
        return (1.0 - self.beta2**self.step) ** 0.5


@final
class StochasticAdamW(GroupwiseOptimizer):
    """AdamW (arXiv:1711.05101) that stores bfloat16 by stochastic rounding (Gupta et al., arXiv:1502.02551).

    It computes in float32. What is stored in bfloat16, the parameters and, if asked for, the averages, is rounded up or
    down by chance, so that small updates are not lost but arrive on average. With averages in bfloat16 a parameter
    takes 6 bytes, with float32 10; AdamW on float32 parameters takes 12. Parameters of float32 or float64 are stored as
    they are, their averages in their own dtype.

    What is drawn for an element is a function of (seed, name, step, index in the full tensor), so that results do not
    depend on the layout, and a resumed job continues with the same bits. On an accelerator with Triton a step is one
    kernel for each parameter. No collectives.

    Args:
        params: `model.named_parameters()`, or groups of pairs of name and parameter.
        lr: The learning rate.
        betas: Decays of the averages of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: Decoupled.
        average_dtype: Of the averages of bfloat16 parameters.
        seed: Of what is drawn.

    Raises:
        UserError: If the parameters have no names, or a dtype that can be neither stored nor rounded to.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        average_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._average_dtype, self._seed = average_dtype, seed
        self._names: dict[Tensor, str] = {}
        self._rules: dict[Tensor, list[tuple[int, IndexRule]]] = {}
        for group in self.param_groups:
            self._names |= _names_of(group)

    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Take a step, one parameter after the other."""
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                dtype = self._average_dtype if parameter.dtype == torch.bfloat16 else parameter.dtype
                state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
                state["step"] = 0
            state["step"] += 1
            numbers = AdamWNumbers(group["lr"], *group["betas"], group["eps"], group["weight_decay"], state["step"])
            self._update(parameter, state, numbers)

    def _update(self, parameter: Tensor, state: Mapping[str, Any], numbers: AdamWNumbers) -> None:
        assert parameter.grad is not None
        if parameter not in self._rules:
            self._rules[parameter] = index_rules(parameter)
        key = stream_key(self._seed, self._names[parameter], numbers.step)
        stored = [local_part(tensor) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        flat = [tensor.contiguous().view(-1) for tensor in stored]
        gradient, begin = local_part(parameter.grad).reshape(-1), 0
        for count, rule in self._rules[parameter]:
            parts = (tensor[begin : begin + count] for tensor in (flat[0], gradient, *flat[1:]))
            _step(*parts, numbers=numbers, key=key, rule=rule)
            begin += count
        for tensor, values in zip(stored, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(values.view(tensor.shape))


def _step(w: Tensor, g: Tensor, m: Tensor, v: Tensor, *, numbers: AdamWNumbers, key: int, rule: IndexRule) -> None:
    """A step on 1-dim tensors, by a kernel where there is one."""
    if has_kernel(w.device) and w.dtype != torch.float64:
        from d9d_loop.optimizers import _triton_stochastic  # noqa: PLC0415  (Triton is optional)

        _triton_stochastic.adamw(w, g, m, v, numbers=numbers, key=key, rule=rule)
        return
    for begin in range(0, w.numel(), CHUNK):
        part = slice(begin, min(begin + CHUNK, w.numel()))
        bits = bits_at(global_indices(rule, part.start, part.stop, w.device), key)
        updated = _adamw(w[part], g[part], m[part], v[part], numbers)
        for number, (stored, value) in enumerate(zip((w, m, v), updated, strict=True)):
            rounds = stored.dtype == torch.bfloat16
            stored[part] = round_stochastically(value, draw(bits, number)) if rounds else value


def _adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: AdamWNumbers) -> tuple[Tensor, Tensor, Tensor]:
    """New w, m and v, not rounded."""
    dtype = torch.promote_types(w.dtype, torch.float32)
    w, g, m, v = (tensor.to(dtype) for tensor in (w, g, m, v))
    # One operation at a time, each rounded as the standard says: fused ones may give other bits at the end of a part,
    # where a processor's vectors do not fit, and then they would depend on the layout.
    m = m * numbers.beta1 + g * (1.0 - numbers.beta1)
    v = v * numbers.beta2 + (g * g) * (1.0 - numbers.beta2)
    direction = m / (v.sqrt() / numbers.square_correction + numbers.eps)
    w = w * (1.0 - numbers.lr * numbers.weight_decay) - direction * numbers.step_size
    return w, m, v


def _names_of(group: Mapping[str, Any]) -> dict[Tensor, str]:
    if not group["params"]:
        return {}
    if "param_names" not in group:
        raise UserError(
            "StochasticAdamW got parameters without names, on which depends what is drawn; expected "
            "model.named_parameters(), or groups of pairs of name and parameter."
        )
    names = {
        parameter: canonical_name(name) for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    wrong = [
        f"{name} {parameter.dtype}"
        for parameter, name in names.items()
        if parameter.dtype not in (torch.bfloat16, torch.float32, torch.float64)
    ]
    if wrong:
        raise UserError(
            f"StochasticAdamW got {', '.join(wrong)}; expected torch.bfloat16, or torch.float32 and torch.float64, "
            "which it does not round. Convert them with model.to(torch.bfloat16)."
        )
    return names
