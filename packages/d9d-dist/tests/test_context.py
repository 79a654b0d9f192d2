import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks


def _coordinates() -> dict[str, int]:
    with MeshConfig(pipeline_parallel=2, data_parallel_shard=2, expert_parallel=2).build() as ctx:
        assert ctx.device.type != "meta"
        return {
            "rank": ctx.rank,
            "pp": ctx.coordinate("regular", "pp"),
            "dp": ctx.coordinate("batch", "dp"),
            "ep": ctx.coordinate("expert", "ep_shard"),
            "world": ctx.size("flat", "world"),
        }


def test_domains_agree_on_who_is_where() -> None:
    ranks = run_ranks(_coordinates, world_size=4)
    assert [(r["rank"], r["pp"], r["dp"], r["ep"], r["world"]) for r in ranks] == [
        (0, 0, 0, 0, 4),
        (1, 0, 1, 1, 4),
        (2, 1, 0, 0, 4),
        (3, 1, 1, 1, 4),
    ]


def _main_first(folder: str) -> bool:
    with MeshConfig(data_parallel_shard=2).build() as ctx, ctx.main_process_first():
        if ctx.is_main_process:
            time.sleep(0.2)
            Path(folder, "ready").touch()
        return Path(folder, "ready").exists()


def test_main_process_goes_first(tmp_path: Path) -> None:
    assert run_ranks(_main_first, str(tmp_path)) == [True, True]


def _fail_on_main() -> str:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        try:
            with ctx.local_main_process_first():
                if ctx.is_local_main_process:
                    raise RuntimeError("on main")
        except RuntimeError as error:
            return str(error)
        return "went on"


def test_a_failure_on_the_main_process_does_not_keep_the_others_waiting() -> None:
    assert run_ranks(_fail_on_main, timeout=20) == ["on main", "went on"]


def test_a_job_of_one_process_needs_no_launcher() -> None:
    with MeshConfig(data_parallel_shard=-1).build(timeout=timedelta(seconds=5)) as ctx:
        assert (ctx.rank, ctx.world_size, ctx.is_main_process) == (0, 1, True)
        ctx.wait_world()
        assert ctx.mesh_for("dense")["dp_cp_shard"].size() == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_messages_name_what_there_is() -> None:
    with MeshConfig().build() as ctx:
        with pytest.raises(ValueError, match=r"got the mesh domain 'sparse'; expected one of regular, dense, expert"):
            ctx.mesh_for("sparse")  # ty: ignore[invalid-argument-type]
        with pytest.raises(ValueError, match=r"got the axis 'ep' of the dense mesh; expected one of pp, dp_replicate"):
            ctx.size("dense", "ep")


def test_a_running_process_group_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        MeshConfig().build().close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def _logged() -> str:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        return str(ctx.logger.process("hello", {})[0])


def test_the_logger_knows_its_rank() -> None:
    assert run_ranks(_logged) == ["[rank 0/2] hello", "[rank 1/2] hello"]
