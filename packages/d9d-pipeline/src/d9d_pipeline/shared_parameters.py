"""Parameters shared by several stages, such as tied embeddings: one stage owns the parameter, the others hold copies.

The copies' gradients are added to the owner's, so optimizer, gradient norm, clipping and checkpoints see one tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d_dist import canonical_name, local_tensor
from d9d_dist.gradients.grad_dtype import grad_dtype_of


def shared_names(names_of_stages: Sequence[Mapping[str, object]]) -> dict[str, tuple[int, ...]]:
    """Return the names that several stages have, each with these stages in order; the first one is the owner.

    `names_of_stages` has the parameter names of each stage, for example `dict(stage.named_parameters())`.
    """
    stages: dict[str, list[int]] = {}
    for index, names in enumerate(names_of_stages):
        for name in names:
            stages.setdefault(canonical_name(name), []).append(index)
    return {name: tuple(indices) for name, indices in stages.items() if len(indices) > 1}


@final
@dataclass(frozen=True, slots=True)
class _Pair:
    """Owner and one of its copies; at least one of them is on this rank."""

    owner_rank: int
    owner: nn.Parameter | None
    copy_rank: int
    copy: nn.Parameter | None

    @property
    def requires_grad(self) -> bool:
        return any(parameter is not None and parameter.requires_grad for parameter in (self.owner, self.copy))


@final
class SharedParameters:
    """Synchronization of the gradients and values of parameters that several pipeline stages share.

    Args:
        shared: For each shared name the stages that have it, the owner first; equal on all ranks.
        stages: This rank's stage modules by global stage index, parallelized in the same way on all ranks of the
            pipeline.
        stage_ranks: Pipeline rank of each stage.
        group: Process group of the pipeline; None for one rank.
    """

    def __init__(
        self,
        shared: Mapping[str, tuple[int, ...]],
        stages: Mapping[int, nn.Module],
        *,
        stage_ranks: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        own = {
            (canonical_name(name), index): parameter
            for index, stage in stages.items()
            for name, parameter in stage.named_parameters()
        }
        # All ranks use the same order: messages between two ranks are identified only by their order.
        pairs = [
            _Pair(stage_ranks[owner], own.get((name, owner)), stage_ranks[copy], own.get((name, copy)))
            for name, (owner, *copies) in sorted(shared.items())
            for copy in copies
        ]
        self._pairs = [pair for pair in pairs if pair.owner is not None or pair.copy is not None]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of copies to those of their owners, and set the copies' gradients to None.

        Collective over the pipeline: one send of each copy's gradient to its owner's rank. Call this method in every
        step after the last backward.
        """
        for pair in self._pairs:
            gradient = self._to_owner(pair) if pair.requires_grad else None
            if pair.owner is not None and gradient is not None:
                if pair.owner.grad is None:
                    pair.owner.grad = torch.zeros_like(pair.owner, dtype=grad_dtype_of(pair.owner))
                local_tensor(pair.owner.grad).add_(gradient)

    def _to_owner(self, pair: _Pair) -> Tensor | None:
        gradient = None
        if pair.copy is not None:
            gradient = (
                torch.zeros_like(local_tensor(pair.copy), dtype=grad_dtype_of(pair.copy))
                if pair.copy.grad is None
                else local_tensor(pair.copy.grad)
            )
            pair.copy.grad = None
        dtype = None if pair.owner is None else grad_dtype_of(pair.owner)
        return self._move(gradient, pair.copy_rank, pair.owner, pair.owner_rank, dtype=dtype)

    @torch.no_grad()
    def copy_values(self) -> None:
        """Copy the owners' values to their copies, after an optimizer step or after loading a checkpoint.

        Collective over the pipeline: one send of each parameter to the rank of each copy.
        """
        for pair in self._pairs:
            value = None if pair.owner is None else local_tensor(pair.owner)
            value = self._move(value, pair.owner_rank, pair.copy, pair.copy_rank)
            if pair.copy is not None and value is not None:
                local_tensor(pair.copy).copy_(value)

    def _move(
        self,
        tensor: Tensor | None,
        sender: int,
        like: nn.Parameter | None,
        receiver: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """Send the local shard `tensor` from rank `sender` to rank `receiver`; no message if both are this rank.

        Return the shard on the receiver, else `None`. `like` is the destination parameter, `None` on other ranks;
        `dtype` is the dtype of the shard, if it differs from the parameter's dtype.
        """
        if tensor is not None and like is not None:
            return tensor
        if tensor is not None:
            if tensor.numel():
                dist.send(tensor.contiguous(), group=self._group, group_dst=receiver)
            return None
        assert like is not None, "the sender or the receiver is this rank"
        received = torch.empty_like(local_tensor(like), dtype=dtype)
        if received.numel():
            dist.recv(received, group=self._group, group_src=sender)
        return received
