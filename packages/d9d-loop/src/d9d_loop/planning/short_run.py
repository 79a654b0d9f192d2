"""Dry runs of large jobs: a copy of the model with four of the repeated layer blocks runs; its cost is extrapolated.

    C = C(4) + k R

C(4): cost of a step with four repeats (`layer_repeats.py`). R: cost of the third repeat. k: number of dropped repeats.
All repeats between the second and the last have the same operators, collectives, parameters and saved activations. The
backward pass of the second repeat has different collectives, because FSDP2 prefetches the weights of the first repeat
at another point. `RepeatMarks` mark the parts of a step that belong to the third repeat, and the record counts these
parts k more times.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from d9d_dist import Launch, StageInfo
from d9d_dist.precision import PrecisionName
from d9d_loop.job.plan import JobPlan
from d9d_loop.model.block_lists import block_lists
from d9d_loop.model.built_model import build_model
from d9d_loop.planning.dry_run_mode import DryRunMode
from d9d_loop.planning.dry_runs import DryRun, fake_batch, placed, run_rank, stage_messages, without_fake_warnings
from d9d_loop.planning.layer_repeats import ShortProvider, repeats_of
from d9d_loop.planning.step_record import RepeatMarks
from d9d_pipeline.channel import Messages


def short_runs(
    plan: JobPlan, *, ranks: Sequence[int], world_size: int, num_microbatches: tuple[int, int], precision: PrecisionName
) -> tuple[DryRun, ...]:
    """Return the same as `dry_run` for some ranks of a planned job and some microbatches, in less time.

    Args:
        plan: The plan of any rank.
        ranks: Global ranks, one of each class.
        world_size: Number of ranks of the job.
        num_microbatches: Microbatches of the two recorded steps; the schedule must support them.
        precision: Precision of the job on the planned device.

    Raises:
        UserError: If this process already has a process group.
    """
    num_first, num_last = num_microbatches
    runs = _ShortRuns(replace(plan, num_microbatches=num_last), num_first, world_size, precision)
    with without_fake_warnings():
        messages = runs.messages()
        return tuple(runs.run(rank, messages) for rank in ranks)


@final
class _ShortRuns:
    """Runs of a planned job's ranks with fewer layers."""

    def __init__(self, plan: JobPlan, num_first: int, world_size: int, precision: PrecisionName) -> None:
        self._plan, self._num_first, self._world_size, self._precision = plan, num_first, world_size, precision
        self._fake = DryRunMode()
        self._stages: dict[int, nn.Module] = {}

    def run(self, rank: int, messages: Messages | None) -> DryRun:
        """Run a rank's step, and return a record that counts all layers."""
        with placed(self._plan_for, rank, self._world_size, self._precision) as (plan, ctx):
            stages = plan.model.program.stages_of(ctx.coordinate("regular", "pp"))
            marks = RepeatMarks(self._droppable(stages, kept=4))
            repeat: list[nn.Module] = []
            short = self._shortened(marks, repeat)
            batch = fake_batch(plan, ctx, self._fake)
            return run_rank(
                short,
                ctx,
                messages=messages,
                fake=self._fake,
                batch=batch,
                num_first=None if self._num_first == plan.num_microbatches else self._num_first,
                marks=marks,
                repeat=repeat,
            )

    def messages(self) -> Messages | None:
        """Return the metadata of the messages between stages, which run with as few layers as possible."""

        def shortened(pipeline_rank: int) -> JobPlan:
            stages = self._plan.model.program.stages_of(pipeline_rank)
            return self._shortened(RepeatMarks(self._droppable(stages, kept=1)), [])

        return stage_messages(self._plan_for, self._world_size, self._fake, self._precision, shortened=shortened)

    def _plan_for(self, launch: Launch) -> JobPlan:
        return self._plan

    def _whole(self, index: int) -> nn.Module:
        """Return a whole stage on `meta`."""
        if index not in self._stages:
            model, num_stages = self._plan.model, self._plan.model.program.num_stages
            place = StageInfo(index, num_stages)
            self._stages[index] = (
                model.built.module
                if num_stages == 1
                else build_model(model.provider, place, seed=model.seed, keep_values=False).module
            )
        return self._stages[index]

    def _droppable(self, indices: Sequence[int], *, kept: int) -> int:
        """Return the number of repeated layer blocks to drop from every stage, so that each keeps at least `kept`.

        The number is 0 if a stage has no layer list, or no more than `kept` repeated blocks.
        """
        found = [next(iter(block_lists(self._whole(index)).values()), None) for index in indices]
        return min(0 if layers is None else max(0, repeats_of(layers).count - kept) for layers in found)

    def _shortened(self, marks: RepeatMarks, repeat: list[nn.Module]) -> JobPlan:
        """Return the job's plan with repeats dropped from its stages; fill `repeat` with the marked layers."""
        plan, model = self._plan, self._plan.model

        def on_layers(layers: Sequence[nn.Module], second: Sequence[nn.Module]) -> None:
            repeat.extend(second)
            for layer in layers:
                _mark_layer(layer, marks, is_repeat=layer in repeat)

        provider = ShortProvider(model.provider, marks.num_dropped, self._whole, on_layers)
        built = model.built
        if model.program.num_stages == 1:
            built = replace(built, module=provider.build(StageInfo()))
        return replace(plan, model=replace(model, provider=provider, built=built))


def _mark_layer(layer: nn.Module, marks: RepeatMarks, *, is_repeat: bool) -> None:
    def on_forward(module: nn.Module, args: Any) -> None:
        marks.set(is_repeat=is_repeat)

    def on_output(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            tensors[0].register_hook(lambda gradient: marks.set(is_repeat=is_repeat))

    layer.register_forward_pre_hook(on_forward, prepend=True)
    layer.register_forward_hook(on_output)
