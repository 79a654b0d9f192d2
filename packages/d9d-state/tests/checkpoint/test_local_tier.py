"""Local tiers: hosts are simulated by folders, so that a host's memory or disk can be lost, torn or replaced."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from d9d_dist import DistributedContext, MeshConfig, UserError, full_tensor, gather_json
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore, LocalTier, StateError

_NUM_ELEMENTS = {"sharded": (8, 5), "replicated": (4, 4), "scalar": (), "empty": (0, 3)}


def _whole(name: str, step: int) -> Tensor:
    return (
        torch.arange(torch.Size(_NUM_ELEMENTS[name]).numel(), dtype=torch.float32).view(_NUM_ELEMENTS[name]) + step / 3
    )


def _tensors(ctx: DistributedContext, step: int) -> dict[str, Tensor]:
    """Return a sharded tensor, plain ones, and one of each pair of ranks, with values of a step."""
    tensors = {name: _whole(name, step) for name in _NUM_ELEMENTS}
    mesh, whole = ctx.mesh_for("dense")["dp_cp_shard"], tensors["sharded"]
    local = whole.tensor_split(ctx.world_size)[ctx.rank].clone()
    sharded = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    return {**tensors, "sharded": sharded, f"stage_{ctx.rank % 2}": _whole("replicated", step)}


def _ranks() -> DistributedContext:
    return MeshConfig(data_parallel_shard=-1).build()


def _store(root: Path, host: int, *, replicas: int = 1) -> CheckpointStore:
    tiers = [
        LocalTier(root / f"host-{host}" / name, every=every, replicas=replicas)
        for name, every in (("memory", 1), ("disk", 2))
    ]
    return CheckpointStore(root / "global", tiers=tiers)


def _host(ctx: DistributedContext, per_host: int) -> int:
    return ctx.rank // per_host


def _save(root: str, steps: list[int], per_host: int, replicas: int) -> dict[str, Any]:
    """Save steps in the tiers, and step 1 in the folder; return the bytes that were sent."""
    with _ranks() as ctx:
        store = _store(Path(root), _host(ctx, per_host), replicas=replicas)
        assert store.newest(ctx) is None
        for step in steps:
            tensors = _tensors(ctx, step)
            if step == 1:
                store.save(step, tensors, state={"step": step}, rank_state=[ctx.rank, step], ctx=ctx)
            store.save_local(step, tensors, state={"step": step}, rank_state=[ctx.rank, step], ctx=ctx)
            store.raise_if_failed()
        store.wait()
        return {"sent": [tier.num_bytes_sent for tier in store.tiers]}


def _resume(roots: list[str], per_host: int, next_step: int | None) -> list[int | None]:
    """Load the newest step of each root, check all values, and optionally save another step in the tiers."""
    found: list[int | None] = []
    with _ranks() as ctx:
        for root in roots:
            store = _store(Path(root), _host(ctx, per_host), replicas=1 if ctx.world_size > per_host else 0)
            info = store.newest(ctx)
            found.append(None if info is None else info.step)
            if info is None:
                continue
            loaded = {name: tensor.detach().fill_(-1) for name, tensor in _tensors(ctx, 0).items()}
            store.load(info, loaded, ctx)
            assert info.state == {"step": info.step}
            assert info.rank_states == [[rank, info.step] for rank in range(info.manifest.num_ranks)]
            for name, tensor in _tensors(ctx, info.step).items():
                assert torch.equal(full_tensor(loaded[name]), full_tensor(tensor)), (root, name)
            if next_step is not None:
                tensors, own = _tensors(ctx, next_step), [ctx.rank, next_step]
                store.save_local(next_step, tensors, state={"step": next_step}, rank_state=own, ctx=ctx)
                store.wait()
    return found


def _flip(path: Path) -> None:
    """Flip a bit of the last byte."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _slot(tier: Path) -> Path:
    """Return the slot with the only complete step of a tier."""
    (record, *_) = sorted(tier.glob("slot-*/record-*.json"))
    return record.parent


