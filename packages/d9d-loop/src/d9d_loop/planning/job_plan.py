"""Plan of a job on a cluster: memory of each rank class, step time, cost, goodput, and better layouts."""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from d9d_dist import Launch, UserError
from d9d_dist.planned_device import planned_accelerator
from d9d_dist.precision import PrecisionName
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.trainer import Trainer
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.dry_runs import dry_run
from d9d_loop.planning.goodput_model import Goodput, goodput
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.job_traits import layout_of, unmodeled_traits
from d9d_loop.planning.layout_search import (
    Candidate,
    MemoryScale,
    SearchResult,
    SearchSpace,
    mesh_config,
    nearest_layouts,
    search_layouts,
)
from d9d_loop.planning.memory_size import CONTEXT_BYTES, FRAGMENTATION, memory_of
from d9d_loop.planning.model_shape import UnknownDecoderError, shape_of_job
from d9d_loop.planning.plan_layout import PlanLayout
from d9d_loop.planning.rank_run import DryRun, representatives
from d9d_loop.planning.schedule_time import scheduled_step_time
from d9d_loop.planning.step_model import StepTime
from d9d_pipeline import Program, build, verify


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one class of ranks, in bytes. All but `reserve` are exact: the dry run counts the allocations.

    Attributes:
        name: Class of the rank.
        rank: A rank of the class.
        unsharded_gradients: Gradients that sharded data parallelism keeps whole until the last microbatch reduces them,
            beyond `gradients`. `gradients.reduce_each_microbatch = true` avoids them.
        activations: Peak of the memory that forward, backward and optimizer allocate in addition to the rest.
        reserve: Estimate for the device context, communication buffers, and freed blocks that the allocator keeps.
    """

    name: str
    rank: int
    parameters: float
    gradients: float
    optimizer: float
    unsharded_gradients: float
    activations: float
    reserve: float

    @property
    def total(self) -> float:
        """Bytes of the process on the device."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.unsharded_gradients + self.activations + self.reserve


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Modeled step time of a job, with its inputs and limits.

    Attributes:
        shape: Sizes of the decoder.
        step: Predicted step time and its parts.
        sensitivity: Step time in seconds if one part of the hardware were 10 % faster, by part.
        scale: Ratios of the job's exact memory to the closed form.
        not_modeled: Traits of the job that change its step time, but that the time model ignores.
    """

    shape: DecoderShape
    step: StepTime
    sensitivity: dict[str, float]
    scale: MemoryScale
    not_modeled: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Memory, communication and step time of a job on a cluster.

    Attributes:
        hardware: The cluster.
        layout: Layout of the job.
        memory: Memory of each class of ranks.
        timing: Predicted step time; a message if the planner cannot compute it for this model.
        steps: Steps of the job.
        collectives: Bytes of a step on the first rank, by name of the collective and size of its group.
        goodput: Expected share of useful time with failures.
        program: Program of the pipeline schedule, with as many microbatches as the recorded step.
        search: The ten fastest layouts and the Pareto front of time and memory; `None` without a search.
        nearest: If the job does not fit, the layout that fits with the fewest changes; `None` if none was found.
    """

    hardware: Hardware
    layout: PlanLayout
    memory: tuple[RankMemory, ...]
    timing: Timing | str
    steps: int
    collectives: dict[str, int]
    goodput: Goodput
    program: Program
    search: SearchResult | None = None
    nearest: Candidate | None = None

    @property
    def spare_bytes(self) -> float:
        """Device memory that the largest rank leaves free; negative if the job does not fit."""
        return self.hardware.device.memory_bytes - max(each.total for each in self.memory)

    @property
    def fits(self) -> bool:
        """True if every rank fits into device memory."""
        return self.spare_bytes >= 0

    @property
    def timed(self) -> Timing:
        """The predicted step time. Raises `UserError` if the planner cannot compute it, with the reason."""
        if isinstance(self.timing, str):
            raise UserError(self.timing)
        return self.timing

    @property
    def time(self) -> StepTime:
        """Predicted step time and its parts. Raises `UserError` if the planner cannot compute the time."""
        return self.timed.step

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.layout.global_tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over the bf16 peak of all devices, with the measured microbatch's share of labels."""
        flops = self._flops_per_token * self.layout.global_tokens
        return flops / self.time.total / self.layout.world_size / self.hardware.device.peak_flops["bf16"]

    @property
    def _flops_per_token(self) -> float:
        return self.timed.shape.flops_per_token(self.layout.length, logit_share=self.layout.logit_share)

    @property
    def images(self) -> dict[str, float] | None:
        """Image patches of a step, if all microbatches are like the first, and their share of the model FLOPs."""
        tower, length = self.timed.shape.tower, self.layout.length
        if tower is None:
            return None
        patches = tower.num_patches / tower.num_samples * (self.layout.global_tokens / length)
        return {"patches": patches, "share_of_flops": tower.flops / (self._flops_per_token * length)}

    @property
    def days(self) -> float:
        """Duration of all steps in days, with the expected goodput."""
        return self.steps * self.time.total / self.goodput.fraction / 86400

    @property
    def device_hours(self) -> float:
        """Device hours of all steps."""
        return self.days * 24 * self.layout.world_size

    @property
    def interval(self) -> tuple[float, float]:
        """Range of step times, in seconds, in which 90 % of measured steps are expected."""
        error = self.hardware.relative_error(sparse=self.timed.shape.num_experts > 0)
        return self.time.total * (1 - error), self.time.total * (1 + error)

    def to_json(self) -> dict[str, Any]:
        """Return all figures: bytes, seconds and fractions. Without a step time, the reason replaces the seconds."""
        known = {
            "hardware": self.hardware.name,
            "world_size": self.layout.world_size,
            "layout": describe(self.layout),
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "memory": [{name: getattr(each, name) for name in RankMemory.__slots__} for each in self.memory],
            "goodput": {name: getattr(self.goodput, name) for name in Goodput.__slots__},
            "collective_bytes": self.collectives,
            "nearest": None if self.nearest is None else _candidate_json(self.nearest),
            "search": None if self.search is None else _search_json(self.search),
        }
        if isinstance(self.timing, str):
            return {**known, "no_step_time": self.timing}
        return {
            **known,
            "not_modeled": self.timing.not_modeled,
            "seconds": {name: getattr(self.time, name) for name in StepTime.__slots__},
            "interval_seconds": self.interval,
            "limit": self.time.limit,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "images": self.images,
            "days": self.days,
            "device_hours": self.device_hours,
            "sensitivity_seconds": self.timing.sensitivity,
        }


