"""Dry runs of large jobs: two copies of the model with few layers run, and the costs of all layers follow.

    C(0) = C(k) + k (C(k - 1) - C(k))

C(d): cost of a step without d of the repeats of equal layers (`layer_repeats.py`). It is linear in d: each repeat has
the same operators, collectives, parameters and saved activations. Of a step's memory, the peak of each part between two
layers is linear, and the step's peak is the largest of them. The parts of middle layers lie between those of the first
and the last repeat.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self, final

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from d9d_dist import DistributedContext, PrecisionName, StageInfo
from d9d_loop.job.plan import JobPlan
from d9d_loop.model.built_model import build_model
from d9d_loop.planning.dry_run import DryRun, fake_batch, placed, run_rank, stages_on_fake
from d9d_loop.planning.layer_repeats import ShortProvider, layer_list, repeats_of
from d9d_loop.planning.step_record import Marks, answered
from d9d_loop.task import to_inputs
from d9d_pipeline import Messages, stage_output

_FEWEST = 2
"""Fewest repeats that run: the first and the last."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """What one rank allocates and does in a step: the totals of a `DryRun`. Sizes are in bytes.

    Attributes:
        rank: Global rank.
        peaks: Largest sums of live bytes in the parts of forward and backward.
        update_peak: Largest sum of live bytes of gradient reduction, clipping and optimizer.
        collectives: Bytes of forward and backward by name of the collective and group size.
        attention_calls: Calls of attention's forward and backward kernels.
    """

    rank: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peaks: tuple[int, ...]
    update_peak: int
    flops: int
    bytes_moved: int
    collectives: Counter[tuple[str, int]]
    attention_calls: tuple[int, int]

    @classmethod
    def of(cls, run: DryRun) -> Self:
        """Return the totals of a dry run."""
        record = run.forward_backward
        attention = [each.name for each in record.operations if "scaled_dot_product" in each.name]
        backward = sum("backward" in name for name in attention)
        return cls(
            rank=run.rank,
            parameter_bytes=run.parameter_bytes,
            gradient_bytes=run.gradient_bytes,
            optimizer_bytes=run.optimizer_bytes,
            peaks=tuple(record.peaks),
            update_peak=run.update.peak_bytes,
            flops=record.flops,
            bytes_moved=record.bytes_moved,
            collectives=record.collective_bytes(),
            attention_calls=(len(attention) - backward, backward),
        )

    def extended(self, deeper: "RankCost", dropped: int) -> "RankCost":
        """Return the cost with `dropped` more repeats; `deeper` has one repeat more than this one."""

        def extend(a: Any, b: Any) -> Any:
            if isinstance(a, Counter):
                return Counter({key: extend(a[key], b[key]) for key in a.keys() | b.keys()})
            if isinstance(a, tuple):
                return tuple(map(extend, a, b))
            return a + dropped * (b - a)

        names = [name for name in self.__slots__ if name != "rank"]
        return replace(self, **{name: extend(getattr(self, name), getattr(deeper, name)) for name in names})

    @property
    def activation_bytes(self) -> int:
        """Peak of the bytes that a step allocates beyond parameters, gradients and optimizer state."""
        return max(0, max(self.peaks) - self.gradient_bytes, self.update_peak - self.optimizer_bytes)


def rank_costs(
    plan: JobPlan, *, ranks: Sequence[int], world_size: int, num_microbatches: int, precision: PrecisionName
) -> tuple[RankCost, ...]:
    """Return the costs of a step of `num_microbatches` on some ranks of a planned job.

    Args:
        plan: The plan of any rank.
        ranks: Global ranks, one of each class.
        world_size: Number of ranks of the job.
        num_microbatches: Microbatches of the recorded step on a data-parallel rank; the schedule must support them.
        precision: Precision of the job on the planned device.

    Raises:
        UserError: If this process already has a process group.
    """
    plan = replace(plan, num_microbatches=num_microbatches)
    runs = _ShortRuns(plan, world_size, precision)
    with warnings.catch_warnings():
        # Code that only compares addresses may read those of fake tensors; FSDP2's warning is for the user's real run.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        messages = runs.messages()
        return tuple(runs.cost(rank, messages) for rank in ranks)


@final
class _ShortRuns:
    """Runs of a planned job's ranks with fewer layers."""

    def __init__(self, plan: JobPlan, world_size: int, precision: PrecisionName) -> None:
        self._plan, self._world_size, self._precision = plan, world_size, precision
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._stages: dict[int, nn.Module] = {}

    def cost(self, rank: int, messages: Messages | None) -> RankCost:
        """Return the cost of a rank's step with all layers."""
        with self._placed(rank) as (plan, ctx):
            drop = self._droppable(plan.model.program.stages_of(ctx.coordinate("regular", "pp")))

            def run(dropped: int) -> RankCost:
                marks = Marks()
                short = self._shortened(dropped, marks)
                return RankCost.of(run_rank(short, ctx, messages=messages, fake=self._fake, marks=marks))

            if drop < _FEWEST:
                return run(0)
            fewer, more = run(drop), run(drop - 1)
            # Layers whose passes overlap in another order, such as deferred weight gradients, have other parts.
            return fewer.extended(more, drop) if len(fewer.peaks) == len(more.peaks) else run(0)

    def messages(self) -> Messages | None:
        """Return the metadata of the messages between stages; `None` without a pipeline.

        Stages run with as few layers as possible. If a stage returns the kind of message that it receives, later stages
        are assumed to do so.
        """
        program = self._plan.model.program
        if len(program.ranks) == 1:
            return None
        outputs: dict[int, Any] = {}
        payload: Any = None
        for index, pipeline_rank in enumerate(program.stage_ranks[:-1]):
            if index > 1 and outputs[index - 1] == outputs[index - 2]:
                outputs[index] = outputs[index - 1]
                continue
            with self._placed(pipeline_rank * (self._world_size // len(program.ranks))) as (plan, ctx):
                short = self._shortened(self._droppable(program.stages_of(pipeline_rank)), Marks())
                inputs = to_inputs(plan.task.inputs(fake_batch(plan, ctx, self._fake)))
                stage = stages_on_fake(short, ctx, self._fake)[index]
                with self._fake, answered():
                    output = stage(*(inputs.first if index == 0 else (payload,)), **inputs.shared)
                outputs[index] = stage_output(output)
                payload = pytree.tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), output)
        return Messages(outputs)

    def _placed(self, rank: int) -> AbstractContextManager[tuple[JobPlan, DistributedContext]]:
        return placed(lambda _: self._plan, rank, self._world_size, self._precision)

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

    def _droppable(self, indices: Sequence[int]) -> int:
        """Return the number of repeats that all of these stages can lack."""
        found = [layer_list(self._whole(index)) for index in indices]
        return min(0 if each is None else max(0, repeats_of(each[1]).count - _FEWEST) for each in found)

    def _shortened(self, drop: int, marks: Marks) -> JobPlan:
        """Return the plan of the job whose stages lack some repeats; `marks` are set where layers start."""
        plan, model = self._plan, self._plan.model

        def on_layers(layers: Sequence[nn.Module], middle: Sequence[nn.Module]) -> None:
            for layer in layers:
                _mark_layer(layer, marks, is_kept=not any(layer is each for each in middle))

        provider = ShortProvider(model.provider, drop, self._whole, on_layers)
        built = model.built
        if model.program.num_stages == 1:
            built = replace(built, module=provider.build(StageInfo()))
        return replace(plan, model=replace(model, provider=provider, built=built))


def _mark_layer(layer: nn.Module, marks: Marks, *, is_kept: bool) -> None:
    def on_forward(module: nn.Module, args: Any) -> None:
        marks.set(is_kept=is_kept)

    def on_output(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            tensors[0].register_hook(lambda gradient: marks.set(is_kept=is_kept))

    layer.register_forward_pre_hook(on_forward, prepend=True)
    layer.register_forward_hook(on_output)
