import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from d9d_dist import Launch, MeshConfig, UserError
from d9d_dist.groups.context import DistributedContext, Timeouts
from d9d_dist.testing import Device, run_ranks


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


@pytest.mark.world_size(4)
def test_domains_agree_on_coordinates(device: Device) -> None:
    ranks = run_ranks(_coordinates, world_size=4, device=device)
    assert [(r["rank"], r["pp"], r["dp"], r["ep"], r["world"]) for r in ranks] == [
        (0, 0, 0, 0, 4),
        (1, 0, 1, 1, 4),
        (2, 1, 0, 0, 4),
        (3, 1, 1, 1, 4),
    ]


def _build_on_nodes(ranks_of_nodes: list[int]) -> DistributedContext:
    """Build the context of a rank on nodes with the given number of ranks each."""
    rank = int(os.environ["RANK"])
    places = [(node, local) for node, size in enumerate(ranks_of_nodes) for local in range(size)]
    node, local = places[rank]
    launch = Launch(
        rank, len(places), local, ranks_of_nodes[node], node, len(ranks_of_nodes), device="cpu", has_launcher=True
    )
    return MeshConfig(data_parallel_shard=-1).build(launch=launch)


def _order(ranks_of_nodes: list[int], folder: str, local: bool) -> tuple[int, list[str]]:
    with _build_on_nodes(ranks_of_nodes) as ctx:
        with ctx.main_process_first(per_node=local):
            if ctx.is_local_main_process if local else ctx.is_main_process:
                time.sleep(0.2 + 0.1 * ctx.node_rank)
            seen = sorted(path.name for path in Path(folder).iterdir())
            Path(folder, str(ctx.rank)).touch()
        return ctx.num_nodes, seen


def test_the_main_process_runs_the_body_first(tmp_path: Path) -> None:
    seen = [names for _, names in run_ranks(_order, [2, 1], str(tmp_path), False, world_size=3)]
    assert seen[0] == []
    assert all("0" in names for names in seen[1:])


@pytest.mark.parametrize("nodes", [[2, 2], [1, 3], [1, 1, 1, 1]])
def test_the_first_rank_of_every_node_runs_the_body_first(nodes: list[int], tmp_path: Path) -> None:
    ranks = run_ranks(_order, nodes, str(tmp_path), True, world_size=4)
    assert [num_nodes for num_nodes, _ in ranks] == [len(nodes)] * 4
    first = {sum(nodes[:node]) for node in range(len(nodes))}
    for rank, (_, seen) in enumerate(ranks):
        if rank in first:
            assert {int(name) for name in seen} <= first
        else:
            assert {int(name) for name in seen} >= first


def _fail_first(nodes: list[int], failing: int, local: bool) -> str:
    with _build_on_nodes(nodes) as ctx:
        first, ran = ctx.main_process_first(per_node=local), False
        try:
            with first:
                ran = True
                if ctx.rank == failing:
                    raise KeyError("on this one")
        except (KeyError, RuntimeError) as error:
            ctx.barrier()  # all ranks must get here
            return f"{'ran' if ran else 'did not run'}; {error}"
        return "went on"


@pytest.mark.parametrize(("failing", "local"), [(0, False), (2, True)])
def test_if_the_body_fails_on_a_first_rank_all_others_stop(failing: int, local: bool) -> None:
    messages = run_ranks(_fail_first, [2, 2], failing, local, world_size=4)
    stopped = (
        f"rank {failing} failed in code that it runs before other ranks, so this rank stops too; see "
        f"the traceback of rank {failing}."
    )
    expected = [f"did not run; {stopped}"] * 4
    expected[0] = f"ran; {stopped}"
    expected[failing] = "ran; 'on this one'"
    assert messages == expected


