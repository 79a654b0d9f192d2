"""Losses on what a router says, as an amount for each token: sums over tokens are then exact under any split of them.

The balance loss is linear in the scores, given how often each expert was chosen; so the loss of a sequence is a sum
over its tokens, and every rank has the part of its own. A model adds the amounts to the losses of its tokens, and a
task that takes the mean over tokens takes that of the losses of the routers too: with pipelines, accumulation and
masks, and without a scale that anybody has to get right.

Shape legend: B batch, L length, T = B * L tokens, E experts, A experts active for each token (top-k).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist.errors import UserError
from d9d_moe.router import Routing

BalanceScope: TypeAlias = Literal["sequence", "batch", "global_batch"]
"""Over which tokens the load of experts is counted."""

BalanceDefinition: TypeAlias = Literal["per_layer", "transformers"]
"""Whether each layer has a balance loss of its own, or all layers have one together, as in `transformers`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """Which losses the routers of a model have, and how much they count beside the loss of a token, for each layer.

    Attributes:
        balance: Factor of the load-balancing loss, `sum_e f_e * P_e`: f is the share of tokens that chose an expert
            times `num_experts / top_k`, P its mean score ("DeepSeek-V3", arXiv:2412.19437, equations 17 to 20; "Switch
            Transformers", arXiv:2101.03961, equation 4, for a top_k of 1). It is 1 where load and scores are even. With
            `definition = "transformers"` it is the `router_aux_loss_coef` of `transformers`.
        definition: "per_layer": each layer has the loss above, and the losses of all layers are added. "transformers":
            one loss over the tokens of all layers, `E * sum_e f_e * P_e` with f the share of tokens that chose an
            expert, equal to `load_balancing_loss_func`. It is `top_k` where load and scores are even. Neither
            definition follows from the other with more than one layer.
        scope: Over which tokens f is counted. "sequence": those of one row, wherever its parts are: the same numbers in
            every layout, however a step is cut into microbatches. "batch": those of a whole microbatch on all ranks
            (arXiv:2501.11873): with one microbatch in a step those of the global batch. "global_batch": those of all of
            the step before, which `balance_experts` hands on: the same numbers in every layout, too. Those of the step
            itself are known only when its last microbatch was routed; the paper counts the microbatches so far, and
            what a token costs then depends on how many came before it. Padding is not counted where a mask tells.
        z: Factor of the z-loss, the mean of `logsumexp(logits)^2` ("ST-MoE", arXiv:2202.08906, equation 5).
    """

    balance: float = 0.0
    definition: BalanceDefinition = "per_layer"
    scope: BalanceScope = "sequence"
    z: float = 0.0

    def __post_init__(self) -> None:
        """Refuse factors below zero, names that do not exist, and a scope that the definition cannot have.

        Raises:
            UserError: Naming the field, its value, and what it may be.
        """
        if self.scope not in get_args(BalanceScope):
            expected = ", ".join(get_args(BalanceScope))
            raise UserError(f"router_losses.scope = {self.scope!r}; expected one of {expected}.")
        if self.definition not in get_args(BalanceDefinition):
            expected = ", ".join(get_args(BalanceDefinition))
            raise UserError(f"router_losses.definition = {self.definition!r}; expected one of {expected}.")
        if self.definition == "transformers" and self.scope == "global_batch":
            raise UserError(
                'router_losses.definition = "transformers" with scope = "global_batch": no pipeline stage knows the '
                'load that all layers had in the step before; expected scope = "sequence" or "batch".'
            )
        for name, value in (("balance", self.balance), ("z", self.z)):
            if value < 0:
                raise UserError(f"router_losses.{name} = {value}; expected 0 (none) or above.")

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return self.balance > 0 or self.z > 0

    @property
    def are_joint(self) -> bool:
        """Whether the balance loss is one of all layers, so that layers record what it needs; see `JointBalance`."""
        return self.balance > 0 and self.definition == "transformers"

    @property
    def follow_global_batch(self) -> bool:
        """Whether they need the load that the step before had."""
        return self.balance > 0 and self.scope == "global_batch"


@final
class HiddenAndLosses(NamedTuple):
    """Hidden states, and what the routers that they have passed cost each token.

    Attributes:
        hidden: Hidden states [B, L, D].
        losses: The losses of all routers so far, for each token [B, L], float32 (float64 for a float64 model); with
            `RouterLosses.definition = "transformers"` their `token_records` [B, L, R].
    """

    hidden: Tensor
    losses: Tensor


