"""Search for the layouts of a decoder on a cluster: legal degrees, microbatches, recomputation and offload, ranked."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Self, final

from d9d_dist import MeshConfig, StageInfo, UserError
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.layer_time import LayerTime
from d9d_loop.planning.memory_size import Memory, activation_bytes_per_token, memory_of
from d9d_loop.planning.plan_layout import PlanLayout, Recompute, Sharding
from d9d_loop.planning.schedule_time import ScheduleBubbles, has_closed_form, supports
from d9d_loop.planning.step_model import LAYER_SETTINGS, StepTime, layer_times, layers_of, step_time
from d9d_pipeline import Schedule

RECOMPUTE: tuple[tuple[Recompute, int], ...] = (
    ("none", 1),
    ("selective", 1),
    ("selective", 2),
    ("full", 1),
    ("full", 2),
    ("full", 4),
)
"""Choices of recomputation: its kind, and n if every n-th layer is recomputed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryScale:
    """Ratios of a job's exact memory to the closed form; other layouts of its model and operators share these ratios.

    Attributes:
        state: Ratio for parameters and optimizer state.
        rest: Ratio for gradients, activations, gathered weights and the loss, which peak together. The exact memory
            does not separate activations from whole gradients that are kept between microbatches.
    """

    state: float = 1.0
    rest: float = 1.0

    @classmethod
    def of(cls, shape: DecoderShape, layout: PlanLayout, *, state_bytes: float, rest_bytes: float) -> "MemoryScale":
        """Return the factors between the closed form of a layout and the exact bytes of its largest rank."""
        closed = worst_memory(shape, layout)
        state = closed.parameters + closed.optimizer
        return cls(state=state_bytes / state, rest=rest_bytes / (closed.model - state))

    def apply(self, memory: Memory) -> Memory:
        """Return the scaled memory."""
        state = ("parameters", "optimizer")
        factors = {name: self.state if name in state else self.rest for name in Memory.__slots__}
        return Memory(**{name: factor * getattr(memory, name) for name, factor in factors.items()})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout with its predicted memory and time.

    Attributes:
        memory: Memory of the pipeline rank that needs the most.
        seconds: Step time; the transfer of offloaded activations is included.
    """

    layout: PlanLayout
    memory: Memory
    time: StepTime
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.layout.global_tokens / self.seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Result of a search.

    Attributes:
        num_legal: Number of legal layouts that were considered.
        fitting: Layouts that fit, fastest first.
        smallest: Layout that needs the least memory, even if it does not fit.
    """

    num_legal: int
    fitting: tuple[Candidate, ...]
    smallest: Candidate

    def pareto(self) -> list[Candidate]:
        """Return the layouts that no other layout beats in both time and memory, fastest first."""
        front: list[Candidate] = []
        for each in self.fitting:
            if not front or each.memory.total < front[-1].memory.total:
                front.append(each)
        return front


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Sizes that all layouts of a search share.

    Attributes:
        world_size: Number of devices.
        global_size: Samples of a step.
        length: Tokens of a sample.
        base: Traits of the implementation; by default d9d's: sharded fp32 master weights, sequence parallelism.
        replicas: Numbers of replicas of the sharded state to consider.
        schedule: Pipeline schedule of the layouts; by default 1F1B, or interleaved 1F1B with two to four stages per
            rank.
    """

    world_size: int
    global_size: int
    length: int
    base: PlanLayout = field(default_factory=PlanLayout)
    replicas: tuple[int, ...] = (1,)
    schedule: Schedule | None = None

    @classmethod
    def of(cls, layout: PlanLayout, global_size: int, schedule: Schedule | None = None) -> Self:
        """Return the space of a job: its devices, traits and schedule, with one replica or as many as the job has."""
        return cls(
            world_size=layout.world_size,
            global_size=global_size,
            length=layout.length,
            base=layout,
            replicas=tuple(sorted({1, layout.replicas})),
            schedule=schedule,
        )


def search_layouts(
    shape: DecoderShape,
    hardware: Hardware,
    space: SearchSpace,
    *,
    scale: MemoryScale | None = None,
    keep: int | None = 200,
) -> SearchResult:
    """Return the layouts for a number of devices, ranked by predicted step time.

    Args:
        shape: Sizes of the decoder.
        hardware: The cluster.
        space: Numbers of devices, samples and tokens.
        scale: Ratios of the job's exact memory to the closed form; by default 1.
        keep: Number of fitting layouts to return; `None` for all.

    Raises:
        UserError: If no layout is legal, because the number of samples cannot be divided over the devices.
    """
    found: list[Candidate] = []
    smallest: Candidate | None = None
    num_legal = 0
    evaluate = Evaluation(shape, hardware, space.schedule)
    scale = scale or MemoryScale()
    for layout in legal_layouts(shape, hardware, space):
        num_legal += 1
        memory = scale.apply(worst_memory(shape, layout))
        fits = memory.total <= hardware.device.memory_bytes
        is_smallest = smallest is None or memory.total < smallest.memory.total
        if not (fits or is_smallest):
            continue
        candidate = evaluate(layout, memory)
        if is_smallest:
            smallest = candidate
        if fits:
            found.append(candidate)
    if smallest is None:
        raise UserError(
            f"no layout of {space.world_size} devices is legal for batch.global_size = {space.global_size}; expected "
            "samples that data-parallel ranks can share. Use a multiple of the number of devices divided by 8."
        )
    found.sort(key=lambda each: each.seconds)
    return SearchResult(num_legal=num_legal, fitting=tuple(found[:keep]), smallest=smallest)


def nearest_layouts(
    shape: DecoderShape, hardware: Hardware, space: SearchSpace, *, scale: MemoryScale
) -> Iterator[Candidate]:
    """Yield other layouts that fit, sorted by the number of changes from `space.base`, then by step time.

    Each layout is evaluated only when the iterator reaches its number of changes.

    Args:
        shape: Sizes of the decoder.
        hardware: The cluster.
        space: Space of the job.
        scale: Ratios of the exact memory of `space.base` to the closed form.
    """
    by_changes = defaultdict[int, list[PlanLayout]](list)
    for each in legal_layouts(shape, hardware, space):
        by_changes[num_changes(space.base, each)].append(each)
    by_changes.pop(0, None)
    evaluate = Evaluation(shape, hardware, space.schedule)
    for _, layouts in sorted(by_changes.items()):
        memories = ((each, scale.apply(worst_memory(shape, each))) for each in layouts)
        fitting = [evaluate(each, memory) for each, memory in memories if memory.total <= hardware.device.memory_bytes]
        yield from sorted(fitting, key=lambda each: each.seconds)


_DEGREES = ("tp", "pp", "cp", "dp", "replicas", "ep", "microbatch_size", "stages_per_rank")
_CHOICES = ("recompute", "recompute_every", "reduces_each_microbatch", "offload")


def num_changes(layout: PlanLayout, other: PlanLayout) -> int:
    """Return the number of settings of a job that differ between two layouts."""
    different = {name for name in _DEGREES + _CHOICES if getattr(layout, name) != getattr(other, name)}
    return len(different) - (different >= {"recompute", "recompute_every"})  # one setting


@final
class Evaluation:
    """Predictor of the time of layouts, for one decoder, cluster and schedule.

    Layouts whose layers have the same cost share layer times.
    """

    def __init__(self, shape: DecoderShape, hardware: Hardware, schedule: Schedule | None = None) -> None:
        self._shape, self._hardware = shape, hardware
        self._bubbles = (
            None if schedule is None or has_closed_form(schedule) else ScheduleBubbles(schedule, shape, hardware)
        )
        self._layers: dict[tuple[object, ...], tuple[LayerTime, LayerTime]] = {}
        self._last: tuple[PlanLayout, StepTime] | None = None

    def __call__(self, layout: PlanLayout, memory: Memory) -> Candidate:
        """Return a candidate with the layout's predicted time and the given memory."""
        time = self._time(replace(layout, offload=False) if layout.offload else layout)
        seconds = time.total
        if layout.offload:
            moved = 2 * layout.num_microbatches * microbatch_activations(self._shape, layout)
            seconds += max(0.0, moved / self._hardware.device.host_bandwidth - 0.8 * time.compute)
        return Candidate(layout=layout, memory=memory, time=time, seconds=seconds)

    def _time(self, layout: PlanLayout) -> StepTime:
        if self._last is not None and self._last[0] == layout:
            return self._last[1]
        key = tuple(getattr(layout, name) for name in LAYER_SETTINGS)
        if key not in self._layers:
            self._layers[key] = layer_times(self._shape, layout, self._hardware)
        time = step_time(self._shape, layout, self._hardware, layers=self._layers[key])
        if self._bubbles is not None and layout.pp > 1:
            time = self._bubbles.apply(time, layout, self._layers[key])
        self._last = layout, time
        return time