def plan_cluster(
    trainer: Trainer,
    *,
    world_size: int,
    hardware: str | Hardware,
    search: bool = False,
    shape: DecoderShape | None = None,
    length: int | None = None,
) -> ClusterPlan:
    """Plan a job on a cluster. Needs no device: a dry run of one rank of each class runs on the CPU.

    Args:
        trainer: The job.
        world_size: Number of devices.
        hardware: The cluster: a name such as "h100-dgx", the path of a TOML file, or a `Hardware`.
        search: If True, also rank other layouts. Other layouts are always ranked if neither the job nor a similar
            layout fits.
        shape: Sizes of the decoder; read from the model by default.
        length: Tokens of a sample; read from the data by default.

    Raises:
        UserError: If the job's own checks fail for this number of devices, or `search` is set and the planner
            cannot compute the step time of this model.
    """
    launch = Launch(world_size=world_size, device="cpu")
    plan = trainer.plan_for(launch)
    hardware = Hardware.load(hardware) if isinstance(hardware, str) else hardware
    refusal = ""
    if shape is None or length is None:
        try:
            shape, length = shape_of_job(plan)
        except UnknownDecoderError as error:
            if search:
                raise
            shape, length, refusal = None, 0, str(error)
    fewer, shown = shown_microbatches(plan)
    first, *others = representatives(plan, world_size)
    ranks = [first, *([others[0], others[-1]] if len(others) > 1 else others)]
    chosen = plan.config.precision
    precision: PrecisionName = chosen if chosen in ("parameters", "autocast") else "bfloat16"
    with planned_accelerator():
        runs = dry_run(
            plan,
            ranks=ranks,
            world_size=world_size,
            precision=precision,
            num_microbatches=(fewer, shown),
            kept=4,
        )
    layout = layout_of(plan, runs, shape, length=length)
    names = ("first stage", "last stage") if len(runs) == 2 else ("first stage", "second stage", "last stage")
    memory = tuple(_rank_memory(each, name, layout, shape) for each, name in zip(runs, names, strict=False))
    made = ClusterPlan(
        hardware=hardware,
        layout=layout,
        memory=memory,
        timing=refusal if shape is None else _timing(plan, runs, layout, shape, memory=memory, hardware=hardware),
        steps=plan.steps,
        collectives={
            f"{name} over {size}": total
            for (name, size), total in runs[0].collective_bytes(plan.num_microbatches).items()
        },
        goodput=goodput(world_size, failures_per_device_day=hardware.failures_per_device_day),
        program=build(plan.model.schedule, num_ranks=layout.pp, num_microbatches=shown),
    )
    if shape is None or (made.fits and not search):
        return made
    checks = _Checks(trainer, launch)
    space = SearchSpace.of(layout, plan.config.batch.global_size, plan.model.schedule)
    return _with_other_layouts(made, checks, space, search=search)


