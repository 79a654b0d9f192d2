"""Checkpoints of several ranks: each shard is written once, and any mesh can read what any other wrote."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import DistributedContext, MeshConfig, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_state import (
    CheckpointStore,
    StateError,
    model_tensors,
    optimizer_tensors,
    prepare_optimizer_for_load,
    rng_state,
)
from d9d_state._sharding import gather_whole


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
    return {name: gather_whole(tensor).clone() for name, tensor in tensors.items()}


def _train_and_save(folder: str, shard: int, replicate: int) -> dict[str, Tensor]:
    with _mesh(shard, replicate) as ctx:
        model, optimizer = _job(ctx, seed=0)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        store = CheckpointStore(folder)
        tensors = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
        store.save(2, tensors, state="all", rank_state=ctx.rank, ctx=ctx)
        return _wholes(model, optimizer)


def _load(folder: str, shard: int, replicate: int) -> dict[str, Tensor]:
    with _mesh(shard, replicate) as ctx:
        model, optimizer = _job(ctx, seed=1)
        store = CheckpointStore(folder)
        info = store.newest(ctx)
        assert info is not None
        prepare_optimizer_for_load(model, optimizer, info)
        store.load(info, {**model_tensors(model), **optimizer_tensors(model, optimizer)}, ctx)
        return _wholes(model, optimizer)


def _assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("saved_on", [(2, 1), (4, 1), (2, 2)])
def test_any_mesh_reads_what_any_other_wrote(tmp_path: Path, saved_on: tuple[int, int]) -> None:
    ranks = saved_on[0] * saved_on[1]
    saved = run_ranks(_train_and_save, str(tmp_path), *saved_on, world_size=ranks)
    info = CheckpointStore(tmp_path).newest()
    assert info is not None
    assert (info.state, info.rank_states) == ("all", list(range(ranks)))
    assert info.manifest.mesh["dp_shard"] == saved_on[0]
    assert "optimizer.2.bias.exp_avg" not in info.tensors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]
    for mesh in ((1, 1), (2, 1), (4, 1), (2, 2)):
        for loaded in run_ranks(_load, str(tmp_path), *mesh, world_size=mesh[0] * mesh[1]):
            _assert_same_bits(loaded, saved[0])


def test_one_process_reads_what_ranks_wrote(tmp_path: Path) -> None:
    saved = run_ranks(_train_and_save, str(tmp_path), 2, 1)[0]
    store = CheckpointStore(tmp_path)
    info = store.newest()
    assert info is not None
    model = _model(1)
    model.get_parameter("2.bias").requires_grad_(False)
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    prepare_optimizer_for_load(model, optimizer, info)
    store.load(info, {**model_tensors(model), **optimizer_tensors(model, optimizer)})
    _assert_same_bits(_wholes(model, optimizer), saved)


def _save_parts(folder: str) -> None:
    with _mesh(2, 1) as ctx:
        own = {f"model.{ctx.rank}": torch.full((2,), float(ctx.rank)), "model.shared": torch.ones(3)}
        CheckpointStore(folder).save(1, own, rank_state=rng_state(), ctx=ctx)


def test_ranks_may_hold_different_names(tmp_path: Path) -> None:
    run_ranks(_save_parts, str(tmp_path))
    store = CheckpointStore(tmp_path)
    info = store.newest()
    assert info is not None
    tensors = {"model.0": torch.ones(2), "model.1": torch.ones(2), "model.shared": torch.zeros(3)}
    store.load(info, tensors)
    assert [tensor.tolist() for tensor in tensors.values()] == [[0, 0], [1, 1], [1, 1, 1]]
    assert sum(len(record.chunks) for record in info.manifest.tensors.values()) == 3


def _choose(folders: list[str]) -> str:
    with _mesh(2, 1) as ctx:
        store = CheckpointStore(folders[ctx.rank])
        try:
            info = store.newest(ctx)
        except StateError as error:
            return str(error)
        return "none" if info is None else str(info.step)


def test_all_ranks_agree_on_the_newest(tmp_path: Path) -> None:
    for name, steps in (("a", (1, 2)), ("b", (1,))):
        for step in steps:
            CheckpointStore(tmp_path / name).save(step, {"model.a": torch.ones(1)})
    both = {name: str(tmp_path / name) for name in ("a", "b", "empty")}
    assert run_ranks(_choose, [both["a"], both["a"]]) == ["2", "2"]
    assert run_ranks(_choose, [both["b"], both["a"]]) == ["1", "1"]
    assert run_ranks(_choose, [both["empty"], both["a"]]) == ["none", "none"]
    messages = run_ranks(_choose, [both["a"], both["b"]])
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: ")
    assert "step-00000002" in messages[0]


def _load_damaged(folder: str) -> tuple[str, float]:
    with _mesh(2, 1) as ctx:
        store = CheckpointStore(folder)
        info = store.newest(ctx)
        assert info is not None
        tensor = torch.zeros(2)
        with pytest.raises(StateError) as caught:
            store.load(info, {"model.0": tensor}, ctx)
        return str(caught.value), float(tensor.sum())


def test_damage_that_one_rank_finds_stops_all_before_a_tensor_is_written(tmp_path: Path) -> None:
    run_ranks(_save_parts, str(tmp_path))
    path = tmp_path / "step-00000001" / "rank-00001.json"
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    results = run_ranks(_load_damaged, str(tmp_path))
    assert results[0] == results[1]
    assert results[0][0].startswith("rank 1: ")
    assert "rank-00001.json: the content is not what was written" in results[0][0]
    assert results[0][1] == 0


def _fail_to_save(folder: str) -> str:
    with _mesh(2, 1) as ctx:
        tensor = torch.ones(2, dtype=torch.complex128 if ctx.rank == 1 else torch.float32)
        with pytest.raises(StateError) as caught:
            CheckpointStore(folder).save(1, {f"model.{ctx.rank}": tensor}, ctx=ctx)
        return str(caught.value)


def test_a_rank_that_cannot_write_is_named_on_all(tmp_path: Path) -> None:
    messages = run_ranks(_fail_to_save, str(tmp_path))
    assert messages[0] == messages[1]
    assert "step-00000001 could not be written: rank 1: safetensors files cannot hold torch.complex128" in messages[0]
    assert CheckpointStore(tmp_path).newest() is None


def _save_without_ctx(folder: str) -> None:
    with _mesh(2, 1):
        CheckpointStore(folder).save(1, {})


def test_several_ranks_need_a_context(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="got no ctx on 2 ranks"):
        run_ranks(_save_without_ctx, str(tmp_path))