def microbatch_activations(shape: DecoderShape, layout: PlanLayout) -> float:
    """Return the bytes of activations that one microbatch saves, on the pipeline rank that saves the most."""
    dense, sparse = (activation_bytes_per_token(shape, layout, sparse=each) for each in (False, True))
    ranks = {layers_of(shape, layout, index) for index in range(layout.pp)}
    return layout.tokens_per_microbatch * max(num * dense + more * sparse for num, more in ranks)


def worst_memory(shape: DecoderShape, layout: PlanLayout) -> Memory:
    """Return the memory of the first or last pipeline rank, whichever needs more."""
    first = memory_of(shape, layout, 0)
    last = memory_of(shape, layout, layout.pp - 1) if layout.pp > 1 else first
    return max((first, last), key=lambda each: each.total)


def legal_layouts(shape: DecoderShape, hardware: Hardware, space: SearchSpace) -> Iterator[PlanLayout]:
    """Yield every layout that the checks of a job accept: degrees divide ranks, heads, experts, layers and samples.

    The ranks of each replica shard the same state as in `space.base`: by default, all of it.
    """
    for each in _legal_degrees(shape, hardware, space):
        reduces = (False, True) if each.num_microbatches > 1 and each.pp == 1 else (False,)
        for (kind, every), reduce, offload in product(RECOMPUTE, reduces, (False, True)):
            yield replace(each, recompute=kind, recompute_every=every, reduces_each_microbatch=reduce, offload=offload)


