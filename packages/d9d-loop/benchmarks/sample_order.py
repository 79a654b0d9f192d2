"""Start-up, memory, resume and throughput of the order of 10^12 samples, compared with a stored permutation; as JSON.

    python packages/d9d-loop/benchmarks/sample_order.py

The reference is `torch.randperm`, at a size that fits into memory; its time and memory grow with the number of samples.
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import torch

from d9d_loop.data import IndexedStream
from d9d_loop.data.sample_order import SampleOrder


def main() -> None:
    """Measure, print JSON, and optionally write it."""
    parser = argparse.ArgumentParser(description="Start-up, memory, resume and rate of the sample order.")
    parser.add_argument("--samples", type=int, default=10**12)
    parser.add_argument("--peer-samples", type=int, default=2_000_000)
    parser.add_argument("--taken", type=int, default=200_000, help="positions to look up for the rate")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    length: int = args.samples
    order = SampleOrder(length, seed=0)
    samples = range(length)
    result = {
        "samples": length,
        "start_up_seconds": _seconds(lambda: SampleOrder(length, seed=0)[0], args.repeats),
        "resume_seconds": _seconds(
            lambda: IndexedStream(samples, seed=0).cursor({"position": 5 * length + length // 3}).take(1), args.repeats
        ),
        "peak_bytes": _peak_bytes(lambda: IndexedStream(samples, seed=0).cursor().take(10_000)),
        "million_positions_per_second": args.taken / _seconds(lambda: order.take(0, args.taken), args.repeats) / 1e6,
        "peer": {
            "samples": args.peer_samples,
            "start_up_seconds": _seconds(lambda: torch.randperm(args.peer_samples).tolist(), args.repeats),
            "peak_bytes": _peak_bytes(lambda: torch.randperm(args.peer_samples).tolist()),
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


def _seconds(function: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak of Python's allocations in bytes, without tensors; the order keeps none."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    main()
