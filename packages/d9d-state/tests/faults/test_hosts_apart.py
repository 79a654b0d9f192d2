"""Hosts without a shared folder never complete a checkpoint or an export."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_jobs import ranks
from tiny_checkpoint import save_on_ranks
from torch import nn

from d9d_dist import DistributedContext, UserError
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore, StateError, convert_model_state, save_model_state

_STEPS = (1, 2, 3)
_HOST = socket.gethostname()


def _own_folder(hosts: list[str], ctx: DistributedContext) -> Path:
    """Return the folder of this rank's host; the first half of the ranks is on the first host."""
    return Path(hosts[ctx.rank * len(hosts) // ctx.world_size])


def _error_of(work: Callable[[], None], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        work()
    return str(caught.value)


def _save_apart(hosts: list[str], background: bool) -> list[str]:
    with ranks() as ctx:
        store = CheckpointStore(_own_folder(hosts, ctx))
        return [
            _error_of(lambda step=step: save_on_ranks(store, step, ctx, background=background), StateError)
            for step in _STEPS
        ]


def _save_at_home(folder: str) -> None:
    with ranks() as ctx:
        for step in _STEPS:
            save_on_ranks(CheckpointStore(folder), step, ctx)


def _leave_partials(hosts: list[Path], world_size: int) -> None:
    """Create on each host the files of killed saves of all steps, as after restarts with swapped hosts."""
    for host in hosts:
        run_ranks(_save_at_home, str(host), world_size=world_size)
        for path in host.glob("step-*"):
            (path / "manifest.json").unlink(missing_ok=True)
            path.rename(path.with_name(f"{path.name}.partial"))


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("left_overs", [False, True], ids=["empty", "left-overs"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.sample("2-empty-foreground", "2-left-overs-background")
def test_checkpoint_split_over_two_hosts_is_refused(
    tmp_path: Path, world_size: int, left_overs: bool, background: bool
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    if left_overs:
        _leave_partials(hosts, world_size)
    found = run_ranks(_save_apart, [str(host) for host in hosts], background, world_size=world_size)
    far = "rank 1" if world_size == 2 else "ranks 2, 3"
    expected = [
        f"{hosts[0]}/step-{step:08}.partial of rank 0 on {_HOST} is not seen by {far} on {_HOST} in "
        f"{hosts[1]}/step-{step:08}.partial; expected one folder for all ranks. Use a folder on a file system that "
        "every host mounts at the same path."
        for step in _STEPS
    ]
    assert found == [expected] * world_size
    assert not [path for host in hosts for path in host.glob("step-*") if path.suffix != ".partial"]
    assert not list(hosts[0].glob("*.partial"))


def _lock_apart(hosts: list[str]) -> tuple[str, bool]:
    with ranks() as ctx:
        started = False

        def start() -> None:
            nonlocal started
            with CheckpointStore(_own_folder(hosts, ctx)).locked(ctx):
                started = True

        return _error_of(start, UserError), started


@pytest.mark.parametrize("world_size", [2, 4])
def test_job_without_shared_folder_is_refused_at_start(tmp_path: Path, world_size: int) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    hosts[1].mkdir()
    found = run_ranks(_lock_apart, [str(host) for host in hosts], world_size=world_size)
    far = "rank 1" if world_size == 2 else "ranks 2, 3"
    message = (
        f"{hosts[0]} of rank 0 on {_HOST} is not seen by {far} on {_HOST} in {hosts[1]}; expected one folder for all "
        "ranks. Use a folder on a file system that every host mounts at the same path."
    )
    assert found == [(message, False)] * world_size
    with CheckpointStore(hosts[0]).locked():
        assert [path.name for path in hosts[0].iterdir()] == ["job.lock"]


def _lock_together(folder: str) -> list[str]:
    with ranks() as ctx, CheckpointStore(folder).locked(ctx):
        ctx.barrier()  # rank 0 deletes its own file before it comes here
        return sorted(path.name for path in Path(folder).iterdir())


def test_job_removes_check_files_of_killed_start(tmp_path: Path) -> None:
    (tmp_path / f".shared-{'0' * 32}").touch()
    assert run_ranks(_lock_together, str(tmp_path)) == [["job.lock"]] * 2


def _lock_forbidden(folder: str) -> str:
    with ranks() as ctx, pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(os, "stat", _refuse)
        return _error_of(CheckpointStore(folder).locked(ctx).__enter__, UserError)


def _refuse(path: object, *_args: object, **_options: object) -> None:
    raise PermissionError(13, "Permission denied", str(path))


def test_error_names_reason_of_rank_without_access(tmp_path: Path) -> None:
    for message in run_ranks(_lock_forbidden, str(tmp_path)):
        assert f"is not seen by rank 1 on {_HOST} ([Errno 13] Permission denied: '{tmp_path}/.shared-" in message


def _export_apart(hosts: list[str], source: str | None, max_shard_bytes: int) -> str | None:
    with ranks() as ctx:
        folder = _own_folder(hosts, ctx) / "export"
        try:
            if source is None:
                model = nn.Sequential(*(nn.Linear(2, 3) for _ in range(ctx.world_size)))
                save_model_state(model, folder, ctx=ctx, max_shard_bytes=max_shard_bytes)
            else:
                convert_model_state(source, folder, ctx=ctx, max_shard_bytes=max_shard_bytes)
        except StateError as error:
            return str(error)
        return None


@pytest.mark.parametrize("converts", [False, True], ids=["save", "convert"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.sample("2-save", "2-convert")
def test_export_split_over_two_hosts_is_refused(tmp_path: Path, world_size: int, converts: bool) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    source = tmp_path / "source"
    save_model_state(nn.Sequential(*(nn.Linear(2, 3) for _ in range(world_size))), source)
    for host in hosts:
        (host / "export.partial").mkdir(parents=True)
    given = str(source) if converts else None
    found = run_ranks(_export_apart, [str(host) for host in hosts], given, 1, world_size=world_size)
    assert found[0] is not None
    assert f"{hosts[0]}/export.partial of rank 0 on {_HOST} is not seen by rank" in found[0]
    assert all(message == found[0] for message in found)
    assert not [path for host in hosts for path in host.glob("export")]


def test_single_file_export_needs_only_one_host(tmp_path: Path) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    assert run_ranks(_export_apart, [str(host) for host in hosts], None, 10**6) == [None, None]
    assert [path.name for path in (hosts[0] / "export").iterdir()] == ["model.safetensors"]


def _lose_part(folder: str, kind: str, exports: bool) -> str:
    """Write, with a file of rank 1 deleted or truncated before the main process completes the folder."""
    with ranks() as ctx, pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            real = os.fsync

            def fsync_and_lose(descriptor: int) -> None:
                real(descriptor)
                path = Path(f"/proc/self/fd/{descriptor}").readlink()
                if path.suffix == ".safetensors":
                    path.unlink() if kind == "lost" else os.truncate(path, 8)

            patch.setattr(os, "fsync", fsync_and_lose)
        if exports:
            model, target = nn.Linear(2, 3), Path(folder) / "export"
            return _error_of(lambda: save_model_state(model, target, ctx=ctx, max_shard_bytes=1), StateError)
        return _error_of(lambda: save_on_ranks(CheckpointStore(folder), 1, ctx), StateError)


@pytest.mark.parametrize("exports", [False, True], ids=["checkpoint", "export"])
@pytest.mark.parametrize(
    ("kind", "text"), [("lost", "No such file or directory"), ("cut", r"has 8 bytes; expected \d+\.")]
)
def test_folder_with_files_unseen_by_main_process_is_not_completed(
    tmp_path: Path, kind: str, text: str, exports: bool
) -> None:
    found = run_ranks(_lose_part, str(tmp_path), kind, exports)
    assert found[0] == found[1]
    with pytest.raises(StateError, match=text):
        raise StateError(found[0])
    assert list(tmp_path.iterdir()) == []


def test_single_process_creates_no_check_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    real = os.open

    def note(path: str, *args: int, **options: int) -> int:
        names.append(Path(path).name)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", note)
    CheckpointStore(tmp_path).save(1, {"a": torch.ones(1)})
    assert "tensors-00000.safetensors" in names
    assert not [name for name in names if name.startswith(".shared-")]
