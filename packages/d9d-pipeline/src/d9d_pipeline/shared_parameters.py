"""Parameters that several stages use, such as an embedding that is tied to the head: one stage owns it, others copy it.

The owner's gradient is the sum over all of them, so that what is optimised, measured, clipped and saved is one tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d_dist import canonical_name


def shared_names(names_of_stages: Sequence[Mapping[str, object]]) -> dict[str, tuple[int, ...]]:
    """The names that several stages have, with those stages, of which the first is the owner.

    Args:
        names_of_stages: For each stage the names of its parameters, such as `dict(stage.named_parameters())`.
    """
    stages: dict[str, list[int]] = {}
    for index, names in enumerate(names_of_stages):
        for name in names:
            stages.setdefault(canonical_name(name), []).append(index)
    return {name: tuple(indices) for name, indices in stages.items() if len(indices) > 1}


@final
@dataclass(frozen=True, slots=True)
class _Pair:
    """An owner and one of its copies, of which this rank has at least one."""

    owner_rank: int
    owner: nn.Parameter | None
    copy_rank: int
    copy: nn.Parameter | None

    @property
    def requires_grad(self) -> bool:
        return any(parameter is not None and parameter.requires_grad for parameter in (self.owner, self.copy))


@final
class SharedParameters:
    """Keeps a rank's copies, or what it owns, in step with the other ranks of its pipeline.

    Args:
        shared: Names with the stages that have them, the owner first; equal on all ranks.
        stages: This rank's stages, parallelised alike on all ranks of the pipeline.
        stage_ranks: For each stage of the pipeline the rank that holds it.
        group: The ranks of the pipeline; None if it is one.
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
        # In one order on all ranks: nothing else tells what is sent between two of them apart.
        pairs = [
            _Pair(stage_ranks[owner], own.get((name, owner)), stage_ranks[copy], own.get((name, copy)))
            for name, (owner, *copies) in sorted(shared.items())
            for copy in copies
        ]
        self._pairs = [pair for pair in pairs if pair.owner is not None or pair.copy is not None]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of copies to that of their owner, and leave none at the copies.

        Collective over the pipeline: a send of the gradient of each copy. Call it when gradients are reduced.
        """
        for pair in self._pairs:
            if not pair.requires_grad:
                continue
            gradient = self._to_owner(pair)
            if pair.owner is None or gradient is None:
                continue
            if pair.owner.grad is None:
                pair.owner.grad = torch.zeros_like(pair.owner)
            _local(pair.owner.grad).add_(gradient)

    def _to_owner(self, pair: _Pair) -> Tensor | None:
        """This rank's part of the gradient of a copy, on the rank of the owner."""
        if pair.copy is None:
            assert pair.owner is not None, "this rank has one of them"
            gradient = torch.empty_like(_local(pair.owner))
            self._receive(gradient, pair.copy_rank)
            return gradient
        gradient = torch.zeros_like(_local(pair.copy)) if pair.copy.grad is None else _local(pair.copy.grad)
        pair.copy.grad = None
        if pair.owner is None:
            self._send(gradient.contiguous(), pair.owner_rank)
            return None
        return gradient

    @torch.no_grad()
    def copy_values(self) -> None:
        """Make copies equal to their owner: after a step of the optimizer, or after the owner was loaded.

        Collective over the pipeline: a send of each parameter to its copies.
        """
        for pair in self._pairs:
            if pair.owner is not None and pair.copy is not None:
                _local(pair.copy).copy_(_local(pair.owner))
            elif pair.owner is not None:
                self._send(_local(pair.owner).contiguous(), pair.copy_rank)
            elif pair.copy is not None:
                received = torch.empty_like(_local(pair.copy))
                self._receive(received, pair.owner_rank)
                _local(pair.copy).copy_(received)

    def _send(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            dist.send(tensor, group=self._group, group_dst=rank)

    def _receive(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            dist.recv(tensor, group=self._group, group_src=rank)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
