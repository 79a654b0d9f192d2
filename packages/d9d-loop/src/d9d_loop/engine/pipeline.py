"""This rank's pipeline stages, and the executors that run them together with the other pipeline ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from d9d_dist import ContextSplit, DistributedContext, UserError, set_grad_dtype
from d9d_loop.config.trainer_config import GradientConfig
from d9d_loop.model.model_check import arguments_of, takes_mask
from d9d_loop.task import BatchTask, row_multiple, to_inputs
from d9d_pipeline import (
    Executor,
    ForwardOnly,
    Inputs,
    OneForwardOneBackward,
    PipelinedModel,
    Program,
    RankStages,
    Schedule,
    SharedParameters,
    broadcast_tree,
    build,
)
from d9d_pipeline.channel import Messages


@final
class Pipeline:
    """Model split into pipeline stages; a model that is not split is a pipeline of one stage.

    Attributes:
        model: This rank's part of the model, for the optimizer, checkpoints and export.
        stages: This rank's stage modules by global stage index.
        group: Process group of the pipeline; `None` for one rank.
        shared: Sums the gradients and copies the values of parameters that several stages share.

    Args:
        stages: This rank's stage modules by global stage index, parallelized and materialized.
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
        self._programs: dict[tuple[bool, int], Program] = {}
        self._executors: dict[tuple[bool, int], Executor] = {}
        self._reduces_each_microbatch = False
        self._device, self._num_ranks = ctx.device, ctx.size("regular", "pp")
        self.group = ctx.group_for("regular", "pp") if self._num_ranks > 1 else None
        self._rows_group, self._data_group = ctx.group_for("batch", "pp", "cp", "tp"), ctx.group_for("batch", "dp")
        self._tp_size = ctx.size("batch", "tp")
        shared = shared_names or {}
        self._split = ContextSplit(ctx.mesh_for("batch")["cp"]) if ctx.size("batch", "cp") > 1 else None
        is_whole = self._num_ranks == self._schedule.stages_per_rank == 1
        copies = {index: [name for name, users in shared.items() if index in users[1:]] for index in self.stages}
        self.model = self.stages[0] if is_whole else RankStages(self.stages, copies=copies)
        self._takes_mask = takes_mask(self.model)
        stage_ranks = self._program(1, trains=False).stage_ranks
        self._last_rank = stage_ranks[-1]
        self.shared = SharedParameters(shared, self.stages, stage_ranks=stage_ranks, group=self.group)

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return self._num_ranks * self._schedule.stages_per_rank

    def program(self, num_microbatches: int) -> Program:
        """Return the program of a training step; raise `UserError` if the schedule does not support `num_microbatches`.

        Programs are cached, because a caller may alternate between numbers of microbatches.
        """
        return self._program(num_microbatches, trains=True)

    def supports(self, num_microbatches: int, *, splits: bool) -> bool:
        """Return True if the schedule supports a number of microbatches, and splits all backward passes or none."""
        try:
            return self.program(num_microbatches).splits == splits
        except UserError:
            return False

    def training(self, num_microbatches: int) -> Executor:
        """Return the executor of training steps."""
        return self._executor(num_microbatches, trains=True)

    def set_gradients(self, config: GradientConfig) -> None:
        """Set the dtype in which gradients accumulate, and how often FSDP reduces them, before the first forward."""
        self._reduces_each_microbatch = config.reduce_each_microbatch
        if config.dtype is not None:
            for stage in self.stages.values():
                set_grad_dtype(stage.parameters(), getattr(torch, config.dtype))

    def inputs_of(self, task: BatchTask, batch: Any, *, is_stand_in: bool = False) -> Inputs:
        """Return the model's inputs for a batch, with the token mask if the model takes one. No collectives."""
        inputs = to_inputs(task.inputs(batch))
        if not self._takes_mask:
            self._refuse_swallowed(inputs)
            return inputs
        mask = inputs.shared.get("mask_BL")
        mask = task.token_mask(batch) if mask is None else mask
        if is_stand_in:
            ids = mask if mask is not None else inputs.first[0] if inputs.first else inputs.shared.get("input_ids")
            mask = None if ids is None else torch.zeros(ids.shape[:2], dtype=torch.bool, device=ids.device)
        return inputs if mask is None else Inputs(*inputs.first, **{**inputs.shared, "mask_BL": mask})

    def _refuse_swallowed(self, inputs: Inputs) -> None:
        """Raise `UserError` if a forward of transformers would ignore document ids: it takes any `**kwargs`."""
        for stage in self.stages.values() if "document_ids_BL" in inputs.shared else ():
            is_foreign = any(each.__module__.partition(".")[0] == "transformers" for each in type(stage).__mro__)
            if is_foreign and "document_ids_BL" not in arguments_of(stage):
                raise UserError(
                    f"{type(stage).__name__}.forward of transformers ignores document_ids_BL, so packed documents "
                    "would attend to each other; expected a model that takes document ids. Use a d9d decoder, such "
                    "as pretrained_model(folder), or a task for rows of one document."
                )

    def forward(
        self,
        batches: Iterable[Any],
        num_batches: int,
        *,
        inputs: Callable[[Any], Inputs],
        on_output: Callable[[Any, int, Any], object],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run forward passes, several batches in one executor step. Collective over the ranks of the model.

        Args:
            batches: Batches on the device.
            num_batches: Number of batches to take from `batches`, equal on every rank.
            inputs: Returns the model's inputs for a batch, such as `inputs_of` for a task.
            on_output: Receives the outputs, the index of the batch, and the batch, on the ranks of the last stage.
            around: Returns the context of an executor step and the reads of its batches.
        """
        rest, most = iter(batches), 2 * self._num_ranks if self._num_ranks > 1 else 1
        for start in range(0, num_batches, most):
            with around():
                some = list(islice(rest, min(most, num_batches - start)))

                def take(outputs: Any, number: int, start: int = start, some: Sequence[Any] = some) -> None:
                    on_output(outputs, start + number, some[number])

                self._executor(len(some), trains=False).step([inputs(batch) for batch in some], take)

    def gather_tokens(self, values: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
        """Return values per token as whole rows on every rank. Collective over the context-parallel and pipeline ranks.

        `values` are those of each batch by name, [B, L] for this rank's part of the rows. Ranks without the last stage
        pass an empty list. Raises `UserError` if a value is not a tensor with a token dim, in any layout.
        """
        mine: list[Mapping[str, Tensor]] = [_checked_tokens(each) for each in values]
        if self._split is not None and self.has_last_stage:
            mine = self._split.join(mine)
        if self.group is None:
            return mine
        return broadcast_tree(mine, self.group, source=self._last_rank)

    @property
    def has_last_stage(self) -> bool:
        """True if this rank has the last stage, whose outputs are the model's outputs."""
        return self.group is None or self.group.rank() == self._last_rank

    def callable(self) -> PipelinedModel:
        """Return a callable that runs the whole model; calls are collective over the pipeline ranks."""
        return PipelinedModel(
            self.stages,
            group=self.group,
            device=self._device,
            stages_per_rank=self._schedule.stages_per_rank,
            placement=self._schedule.placement,
            rows_group=self._rows_group,
            data_group=self._data_group,
            row_multiple=self._tp_size,
        )

    def for_generation(self) -> "nn.Module | WholeRows":
        """Return the model for `d9d_modules.generate`; see `Engine.for_generation`."""
        if self.num_stages == 1 and self._split is None:
            return self.model
        return WholeRows(self.callable(), self._split, self._rows_group, self._data_group, self._tp_size)

    def _program(self, num_microbatches: int, *, trains: bool) -> Program:
        key = trains, num_microbatches
        if key not in self._programs:
            schedule = self._schedule
            if not trains:
                schedule = ForwardOnly(schedule.stages_per_rank, schedule.placement)
            self._programs[key] = build(schedule, num_ranks=self._num_ranks, num_microbatches=num_microbatches)
        return self._programs[key]

    def _executor(self, num_microbatches: int, *, trains: bool) -> Executor:
        key = trains, num_microbatches
        if key not in self._executors:
            self._executors[key] = Executor(
                self._program(num_microbatches, trains=trains),
                self.stages,
                group=self.group,
                device=self._device,
                messages=self._messages,
                reduce_each_microbatch=self._reduces_each_microbatch and trains,
            )
        return self._executors[key]


@final
class WholeRows:
    """Function from whole rows of token ids [B, L] to whole logits [B, L, V], in any layout; for `generate`.

    Attributes:
        rows_group: Ranks that compute the same rows.
        data_group: Ranks with other rows, which may share parameters, so they run as many forward passes.
        row_multiple: Number of which the length of a row must be a multiple.
    """

    def __init__(
        self,
        model: PipelinedModel,
        split: ContextSplit | None,
        rows_group: dist.ProcessGroup,
        data_group: dist.ProcessGroup,
        tp_size: int,
    ) -> None:
        self._model, self._split, self.rows_group, self.data_group = model, split, rows_group, data_group
        self.row_multiple = row_multiple(1 if split is None else split.mesh.size(), tp_size)

    def __call__(self, ids_BL: Tensor, **whole: Tensor) -> Tensor:
        """Return the logits of whole rows. Collective over `rows_group`; `whole` are more values of whole rows."""
        if self._split is None:
            return self._model(ids_BL, **whole)
        own = self._split.split(whole) or {"position_ids": self._split.positions(ids_BL.shape[1])}
        return self._split.join(self._model(self._split.split(ids_BL), **own))


def _checked_tokens(values: Any) -> dict[str, Tensor]:
    """Return values per token without gradient. Raise UserError unless they are tensors [B, L, ...] by name."""
    if not isinstance(values, Mapping):
        raise UserError(
            f"got a {type(values).__name__} as values per token; expected a dict of tensors [B, L] by name."
        )
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"got a {shape} as the values {name!r} per token; expected a tensor [B, L]. Expand a value of each row "
                "over its tokens."
            )
    return {name: value.detach() for name, value in values.items()}
