"""Benchmark of local tiers: the time that a save in every step adds to a step, and the times of saves and loads.

    uv run python packages/d9d-state/benchmarks/local_tiers.py --step 5

Prints JSON. The ranks of one machine simulate two hosts, with separate folders in memory and one replica of each part.
A step only waits, like a host whose accelerator computes. Steps with and without a save alternate in one run, so other
load on the machine affects both. `blocked` is the time of a save's call relative to a copy of the same bytes in memory.
A save is complete in the background `complete_seconds` after its call; the next save waits for it.
"""

import argparse
import importlib
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore, LocalTier


def measure(folder: str, megabytes: int, step: float, pairs: int) -> dict[str, Any]:
    """Train with and without saves on one rank of several; return its times in seconds."""
    times: dict[str, list[float]] = {"without": [], "with": [], "blocked": [], "complete": [], "memcpy": []}
    with MeshConfig(data_parallel_replicate=-1).build() as ctx:
        host = Path(folder) / f"host-{2 * ctx.rank // ctx.world_size}"
        tier = LocalTier(host / "memory", replicas=1)
        store = CheckpointStore(Path(folder) / "global", tiers=[tier])
        elements = megabytes * (1 << 20) // 4 // ctx.world_size // 16
        tensors = {f"{ctx.rank}.{index}": torch.rand(elements) for index in range(16)}
        buffer = torch.zeros(16 * elements)
        for number in range(1, 3):  # allocates both slots
            store.save_local(number, tensors, ctx=ctx)
            store.wait()
        for pair in range(pairs):
            for name in ("without", "with"):
                ctx.barrier()
                start = time.perf_counter()
                time.sleep(step)
                called = time.perf_counter()
                if name == "with":
                    store.save_local(3 + pair, tensors, ctx=ctx)
                    times["blocked"].append(time.perf_counter() - called)
                ctx.barrier()
                times[name].append(time.perf_counter() - start)
            store.wait()
            times["complete"].append(time.perf_counter() - called)
            start = time.perf_counter()
            torch.cat(list(tensors.values()), out=buffer)
            times["memcpy"].append(time.perf_counter() - start)
        start = time.perf_counter()
        if (info := store.newest(ctx)) is not None:
            store.load(info, tensors, ctx)
        times["load"] = [time.perf_counter() - start]
        times["bytes_sent"] = [tier.num_bytes_sent / (2 + pairs)]
        store.clear_tiers(ctx)
    return times


def main() -> None:
    """Parse the arguments, run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/d9d_local_tiers_benchmark"))  # noqa: S108
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--step", type=float, default=5.0, help="seconds")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    # Ranks import a function by its module name, so it cannot be in `__main__`.
    function = importlib.import_module(Path(__file__).stem).measure
    options = (str(arguments.folder), arguments.megabytes, arguments.step, arguments.pairs)
    try:
        ranks = run_ranks(function, *options, world_size=arguments.ranks, timeout=600)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    first = ranks[0]
    added = [a - b for a, b in zip(first["with"], first["without"], strict=True)]
    figures = {
        "state_bytes": arguments.megabytes << 20,
        "bytes_sent_per_save": round(sum(rank["bytes_sent"][0] for rank in ranks)),
        "step_seconds": arguments.step,
        "overhead_of_a_step": round(statistics.median(added) / statistics.median(first["without"]), 4),
        "blocked_against_memcpy": round(
            statistics.median(a / b for a, b in zip(first["blocked"], first["memcpy"], strict=True)), 2
        ),
        "blocked_seconds": round(statistics.median(first["blocked"]), 3),
        "complete_seconds": round(statistics.median(first["complete"]), 2),
        "load_seconds": round(first["load"][0], 2),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