_Torn = tuple[str, int]


def _damage(*lost: str, torn: tuple[_Torn, ...] = (), file: str = "tensors-*") -> Callable[[Path], None]:
    """Return a function that deletes folders of a root, and tears a file of ranks in tiers."""

    def damage(root: Path) -> None:
        for path in lost:
            shutil.rmtree(root / path)
        for tier, rank in torn:
            (path,) = _slot(root / tier).glob(file.replace("*", f"{rank:05d}.*"))
            _flip(path)

    return damage


_MEMORY = ("host-0/memory", "host-1/memory")
_CASES: dict[str, tuple[Callable[[Path], None], int | None]] = {
    "only the processes": (_damage(), 3),
    "both disks": (_damage("host-0/disk", "host-1/disk"), 3),
    "host 0": (_damage("host-0"), 3),
    "host 1": (_damage("host-1"), 3),
    "memory of both hosts": (_damage(*_MEMORY), 2),
    "memory of both hosts and a disk": (_damage(*_MEMORY, "host-1/disk"), 2),
    "all local folders": (_damage("host-0", "host-1"), 1),
    "the folder of the run": (_damage("global"), None),
    "a part of host 0": (_damage(torn=(("host-0/memory", 0),)), 3),
    "a part of each host": (_damage(torn=(("host-0/memory", 1), ("host-1/memory", 0))), 3),
    "a record of host 0": (_damage(torn=(("host-0/memory", 0),), file="record-*"), 3),
    "a random state of host 0": (_damage(torn=(("host-0/memory", 0),), file="rank-*"), 3),
    "both copies of a part": (_damage(torn=(("host-0/memory", 1), ("host-1/memory", 1))), 2),
    "host 1 and a replica": (_damage("host-1", torn=(("host-0/memory", 1),)), 2),
}


_SAMPLE = ("host 1", "memory of both hosts", "a part of each host", "both copies of a part")


@pytest.mark.parametrize("per_host", [2, 1], ids=["two hosts of two ranks", "two hosts of one rank"])
@pytest.mark.sample("two hosts of one rank")
def test_newest_step_that_survives_is_loaded_bit_for_bit(tmp_path: Path, per_host: int, exhaustive: bool) -> None:
    cases = {name: case for name, case in _CASES.items() if exhaustive or name in _SAMPLE}
    world_size = 2 * per_host
    start = tmp_path / "start"
    saved = run_ranks(_save, str(start), [1, 2, 3], per_host, 1, world_size=world_size)
    stages = 2 if world_size > 1 else 1
    state_bytes = sum(_whole(name, 0).nbytes for name in _NUM_ELEMENTS) + stages * _whole("replicated", 0).nbytes
    assert [sum(sent) for sent in zip(*(each["sent"] for each in saved), strict=True)] == [3 * state_bytes, state_bytes]
    roots: dict[str, int | None] = {}
    for index, (damage, step) in enumerate(cases.values()):
        root = tmp_path / str(index)
        shutil.copytree(start, root)
        damage(root)
        roots[str(root)] = step
    found = run_ranks(_resume, list(roots), per_host, None, world_size=world_size)
    assert dict(zip(cases, found[0], strict=True)) == {name: step for name, (_, step) in cases.items()}
    assert found == found[:1] * world_size


def test_resumed_job_replicates_again_on_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_save, str(tmp_path), [1, 2, 3], 2, 1, world_size=4)
    shutil.rmtree(tmp_path / "host-1")
    assert run_ranks(_resume, [str(tmp_path)], 1, 4, world_size=2) == [[3]] * 2  # two other hosts of one rank
    shutil.rmtree(tmp_path / "host-0")
    assert run_ranks(_resume, [str(tmp_path)], 2, 5, world_size=4) == [[4]] * 4
    shutil.rmtree(tmp_path / "host-1")
    assert run_ranks(_resume, [str(tmp_path)], 1, None, world_size=1) == [[5]]