@final
@dataclass(frozen=True, slots=True)
class TokenGroups:
    """With whom a rank counts: the process groups of the ranks that have other tokens; None for this rank alone.

    Attributes:
        sequence: The ranks with the other parts of the same rows.
        batch: All ranks with a part of the same microbatch of the job.
    """

    sequence: dist.ProcessGroup | None = None
    batch: dist.ProcessGroup | None = None


def token_losses(
    routing: Routing,
    losses: RouterLosses,
    groups: TokenGroups,
    *,
    rows: int,
    global_load_E: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> Tensor:
    """What the routing of each token costs [T]; that of padding nothing.

    With a balance loss of sequences or a batch collective over the scope's group: one all-reduce of the counts.

    Args:
        routing: Of tokens [T] that are `rows` rows of equal lengths, one after the other.
        losses: Which losses.
        groups: The ranks with other tokens.
        rows: B.
        global_load_E: How often each expert was chosen in the step before [E], 1 where all were equally; given where
            the scope is "global_batch".
        mask_T: Which are tokens, and not padding [T], bool; None for all.

    Raises:
        UserError: If the router gives no scores.
    """
    scores_TE, _ = scored(routing)
    total_T = z_losses(routing, losses)
    if losses.balance:
        if losses.scope == "global_batch":
            assert global_load_E is not None
            load_BE = global_load_E.unsqueeze(0)
        else:
            load_BE = expert_load(routing, groups, scope=losses.scope, rows=rows, mask_T=mask_T)
        num_tokens, num_counted = len(total_T), len(load_BE)
        load_TE = load_BE.to(scores_TE.dtype).repeat_interleave(num_tokens // max(num_counted, 1), dim=0)
        total_T = total_T + losses.balance * (scores_TE * load_TE).sum(dim=-1)
    return total_T if mask_T is None else total_T.masked_fill(~mask_T, 0.0)


def scored(routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the scores and logits of a routing [T, E].

    Raises:
        UserError: If the router gives none.
    """
    if routing.scores is None or routing.logits is None:
        raise UserError(
            "got losses for a router that gives no logits and scores; expected both in its Routing. Leave the losses "
            "out, or let the router give them."
        )
    return routing.scores, routing.logits


def z_losses(routing: Routing, losses: RouterLosses) -> Tensor:
    """Compute the z-loss of each token [T]; zeros without one."""
    scores_TE, logits_TE = scored(routing)
    return losses.z * logits_TE.logsumexp(dim=-1).square() if losses.z else torch.zeros_like(scores_TE[:, 0])


@torch.no_grad()
def expert_load(
    routing: Routing,
    groups: TokenGroups,
    *,
    scope: Literal["sequence", "batch"],
    rows: int,
    mask_T: Tensor | None = None,
) -> Tensor:
    """How often each expert was chosen, where 1 is as often as if all were chosen equally.

    Collective over the scope's group: one all-reduce of B x E or E numbers.

    Args:
        routing: Of tokens [T].
        groups: The ranks with other tokens.
        scope: Over which tokens it is counted.
        rows: B, into which the tokens are cut.
        mask_T: Which of them count [T], bool; None for all.

    Returns:
        Loads [B, E] for "sequence", [1, E] for "batch"; float32.
    """
    assert routing.scores is not None
    num_tokens, num_experts = routing.scores.shape
    top_k = routing.indices.shape[1]
    num_counted, group = (rows, groups.sequence) if scope == "sequence" else (1, groups.batch)
    counts_BE = torch.zeros(num_counted, num_experts, dtype=torch.float32, device=routing.indices.device)
    seen_TA = torch.ones_like(routing.indices, dtype=torch.float32)
    if mask_T is not None:
        seen_TA = seen_TA * mask_T.unsqueeze(1)
    # Without tokens there is nothing to cut into rows.
    shape = (num_counted, num_tokens * top_k // max(num_counted, 1))
    counts_BE.scatter_add_(1, routing.indices.reshape(shape), seen_TA.reshape(shape))
    if group is not None and group.size() > 1:
        dist.all_reduce(counts_BE, group=group)
    return counts_BE * (num_experts / counts_BE.sum(dim=-1, keepdim=True).clamp(min=1))
