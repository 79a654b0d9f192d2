"""Checkpoints of several ranks: each shard is written once, and any mesh can load them."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import DistributedContext, GradientSync, MeshConfig, full_tensor, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_state import (
    CheckpointStore,
    StateError,
    model_tensors,
    optimizer_tensors,
    prepare_optimizer_for_load,
    rng_state,
)
from d9d_state.checkpoint import newest


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 1))


def _job(ctx: DistributedContext, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model(seed)
    mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
    parallelize_hsdp(model[0], mesh, shard_axis="dp_cp_shard")
    parallelize_hsdp(model, mesh, shard_axis="dp_cp_shard")
    model.get_parameter("2.bias").requires_grad_(False)
    return model, torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)


def _mesh(shard: int, replicate: int) -> DistributedContext:
    return MeshConfig(data_parallel_shard=shard, data_parallel_replicate=replicate).build()


def _wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
    return {name: full_tensor(tensor).clone() for name, tensor in tensors.items()}


_Meshes = list[tuple[int, int]]


def _train_and_save(folder: str, meshes: _Meshes) -> list[dict[str, Tensor]]:
    saved = []
    for shard, replicate in meshes:
        with _mesh(shard, replicate) as ctx:
            model, optimizer = _job(ctx, seed=0)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
            store = CheckpointStore(f"{folder}/{shard}x{replicate}")
            tensors = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
            store.save(2, tensors, state="all", rank_state=ctx.rank, ctx=ctx)
            saved.append(_wholes(model, optimizer))
    return saved


def _load(folders: list[str], meshes: _Meshes) -> list[dict[str, Tensor]]:
    loaded = []
    for shard, replicate in meshes:
        with _mesh(shard, replicate) as ctx:
            for folder in folders:
                model, optimizer = _job(ctx, seed=1)
                store = CheckpointStore(folder)
                info = store.newest(ctx)
                assert info is not None
                prepare_optimizer_for_load(model, optimizer, info)
                store.load(info, {**model_tensors(model), **optimizer_tensors(model, optimizer)}, ctx)
                loaded.append(_wholes(model, optimizer))
    return loaded


def _assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.slow("four")
@pytest.mark.parametrize(
    "meshes", [{1: [(1, 1)], 2: [(2, 1), (1, 2)]}, {2: [(2, 1)], 4: [(4, 1), (2, 2)]}], ids=["two", "four"]
)
def test_any_mesh_loads_from_any_other(tmp_path: Path, meshes: dict[int, _Meshes]) -> None:
    saved: dict[str, dict[str, Tensor]] = {}
    for ranks, of_size in meshes.items():
        wholes = run_ranks(_train_and_save, str(tmp_path), of_size, world_size=ranks)[0]
        saved.update({f"{shard}x{rep}": whole for (shard, rep), whole in zip(of_size, wholes, strict=True)})
    for name in saved:
        info = CheckpointStore(tmp_path / name).newest()
        assert info is not None
        shard, replicate = map(int, name.split("x"))
        assert (info.state, info.rank_states) == ("all", list(range(shard * replicate)))
        assert (info.manifest.mesh["dp_shard"], info.manifest.mesh["dp_replicate"]) == (shard, replicate)
        assert "optimizer.2.bias.exp_avg" not in info.tensors
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["step-00000002"]
    folders = [str(tmp_path / name) for name in saved]
    for ranks, of_size in meshes.items():
        for loaded in run_ranks(_load, folders, of_size, world_size=ranks):
            for index, tensors in enumerate(loaded):
                _assert_same_bits(tensors, list(saved.values())[index % len(folders)])


class _Branches(nn.Module):
    """Model with one layer per rank and one unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 5) for _ in range(3))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.head(self.branches[branch](x)).square().sum()


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def _branches(ctx: DistributedContext | None = None) -> tuple[_Branches, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Branches()
    if ctx is not None:
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_cp_shard"], shard_axis="dp_cp_shard")
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)


