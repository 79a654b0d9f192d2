"""Time of a replicated data-parallel step (forward, backward, reduction) relative to torch's DDP.

    uv run python packages/d9d-dist/benchmarks/gradient_sync.py --ranks 2 4

Prints one JSON line per number of ranks. DDP runs with its defaults, and with `gradient_as_bucket_view`. All run in the
same processes, alternately in each repetition, so other load on the machine affects all; compare ratios, not seconds.
To all-reduce B bytes over n ranks, each rank has to send at least 2 (n - 1) / n B bytes; a ring reaches this bound.

`uncopied` is our step without the copy of each gradient, and `alone` the step without any reduction. They bound what
can be saved: a gradient that another tensor shares would be reduced under its reader without the copy.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from d9d_dist import MeshConfig, parallelize_replicate
from d9d_dist.gradients import _owned_gradient
from d9d_dist.gradients.gradient_sync import GradientSync
from d9d_dist.testing import run_ranks


class Block(nn.Module):
    """Feed-forward block of a transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, width] to the same shape."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(num_blocks: int, width: int) -> nn.Module:
    """Build the same model on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num_blocks)))


def measure(repeats: int, num_blocks: int, width: int, batch: int) -> dict[str, Any]:
    """Return on every rank the seconds of each step by name, and the bytes that d9d passes to collectives."""
    torch.set_num_threads(1)
    with MeshConfig(data_parallel_replicate=-1).build() as ctx:
        ours = build(num_blocks, width)
        theirs = {
            "ddp": DistributedDataParallel(build(num_blocks, width)),
            "ddp_views": DistributedDataParallel(build(num_blocks, width), gradient_as_bucket_view=True),
        }
        parallelize_replicate(ours, ctx.mesh_for("dense")["dp_replicate"])
        sync = GradientSync(ours)
        alone = build(num_blocks, width)
        x = torch.randn(batch, width, generator=torch.Generator().manual_seed(ctx.rank))

        def step_ours() -> None:
            ours.zero_grad()
            ours(x).square().sum().backward()
            sync.finish()

        def step_theirs(model: nn.Module) -> None:
            model.zero_grad()
            model(x).square().sum().backward()

        def step_uncopied() -> None:
            with mock.patch.object(
                _owned_gradient._OwnGradient, "backward", staticmethod(lambda ctx, *grads: grads[0])
            ):
                step_ours()

        steps: dict[str, Callable[[], None]] = {
            "ours": step_ours,
            "uncopied": step_uncopied,
            "alone": partial(step_theirs, alone),
            **{name: partial(step_theirs, model) for name, model in theirs.items()},
        }
        for step in steps.values():
            step()
        handed = handed_bytes(step_ours)
        gc.disable()
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(repeats):
            for name in sorted(steps, reverse=repeat % 2 == 0):
                dist.barrier()
                start = time.perf_counter()
                steps[name]()
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
        return {"seconds": seconds, "handed_bytes": handed, "num_parameters": sum(p.numel() for p in ours.parameters())}


def handed_bytes(step: Callable[[], None]) -> int:
    """Return the bytes that a step passes to all-reduces."""
    total, all_reduce = 0, dist.all_reduce

    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal total
        total += tensor.nbytes
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", count):
        step()
    return total


def summary(num_ranks: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return the medians and the spread on rank 0; barriers align the ranks."""
    seconds = found["seconds"]
    ratios = {
        f"{prefix}{name}": statistics.quantiles((a / b for a, b in zip(seconds[step], seconds[name], strict=True)), n=4)
        for name in ("ddp", "ddp_views")
        for prefix, step in (("", "ours"), ("uncopied to ", "uncopied"), ("alone to ", "alone"))
    }
    gradient_bytes = 4 * found["num_parameters"]
    return {
        "case": f"on {num_ranks} ranks",
        "parameters": found["num_parameters"],
        "seconds": {name: round(statistics.median(each), 4) for name, each in seconds.items()},
        "ratios": {name: round(middle, 3) for name, (_, middle, _) in ratios.items()},
        "ratio_quartiles": {name: [round(low, 3), round(high, 3)] for name, (low, _, high) in ratios.items()},
        "gradient_bytes": gradient_bytes,
        "handed_bytes": found["handed_bytes"],
        "wire_bytes_per_rank": round(2 * (num_ranks - 1) / num_ranks * found["handed_bytes"]),
        "wire_lower_bound": round(2 * (num_ranks - 1) / num_ranks * gradient_bytes),
    }


def main() -> None:
    """Parse the arguments, run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    # Ranks import a function by its module name, so it cannot be in `__main__`.
    function = importlib.import_module(Path(__file__).stem).measure
    for num_ranks in arguments.ranks:
        options = (arguments.repeats, arguments.blocks, arguments.width, arguments.batch)
        print(json.dumps(summary(num_ranks, run_ranks(function, *options, world_size=num_ranks, timeout=600.0)[0])))


if __name__ == "__main__":
    main()
