"""Dry runs of a job: steps of some ranks on fake tensors, one rank after another; see `rank_run.py`.

Of large jobs, a copy of the model with four of the repeated layer blocks runs, and its cost is extrapolated:

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

from d9d_dist import StageInfo
from d9d_dist.precision import PrecisionName
from d9d_loop.job.plan import JobPlan
from d9d_loop.model.block_lists import block_lists
from d9d_loop.model.built_model import build_model
from d9d_loop.planning.dry_run_mode import DryRunMode
from d9d_loop.planning.layer_repeats import ShortProvider, repeats_of
from d9d_loop.planning.rank_run import DryRun, fake_batch, placed, run_rank, stage_messages, without_fake_warnings
from d9d_loop.planning.step_record import RepeatMarks


def dry_run(
    plan: JobPlan,
    *,
    ranks: Sequence[int],
    world_size: int,
    precision: PrecisionName | None = None,
    num_microbatches: tuple[int, int] | None = None,
    kept: int | None = None,
) -> tuple[DryRun, ...]:
    """Run a step of a planned job on fake tensors for some ranks; return a record of each, which counts all layers.

    The recorded step is the second: the first creates optimizer state and lazily created buffers. No device, network or
    checkpoint is used; the first samples of the training data are read, for their shapes.

    Args:
        plan: The plan of any rank, such as of `Trainer.plan_for`.
        ranks: Global ranks to run; `representatives` returns one rank of each class.
        world_size: Number of ranks of the job.
        precision: Precision of the job on the planned device; by default, the configured precision, resolved for a CPU.
        num_microbatches: Microbatches of the two steps, which the schedule must support; by default as few as it
            supports, and all.
        kept: Number of the repeated layer blocks that run, at least 4; by default all.

    Raises:
        UserError: If this process already has a process group.
    """
    num_first, num_last = num_microbatches or (None, plan.num_microbatches)
    plan = replace(plan, num_microbatches=num_last)
    fake, copies, runs = DryRunMode(), _Copies(plan), list[DryRun]()
    short = None if kept is None else lambda pipeline_rank: copies.without_repeats(pipeline_rank, kept=1)[0]
    with without_fake_warnings():
        messages = stage_messages(plan, world_size, fake, precision, shortened=short)
        for rank in ranks:
            with placed(plan, rank, world_size, precision) as ctx:
                copied, marks, repeat = copies.without_repeats(ctx.coordinate("regular", "pp"), kept=kept)
                run = run_rank(
                    copied,
                    ctx,
                    messages=messages,
                    fake=fake,
                    batch=fake_batch(plan, ctx, fake),
                    num_first=None if num_first == num_last else num_first,
                    marks=marks,
                    repeat=repeat,
                )
            runs.append(run)
    return tuple(runs)


@final
class _Copies:
    """Copies of a planned job, whose stages lack some of their repeated layer blocks."""

    def __init__(self, plan: JobPlan) -> None:
        self._plan = plan
        self._stages: dict[int, nn.Module] = {}

    def without_repeats(self, pipeline_rank: int, *, kept: int | None) -> tuple[JobPlan, RepeatMarks, list[nn.Module]]:
        """Drop as many blocks from every stage of a rank as leave `kept` in each; none by default, or without a list.

        Returns:
            The plan, its marks, and the layers of the marked block, which are known when the stages are parallelized.
        """
        plan, model = self._plan, self._plan.model
        stages = map(self._whole, model.program.stages_of(pipeline_rank))
        lists = [next(iter(block_lists(stage).values()), None) for stage in stages]
        counts = [0 if layers is None or kept is None else max(0, repeats_of(layers).count - kept) for layers in lists]
        marks, repeat = RepeatMarks(min(counts)), list[nn.Module]()

        def on_layers(layers: Sequence[nn.Module], third: Sequence[nn.Module]) -> None:
            repeat.extend(third)
            for layer in layers:
                _mark_layer(layer, marks, is_repeat=layer in repeat)

        provider = ShortProvider(model.provider, marks.num_dropped, self._whole, on_layers)
        built = model.built
        if model.program.num_stages == 1:
            built = replace(built, module=provider.build(StageInfo()))
        return replace(plan, model=replace(model, provider=provider, built=built)), marks, repeat

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


def _mark_layer(layer: nn.Module, marks: RepeatMarks, *, is_repeat: bool) -> None:
    def on_forward(module: nn.Module, args: Any) -> None:
        marks.set(is_repeat=is_repeat)

    def on_output(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            tensors[0].register_hook(lambda gradient: marks.set(is_repeat=is_repeat))

    layer.register_forward_pre_hook(on_forward, prepend=True)
    layer.register_forward_hook(on_output)
