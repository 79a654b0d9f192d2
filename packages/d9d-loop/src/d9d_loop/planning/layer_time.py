"""Time of one layer, the embedding and the head for one microbatch on one rank, forward and backward, in s.

    forward  = sum of kernels(tokens / cp, widths / tp) + tensor-parallel and expert collectives
    backward = the products of input and weight gradients + pointwise kernels + the same collectives
    recompute = full: forward again; selective: attention's core and activation function again

Tensor parallelism: two all-reduces of b s h per pass (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), or with
sequence parallelism an all-gather and a reduce-scatter each (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
Bytes of fused pointwise kernels: counted per kernel below, in elements of 2 bytes, read and written once each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from d9d_loop.planning.collective_time import Span, collective_seconds
from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.kernel_time import attention_seconds, matmul_seconds, pointwise_seconds
from d9d_loop.planning.overlap import CONTENTION, exposed_seconds
from d9d_loop.planning.plan_layout import PlanLayout, Pointwise

# Operators that the host launches: a layer's forward, and its backward (autograd's own overhead is in host_seconds).
FORWARD_OPERATORS = 26
BACKWARD_OPERATORS = 50
SPARSE_OPERATORS = 30
LOOP_OPERATORS = 60  # of counting and splitting tokens for experts with a product each
COLLECTIVE_OPERATORS = 3  # of a tensor-parallel collective: checks, events and waits of its process group

Product = tuple[float, float, float, float]
"""Sizes m, n and k of a product of m x k and k x n matrices, and the number of such products."""

POINTWISE_TRAFFIC: dict[Pointwise, float] = {"eager": 2.0, "fused": 1.0, "compiled": 0.6}
"""Bytes of a layer's pointwise operators over those of one kernel for each norm, addition and activation function."""


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of a pass by kind of kernel and collective, and the number of launched operators."""

    matmul: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    operators: float = 0.0

    @property
    def device(self) -> float:
        """Seconds of the device's kernels and exposed collectives."""
        return self.matmul + self.attention + self.pointwise + self.tensor + self.expert + self.context

    def __add__(self, other: "PassTime") -> "PassTime":
        return PassTime(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def times(self, factor: float) -> "PassTime":
        """Return a multiple."""
        return PassTime(*(getattr(self, name) * factor for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Times of a layer: forward, backward, and what the backward pass computes again, as a mean over layers."""

    forward: PassTime
    backward: PassTime
    recompute: PassTime


def layer_time(shape: DecoderShape, layout: PlanLayout, hardware: Hardware, *, sparse: bool) -> LayerTime:
    """Return the times of a dense or sparse layer for one microbatch."""
    t, h = layout.tp, shape.hidden_size
    tokens = layout.tokens_per_microbatch
    heads, kv_heads, d = shape.num_heads / t, max(1.0, shape.num_kv_heads / t), shape.head_dim
    inner = (shape.shared_size if sparse else shape.intermediate_size) / t
    products = _attention_products(shape, tokens, heads, kv_heads)
    if sparse:
        products.append((tokens, shape.num_experts, h, 1))
    if inner:
        products += [(tokens, inner, h, 1)] * (2 if shape.is_gated else 1) + [(tokens, h, inner, 1)]
    routed = _routed_products(shape, layout, tokens) if sparse else []
    launched = _loop_operators(shape, layout) if sparse else 0.0
    forward_matmul, backward_matmul = _matmul_times(hardware, layout, products, routed)
    attention_forward, attention_backward, core_bytes = _attention(shape, layout, hardware, heads, d)
    split = t if layout.sequence_parallel else 1
    # Elements of 2 bytes: two norms (read, write), two residual additions (read 2, write 1, and a mask of dropout),
    # rotary or bias of queries, keys and values (read, write).
    thin = tokens * h / split * 2
    wide = tokens * (heads + 2 * kv_heads) * d * 2
    rows = tokens * shape.top_k / (t if layout.ep > 1 else 1) if sparse else 0.0
    experts_wide = rows * 2 * (2 * h + 3 * shape.expert_size)
    fusion = POINTWISE_TRAFFIC[layout.pointwise]
    norms_and_residuals = thin * (2 * 2 + 2 * (3.5 if layout.dropout else 3))
    activation = tokens * inner * 2 * (3 if shape.is_gated else 2)
    moved = fusion * (norms_and_residuals + 2 * wide + activation + experts_wide) + core_bytes
    # Backward: norms read two and write one, additions pass gradients on, dropout reads and writes; activation
    # functions and softmax read a value more than in the forward pass.
    moved_backward = fusion * (norms_and_residuals + 2 * wide + 1.5 * (activation + experts_wide)) + 1.5 * core_bytes
    if layout.dtype != "bf16":
        # Quantization reads inputs of products, in the backward pass their output gradients, and writes them by rows
        # and by columns.
        inputs = tokens * (h + heads * d) + (tokens * (h + inner) if inner else 0) + rows * (h + shape.expert_size)
        outputs = sum(m * n * b for m, n, _, b in (*products, *routed))
        moved += 4 * inputs * fusion
        moved_backward += 4 * outputs * fusion
    num_kernels = 8 + (8 if sparse else 0) + (0 if layout.flash else 2)
    pointwise = pointwise_seconds(hardware, moved, num_kernels=num_kernels)
    pointwise_backward = pointwise_seconds(hardware, moved_backward, num_kernels=2 * num_kernels)
    whole = _tensor_collectives(layout, hardware, tokens * h * 2)
    # Sequence parallelism gathers the inputs of weight gradients once more.
    gathers = layout.sequence_parallel and t > 1
    tensor, backward_tensor = whole, whole * (1.5 if gathers else 1.0)
    if layout.overlaps_tensor:
        # A collective runs in parts beside the parts of its product; the first part waits.
        tensor = exposed_seconds(forward_matmul, tensor, first=tensor / t, contends=True)
        backward_tensor = exposed_seconds(backward_matmul, backward_tensor, first=backward_tensor / t, contends=True)
    elif layout.overlaps_weight_gradients:
        # Column-parallel products, whose inputs have the hidden size, hide their collectives in the backward pass. The
        # gather of a row-parallel product's gradient hides behind nothing.
        hidden = sum(_product(hardware, layout, k, n, m, batch=b) for m, n, k, b in products if k == h)
        bare = whole / 2 if gathers else 0.0
        backward_tensor = bare + max(0.0, backward_tensor - bare - hidden)
    expert = _expert_collectives(shape, layout, hardware, tokens * h * 2 / split) if sparse else 0.0
    context = _context_collectives(layout, hardware, tokens * kv_heads * d * 2 * 2)
    extra = (SPARSE_OPERATORS if sparse else 0) + (2 * COLLECTIVE_OPERATORS if t > 1 else 0)
    operators = FORWARD_OPERATORS + extra + launched
    forward = PassTime(forward_matmul, attention_forward, pointwise, tensor, expert, context, operators)
    backward = PassTime(
        backward_matmul,
        attention_backward,
        pointwise_backward,
        backward_tensor,
        expert,
        2 * context,
        BACKWARD_OPERATORS + extra + (SPARSE_OPERATORS if sparse else 0) + 2 * launched,
    )
    again = _recomputation(layout, hardware, forward, core_bytes, activation)
    return LayerTime(forward, backward, again.times(1 / layout.recompute_every))


def _matmul_times(
    hardware: Hardware, layout: PlanLayout, products: Sequence[Product], routed: Sequence[Product]
) -> tuple[float, float]:
    """Return the times of products in the forward and in the backward pass; `routed` are those of experts."""
    times = [(m, n, k, b, 1.0) for m, n, k, b in products]
    times += [(m, n, k, b, 1.0) if layout.groups_experts else (m, n, k, 1, b) for m, n, k, b in routed]
    forward = sum(count * _product(hardware, layout, m, n, k, batch=b) for m, n, k, b, count in times)
    backward = sum(
        count * (_product(hardware, layout, m, k, n, batch=b) + _product(hardware, layout, k, n, m, batch=b))
        for m, n, k, b, count in times
    )
    return forward, backward


def _loop_operators(shape: DecoderShape, layout: PlanLayout) -> float:
    """Return the operators that a loop over experts adds to a forward pass.

    Gate and up projections are one product; quantization adds a kernel for each input.
    """
    if layout.groups_experts:
        return 0.0
    return LOOP_OPERATORS + shape.num_experts / layout.ep * 2 * (1 if layout.dtype == "bf16" else 2)


def _routed_products(shape: DecoderShape, layout: PlanLayout, tokens: float) -> list[Product]:
    """Return the products of a rank's experts, with balanced routing."""
    t, h = layout.tp, shape.hidden_size
    local = shape.num_experts / layout.ep
    rows = tokens * shape.top_k / (t if layout.ep > 1 or t == 1 else 1)
    per_expert = max(1.0, rows * layout.ep / shape.num_experts) if layout.ep > 1 else rows / shape.num_experts
    experts = shape.expert_size if layout.ep > 1 or t == 1 else shape.expert_size / t
    return [(per_expert, experts, h, local)] * 2 + [(per_expert, h, experts, local)]


def _recomputation(
    layout: PlanLayout, hardware: Hardware, forward: PassTime, core_bytes: float, activation: float
) -> PassTime:
    """Return what runs again: the whole forward; or attention's core, the activation function and some products."""
    if layout.recompute == "full":
        return forward
    if layout.recompute == "none":
        return PassTime()
    return PassTime(
        matmul=(1 - layout.saved_products) * forward.matmul,
        attention=0.0 if layout.flash else forward.attention,
        pointwise=pointwise_seconds(hardware, core_bytes + (activation if layout.flash else 0)),
        operators=6,
    )


def embedding_time(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> PassTime:
    """Return the time of the embedding, forward and backward together."""
    moved = layout.tokens_per_microbatch * shape.hidden_size * 2
    collective = 0.0
    if layout.tp > 1:
        collective = collective_seconds(hardware, "all_reduce", moved, _tensor_span(layout, hardware))
    return PassTime(pointwise=pointwise_seconds(hardware, 8 * moved, num_kernels=6), tensor=collective, operators=12)


def head_time(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> tuple[PassTime, PassTime]:
    """Return the times of norm, head and cross entropy, forward and backward. Logits are read and written in fp32."""
    tokens, vocab = layout.tokens_per_microbatch, ceil(shape.vocab_size / layout.tp)
    h = shape.hidden_size
    forward = matmul_seconds(hardware, tokens, vocab, h)
    backward = matmul_seconds(hardware, tokens, h, vocab) + matmul_seconds(hardware, h, vocab, tokens)
    logits = pointwise_seconds(hardware, tokens * vocab * (2 + 4 + 4 + 4), num_kernels=8)
    gradient = pointwise_seconds(hardware, tokens * vocab * (4 + 4 + 2), num_kernels=4)
    collective = _tensor_collectives(layout, hardware, tokens * h * 2) / 2
    return (
        PassTime(forward, 0.0, logits, collective, operators=20),
        PassTime(backward, 0.0, gradient, collective, operators=20),
    )


def _product(hardware: Hardware, layout: PlanLayout, m: float, n: float, k: float, *, batch: float = 1) -> float:
    return matmul_seconds(hardware, m, n, k, batch=batch, dtype=layout.dtype)


def _attention_products(shape: DecoderShape, tokens: float, heads: float, kv_heads: float) -> list[Product]:
    h, d = shape.hidden_size, shape.head_dim
    if shape.latent is None:
        return [(tokens, (heads + 2 * kv_heads) * d, h, 1), (tokens, h, heads * d, 1)]
    q, kv, rope, value = shape.latent
    return [
        (tokens, q + kv + rope, h, 1),
        (tokens, heads * (d + rope), q, 1),
        (tokens, heads * (d + value), kv, 1),
        (tokens, h, heads * value, 1),
    ]


def _attention(
    shape: DecoderShape, layout: PlanLayout, hardware: Hardware, heads: float, d: int
) -> tuple[float, float, float]:
    """Return the times of attention's core, forward and backward, and its pointwise bytes beyond fused kernels."""
    b, s = layout.microbatch_size, layout.length
    queries = s / layout.cp
    qk = d if shape.latent is None else d + shape.latent[2]
    pv = d if shape.latent is None else shape.latent[3]
    if not layout.flash:
        batch = b * heads
        forward = matmul_seconds(hardware, queries, s, qk, batch=batch) + matmul_seconds(
            hardware, queries, pv, s, batch=batch
        )
        # Scores: scale, mask and softmax (read, write), dropout (read, write, a mask of one byte).
        return forward, 2 * forward, batch * queries * s * (2 * 2 + (2 * 2 + 1 if layout.dropout else 0))
    flops = 2 * b * heads * queries * s * (qk + pv) * (0.5 if layout.causal else 1.0)
    tiles = b * heads * ceil(queries / 128)
    times = (
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
    forward, backward = times
    return forward, backward, 0.0


def _tensor_span(layout: PlanLayout, hardware: Hardware) -> Span:
    return Span.of(layout.tp, 1, hardware.devices_per_node)


def _tensor_collectives(layout: PlanLayout, hardware: Hardware, num_bytes: float) -> float:
    """Return the exposed time of a layer's tensor-parallel collectives in one pass."""
    if layout.tp == 1:
        return 0.0
    span = _tensor_span(layout, hardware)
    if layout.sequence_parallel:
        pair = collective_seconds(hardware, "all_gather", num_bytes, span)
        pair += collective_seconds(hardware, "reduce_scatter", num_bytes, span)
    else:
        pair = collective_seconds(hardware, "all_reduce", num_bytes, span)
    return 2 * pair


def _expert_collectives(shape: DecoderShape, layout: PlanLayout, hardware: Hardware, num_bytes: float) -> float:
    """Return the time of dispatch and combine: a row for each token and rank that holds one of its experts."""
    if layout.ep == 1:
        return 0.0
    span = Span.of(layout.ep, 1, hardware.devices_per_node)
    seconds = 2 * collective_seconds(
        hardware,
        "all_to_all",
        num_bytes * _copies(shape, layout, layout.ep),
        span,
        skew=1.1,
        network_bytes=num_bytes * _copies(shape, layout, span.num_nodes) if layout.deduplicates_nodes else None,
    )
    return CONTENTION * seconds if layout.overlaps_experts else seconds


def _copies(shape: DecoderShape, layout: PlanLayout, places: int) -> float:
    """Return the expected number of places, ranks or nodes, that hold an expert of a token."""
    if layout.adjacent_experts:
        return max(1.0, shape.top_k * places / shape.num_experts)
    return places * (1 - (1 - 1 / places) ** shape.top_k)


def _context_collectives(layout: PlanLayout, hardware: Hardware, num_bytes: float) -> float:
    """Return the exposed time of the all-gather of keys and values."""
    if layout.cp == 1:
        return 0.0
    span = Span.of(layout.cp, layout.tp, hardware.devices_per_node)
    return collective_seconds(hardware, "all_gather", num_bytes * layout.cp, span)
