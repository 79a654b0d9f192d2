"""Model of a step: the time of its parts on the slowest pipeline rank, from the costs of layers and collectives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import final

from d9d_dist import StageInfo
from d9d_loop.planning.collective_time import Span, collective_seconds, link_share
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.kernel_time import pointwise_seconds
from d9d_loop.planning.layer_time import LayerTime, PassTime, embedding_time, head_time, layer_time
from d9d_loop.planning.optimizer_time import optimizer_seconds
from d9d_loop.planning.overlap import exposed_seconds, launch_bound_seconds
from d9d_loop.planning.pipeline_time import pipeline_seconds
from d9d_loop.planning.plan_layout import PlanLayout, Sharding
from d9d_loop.planning.vision_tower import tower_time

MICROBATCH_OPERATORS = 24
"""Operators that the host launches per microbatch outside of the model: data, masks, loss scaling and logging."""

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
        expert: Exposed all-to-alls of experts.
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
        is_compute = self.compute > 0.8 * self.total
        return "compute" if is_compute else max(PARTS[1:], key=lambda name: getattr(self, name))


@final
@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters of a pipeline rank that are sharded and reduced over the same ranks.

    Attributes:
        size: Number of parameters after tensor and expert parallelism, before sharding.
        outside: Number of these parameters that are outside of layers.
        modules: Number of modules that are gathered and reduced separately: each layer, and the rest.
        sharding: State that is sharded.
        ranks: Number of ranks with the same parameters.
        shards: Number of these ranks over which the state is sharded.
        stride: Difference between consecutive global ranks over which the state is sharded.
    """

    size: float
    outside: float
    modules: int
    sharding: Sharding
    ranks: int
    shards: int
    stride: int


@final
@dataclass(frozen=True, slots=True)
class _RankTime:
    """Times of a microbatch on a pipeline rank. `seconds`, `forward` and `backward` include waits for the host."""

    parts: PassTime
    recompute: PassTime
    seconds: float
    forward: float

    @property
    def backward(self) -> float:
        return self.seconds - self.forward


LAYER_SETTINGS = ("tp", "cp", "ep", "microbatch_size", "length", "recompute", "recompute_every")
"""Settings of a job on which the times of a layer depend. They also depend on the traits of the implementation."""