def _train_branches(folder: str, num_steps: int, stop: int) -> dict[str, Tensor]:
    """Resume from the newest checkpoint, if any, train, and save at step `stop`."""
    with _mesh(2, 1) as ctx:
        model, optimizer = _branches(ctx)
        store, sync = CheckpointStore(folder), GradientSync(model)
        info = store.newest(ctx)
        if info is not None:
            prepare_optimizer_for_load(model, optimizer, info)
            store.load(info, {**model_tensors(model), **optimizer_tensors(model, optimizer)}, ctx)
        for step in range(0 if info is None else info.step, num_steps):
            model(_batch(ctx.rank, step), (ctx.rank + step // 2) % 2).backward()
            sync.finish()
            optimizer.step()
            model.zero_grad()
            if step + 1 == stop:
                store.save(stop, {**model_tensors(model), **optimizer_tensors(model, optimizer)}, ctx=ctx)
        return _wholes(model, optimizer)


def test_rank_local_parameters_match_single_process(tmp_path: Path) -> None:
    through = run_ranks(_train_branches, str(tmp_path / "a"), 4, 2)[0]
    run_ranks(_train_branches, str(tmp_path / "b"), 2, 2)
    resumed = run_ranks(_train_branches, str(tmp_path / "b"), 4, 4)[0]
    _assert_same_bits(resumed, through)
    model, optimizer = _branches()
    for step in range(4):
        for rank in range(2):
            model(_batch(rank, step), (rank + step // 2) % 2).backward()
        optimizer.step()
        model.zero_grad()
    expected = _wholes(model, optimizer)
    assert "optimizer.branches.1.weight.exp_avg" in expected
    assert "optimizer.branches.2.weight.exp_avg" not in expected
    assert through.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(through[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def _save_parts(folder: str) -> None:
    with _mesh(2, 1) as ctx:
        own = {f"model.{ctx.rank}": torch.full((2,), ctx.rank / 3), "model.shared": torch.full((3,), 0.1)}
        CheckpointStore(folder).save(1, own, rank_state=rng_state(), ctx=ctx)


def test_ranks_may_pass_different_names(tmp_path: Path) -> None:
    run_ranks(_save_parts, str(tmp_path))
    store = CheckpointStore(tmp_path)
    info = store.newest()
    assert info is not None
    tensors = {"model.0": torch.ones(2), "model.1": torch.ones(2), "model.shared": torch.zeros(3)}
    store.load(info, tensors)
    expected = [torch.zeros(2), torch.full((2,), 1 / 3), torch.full((3,), 0.1)]
    assert all(torch.equal(*pair) for pair in zip(tensors.values(), expected, strict=True))
    assert sum(len(record.chunks) for record in info.manifest.tensors.values()) == 3


def _choose(folders: list[list[str]]) -> list[str]:
    with _mesh(2, 1) as ctx:
        chosen = [CheckpointStore(pair[ctx.rank]).newest(ctx) for pair in folders]
        return ["none" if info is None else f"{info.step} {info.is_verified}" for info in chosen]


def test_all_ranks_agree_on_the_newest(tmp_path: Path) -> None:
    for name, steps in (("a", (1, 2)), ("another run", (1,))):
        for step in steps:
            CheckpointStore(tmp_path / name).save(step, {"model.a": torch.ones(1)})
    for name in ("stale", "damaged"):
        shutil.copytree(tmp_path / "a", tmp_path / name)
    shutil.rmtree(tmp_path / "stale" / "step-00000002")
    for path in (tmp_path / "damaged" / "step-00000002").glob("*.json"):
        path.write_bytes(path.read_bytes().replace(b"null", b"true"))
    for path in (tmp_path / "damaged" / "step-00000002").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    pairs = {
        ("a", "a"): "2 True",
        ("stale", "a"): "1 True",  # only the main process's candidates count
        ("a", "stale"): "1 True",  # a checkpoint that another rank does not see is skipped
        ("a", "damaged"): "1 True",
        ("empty", "a"): "none",
        ("a", "another run"): "none",
    }
    found = run_ranks(_choose, [[str(tmp_path / name) for name in pair] for pair in pairs])
    assert found[0] == found[1] == list(pairs.values())


def _load_damaged(folder: str) -> tuple[str, float]:
    with _mesh(2, 1) as ctx:
        store = CheckpointStore(folder)
        (info,) = store.complete()
        tensor = torch.zeros(2)
        with pytest.raises(StateError) as caught:
            store.load(info, {"model.0": tensor}, ctx)
        return str(caught.value), float(tensor.sum())


def test_damage_found_by_one_rank_raises_on_all_before_loading(tmp_path: Path) -> None:
    run_ranks(_save_parts, str(tmp_path))
    path = tmp_path / "step-00000001" / "tensors-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    results = run_ranks(_load_damaged, str(tmp_path))
    assert results[0] == results[1]
    assert results[0][0].startswith("rank 1: ")
    assert (
        "tensors-00001.safetensors: model.1 [2] float32 does not have the recorded XXH3-128 digest at step 1. Move"
        in results[0][0]
    )
    assert results[0][1] == 0


def _fail_to_save(folder: str) -> str:
    with _mesh(2, 1) as ctx:
        tensor = torch.ones(2, dtype=torch.complex128 if ctx.rank == 1 else torch.float32)
        with pytest.raises(StateError) as caught:
            CheckpointStore(folder).save(1, {f"model.{ctx.rank}": tensor}, ctx=ctx)
        return str(caught.value)


def test_error_on_all_ranks_names_failing_rank(tmp_path: Path) -> None:
    messages = run_ranks(_fail_to_save, str(tmp_path))
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: safetensors files do not support torch.complex128")
    assert CheckpointStore(tmp_path).newest() is None


def _save_without_ctx(folder: str) -> None:
    with _mesh(2, 1):
        CheckpointStore(folder).save(1, {})


def test_several_ranks_need_a_context(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="got no ctx on 2 ranks"):
        run_ranks(_save_without_ctx, str(tmp_path))


def _continue_after_damage_on_one_rank(folder: str) -> list[object]:
    with MeshConfig(data_parallel_shard=2).build() as ctx, pytest.MonkeyPatch.context() as patch:
        store = CheckpointStore(folder)
        for step in (1, 2):
            store.save(step, {"a": torch.full((3,), float(step))}, ctx=ctx)
        if ctx.rank == 1:
            original = newest.damage
            patch.setattr(
                newest,
                "damage",
                lambda path, *args, **kw: ["bad"] if path.name.endswith("2") else original(path, *args, **kw),
            )
        info = store.newest(ctx)
        assert info is not None
        store.save(2, {"a": torch.full((3,), 22.0)}, ctx=ctx)
        patch.undo()
        again = store.newest(ctx)
        assert again is not None
        loaded = torch.zeros(3)
        store.load(again, {"a": loaded}, ctx)
        with pytest.MonkeyPatch.context() as inner:
            if ctx.rank == 0:
                (Path(folder) / "step-00000009.partial").mkdir()
                inner.setattr(os, "rmdir", _refuse)
            ctx.barrier()
            with pytest.raises(StateError) as caught:
                store.discard_partials(ctx)
        return [info.step, again.step, loaded.tolist(), str(caught.value)]


def _refuse(*_args: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_job_resumes_if_one_rank_found_damage(tmp_path: Path) -> None:
    results = run_ranks(_continue_after_damage_on_one_rank, str(tmp_path))
    assert results[0] == results[1]
    *values, message = results[0]
    assert values == [1, 2, [22.0] * 3]
    assert "rank 0: partial checkpoints in" in message
    assert (tmp_path / "step-00000002.damaged-1").is_dir()