def _timing(
    plan: JobPlan,
    runs: Sequence[DryRun],
    layout: PlanLayout,
    shape: DecoderShape,
    *,
    memory: Sequence[RankMemory],
    hardware: Hardware,
) -> Timing:
    """Return the step time of a job, and the scale of the closed form of its memory, from its dry runs."""
    largest = max(memory, key=lambda each: each.total)
    timed = partial(scheduled_step_time, shape, layout, schedule=plan.model.schedule, program=plan.model.program)
    return Timing(
        shape=shape,
        step=timed(hardware),
        sensitivity=sensitivity(timed, hardware),
        scale=MemoryScale.of(
            shape,
            layout,
            state_bytes=largest.parameters + largest.optimizer,
            rest_bytes=largest.gradients + largest.unsharded_gradients + largest.activations,
        ),
        not_modeled=unmodeled_traits(plan, runs[0], layout, shape),
    )


def _with_other_layouts(plan: ClusterPlan, checks: "_Checks", space: SearchSpace, *, search: bool) -> ClusterPlan:
    """Return the plan with other layouts: the nearest one that fits if the job does not fit, and a search result.

    The search runs if `search` is set, or if the job does not fit and there is no nearest layout.
    """
    timed, hardware, nearest = plan.timed, plan.hardware, None
    if not plan.fits:
        others = nearest_layouts(timed.shape, hardware, space, scale=timed.scale)
        nearest = next(iter(checks.accepted(others, 1)), None)
    if nearest is not None and not search:
        return replace(plan, nearest=nearest)
    found = search_layouts(timed.shape, hardware, space, scale=timed.scale, keep=None)
    fastest, front = (checks.accepted(each, 10) for each in (found.fitting, found.pareto()))
    fitting = tuple(sorted({*fastest, *front}, key=lambda each: each.seconds))
    return replace(plan, search=replace(found, fitting=fitting), nearest=nearest)


def shown_microbatches(plan: JobPlan) -> tuple[int, int]:
    """Return two numbers of microbatches for the recorded steps; the second step needs as much memory as a whole step.

    Both steps have as many in-flight activations on each pipeline rank as the whole step, so collectives are linear in
    the number of microbatches from the first number on. The second step also holds gradients of an earlier microbatch.
    Without two such numbers, both are the number of microbatches of the whole step.
    """
    num_ranks, schedule = len(plan.model.program.ranks), plan.model.schedule
    most, found = verify(plan.model.program).peak_activations, 0
    for count in range(1, plan.num_microbatches):
        try:
            program = build(schedule, num_ranks=num_ranks, num_microbatches=count)
        except UserError:
            continue
        if program.splits != plan.model.program.splits:
            continue
        if found:
            return found, count
        found = count if verify(program).peak_activations == most else 0
    return plan.num_microbatches, plan.num_microbatches


def sensitivity(timed: Callable[[Hardware], StepTime], hardware: Hardware) -> dict[str, float]:
    """Return the step time in seconds with each part of the hardware 10 % faster, by part."""
    peak_flops = {name: 1.1 * rate for name, rate in hardware.device.peak_flops.items()}
    faster: dict[str, tuple[str, dict[str, Any]]] = {
        "matrix products": ("device", {"peak_flops": peak_flops}),
        "memory bandwidth": ("device", {"memory_bandwidth": 1.1 * hardware.device.memory_bandwidth}),
        "links in a node": ("links", {"bandwidth": 1.1 * hardware.links.bandwidth}),
        "network": ("network", {"bandwidth": 1.1 * hardware.network.bandwidth}),
    }
    return {
        name: timed(hardware.model_copy(update={part: getattr(hardware, part).model_copy(update=update)})).total
        for name, (part, update) in faster.items()
    }


