"""Run of one rank of a job without values, device memory, network or other ranks: its code runs two steps.

The process group is torch's fake one and tensors are fake, so a rank of any layout fits on a laptop. Provider,
`parallelize`, pipeline program, task, gradient reduction, clipping and optimizer are those of the job. When the host
reads a value, it gets a substitute: flags are not set, and expert routing is balanced. Collectives, FLOPs and bytes are
exact for every job whose operators do not depend on values, but without the forward pass of a reference.
"""

import warnings
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from d9d_dist import ContextSplit, DistributedContext, Launch, UserError, local_tensor
from d9d_dist.groups.process_groups import destroy_process_groups
from d9d_dist.precision import PrecisionName
from d9d_dist.values.late_init import allocate
from d9d_loop.engine.engine import Engine
from d9d_loop.engine.model_build import parallelize_stages
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.engine.start import Training
from d9d_loop.engine.train_step import TrainStep
from d9d_loop.job.job import build_engine
from d9d_loop.job.plan import JobPlan
from d9d_loop.model.first_steps import FirstSteps
from d9d_loop.optimizers.weight_average import average_of
from d9d_loop.planning.dry_run_mode import DryRunMode, values_of
from d9d_loop.planning.step_record import RepeatMarks, StepRecord, answered, recorded
from d9d_loop.resilience import StepGuard
from d9d_loop.task import BatchPlacement, Loss, to_inputs, with_reference
from d9d_pipeline.channel import Messages, stage_output


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Memory and operations of one rank in a step. All sizes are in bytes.

    Attributes:
        rank: Global rank.
        stages: Global indices of the rank's pipeline stages.
        parameter_bytes: Local parameters and buffers.
        num_parameters: Local parameters.
        num_trainable: Local parameters that require gradients.
        dtype: Dtype of most of the local parameters.
        is_compiled: True if a module of the model is compiled, such as each layer.
        gradient_bytes: Local gradients at the end of the backward pass.
        whole_gradient_bytes: Gradients of whole layers that sharded data parallelism keeps until the last microbatch,
            beyond `gradient_bytes`.
        optimizer_bytes: Local optimizer state, and the average of the weights.
        num_microbatches: Microbatches of the recorded step.
        forward_backward: Record of the forward and backward passes of all microbatches.
        update: Record of gradient reduction outside of the backward pass, of clipping, and of the optimizer.
        num_first: Microbatches of the first step.
        first: Record of the forward and backward passes of the first step.
    """

    rank: int
    stages: tuple[int, ...]
    parameter_bytes: int
    num_parameters: int
    num_trainable: int
    dtype: torch.dtype
    is_compiled: bool
    gradient_bytes: int
    whole_gradient_bytes: int
    optimizer_bytes: int
    num_microbatches: int
    forward_backward: StepRecord
    update: StepRecord
    num_first: int
    first: StepRecord

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def activation_bytes(self) -> int:
        """Peak of the bytes that a step allocates beyond parameters, local gradients and optimizer state."""
        return max(0, self.forward_backward.peak_bytes - self.gradient_bytes, self.update.peak_bytes)

    def collective_bytes(self, num_microbatches: int) -> dict[tuple[str, int], int]:
        """Return the bytes of a step's collectives by name and group size; linear in the number of microbatches.

        Some collectives run for each microbatch, others once per step. The two recorded steps distinguish these kinds.
        """
        step, first, once = (each.collective_bytes() for each in (self.forward_backward, self.first, self.update))
        more = num_microbatches - self.num_microbatches
        each = max(1, self.num_microbatches - self.num_first)
        return {key: step[key] + more * (step[key] - first[key]) // each + once[key] for key in step | once}

    def attention_calls(self, skipped: Container[Any] = ()) -> tuple[int, int]:
        """Return the numbers of calls of attention's forward kernel that are recomputed, and of its backward kernel.

        Those of tensors with the shapes `skipped` are not counted.
        """
        operations = (each for each in self.forward_backward.operations if each.shapes not in skipped)
        calls = [each for each in operations if "scaled_dot_product" in each.name]
        backward = sum("backward" in each.name for each in calls)
        return sum(each.is_recomputed and "backward" not in each.name for each in calls), backward


@contextmanager
def without_fake_warnings() -> Generator[None]:
    """Hide warnings that only concern fake tensors in the body."""
    with warnings.catch_warnings():
        # Reading addresses of fake tensors is harmless if code only compares them. FSDP2 warns again in the real run.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield


def run_rank(
    plan: JobPlan,
    ctx: DistributedContext,
    *,
    messages: Messages | None,
    fake: DryRunMode,
    batch: Any,
    num_first: int | None = None,
    marks: RepeatMarks | None = None,
    repeat: Sequence[nn.Module] = (),
) -> DryRun:
    """Run two steps of a planned job as the rank of `ctx`, and record them. The first one creates optimizer state.

    The first step has `num_first` microbatches, by default as few as the schedule supports. If the schedule needs all
    microbatches, only one step runs, after an optimizer step without forward, which creates the state. `batch` is a
    microbatch of fake tensors. `marks` mark the parts of a step that belong to the layers in `repeat`; these parts are
    counted several times.
    """
    marks = marks or RepeatMarks(0)
    stages = stages_on_fake(plan, ctx, fake)
    pipeline = Pipeline(
        stages, ctx=ctx, schedule=plan.model.schedule, shared_names=plan.model.shared_names, messages=messages
    )
    pipeline.set_gradients(plan.config.gradients)
    with fake:
        optimizer = plan.optimizer(pipeline.model)
        average = average_of(pipeline.model, optimizer, plan.config.average)
    guard = StepGuard(optimizer, config=plan.config.resilience.bad_steps, ctx=ctx)
    training = Training(pipeline=pipeline, optimizer=optimizer, average=average, guard=guard)
    engine = build_engine(plan, training, ctx=ctx)
    batches = [batch] * plan.num_microbatches
    num_first = num_first or _fewest_microbatches(pipeline, plan.num_microbatches)
    repeated = [parameter for layer in repeat for parameter in layer.parameters()]

    def loss(outputs: Any, batch: Any) -> Loss:
        if plan.reference is not None:  # the model itself, without a forward of its own
            batch = with_reference(plan.task, outputs, batch)
        return plan.task.loss(outputs, batch)

    def counted(size: Callable[[nn.Module], int]) -> int:
        return size(pipeline.model) + marks.num_dropped * sum(map(size, repeat))

    with fake:
        first = _first_step(engine, optimizer, batches, num_first=num_first, loss=loss, marks=marks)
        with recorded(marks) as forward_backward:
            engine.accumulate(batches, loss)
        gradients = counted(gradient_bytes)
        is_kept = plan.num_microbatches > 1 and not plan.config.gradients.reduce_each_microbatch
        whole = counted(_whole_gradient_bytes) if is_kept else 0
        states = pytree.tree_leaves([optimizer.state.get(parameter) for parameter in repeated])
        marks.add_state(leaf for leaf in (*repeated, *states) if isinstance(leaf, Tensor))
        marks.add_state(parameter.grad for parameter in repeated if parameter.grad is not None)
        with recorded(marks) as update:
            engine.step()
    return DryRun(
        rank=ctx.rank,
        stages=tuple(stages),
        parameter_bytes=counted(parameter_bytes),
        num_parameters=counted(lambda model: _num_elements(model.parameters())),
        num_trainable=counted(lambda model: _num_elements(each for each in model.parameters() if each.requires_grad)),
        dtype=_main_dtype(pipeline.model),
        is_compiled=any(module._compiled_call_impl is not None for module in pipeline.model.modules()),
        gradient_bytes=gradients,
        whole_gradient_bytes=whole,
        optimizer_bytes=optimizer_bytes(optimizer)
        + marks.num_dropped * optimizer_bytes(optimizer, repeated)
        + (0 if average is None else counted(_average_bytes)),
        num_microbatches=plan.num_microbatches,
        forward_backward=forward_backward,
        update=update,
        num_first=num_first,
        first=first or forward_backward,
    )


def _first_step(
    engine: Engine, optimizer: Optimizer, batches: Sequence[Any], *, num_first: int, loss: Any, marks: RepeatMarks
) -> StepRecord | None:
    """Run the first step, and record its forward and backward passes; `None` if only the optimizer's state is made."""
    if num_first >= len(batches):
        with answered():
            _create_state(optimizer)
        optimizer.register_step_pre_hook(_drop_unused_state)
        return None
    with recorded(marks) as record:
        engine.accumulate(batches[:num_first], loss)
    with answered():
        engine.step()
    return record


