"""Expert load balancing, once per step, from the tokens per expert; and statistics of the load.

Shape legend: E experts.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d_dist import canonical_name
from d9d_dist.errors import UserError
from d9d_moe.layer import MoELayer
from d9d_moe.router import SigmoidRouter, TopKRouter


def balance_experts(model: nn.Module, *, rate: float = 1e-3, taken: Tensor | bool = True) -> dict[str, Tensor]:
    """Call `pop_tokens_per_expert`, `update_expert_bias` and `update_global_load`, and return the tokens per expert.

    Call this function once per step; in a job, in an event handler of `OptimizerDone`:
    `balance_experts(done.model, taken=done.taken)`. For errors and collectives, see the three functions.

    Args:
        model: Model, or one of its pipeline stages.
        rate: Change of a bias per step.
        taken: False if the optimizer step was skipped; biases and loads then do not change. A bool or a 0-dim tensor,
            which causes no host-device synchronization.
    """
    counts = pop_tokens_per_expert(model)
    is_taken = torch.as_tensor(taken)
    taken_counts = {name: counts_E * is_taken.to(counts_E.device) for name, counts_E in counts.items()}
    update_expert_bias(model, taken_counts, rate=rate)
    update_global_load(model, taken_counts)
    return counts


@torch.no_grad()
def pop_tokens_per_expert(model: nn.Module) -> dict[str, Tensor]:
    """Return the tokens per expert [E] of the step by layer name, summed over ranks, and reset the counters to zero.

    Call this function once per step, after the last backward pass and before the next forward pass. Counts are int64.
    Collective over all ranks of a pipeline stage: one all-reduce for all layers, without host-device synchronization.
    `parallelize_moe` sets the process group, so call it for a model on several ranks even if the degree is 1.

    Raises:
        UserError: If there are several ranks and `parallelize_moe` was not called.
    """
    blocks = _blocks(model)
    if not blocks:
        return {}
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    without_group = [name for name, block in blocks.items() if block.token_groups.batch is None]
    if num_ranks > 1 and without_group:
        raise UserError(
            f"{without_group[0]} counts only the tokens of its own rank, but there are {num_ranks} ranks; expected "
            "process groups over which to sum the counts. Call parallelize_moe(model, ctx), even with an "
            "expert-parallel degree of 1."
        )
    counts = torch.cat([block.counter.counts for block in blocks.values()])
    group = next(iter(blocks.values())).token_groups.batch
    if group is not None and group.size() > 1:
        dist.all_reduce(counts, group=group)
    for block in blocks.values():
        block.counter.counts.zero_()
    parts = counts.split([block.num_experts for block in blocks.values()])
    return dict(zip(blocks, parts, strict=True))


@torch.no_grad()
def update_expert_bias(model: nn.Module, counts: Mapping[str, Tensor], *, rate: float = 1e-3) -> None:
    """Update the expert biases: `bias += rate * sign(mean - count)`.

    "Auxiliary-Loss-Free Load Balancing", arXiv:2408.15664, algorithm 1. No collectives: equal counts on all ranks keep
    the bias equal on all ranks. `counts` are the result of `pop_tokens_per_expert`. Layers without a bias, or whose
    counts are all zero, are skipped.

    Raises:
        UserError: If the rate is negative, or a bias has fewer than 32 bits, so that rounding would lose updates.
    """
    if rate < 0:
        raise UserError(f"rate = {rate}; expected 0 or above, because a negative rate would unbalance the experts.")
    for name, block in _blocks(model).items():
        bias_E = block.router.selection_bias if isinstance(block.router, SigmoidRouter | TopKRouter) else None
        if name in counts and bias_E is not None:
            counts_E = counts[name].double()
            if bias_E.element_size() < 4:
                raise UserError(
                    f"the selection bias of {name} is {bias_E.dtype}; expected float32, because updates of rate = "
                    f"{rate} are lost to rounding. Use parallelize_decoder(precision=...), not model.to(...)."
                )
            bias_E.add_((counts_E.mean() - counts_E).sign().to(bias_E.dtype), alpha=rate)


@torch.no_grad()
def update_global_load(model: nn.Module, counts: Mapping[str, Tensor]) -> None:
    """Set `global_load`, which balance losses with the scope "global_batch" use in the next step.

    Layers without such a loss, or whose `counts` (see `pop_tokens_per_expert`) are all zero, are skipped.
    """
    for name, block in _blocks(model).items():
        if name in counts and block.global_load is not None:
            counts_E = counts[name].double()
            load_E = counts_E / counts_E.mean().clamp(min=1 / len(counts_E))
            block.global_load.copy_(torch.where(counts_E.any(), load_E, block.global_load.double()))


@final
class LoadStatistics(NamedTuple):
    """Statistics of the tokens per expert: each has one float64 number per layer.

    Attributes:
        max_over_mean: Largest number of tokens of an expert, divided by the mean; 1 if the load is even.
        entropy: Entropy of the load, divided by the entropy of an even load; 1 if the load is even, 0 if one expert has
            all tokens.
        idle: Number of experts without tokens.
        dropped: Number of dropped tokens; always 0, because experts have no capacity.
    """

    max_over_mean: Tensor
    entropy: Tensor
    idle: Tensor
    dropped: Tensor


def load_statistics(counts_E: Tensor) -> LoadStatistics:
    """Compute statistics of the tokens per expert [..., E] of one or several layers, without synchronization.

    If all counts of a layer are zero, `max_over_mean` and `entropy` are 0 and `idle` is E.
    """
    counts = counts_E.double()
    num_experts = counts.shape[-1]
    shares = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
    entropy = torch.special.entr(shares).sum(dim=-1) / math.log(max(num_experts, 2))
    largest = shares.amax(dim=-1)
    return LoadStatistics(largest * num_experts, entropy, (counts == 0).sum(dim=-1).double(), torch.zeros_like(largest))


def _blocks(model: nn.Module) -> dict[str, MoELayer]:
    """Return the blocks by their names in the whole model, which are derived from the names of their buffers."""
    names = {id(buffer): canonical_name(name) for name, buffer in model.named_buffers()}
    blocks = [module for module in model.modules() if isinstance(module, MoELayer)]
    return {names[id(block.counter.counts)].removesuffix(".counter.counts"): block for block in blocks}
