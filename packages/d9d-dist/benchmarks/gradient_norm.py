"""Time of clipping by the global norm, relative to torch's `clip_grad_norm_`: many matrices, and many small tensors.

    uv run python packages/d9d-dist/benchmarks/gradient_norm.py

Prints one JSON line per case. "process": plain tensors on one process. "ranks": DTensors sharded over two ranks.
Both implementations run in the same processes, alternately in each repetition; compare ratios, not seconds.
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

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from d9d_dist import DistributedContext, MeshConfig, clip_grad_norm_
from d9d_dist.testing import run_ranks

CASES: dict[str, list[tuple[int, ...]]] = {
    "64 of 256x256": [(256, 256)] * 64,
    "2000 of 64": [(64,)] * 2000,
}


def parameters_with_gradients(shapes: list[tuple[int, ...]], ctx: DistributedContext) -> list[nn.Parameter]:
    """Return plain parameters on one rank, else DTensors sharded over all ranks."""
    parameters = []
    for shape in shapes:
        full = torch.randn(shape)
        if ctx.world_size > 1:
            full = distribute_tensor(full, ctx.mesh_for("flat"), [Shard(0)], src_data_rank=None)
        parameter = nn.Parameter(full)
        parameter.grad = full.clone()
        parameters.append(parameter)
    return parameters


def measure(repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each call by case and name, on every rank."""
    torch.set_num_threads(1)
    gc.disable()
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        return {case: _measure(parameters_with_gradients(shapes, ctx), ctx, repeats) for case, shapes in CASES.items()}


def _measure(parameters: list[nn.Parameter], ctx: DistributedContext, repeats: int) -> dict[str, list[float]]:
    # The bound is never reached: the work is the same, and gradients do not change.
    calls: dict[str, Callable[[], object]] = {
        "ours": partial(clip_grad_norm_, parameters, 1e9, ctx=ctx),
        "torch": partial(nn.utils.clip_grad_norm_, parameters, 1e9),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name in sorted(calls, reverse=repeat % 2 == 1):
            dist.barrier()
            start = time.perf_counter()
            calls[name]()
            if repeat:  # the first one is a warm-up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(place: str, case: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians and the spread on rank 0."""
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["torch"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "place": place,
        "case": case,
        "ours_ms": round(1e3 * statistics.median(seconds["ours"]), 3),
        "torch_ms": round(1e3 * statistics.median(seconds["torch"]), 3),
        "ratio": round(middle, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
    }


def main() -> None:
    """Parse the arguments, run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    # Ranks import a function by its module name, so it cannot be in `__main__`.
    function = importlib.import_module(Path(__file__).stem).measure
    for place, num_ranks in (("process", 1), ("ranks", 2)):
        for case, seconds in run_ranks(function, arguments.repeats, world_size=num_ranks)[0].items():
            print(json.dumps(summary(place, case, seconds)))


if __name__ == "__main__":
    main()
