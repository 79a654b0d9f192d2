"""A pipeline that is called as the whole model would be, with the result on every rank: for trying a model out."""

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from d9d_pipeline._channel import Channel
from d9d_pipeline._message import Description
from d9d_pipeline.executor import Executor, Inputs, Outputs
from d9d_pipeline.program import build
from d9d_pipeline.schedule import Placement
from d9d_pipeline.schedules.fill_drain import ForwardOnly


@final
class PipelinedModel:
    """Runs one batch through all stages, without gradients, and gives every rank what the last stage returned.

    Args:
        stages: This rank's modules by global stage index.
        stages_per_rank: How many stages each rank holds.
        placement: Which ones.
        group: The ranks of the pipeline; None if it is one.
        device: Where stages compute.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        stages_per_rank: int = 1,
        placement: Placement = "loop",
    ) -> None:
        self._group, self._device = group, device
        num_ranks = 1 if group is None else group.size()
        program = build(ForwardOnly(stages_per_rank, placement), num_ranks=num_ranks, num_microbatches=1)
        self._last_rank = program.stage_ranks[-1]
        self._executor = Executor(program, stages, group=group, device=device)

    def __call__(self, *first: Any, **shared: Any) -> Outputs:
        """Run the model. Collective over the ranks of the pipeline.

        Args:
            first: Positional arguments of the first stage.
            shared: Keyword arguments of every stage.
        """
        outputs: list[Outputs] = []
        self._executor.step([Inputs(*first, **shared)], lambda output, _: outputs.append(output))
        if self._group is None or self._group.size() == 1:
            return outputs[0]
        # Described anew each time, by a channel of its own: what is asked for is often one token longer than before.
        channel = Channel(self._group, self._device)
        if not outputs:
            arriving = channel.receive(kind=("result",), peer=self._last_rank)
            assert arriving.description.tree is not None, "outputs are trees"
            return pytree.tree_unflatten(arriving.wait(), arriving.description.tree)
        leaves, tree = pytree.tree_flatten(outputs[0])
        for peer in range(self._group.size()):
            if peer != self._last_rank:
                channel.send(leaves, Description.of(leaves, tree), kind=("result", peer), peer=peer)
        channel.finish()
        return outputs[0]