def test_a_job_of_one_process_needs_no_launcher() -> None:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        assert (ctx.rank, ctx.world_size, ctx.num_nodes, ctx.is_main_process) == (0, 1, 1, True)
        ctx.barrier()
        assert ctx.mesh_for("dense")["dp_cp_shard"].size() == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_errors_list_valid_domains_and_axes() -> None:
    with MeshConfig().build() as ctx:
        with pytest.raises(UserError, match=r"got the mesh domain 'sparse'; expected one of regular, dense, expert"):
            ctx.mesh_for("sparse")  # ty: ignore[invalid-argument-type]
        for look_up in (ctx.size, ctx.coordinate, ctx.group_for):
            with pytest.raises(UserError, match=r"got the axis 'ep' of the dense mesh; expected one of pp, dp_repl"):
                look_up("dense", "ep")
        for axes in ((), ("tp", "tp")):
            expected = re.escape(f"got the axes ({', '.join(axes)}); expected one or more axes of the mesh, each once")
            with pytest.raises(UserError, match=expected):
                ctx.group_for("dense", *axes)


def test_an_existing_process_group_is_used_and_not_destroyed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        MeshConfig().build().close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def _build_again_and_again() -> list[float]:
    totals = []
    for _ in range(10):
        with MeshConfig(data_parallel_shard=-1).build() as ctx:
            total = torch.ones((), device=ctx.device)
            dist.all_reduce(total)
            totals.append(total.item())
    return totals


def test_contexts_can_be_built_one_after_another() -> None:
    assert run_ranks(_build_again_and_again, world_size=4) == [[4.0] * 10] * 4


def _late_peer(folder: str, group_kind: str) -> float:
    """Return the seconds until a collective times out, after a first one whose peer was late but did arrive.

    The peer arrives at the first collective within the start-up timeout. `set_timeout` is called before the second one.
    """
    with MeshConfig(data_parallel_shard=2, tensor_parallel=2).build(timeouts=Timeouts(timedelta(minutes=5))) as ctx:
        group = ctx.group_for("regular", "tp")
        if group_kind == "flattened":
            group = ctx.mesh_for("dense")["dp_replicate", "tp"]._flatten("replicate_tp").get_group()
        total = torch.ones((), device=ctx.device)
        late, given_up = ctx.coordinate("regular", "tp") == 1, Path(folder, str(ctx.coordinate("regular", "dp_shard")))
        if late:
            time.sleep(2.5)
        dist.all_reduce(total, group=group)
        assert total.item() == 2.0
        ctx.set_timeout(timedelta(seconds=1))
        start = time.monotonic()
        if late:
            while not given_up.exists():
                time.sleep(0.05)
        else:
            with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
                dist.all_reduce(total, group=group)
            given_up.touch()
        return time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("group_kind", ["axis", "flattened"])
@pytest.mark.sample("flattened")
def test_a_collective_fails_after_the_last_timeout_set(group_kind: str, tmp_path: Path) -> None:
    waited = run_ranks(_late_peer, str(tmp_path), group_kind, world_size=4)
    for seconds in waited[::2]:
        assert 0.9 < seconds < 150  # the start-up timeout was five minutes


def _timeouts_of_groups() -> list[float]:
    """Return the timeout in seconds of a group at start-up, and then those of this group and of two new groups."""
    with MeshConfig(data_parallel_shard=2, tensor_parallel=2).build(timeouts=Timeouts(timedelta(minutes=5))) as ctx:
        groups = [ctx.group_for("regular", "dp_shard")]
        at_startup = [_timeout_of(groups[0], ctx.device)]
        ctx.set_timeout(ctx.timeouts.step)
        groups += [ctx.group_for("regular", "dp_shard", "tp"), ctx.group_for("dense", "tp", "pp")]
        return at_startup + [_timeout_of(group, ctx.device) for group in groups]


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    return group._get_backend(device).options._timeout.total_seconds()


def test_groups_have_the_startup_timeout_until_another_is_set() -> None:
    assert run_ranks(_timeouts_of_groups, world_size=4) == [[300.0, 600.0, 600.0, 600.0]] * 4


@pytest.mark.parametrize("seconds", [0, -1])
def test_refuses_a_timeout_that_is_not_positive(seconds: int) -> None:
    with pytest.raises(UserError, match=r"timeouts\.step = .*; expected a positive time"):
        Timeouts(step=timedelta(seconds=seconds))
    with MeshConfig().build() as ctx, pytest.raises(UserError, match=r"timeout = .*; expected a positive time"):
        ctx.set_timeout(timedelta(seconds=seconds))
