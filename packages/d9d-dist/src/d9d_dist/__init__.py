"""Distributed training for PyTorch: device meshes, collectives, parallelism and gradient reduction."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_dist.collectives.consensus import agree as agree
    from d9d_dist.collectives.consensus import gather_json as gather_json
    from d9d_dist.collectives.differentiable import all_to_all_reshard as all_to_all_reshard
    from d9d_dist.collectives.differentiable import copy_to_axis as copy_to_axis
    from d9d_dist.collectives.differentiable import gather_from_axis as gather_from_axis
    from d9d_dist.collectives.differentiable import reduce_from_axis as reduce_from_axis
    from d9d_dist.collectives.differentiable import reduce_scatter_to_axis as reduce_scatter_to_axis
    from d9d_dist.collectives.differentiable import scatter_to_axis as scatter_to_axis
    from d9d_dist.collectives.tensors import all_gather as all_gather
    from d9d_dist.collectives.tensors import all_to_all as all_to_all
    from d9d_dist.collectives.tensors import gather as gather
    from d9d_dist.collectives.tensors import reduce_scatter as reduce_scatter
    from d9d_dist.context_parallel.attention import Attention as Attention
    from d9d_dist.context_parallel.attention import sdpa_attention as sdpa_attention
    from d9d_dist.context_parallel.parallelize import ContextMethod as ContextMethod
    from d9d_dist.context_parallel.parallelize import RequiresFullSequence as RequiresFullSequence
    from d9d_dist.context_parallel.parallelize import parallelize_context as parallelize_context
    from d9d_dist.context_parallel.split import ContextSplit as ContextSplit
    from d9d_dist.data_parallel.batch_norm import synchronize_batch_norm as synchronize_batch_norm
    from d9d_dist.data_parallel.parallelize import parallelize_fsdp as parallelize_fsdp
    from d9d_dist.data_parallel.parallelize import parallelize_hsdp as parallelize_hsdp
    from d9d_dist.data_parallel.parallelize import parallelize_replicate as parallelize_replicate
    from d9d_dist.errors import StartupTimeoutError as StartupTimeoutError
    from d9d_dist.errors import UserError as UserError
    from d9d_dist.expert_parallel import parallelize_experts as parallelize_experts
    from d9d_dist.gradients.grad_dtype import set_grad_dtype as set_grad_dtype
    from d9d_dist.gradients.gradient_norm import global_grad_norm as global_grad_norm
    from d9d_dist.gradients.gradient_norm import grad_norm_parts as grad_norm_parts
    from d9d_dist.gradients.gradient_sync import GradientSync as GradientSync
    from d9d_dist.gradients.gradient_sync import sync_gradients as sync_gradients
    from d9d_dist.gradients.operations import clip_grad_norm_ as clip_grad_norm_
    from d9d_dist.gradients.operations import defer_gradient_sync as defer_gradient_sync
    from d9d_dist.gradients.operations import finish_gradient_sync as finish_gradient_sync
    from d9d_dist.gradients.operations import scale_gradients_ as scale_gradients_
    from d9d_dist.gradients.operations import set_gradient_sync as set_gradient_sync
    from d9d_dist.groups.context import DistributedContext as DistributedContext
    from d9d_dist.groups.launch import Launch as Launch
    from d9d_dist.groups.launch import read_launch as read_launch
    from d9d_dist.groups.mesh import MeshConfig as MeshConfig
    from d9d_dist.groups.timeouts import Timeouts as Timeouts
    from d9d_dist.precision import Precision as Precision
    from d9d_dist.shards import Region as Region
    from d9d_dist.shards import copy_from_full_ as copy_from_full_
    from d9d_dist.shards import full_tensor as full_tensor
    from d9d_dist.shards import indexed_blocks as indexed_blocks
    from d9d_dist.shards import is_first_replica as is_first_replica
    from d9d_dist.shards import local_region as local_region
    from d9d_dist.shards import local_tensor as local_tensor
    from d9d_dist.split_backward import SplitBackward as SplitBackward
    from d9d_dist.split_backward import defer_weight_grad as defer_weight_grad
    from d9d_dist.stage import StageInfo as StageInfo
    from d9d_dist.tensor_parallel.parallelize import parallelize_tensor as parallelize_tensor
    from d9d_dist.tensor_parallel.styles import ColumnParallel as ColumnParallel
    from d9d_dist.tensor_parallel.styles import Replicated as Replicated
    from d9d_dist.tensor_parallel.styles import RowParallel as RowParallel
    from d9d_dist.tensor_parallel.styles import SequenceParallel as SequenceParallel
    from d9d_dist.tensor_parallel.styles import TensorRegion as TensorRegion
    from d9d_dist.tensor_parallel.styles import TensorStyle as TensorStyle
    from d9d_dist.tensor_parallel.styles import VocabParallelEmbedding as VocabParallelEmbedding
    from d9d_dist.tensor_parallel.styles import VocabParallelHead as VocabParallelHead
    from d9d_dist.values._model_tensors import canonical_name as canonical_name
    from d9d_dist.values.block_gather import gather_in_blocks as gather_in_blocks
    from d9d_dist.values.late_init import ModuleLateInit as ModuleLateInit
    from d9d_dist.values.late_init import materialize as materialize
    from d9d_dist.values.model_values import place_values as place_values
    from d9d_dist.values.offload import ModuleOffloader as ModuleOffloader
    from d9d_dist.values.offload import offload_tensor as offload_tensor
    from d9d_dist.values.offload import onload_tensor as onload_tensor
    from d9d_dist.values.parameter_role import parameter_roles as parameter_roles
    from d9d_dist.values.seeds import rank_role as rank_role
    from d9d_dist.values.seeds import seed_everything as seed_everything
    from d9d_dist.values.seeds import stream_key as stream_key
else:
    __getattr__, __dir__ = lazy_exports(__name__)