def _create_state(optimizer: Optimizer) -> None:
    """Run one optimizer step with gradients of all trainable parameters, and drop these gradients."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def _drop_unused_state(optimizer: Optimizer, *_: Any) -> None:
    """Drop the state of parameters without gradients before a step: a real job's optimizer creates none for them."""
    for parameter in [each for each in optimizer.state if each.grad is None]:
        del optimizer.state[parameter]


def _fewest_microbatches(pipeline: Pipeline, most: int) -> int:
    """Return the smallest number of microbatches that the pipeline's schedule supports, at most `most`."""
    supports = partial(pipeline.supports, splits=pipeline.program(most).splits)
    return next(filter(supports, range(1, most)), most)


def representatives(plan: JobPlan, world_size: int) -> tuple[int, ...]:
    """Return the first global rank of each pipeline rank. Steps differ only between pipeline ranks.

    All ranks of a pipeline rank run the same operators on different samples, sequence parts, shards or experts. If
    shards are uneven, the first rank has the largest one.
    """
    num_ranks = len(plan.model.program.ranks)
    return tuple(range(0, world_size, world_size // num_ranks))


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's parameters and buffers."""
    return sum(_local_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _num_elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(local_tensor(each).numel() for each in parameters)


def _main_dtype(model: nn.Module) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for each in model.parameters():
        sizes[each.dtype] = sizes.get(each.dtype, 0) + each.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's gradients."""
    return sum(_local_bytes(each.grad) for each in model.parameters() if each.grad is not None)


def _whole_gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the gradients of sharded parameters before their reduction, beyond those of the shards."""
    total = 0
    for module in model.modules():
        groups = module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ()
        for parameter in (each for group in groups for each in group.fsdp_params):
            gradient = parameter.sharded_param.grad
            if gradient is not None:
                local = local_tensor(gradient)
                total += (parameter._orig_size.numel() - local.numel()) * local.element_size()
    return total


def optimizer_bytes(optimizer: Optimizer, parameters: Iterable[Tensor] | None = None) -> int:
    """Return the bytes of this rank's optimizer state, for the given parameters or for all."""
    states = optimizer.state.values() if parameters is None else map(optimizer.state.get, parameters)
    return sum(_local_bytes(leaf) for leaf in pytree.tree_leaves(list(states)) if isinstance(leaf, Tensor))


def _average_bytes(model: nn.Module) -> int:
    trainable = (local_tensor(each) for each in model.parameters() if each.requires_grad)
    return sum(each.numel() * max(each.itemsize, 4) for each in trainable)


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Generator[None]:
    """Simulate one rank of a job in the body, without the other ranks: collectives return immediately.

    Raises `UserError` if this process already has a process group.
    """
    if dist.is_initialized():
        raise UserError(
            "got a process that already has a process group; expected none, since a dry run starts a fake one. Plan "
            "the job before it starts, or in another process."
        )
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        destroy_process_groups()


@contextmanager
def placed(plan: JobPlan, rank: int, world_size: int, precision: PrecisionName | None) -> Generator[DistributedContext]:
    """Yield the context of one rank of a planned job, without the other ranks."""
    launch = Launch(rank=rank, world_size=world_size, device="cpu")
    with (
        mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks),
        mock.patch.object(ContextSplit, "join", _join),
        # There are no peers whose attributes could differ, and collectives of the first step are not those of a step.
        mock.patch.object(FirstSteps, "check"),
        mock.patch.object(TrainStep, "_name_unused"),
        fake_ranks(rank, world_size),
        plan.model.mesh.build(launch=launch, precision=precision or plan.config.precision) as ctx,
    ):
        yield ctx


_JOIN = ContextSplit.join


def _join(split: ContextSplit, tree: Any, **options: Any) -> Any:
    """Join parts of rows; those with values, which no other rank sends, become the whole rows of the batch."""

    def joined(part: Tensor) -> Tensor:
        rows, values = _JOIN(split, part, **options), values_of(part)
        mode = getattr(part, "fake_mode", None)
        if values is None or not isinstance(mode, DryRunMode) or (found := mode.wholes.get(values.data_ptr())) is None:
            return rows
        if found[1].numel() != rows.numel():  # a view of a part
            return rows
        return mode.with_values(found[1]).reshape(rows.shape)  # of pairs, whose parts became rows

    return pytree.tree_map_only(Tensor, joined, tree)


@final
class _Chunks:
    """Chunks of a tensor as FSDP2 splits it; creates only those that it indexes, since there may be 100,000 ranks."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim, self._rows = tensor, dim, -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, rank: int) -> Tensor:
        rows = self._tensor.shape[self._dim]
        first = min(rank * self._rows, rows)
        num_rows = min(self._rows, rows - first)
        return self._tensor.narrow(self._dim, first, num_rows) if num_rows else self._tensor.new_empty(0)


def stages_on_fake(plan: JobPlan, ctx: DistributedContext, fake: DryRunMode) -> dict[int, nn.Module]:
    """Return a rank's parallelized stages with fake parameters."""
    stages = parallelize_stages(plan.model, ctx)
    with fake:
        for stage in stages.values():
            allocate(stage, device=ctx.device)
    return stages


def fake_batch(plan: JobPlan, ctx: DistributedContext, fake: DryRunMode) -> Any:
    """Return the first microbatch of the job with fake tensors."""
    split, fake.wholes = ContextSplit.split, {}

    def split_and_keep(self: ContextSplit, tree: Any, **options: Any) -> Any:
        part = split(self, tree, **options)
        if isinstance(part, Tensor):
            fake.wholes[part.data_ptr()] = part, tree
        return part

    with mock.patch.object(ContextSplit, "split", split_and_keep):
        batch = BatchPlacement(plan.task, ctx)(plan.first_batch())
    return on_fake(plan, batch, fake)


def on_fake(plan: JobPlan, batch: Any, fake: DryRunMode) -> Any:
    """Return a batch with fake tensors, which keep their values if it has images: models read their sizes."""
    has_images = "pixel_values" in to_inputs(plan.task.inputs(batch)).shared
    return pytree.tree_map_only(Tensor, fake.with_values if has_images else fake.from_tensor, batch)


def stage_messages(
    plan: JobPlan,
    world_size: int,
    fake: DryRunMode,
    precision: PrecisionName | None,
    *,
    shortened: Callable[[int], JobPlan] | None = None,
) -> Messages | None:
    """Return the metadata of each stage's output, by running its forward; `None` without a pipeline.

    `shortened` returns a plan with fewer layers on the stages of a pipeline rank. With it, if a stage sends a message
    of the same shapes and dtypes as it receives, later stages are assumed to do the same.
    """
    program = plan.model.program
    if len(program.ranks) == 1:
        return None
    outputs: dict[int, Any] = {}
    payload: Any = None
    for index, pipeline_rank in enumerate(program.stage_ranks[:-1]):
        if shortened is not None and index > 1 and outputs[index - 1] == outputs[index - 2]:
            outputs[index] = outputs[index - 1]
            continue
        rank = pipeline_rank * (world_size // len(program.ranks))
        with placed(plan, rank, world_size, precision) as ctx:
            inputs = to_inputs(plan.task.inputs(fake_batch(plan, ctx, fake)))
            stages = stages_on_fake(plan if shortened is None else shortened(pipeline_rank), ctx, fake)
            with fake, answered():
                output = stages[index](*(inputs.first if index == 0 else (payload,)), **inputs.shared)
            outputs[index] = stage_output(output)
            payload = pytree.tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), output)
    return Messages(outputs)


def _local_bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
