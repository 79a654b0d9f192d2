"""Train a plain PyTorch module, in one process or under torchrun; only the configuration differs."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from d9d_loop import Loss, Task, Trainer, TrainerConfig, cli_main


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Regression(Task):
    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> Loss:
        return Loss.sum(F.mse_loss(outputs, batch["y"], reduction="none"), batch["y"].numel())


def make_dataset(size: int = 4096) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(size, 16, generator=torch.Generator().manual_seed(0))
    y = x[:, :4].prod(dim=1, keepdim=True) + x.sum(dim=1, keepdim=True)
    return [{"x": x[i], "y": y[i]} for i in range(size)]


if __name__ == "__main__":
    with cli_main():
        config = TrainerConfig.from_cli(Path(__file__).with_suffix(".toml"))
        print(Trainer(config, model=Mlp, data=make_dataset(), task=Regression()).train())
