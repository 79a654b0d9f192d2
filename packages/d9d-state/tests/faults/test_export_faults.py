"""A failure or power loss during an export leaves the earlier export or the new one, never a mixture."""

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from file_calls import Fail, Fault, FullDisk, Kill, count_calls, file_calls
from forked_ranks import run_forked
from power_loss import Disk, Recording, crash_images, read_tree, write_tree
from torch import nn

from d9d_dist import DistributedContext
from d9d_state import JsonValue, ModelFolder, StateError, load_model_state, save_model_state


def _model(of: int) -> nn.Module:
    model = nn.Linear(2, 3)
    for parameter in model.parameters():
        nn.init.constant_(parameter, of)
    return model


def _config(of: int) -> dict[str, JsonValue]:
    return {"config.json": {"of": of}}


def _export(of: int, folder: Path) -> None:
    source = folder.parent.with_name("source")
    source.mkdir(exist_ok=True)
    (source / "tokenizer.json").write_text("{}")
    # One byte per file, so each tensor gets its own file.
    save_model_state(_model(of), folder, max_shard_bytes=1, extra_files=_config(of), source=source)


def _found(folder: Path) -> int | None:
    """Return which export is in the folder; `None` if there is none."""
    if not folder.exists():
        return None
    model = _model(-1)
    load_model_state(model, folder)
    (value,) = {value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()}
    assert json.loads((folder / "config.json").read_text())["of"] == value
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert {path.name for path in folder.iterdir() if path.suffix == ".safetensors"} == {
        path.name for path in ModelFolder.open(folder).files.values()
    }
    return int(value)


def _begin(root: Path, *, fresh: bool) -> int | None:
    root.mkdir()
    if not fresh:
        _export(1, root / "export")
    return None if fresh else 1


def _assert_can_export_again(root: Path) -> None:
    _export(3, root / "export")
    assert _found(root / "export") == 3
    assert [path.name for path in root.iterdir()] == ["export"]


_FAULTS: dict[str, tuple[Callable[[int], Fault], str]] = {
    "EIO": (Fail, "Input/output error"),
    "ENOSPC once": (lambda at: Fail(at, errno.ENOSPC), "No space left on device"),
    "a full disk": (FullDisk, "No space left on device"),
}


@pytest.mark.parametrize("kind", _FAULTS)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "replaced"])
def test_an_error_at_any_call_leaves_a_complete_export(
    tmp_path: Path, kind: str, fresh: bool, points: Callable[..., Sequence[int]]
) -> None:
    fault_at, text = _FAULTS[kind]
    before = _begin(tmp_path / "counted", fresh=fresh)
    count = count_calls(tmp_path / "counted", lambda: _export(2, tmp_path / "counted" / "export"))
    raised = 0
    for at in points(count, stride=4):
        root = tmp_path / str(at)
        _begin(root, fresh=fresh)
        message = None
        with file_calls(root, fault_at(at)):
            try:
                _export(2, root / "export")
            except StateError as error:
                message = str(error)
                raised += 1
        assert _found(root / "export") in (before, 2), f"call {at}"
        if message is not None:
            assert "export could not be written" in message, f"call {at}"
            assert text in message, f"call {at}"
        else:
            assert _found(root / "export") == 2, f"call {at}"
        _assert_can_export_again(root)
    assert raised > 0


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "replaced"])
def test_power_loss_leaves_the_old_or_the_new_export(
    tmp_path: Path, fresh: bool, exhaustive: bool, points: Callable[..., Sequence[int]]
) -> None:
    root = tmp_path / "root"
    before = _begin(root, fresh=fresh)
    start, recording = read_tree(root), Recording(root)
    with file_calls(root, recording):
        _export(2, root / "export")
    disk = Disk(start)
    disk.do(recording.operations)
    assert disk.now() == read_tree(root), "the recording misses something"
    shutil.rmtree(root)
    outcomes: set[int | None] = set()
    cuts = [0, *points(len(recording.operations), stride=3), len(recording.operations)]
    images = crash_images(start, recording.operations, cuts=cuts, seeds=30 if exhaustive else 2)
    for name, image in images.items():
        write_tree(tmp_path / name, image)
        found = _found(tmp_path / name / "export")
        assert found in (before, 2), name
        outcomes.add(found)
        _assert_can_export_again(tmp_path / name)
    assert outcomes == {before, 2}


_CALLS = ((45, 7), (8, 2))  # calls of the main process, which also replaces the earlier export, and of the other rank


def _export_on_ranks(root: Path, told: Path | None = None) -> Callable[[DistributedContext], None]:
    def work(ctx: DistributedContext) -> None:
        try:
            save_model_state(
                _model(2), root / "export", ctx=ctx, max_shard_bytes=1, extra_files=_config(2), source=root / "export"
            )
        except StateError as error:
            if told is None:
                raise
            told.with_name(f"{told.name}-{ctx.rank}").write_text(str(error))

    return work


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_at_any_call_leaves_a_complete_export(
    tmp_path: Path, rank: int, points: Callable[..., Sequence[int]]
) -> None:
    killed = 0
    for at in points(_CALLS[rank][0], stride=_CALLS[rank][1]):
        root = tmp_path / str(at)
        _begin(root, fresh=False)
        codes = run_forked(_export_on_ranks(root), root, world_size=2, faults={rank: Kill(at)})
        killed += codes[rank] == -9
        found = _found(root / "export")
        assert found in (1, 2), f"call {at}"
        assert found == 2 or codes[rank] == -9, f"call {at}"
        _assert_can_export_again(root)
    assert killed > 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_error_on_a_rank_raises_on_all(tmp_path: Path, rank: int, points: Callable[..., Sequence[int]]) -> None:
    errors = 0
    for at in points(_CALLS[rank][0], stride=_CALLS[rank][1]):
        root = tmp_path / str(at)
        _begin(root, fresh=False)
        run_forked(_export_on_ranks(root, tmp_path / f"told-{at}"), root, world_size=2, faults={rank: Fail(at)})
        told = [path.read_text() for path in tmp_path.glob(f"told-{at}-*")]
        assert len(told) in (0, 2), f"call {at}: {told}"
        assert all("Input/output error" in text for text in told), f"call {at}: {told}"
        assert _found(root / "export") in ((1, 2) if told else (2,)), f"call {at}"
        errors += bool(told)
        _assert_can_export_again(root)
    assert errors > 0
