"""This rank's pipeline stages, and the executors that run them together with the other pipeline ranks."""

from collections.abc import Collection, Mapping
from typing import Any, final

import torch
from torch import nn

from d9d_dist import DistributedContext, GradientSync, set_grad_dtype
from d9d_loop.config.trainer_config import GradientConfig
from d9d_pipeline import (
    Executor,
    ForwardOnly,
    Messages,
    OneForwardOneBackward,
    PipelinedModel,
    Program,
    RankStages,
    Schedule,
    SharedParameters,
    broadcast_tree,
    build,
)


@final
class Pipeline:
    """Model split into pipeline stages; a model that is not split is a pipeline of one stage.

    Attributes:
        model: This rank's part of the model, for the optimizer, checkpoints and export.
        stages: This rank's stage modules by global stage index.
        shared: Sums the gradients and copies the values of parameters that several stages share.

    Args:
        stages: This rank's stage modules by global stage index, parallelized and materialized.
        ctx: Distributed context.
        schedule: Pipeline schedule; 1F1B by default.
        shared_names: Parameters shared by several stages, with the indices of those stages; the owner comes first.
        messages: Metadata of all messages between stages; by default, ranks send it with the first message.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        ctx: DistributedContext,
        schedule: Schedule | None = None,
        shared_names: Mapping[str, tuple[int, ...]] | None = None,
        messages: Messages | None = None,
    ) -> None:
        self.stages = dict(stages)
        self._schedule = schedule or OneForwardOneBackward()
        self._messages = messages
        self._programs: dict[int, Program] = {}
        self._reduces_each_microbatch = False
        self._device, self._num_ranks = ctx.device, ctx.size("regular", "pp")
        self._group = ctx.group_for("regular", "pp") if self._num_ranks > 1 else None
        shared = shared_names or {}
        is_whole = self._num_ranks == self._schedule.stages_per_rank == 1
        copies = {index: _copies_of(index, shared) for index in self.stages}
        self.model = self.stages[0] if is_whole else RankStages(self.stages, copies=copies)
        layout = self._program(_forward_only(self._schedule), 1)
        self._last_rank = layout.stage_ranks[-1]
        self.shared = SharedParameters(shared, self.stages, stage_ranks=layout.stage_ranks, group=self._group)

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return self._num_ranks * self._schedule.stages_per_rank

    def program(self, num_microbatches: int) -> Program:
        """Return the program of a training step; raise `UserError` if the schedule does not support `num_microbatches`.

        Programs are cached, because a caller may alternate between numbers of microbatches.
        """
        if num_microbatches not in self._programs:
            self._programs[num_microbatches] = self._program(self._schedule, num_microbatches)
        return self._programs[num_microbatches]

    def training(self, num_microbatches: int) -> Executor:
        """Return an executor of training steps."""
        return self._executor(self.program(num_microbatches), reduce_each_microbatch=self._reduces_each_microbatch)

    def gradient_sync(self, num_microbatches: int) -> GradientSync:
        """Return the reduction of the gradients that FSDP does not reduce. Collective: it creates process groups."""
        # With split backward, a parameter that is used twice may accumulate its gradient in two parts.
        splits = self.program(num_microbatches).splits
        return GradientSync(self.model, num_microbatches=None if splits else num_microbatches)

    def set_gradients(self, config: GradientConfig) -> None:
        """Set the dtype in which gradients accumulate, and how often FSDP reduces them, before the first forward."""
        self._reduces_each_microbatch = config.reduce_each_microbatch
        if config.dtype is not None:
            for stage in self.stages.values():
                set_grad_dtype(stage.parameters(), getattr(torch, config.dtype))

    def evaluation(self, num_microbatches: int) -> Executor:
        """Return an executor of forward passes."""
        return self._executor(self._program(_forward_only(self._schedule), num_microbatches))

    def all_ranks_get(self, tree: Any) -> Any:
        """Broadcast a tree from the rank of the last stage to all pipeline ranks. Collective over the pipeline.

        The other ranks pass `None`. The leaves are tensors; their metadata is sent as JSON.
        """
        if self._group is None:
            return tree
        return broadcast_tree(tree, self._group, source=self._last_rank)

    @property
    def has_last_stage(self) -> bool:
        """True if this rank has the last stage, whose outputs are the model's outputs."""
        return self._group is None or self._group.rank() == self._last_rank

    def callable(self) -> PipelinedModel:
        """Return a callable that runs the whole model; calls are collective over the pipeline ranks."""
        return PipelinedModel(
            self.stages,
            group=self._group,
            device=self._device,
            stages_per_rank=self._schedule.stages_per_rank,
            placement=self._schedule.placement,
        )

    def _program(self, schedule: Schedule, num_microbatches: int) -> Program:
        return build(schedule, num_ranks=self._num_ranks, num_microbatches=num_microbatches)

    def _executor(self, program: Program, *, reduce_each_microbatch: bool = False) -> Executor:
        return Executor(
            program,
            self.stages,
            group=self._group,
            device=self._device,
            messages=self._messages,
            reduce_each_microbatch=reduce_each_microbatch,
        )


def _forward_only(schedule: Schedule) -> ForwardOnly:
    return ForwardOnly(schedule.stages_per_rank, schedule.placement)


def _copies_of(index: int, shared: Mapping[str, tuple[int, ...]]) -> Collection[str]:
    return [name for name, stages in shared.items() if index in stages[1:]]
