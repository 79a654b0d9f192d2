"""Layout of a job for the planner: degrees, microbatches, and traits of the implementation."""

from dataclasses import dataclass
from typing import Literal, final

from d9d_pipeline.schedule import StagePlacement

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["replicated", "optimizer", "gradients", "parameters"]
Captured = Literal["none", "router", "attention", "step"]
Dispatch = Literal["rows", "ranks", "nodes"]
Pointwise = Literal["eager", "fused", "compiled"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLayout:
    """Degrees of parallelism, microbatches and traits of a job.

    Global ranks have the order of `d9d_dist.MeshConfig`: tp is the fastest axis, then cp, dp and pp.

    Attributes:
        dp: Data-parallel degree, without context parallelism.
        ep: Expert-parallel degree; uses the ranks of dp x cp x tp.
        stages_per_rank: Stages of each pipeline rank (interleaving).
        placement: Ranks of stages: stage s on rank s modulo `pp` (loop), or with every second round reversed (v).
        virtual_layers: Weights of the embedding and of the head, in layers, when layers are split over stages.
        tower_layers: Cost of a vision tower in layers that no ranks split, by which a search chooses `virtual_layers`.
        microbatch_size: Samples of a microbatch of one data-parallel rank.
        num_microbatches: Microbatches of a step on each data-parallel rank.
        length: Tokens of a sample.
        recompute: Activations that the backward pass recomputes: none, the outputs of attention's core and of pointwise
            operators (selective), or whole layers (full).
        recomputes_last: True if full recomputation also repeats the last product of a dense layer and its collective,
            as Megatron-LM does; False if it ends with the last tensor that the backward pass reads, as in PyTorch.
        recompute_every: n, if only every n-th layer is recomputed.
        saved_products: Share of the matrix products whose outputs selective recomputation saves; the other products are
            recomputed.
        sharding: State that is sharded over data-parallel ranks (ZeRO 0 to 3).
        shard_ranks: Number of ranks that shard this state; `None` for all data- and context-parallel ranks.
        sequence_parallel: True if pointwise operators are split over the tensor-parallel ranks.
        flash: True if a fused kernel computes attention; False if scores are stored.
        attention_speed: Speed of the fused kernel relative to FlashAttention 2, which PyTorch calls. About 2 on H100
            and later for FlashAttention 3 and cuDNN (Shah et al. 2024, https://arxiv.org/abs/2407.08608, figure 5).
        pointwise: How pointwise operators run: as PyTorch's operators, which write intermediate results and casts
            (eager); as kernels written for norms, dropout and activation functions (fused); or fused by a compiler.
        dtype: Dtype of the products of layers: bf16, fp8 or fp4. The head computes in bf16.
        overlaps_gradients: True if the gradient reduction overlaps the backward pass.
        overlaps_tensor: True if each tensor-parallel collective overlaps its product in parts (async TP).
        groups_experts: True if one kernel multiplies all experts of a rank; False if each expert has its own.
        dispatch: Rows that experts of other ranks receive: each row of a token (rows), a token once for each rank with
            one of its experts (ranks), or also only once across the network for each node (nodes).
        ring_attention: True if context parallelism is PyTorch's (torch.distributed.tensor.experimental), which repeats
            key and value heads, gathers them again in the backward pass, and sums gradients in fp32.
        fuses_norms: True if one kernel computes a norm; False if separate operators do in fp32.
        fuses_rotary: True if one kernel rotates queries and keys; False if separate operators do in fp32.
        fuses_gate: True if one kernel computes the clamped gate of experts, as always if they are grouped.
        adjacent_experts: True if the experts of a token are consecutive, as a benchmark's router may choose them.
        routing_skew: Ratio of the rows that the busiest rank receives to the mean; 1 for a forced balance.
        captured: Operators in captured graphs, which the host does not launch: those of the router, also those of
            attention and norms, or all operators of a step.
        overlaps_experts: True if the all-to-alls of experts overlap another microbatch's computation.
        overlaps_pipeline: True if sends between stages overlap computation.
        splits_transfers: True if each tensor-parallel rank sends only a part of the activations to the next stage.
        weight_bytes: Bytes per parameter of the weights used in computation and in all-gathers.
        gradient_bytes: Bytes per parameter of gradients when they are reduced.
        kept_gradient_bytes: Bytes per parameter of gradients that are kept.
        stored_weight_bytes: Bytes per parameter of the weights that are stored.
        master_bytes: Bytes per parameter of optimizer state, including master weights unless the stored weights are the
            master weights.
        causal: True if attention kernels skip masked tiles.
        dropout: True if dropout masks are stored.
        offload: True if saved activations are moved to host memory.
        reduces_each_microbatch: True if sharded gradients are reduced in each backward pass; False if whole gradients
            are kept until the last one. See `gradients.reduce_each_microbatch` in the configuration of a job.
        copies_shards: True if FSDP copies parameters from and to buffers (FSDP2); False if they lie in them (FSDP1).
        accumulation_bytes: Bytes per parameter that each microbatch moves to add its gradients to the earlier ones,
            in addition to the products that compute them; 0 if these products accumulate in place.
        accumulates_first: True if the first microbatch also adds its gradients, to zeros, as Megatron-LM does.
        backward_collectives: Tensor-parallel collectives of a backward pass, relative to the forward pass; 1.5 if it
            gathers the sharded inputs of weight gradients again. For sequence parallelism.
        overlaps_weight_gradients: True if the backward pass's tensor-parallel collectives overlap weight gradients.
        loss_bytes: Bytes per logit of the loss: logits, their copies, and gradients.
        logit_share: Share of the tokens whose logits the head computes, such as those with labels.
        loss_chunk: Tokens of a rank whose logits exist at once, if the loss is chunked; `None` for all logits.
        casts_loss: True if the loss casts logits to fp32, unless it is compiled.
        splits_embedding: True if tensor-parallel ranks split the embedding; False if each has a whole one.
        gathers_logits: True if tensor-parallel ranks hold the logits of the whole vocabulary.
        shards_experts: True if all ranks with the same experts shard them (ZeRO 3) for any `sharding` and
            `shard_ranks`, as `d9d_dist.parallelize_experts` does; False if experts are sharded like other parameters.
        splits_shared_experts: True if tensor-parallel ranks split the shared expert; False if each has a whole one.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    stages_per_rank: int = 1
    placement: StagePlacement = "loop"
    virtual_layers: tuple[int, int] = (0, 0)
    tower_layers: float = 0.0
    microbatch_size: int = 1
    num_microbatches: int = 1
    length: int = 4096
    recompute: Recompute = "none"
    recomputes_last: bool = False
    recompute_every: int = 1
    saved_products: float = 1.0
    sharding: Sharding = "parameters"
    shard_ranks: int | None = None
    sequence_parallel: bool = True
    flash: bool = True
    attention_speed: float = 1.0
    pointwise: Pointwise = "eager"
    dtype: str = "bf16"
    overlaps_gradients: bool = True
    overlaps_tensor: bool = False
    overlaps_experts: bool = False
    groups_experts: bool = True
    dispatch: Dispatch = "ranks"
    ring_attention: bool = False
    fuses_norms: bool = True
    fuses_rotary: bool = True
    fuses_gate: bool = False
    adjacent_experts: bool = False
    routing_skew: float = 1.1
    captured: Captured = "none"
    overlaps_pipeline: bool = True
    splits_transfers: bool = True
    weight_bytes: float = 2
    gradient_bytes: float = 4
    kept_gradient_bytes: float = 4
    master_bytes: float = 8
    stored_weight_bytes: float = 4
    causal: bool = True
    dropout: bool = False
    offload: bool = False
    reduces_each_microbatch: bool = False
    copies_shards: bool = True
    accumulation_bytes: float = 0
    accumulates_first: bool = False
    backward_collectives: float = 1.5
    overlaps_weight_gradients: bool = False
    loss_bytes: float = 14
    logit_share: float = 1.0
    loss_chunk: float | None = None
    casts_loss: bool = True
    splits_embedding: bool = True
    gathers_logits: bool = False
    shards_experts: bool = True
    splits_shared_experts: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * self.stages_per_rank

    @property
    def head_rank(self) -> int:
        """Pipeline rank of the last stage."""
        return 0 if self.placement == "v" and self.stages_per_rank % 2 == 0 else self.pp - 1

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """Return the global indices of a pipeline rank's stages."""
        back = self.pp - 1 - pipeline_rank
        return [
            index * self.pp + (back if self.placement == "v" and index % 2 else pipeline_rank)
            for index in range(self.stages_per_rank)
        ]

    @property
    def tokens_per_microbatch(self) -> float:
        """Tokens of a microbatch on one rank, before tensor parallelism."""
        return self.microbatch_size * self.length / self.cp

    @property
    def logit_tokens(self) -> float:
        """Most tokens of a microbatch whose logits one rank computes: its part of a row may have all labels."""
        return min(self.tokens_per_microbatch, round(self.logit_share * self.microbatch_size * self.length))

    @property
    def global_tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return self.dp * self.microbatch_size * self.num_microbatches * self.length

    @property
    def keeps_whole_gradients(self) -> bool:
        """True if whole gradients are kept between microbatches although weights are sharded."""
        return self.num_microbatches > 1 and not self.reduces_each_microbatch

    @property
    def replicas(self) -> int:
        """Number of copies of the state of a dense parameter, over data- and context-parallel ranks."""
        return self.dp * self.cp // self.sharding_ranks

    @property
    def sharding_ranks(self) -> int:
        """Number of ranks over which the state of a dense parameter is sharded."""
        if self.sharding == "replicated":
            return 1
        return self.shard_ranks or self.dp * self.cp
