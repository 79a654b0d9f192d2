"""Check that replicas are equal, which finds for example a flipped bit or a missing reduction.

Replicas are bitwise equal unless there is a fault, since all ranks get the same gradient sums and run the same
arithmetic. So the ranks compare a checksum of 8 bytes per tensor (`d9d_dist.values.checksum`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d_dist import DistributedContext, canonical_name, gather_json, local_tensor
from d9d_dist.collectives.consensus import name_ranks
from d9d_dist.values.checksum import checksum

_SHOWN = 8


class ReplicaError(RuntimeError):
    """Error of replicas that differ between ranks; the same on all ranks."""


@torch.no_grad()
def check_replicas(model: nn.Module, optimizer: Optimizer, *, step: int, ctx: DistributedContext) -> None:
    """Check that replicas of parameters and optimizer states are equal. `step` is only for the message.

    DTensors are compared along the mesh axes on which they are replicated, plain tensors over all ranks of a pipeline
    stage. Collective over all ranks: an all-gather of 8 bytes per tensor over each such group, and an all-gather of the
    differences. Reads each replicated tensor once, and synchronizes the host with the device.

    Raises:
        ReplicaError: On all ranks, if replicas differ. The message names tensors, and the ranks that differ from the
            majority.
    """
    if ctx.world_size == 1:
        return
    stage = ctx.group_for("batch", "dp", "cp", "tp")
    by_group: dict[dist.ProcessGroup, list[tuple[str, torch.Tensor]]] = {}
    for name, local, groups in _replicas(model, optimizer, stage):
        total = checksum(local)
        for group in groups:
            by_group.setdefault(group, []).append((name, total))
    problems = [problem for group, checksums in by_group.items() for problem in _compare(checksums, group)]
    if found := _join_problems(problems):
        raise ReplicaError(
            f"replicas differ after step {step}:\n{found}\nResume from an earlier checkpoint; if the "
            "same rank is named again, replace its machine."
        )


@torch.no_grad()
def check_buffers(model: nn.Module, *, step: int, ctx: DistributedContext) -> None:
    """Check that persistent buffers that are not DTensors are equal on all ranks of a pipeline stage.

    They differ if forward updates a buffer, such as a moving average or a codebook, from the local microbatch only, or
    from this rank's outputs of a tensor-parallel layer.
    Collective over all ranks: an all-gather of 8 bytes per buffer, and an all-gather of the differences. Synchronizes
    the host with the device.

    Raises:
        ReplicaError: On all ranks, if buffers differ. The message names the buffers.
    """
    if ctx.world_size == 1:
        return
    group = ctx.group_for("batch", "dp", "cp", "tp")
    checksums = [
        (canonical_name(f"{module_name}.{name}".removeprefix(".")), checksum(buffer))
        for module_name, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and not isinstance(buffer, DTensor)
    ]
    problems = _compare(checksums, group) if checksums and group.size() > 1 else []
    if found := _join_problems(problems):
        raise ReplicaError(
            f"buffers differ between ranks after step {step}, because forward updates them from each rank's own part "
            f"of the batch, or of the outputs of a tensor-parallel layer:\n{found}\nUpdate them from all parts: reduce "
            'the update over ctx.group_for("batch", "dp", "cp"), or over ("batch", "dp", "cp", "tp"), and run equal '
            "numbers of microbatches on all ranks. If ranks may have different values, register the buffers with "
            "persistent=False."
        )


def _join_problems(problems: list[str]) -> str:
    """All-gather the problems of all ranks; return up to `_SHOWN` of the problems, one per line."""
    found = sorted({problem for each in gather_json(problems or None) for problem in each or ()})
    more = f"\nand {len(found) - _SHOWN} more" if found[_SHOWN:] else ""
    return "\n".join(f"- {problem}" for problem in found[:_SHOWN]) + more


def _replicas(
    model: nn.Module, optimizer: Optimizer, stage: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor, tuple[dist.ProcessGroup, ...]]]:
    """Yield this rank's replicated tensors: name, local tensor and groups with replicas. Equal order on their ranks."""
    for name, parameter in model.named_parameters():
        groups = _groups(parameter, stage)
        tensors = {name: parameter.detach()}
        # Optimizer state is sharded like its parameter. Non-tensors and tensors on another device are not compared.
        states = optimizer.state.get(parameter, {})
        tensors |= {
            f"{key} of {name}": state
            for key, state in sorted(states.items())
            if isinstance(state, torch.Tensor) and state.device == parameter.device
        }
        for label, tensor in tensors.items():
            local = local_tensor(tensor)
            if groups and local.numel():
                yield label, local, groups


def _groups(parameter: nn.Parameter, stage: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of more than one rank over which a parameter is replicated."""
    if not isinstance(parameter, DTensor):
        return (stage,) if stage.size() > 1 else ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    )


def _compare(checksums: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> list[str]:
    """All-gather the checksums over a group, and describe the tensors that differ; equal on all ranks of the group."""
    mine = torch.stack([total for _, total in checksums])
    gathered = mine.new_empty(group.size() * mine.numel())
    dist.all_gather_into_tensor(gathered, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    rows = gathered.view(group.size(), -1).tolist()
    problems: list[str] = []
    for index, (name, _) in enumerate(checksums):
        column = {rank: row[index] for rank, row in zip(ranks, rows, strict=True)}
        if len(set(column.values())) > 1:
            problems.append(f"{name}: {_describe_minority(column)}")
    return problems


def _describe_minority(checksums: Mapping[int, int]) -> str:
    """Describe which ranks differ from the majority, or the number of different values without a majority."""
    (value, count), *_ = Counter(checksums.values()).most_common()
    if 2 * count <= len(checksums):
        return f"{name_ranks(list(checksums))} have {len(set(checksums.values()))} different values"
    odd = [rank for rank, checksum in checksums.items() if checksum != value]
    others = [rank for rank, checksum in checksums.items() if checksum == value]
    return f"{name_ranks(odd)} differ{'' if odd[1:] else 's'} from rank {others[0]}"