def _save_few(root: str) -> float | None:
    """Save or load one tensor, which only one rank writes."""
    with _ranks() as ctx:
        store, weight = _store(Path(root), ctx.rank), torch.full((1,), 2.0)
        info = store.newest(ctx)
        if info is None:
            store.save_local(3, {"a": weight}, ctx=ctx)
            store.wait()
            return None
        store.load(info, {"a": weight.zero_()}, ctx)
        return weight.item()


def test_ranks_without_tensors_take_part(tmp_path: Path) -> None:
    run_ranks(_save_few, str(tmp_path), world_size=2)
    shutil.rmtree(tmp_path / "host-0")
    assert run_ranks(_save_few, str(tmp_path), world_size=2) == [2.0, 2.0]


def _refuse(root: str) -> str:
    with _ranks() as ctx:
        own = Path(root) / "own"
        if ctx.is_main_process:
            own.mkdir()
        gather_json(None)
        with pytest.raises(UserError):
            LocalTier(own).connect(ctx)
        gather_json(None)
        assert own.is_dir()
        with pytest.raises(UserError) as caught:
            _store(Path(root), 0).save_local(1, _tensors(ctx, 1), ctx=ctx)
        gather_json(None)
        assert not (Path(root) / "host-0" / "memory").exists()
    return str(caught.value)


def test_replicas_on_the_same_host_are_refused(tmp_path: Path) -> None:
    error = run_ranks(_refuse, str(tmp_path), world_size=2)[1]
    assert error == (
        f"got replicas = 1 for {tmp_path}/host-0/memory, but the ranks of the job have only 1 folder of this path; "
        "expected one folder per host, and more folders than replicas. Set replicas to 0, or use a folder that hosts "
        "do not share."
    )


@pytest.mark.parametrize("exists", [True, False])
def test_connect_with_too_few_hosts_removes_only_a_folder_that_it_created(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "memory"
    if exists:
        folder.mkdir()
    with pytest.raises(UserError, match="got replicas = 1"):
        LocalTier(folder).connect()
    assert folder.exists() is exists


@pytest.mark.parametrize(("options", "message"), [({"every": 0}, "every = 0"), ({"replicas": -1}, "replicas = -1")])
def test_wrong_settings_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=f"got {message}; expected"):
        LocalTier("folder", every=options.get("every", 1), replicas=options.get("replicas", 1))


def test_a_single_process_saves_loads_and_clears_local_steps(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "global", tiers=[LocalTier(tmp_path / "memory", replicas=0)])
    weight = torch.zeros(3)
    for step in range(1, 5):
        weight += 1
        store.save_local(step, {"weight": weight}, state=step)
    store.wait()
    fresh = CheckpointStore(tmp_path / "global", tiers=[LocalTier(tmp_path / "memory", replicas=0)])
    info = fresh.newest()
    assert info is not None
    loaded = torch.zeros(3)
    fresh.load(info, {"weight": loaded})
    assert (info.step, info.state, loaded.tolist()) == (4, 4, [4.0, 4.0, 4.0])
    fresh.save_local(5, {"weight": loaded}, state=5)
    fresh.clear_tiers()
    assert not (tmp_path / "memory").exists()


def _refuse_space(*_arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_steps_after_the_resumed_step_are_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path / "global", tiers=[LocalTier(tmp_path / "memory", replicas=0)])
    store.save(1, {"a": torch.ones(1)})
    for step in (2, 3):
        store.save_local(step, {"a": torch.ones(1)})
    store.wait()
    (info,) = store.complete()
    store.load(info, {"a": torch.ones(1)})  # the job goes back to step 1
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", _refuse_space)
        store.save_local(2, {"a": torch.ones(2)})
        with pytest.raises(StateError, match="step 2 could not be saved"):
            store.wait()
    found = store.newest()
    assert found is not None
    assert found.step == 1  # not step 3, which the job no longer reaches
    store.load(found, {"a": torch.ones(1)})
    store.save_local(2, {"a": torch.full((1,), 5.0)})
    store.wait()
    newest = store.newest()
    assert newest is not None
    assert newest.step == 2
    loaded = torch.zeros(1)
    store.load(newest, {"a": loaded})
    assert loaded.item() == 5


