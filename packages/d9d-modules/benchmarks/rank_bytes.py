"""Compute the memory of one rank of a large job for a model's state, in seconds in one process.

    python packages/d9d-modules/benchmarks/rank_bytes.py qwen3-1.7b
    python packages/d9d-modules/benchmarks/rank_bytes.py llama3.2-1b --data-parallel-shard 64 --tensor-parallel 8

The model is built on `meta`, which allocates nothing, and parallelized by `parallelize_decoder` as in a job, on torch's
fake process group. Degrees that do not fit the model raise the same errors as in a job. Counted are the parameters
stored on the first rank, whose shards are the largest, gradients of the same size, and two moments of AdamW.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from math import prod

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import DistributedContext, MeshConfig
from d9d_dist.groups.launch import Launch
from d9d_modules import (
    DecoderForCausalLM,
    DecoderParams,
    Llama3Params,
    Llama3Scaling,
    Qwen3Params,
    parallelize_decoder,
)

MODELS: dict[str, DecoderParams] = {
    "qwen3-1.7b": Qwen3Params(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=6144,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    ),
    "llama3.2-1b": Llama3Params(
        vocab_size=128_256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=8192,
        tie_word_embeddings=True,
        rope_scaling=Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
        max_position_embeddings=131_072,
    ),
}
"""The sizes in the families' published configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Memory of one rank.

    Attributes:
        num_parameters: Number of parameters of the whole model; a tied weight counts once.
        num_ranks: Number of ranks of the job.
        parameters: Bytes of the first rank's shards.
        gradients: Bytes of their gradients.
        moments: Bytes of the two moments of AdamW.
    """

    num_parameters: int
    num_ranks: int
    parameters: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """Total bytes of a rank."""
        return self.parameters + self.gradients + self.moments


def rank_bytes(params: DecoderParams, mesh: MeshConfig, *, dtype: torch.dtype = torch.float32) -> RankBytes:
    """Count the bytes of the first rank of a job. No process group may exist; none exists afterwards.

    Args:
        params: Sizes of the model.
        mesh: Degrees of parallelism; -1 counts as 1. pipeline_parallel must be 1.
        dtype: Dtype of parameters, gradients and moments.

    Raises:
        UserError: If the degrees do not fit the model.
    """
    num_ranks = prod(degree for axis, degree in mesh if axis != "expert_parallel" and degree != -1)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=num_ranks)
    try:
        with mesh.build(launch=Launch(world_size=num_ranks, device="cpu")) as ctx:
            return _counted(params, ctx, dtype)
    finally:
        dist.destroy_process_group()


def _counted(params: DecoderParams, ctx: DistributedContext, dtype: torch.dtype) -> RankBytes:
    with torch.device("meta"):
        model = DecoderForCausalLM(params).to(dtype)
    parallelize_decoder(model, ctx, checkpointing="full")
    stored = sum(_local(parameter).numel() * parameter.element_size() for parameter in model.parameters())
    return RankBytes(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_ranks=ctx.world_size,
        parameters=stored,
        gradients=stored,
        moments=2 * stored,
    )


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    """Count, and print JSON."""
    parser = argparse.ArgumentParser(description="Bytes of a model's state on one rank of a large job.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--data-parallel-shard", type=int, default=128)
    parser.add_argument("--context-parallel-shard", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=4)
    args = parser.parse_args()
    mesh = MeshConfig(
        data_parallel_shard=args.data_parallel_shard,
        context_parallel_shard=args.context_parallel_shard,
        tensor_parallel=args.tensor_parallel,
    )
    start = time.perf_counter()
    counted = rank_bytes(MODELS[args.model], mesh)
    seconds = round(time.perf_counter() - start, 2)
    print(json.dumps({"model": args.model, **asdict(counted), "total": counted.total, "seconds": seconds}, indent=2))


if __name__ == "__main__":
    main()
