"""Memory of one attention, forward and backward, on each rank: how it falls with the number of context-parallel ranks.

    python packages/d9d-dist/benchmarks/context_parallel_memory.py --length 8192 --output curve.json

What is counted is what torch's CPU allocator gives and takes back, as its profiler reports it: every tensor, those
inside of operators too, and neither Python nor the buffers of the process group. The resident set of a process says the
same with the noise of pages that malloc keeps; its peak is given as a check.
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
from d9d_dist.context_parallel import context_parallel_attention, sdpa_attention
from d9d_dist.testing import run_ranks

ContextMethod = Literal["all_gather", "all_to_all", "ring"]
_MIB = 2**20
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Row:
    """The rows of the benchmark; the length is that of the whole row, whatever the number of ranks."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    packed: bool


@dataclass(frozen=True)
class Memory:
    """MiB above what the process held before, inputs included; of the rank that needed most.

    Attributes:
        peak: Peak of what the allocator had given out in forward and backward.
        saved: What it had given out between them: inputs, output, and what backward needs.
        resident_peak: Peak of the resident set.
    """

    peak: float
    saved: float
    resident_peak: float


def main() -> None:
    """Measure every method at every number of ranks, print a table, and write JSON if asked to."""
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
    # Large tensors go back to the system when they are freed, or the resident set would say what malloc keeps.
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

        forward().sum().backward()  # connections are made, and kernels chosen, at the first time
        before = _reset_resident()
        forward().sum().backward()
        resident = _resident("VmHWM") - before
        peak, _ = _allocated(lambda: forward().sum().backward())
        outs: list[Tensor] = []
        _, saved = _allocated(lambda: outs.append(forward()))
        return Memory(*(round(size / _MIB, 2) for size in (peak, saved, resident)))


def _allocated(function: Callable[[], None]) -> tuple[int, int]:
    """Bytes that the allocator gave out while a function ran: at most, and at its end."""
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
    """Forget the peak of the resident set (Linux); gives its present size in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _resident("VmRSS")


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
