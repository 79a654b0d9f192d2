"""Peak memory of a rank, in bytes.

    state       = P (w / z3 + g / z2 + o / z1)
    activations = in-flight microbatches x layers x bytes per token x tokens
    gathered    = P w' of the parameters that stay gathered: those outside of layers, or a whole pipeline stage
    loss        = tokens V / t x (2 + 4 + 4 + 4)     logits, fp32 copy, log-softmax and gradient, on the last stage
    forward     = recomputed and gathered tensors of one layer + weights of two layers
    layer       = forward + weight gradients of a layer in the dtype of the weights and of the reduction, and the excess
                  of ring attention
    allocated   = state + activations + gathered + max(loss, layer)
    reserved    = (allocated + min(loss, forward) + buffers) x 1.03
    total       = reserved + 1.5 GiB

P: parameters of the rank. w, g, o: bytes per parameter of stored weights, gradients and optimizer state. w': bytes per
gathered weight. V: vocabulary size, h: hidden size, t: tensor-parallel degree, p: pipeline ranks, m: microbatches.

Gathered logits are whole (t = 1); at the peak, the rank's shard of them is freed, and that of their gradient not yet
allocated. With several microbatches, ZeRO-3 keeps whole gradients until the last backward pass, unless it reduces them
in each one. They have the dtype in which they are reduced (FSDP2: `FSDPParam.to_accumulated_grad_if_needed`).

Loss and layers need memory at different times. PyTorch's caching allocator keeps freed blocks, and those of the forward
pass of layers are too small for the logits, so both are reserved. FSDP2 gathers into a flat buffer of another stream,
whose blocks no other stream gets, and copies it to the weights (`foreach_all_gather` in torch/distributed/fsdp). It
gathers one layer ahead, and keeps the parameters outside of layers from the forward to the backward pass. Each pipeline
stage holds the output and the received gradient of each microbatch in flight. Blocks of more than 10 MiB are rounded up
to 2 MiB, and smaller ones share segments (c10/cuda/CUDACachingAllocator.h): 3 % covers both. 1.5 GiB are the context of
the device and the buffers of the communication library.

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
    """Peak memory of a rank by purpose, in bytes.

    Attributes:
        gathered: Whole weights that stay gathered during the step.
        loss: Logits, of one chunk if the loss is chunked, and their copies.
        forward: Tensors of one layer that exist only during its forward pass or its recomputation.
        layer: The same in its backward pass, with gradients of its weights. They do not coexist with the loss.
        buffers: Buffers of an all-gather of weights, and of transfers between stages.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    loss: float
    forward: float
    layer: float
    buffers: float

    @property
    def saved(self) -> float:
        """Bytes of the state and of activations that wait for the backward pass."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    @property
    def model(self) -> float:
        """Bytes of allocated tensors at the peak."""
        return self.saved + self.gathered + max(self.loss, self.layer)

    @property
    def cached(self) -> float:
        """Bytes of freed blocks that PyTorch's allocator cannot use for other tensors."""
        return min(self.loss, self.forward) + self.buffers

    @property
    def reserved(self) -> float:
        """Bytes that PyTorch's allocator reserves."""
        return (1 + FRAGMENTATION) * (self.model + self.cached)

    @property
    def total(self) -> float:
        """Bytes of the process on the device."""
        return self.reserved + CONTEXT_BYTES


