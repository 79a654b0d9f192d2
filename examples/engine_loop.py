"""Your own training loop on the Engine: in every layout, the results of one process.

python examples/engine_loop.py
torchrun --nproc-per-node 4 examples/engine_loop.py --run.name sharded
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from d9d_loop import Engine, EngineConfig, Loss, Task, cli_main


class Regression(Task):
    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss.sum((outputs.float() - batch["y"]).square(), batch["y"].numel())


def main() -> None:
    config, task = EngineConfig.from_cli(Path(__file__).with_suffix(".toml")), Regression()
    with Engine.open(config, model=lambda stage: nn.Linear(8, 1), task=task) as engine:
        rank, size = engine.ctx.coordinate("batch", "dp"), engine.ctx.size("batch", "dp")
        done = engine.load() or {"steps": 0}  # continues after a kill
        for step in range(done["steps"], 50):
            x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step)).tensor_split(size)[rank]
            batches = [{"x": rows, "y": rows.sum(dim=1, keepdim=True)} for rows in x.split(16)]
            engine.forward_backward(batches, task.loss)  # any number of batches, of any size
            result = engine.step(learning_rate=0.1 * (1 - step / 50))
            if step % 10 == 9:
                print(f"step {step + 1}: loss {result.loss.item():.4f}")
                engine.save({"steps": step + 1})


if __name__ == "__main__":
    with cli_main():
        main()
