"""Price of the comparisons between ranks: batches and learning rates, as a ratio to a step of about 5 ms.

    python packages/d9d-loop/benchmarks/agreement_price.py --output agreement_price.json

Two tensor-parallel ranks, which get the same batches, train an MLP whose step takes about `--step-ms`. Steps with and
without the comparisons alternate in blocks within one run; reported is the median ratio of neighboring blocks, and the
host's least time for a digest of a batch of tokens. All times are CPU time, because other jobs may share the machine;
waiting for the other rank is not included.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from d9d_dist import ColumnParallel, MeshConfig, RowParallel, parallelize_hsdp, parallelize_tensor
from d9d_dist.testing import run_ranks
from d9d_loop import Engine, Loss, Task
from d9d_loop.engine import microbatches
from d9d_loop.engine.batch_digest import digest_batches
from d9d_loop.resilience import BadStepConfig, StepGuard
from d9d_loop.resilience.same_values import Same

BLOCK = 20


class Regression(Task):
    """Task of the benchmark."""

    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return the inputs of the model."""
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        """Return the sum of squared errors."""
        return Loss.sum((outputs - batch["y"]).square(), outputs.numel())


class Without:
    """Context in which nothing is compared."""

    @staticmethod
    def enter() -> AbstractContextManager[object]:
        """Return the context."""
        return mock.patch.object(microbatches, "digest_batches", return_value=0)


def on_rank(width: int, blocks: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each block, with and without comparisons."""
    torch.set_num_threads(1)
    with MeshConfig(tensor_parallel=2).build() as ctx:
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
        dense = ctx.mesh_for("dense")
        parallelize_tensor(model, dense["tp"], {"0": ColumnParallel(), "2": RowParallel()})
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        guard = StepGuard(optimizer, config=BadStepConfig(), ctx=ctx)
        engine = Engine(model, optimizer, ctx=ctx, task=Regression(), guard=guard)
        draws = torch.Generator().manual_seed(0)
        batch = {"x": torch.randn(64, 64, generator=draws), "y": torch.randn(64, 64, generator=draws)}
        batch["labels"] = torch.randint(0, 1000, (64, 64), generator=draws)
        kinds: dict[str, Callable[[], AbstractContextManager[object]]] = {"with": nullcontext, "without": Without.enter}
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for block in range(blocks + 1):
            for name in kinds if block % 2 else reversed(kinds):
                with kinds[name](), _no_rates(name):
                    torch.distributed.barrier()
                    begin = time.process_time()
                    for _ in range(BLOCK):
                        engine.forward_backward([batch], Regression().loss)
                        engine.step(1e-3)
                    if block:
                        found[name].append((time.process_time() - begin) / BLOCK)
        return {**found, "digest": [seconds_of([batch]) for _ in range(blocks)]}


def _no_rates(name: str) -> AbstractContextManager[object]:
    if name == "with":
        return nullcontext()
    return mock.patch.multiple(Same, on_host=lambda self: [0.0] * 4, rates_differ=lambda self, largest: False)


def seconds_of(batches: list[Any]) -> float:
    """Return the seconds for a digest."""
    begin = time.process_time()
    for _ in range(20):
        digest_batches(batches)
    return (time.process_time() - begin) / 20


def microseconds_of_digest(length: int) -> dict[str, float]:
    """Return the least time for the digest of 8 rows: with four keys of integers, and with three more of floats."""
    batch = {key: torch.randint(0, 1000, (8, length)) for key in ("input_ids", "labels", "documents", "position_ids")}
    floats = {key: torch.randn(8, length) for key in ("advantages", "old_log_probs", "reference_log_probs")}
    return {
        name: round(1e6 * min(seconds_of([each]) for _ in range(50)), 1)
        for name, each in (("integers", batch), ("with floats", {**batch, **floats}))
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    width = 256
    for _ in range(3):
        taken = statistics.median(run_ranks(on_rank, width, 2, world_size=2)[0]["without"])
        width = max(64, round(width * arguments.step_ms / 1e3 / taken / 64) * 64)
    found = run_ranks(on_rank, width, arguments.blocks, world_size=2)[0]
    digest = statistics.median(found.pop("digest"))
    ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
    result = {
        "width": width,
        "milliseconds_per_step": {name: round(1e3 * statistics.median(times), 3) for name, times in found.items()},
        "digest_per_step": round(digest / statistics.median(found["without"]), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(each, 4) for each in statistics.quantiles(ratios, n=4)],
        "microseconds_of_a_digest": {str(8 * length): microseconds_of_digest(length) for length in (128, 1024, 4096)},
    }
    print(json.dumps(result, indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
