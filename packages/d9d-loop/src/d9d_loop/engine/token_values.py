"""Values per token that a call returns: whole rows, on every rank of a data-parallel coordinate."""

from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from d9d_dist import ContextSplit, DistributedContext
from d9d_loop.job.pipeline import Pipeline


@final
class TokenValues:
    """Join of values per token over context-parallel ranks, and their transfer to the other pipeline ranks.

    Args:
        pipeline: This rank's stages of the model.
        ctx: Distributed context.
    """

    def __init__(self, pipeline: Pipeline, ctx: DistributedContext) -> None:
        self._pipeline = pipeline
        self._split = ContextSplit(ctx.mesh_for("batch")["cp"]) if ctx.size("batch", "cp") > 1 else None

    def __call__(self, values: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
        """Return whole rows on every rank. Collective over the context-parallel ranks and the pipeline.

        Args:
            values: Values of each batch by name, [B, L] for this rank's part of the rows. Ranks without the last stage
                pass an empty list.

        Raises:
            UserError: If a value is not a tensor with a token dim.
        """
        mine = [{name: value.detach() for name, value in each.items()} for each in values]
        if self._split is not None and self._pipeline.has_last_stage:
            mine = self._split.join(mine)
        return self._pipeline.all_ranks_get(mine)
