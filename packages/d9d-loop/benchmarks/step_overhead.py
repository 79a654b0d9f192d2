"""Time that the Trainer adds to a step, compared with a plain loop, and with transformers, Accelerate and Lightning.

    python packages/d9d-loop/benchmarks/step_overhead.py --output step_overhead.json
    python packages/d9d-loop/benchmarks/step_overhead.py --step-ms 20 --steps 150
    python packages/d9d-loop/benchmarks/step_overhead.py --tensors 500 --steps 300

All train the same model with fused AdamW and clipping on the same batches: an MLP, or `--tensors` small parameters. The
width of the MLP is 64, or chosen so that a step takes `--step-ms`. The Trainer also has a metric, the JSONL tracker and
background checkpoints. Each repetition times two numbers of steps alternately, every other one in reverse order: the
slope is the time of a step, without start-up. Reported are medians over repetitions: microseconds per step, the time
added to the plain loop of the same repetition, and the ratios to it and of the Trainer to each peer. On a shared
machine, `--cpu-time` measures the CPU time of all threads instead of wall time.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from d9d_loop import Loss, Task, Trainer, TrainerConfig
from d9d_metrics import WeightedMean

Batch = dict[str, torch.Tensor]
Build = Callable[[], nn.Module]
Train = Callable[[list[Batch], int, Build], None]
Clock = Callable[[], float]

SIZE, INPUTS, WIDTH, MAX_NORM, RATE = 16, 64, 64, 1.0, 1e-3


def data() -> list[Batch]:
    """Return the samples."""
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(INPUTS, generator=generator), "y": torch.randn(1, generator=generator)} for _ in range(1024)
    ]


class Scale(nn.Module):
    """Layer of one small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the features."""
        return x * self.weight


def scales(tensors: int) -> nn.Module:
    """Build the model of many small parameters."""
    return nn.Sequential(*[Scale() for _ in range(tensors - 2)], nn.Linear(INPUTS, 1))


def mlp(width: int) -> nn.Module:
    """Build the MLP."""
    return nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def batches(samples: list[Batch], steps: int) -> Iterator[Batch]:
    """Yield the batches of a number of steps."""
    for step in range(steps):
        start = step * SIZE % len(samples)
        batch: Batch = default_collate(samples[start : start + SIZE])
        yield batch


def by_hand(samples: list[Batch], steps: int, build: Build) -> None:
    """Train with a plain loop."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    for batch in batches(samples, steps):
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()


class Regression(Task):
    """Task of the Trainer."""

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the inputs of the model."""
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Return the sum of squared errors and their number."""
        return Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=outputs.numel())

    def metrics(self) -> dict[str, WeightedMean]:
        """Return one metric besides the loss."""
        return {"error": WeightedMean()}

    def update_metrics(self, metrics: Mapping[str, Any], *, outputs: Any, batch: Any, loss: Loss) -> None:
        """Add a batch to the metric."""
        metrics["error"].update(loss.total.detach(), loss.weight)


