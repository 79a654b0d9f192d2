"""Model of a step: the time of its parts on the slowest pipeline rank, from the costs of layers and collectives."""

from dataclasses import dataclass
from functools import cache
from typing import final

from d9d_dist import StageInfo
from d9d_loop.planning.collective_time import CollectiveName, Span, collective_seconds
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.kernel_time import pointwise_seconds
from d9d_loop.planning.launch_bound import launch_bound_seconds
from d9d_loop.planning.layer_time import LayerTime, PassTime, embedding_time, head_time, layer_time
from d9d_loop.planning.optimizer_time import optimizer_seconds
from d9d_loop.planning.overlap import exposed_seconds
from d9d_loop.planning.pipeline_time import pipeline_seconds
from d9d_loop.planning.plan_layout import PlanLayout

MICROBATCH_OPERATORS = 24
"""Operators that the host launches for each microbatch beside the model: data, masks, loss scaling and logging."""

PARTS = ("compute", "recompute", "launch", "tensor", "expert", "context", "bubble", "data", "optimizer")
"""Names of the parts of a step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, and of its parts on the slowest rank. The parts add up to `total`.

    Attributes:
        compute: Kernels of forward and backward without recomputation.
        recompute: Forward operators that run again.
        launch: Time that the device waits for the host.
        tensor: Exposed tensor-parallel collectives.
        expert: All-to-alls of experts.
        context: Exposed collectives of context parallelism.
        bubble: Time that the slowest rank waits for other pipeline ranks.
        data: Exposed collectives of data parallelism.
        hidden: Communication of data parallelism that overlaps computation; not part of the total.
        optimizer: Clipping and the optimizer.
    """

    compute: float
    recompute: float
    launch: float
    tensor: float
    expert: float
    context: float
    bubble: float
    data: float
    optimizer: float
    hidden: float
    total: float

    @property
    def limit(self) -> str:
        """Name of the largest part that is not compute, or `compute` if that is more than 80 % of the step."""
        parts = {
            name: getattr(self, name)
            for name in ("recompute", "launch", "tensor", "expert", "context", "bubble", "data", "optimizer")
        }
        return "compute" if self.compute > 0.8 * self.total else max(parts, key=lambda name: parts[name])


LAYER_SETTINGS = ("tp", "cp", "ep", "microbatch_size", "length", "recompute", "recompute_every")
"""Settings of a job that the times of a layer depend on. The traits of its implementation are further ones."""


