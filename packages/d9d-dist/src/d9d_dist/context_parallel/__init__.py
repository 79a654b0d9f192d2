"""Context parallelism: ranks split the positions of each sequence and communicate in attention."""

from d9d_dist.context_parallel.all_gather import AllGatherAttention
from d9d_dist.context_parallel.all_to_all import AllToAllAttention
from d9d_dist.context_parallel.attention import (
    Attention,
    AttentionOfHeads,
    DeclaresCausality,
    DeclaresStandardSdpa,
    sdpa_attention,
)
from d9d_dist.context_parallel.blocks import AttentionBlock, BlockKernel, CpuFlashKernel, FlashKernel, MathKernel
from d9d_dist.context_parallel.parallelize import (
    ContextMethod,
    HasAttention,
    HasContextMesh,
    RequiresFullSequence,
    context_parallel_attention,
    parallelize_context,
)
from d9d_dist.context_parallel.ring import RingAttention
from d9d_dist.context_parallel.split import ContextSplit

__all__ = [
    "AllGatherAttention",
    "AllToAllAttention",
    "Attention",
    "AttentionBlock",
    "AttentionOfHeads",
    "BlockKernel",
    "ContextMethod",
    "ContextSplit",
    "CpuFlashKernel",
    "DeclaresCausality",
    "DeclaresStandardSdpa",
    "FlashKernel",
    "HasAttention",
    "HasContextMesh",
    "MathKernel",
    "RequiresFullSequence",
    "RingAttention",
    "context_parallel_attention",
    "parallelize_context",
    "sdpa_attention",
]