def memory_of(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> Memory:
    """Return the peak memory of a pipeline rank."""
    groups = parameter_groups(shape, layout, pipeline_rank)

    def sharded(size: float, *, at: tuple[Sharding, ...]) -> float:
        return size * sum(each.size / (each.shards if each.sharding in at else 1) for each in groups)

    gradients = sharded(layout.kept_gradient_bytes, at=("parameters", "gradients"))
    gathered = largest = weight_gradients = 0.0
    forward = _layer_activations(shape, layout, pipeline_rank)
    for group in groups:
        if group.sharding != "parameters" or group.shards == 1:
            continue
        if layout.keeps_whole_gradients:
            gradients += group.size * (layout.gradient_bytes - layout.kept_gradient_bytes / group.shards)
        one = (group.size - group.outside) / max(sum(layers_of(shape, layout, pipeline_rank)), 1)
        gathered += (group.size if layout.pp > 1 else group.outside) * layout.weight_bytes
        forward += 0 if layout.pp > 1 else 2 * one * layout.weight_bytes
        weight_gradients += one * (layout.weight_bytes + layout.gradient_bytes)
        largest = max(largest, one, group.outside)
    has_head = pipeline_rank == layout.head_rank
    tokens = layout.logit_tokens if layout.loss_chunk is None else min(layout.logit_tokens, layout.loss_chunk)
    logits = tokens * shape.vocab_size / (1 if layout.gathers_logits else layout.tp)
    return Memory(
        parameters=sharded(layout.stored_weight_bytes, at=("parameters",)),
        gradients=gradients,
        optimizer=sharded(layout.master_bytes, at=("parameters", "gradients", "optimizer")),
        activations=_activations(shape, layout, pipeline_rank),
        gathered=gathered,
        loss=logits * layout.loss_bytes if has_head else 0.0,
        forward=forward,
        layer=forward + _ring_excess(shape, layout) + weight_gradients,
        buffers=largest * layout.weight_bytes + _transfer_buffers(shape, layout, pipeline_rank),
    )


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
        # The layer's input, attention's output, and outputs of products; a compiler omits those that only add to the
        # residual stream, because no backward pass reads them.
        products = 2 * (heads + 2 * kv_heads) * d / t + 2 * inner * (2 if shape.is_gated else 1)
        if layout.pointwise == "eager":
            products += 2 * 2 * h / thin
        return 2 * h / thin + 2 * heads * d / t + layout.saved_products * products
    return inputs + attention + wide


def _ring_excess(shape: DecoderShape, layout: PlanLayout) -> float:
    """Return the bytes that the backward pass of ring attention needs beyond the tensors of a layer.

    In units of a tensor of queries: queries, keys, values, output and its gradient (5), contiguous keys and values (2),
    their gathered copies (2 c with c ranks), the last pair that was sent (2), gradients of queries in fp32 (2), of keys
    and values as sent and as received in fp32 (c times 4 + 4), and of the kernel, with its accumulator (3 + 2). The
    allocator cannot reuse what a communication stream still reads or writes (`Tensor.record_stream`), and the host
    queues all parts before the first ends. The tensors of the feed-forward layer are free by then. The table of rotary
    embeddings of the whole sequence has 4 bytes per element of a head, and exists twice.
    """
    if not layout.ring_attention or layout.cp == 1:
        return 0.0
    t, d = layout.tp, shape.head_dim
    unit = layout.tokens_per_microbatch * 2 * shape.num_heads * d / t
    counted = 2 * (2 * shape.num_heads + 2 * shape.num_kv_heads * layout.cp) * d / t
    counted += 2 * shape.intermediate_size / t * (3 if shape.is_gated else 2)
    excess = (16 + 10 * layout.cp) * unit - layout.tokens_per_microbatch * counted
    return max(0.0, excess) + 2 * 4 * d * layout.length


def _activations(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> float:
    in_flight = _in_flight(layout, pipeline_rank)
    num_dense, num_sparse = layers_of(shape, layout, pipeline_rank)
    tokens = layout.tokens_per_microbatch
    kept = tokens * (
        num_dense * activation_bytes_per_token(shape, layout, sparse=False)
        + num_sparse * activation_bytes_per_token(shape, layout, sparse=True)
    )
    of_images = 0.0
    if shape.tower is not None and pipeline_rank == 0:
        of_images = shape.tower.saved_bytes * layout.microbatch_size / shape.tower.num_samples * in_flight
    if layout.offload:
        return of_images + min(kept * in_flight, 2 * kept / max(1.0, num_dense + num_sparse))
    return of_images + kept * in_flight


def _in_flight(layout: PlanLayout, pipeline_rank: int) -> float:
    """Return the number of microbatches whose activations a rank holds at the same time."""
    p, v, m = layout.pp, layout.stages_per_rank, layout.num_microbatches
    if layout.placement == "v":
        return min(m, p)
    factor = 1 + (p - 1) / (p * v) if v > 1 and m > p and pipeline_rank == 0 else 1.0
    return min(m, p - pipeline_rank) * factor


def _transfer_buffers(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> float:
    """Return the bytes of the outputs of stages and of the gradients that their ranks receive."""
    if layout.pp == 1:
        return 0.0
    thin = layout.tp if layout.sequence_parallel else 1
    values = layout.tokens_per_microbatch * shape.hidden_size / thin
    return 2 * 2 * values * layout.stages_per_rank * _in_flight(layout, pipeline_rank)


def _layer_activations(shape: DecoderShape, layout: PlanLayout, pipeline_rank: int) -> float:
    """Return the bytes of a layer's recomputed activations, and of tensors that are gathered over the sequence."""
    num_sparse = layers_of(shape, layout, pipeline_rank)[1]
    recomputed = _layer_bytes(shape, layout, "none", sparse=num_sparse > 0)
    if layout.recompute != "full":
        recomputed -= _layer_bytes(shape, layout, layout.recompute, sparse=num_sparse > 0)
    # Three tensors of 2 bytes per value: the inputs of attention and feed-forward, and the gradient of one of them.
    # Async TP gathers the inputs in parts.
    splits = layout.sequence_parallel and layout.tp > 1
    gathers = (1 if layout.overlaps_tensor else 3) if splits else 0
    return layout.tokens_per_microbatch * (recomputed + gathers * 2 * shape.hidden_size)
