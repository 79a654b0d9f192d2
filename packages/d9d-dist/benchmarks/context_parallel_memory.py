"""Peak memory per rank of one attention, forward and backward, by the number of context-parallel ranks.

    python packages/d9d-dist/benchmarks/context_parallel_memory.py --length 8192 --output curve.json

Memory is counted by torch's profiler, from the allocations and frees of torch's CPU allocator. It includes all tensors,
also temporary tensors of operators, but neither Python objects nor the buffers of the process group. The peak of the
resident set is reported as a check; it also includes pages that malloc keeps.
"""

import argparse
import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from d9d_dist import MeshConfig
from d9d_dist.context_parallel.attention import sdpa_attention
from d9d_dist.context_parallel.parallelize import context_parallel_attention
from d9d_dist.testing import run_ranks

ContextMethod = Literal["all_gather", "all_to_all", "ring"]
_MIB = 2**20
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Row:
    """Sizes of the input; the length is the full sequence length, for any number of ranks."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    packed: bool


@dataclass(frozen=True)
class Memory:
    """Memory in MiB above the value before the measurement, inputs included; the maximum over the ranks.

    Attributes:
        peak: Peak of the allocated memory in forward and backward.
        saved: Allocated memory between forward and backward: inputs, output, and tensors saved for backward.
        resident_peak: Peak of the resident set.
    """

    peak: float
    saved: float
    resident_peak: float


def main() -> None:
    """Measure every method at every number of ranks, print a table, and optionally write JSON."""
    parser = argparse.ArgumentParser(description="Peak memory of context-parallel attention on each rank.")
    parser.add_argument("--length", type=int, default=8192, help="positions of the whole row")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--packed", action="store_true", help="pack four documents into the row")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--methods", nargs="+", default=["all_gather", "all_to_all", "ring"])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    row = Row(args.length, args.heads, args.kv_heads, args.head_dim, args.packed)
    curves = {method: _curve(method, row, args.ranks) for method in args.methods}
    result = {
        "row": asdict(row),
        "dtype": "float32",
        "unit": "MiB per rank, the highest of all ranks",
        "curves": {
            method: {num_ranks: asdict(memory) for num_ranks, memory in curve.items()}
            for method, curve in curves.items()
        },
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _curve(method: ContextMethod, row: Row, ranks: Sequence[int]) -> dict[int, Memory]:
    curve = {}
    for num_ranks in ranks:
        measured: list[Memory] = run_ranks(_measure, method, row, world_size=num_ranks)
        curve[num_ranks] = Memory(
            **{name: max(asdict(memory)[name] for memory in measured) for name in ("peak", "saved", "resident_peak")}
        )
        print(f"{method:12s} {num_ranks} ranks  {curve[num_ranks]}", flush=True)
    return curve


def _measure(method: ContextMethod, row: Row) -> Memory:
    # Return freed large tensors to the system, so that the resident set does not include pages that malloc keeps.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        attention = context_parallel_attention(sdpa_attention, ctx.mesh_for("batch")["cp"], method=method)
        length = row.length // ctx.world_size
        documents = torch.arange(row.length)[ctx.rank * length :][None, :length] * 4 // row.length

        def forward() -> Tensor:
            q, k, v = (
                torch.randn(1, length, heads, row.head_dim).requires_grad_()
                for heads in (row.heads, row.kv_heads, row.kv_heads)
            )
            return attention(q, k, v, documents_BS=documents if row.packed else None)

        forward().sum().backward()  # warm-up: opens connections and selects kernels
        before = _reset_resident()
        forward().sum().backward()
        resident = _resident("VmHWM") - before
        peak, _ = _allocated(lambda: forward().sum().backward())
        outs: list[Tensor] = []
        _, saved = _allocated(lambda: outs.append(forward()))
        return Memory(*(round(size / _MIB, 2) for size in (peak, saved, resident)))


def _allocated(function: Callable[[], None]) -> tuple[int, int]:
    """Return the allocated bytes while a function runs: the peak, and the value at its end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    if results is None:
        raise RuntimeError("torch was built without its profiler.")
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    now, peak = 0, 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak, now


def _reset_resident() -> int:
    """Reset the peak of the resident set (Linux), and return the current size in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _resident("VmRSS")


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
