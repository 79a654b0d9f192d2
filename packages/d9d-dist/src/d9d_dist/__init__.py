"""Distributed training for PyTorch: device meshes, collectives, parallelism and gradient reduction."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_dist.batch_norm import synchronize_batch_norm as synchronize_batch_norm
    from d9d_dist.block_gather import gather_in_blocks as gather_in_blocks
    from d9d_dist.collectives import (
        all_gather as all_gather,
        all_gather_variadic as all_gather_variadic,
        all_reduce_scalars as all_reduce_scalars,
        all_to_all as all_to_all,
        gather as gather,
        gather_variadic as gather_variadic,
        reduce_scatter as reduce_scatter,
    )
    from d9d_dist.consensus import agree as agree, gather_json as gather_json
    from d9d_dist.context import DistributedContext as DistributedContext
    from d9d_dist.context_parallel import (
        AllGatherAttention as AllGatherAttention,
        AllToAllAttention as AllToAllAttention,
        Attention as Attention,
        AttentionOfHeads as AttentionOfHeads,
        ContextMethod as ContextMethod,
        ContextSplit as ContextSplit,
        DeclaresCausality as DeclaresCausality,
        DeclaresStandardSdpa as DeclaresStandardSdpa,
        HasAttention as HasAttention,
        HasContextMesh as HasContextMesh,
        RequiresFullSequence as RequiresFullSequence,
        RingAttention as RingAttention,
        context_parallel_attention as context_parallel_attention,
        parallelize_context as parallelize_context,
        sdpa_attention as sdpa_attention,
    )
    from d9d_dist.counter_random import mix_bits as mix_bits, random_bits_at as random_bits_at
    from d9d_dist.data_parallel import (
        parallelize_fsdp as parallelize_fsdp,
        parallelize_hsdp as parallelize_hsdp,
        parallelize_replicate as parallelize_replicate,
        refuse_lost_writes as refuse_lost_writes,
    )
    from d9d_dist.differentiable import (
        all_to_all_reshard as all_to_all_reshard,
        copy_to_axis as copy_to_axis,
        gather_from_axis as gather_from_axis,
        reduce_from_axis as reduce_from_axis,
        reduce_scatter_to_axis as reduce_scatter_to_axis,
        scatter_to_axis as scatter_to_axis,
        sum_over_ranks as sum_over_ranks,
    )
    from d9d_dist.embedding_rows import (
        synchronize_embeddings as synchronize_embeddings,
        writes_to_rows as writes_to_rows,
    )
    from d9d_dist.errors import StartupTimeoutError as StartupTimeoutError, UserError as UserError
    from d9d_dist.expert_parallel import parallelize_experts as parallelize_experts
    from d9d_dist.follows_weight import FollowsWeight as FollowsWeight
    from d9d_dist.gathered_parameters import (
        free_gathered as free_gathered,
        free_gathered_after_backward as free_gathered_after_backward,
    )
    from d9d_dist.grad_dtype import grad_dtype_of as grad_dtype_of, set_grad_dtype as set_grad_dtype
    from d9d_dist.gradient_norm import global_grad_norm as global_grad_norm, grad_norm_parts as grad_norm_parts
    from d9d_dist.gradient_sync import GradientSync as GradientSync, sync_gradients as sync_gradients
    from d9d_dist.gradients import (
        clip_grad_norm_ as clip_grad_norm_,
        defer_gradient_sync as defer_gradient_sync,
        finish_gradient_sync as finish_gradient_sync,
        scale_gradients_ as scale_gradients_,
        set_gradient_sync as set_gradient_sync,
    )
    from d9d_dist.late_init import (
        ModuleLateInit as ModuleLateInit,
        allocate as allocate,
        canonical_name as canonical_name,
        materialize as materialize,
    )
    from d9d_dist.launch import Launch as Launch, read_launch as read_launch
    from d9d_dist.mesh import MeshConfig as MeshConfig
    from d9d_dist.model_values import (
        built_values as built_values,
        digest_values as digest_values,
        move_to_meta as move_to_meta,
        move_values as move_values,
        place_values as place_values,
    )
    from d9d_dist.offload import (
        ModuleOffloader as ModuleOffloader,
        Offloadable as Offloadable,
        Offloaded as Offloaded,
        offload_tensor as offload_tensor,
        onload_tensor as onload_tensor,
    )
    from d9d_dist.parameter_writes import refuse_later_writes, written_tensors as written_tensors
    from d9d_dist.planned_device import (
        RecordBlock as RecordBlock,
        each_block as each_block,
        is_on_host as is_on_host,
        planned_accelerator as planned_accelerator,
        recorded_blocks as recorded_blocks,
    )
    from d9d_dist.precision import Precision as Precision, PrecisionName as PrecisionName
    from d9d_dist.process_groups import destroy_process_groups as destroy_process_groups
    from d9d_dist.seeds import seed_everything as seed_everything, stream_key as stream_key
    from d9d_dist.shards import (
        Region as Region,
        copy_from_full_ as copy_from_full_,
        from_local as from_local,
        full_tensor as full_tensor,
        indexed_blocks as indexed_blocks,
        is_first_replica as is_first_replica,
        local_part as local_part,
        local_positions as local_positions,
        local_region as local_region,
        local_tensor as local_tensor,
    )
    from d9d_dist.split_backward import (
        DeferredWeightGrads as DeferredWeightGrads,
        SplitBackward as SplitBackward,
        WeightGradHandle as WeightGradHandle,
        defer_weight_grad as defer_weight_grad,
    )
    from d9d_dist.stage import StageInfo as StageInfo
    from d9d_dist.tensor_parallel import parallelize_tensor as parallelize_tensor
    from d9d_dist.tensor_styles import (
        ColumnParallel as ColumnParallel,
        Replicated as Replicated,
        RowParallel as RowParallel,
        SequenceParallel as SequenceParallel,
        TensorRegion as TensorRegion,
        TensorStyle as TensorStyle,
        VocabParallelEmbedding as VocabParallelEmbedding,
        VocabParallelHead as VocabParallelHead,
    )
    from d9d_dist.timeouts import Timeouts as Timeouts
    from d9d_dist.token_ids import check_token_ids as check_token_ids
    from d9d_dist.tree_gather import all_gather_trees as all_gather_trees
    from d9d_dist.vocab_parallel import (
        HasTokenLoss as HasTokenLoss,
        HasVocabParallelForm as HasVocabParallelForm,
        TokenLoss as TokenLoss,
        VocabParallelCrossEntropy as VocabParallelCrossEntropy,
        token_cross_entropy as token_cross_entropy,
    )
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "refuse_later_writes",
]