def layer_times(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> tuple[LayerTime, LayerTime]:
    """Return the times of a dense and of an MoE layer; for a dense model, both are the times of a dense layer."""
    dense = layer_time(shape, layout, hardware, sparse=False)
    return dense, layer_time(shape, layout, hardware, sparse=True) if shape.num_experts else dense


def step_time(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, *, layers: tuple[LayerTime, LayerTime] | None = None
) -> StepTime:
    """Return the step time of a decoder in a layout on a cluster; `layers` is the result of `layer_times`, if known."""
    layers = layers or layer_times(shape, layout, hardware)
    ranks = _ranks(shape, layout, hardware, layers)
    seconds = [each.seconds for each in ranks]
    slowest = max(range(layout.pp), key=lambda index: seconds[index])
    parts, again = ranks[slowest].parts, ranks[slowest].recompute
    m = layout.num_microbatches
    groups = parameter_groups(shape, layout, slowest)
    data, hidden = _data_parallel(groups, layout, hardware, ranks[slowest])
    transfer = transfer_seconds(shape, layout, hardware)
    passes = pipeline_seconds(
        seconds,
        num_microbatches=m,
        stages_per_rank=layout.stages_per_rank,
        transfer=transfer,
        overlaps=layout.overlaps_pipeline and hardware.device.overlaps,
    )
    optimizer = optimizer_seconds(hardware, layout, sum(each.size / each.shards for each in groups))
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
    """Return the numbers of dense and MoE layers of a pipeline rank."""
    counts = [stage_layers(shape, layout, index) for index in layout.stages_of(pipeline_rank)]
    return sum(each for each, _ in counts), sum(each for _, each in counts)


def stage_layers(shape: DecoderShape, layout: PlanLayout, index: int) -> tuple[int, int]:
    """Return the numbers of dense and MoE layers of a stage: whole layers, as `StageInfo.layers` splits them."""
    dense = shape.num_layers - shape.num_sparse_layers
    return _stage_layers(shape.num_layers, dense, index, layout.num_stages, layout.virtual_layers)


@cache
def _stage_layers(
    num_layers: int, num_dense: int, index: int, num_stages: int, virtual: tuple[int, int]
) -> tuple[int, int]:
    """Return the numbers of dense and MoE layers of a stage; the first `num_dense` layers of the model are dense."""
    layers = StageInfo(index, num_stages).layers(num_layers, virtual_before=virtual[0], virtual_after=virtual[1])
    sparse = len(range(max(layers.start, num_dense), layers.stop))
    return len(layers) - sparse, sparse


def parameter_groups(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> list[ParameterGroup]:
    """Return the groups of a pipeline rank: its dense parameters, and its expert parameters if there are any."""
    num_dense, num_sparse = layers_of(shape, layout, pipeline_rank)
    every = (num_dense + num_sparse) * shape.attention_parameters + num_dense * shape.dense_parameters
    is_first, is_last = pipeline_rank == 0, pipeline_rank == layout.head_rank
    embedding_ranks = layout.tp if layout.splits_embedding else 1
    tower = 0 if shape.tower is None else shape.tower.num_parameters
    outside = shape.embedding_parameters / embedding_ranks + tower if is_first else 0.0
    if is_last:
        outside += (shape.head_parameters or (0 if is_first else shape.hidden_size * shape.vocab_size)) / layout.tp
    router = shape.hidden_size * shape.num_experts
    shared = (shape.shared_parameters - router) / (layout.tp if layout.splits_shared_experts else 1)
    size = every / layout.tp + outside + num_sparse * (shared + router)
    ranks, modules = layout.dp * layout.cp, num_dense + num_sparse + 1
    groups = [ParameterGroup(size, outside, modules, layout.sharding, ranks, layout.sharding_ranks, layout.tp)]
    if num_sparse:
        # Tensor parallelism does not split experts: its ranks have different tokens, and hold copies of the experts.
        copies = max(1, ranks * layout.tp // layout.ep)
        sharding, shards = layout.sharding, max(1, min(copies, layout.sharding_ranks * layout.tp // layout.ep))
        if layout.shards_experts:
            sharding, shards = "parameters", copies
        elif sharding == "replicated":
            shards = 1
        experts = num_sparse * shape.expert_parameters / layout.ep
        groups.append(ParameterGroup(experts, 0.0, num_sparse, sharding, copies, shards, layout.ep))
    return groups


def _ranks(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, layers: tuple[LayerTime, LayerTime]
) -> list[_RankTime]:
    """Return the times of a microbatch on each pipeline rank. Ranks with the same layers have the same times."""
    kinds: dict[tuple[object, ...], _RankTime] = {}
    found = []
    for index in range(layout.pp):
        kind = (layers_of(shape, layout, index), index == 0, index == layout.head_rank)
        if kind not in kinds:
            kinds[kind] = _rank(shape, layout, hardware, layers, index)
        found.append(kinds[kind])
    return found


def _rank(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, layers: tuple[LayerTime, LayerTime], index: int
) -> _RankTime:
    """Return the times of a microbatch on a pipeline rank: parts, recomputation, and seconds.

    The seconds include waits for the host. Launch-bound time is computed for layers and for the rest separately: the
    host cannot launch far ahead, because the loss and the sends of a microbatch synchronize.
    """
    host = 0.0 if layout.captured == "step" else hardware.fitted.host_seconds
    total, again, seconds, first = PassTime(), PassTime(), 0.0, 0.0
    for layer, count in zip(layers, layers_of(shape, layout, index), strict=True):
        one = layer.forward + layer.backward + layer.recompute
        again += layer.recompute.times(count)
        total += one.times(count)
        first += count * layer.forward.device
        seconds += count * launch_bound_seconds(one.device, one.operators, host)
    rest = PassTime(operators=MICROBATCH_OPERATORS)
    copies = layout.copies_shards and not hardware.device.shard_seconds
    if moved := sum(_moved(each, layout, copies=copies) for each in parameter_groups(shape, layout, index)):
        rest += PassTime(pointwise=pointwise_seconds(hardware, moved))
    if index == 0:
        forward, backward = tower_time(shape, layout, hardware)
        rest += embedding_time(shape, layout, hardware) + forward + backward
        first += forward.device
    if index == layout.head_rank:
        forward, backward = head_time(shape, layout, hardware)
        rest += forward + backward
        first += forward.device
    seconds += launch_bound_seconds(rest.device, rest.operators, host)
    parts = total + rest
    return _RankTime(parts, again, seconds, seconds * first / parts.device)


def _moved(group: ParameterGroup, layout: PlanLayout, *, copies: bool) -> float:
    """Return the bytes that a microbatch moves on average to add its gradients to earlier ones, and in FSDP2's copies.

    FSDP2 adds bf16 gradients to whole gradients in the dtype of the reduction, which are read and written
    (`FSDPParam.accumulate_unsharded_grad_if_needed`). It casts those of the first microbatch
    (`FSDPParam.to_accumulated_grad_if_needed`). Between the products, it copies gathered weights from a buffer, and
    gradients to one (`foreach_all_gather_copy_out`, `foreach_reduce_scatter_copy_in`).
    """
    m, reduced, whole = layout.num_microbatches, layout.gradient_bytes, layout.keeps_whole_gradients
    if group.sharding != "parameters" or group.shards == 1:
        return group.size * layout.accumulation_bytes * (m if layout.accumulates_first else m - 1) / m
    added = (m - 1) * (2 + 2 * reduced) + (2 + reduced if reduced != 2 else 0) if whole else 0
    gathers = 1 if layout.pp > 1 else m * (2 - group.outside / group.size)
    copied = 2 * layout.weight_bytes * gathers + (2 * reduced if whole else m * (2 + reduced))
    return group.size * (added + copied * copies) / m


def transfer_seconds(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> float:
    """Return the time of one send between stages. Tensor-parallel ranks may each send a part of the activations."""
    if layout.pp == 1:
        return 0.0
    num_bytes = layout.tokens_per_microbatch * shape.hidden_size * 2 / (layout.tp if layout.splits_transfers else 1)
    inside = layout.tp * layout.cp * layout.dp < hardware.devices_per_node
    return collective_seconds(hardware, "send", num_bytes, Span(2, 2 if inside else 1))


def _data_parallel(
    groups: Sequence[ParameterGroup], layout: PlanLayout, hardware: Hardware, rank: _RankTime
) -> tuple[float, float]:
    """Return the exposed and the hidden time of data-parallel collectives of a step.

    ZeRO-3 all-gathers weights in each forward and backward of a microbatch; pipeline stages keep gathered weights
    during a step, so they gather once. ZeRO-3 reduce-scatters gradients in each backward or only in the last one.
    Without ZeRO-3, sharded weights are gathered once and gradients are reduced once. Collectives that run once per step
    overlap only the first forward or the last backward.

    Nothing hides ZeRO-3's first gather, of parameters outside of layers, and its last scatter. These parameters stay
    gathered from the forward to the backward pass (`FSDPState._lazy_init`).
    """
    every_forward = every_backward = first_forward = last_backward = first = last = 0.0
    for group in (part for each in groups for part in _gathered_parts(each)):
        gather, scatter, reduction = group_seconds(group, layout, hardware)
        if group.sharding == "parameters" and layout.pp == 1:
            every_forward += gather
            every_backward += 0.0 if group.outside else gather
        else:
            first_forward += gather
        if group.sharding == "parameters" and not layout.keeps_whole_gradients:
            every_backward += scatter
        else:
            last_backward += scatter
        last_backward += reduction
        first += gather / group.modules
        last += (scatter + reduction) / group.modules
    m = layout.num_microbatches
    total = m * (every_forward + every_backward) + first_forward + last_backward
    if not (layout.overlaps_gradients and hardware.device.overlaps):
        return total, 0.0
    spans = (Span.of(each.ranks, each.stride, hardware.devices_per_node) for each in groups)
    share = max(link_share(hardware, each) for each in spans)
    exposed = sum(
        count * exposed_seconds(computation, transfers, first=bare, link_share=share)
        for count, computation, transfers, bare in (
            (m - 1, rank.forward, every_forward, min(first, every_forward)),
            (m - 1, rank.backward, every_backward, 0.0 if layout.keeps_whole_gradients else min(last, every_backward)),
            (1, rank.forward, every_forward + first_forward, first),
            (1, rank.backward, every_backward + last_backward, last),
        )
    )
    return exposed, total - exposed


def _gathered_parts(group: ParameterGroup) -> list[ParameterGroup]:
    """Split a group that FSDP gathers into parameters outside of layers and those of layers; else return the group."""
    if group.sharding != "parameters" or not group.outside or group.modules == 1:
        return [group]
    layers = replace(group, size=group.size - group.outside, outside=0.0, modules=group.modules - 1)
    return [replace(group, size=group.outside, modules=1), layers]


def group_seconds(group: ParameterGroup, layout: PlanLayout, hardware: Hardware) -> tuple[float, float, float]:
    """Return the times to gather weights, to scatter gradients, and to reduce gradient shards over replicas."""
    pieces = group.modules if group.sharding == "parameters" else 1
    shards = Span.of(group.shards, group.stride, hardware.devices_per_node)
    replicas = Span.of(group.ranks // group.shards, group.stride * group.shards, hardware.devices_per_node)
    size = group.size / pieces
    gather = collective_seconds(hardware, "all_gather", size * layout.weight_bytes, shards)
    scatter = collective_seconds(hardware, "reduce_scatter", size * layout.gradient_bytes, shards)
    reduction = collective_seconds(hardware, "all_reduce", size * layout.gradient_bytes / group.shards, replicas)
    # FSDP's hooks and copies
    hooks = hardware.device.shard_seconds if group.sharding == "parameters" and group.shards > 1 else 0.0
    return pieces * (gather + hooks), pieces * (scatter + hooks), pieces * reduction
