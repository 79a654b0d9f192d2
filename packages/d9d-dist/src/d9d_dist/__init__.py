"""Distributed training for PyTorch: device meshes, collectives, parallelism and gradient reduction."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_dist.batch_norm import synchronize_batch_norm
    from d9d_dist.block_gather import gather_in_blocks
    from d9d_dist.collectives import (
        all_gather,
        all_gather_variadic,
        all_reduce_scalars,
        all_to_all,
        gather,
        gather_variadic,
        reduce_scatter,
    )
    from d9d_dist.consensus import agree, gather_json
    from d9d_dist.context import DistributedContext
    from d9d_dist.context_parallel import (
        AllGatherAttention,
        AllToAllAttention,
        Attention,
        AttentionOfHeads,
        ContextMethod,
        ContextSplit,
        DeclaresCausality,
        DeclaresStandardSdpa,
        HasAttention,
        HasContextMesh,
        RequiresFullSequence,
        RingAttention,
        context_parallel_attention,
        parallelize_context,
        sdpa_attention,
    )
    from d9d_dist.counter_random import mix_bits, random_bits_at
    from d9d_dist.data_parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate, refuse_lost_writes
    from d9d_dist.differentiable import (
        all_to_all_reshard,
        copy_to_axis,
        gather_from_axis,
        reduce_from_axis,
        reduce_scatter_to_axis,
        scatter_to_axis,
        sum_over_ranks,
    )
    from d9d_dist.embedding_rows import synchronize_embeddings, writes_to_rows
    from d9d_dist.errors import StartupTimeoutError, UserError
    from d9d_dist.expert_parallel import parallelize_experts
    from d9d_dist.follows_weight import FollowsWeight
    from d9d_dist.gathered_parameters import free_gathered, free_gathered_after_backward
    from d9d_dist.grad_dtype import grad_dtype_of, set_grad_dtype
    from d9d_dist.gradient_norm import global_grad_norm, grad_norm_parts
    from d9d_dist.gradient_sync import GradientSync, sync_gradients
    from d9d_dist.gradients import (
        clip_grad_norm_,
        defer_gradient_sync,
        finish_gradient_sync,
        scale_gradients_,
        set_gradient_sync,
    )
    from d9d_dist.late_init import ModuleLateInit, allocate, canonical_name, materialize
    from d9d_dist.launch import Launch, read_launch
    from d9d_dist.mesh import MeshConfig
    from d9d_dist.model_values import built_values, digest_values, move_to_meta, move_values, place_values
    from d9d_dist.offload import ModuleOffloader, Offloadable, Offloaded, offload_tensor, onload_tensor
    from d9d_dist.parameter_writes import refuse_later_writes, written_tensors
    from d9d_dist.planned_device import RecordBlock, each_block, is_on_host, planned_accelerator, recorded_blocks
    from d9d_dist.precision import Precision, PrecisionName
    from d9d_dist.process_groups import destroy_process_groups
    from d9d_dist.seeds import seed_everything, stream_key
    from d9d_dist.shards import (
        Region,
        copy_from_full_,
        from_local,
        full_tensor,
        indexed_blocks,
        is_first_replica,
        local_part,
        local_positions,
        local_region,
        local_tensor,
    )
    from d9d_dist.split_backward import DeferredWeightGrads, SplitBackward, WeightGradHandle, defer_weight_grad
    from d9d_dist.stage import StageInfo
    from d9d_dist.tensor_parallel import parallelize_tensor
    from d9d_dist.tensor_styles import (
        ColumnParallel,
        Replicated,
        RowParallel,
        SequenceParallel,
        TensorRegion,
        TensorStyle,
        VocabParallelEmbedding,
        VocabParallelHead,
    )
    from d9d_dist.timeouts import Timeouts
    from d9d_dist.token_ids import check_token_ids
    from d9d_dist.tree_gather import all_gather_trees
    from d9d_dist.vocab_parallel import (
        HasTokenLoss,
        HasVocabParallelForm,
        TokenLoss,
        VocabParallelCrossEntropy,
        token_cross_entropy,
    )
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "AllGatherAttention",
    "AllToAllAttention",
    "Attention",
    "AttentionOfHeads",
    "ColumnParallel",
    "ContextMethod",
    "ContextSplit",
    "DeclaresCausality",
    "DeclaresStandardSdpa",
    "DeferredWeightGrads",
    "DistributedContext",
    "FollowsWeight",
    "GradientSync",
    "HasAttention",
    "HasContextMesh",
    "HasTokenLoss",
    "HasVocabParallelForm",
    "Launch",
    "MeshConfig",
    "ModuleLateInit",
    "ModuleOffloader",
    "Offloadable",
    "Offloaded",
    "Precision",
    "PrecisionName",
    "RecordBlock",
    "Region",
    "Replicated",
    "RequiresFullSequence",
    "RingAttention",
    "RowParallel",
    "SequenceParallel",
    "SplitBackward",
    "StageInfo",
    "StartupTimeoutError",
    "TensorRegion",
    "TensorStyle",
    "Timeouts",
    "TokenLoss",
    "UserError",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "WeightGradHandle",
    "agree",
    "all_gather",
    "all_gather_trees",
    "all_gather_variadic",
    "all_reduce_scalars",
    "all_to_all",
    "all_to_all_reshard",
    "allocate",
    "built_values",
    "canonical_name",
    "check_token_ids",
    "clip_grad_norm_",
    "context_parallel_attention",
    "copy_from_full_",
    "copy_to_axis",
    "defer_gradient_sync",
    "defer_weight_grad",
    "destroy_process_groups",
    "digest_values",
    "each_block",
    "finish_gradient_sync",
    "free_gathered",
    "free_gathered_after_backward",
    "from_local",
    "full_tensor",
    "gather",
    "gather_from_axis",
    "gather_in_blocks",
    "gather_json",
    "gather_variadic",
    "global_grad_norm",
    "grad_dtype_of",
    "grad_norm_parts",
    "indexed_blocks",
    "is_first_replica",
    "is_on_host",
    "local_part",
    "local_positions",
    "local_region",
    "local_tensor",
    "materialize",
    "mix_bits",
    "move_to_meta",
    "move_values",
    "offload_tensor",
    "onload_tensor",
    "parallelize_context",
    "parallelize_experts",
    "parallelize_fsdp",
    "parallelize_hsdp",
    "parallelize_replicate",
    "parallelize_tensor",
    "place_values",
    "planned_accelerator",
    "random_bits_at",
    "read_launch",
    "recorded_blocks",
    "reduce_from_axis",
    "reduce_scatter",
    "reduce_scatter_to_axis",
    "refuse_later_writes",
    "refuse_lost_writes",
    "scale_gradients_",
    "scatter_to_axis",
    "sdpa_attention",
    "seed_everything",
    "set_grad_dtype",
    "set_gradient_sync",
    "stream_key",
    "sum_over_ranks",
    "sync_gradients",
    "synchronize_batch_norm",
    "synchronize_embeddings",
    "token_cross_entropy",
    "writes_to_rows",
    "written_tensors",
]
