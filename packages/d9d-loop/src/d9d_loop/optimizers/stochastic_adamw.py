"""AdamW for bfloat16 parameters without float32 master weights, by stochastic rounding.

bfloat16 has 8 bits of precision. Rounding to nearest loses every update smaller than half a unit in the last place;
with stochastic rounding, the parameter changes by the right amount on average.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from d9d_dist import UserError, canonical_name, local_tensor, stream_key
from d9d_dist.values.counter_random import random_bits_at
from d9d_loop.optimizers._adamw_numbers import AdamWNumbers
from d9d_loop.optimizers.groupwise import GroupwiseOptimizer, replace_
from d9d_loop.optimizers.index_rule import IndexRule, global_indices, index_rules

_CHUNK = 1 << 18
"""Number of elements processed at a time without Triton, which limits the memory of temporary tensors."""


@final
class StochasticAdamW(GroupwiseOptimizer):
    """AdamW (arXiv:1711.05101) that stores bfloat16 by stochastic rounding (Gupta et al., arXiv:1502.02551).

    Computation is in float32, or in float64 for float64 parameters. Values stored in bfloat16 are rounded up or down at
    random, which keeps small updates on average. These are bfloat16 parameters and, with
    `average_dtype=torch.bfloat16`, their averages. A parameter and its averages take 6 bytes with bfloat16 averages and
    10 bytes with float32 averages; AdamW on float32 parameters takes 12. Parameters in float32 or float64 are not
    rounded, and their averages have their own dtype.

    The random bits of an element are a function of (seed, name, step, index in the full tensor). So results do not
    depend on the sharding, and a resumed job draws the same bits. On an accelerator with Triton, a step usually
    launches one kernel per parameter. No collectives.

    Args:
        params: `model.named_parameters()`, or parameter groups of (name, parameter) pairs.
        average_dtype: Dtype of the averages of bfloat16 parameters.

    Raises:
        UserError: If the parameters have no names, or a dtype other than bfloat16, float32 or float64.
    """

    counts_steps = True
    takes_wide_gradients = True

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
        """Update the parameters one after the other."""
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                dtype = self._average_dtype if parameter.dtype == torch.bfloat16 else parameter.dtype
                state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
                state["step"] = 0
            self.count(state, step=state["step"] + 1)
            numbers = AdamWNumbers(group["lr"], *group["betas"], group["eps"], group["weight_decay"], state["step"])
            self._update(parameter, state, numbers)

    def _update(self, parameter: Tensor, state: Mapping[str, Any], numbers: AdamWNumbers) -> None:
        assert parameter.grad is not None
        if parameter not in self._rules:
            self._rules[parameter] = index_rules(parameter)
        key = stream_key(self._seed, self._names[parameter], numbers.step)
        stored = [local_tensor(tensor) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        flat = [tensor.contiguous().view(-1) for tensor in stored]
        gradient, begin = local_tensor(parameter.grad).reshape(-1), 0
        for count, rule in self._rules[parameter]:
            parts = (tensor[begin : begin + count] for tensor in (flat[0], gradient, *flat[1:]))
            _step(*parts, numbers=numbers, key=key, rule=rule, gate=self.gate)
            begin += count
        for tensor, values in zip(stored, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(values.view(tensor.shape))


def _step(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, *, numbers: AdamWNumbers, key: int, rule: IndexRule, gate: Tensor | None
) -> None:
    """Update 1-dim tensors in place unless the gate is 1, with the Triton kernel if it is available."""
    if w.device.type not in ("cpu", "meta") and w.dtype != torch.float64 and find_spec("triton") is not None:
        from d9d_loop.optimizers import _triton_stochastic  # noqa: PLC0415  (Triton is optional)

        _triton_stochastic.adamw(w, g, m, v, numbers=numbers, key=key, rule=rule, gate=gate)
        return
    for begin in range(0, w.numel(), _CHUNK):
        part = slice(begin, min(begin + _CHUNK, w.numel()))
        bits = random_bits_at(global_indices(rule, part.start, part.stop, w.device), key)
        updated = _adamw(w[part], g[part], m[part], v[part], numbers)
        for number, (stored, value) in enumerate(zip((w, m, v), updated, strict=True)):
            rounds = stored.dtype == torch.bfloat16
            new = round_stochastically(value, draw(bits, number)) if rounds else value
            replace_(stored[part], new, gate=gate)


def _adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: AdamWNumbers) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new w, m and v, without rounding."""
    dtype = torch.promote_types(w.dtype, torch.float32)
    w, g, m, v = (tensor.to(dtype) for tensor in (w, g, m, v))
    # Separate operations are each rounded as IEEE 754 defines. A fused one may give different bits in the scalar
    # tail of a vectorized loop, so the result would depend on the sharding.
    m = m * numbers.beta1 + g * (1.0 - numbers.beta1)
    v = v * numbers.beta2 + (g * g) * (1.0 - numbers.beta2)
    direction = m / (v.sqrt() / numbers.square_correction + numbers.eps)
    w = w * (1.0 - numbers.lr * numbers.weight_decay) - direction * numbers.step_size
    return w, m, v


def draw(bits: Tensor, number: int) -> Tensor:
    """Extract group `number` (0 to 3) of 16 bits from int64 `bits`, least significant first, as int32."""
    return (bits >> (16 * number)).bitwise_and_(0xFFFF).to(torch.int32)


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16: away from zero with probability (discarded 16 bits) / 65536, else toward zero.

    `noise` is int32, uniform from 0 to 65535.
    """
    # Adding noise could carry into other bits of NaN and infinity.
    rounded = values.view(torch.int32).add(noise).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _names_of(group: Mapping[str, Any]) -> dict[Tensor, str]:
    if not group["params"]:
        return {}
    if "param_names" not in group:
        raise UserError(
            "StochasticAdamW got parameters without names, which its random numbers depend on; expected "
            "model.named_parameters(), or groups of (name, parameter) pairs."
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
            "which are not rounded. Convert them with model.to(torch.bfloat16)."
        )
    return names
