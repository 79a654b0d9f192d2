"""Time of one layer, the embedding and the head for one microbatch on one rank, forward and backward, in s.

    forward  = sum of kernels(tokens / cp, widths / tp) + tensor-parallel and expert collectives
    backward = input-gradient and weight-gradient products + pointwise kernels + the same collectives
    recompute = full: forward again, without the last product; selective: attention's core and activation function again

Tensor parallelism: two all-reduces of b s h values (microbatch size, length, hidden size) per pass (Shoeybi et al.
2019, https://arxiv.org/abs/1909.08053), or with sequence parallelism an all-gather and a reduce-scatter each
(Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). An MoE layer has these collectives only for attention and
for a split shared expert, because its router and experts process the tokens of the rank. Bytes of fused pointwise
kernels are counted below, per kernel, in elements of 2 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from d9d_loop.planning.collective_time import Span, collective_seconds, link_bandwidth, link_share
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.kernel_time import (
    LinearSeconds,
    attention_seconds,
    linear_seconds,
    matmul_seconds,
    pointwise_seconds,
)
from d9d_loop.planning.overlap import exposed_seconds, launch_bound_seconds
from d9d_loop.planning.plan_layout import Dispatch, PlanLayout, Pointwise

# Operators that the host launches: a layer's forward, and its backward (autograd's own overhead is in host_seconds).
FORWARD_OPERATORS = 26
BACKWARD_OPERATORS = 50
SPARSE_OPERATORS = 30
LOOP_OPERATORS = 60  # to count and split tokens, if each expert has its own product
OVERLAP_OPERATORS = 30  # per part of a layer and pass: streams, events, and autograd's start, if all-to-alls overlap
LAYER_PARTS = 5  # attention, dispatch, experts, combine, weight gradients
COLLECTIVE_OPERATORS = 3  # per tensor-parallel collective: checks, events and waits of its process group

POINTWISE_TRAFFIC: dict[Pointwise, float] = {"eager": 2.0, "fused": 1.0, "compiled": 0.6}
"""Bytes of a layer's pointwise operators, relative to one kernel for each norm, addition and activation function."""

ROW_COPIES: dict[Dispatch | None, int] = {None: 2, "ranks": 4, "nodes": 4, "rows": 6}
"""Reads and writes of the rows of tokens in a pass, by dispatcher; `None` if all experts are on the rank.

On the rank: one write when tokens are sorted by expert, and one read when their outputs are added. A dispatcher also
writes what it receives and reads what it returns (ranks, nodes). An all-to-all of rows sorts them once by rank and once
by expert, before the experts and after them (Megatron-LM, `MoEAlltoAllTokenDispatcher`).
"""

BIAS_PASSES, CLAMPED_GATE_PASSES = (11, 13), (11, 22)
"""Reads and writes of the inner rows of experts in bf16 in both passes, for biases and for a clamped gate.

Biases of the inner rows: add and concatenate gate and value (2 x 2). Of the outputs, in fp32, with the router's weight:
product (1), add (2.5), concatenate (2) and cast (1.5). Backward: sum and concatenation for the inner rows (3); casts
(1.5 + 1.5), products and sums for bias and weight (3 + 3) and concatenation (1) for the outputs. Grouped products leave
them to separate operators (Megatron-LM, `TEGroupedMLP._apply_bias`). The gate: copies of gate and value (2), clamp both
(2), scale, sigmoid and product of the gate (3), add one to the value (1), product (1), the router's weight and a cast
(2), backward twice; grouped experts have a fused kernel for it.
"""

NORM_BYTES = (32, 84)
"""Bytes per element that a norm of separate fp32 operators moves beyond eager kernels of 8 bytes, forward and backward.

Forward: cast (2 + 4), square (8), mean (4), product with the inverse root (8) and with the weight (8), cast (6).
Backward: casts (6 + 6), gradients of the weight (8 + 12 + 4), of the inverse root (8 + 12 + 4) and of the square (20),
and their sum (12).
"""

