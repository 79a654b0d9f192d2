"""Generation on ranks that compute the same rows: pipeline, context-parallel and tensor-parallel ranks.

Such ranks must choose the same tokens. They compare the arguments of `generate` once, and sample from the seed of one
rank: their random generators may have different states.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d_dist.collectives.consensus import gather_json
from d9d_dist.errors import UserError
from d9d_dist.values.checksum import checksum

_ROWS = "input_ids, prompt_mask or row_seeds"


@runtime_checkable
class SharesRows(Protocol):
    """Model of which several ranks compute the same rows, such as a pipeline."""

    @property
    def rows_group(self) -> dist.ProcessGroup | None:
        """Ranks that compute the same rows; None for one rank."""
        ...

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Group of ranks with other rows, which run equally many forward passes to share parameters; None for none."""
        ...

    @property
    def row_multiple(self) -> int:
        """Number of which the length of a row must be a multiple."""
        ...


def sharing_of(model: Any) -> tuple[dist.ProcessGroup | None, int]:
    """Return the ranks that compute the same rows as this rank, and the multiple of the length of a row.

    For a module they are the tensor-parallel ranks, found by its parameters.
    """
    if isinstance(model, SharesRows):
        return model.rows_group, model.row_multiple
    for parameter in model.parameters() if isinstance(model, nn.Module) else ():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            group = parameter.device_mesh.get_group("tp")
            return group, group.size()
    return None, 1


def stopping_groups(model: Any) -> list[dist.ProcessGroup]:
    """Return the groups of ranks with other rows that run as many forward passes, because they share parameters.

    For a module they are the groups over which its parameters are sharded, except by tensor parallelism.
    """
    if isinstance(model, SharesRows):
        return [model.data_group] if model.data_group is not None and model.data_group.size() > 1 else []
    found: dict[dist.ProcessGroup, None] = {}
    for parameter in model.parameters() if isinstance(model, nn.Module) else ():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, placement in enumerate(parameter.placements):
                if (
                    placement.is_shard()
                    and mesh.size(axis) > 1
                    and (mesh.mesh_dim_names or ())[axis : axis + 1] != ("tp",)
                ):
                    found[mesh.get_group(axis)] = None
    return list(found)


def shared_row_seeds(
    rows: Sequence[Tensor | None],
    options: Mapping[str, Any],
    group: dist.ProcessGroup,
    *,
    generator: torch.Generator | None,
) -> Tensor:
    """Compare the arguments of all ranks of a group, and return seeds of rows [B] that are equal on all of them.

    Collective over the group: one all-gather. `rows` are the token ids, their mask and the seeds of rows. Without seeds
    of rows, they are derived from a number that the first rank draws.

    Raises:
        UserError: On every rank, if rows or options differ.
    """
    input_ids, _, row_seeds = rows
    digests = [None if each is None else [*each.shape, int(checksum(each))] for each in rows]
    device = "cpu" if generator is None else generator.device
    drawn = torch.randint(2**62, (), generator=generator, device=device) if row_seeds is None else 0
    mine = {_ROWS: digests, **{name: repr(value) for name, value in options.items()}}
    found = gather_json([mine, int(drawn)], group)
    for rank, (other, _) in enumerate(found):
        if names := [name for name in mine if other[name] != found[0][0][name]]:
            raise UserError(
                f"{', '.join(names)} of generate() differ between ranks that compute the same rows: rank {rank} of "
                "their group differs from its first rank; expected equal arguments on the pipeline-, context- and "
                "tensor-parallel ranks of a data-parallel coordinate. Choose prompts by ctx.coordinate('batch', 'dp')."
            )
    assert input_ids is not None
    return torch.arange(len(input_ids)) + found[0][1] if row_seeds is None else row_seeds
