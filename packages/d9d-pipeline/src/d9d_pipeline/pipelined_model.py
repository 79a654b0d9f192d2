"""Pipeline that is called like the whole model and returns the result on every rank, for interactive use."""

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from d9d_dist.collectives.tree_gather import all_gather_trees
from d9d_pipeline.build import build
from d9d_pipeline.executor import Executor, Outputs
from d9d_pipeline.inputs import Inputs
from d9d_pipeline.schedule import StagePlacement
from d9d_pipeline.schedules.fill_drain import ForwardOnly


@final
class PipelinedModel:
    """Model of all stages, without gradients; a call returns the last stage's output on every rank.

    Args:
        stages: This rank's stage modules by global stage index.
        group: Process group of the pipeline; None for one rank.
        rows_group: Ranks that compute the same rows; by default, those of the pipeline. `d9d_modules.generate` samples
            once for them.
        data_group: Ranks with other rows that run as many forward passes, because they share parameters; None for none.
        row_multiple: Number of which the length of a row must be a multiple.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        stages_per_rank: int = 1,
        placement: StagePlacement = "loop",
        rows_group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        row_multiple: int = 1,
    ) -> None:
        self._group = group
        self.rows_group = group if rows_group is None else rows_group
        self.data_group, self.row_multiple = data_group, row_multiple
        num_ranks = 1 if group is None else group.size()
        program = build(ForwardOnly(stages_per_rank, placement), num_ranks=num_ranks, num_microbatches=1)
        self._last_rank = program.stage_ranks[-1]
        self._executor = Executor(program, stages, group=group, device=device)

    def __call__(self, *first: Any, **shared: Any) -> Outputs:
        """Run the model. Collective over the pipeline: the forward's sends, then a broadcast of the result."""
        outputs: list[Outputs] = []
        self._executor.step([Inputs(*first, **shared)], lambda output, _: outputs.append(output))
        if self._group is None or self._group.size() == 1:
            return outputs[0]
        # Send the metadata on every call, because in generation each result is one token longer.
        mine = outputs[0] if outputs else None
        return broadcast_tree(mine, self._group, source=self._last_rank)


def broadcast_tree(tree: Any, group: dist.ProcessGroup, *, source: int) -> Any:
    """Return the tree of rank `source` of a group on every rank of the group; other ranks pass any tree.

    The leaves are tensors and `None`. Collectives and errors are those of `all_gather_trees`, with one tree.
    """
    is_source = group.rank() == source
    found = all_gather_trees(tree if is_source else None, group)[source]
    return tree if is_source else found
