"""The package works without NumPy, which is optional for torch, including its collectives."""

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import os, sys
sys.modules["numpy"] = None
import torch
from d9d_dist import Launch, MeshConfig
from d9d_state import CheckpointStore, rng_state, set_rng_state
import torch.distributed as dist

def job(folder, ctx=None):
    with CheckpointStore(folder) as store, store.locked(ctx):
        rank = 0 if ctx is None else ctx.rank
        tensors = {"a": torch.arange(6.0), f"own.{rank}": torch.full((2,), 1.0 + rank, dtype=torch.bfloat16)}
        store.save(1, tensors, rank_state=rng_state(), ctx=ctx)
        store.save(2, tensors, rank_state=rng_state(), background=True, ctx=ctx)
        info = store.newest(ctx)
        assert info.step == 2
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        store.load(info, loaded, ctx)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        set_rng_state(info.rank_states[rank])

folder = sys.argv[1]
job(folder + "/one")
children = []
for rank in range(2):
    child = os.fork()
    if child == 0:
        dist.init_process_group("gloo", store=dist.FileStore(folder + "/meet", 2), rank=rank, world_size=2)
        with MeshConfig(data_parallel_shard=2).build(launch=Launch(rank, 2, device="cpu")) as ctx:
            job(folder + "/two", ctx)
            dist.barrier()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
assert sys.modules["numpy"] is None
"""


@pytest.mark.full
def test_saves_loads_and_collectives_work_without_numpy(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], check=False, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
