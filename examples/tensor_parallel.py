"""Tensor parallelism and sharding of one's own module: a plan of six lines beside a plain `nn.Module`.

    python examples/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --run.name split \
        --mesh.tensor_parallel 2 --mesh.data_parallel_shard 2    # the same losses
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from d9d_dist import (
    ColumnParallel,
    DistributedContext,
    RowParallel,
    StageInfo,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_loop import Loss, ModelProvider, Task, Trainer, TrainerConfig, cli_main


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + hidden


class Residual(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return nn.Sequential(*(Block(32) for _ in range(3)), nn.Linear(32, 1))

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense = ctx.mesh_for("dense")
        plan = {}
        for index in range(3):
            plan[f"{index}.up"] = ColumnParallel()  # each rank computes some of the features,
            plan[f"{index}.down"] = RowParallel()  # and the ranks sum their outputs
        parallelize_tensor(model, dense["tp"], plan)
        dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
        for block in model.children():  # each block is gathered for its own forward and backward
            parallelize_hsdp(block, dp, shard_axis="dp_cp_shard", precision=ctx.precision)
        parallelize_hsdp(model, dp, shard_axis="dp_cp_shard", precision=ctx.precision)


class Regression(Task):
    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss.sum((outputs.float() - batch["y"]).square(), batch["y"].numel())


def main() -> None:
    config = TrainerConfig.from_cli(Path(__file__).with_suffix(".toml"))
    x = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))
    data = [{"x": row, "y": row[:4].prod(dim=0, keepdim=True)} for row in x]
    print(Trainer(config, model=Residual(), data=data, task=Regression()).train())


if __name__ == "__main__":
    with cli_main():
        main()