LOSS_TRAFFIC: dict[Pointwise, tuple[int, int]] = {"eager": (14, 22), "fused": (38, 14), "compiled": (4, 4)}
"""Bytes per logit that the cross entropy moves in the forward and in the backward pass.

Eager: cast to fp32 (2 + 4), log-softmax (4 + 4); gradients of the loss (4) and of log-softmax (8 + 4), cast (4 + 2).
Fused: the vocabulary-parallel loss of Megatron-LM has kernels for cast (6), maximum (4), difference (8), exponential
(8), sum (4) and quotient (8); multiplication (8) and cast (6). Compiled: bf16 logits are read twice; read and written.
"""

HALF_LOSS_TRAFFIC = (4, 8)
"""The same without casts: log-softmax (2 + 2); gradients of the loss (2) and of log-softmax (4 + 2)."""


class Linear(NamedTuple):
    """Sizes of a linear layer, and the number of such layers."""

    tokens: float
    outputs: float
    inputs: float
    number: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of a pass by kind of kernel and collective, and number of launched operators."""

    matmul: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    operators: float = 0.0

    @property
    def device(self) -> float:
        """Seconds of the device's kernels and of exposed collectives."""
        return self.matmul + self.attention + self.pointwise + self.tensor + self.expert + self.context

    def __add__(self, other: "PassTime") -> "PassTime":
        return PassTime(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def times(self, factor: float) -> "PassTime":
        """Return all times and counts multiplied by `factor`."""
        return PassTime(**{name: getattr(self, name) * factor for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Times of a layer: forward, backward, and recomputation in the backward pass (mean over layers)."""

    forward: PassTime
    backward: PassTime
    recompute: PassTime


def layer_time(shape: DecoderShape, layout: PlanLayout, hardware: Hardware, *, sparse: bool) -> LayerTime:
    """Return the times of a dense or MoE layer for one microbatch."""
    t = layout.tp
    tokens = layout.tokens_per_microbatch
    parallel, whole = _linears(shape, layout, sparse=sparse)
    parts = t if layout.overlaps_tensor else 1
    split_forward, split_backward = _matmul_times(hardware, layout, parallel, parts)
    whole_forward, whole_backward = _matmul_times(hardware, layout, whole)
    attention_forward, attention_backward, core_bytes = _attention(shape, layout, hardware)
    moved_forward, moved_backward = _pointwise_bytes(shape, layout, core_bytes, (*parallel, *whole), sparse=sparse)
    num_kernels = 8 + (8 if sparse else 0) + (0 if layout.flash else 2)
    pairs = 1 if sparse and not (layout.splits_shared_experts and shape.shared_size) else 2
    tensor, backward_tensor = 0.0, 0.0
    if t > 1:
        pair = _tensor_pair(layout, hardware, tokens * shape.hidden_size * 2)
        # Column-parallel products, whose inputs have the hidden size, can hide collectives in the backward pass.
        of_inputs = (each for each in parallel if each.inputs == shape.hidden_size)
        hidden = sum(_linear(hardware, layout, each).weight_gradient for each in of_inputs)
        tensor, backward_tensor = _tensor_times(layout, pairs * pair, (split_forward, split_backward), hidden)
    router = SPARSE_OPERATORS if sparse and layout.captured == "none" else 0
    extra = router + (pairs * COLLECTIVE_OPERATORS if t > 1 else 0)
    outside = 0 if sparse and layout.captured == "attention" else 1
    launched = _loop_operators(shape, layout) if sparse else 0.0
    if sparse and layout.overlaps_experts:
        extra += LAYER_PARTS * OVERLAP_OPERATORS
    context, backward_context = _context_times(shape, layout, hardware, (attention_forward, attention_backward))
    if layout.ring_attention and layout.cp > 1:
        ring_forward, ring_backward = _ring_bytes(shape, layout)
        moved_forward, moved_backward = moved_forward + ring_forward, moved_backward + ring_backward
    forward = PassTime(
        matmul=split_forward + whole_forward,
        attention=attention_forward,
        pointwise=pointwise_seconds(hardware, moved_forward, num_kernels=num_kernels),
        tensor=tensor,
        context=context,
        operators=outside * FORWARD_OPERATORS + extra + launched,
    )
    backward = PassTime(
        matmul=split_backward + whole_backward,
        attention=attention_backward,
        pointwise=pointwise_seconds(hardware, moved_backward, num_kernels=2 * num_kernels),
        tensor=backward_tensor,
        context=backward_context,
        operators=outside * BACKWARD_OPERATORS + extra + router + 2 * launched,
    )
    if sparse and layout.ep > 1:
        both = forward + backward
        host = 0.0 if layout.captured == "step" else hardware.fitted.host_seconds
        computation = launch_bound_seconds(both.matmul + both.attention + both.pointwise, both.operators, host)
        expert = PassTime(expert=_expert_collectives(shape, layout, hardware, computation))
        forward, backward = forward + expert, backward + expert
    again = _recomputation(layout, hardware, forward, core_bytes, _activation_bytes(shape, layout, sparse=sparse))
    if layout.recompute == "full" and not layout.recomputes_last and not sparse:
        # Of the collectives of a dense layer, which have one size, the last one reduces the outputs of this product.
        collectives = 4 if layout.sequence_parallel else 2
        last = PassTime(matmul=_linear(hardware, layout, parallel[-1]).forward, tensor=forward.tensor / collectives)
        again += last.times(-1)
    return LayerTime(forward, backward, again.times(1 / layout.recompute_every))


def _linears(shape: DecoderShape, layout: PlanLayout, *, sparse: bool) -> tuple[list[Linear], list[Linear]]:
    """Return the linear layers that tensor parallelism splits, and the others, which get only the rank's tokens."""
    t, h, tokens = layout.tp, shape.hidden_size, layout.tokens_per_microbatch
    parallel, whole = _attention_linears(shape, layout), []
    if sparse:
        whole = [Linear(tokens / t, shape.num_experts, h), *_routed_linears(shape, layout, tokens / t)]
    size = shape.shared_size if sparse else shape.intermediate_size
    num_inner = 2 if shape.is_gated else 1
    if size and sparse and not layout.splits_shared_experts:
        whole += [Linear(tokens / t, size, h)] * num_inner + [Linear(tokens / t, h, size)]
    elif size:
        parallel += [Linear(tokens, size / t, h)] * num_inner + [Linear(tokens, h, size / t)]
    return parallel, whole


def _activation_bytes(shape: DecoderShape, layout: PlanLayout, *, sparse: bool) -> float:
    """Return the bytes of the activation function of the dense or shared feed-forward layer."""
    inner = (shape.shared_size if sparse else shape.intermediate_size) / layout.tp
    return layout.tokens_per_microbatch * inner * 2 * (3 if shape.is_gated else 2)


def _pointwise_bytes(
    shape: DecoderShape, layout: PlanLayout, core_bytes: float, linears: Sequence[Linear], *, sparse: bool
) -> tuple[float, float]:
    """Return the bytes that pointwise kernels move in the forward and in the backward pass."""
    t, h, d, tokens = layout.tp, shape.hidden_size, shape.head_dim, layout.tokens_per_microbatch
    heads, kv_heads = shape.num_heads / t, max(1.0, shape.num_kv_heads / t)
    # Elements of 2 bytes: two norms (read, write), two residual additions (read 2, write 1, and a mask of dropout),
    # rotary or bias of queries, keys and values (read, write).
    thin = tokens * h / (t if layout.sequence_parallel else 1) * 2
    wide = tokens * (heads + 2 * kv_heads) * d * 2
    rows = tokens / t * shape.top_k if sparse else 0.0
    inner = _activation_bytes(shape, layout, sparse=sparse) + rows * 2 * 3 * shape.expert_size
    permuted = rows * 2 * ROW_COPIES[layout.dispatch if layout.ep > 1 else None] * h
    separate = 0.0 if layout.fuses_rotary else tokens * _separate_rotary_bytes(shape, t)
    fusion = POINTWISE_TRAFFIC[layout.pointwise]
    norms_and_residuals = thin * (2 * 2 + 2 * (3.5 if layout.dropout else 3))
    moved = fusion * (norms_and_residuals + 2 * wide + inner + permuted) + separate + core_bytes
    # Backward: norms read two and write one, additions pass gradients on, dropout reads and writes; activation
    # functions and softmax read a value more than in the forward pass.
    moved_backward = fusion * (norms_and_residuals + 2 * wide + 1.5 * inner + permuted) + separate + 1.5 * core_bytes
    if not layout.fuses_norms:
        moved, moved_backward = moved + NORM_BYTES[0] * thin, moved_backward + NORM_BYTES[1] * thin  # two of thin / 2
    if sparse and shape.biased_experts:
        has_gate = not (layout.groups_experts or layout.fuses_gate)
        for passes, backward_passes in (BIAS_PASSES, *[CLAMPED_GATE_PASSES] * has_gate):
            moved += passes * rows * shape.expert_size * 2 * 2
            moved_backward += backward_passes * rows * shape.expert_size * 2 * 2
    if layout.dtype != "bf16":
        # Quantization reads inputs of products, in the backward pass their output gradients, and writes them by rows
        # and by columns. Two of three inner products have the same input. The second scale of NVFP4, of the whole
        # tensor, needs its largest value first, so that the tensor is read twice; each of its values has half a byte.
        quantized = 5 if layout.dtype == "fp4" else 4
        is_whole = sparse and not layout.splits_shared_experts
        size = shape.shared_size if sparse else shape.intermediate_size
        inputs = tokens * (h + heads * d) + rows * (h + shape.expert_size)
        inputs += tokens * ((h / t if is_whole else h) + size / t) if size else 0.0
        # Compilers do not fuse it with the operators that compute a tensor, because its scale depends on all values.
        alone = max(1.0, fusion)
        moved += quantized * inputs * alone
        moved_backward += quantized * sum(each.tokens * each.outputs * each.number for each in linears) * alone
    return moved, moved_backward


def _separate_rotary_bytes(shape: DecoderShape, t: int) -> float:
    """Return the bytes per token and pass of a rotation in separate operators, beyond one kernel for it.

    Cast to fp32 (2 + 4), product of complex numbers (4 + 4), cast (4 + 2); one kernel would read and write (2 + 2).
    Latent attention rotates a part of each query and one key, and concatenates queries and keys (2 + 2 each).
    """
    if shape.latent is None:
        return 16 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim / t
    rope = shape.latent[2]
    return shape.num_heads * (16 * rope + 8 * (shape.head_dim + rope)) / t


def _tensor_times(layout: PlanLayout, whole: float, matmul: tuple[float, float], hidden: float) -> tuple[float, float]:
    """Return the exposed times of tensor-parallel collectives in the forward and in the backward pass.

    Args:
        layout: Layout with tensor parallelism.
        whole: Seconds of the collectives of a forward pass.
        matmul: Seconds of the products that are split, in the forward and in the backward pass.
        hidden: Seconds of the weight gradients that can hide a collective.
    """
    backward = whole * (layout.backward_collectives if layout.sequence_parallel else 1.0)
    if layout.overlaps_tensor:
        # The parts of a collective overlap the parts of its product; the first part is exposed.
        return (
            exposed_seconds(matmul[0], whole, first=whole / layout.tp, link_share=1.0),
            exposed_seconds(matmul[1], backward, first=backward / layout.tp, link_share=1.0),
        )
    if layout.overlaps_weight_gradients:
        # No computation hides the gather of a row-parallel product's gradient.
        bare = whole / 2 if layout.sequence_parallel else 0.0
        backward = bare + max(0.0, backward - bare - hidden)
    return whole, backward


def _matmul_times(
    hardware: Hardware, layout: PlanLayout, linears: Sequence[Linear], parts: int = 1
) -> tuple[float, float]:
    """Return the times of the products of linear layers in the forward and in the backward pass.

    All but the gradients of weights are computed in parts, each with some of the tokens.
    """
    whole = [_linear(hardware, layout, each) for each in linears]
    shares = [each._replace(tokens=each.tokens / parts) for each in linears]
    split = whole if parts == 1 else [_linear(hardware, layout, each) for each in shares]
    gradients = sum(each.weight_gradient for each in whole)
    return sum(parts * each.forward for each in split), gradients + sum(parts * each.input_gradient for each in split)


def _linear(hardware: Hardware, layout: PlanLayout, linear: Linear) -> LinearSeconds:
    """Return the times of one or more equal linear layers, which run in one kernel or in one kernel per layer."""
    batch, count = (linear.number, 1.0) if layout.groups_experts else (1.0, linear.number)
    sizes = linear.tokens, linear.outputs, linear.inputs
    seconds = linear_seconds(hardware, *sizes, batch=batch, dtype=layout.dtype)
    return LinearSeconds(*(count * each for each in seconds))


def _loop_operators(shape: DecoderShape, layout: PlanLayout) -> float:
    """Return the number of operators that a loop over experts adds to a forward pass.

    Gate and up projections are one product; quantization adds a kernel for each input.
    """
    if layout.groups_experts:
        return 0.0
    return LOOP_OPERATORS + shape.num_experts / layout.ep * 2 * (1 if layout.dtype == "bf16" else 2)


def _routed_linears(shape: DecoderShape, layout: PlanLayout, tokens: float) -> list[Linear]:
    """Return the linear layers of a rank's experts, with balanced routing of the `tokens` of each rank."""
    h, local = shape.hidden_size, shape.num_experts / layout.ep
    per_expert = max(1.0, tokens * shape.top_k / local)
    return [Linear(per_expert, shape.expert_size, h, local)] * 2 + [Linear(per_expert, h, shape.expert_size, local)]


def _recomputation(
    layout: PlanLayout, hardware: Hardware, forward: PassTime, core_bytes: float, activation: float
) -> PassTime:
    """Return the time of recomputation: the whole forward; or attention, the activation function and some products."""
    if layout.recompute != "selective":
        return forward if layout.recompute == "full" else PassTime()
    return PassTime(
        matmul=(1 - layout.saved_products) * forward.matmul,
        attention=0.0 if layout.flash else forward.attention,
        pointwise=pointwise_seconds(hardware, core_bytes + (activation if layout.flash else 0)),
        operators=6,
    )


def embedding_time(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> PassTime:
    """Return the time of the embedding, forward and backward together."""
    moved = layout.tokens_per_microbatch * shape.hidden_size * 2
    collective = collective_seconds(hardware, "all_reduce", moved, _tensor_span(layout, hardware))
    return PassTime(pointwise=pointwise_seconds(hardware, 8 * moved, num_kernels=6), tensor=collective, operators=12)


def head_time(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> tuple[PassTime, PassTime]:
    """Return the times of norm, head and cross entropy, forward and backward."""
    tokens, vocab = layout.logit_tokens, ceil(shape.vocab_size / layout.tp)
    h = shape.hidden_size
    product = linear_seconds(hardware, tokens, vocab, h)
    casts = layout.casts_loss or layout.pointwise == "compiled"
    moved, moved_backward = LOSS_TRAFFIC[layout.pointwise] if casts else HALF_LOSS_TRAFFIC
    size = tokens * (shape.vocab_size if layout.gathers_logits else vocab)
    logits = pointwise_seconds(hardware, size * moved, num_kernels=8)
    gradient = pointwise_seconds(hardware, size * moved_backward, num_kernels=4)
    collective = _tensor_pair(layout, hardware, layout.tokens_per_microbatch * h * 2)
    gathered = size * 2 if layout.gathers_logits else 0
    gather = collective_seconds(hardware, "all_gather", gathered, _tensor_span(layout, hardware))
    return (
        PassTime(matmul=product.forward, pointwise=logits, tensor=collective + gather, operators=20),
        PassTime(matmul=product.backward, pointwise=gradient, tensor=collective, operators=20),
    )


def _attention_linears(shape: DecoderShape, layout: PlanLayout) -> list[Linear]:
    h, d, tokens = shape.hidden_size, shape.head_dim, layout.tokens_per_microbatch
    heads, kv_heads = shape.num_heads / layout.tp, max(1.0, shape.num_kv_heads / layout.tp)
    if shape.latent is None:
        return [Linear(tokens, (heads + 2 * kv_heads) * d, h), Linear(tokens, h, heads * d)]
    q, kv, rope, value = shape.latent
    return [
        Linear(tokens, q + kv + rope, h),
        Linear(tokens, heads * (d + rope), q),
        Linear(tokens, heads * (d + value), kv),
        Linear(tokens, h, heads * value),
    ]


def _attention(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> tuple[float, float, float]:
    """Return the times of attention's core, forward and backward, and its pointwise bytes beyond fused kernels."""
    b, s, d, heads = layout.microbatch_size, layout.length, shape.head_dim, shape.num_heads / layout.tp
    queries = s / layout.cp
    qk = d if shape.latent is None else d + shape.latent[2]
    pv = d if shape.latent is None else shape.latent[3]
    if not layout.flash:
        batch, aligned = b * heads, not (s % 2 or qk % 2 or pv % 2)
        forward = matmul_seconds(hardware, queries, s, qk, batch=batch, aligned=aligned)
        forward += matmul_seconds(hardware, queries, pv, s, batch=batch, aligned=aligned)
        # Scores: scale, mask and softmax (read, write), dropout (read, write, a mask of one byte).
        return forward, 2 * forward, batch * queries * s * (2 * 2 + (2 * 2 + 1 if layout.dropout else 0))
    flops = 2 * b * heads * queries * _mean_keys(shape, layout) * (qk + pv)
    tiles = b * heads * ceil(queries / 128)
    forward, backward = (
        attention_seconds(
            hardware,
            flops * factor / layout.attention_speed,
            keys=s,
            head_dim=(qk + pv) / 2,
            num_tiles=tiles,
            backward=is_backward,
        )
        for factor, is_backward in ((1.0, False), (2.5, True))
    )
    return forward, backward, 0.0


def _mean_keys(shape: DecoderShape, layout: PlanLayout) -> float:
    """Return the number of keys that a token attends to, as a mean over tokens and layers."""
    s, w = layout.length, min(shape.window, layout.length)
    full = 0.5 * s if layout.causal else float(s)
    # The first w tokens of a window see w / 2 keys on average.
    return (full + w * (1 - w / (2 * s))) / 2 if w else full


def _tensor_span(layout: PlanLayout, hardware: Hardware) -> Span:
    return Span.of(layout.tp, 1, hardware.devices_per_node)


def _tensor_pair(layout: PlanLayout, hardware: Hardware, num_bytes: float) -> float:
    """Return the time of the collectives before and after a block: a gather and a scatter, or one all-reduce."""
    span = _tensor_span(layout, hardware)
    if layout.sequence_parallel:
        gather = collective_seconds(hardware, "all_gather", num_bytes, span)
        return gather + collective_seconds(hardware, "reduce_scatter", num_bytes, span)
    return collective_seconds(hardware, "all_reduce", num_bytes, span)


def _expert_collectives(shape: DecoderShape, layout: PlanLayout, hardware: Hardware, computation: float) -> float:
    """Return the exposed time of dispatch and combine in one pass.

    A token is sent once to each rank that holds one of its experts. `computation` is the time of the forward and the
    backward pass together without them, with waits for the host, in seconds.
    """
    num_bytes = layout.tokens_per_microbatch / layout.tp * shape.hidden_size * 2
    span = Span.of(layout.ep, 1, hardware.devices_per_node)
    seconds = 2 * collective_seconds(
        hardware,
        "all_to_all",
        num_bytes * _copies(shape, layout, layout.ep),
        span,
        skew=layout.routing_skew,
        network_bytes=num_bytes * _copies(shape, layout, span.num_nodes) if layout.dispatch == "nodes" else None,
    )
    if layout.overlaps_experts:
        inside = num_bytes * _copies(shape, layout, layout.ep) * (span.per_node - 1) / span.size
        share = min(1.0, 2 * layout.routing_skew * inside / link_bandwidth(hardware, span.per_node) / seconds)
        return exposed_seconds(computation, 2 * seconds, first=0.0, link_share=share) / 2
    return seconds


def _copies(shape: DecoderShape, layout: PlanLayout, places: int) -> float:
    """Return the expected number of ranks or nodes, of `places` in total, that hold an expert of a token."""
    if layout.dispatch == "rows":
        return shape.top_k
    if layout.adjacent_experts:
        return max(1.0, shape.top_k * places / shape.num_experts)
    return places * (1 - (1 - 1 / places) ** shape.top_k)


def _context_times(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, attention: tuple[float, float]
) -> tuple[float, float]:
    """Return the exposed times of collectives of context parallelism in both passes, whose attention takes `attention`.

    Both gather keys and values, and the backward pass scatters their gradients. Ring attention computes on its own keys
    and values while it gathers the others. In the backward pass, it sends fp32 gradients to the next rank after each
    part, which hides those of the part before (`_templated_ring_attention_backward` in PyTorch).
    """
    if layout.cp == 1:
        return 0.0, 0.0
    span = Span.of(layout.cp, layout.tp, hardware.devices_per_node)
    heads = shape.num_heads if layout.ring_attention else shape.num_kv_heads
    kv_bytes = layout.tokens_per_microbatch * max(1.0, heads / layout.tp) * shape.head_dim * 2 * 2
    gather = collective_seconds(hardware, "all_gather", kv_bytes * layout.cp, span)
    if not layout.ring_attention:
        return gather, 2 * gather
    share = link_share(hardware, span)
    exposed, again = (
        exposed_seconds(seconds / layout.cp, gather, first=0.0, link_share=share) for seconds in attention
    )
    send = collective_seconds(hardware, "send", 2 * kv_bytes, Span(2, 2 if span.num_nodes == 1 else 1))
    sends = exposed_seconds(attention[1] * (1 - 1 / layout.cp), layout.cp * send, first=send, link_share=share)
    return exposed, again + sends


def _ring_bytes(shape: DecoderShape, layout: PlanLayout) -> tuple[float, float]:
    """Return the bytes that operators around the parts of ring attention move in the forward and backward pass.

    In units of a tensor of queries, for each part after the first, as a mean of parts with half of the keys and of
    parts with half of the queries: concatenated keys and values (4); in the forward pass, casts to fp32 (3, 1.5), three
    operations of the sum of outputs (16, 8) and copies of the other half (0, 4); in the backward pass, sums of
    gradients of keys and values (5 and 8, 10), their concatenation (8), and the sum of gradients of queries (5, 6.5).
    The first part has casts or sums, and both passes cast the results.
    """
    unit = layout.tokens_per_microbatch * 2 * shape.num_heads * shape.head_dim / layout.tp
    parts = layout.cp - 1
    return unit * (6 + parts * (4 + (19 + 13.5) / 2)), unit * (38 + parts * (4 + (26 + 24.5) / 2))
