"""Plan of a job on a cluster: memory of each rank class, step time, cost, goodput, and better layouts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

from d9d_dist import Launch, MeshConfig, UserError
from d9d_loop.job.plan import JobPlan
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.dry_run import DryRun, dry_run, representatives
from d9d_loop.planning.goodput import Goodput, goodput
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.layout_search import Candidate, SearchResult, mesh_config, search_layouts
from d9d_loop.planning.memory_size import CONTEXT_BYTES, FRAGMENTATION
from d9d_loop.planning.model_shape import shape_of_job
from d9d_loop.planning.plan_layout import PlanLayout, Recompute
from d9d_loop.planning.step_model import StepTime, step_time

PlanWith = Callable[[Launch, MeshConfig | None, int | None, int | None], JobPlan]
"""Function that plans the job for a place in it, with another mesh, microbatch size and global batch size if given."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one class of ranks, in bytes. All but `reserve` are exact: the rehearsed job allocates them.

    Attributes:
        name: Class of the rank.
        rank: A rank of the class.
        activations: Peak of what forward, backward and optimizer allocate beyond the state.
        reserve: Estimate for the device context, communication buffers and fragmentation.
    """

    name: str
    rank: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    reserve: float

    @property
    def total(self) -> float:
        """Bytes of the process on the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.reserve


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """What a job needs and how long it takes on a cluster.

    Attributes:
        hardware: The cluster.
        layout: Layout of the job.
        shape: Sizes of its decoder.
        memory: Memory of each class of ranks.
        time: Predicted step time and its parts.
        steps: Steps of the job.
        collectives: Bytes of a step on the first rank, by name of the collective and size of its group.
        goodput: Expected share of useful time with failures.
        sensitivity: Step time in seconds if one thing were 10 % better, by its name.
        search: Ranked layouts; `None` without a search.
    """

    hardware: Hardware
    layout: PlanLayout
    shape: DecoderShape
    memory: tuple[RankMemory, ...]
    time: StepTime
    steps: int
    collectives: dict[str, int]
    goodput: Goodput
    sensitivity: dict[str, float]
    search: SearchResult | None = None

    @property
    def spare_bytes(self) -> float:
        """Device memory that the largest rank leaves free; negative if the job does not fit."""
        return self.hardware.device.memory_bytes - max(each.total for each in self.memory)

    @property
    def fits(self) -> bool:
        """True if every rank fits into device memory."""
        return self.spare_bytes >= 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.layout.global_tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over the bf16 peak of all devices."""
        flops = self.shape.flops_per_token(self.layout.length) * self.layout.global_tokens
        return flops / self.time.total / self.layout.world_size / self.hardware.device.peak_flops["bf16"]

    @property
    def days(self) -> float:
        """Days of all steps, with the expected goodput."""
        return self.steps * self.time.total / self.goodput.fraction / 86400

    @property
    def device_hours(self) -> float:
        """Device hours of all steps."""
        return self.days * 24 * self.layout.world_size

    @property
    def interval(self) -> tuple[float, float]:
        """Step times between which 90 % of measured steps are expected, in seconds."""
        error = self.hardware.relative_error
        return self.time.total * (1 - error), self.time.total * (1 + error)

    def to_json(self) -> dict[str, Any]:
        """Return all figures: bytes, seconds, and fractions."""
        parts = {name: getattr(self.time, name) for name in StepTime.__slots__}
        return {
            "hardware": self.hardware.name,
            "world_size": self.layout.world_size,
            "layout": describe(self.layout),
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "memory": [{name: getattr(each, name) for name in RankMemory.__slots__} for each in self.memory],
            "seconds": parts,
            "interval_seconds": self.interval,
            "limit": self.time.limit,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "days": self.days,
            "device_hours": self.device_hours,
            "goodput": {name: getattr(self.goodput, name) for name in Goodput.__slots__},
            "sensitivity_seconds": self.sensitivity,
            "collective_bytes": self.collectives,
            "search": None if self.search is None else _search_json(self.search),
        }


def plan_cluster(
    plan_with: PlanWith,
    *,
    world_size: int,
    hardware: Hardware,
    search: bool = False,
    shape: DecoderShape | None = None,
    length: int | None = None,
) -> ClusterPlan:
    """Plan a job on a cluster. Needs no device: one rank of each class is rehearsed on the CPU, without values.

    Args:
        plan_with: Plans the job; see `PlanWith`.
        world_size: Number of devices.
        hardware: The cluster.
        search: True to rank other layouts, too. If the job does not fit, they are ranked in any case.
        shape: Sizes of the decoder; read from the model by default.
        length: Tokens of a sample; read from the data by default.

    Raises:
        UserError: If the job's own checks fail for this number of devices, or the model is not a decoder.
    """
    launch = Launch(world_size=world_size, device="cpu")
    plan = plan_with(launch, None, None, None)
    if shape is None or length is None:
        shape, length = shape_of_job(plan)
    num_stages = plan.model.program.num_stages
    shown = _shortened(plan, num_stages)

    def plan_for(place: Launch) -> JobPlan:
        return plan_with(place, None, plan.microbatch_size, shown)

    first, *others = representatives(plan, world_size)
    ranks = [first, *([others[0], others[-1]] if len(others) > 1 else others)]
    dry_runs = dry_run(
        plan_for,
        ranks=ranks,
        world_size=world_size,
        precision="parameters" if plan.config.precision == "parameters" else "bfloat16",
    )
    layout = _layout(plan, shape, length, dry_runs[0])
    memory = tuple(
        _rank_memory(each, name)
        for each, name in zip(dry_runs, ("first stage", "second stage", "last stage"), strict=False)
    )
    if len(dry_runs) == 2:
        memory = (memory[0], replace(memory[1], name="last stage"))
    made = ClusterPlan(
        hardware=hardware,
        layout=layout,
        shape=shape,
        memory=memory,
        time=step_time(shape, layout, hardware),
        steps=plan.steps,
        collectives={
            f"{name} over {size}": total * plan.num_microbatches // max(1, shown_microbatches(plan, shown))
            for (name, size), total in dry_runs[0].forward_backward.collective_bytes().items()
        },
        goodput=goodput(world_size, failures_per_device_day=hardware.failures_per_device_day),
        sensitivity=sensitivity(shape, layout, hardware),
    )
    if not (search or not made.fits):
        return made
    found = search_layouts(
        shape, hardware, world_size=world_size, global_size=plan.config.batch.global_size, length=length
    )
    return replace(made, search=_accepted(found, plan_with, launch))


def shown_microbatches(plan: JobPlan, global_size: int) -> int:
    """Return the number of microbatches on each rank for another global batch size."""
    return global_size * plan.num_microbatches // plan.config.batch.global_size


def sensitivity(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> dict[str, float]:
    """Return the step time in seconds with each part of the hardware 10 % faster, by part."""
    device, links, network = hardware.device, hardware.links, hardware.network
    faster = {
        "matrix products": hardware.model_copy(
            update={
                "device": device.model_copy(
                    update={"peak_flops": {name: 1.1 * rate for name, rate in device.peak_flops.items()}}
                )
            }
        ),
        "memory bandwidth": hardware.model_copy(
            update={"device": device.model_copy(update={"memory_bandwidth": 1.1 * device.memory_bandwidth})}
        ),
        "links in a node": hardware.model_copy(
            update={"links": links.model_copy(update={"bandwidth": 1.1 * links.bandwidth})}
        ),
        "network": hardware.model_copy(
            update={"network": network.model_copy(update={"bandwidth": 1.1 * network.bandwidth})}
        ),
    }
    return {name: step_time(shape, layout, each).total for name, each in faster.items()}


def describe(layout: PlanLayout) -> str:
    """Return a layout in one line, such as "dp=64 tp=8, 16 microbatches of 1, recompute full"."""
    degrees = [
        f"{name}={getattr(layout, name)}" for name in ("dp", "cp", "tp", "pp", "ep") if getattr(layout, name) > 1
    ]
    parts = [" ".join(degrees) or "one device"]
    if layout.stages_per_rank > 1:
        parts.append(f"{layout.stages_per_rank} stages a rank")
    parts.append(f"{layout.num_microbatches} microbatches of {layout.microbatch_size}")
    parts.append(f"recompute {layout.recompute}")
    if layout.offload:
        parts.append("offload activations")
    return ", ".join(parts)


def _shortened(plan: JobPlan, num_stages: int) -> int:
    """Return the smallest global batch size that fills the pipeline: more microbatches need no more memory."""
    needed = max(1, 2 * num_stages if num_stages > 1 else 2)
    for count in range(1, plan.num_microbatches):
        if count >= needed and plan.num_microbatches % count == 0:
            return plan.config.batch.global_size * count // plan.num_microbatches
    return plan.config.batch.global_size


def _rank_memory(found: DryRun, name: str) -> RankMemory:
    activations = max(
        found.activation_bytes, found.update.peak_bytes - found.optimizer_bytes if found.update.peak_bytes else 0
    )
    subtotal = found.state_bytes + activations
    return RankMemory(
        name=name,
        rank=found.rank,
        parameters=found.parameter_bytes,
        gradients=found.gradient_bytes,
        optimizer=found.optimizer_bytes,
        activations=activations,
        reserve=CONTEXT_BYTES + FRAGMENTATION * subtotal,
    )


def _layout(plan: JobPlan, shape: DecoderShape, length: int, found: DryRun) -> PlanLayout:
    mesh = plan.model.mesh
    shards = mesh.data_parallel_shard * mesh.context_parallel_shard
    layout = PlanLayout(
        tp=mesh.tensor_parallel,
        pp=mesh.pipeline_parallel,
        cp=mesh.context_parallel_shard * mesh.context_parallel_replicate,
        dp=mesh.data_parallel_replicate * mesh.data_parallel_shard,
        ep=mesh.expert_parallel,
        stages_per_rank=plan.model.schedule.stages_per_rank,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        length=length,
        sharding="parameters" if shards > 1 else "replicated",
        shard_ranks=shards,
    )
    return replace(layout, recompute=_recompute(found))


def _recompute(found: DryRun) -> Recompute:
    """Return what the job recomputes: a whole forward runs attention's forward kernel twice for each backward one."""
    names = [each.name for each in found.forward_backward.operations if "scaled_dot_product" in each.name]
    backward = sum("backward" in name for name in names)
    return "full" if backward and len(names) - backward >= 2 * backward else "none"


