"""Context parallelism: ranks split the positions of each sequence and communicate in attention."""

from d9d_dist.context_parallel.all_gather import AllGatherAttention as AllGatherAttention
from d9d_dist.context_parallel.all_to_all import AllToAllAttention as AllToAllAttention
from d9d_dist.context_parallel.attention import Attention as Attention
from d9d_dist.context_parallel.attention import AttentionOfHeads as AttentionOfHeads
from d9d_dist.context_parallel.attention import DeclaresCausality as DeclaresCausality
from d9d_dist.context_parallel.attention import DeclaresStandardSdpa as DeclaresStandardSdpa
from d9d_dist.context_parallel.attention import sdpa_attention as sdpa_attention
from d9d_dist.context_parallel.blocks import AttentionBlock as AttentionBlock
from d9d_dist.context_parallel.blocks import BlockKernel as BlockKernel
from d9d_dist.context_parallel.blocks import CpuFlashKernel as CpuFlashKernel
from d9d_dist.context_parallel.blocks import FlashKernel as FlashKernel
from d9d_dist.context_parallel.blocks import MathKernel as MathKernel
from d9d_dist.context_parallel.parallelize import ContextMethod as ContextMethod
from d9d_dist.context_parallel.parallelize import HasAttention as HasAttention
from d9d_dist.context_parallel.parallelize import HasContextMesh as HasContextMesh
from d9d_dist.context_parallel.parallelize import RequiresFullSequence as RequiresFullSequence
from d9d_dist.context_parallel.parallelize import context_parallel_attention as context_parallel_attention
from d9d_dist.context_parallel.parallelize import parallelize_context as parallelize_context
from d9d_dist.context_parallel.ring import RingAttention as RingAttention
from d9d_dist.context_parallel.split import ContextSplit as ContextSplit