def _legal_degrees(shape: DecoderShape, hardware: Hardware, space: SearchSpace) -> Iterator[PlanLayout]:
    """Yield a layout for each legal combination of degrees and microbatch size."""
    world_size, global_size = space.world_size, space.global_size
    degrees = [2**power for power in range(world_size.bit_length()) if world_size % 2**power == 0]
    tensor = [
        t
        for t in degrees
        if t <= hardware.devices_per_node and shape.num_kv_heads % t == 0 and shape.num_heads % t == 0
    ]
    context = [c for c in degrees if c <= 64 and space.length % (2 * c) == 0]
    stages = sorted({*degrees, *(p for p in range(1, 65) if world_size % p == 0)})
    for tp, cp, pp in product(tensor, context, stages):
        if world_size % (tp * cp * pp) or pp > shape.num_layers:
            continue
        dp = world_size // (tp * cp * pp)
        if global_size % dp:
            continue
        shardings = [_sharding(space.base, dp, cp, each) for each in space.replicas if dp % each == 0]
        samples = global_size // dp
        microbatches = {size: samples // size for size in (1, 2, 4, 8, 16) if samples % size == 0}
        counts = {size: _stage_counts(shape, space.schedule, pp, m) for size, m in microbatches.items()}
        expert_degrees = _expert_degrees(shape, dp * cp * tp)
        for ep, (size, m), (sharding, shard_ranks) in product(expert_degrees, microbatches.items(), shardings):
            for v in counts[size]:
                yield replace(
                    space.base,
                    tp=tp,
                    cp=cp,
                    pp=pp,
                    dp=dp,
                    ep=ep,
                    stages_per_rank=v,
                    virtual_layers=_virtual_layers(shape, space.base, parts=tp * cp, num_stages=pp * v),
                    sharding=sharding,
                    shard_ranks=shard_ranks,
                    microbatch_size=size,
                    num_microbatches=m,
                    length=space.length,
                )


def _virtual_layers(shape: DecoderShape, base: PlanLayout, *, parts: int, num_stages: int) -> tuple[int, int]:
    """Return the virtual layers of a layout: the cost of the tower, reduced until the first stage keeps a layer."""
    if not base.tower_layers:
        return base.virtual_layers
    wanted = round(parts * base.tower_layers)
    while wanted and not StageInfo(0, num_stages).layers(shape.num_layers, virtual_before=wanted):
        wanted -= 1
    return wanted, 0


def _sharding(base: PlanLayout, dp: int, cp: int, replicas: int) -> tuple[Sharding, int | None]:
    """Return the sharding for a number of replicas, and the number of ranks of a replica (`None` for all)."""
    sharding = "parameters" if base.sharding == "replicated" else base.sharding
    if replicas == 1:
        return sharding, None
    shards = dp * cp // replicas
    return ("replicated", 1) if shards == 1 else (sharding, shards)


def _expert_degrees(shape: DecoderShape, ranks: int) -> list[int]:
    if not shape.num_experts:
        return [1]
    return [2**power for power in range(10) if shape.num_experts % 2**power == 0 and ranks % 2**power == 0]


def _stage_counts(shape: DecoderShape, schedule: Schedule | None, pp: int, num_microbatches: int) -> list[int]:
    """Return the numbers of stages per rank: the schedule's; by default, 1 for 1F1B and more for interleaved 1F1B."""
    if schedule is not None:
        v = schedule.stages_per_rank
        is_legal = pp * v <= shape.num_layers and supports(schedule, num_ranks=pp, num_microbatches=num_microbatches)
        return [v] if is_legal else []
    if pp == 1:
        return [1]
    more = [v for v in (2, 3, 4) if pp * v <= shape.num_layers and num_microbatches % pp == 0]
    return [1, *more]


def mesh_config(layout: PlanLayout) -> MeshConfig:
    """Return the mesh of a layout for the configuration of a job."""
    return MeshConfig(
        pipeline_parallel=layout.pp,
        data_parallel_replicate=layout.replicas,
        data_parallel_shard=layout.dp // layout.replicas,
        context_parallel_shard=layout.cp,
        tensor_parallel=layout.tp,
        expert_parallel=layout.ep,
    )