def _accepted(found: SearchResult, plan_with: PlanWith, launch: Launch, *, wanted: int = 10) -> SearchResult:
    """Keep the fastest layouts that the job's own checks accept; each mesh is checked once."""
    accepted: list[Candidate] = []
    known: dict[tuple[Any, ...], bool] = {}
    for each in found.fitting:
        mesh, size = mesh_config(each.layout), each.layout.microbatch_size
        key = (*mesh.model_dump().values(), size, each.layout.stages_per_rank)
        if key not in known:
            known[key] = each.layout.stages_per_rank == 1 and _is_accepted(plan_with, launch, mesh, size)
        if known[key]:
            accepted.append(each)
        if len(accepted) == wanted or len(known) > 8 * wanted:
            break
    return replace(found, fitting=tuple(accepted))


def _is_accepted(plan_with: PlanWith, launch: Launch, mesh: MeshConfig, microbatch_size: int) -> bool:
    try:
        plan_with(launch, mesh, microbatch_size, None)
    except UserError:
        return False
    return True


def _search_json(found: SearchResult) -> dict[str, Any]:
    return {"num_legal": found.num_legal, "fitting": [_candidate_json(each) for each in found.fitting]}


def _candidate_json(each: Candidate) -> dict[str, Any]:
    return {
        "layout": describe(each.layout),
        "mesh": mesh_config(each.layout).model_dump(),
        "microbatch_size": each.layout.microbatch_size,
        "recompute": each.layout.recompute,
        "offload": each.layout.offload,
        "seconds": each.seconds,
        "memory_bytes": each.memory.total,
        "limit": each.time.limit,
    }
