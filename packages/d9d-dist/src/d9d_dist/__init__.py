"""Distributed training for PyTorch: device meshes, collectives, parallelism and gradient reduction."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_dist.batch_norm import synchronize_batch_norm as synchronize_batch_norm
    from d9d_dist.block_gather import gather_in_blocks as gather_in_blocks
    from d9d_dist.collectives import all_gather as all_gather
    from d9d_dist.collectives import all_gather_variadic as all_gather_variadic
    from d9d_dist.collectives import all_reduce_scalars as all_reduce_scalars
    from d9d_dist.collectives import all_to_all as all_to_all
    from d9d_dist.collectives import gather as gather
    from d9d_dist.collectives import gather_variadic as gather_variadic
    from d9d_dist.collectives import reduce_scatter as reduce_scatter
    from d9d_dist.consensus import agree as agree
    from d9d_dist.consensus import gather_json as gather_json
    from d9d_dist.context import DistributedContext as DistributedContext
    from d9d_dist.context_parallel import AllGatherAttention as AllGatherAttention
    from d9d_dist.context_parallel import AllToAllAttention as AllToAllAttention
    from d9d_dist.context_parallel import Attention as Attention
    from d9d_dist.context_parallel import AttentionOfHeads as AttentionOfHeads
    from d9d_dist.context_parallel import ContextMethod as ContextMethod
    from d9d_dist.context_parallel import ContextSplit as ContextSplit
    from d9d_dist.context_parallel import DeclaresCausality as DeclaresCausality
    from d9d_dist.context_parallel import DeclaresStandardSdpa as DeclaresStandardSdpa
    from d9d_dist.context_parallel import HasAttention as HasAttention
    from d9d_dist.context_parallel import HasContextMesh as HasContextMesh
    from d9d_dist.context_parallel import RequiresFullSequence as RequiresFullSequence
    from d9d_dist.context_parallel import RingAttention as RingAttention
    from d9d_dist.context_parallel import context_parallel_attention as context_parallel_attention
    from d9d_dist.context_parallel import parallelize_context as parallelize_context
    from d9d_dist.context_parallel import sdpa_attention as sdpa_attention
    from d9d_dist.counter_random import mix_bits as mix_bits
    from d9d_dist.counter_random import random_bits_at as random_bits_at
    from d9d_dist.data_parallel import parallelize_fsdp as parallelize_fsdp
    from d9d_dist.data_parallel import parallelize_hsdp as parallelize_hsdp
    from d9d_dist.data_parallel import parallelize_replicate as parallelize_replicate
    from d9d_dist.data_parallel import refuse_lost_writes as refuse_lost_writes
    from d9d_dist.differentiable import all_to_all_reshard as all_to_all_reshard
    from d9d_dist.differentiable import copy_to_axis as copy_to_axis
    from d9d_dist.differentiable import gather_from_axis as gather_from_axis
    from d9d_dist.differentiable import reduce_from_axis as reduce_from_axis
    from d9d_dist.differentiable import reduce_scatter_to_axis as reduce_scatter_to_axis
    from d9d_dist.differentiable import scatter_to_axis as scatter_to_axis
    from d9d_dist.differentiable import sum_over_ranks as sum_over_ranks
    from d9d_dist.embedding_rows import synchronize_embeddings as synchronize_embeddings
    from d9d_dist.embedding_rows import writes_to_rows as writes_to_rows
    from d9d_dist.errors import StartupTimeoutError as StartupTimeoutError
    from d9d_dist.errors import UserError as UserError
    from d9d_dist.expert_parallel import parallelize_experts as parallelize_experts
    from d9d_dist.follows_weight import FollowsWeight as FollowsWeight
    from d9d_dist.gathered_parameters import free_gathered as free_gathered
    from d9d_dist.gathered_parameters import free_gathered_after_backward as free_gathered_after_backward
    from d9d_dist.grad_dtype import grad_dtype_of as grad_dtype_of
    from d9d_dist.grad_dtype import set_grad_dtype as set_grad_dtype
    from d9d_dist.gradient_norm import global_grad_norm as global_grad_norm
    from d9d_dist.gradient_norm import grad_norm_parts as grad_norm_parts
    from d9d_dist.gradient_sync import GradientSync as GradientSync
    from d9d_dist.gradient_sync import sync_gradients as sync_gradients
    from d9d_dist.gradients import clip_grad_norm_ as clip_grad_norm_
    from d9d_dist.gradients import defer_gradient_sync as defer_gradient_sync
    from d9d_dist.gradients import finish_gradient_sync as finish_gradient_sync
    from d9d_dist.gradients import scale_gradients_ as scale_gradients_
    from d9d_dist.gradients import set_gradient_sync as set_gradient_sync
    from d9d_dist.late_init import ModuleLateInit as ModuleLateInit
    from d9d_dist.late_init import allocate as allocate
    from d9d_dist.late_init import canonical_name as canonical_name
    from d9d_dist.late_init import materialize as materialize
    from d9d_dist.launch import Launch as Launch
    from d9d_dist.launch import read_launch as read_launch
    from d9d_dist.mesh import MeshConfig as MeshConfig
    from d9d_dist.model_values import built_values as built_values
    from d9d_dist.model_values import digest_values as digest_values
    from d9d_dist.model_values import move_to_meta as move_to_meta
    from d9d_dist.model_values import move_values as move_values
    from d9d_dist.model_values import place_values as place_values
    from d9d_dist.offload import ModuleOffloader as ModuleOffloader
    from d9d_dist.offload import Offloadable as Offloadable
    from d9d_dist.offload import Offloaded as Offloaded
    from d9d_dist.offload import offload_tensor as offload_tensor
    from d9d_dist.offload import onload_tensor as onload_tensor
    from d9d_dist.parameter_writes import refuse_later_writes as refuse_later_writes
    from d9d_dist.parameter_writes import written_tensors as written_tensors
    from d9d_dist.planned_device import RecordBlock as RecordBlock
    from d9d_dist.planned_device import each_block as each_block
    from d9d_dist.planned_device import is_on_host as is_on_host
    from d9d_dist.planned_device import planned_accelerator as planned_accelerator
    from d9d_dist.planned_device import recorded_blocks as recorded_blocks
    from d9d_dist.precision import Precision as Precision
    from d9d_dist.precision import PrecisionName as PrecisionName
    from d9d_dist.process_groups import destroy_process_groups as destroy_process_groups
    from d9d_dist.seeds import seed_everything as seed_everything
    from d9d_dist.seeds import stream_key as stream_key
    from d9d_dist.shards import Region as Region
    from d9d_dist.shards import copy_from_full_ as copy_from_full_
    from d9d_dist.shards import from_local as from_local
    from d9d_dist.shards import full_tensor as full_tensor
    from d9d_dist.shards import indexed_blocks as indexed_blocks
    from d9d_dist.shards import is_first_replica as is_first_replica
    from d9d_dist.shards import local_part as local_part
    from d9d_dist.shards import local_positions as local_positions
    from d9d_dist.shards import local_region as local_region
    from d9d_dist.shards import local_tensor as local_tensor
    from d9d_dist.split_backward import DeferredWeightGrads as DeferredWeightGrads
    from d9d_dist.split_backward import SplitBackward as SplitBackward
    from d9d_dist.split_backward import WeightGradHandle as WeightGradHandle
    from d9d_dist.split_backward import defer_weight_grad as defer_weight_grad
    from d9d_dist.stage import StageInfo as StageInfo
    from d9d_dist.tensor_parallel import parallelize_tensor as parallelize_tensor
    from d9d_dist.tensor_styles import ColumnParallel as ColumnParallel
    from d9d_dist.tensor_styles import Replicated as Replicated
    from d9d_dist.tensor_styles import RowParallel as RowParallel
    from d9d_dist.tensor_styles import SequenceParallel as SequenceParallel
    from d9d_dist.tensor_styles import TensorRegion as TensorRegion
    from d9d_dist.tensor_styles import TensorStyle as TensorStyle
    from d9d_dist.tensor_styles import VocabParallelEmbedding as VocabParallelEmbedding
    from d9d_dist.tensor_styles import VocabParallelHead as VocabParallelHead
    from d9d_dist.timeouts import Timeouts as Timeouts
    from d9d_dist.token_ids import check_token_ids as check_token_ids
    from d9d_dist.tree_gather import all_gather_trees as all_gather_trees
    from d9d_dist.vocab_parallel import HasTokenLoss as HasTokenLoss
    from d9d_dist.vocab_parallel import HasVocabParallelForm as HasVocabParallelForm
    from d9d_dist.vocab_parallel import TokenLoss as TokenLoss
    from d9d_dist.vocab_parallel import VocabParallelCrossEntropy as VocabParallelCrossEntropy
    from d9d_dist.vocab_parallel import token_cross_entropy as token_cross_entropy
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "refuse_later_writes",
]