def d9d(samples: list[Batch], steps: int, build: Build) -> None:
    """Train with the Trainer and its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig.model_validate(
            {
                "steps": steps,
                "batch": {"global_size": SIZE},
                "run": {"folder": folder},
                "data": {"shuffle": False},
                "optimizer": {"learning_rate": RATE},
                "gradients": {"max_norm": MAX_NORM},
                "checkpoint": {"every": 500},
                "logging": {"every": 50, "progress": False, "stamps": False},
                "export": False,
            }
        )
        Trainer(config, model=lambda stage: build(), data=samples, task=Regression()).train()


def accelerate(samples: list[Batch], steps: int, build: Build) -> None:
    """Train with Accelerate's wrappers around the same loop."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True))
    for batch in batches(samples, steps):
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(batch["x"]), batch["y"]))
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def transformers(samples: list[Batch], steps: int, build: Build) -> None:
    """Train with the Trainer of transformers, without checkpoints."""
    peer: Any = importlib.import_module("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.mse_loss(self.model(x), y)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = peer.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=SIZE,
            learning_rate=RATE,
            max_grad_norm=MAX_NORM,
            optim="adamw_torch_fused",
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = peer.Trainer(Model(), args=arguments, train_dataset=samples)
        trainer.remove_callback(peer.PrinterCallback)
        trainer.train()


def lightning(samples: list[Batch], steps: int, build: Build) -> None:
    """Train with Lightning's Trainer, without logging and checkpoints."""
    peer: Any = importlib.import_module("lightning")

    class Module(peer.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def training_step(self, batch: Batch, _index: int) -> torch.Tensor:
            return F.mse_loss(self.model(batch["x"]), batch["y"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE, fused=True)

    class Batches(torch.utils.data.IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            return batches(samples, steps)

    trainer = peer.Trainer(
        max_steps=steps,
        gradient_clip_val=MAX_NORM,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))


def seconds_of_step(train: Train, samples: list[Batch], steps: int, build: Build, clock: Clock) -> float:
    """Return the time of a step, without start-up and the first collection of garbage, which is after 100 steps."""
    short = steps // 2
    times = []
    for length in (steps, short):
        begin = clock()
        with redirect_stdout(sys.stderr):  # the Trainer of transformers prints its figures
            train(samples, length, build)
        times.append(clock() - begin)
    return (times[0] - times[1]) / (steps - short)


def width_of(milliseconds: float, samples: list[Batch], clock: Clock) -> int:
    """Return the width of a model whose step in the plain loop takes about this time."""
    width = 512
    for _ in range(2):  # the first estimate is far off
        taken = min(seconds_of_step(by_hand, samples, 15, partial(mlp, width), clock) for _ in range(3))
        width = max(INPUTS, round(width * (milliseconds / 1e3 / taken) ** 0.5 / 8) * 8)
    return width


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--step-ms", type=float, help="widen the model until a step of the plain loop takes about this long"
    )
    parser.add_argument("--tensors", type=int, help="train a model of this many small parameters instead of the MLP")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time instead of wall time")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    peers: dict[str, Train] = {"transformers": transformers, "accelerate": accelerate, "lightning": lightning}
    installed = {name: train for name, train in peers.items() if importlib.util.find_spec(name) is not None}
    runs: dict[str, Train] = {"by_hand": by_hand, "d9d": d9d, **installed}
    samples = data()
    width = WIDTH if arguments.step_ms is None else width_of(arguments.step_ms, samples, clock)
    build = partial(mlp, width) if arguments.tensors is None else partial(scales, arguments.tensors)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(arguments.repeats + 1):
        for name, train in [*runs.items()][:: -1 if repeat % 2 else 1]:
            seconds = seconds_of_step(train, samples, arguments.steps, build, clock)
            if repeat:  # the first one is a warm-up of kernels and caches
                found[name].append(seconds * 1e6)
    added = {
        name: [one - hand for one, hand in zip(times, found["by_hand"], strict=True)] for name, times in found.items()
    }
    ratios = {
        name: [one / hand for one, hand in zip(times, found["by_hand"], strict=True)] for name, times in found.items()
    }
    result = {
        "width": width if arguments.tensors is None else INPUTS,
        "tensors": sum(1 for _ in build().parameters()),
        "microseconds_per_step": {name: round(statistics.median(times), 1) for name, times in found.items()},
        "ratio_to_by_hand": {name: round(statistics.median(times), 4) for name, times in ratios.items()},
        "ratio_of_d9d_to": {
            name: round(statistics.median(own / peer for own, peer in zip(found["d9d"], times, strict=True)), 3)
            for name, times in found.items()
        },
        "added_to_by_hand": {name: round(statistics.median(times), 1) for name, times in added.items()},
        "quartiles_added": {
            name: [round(value, 1) for value in statistics.quantiles(times, n=4)]
            for name, times in added.items()
            if len(times) > 1
        },
    }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
