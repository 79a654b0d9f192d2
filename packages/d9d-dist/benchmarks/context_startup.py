"""Time and memory of one rank to build the meshes of a large job, beyond importing torch, as JSON.

The process group is torch's fake one, so the local work of a rank is measured, not the network. The reference is
`init_device_mesh`, called once per domain; skip it with --no-peer, because it is slow for many ranks.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported now, because torch imports it when a mesh is first sliced
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.device_mesh import init_device_mesh

from d9d_dist import Launch, MeshConfig


def main() -> None:
    """Measure d9d first, in a new process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    mesh = MeshConfig(
        pipeline_parallel=16,
        data_parallel_replicate=4,
        data_parallel_shard=-1,
        context_parallel_shard=2,
        tensor_parallel=8,
        expert_parallel=64,
    )
    rank = arguments.ranks // 2 + 3
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=arguments.ranks)

    def build() -> None:
        launch = Launch(rank, arguments.ranks, device="cpu")
        with mesh.build(launch=launch) as ctx:
            ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
            ctx.group_for("batch", "dp", "cp")

    def build_peer() -> None:
        for axes in mesh.resolve(arguments.ranks).domains().values():
            init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))

    figures: dict[str, Any] = {"ranks": arguments.ranks, "torch": torch.__version__, "d9d": _cost(build)}
    if arguments.peer:
        peer = _cost(build_peer)["seconds"]  # its memory is below the peak of the first measurement
        figures["init_device_mesh"] = {"seconds": peer, "ratio": round(peer / figures["d9d"]["seconds"], 1)}
    print(json.dumps(figures, indent=2))


def _cost(run: Callable[[], None]) -> dict[str, float]:
    memory, start = _resident_megabytes(), time.perf_counter()
    run()
    return {
        "seconds": round(time.perf_counter() - start, 3),
        "megabytes": round(_resident_megabytes() - memory, 1),
    }


def _resident_megabytes() -> float:
    """Return the peak resident memory so far, which includes memory that was freed since."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