def test_full_memory_raises_an_error_and_keeps_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path / "global", tiers=[LocalTier(tmp_path / "memory", replicas=0)])
    store.save_local(1, {"a": torch.ones(1)})
    store.wait()
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", _refuse_space)
        store.save_local(2, {"a": torch.ones(1)})
        with pytest.raises(StateError, match=r"step 2 could not be saved in .*slot-1: .*No space left on device"):
            store.wait()
    newest = store.newest()
    assert newest is not None
    assert newest.step == 1


def test_a_step_is_loaded_from_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def store() -> CheckpointStore:
        return CheckpointStore(tmp_path / "global", tiers=[LocalTier(tmp_path / "memory", replicas=0)])

    first = store()
    first.save_local(1, {"a": torch.ones(1)}, state=1)
    first.wait()
    monkeypatch.setattr("os.write", _refuse_space)
    resumed, loaded = store(), torch.zeros(1)
    info = resumed.newest()
    assert info is not None
    resumed.load(info, {"a": loaded})
    assert (info.state, loaded.item()) == (1, 1.0)


def _with_damaged_run_id(root: str) -> str:
    with _ranks() as ctx:
        store = _store(Path(root), ctx.rank)
        store.save_local(2, _tensors(ctx, 2), ctx=ctx)
        store.wait()
        ctx.barrier()
        (Path(root) / "global" / "run_id").write_bytes(b"\xff")
        ctx.barrier()
        with pytest.raises(StateError) as caught:
            _store(Path(root), ctx.rank).newest(ctx)
    return str(caught.value)


def test_a_damaged_run_id_is_an_error_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(_with_damaged_run_id, str(tmp_path), world_size=2)
    assert first == second
    assert f"{tmp_path}/global/run_id is damaged; delete it to start a new run: 'utf-8'" in first


def _reach_limit(root: str, pattern: str) -> str:
    with _ranks() as ctx:
        open_file = os.open

        def limited(path: Any, *args: Any) -> int:
            if ctx.rank == 1 and pattern in str(path):
                raise OSError(errno.EMFILE, "Too many open files")
            return open_file(path, *args)

        store = _store(Path(root), ctx.rank)
        with mock.patch("os.open", limited), pytest.raises(StateError) as caught:
            store.newest(ctx)
    return str(caught.value)


@pytest.mark.parametrize("pattern", ["record-", "tensors-"])
def test_a_limit_on_open_files_is_an_error_on_every_rank(tmp_path: Path, pattern: str) -> None:
    run_ranks(_save, str(tmp_path), [1, 2, 3], 1, 1, world_size=2)
    first, second = run_ranks(_reach_limit, str(tmp_path), pattern, world_size=2)
    assert first == second
    assert first.startswith("rank 1: ")
    assert "Raise the limit (ulimit -n)" in first


def _save_without_deletions(root: str, pattern: str) -> int:
    with _ranks() as ctx:
        unlink = os.unlink

        def failing(path: Any) -> None:
            if ctx.rank == 1 and pattern in str(path):
                raise OSError(errno.EIO, "Input/output error")
            unlink(path)

        store = _store(Path(root), ctx.rank)
        with mock.patch("os.unlink", failing):
            store.save_local(1, _tensors(ctx, 1), ctx=ctx)
            store.wait()
            info = store.newest(ctx)
        assert info is not None
        return info.step


@pytest.mark.parametrize("pattern", [".rank-", "slot-1/record-"])
def test_files_that_cannot_be_deleted_do_not_stop_a_rank(tmp_path: Path, pattern: str) -> None:
    assert run_ranks(_save_without_deletions, str(tmp_path), pattern, world_size=2) == [1, 1]