def describe(layout: PlanLayout) -> str:
    """Return a layout in one line, such as "dp=2x32 (replicate x shard) tp=8, 16 microbatches of 1, recompute full".

    `dp` has the degrees `data_parallel_replicate` and `data_parallel_shard`.
    """
    degrees = [f"{name}={getattr(layout, name)}" for name in ("cp", "tp", "pp", "ep") if getattr(layout, name) > 1]
    if layout.dp > 1:
        replicate = min(layout.replicas, layout.dp)
        degrees.insert(0, f"dp={replicate}x{layout.dp // replicate} (replicate x shard)")
    parts = [" ".join(degrees) or "one device"]
    if layout.stages_per_rank > 1:
        parts.append(f"{layout.stages_per_rank} stages a rank")
    plural = "" if layout.num_microbatches == 1 else "es"
    parts.append(f"{layout.num_microbatches} microbatch{plural} of {layout.microbatch_size}")
    every = "" if layout.recompute_every == 1 else f" in every {layout.recompute_every} layers"
    parts.append(f"recompute {layout.recompute}{every}")
    if layout.reduces_each_microbatch:
        parts.append("reduce each microbatch")
    if layout.offload:
        parts.append("offload activations")
    return ", ".join(parts)


def _rank_memory(run: DryRun, name: str, layout: PlanLayout, shape: DecoderShape | None) -> RankMemory:
    """Return the memory of a rank; without the sizes of the decoder, its reserve has no cached blocks."""
    unsharded = min(run.whole_gradient_bytes, run.activation_bytes)  # the dry run measures both together
    model, cached = run.state_bytes + run.activation_bytes, 0.0
    if shape is not None:
        cached = memory_of(shape, layout, run.rank * layout.pp // layout.world_size).cached
    return RankMemory(
        name=name,
        rank=run.rank,
        parameters=run.parameter_bytes,
        gradients=run.gradient_bytes,
        optimizer=run.optimizer_bytes,
        unsharded_gradients=unsharded,
        activations=run.activation_bytes - unsharded,
        reserve=CONTEXT_BYTES + FRAGMENTATION * model + (1 + FRAGMENTATION) * cached,
    )


class _Checks:
    """The job's own checks of layouts; each mesh and microbatch size is checked once."""

    def __init__(self, trainer: Trainer, launch: Launch) -> None:
        self._trainer, self._launch = trainer, launch
        self._known: dict[tuple[Any, ...], bool] = {}

    def accepted(self, candidates: Iterable[Candidate], wanted: int) -> tuple[Candidate, ...]:
        """Return the first layouts that the job accepts."""
        found: list[Candidate] = []
        limit = len(self._known) + 8 * wanted
        for each in candidates:
            if self._is_accepted(each.layout):
                found.append(each)
            if len(found) == wanted or len(self._known) > limit:
                break
        return tuple(found)

    def _is_accepted(self, layout: PlanLayout) -> bool:
        mesh, size = mesh_config(layout), layout.microbatch_size
        key = (*mesh.model_dump().values(), size)
        if key not in self._known:
            try:
                self._trainer.plan_for(self._launch, mesh=mesh, microbatch_size=size)
                self._known[key] = True
            except UserError:
                self._known[key] = False
            gc.collect()  # models of `plan_for` may be in cycles, and automatic collection is paused
        return self._known[key]


def _search_json(found: SearchResult) -> dict[str, Any]:
    return {"num_legal": found.num_legal, "fitting": [_candidate_json(each) for each in found.fitting]}


def _candidate_json(each: Candidate) -> dict[str, Any]:
    return {
        "layout": describe(each.layout),
        "mesh": mesh_config(each.layout).model_dump(),
        "microbatch_size": each.layout.microbatch_size,
        "recompute": each.layout.recompute,
        "recompute_every": each.layout.recompute_every,
        "reduce_each_microbatch": each.layout.reduces_each_microbatch,
        "offload": each.layout.offload,
        "seconds": each.seconds,
        "memory_bytes": each.memory.total,
        "limit": each.time.limit,
    }
