"""Topology, collectives, parallelism and exact gradients for PyTorch."""

from d9d_dist.context import DistributedContext
from d9d_dist.context_parallel import (
    AllGatherAttention,
    AllToAllAttention,
    Attention,
    ContextSplit,
    HasAttention,
    RingAttention,
    context_parallel_attention,
    parallelize_context,
    sdpa_attention,
)
from d9d_dist.context_parallel.parallelize import Method as ContextMethod
from d9d_dist.data_parallel import Precision, parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from d9d_dist.differentiable import (
    enter_partial,
    exchange,
    gather_shards,
    scatter_partial,
    sum_partial,
    take_shard,
)
from d9d_dist.errors import UserError
from d9d_dist.gradient_sync import GradientSync, sync_gradients
from d9d_dist.gradients import clip_grad_norm_, global_grad_norm, scale_gradients_, set_gradient_sync
from d9d_dist.late_init import ModuleLateInit, canonical_name, materialize
from d9d_dist.launch import Launch, read_launch
from d9d_dist.mesh import MeshConfig
from d9d_dist.seeds import seed_everything, stream_key
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
from d9d_dist.vocab_parallel import HasTokenLoss, TokenLoss, VocabParallelCrossEntropy

__all__ = [
    "AllGatherAttention",
    "AllToAllAttention",
    "Attention",
    "ColumnParallel",
    "ContextMethod",
    "ContextSplit",
    "DistributedContext",
    "GradientSync",
    "HasAttention",
    "HasTokenLoss",
    "Launch",
    "MeshConfig",
    "ModuleLateInit",
    "Precision",
    "Replicated",
    "RingAttention",
    "RowParallel",
    "SequenceParallel",
    "StageInfo",
    "TensorRegion",
    "TensorStyle",
    "TokenLoss",
    "UserError",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "canonical_name",
    "clip_grad_norm_",
    "context_parallel_attention",
    "enter_partial",
    "exchange",
    "gather_shards",
    "global_grad_norm",
    "materialize",
    "parallelize_context",
    "parallelize_fsdp",
    "parallelize_hsdp",
    "parallelize_replicate",
    "parallelize_tensor",
    "read_launch",
    "scale_gradients_",
    "scatter_partial",
    "sdpa_attention",
    "seed_everything",
    "set_gradient_sync",
    "stream_key",
    "sum_partial",
    "sync_gradients",
    "take_shard",
]
