"""Peak memory of a rank, in bytes.

    state       = P (w / z3 + g / z2 + o / z1) + P_gathered w'
    activations = in-flight microbatches x layers x bytes per token x tokens + one recomputed layer
    loss        = tokens V / t x (2 + 4 + 4 + 4)     logits, fp32 copy, log-softmax and gradient, on the last stage
    reserve     = 1.5 GiB (context, communication buffers) + 3 % of the rest (fragmentation)

P: parameters of the rank. w, g, o: bytes per parameter of stored weights, gradients and optimizer state. P_gathered:
parameters that are gathered at the same time, w': bytes per gathered weight. V: vocabulary size, h: hidden size, t:
tensor-parallel degree, p: pipeline ranks, m: microbatches.

Gathered logits are whole (t = 1); the rank's shard of the logits and of their gradient comes on top. With several
microbatches, ZeRO-3 keeps whole gradients until the last backward pass, unless it reduces them in each one.

z: number of ranks that shard a term (ZeRO: Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054, section 5). Bytes
per token of a layer: Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), table 2: 34 h of a GPT with dropout,
generalized to grouped queries, gated layers and experts; fused attention stores no scores. In flight on pipeline
rank r: min(m, p - r) microbatches with 1F1B, and on the first rank, with v stages per rank, 1 + (p - 1) / (p v) times
as much (Narayanan et al. 2021, section 2.2.2). With V-shaped placement, min(m, p) on each rank, as in zero-bubble V;
DualPipeV has one stage's activations more.
"""

from dataclasses import dataclass
from typing import final

from d9d_loop.planning.decoder_shape import DecoderShape
from d9d_loop.planning.plan_layout import PlanLayout, Recompute, Sharding
from d9d_loop.planning.step_model import layers_of, parameter_groups

CONTEXT_BYTES = 1.5 * 2**30
FRAGMENTATION = 0.03


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak memory of a rank by purpose, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    loss: float
    reserve: float

    @property
    def model(self) -> float:
        """Bytes without the reserve."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.gathered + self.loss

    @property
    def total(self) -> float:
        """Bytes of the process on the device."""
        return self.model + self.reserve


def reserve_bytes(model: float) -> float:
    """Estimate the bytes of device context, communication buffers and fragmentation; `model` is `Memory.model`."""
    return CONTEXT_BYTES + FRAGMENTATION * model


def memory_of(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> Memory:
    """Return the peak memory of a pipeline rank."""
    groups = parameter_groups(shape, layout, pipeline_rank)

    def sharded(size: float, *, at: tuple[Sharding, ...]) -> float:
        return size * sum(each.size / (each.shards if each.sharding in at else 1) for each in groups)

    parameters = sharded(layout.stored_weight_bytes, at=("parameters",))
    gradients = sharded(layout.kept_gradient_bytes, at=("parameters", "gradients"))
    optimizer = sharded(layout.master_bytes, at=("parameters", "gradients", "optimizer"))
    gathered = 0.0
    for group in groups:
        if group.sharding != "parameters" or group.shards == 1:
            continue
        if layout.keeps_whole_gradients:
            gradients += group.size * (layout.gradient_bytes - layout.kept_gradient_bytes / group.shards)
        # Two layers at a time with their fp32 gradient; a pipeline stage keeps its gathered weights during the step.
        layer = group.size / max(sum(layers_of(shape, layout, pipeline_rank)), 1)
        gathered += (group.size if layout.pp > 1 else 2 * layer) * layout.weight_bytes + layer * 4
    has_head = pipeline_rank == layout.head_rank
    loss = layout.tokens_per_microbatch * shape.vocab_size * _loss_bytes(layout) if has_head else 0.0
    activations = _activations(shape, layout, pipeline_rank)
    subtotal = parameters + gradients + optimizer + gathered + loss + activations
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        gathered=gathered,
        loss=loss,
        reserve=reserve_bytes(subtotal),
    )


def _loss_bytes(layout: PlanLayout) -> float:
    """Return the bytes of the loss per token and vocabulary entry."""
    if layout.gathers_logits and layout.tp > 1:
        return layout.loss_bytes + 2 * 2 / layout.tp
    return layout.loss_bytes / layout.tp


def activation_bytes_per_token(shape: DecoderShape, layout: PlanLayout, *, sparse: bool) -> float:
    """Return the mean bytes that a layer saves for its backward pass per token of a rank, with 2-byte values."""
    kept = _layer_bytes(shape, layout, layout.recompute, sparse=sparse)
    if layout.recompute_every == 1:
        return kept
    whole = _layer_bytes(shape, layout, "none", sparse=sparse)
    return whole + (kept - whole) / layout.recompute_every


def _layer_bytes(shape: DecoderShape, layout: PlanLayout, recompute: Recompute, *, sparse: bool) -> float:
    """Return the saved bytes of a layer per token of a rank, for a kind of recomputation."""
    t, h = layout.tp, shape.hidden_size
    thin = t if layout.sequence_parallel else 1
    if recompute == "full":
        return 2 * h / thin
    heads, kv_heads, d = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if shape.latent is not None:
        heads, kv_heads, d = shape.num_heads, shape.num_heads, (shape.head_dim + shape.latent[2] + shape.latent[3]) // 2
    inputs = 2 * 2 * h / thin + 2 * 2 * h / thin + (2 * h / thin if layout.dropout else 0)
    # Context parallelism gathers keys and values of the whole sequence, which attention's backward pass reads.
    attention = 2 * (2 * heads + 2 * kv_heads * layout.cp) * d / t
    if not layout.flash and recompute == "none":
        attention += 5 * shape.num_heads * layout.length / t
    inner = shape.intermediate_size / t
    if sparse:
        inner = (shape.shared_size + shape.top_k * shape.expert_size) / t
        attention += 2 * shape.top_k * h / t
    wide = 2 * inner * (3 if shape.is_gated else 2)
    if layout.flash and recompute == "selective":
        wide = 2 * inner * (2 if shape.is_gated else 1) * layout.saved_products
        attention *= (1 + layout.saved_products) / 2  # about half of it is the output of attention's kernel
        inputs *= 0.75 * (1 + layout.saved_products) / 2  # norms are computed again
    return inputs + attention + wide


def _activations(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> float:
    p, v, m = layout.pp, layout.stages_per_rank, layout.num_microbatches
    if layout.placement == "v":
        in_flight, factor = min(m, p), 1.0
    else:
        in_flight = min(m, p - pipeline_rank)
        factor = 1 + (p - 1) / (p * v) if v > 1 and m > p and pipeline_rank == 0 else 1.0
    num_dense, num_sparse = layers_of(shape, layout, pipeline_rank)
    tokens = layout.tokens_per_microbatch
    kept = tokens * (
        num_dense * activation_bytes_per_token(shape, layout, sparse=False)
        + num_sparse * activation_bytes_per_token(shape, layout, sparse=True)
    )
    total = kept * in_flight * factor
    if layout.offload:
        total = min(total, 2 * kept / max(1.0, num_dense + num_sparse))
    if layout.recompute == "full":
        total += tokens * _layer_bytes(shape, layout, "none", sparse=num_sparse > 0)
        if layout.sequence_parallel and layout.tp > 1:
            # Three tensors gathered over the sequence, 2 bytes per value: the inputs of attention and feed-forward, and
            # the gradient of one of these inputs.
            total += 3 * tokens * 2 * shape.hidden_size
    return total
