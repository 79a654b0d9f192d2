"""What follows from how often experts were chosen: what evens it out once a step, and statistics to look at.

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
from d9d_moe.layer import MoeFeedForward
from d9d_moe.router import SigmoidRouter

_BIAS_BYTES = 4


def balance_experts(model: nn.Module, *, rate: float = 1e-3, taken: Tensor | bool = True) -> dict[str, Tensor]:
    """All that the balance of experts needs once a step: counts over all ranks, then biases and loads that follow them.

    In a job it is a handler of `OptimizerDone`: `balance_experts(done.model, taken=done.taken)`.
    Collective as `take_expert_counts` is, which gives what this returns and says what raises, as
    `update_selection_bias` does.

    Args:
        model: A model, or one stage of it.
        rate: How much a bias moves in a step.
        taken: Whether the step's update is taken, 0-dim if a tensor, for which the host does not wait: a step that is
            left out moves nothing.
    """
    counts = take_expert_counts(model)
    is_taken = torch.as_tensor(taken)
    counted = {name: seen_E * is_taken.to(seen_E.device) for name, seen_E in counts.items()}
    update_selection_bias(model, counted, rate=rate)
    update_global_load(model, counted)
    return counts


@torch.no_grad()
def take_expert_counts(model: nn.Module) -> dict[str, Tensor]:
    """How many tokens of the step chose each expert, by the name of its layer; the count starts again from zero.

    Call it once a step, between the last backward pass and the next forward, e.g. in a handler of `OptimizerDone`.
    Collective over all ranks of a stage: one all-reduce for all layers. They are known from
    `parallelize_expert_parallel`, which a model of several ranks has to pass through, also with a degree of 1.

    Args:
        model: A model, or one stage of it.

    Returns:
        Counts [E] over all ranks, int64, by the names of the mixture-of-experts layers; the host waits for nothing.

    Raises:
        UserError: If there are several ranks, and the model does not know them.
    """
    blocks = _blocks(model)
    if not blocks:
        return {}
    _check_ranks_are_known(blocks)
    counts = torch.cat([block.counter.counts for block in blocks.values()])
    group = next(iter(blocks.values())).token_groups.batch
    if group is not None and group.size() > 1:
        dist.all_reduce(counts, group=group)
    for block in blocks.values():
        block.counter.counts.zero_()
    parts = counts.split([block.num_experts for block in blocks.values()])
    return dict(zip(blocks, parts, strict=True))


@torch.no_grad()
def update_selection_bias(model: nn.Module, counts: Mapping[str, Tensor], *, rate: float = 1e-3) -> None:
    """Make experts that were chosen too often less likely, and the others more: `bias += rate * sign(mean - count)`.

    "Auxiliary-Loss-Free Load Balancing", arXiv:2408.15664, algorithm 1. Equal counts on all ranks give an equal bias.

    Args:
        model: The model that the counts are of; layers whose router has no bias are passed over.
        counts: What `take_expert_counts` gave for the step; zeros leave a bias as it is.
        rate: How much a bias moves in a step.

    Raises:
        UserError: If the rate is below zero, or a bias is of fewer than 32 bits, in which steps of the rate are lost.
    """
    if rate < 0:
        raise UserError(f"rate = {rate}; expected 0 or above.")
    for name, block in _blocks(model).items():
        if name in counts and isinstance(block.router, SigmoidRouter):
            seen_E = counts[name].double()
            bias_E = block.router.selection_bias
            if bias_E.element_size() < _BIAS_BYTES:
                raise UserError(
                    f"the selection bias of {name} is {bias_E.dtype}; expected float32, in which steps of rate = "
                    f"{rate} are not rounded away. Use parallelize_moe_decoder(precision=...), not model.to(...)."
                )
            bias_E.add_((seen_E.mean() - seen_E).sign().to(bias_E.dtype), alpha=rate)


@torch.no_grad()
def update_global_load(model: nn.Module, counts: Mapping[str, Tensor]) -> None:
    """Hand the load of a step's whole batch to the balance losses of the next, where their scope is "global_batch".

    Args:
        model: The model that the counts are of; layers without such a loss are passed over.
        counts: What `take_expert_counts` gave for the step; a layer in which nothing was counted keeps its load.
    """
    for name, block in _blocks(model).items():
        if name in counts and block.global_load is not None:
            seen_E = counts[name].double()
            load_E = seen_E / seen_E.mean().clamp(min=1 / len(seen_E))
            block.global_load.copy_(torch.where(seen_E.any(), load_E, block.global_load.double()))


@final
class LoadStatistics(NamedTuple):
    """How evenly experts were chosen; one number in float64 for each layer.

    Attributes:
        max_over_mean: Load of the busiest expert, 1 where all are equal.
        entropy: Entropy of the loads over that of equal ones, 1 where all are equal, 0 where one expert has all.
        idle: Number of experts that nobody chose.
        dropped: Number of tokens that an expert had no room for: always 0, there is no capacity.
    """

    max_over_mean: Tensor
    entropy: Tensor
    idle: Tensor
    dropped: Tensor


def load_statistics(counts_E: Tensor) -> LoadStatistics:
    """Statistics of counts [..., E], of one layer or several; zeros where nothing was counted. Waits for no device."""
    counts = counts_E.double()
    num_experts = counts.shape[-1]
    shares = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
    entropy = torch.special.entr(shares).sum(dim=-1) / math.log(max(num_experts, 2))
    busiest = shares.amax(dim=-1)
    return LoadStatistics(busiest * num_experts, entropy, (counts == 0).sum(dim=-1).double(), torch.zeros_like(busiest))


def _check_ranks_are_known(blocks: Mapping[str, MoeFeedForward]) -> None:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    alone = [name for name, block in blocks.items() if block.token_groups.batch is None]
    if num_ranks > 1 and alone:
        raise UserError(
            f"{alone[0]} counts the tokens of its own rank alone, but there are {num_ranks} ranks; expected a model "
            "that knows who has other tokens. Call parallelize_expert_parallel(model, ctx), also with a degree of 1."
        )


def _blocks(model: nn.Module) -> dict[str, MoeFeedForward]:
    """The blocks under the names that they have in the whole model: those of its buffers, also on a pipeline's rank."""
    names = {id(buffer): canonical_name(name) for name, buffer in model.named_buffers()}
    blocks = [module for module in model.modules() if isinstance(module, MoeFeedForward)]
    return {names[id(block.counter.counts)].removesuffix(".counter.counts"): block for block in blocks}