def layer_times(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> tuple[LayerTime, LayerTime]:
    """Return the times of a dense and of a sparse layer; of a dense model, both are those of a dense one."""
    dense = layer_time(shape, layout, hardware, sparse=False)
    return dense, layer_time(shape, layout, hardware, sparse=True) if shape.num_experts else dense


def step_time(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, *, layers: tuple[LayerTime, LayerTime] | None = None
) -> StepTime:
    """Return the time of a step of a decoder in a layout on a cluster; `layers` is `layer_times`, if it is known."""
    layers = layers or layer_times(shape, layout, hardware)
    ranks = _ranks(shape, layout, hardware, layers)
    seconds = [each for _, _, each in ranks]
    slowest = max(range(layout.pp), key=lambda index: seconds[index])
    parts, again, _ = ranks[slowest]
    m = layout.num_microbatches
    data, hidden = _data_parallel(shape, layout, hardware, slowest, seconds[slowest])
    transfer = transfer_seconds(shape, layout, hardware)
    passes = pipeline_seconds(
        seconds,
        num_microbatches=m,
        stages_per_rank=layout.stages_per_rank,
        transfer=transfer,
        overlaps=layout.overlaps_pipeline and hardware.device.overlaps,
    )
    held = rank_parameters(shape, layout, slowest)
    shared = layout.sharding_ranks if layout.sharding != "replicated" else 1
    experts = expert_parameters(shape, layout, slowest)
    optimizer = optimizer_seconds(hardware, layout, (held - experts) / shared + experts / expert_shards(layout))
    collectives = parts.tensor + parts.expert + parts.context
    return StepTime(
        compute=m * (parts.device - collectives - again.matmul - again.attention - again.pointwise),
        recompute=m * (again.matmul + again.attention + again.pointwise),
        launch=m * (seconds[slowest] - parts.device),
        tensor=m * parts.tensor,
        expert=m * parts.expert,
        context=m * parts.context,
        bubble=passes - m * seconds[slowest],
        data=data,
        optimizer=optimizer,
        hidden=hidden,
        total=passes + data + optimizer,
    )


def layers_of(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> tuple[int, int]:
    """Return the numbers of dense and sparse layers of a pipeline rank."""
    counts = [stage_layers(shape, layout, index) for index in layout.stages_of(pipeline_rank)]
    return sum(each for each, _ in counts), sum(each for _, each in counts)


def stage_layers(shape: DecoderShape, layout: PlanLayout, index: int) -> tuple[int, int]:
    """Return the numbers of dense and sparse layers of a stage: whole layers, as `StageInfo.layers` splits them."""
    dense = shape.num_layers - shape.num_sparse_layers
    return _stage_layers(shape.num_layers, dense, index, layout.num_stages, layout.virtual_layers)


@cache
def _stage_layers(
    num_layers: int, num_dense: int, index: int, num_stages: int, virtual: tuple[int, int]
) -> tuple[int, int]:
    """Return the numbers of dense and sparse layers of a stage; the first `num_dense` layers of the model are dense."""
    layers = StageInfo(index, num_stages).layers(num_layers, virtual_before=virtual[0], virtual_after=virtual[1])
    sparse = len(range(max(layers.start, num_dense), layers.stop))
    return len(layers) - sparse, sparse


def rank_parameters(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> float:
    """Return the number of parameters of a pipeline rank after tensor and expert parallelism, before sharding."""
    dense, sparse = layers_of(shape, layout, pipeline_rank)
    every = (dense + sparse) * shape.attention_parameters + dense * shape.dense_parameters
    every += sparse * shape.shared_parameters
    is_first, is_last = pipeline_rank == 0, pipeline_rank == layout.head_rank
    if is_first:
        every += shape.embedding_parameters
    if is_last:
        every += shape.head_parameters or (0 if is_first else shape.hidden_size * shape.vocab_size)
    return every / layout.tp + expert_parameters(shape, layout, pipeline_rank)


def expert_parameters(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> float:
    """Return the number of a pipeline rank's expert parameters after expert parallelism, before sharding."""
    _, sparse = layers_of(shape, layout, pipeline_rank)
    return sparse * shape.expert_parameters / (layout.ep if layout.ep > 1 else layout.tp)


def expert_shards(layout: PlanLayout) -> int:
    """Return the number of ranks that share the state of an expert parameter: those that hold the same experts."""
    shards = layout.sharding_ranks
    return max(1, shards * layout.tp // layout.ep) if layout.ep > 1 else shards


def _ranks(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, layers: tuple[LayerTime, LayerTime]
) -> list[tuple[PassTime, PassTime, float]]:
    """Return the times of a microbatch on each pipeline rank. Ranks with the same layers have the same times."""
    kinds: dict[tuple[object, ...], tuple[PassTime, PassTime, float]] = {}
    found = []
    for index in range(layout.pp):
        kind = (layers_of(shape, layout, index), index == 0, index == layout.head_rank)
        if kind not in kinds:
            kinds[kind] = _rank(shape, layout, hardware, layers, index)
        found.append(kinds[kind])
    return found


def _rank(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, layers: tuple[LayerTime, LayerTime], index: int
) -> tuple[PassTime, PassTime, float]:
    """Return the times of a microbatch on a pipeline rank: its parts, the recomputed ones, and seconds with the host's.

    The host limits layers and the rest apart: it cannot launch far ahead, because the loss and the sends of a
    microbatch synchronize.
    """
    host = 0.0 if layout.captured else hardware.fitted.host_seconds
    total, again, seconds = PassTime(), PassTime(), 0.0
    for layer, count in zip(layers, layers_of(shape, layout, index), strict=True):
        one = layer.forward + layer.backward + layer.recompute
        again += layer.recompute.times(count)
        total += one.times(count)
        seconds += count * launch_bound_seconds(one.device, one.operators, host)
    rest = PassTime(operators=MICROBATCH_OPERATORS)
    accumulated = rank_parameters(shape, layout, index) * layout.accumulation_bytes
    if accumulated:
        rest += PassTime(pointwise=pointwise_seconds(hardware, accumulated))
    if index == 0:
        rest += embedding_time(shape, layout, hardware)
    if index == layout.head_rank:
        forward, backward = head_time(shape, layout, hardware)
        rest += forward + backward
    return total + rest, again, seconds + launch_bound_seconds(rest.device, rest.operators, host)


def transfer_seconds(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> float:
    """Return the time of one send between stages; tensor-parallel ranks send a part each."""
    if layout.pp == 1:
        return 0.0
    num_bytes = layout.tokens_per_microbatch * shape.hidden_size * 2 / (layout.tp if layout.splits_transfers else 1)
    inside = layout.tp * layout.cp * layout.dp < hardware.devices_per_node
    return collective_seconds(hardware, "send", num_bytes, Span(2, 2 if inside else 1))


def _data_parallel(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, index: int, computation: float
) -> tuple[float, float]:
    """Return the exposed and the hidden time of data-parallel collectives of a step.

    ZeRO-3 gathers weights in each forward and backward of a microbatch, and scatters gradients in each microbatch or in
    the last one; without it gradients are reduced once per step.
    """
    ranks = layout.dp * layout.cp
    if ranks == 1:
        return 0.0, 0.0
    experts = expert_parameters(shape, layout, index)
    dense = rank_parameters(shape, layout, index) - experts
    # The ranks that hold the same experts are fewer.
    copies, stride = (ranks * layout.tp // layout.ep, layout.ep) if layout.ep > 1 else (ranks, layout.tp)
    m = layout.num_microbatches
    per_layer = sum(layers_of(shape, layout, index)) + 1

    def seconds(name: CollectiveName, per_parameter: float, sizes: tuple[int, int], strides: tuple[int, int]) -> float:
        spans = (Span.of(max(1, n), each, hardware.devices_per_node) for n, each in zip(sizes, strides, strict=True))
        pieces = per_layer if layout.sharding == "parameters" else 1
        return sum(
            collective_seconds(hardware, name, size * per_parameter / pieces, span) * pieces
            for size, span in zip((dense, experts), spans, strict=True)
        )

    overlaps = layout.overlaps_gradients and hardware.device.overlaps
    contends = Span.of(ranks, layout.tp, hardware.devices_per_node).per_node > 1
    if layout.sharding == "parameters":
        shards = min(ranks, layout.sharding_ranks), min(copies, expert_shards(layout))
        copies_and_hooks = per_layer * hardware.device.shard_seconds
        gather = copies_and_hooks + seconds("all_gather", layout.weight_bytes, shards, (layout.tp, stride))
        scatter = copies_and_hooks + seconds("reduce_scatter", layout.gradient_bytes, shards, (layout.tp, stride))
        is_kept = layout.pp > 1  # a stage keeps its weights during a step
        total = (gather if is_kept else 2 * m * gather) + (1 if layout.keeps_whole_gradients else m) * scatter
        if ranks > layout.sharding_ranks:
            strides = layout.tp * shards[0], stride * shards[1]
            reduced = layout.gradient_bytes / layout.sharding_ranks
            total += seconds("all_reduce", reduced, (ranks // shards[0], copies // shards[1]), strides)
        if not overlaps:
            return total, 0.0
        exposed = exposed_seconds(computation * m, total, first=(gather + scatter) / per_layer, contends=contends)
        return exposed, total - exposed
    where = (ranks, copies), (layout.tp, stride)
    if layout.sharding == "replicated":
        total = seconds("all_reduce", layout.gradient_bytes, *where)
    else:
        total = seconds("reduce_scatter", layout.gradient_bytes, *where)
        total += seconds("all_gather", layout.weight_bytes, *where)
    if not overlaps:
        return total, 0.0
    exposed = exposed_seconds(computation * 2 / 3, total, first=total / per_layer, contends=contends)
    return exposed, total - exposed
