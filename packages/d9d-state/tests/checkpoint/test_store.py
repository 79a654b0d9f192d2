import json
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_state import CheckpointStore, Retention, StateError, TensorInfo
from d9d_state.checkpoint import _commit, _folder
from d9d_state.checkpoint import newest as newest_module
from d9d_state.checkpoint._folder import newest_first
from d9d_state.checkpoint.manifest import with_digest


def _tensors(value: int) -> dict[str, Tensor]:
    return {
        "model.a": torch.arange(12.0).view(3, 4) / 7 + value,
        "model.b": (torch.arange(5) / 7 + value).bfloat16(),
        "model.c": torch.empty(0, 2),
        "optimizer.a.step": torch.tensor(float(value)),
        "strided": (torch.arange(12).view(3, 4) + value).t(),
    }


def _save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, _tensors(step), state={"step": step}, rank_state=[step, 0.1])


def _steps(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.complete()]


def test_store_creates_nothing_before_the_first_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "deep" / "checkpoints")
    assert store.newest() is None
    store.discard_partials()
    assert list(tmp_path.iterdir()) == []


def test_save_and_load_round_trip_bitwise(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    _save(store, 7)
    info = store.newest()
    assert info is not None
    assert (info.step, info.state, info.rank_states) == (7, {"step": 7}, [[7, 0.1]])
    assert info.tensors == {name: TensorInfo.of(tensor) for name, tensor in _tensors(7).items()}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in _tensors(0).items()}
    store.load(info, loaded)
    for name, tensor in _tensors(7).items():
        assert torch.equal(loaded[name], tensor), name
    info.verify()


def test_subset_of_tensors_can_be_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 7)
    info = store.newest()
    assert info is not None
    tensor = torch.zeros(5, dtype=torch.bfloat16)
    store.load(info, {"model.b": tensor})
    assert torch.equal(tensor, _tensors(7)["model.b"])


def test_newest_has_the_highest_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 9, 20, 100)
    assert _steps(store) == [100, 20, 9]


def test_checkpoints_of_one_folder_have_the_same_run_id(tmp_path: Path) -> None:
    _save(CheckpointStore(tmp_path / "a"), 1)
    _save(CheckpointStore(tmp_path / "a"), 2)
    _save(CheckpointStore(tmp_path / "b"), 1)
    _save(CheckpointStore(tmp_path / "c", run_id="mine"), 1)
    ids = [info.manifest.run_id for name in "abc" for info in CheckpointStore(tmp_path / name).complete()]
    assert ids[0] == ids[1] != ids[2]
    assert ids[3] == "mine"


def test_checkpoints_are_never_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 7)
    before = {path: path.read_bytes() for path in (tmp_path / "step-00000007").iterdir()}
    with pytest.raises(UserError, match="step-00000007 exists and is complete; checkpoints are never overwritten"):
        _save(store, 7)
    assert {path: path.read_bytes() for path in (tmp_path / "step-00000007").iterdir()} == before


def test_damaged_checkpoint_is_moved_aside_by_a_new_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    for _ in range(2):
        _save(store, 7)
        (tmp_path / "step-00000007" / "state.json").unlink()
    _save(store, 7)
    assert _steps(store) == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000007",
        "step-00000007.damaged-1",
        "step-00000007.damaged-2",
    ]
    assert "moving" in caplog.text


def _save_by_another_version(folder: Path) -> bytes:
    manifest = folder / "manifest.json"
    body = {key: value for key, value in json.loads(manifest.read_bytes()).items() if key != "sha256"}
    manifest.write_bytes(with_digest({**body, "version": 4}))
    return manifest.read_bytes()


def test_a_checkpoint_of_another_version_is_neither_skipped_nor_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1, 2)
    manifest = _save_by_another_version(tmp_path / "step-00000002")
    message = "it has format version 4; this d9d-state reads version 3"
    with pytest.raises(UserError, match=message):
        store.newest()
    with pytest.raises(UserError, match=message):
        _save(store, 2)
    assert _steps(store) == [1]  # a list of those that can be loaded
    assert message in caplog.text
    with CheckpointStore(tmp_path, retention=Retention(last=1)) as keeping:
        _save(keeping, 3)
    assert _steps(store) == [3]
    assert store.newest() is not None  # it is newer
    assert (tmp_path / "step-00000002" / "manifest.json").read_bytes() == manifest


def test_older_checkpoints_of_another_version_do_not_matter(tmp_path: Path) -> None:
    _save(CheckpointStore(tmp_path), 1, 2)
    _save_by_another_version(tmp_path / "step-00000001")
    found = newest_first(tmp_path, only_run=None, above=1, refuse_versions=True)
    assert [info.step for info in found] == [2]


def test_only_tensors_and_json_are_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    not_tensors: Any = {"a": [1]}
    with pytest.raises(ValueError, match=r"a is of type list; expected a tensor\. Pass other values in state="):
        store.save(1, not_tensors)
    not_json: Any = {"x": object()}
    with pytest.raises(ValueError, match=r"value\.x is of type object"):
        store.save(1, {}, state=not_json)
    with pytest.raises(ValueError, match=r"value\.x is of type object"):
        store.save(1, {}, rank_state=not_json)
    wrong_steps: list[Any] = [-1, True, 1.5, "3"]
    for step in wrong_steps:
        with pytest.raises(ValueError, match=r"got step = .*; expected an int, 0 or more"):
            store.save(step, {})
        with pytest.raises(ValueError, match=r"got step = .*; expected an int, 0 or more"):
            store.save_local(step, {})
    with pytest.raises(ValueError, match=r"not support torch\.complex128; use complex64, or pass torch\.view_as_real"):
        store.save(1, {"a": torch.ones(2, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    _save(store, 1, 2, 3)
    assert _steps(store) == [3, 2]
    with pytest.raises(ValueError, match="got last = 0; expected an int, at least 1, or None"):
        CheckpointStore(tmp_path, keep_last=0)


@pytest.mark.parametrize("keep_last", [1, 2, None])
@pytest.mark.parametrize("background", [False, True])
def test_a_run_goes_back_to_an_earlier_step_after_discarding_the_later_ones(
    tmp_path: Path, keep_last: int | None, background: bool
) -> None:
    _save(CheckpointStore(tmp_path), 5, 10, 12)
    store = CheckpointStore(tmp_path, keep_last=keep_last)
    with pytest.raises(UserError, match=r"got step = 6, but .* has a checkpoint of the later step 12, from which"):
        store.save(6, {"a": torch.ones(3)}, background=background)
    assert _steps(store) == [12, 10, 5]
    with pytest.raises(UserError, match=r"has no undamaged checkpoint of step 6 of this run; expected"):
        store.discard_after(6)
    store.discard_after(5)
    assert _steps(store) == [5]
    for step in (6, 7, 8):
        store.save(step, {"a": torch.ones(3)}, background=background)
    newest = store.newest()
    assert newest is not None
    assert newest.step == 8
    assert _steps(store) == [8, 7, 6, 5][:keep_last]


def test_only_later_steps_of_the_same_run_are_discarded(tmp_path: Path) -> None:
    _save(CheckpointStore(tmp_path, run_id="other"), 10)
    store = CheckpointStore(tmp_path, run_id="mine")
    _save(store, 5, 7)
    store.discard_after(5)
    assert _steps(store) == [5]
    assert _steps(CheckpointStore(tmp_path)) == [10, 5]


def test_a_damaged_later_step_does_not_stop_a_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 5, 10)
    next(tmp_path.glob("step-00000010/*.safetensors")).write_bytes(b"cut")
    _save(store, 6)
    assert _steps(store) == [6, 5]


def _damage(folder: Path) -> None:
    """Change one byte, so that only the digest is wrong."""
    path = next(folder.glob("*.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_no_checkpoint_is_discarded_if_the_step_to_go_back_to_is_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 5, 10, 12)
    _damage(tmp_path / "step-00000005")
    with pytest.raises(UserError, match=r"no undamaged checkpoint of step 5 of this run.*Nothing is deleted"):
        store.discard_after(5)
    assert _steps(store) == [12, 10, 5]
    wrong_steps: list[Any] = [-1, True, 5.0, "5"]
    for step in wrong_steps:
        with pytest.raises(UserError, match=r"got step = .*; expected an int, 0 or more"):
            store.discard_after(step)


def test_a_later_step_with_wrong_digests_does_not_stop_a_save(tmp_path: Path) -> None:
    _save(CheckpointStore(tmp_path), 5, 10, 12)
    _damage(tmp_path / "step-00000012")
    store = CheckpointStore(tmp_path)
    with pytest.raises(UserError, match=r"has a checkpoint of the later step 10, from which"):
        _save(store, 6)
    _damage(tmp_path / "step-00000010")
    _save(CheckpointStore(tmp_path), 6, 7)


def test_steps_of_another_run_are_neither_discarded_nor_stop_a_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 5, 7)
    _save(CheckpointStore(tmp_path, run_id="other"), 10)
    _save(store, 8)
    store.discard_after(5)
    assert _steps(store) == [10, 5]


def test_each_skipped_entry_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    (tmp_path / "step-00000002.partial").mkdir()
    for _ in range(3):
        assert _steps(store) == [1]
        assert store.newest() is not None
    assert caplog.text.count("step-00000002.partial: it is not a checkpoint") == 1


def test_failed_deletion_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    _save(store, 1)

    def refuse(_path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "rmdir", refuse)
    _save(store, 2)
    assert "step-00000001 could not be deleted: [Errno 1] Operation not permitted" in caplog.text
    assert _steps(store) == [2]


def test_only_partial_folders_are_discarded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    for name in ("step-00000002.partial", "mine.partial", "step-2.partial", "step-00000003.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "step-00000004.partial").symlink_to(tmp_path / "mine.partial")
    store.discard_partials()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.partial",
        "step-00000001",
        "step-00000003.bak",
        "step-00000004.partial",
        "step-2.partial",
    ]


def _break(folder: Path, how: str) -> None:
    match how:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "damaged manifest":
            data = bytearray((folder / "manifest.json").read_bytes())
            data[40] ^= 1
            (folder / "manifest.json").write_bytes(data)
        case "missing file":
            (folder / "tensors-00000.safetensors").unlink()
        case "truncated file":
            os.truncate(folder / "tensors-00000.safetensors", 100)
        case "grown file":
            with (folder / "rank-00000.json").open("ab") as file:
                file.write(b" ")
        case "linked file":
            (folder / "state.json").rename(folder / "elsewhere")
            (folder / "state.json").symlink_to("elsewhere")
        case "link to a folder":
            folder.rename(folder.with_name("elsewhere"))
            folder.symlink_to("elsewhere")
        case "a file":
            shutil.rmtree(folder)
            folder.touch()
        case name:
            folder.rename(folder.with_name(name))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("no manifest", "manifest.json cannot be read: No such file or directory"),
        ("damaged manifest", "manifest.json is damaged"),
        ("missing file", "tensors-00000.safetensors cannot be read"),
        ("truncated file", "tensors-00000.safetensors has 100 bytes; expected "),
        ("grown file", "rank-00000.json has 8 bytes; expected 7"),
        ("linked file", "state.json is a symlink"),
        ("step-00000002.partial", "it is not a checkpoint; expected a folder with a name like"),
        ("step-00000002.bak", "it is not a checkpoint; expected a folder with a name like"),
        ("step-00000002.damaged-1", "it is not a checkpoint; expected a folder with a name like"),
        ("step-00000003", "its manifest has step 2"),
        ("step-000000002", "it is not a checkpoint; expected a folder with a name like"),
        ("link to a folder", "it is not a checkpoint; expected a folder with a name like"),
        ("a file", "it is not a checkpoint; expected a folder with a name like"),
    ],
)
def test_incomplete_checkpoints_are_skipped_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, reason: str
) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1, 2)
    _break(tmp_path / "step-00000002", how)
    with caplog.at_level(logging.WARNING):
        info = store.newest()
    assert info is not None
    assert info.step == 1
    assert "skipping" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "state.json", "rank-00000.json"])
def test_every_changed_byte_is_detected_and_file_named(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    info = store.newest()
    assert info is not None
    path = info.folder / name
    data = path.read_bytes()
    for index, byte in enumerate(data):
        with path.open("r+b") as file:
            file.seek(index)
            file.write(bytes([byte ^ 1 << index % 8]))
        what = (
            r"(the header|the content|[a-z.]+ \[.*\] \w+) does not have the recorded XXH3-128 digest at step 1\. Move"
        )
        with pytest.raises(StateError, match=rf"{name}: {what}"):
            info.verify()
        with path.open("r+b") as file:
            file.seek(index)
            file.write(data[index : index + 1])
    info.verify()


def test_damage_is_detected_before_a_tensor_changes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    (info,) = store.complete()
    with (info.folder / "tensors-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    tensors = {name: torch.full_like(tensor, 5) for name, tensor in _tensors(1).items()}
    with pytest.raises(
        StateError,
        match=r"model\.b \[5\] bfloat16 does not have the recorded XXH3-128 digest at step 1\. Move",
    ):
        store.load(info, tensors)
    assert all(bool((tensor == 5).all()) for tensor in tensors.values())


def test_damaged_state_raises(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    info = store.newest()
    assert info is not None
    (info.folder / "state.json").write_bytes(b'{"step":2}')
    (info.folder / "rank-00000.json").write_bytes(b"[1,0.2]")
    with pytest.raises(StateError, match=r"state\.json: the content does not have the recorded XXH3-128 digest"):
        _ = info.state
    with pytest.raises(StateError, match=r"rank-00000\.json: the content does not have the recorded XXH3-128 digest"):
        _ = info.rank_states


def test_file_of_another_checkpoint_is_detected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1, 2)
    name = "tensors-00000.safetensors"
    shutil.copy(tmp_path / "step-00000001" / name, tmp_path / "step-00000002" / name)
    info = store.newest(verify=False)
    assert info is not None
    assert (info.step, info.is_verified) == (2, False)
    what = r"strided \[4, 3\] int64 does not have the recorded XXH3-128 digest; .*model\.a \[3, 4\] float32"
    with pytest.raises(StateError, match=what):
        store.load(info, {"model.a": torch.zeros(3, 4)})
    info = store.newest()
    assert info is not None
    assert (info.step, info.is_verified) == (1, True)
    assert "skipping" in caplog.text
    assert "optimizer.a.step [] float32 does not have the recorded XXH3-128 digest; " in caplog.text


def test_load_does_not_repeat_verification_of_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    info = store.newest()
    assert info is not None
    (listed,) = store.complete()

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("digests are computed")

    monkeypatch.setattr(newest_module, "damage", refuse)
    store.load(info, _tensors(0))
    with pytest.raises(AssertionError, match="digests are computed"):
        store.load(listed, _tensors(0))


@pytest.mark.parametrize("moment", ["open_complete", "verify_together"])
def test_newest_is_the_new_checkpoint_if_a_job_deletes_the_listed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    job = CheckpointStore(tmp_path, keep_last=1)
    _save(job, 1)
    module: Any = _folder if moment == "open_complete" else newest_module
    real = getattr(module, moment)

    def save_first(*args: Any) -> Any:
        monkeypatch.setattr(module, moment, real)
        _save(job, 2)
        return real(*args)

    monkeypatch.setattr(module, moment, save_first)
    info = CheckpointStore(tmp_path).newest()
    assert info is not None
    assert (info.step, info.is_verified) == (2, True)


def test_newest_is_none_if_all_are_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    _save(store, 1)
    _flip_last(tmp_path / "step-00000001" / "tensors-00000.safetensors")
    assert store.newest() is None
    assert "model.b [5] bfloat16 does not have the recorded XXH3-128 digest at step 1" in caplog.text
    _save(store, 1)
    assert store.newest() is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000001.damaged-1"]


def test_damaged_checkpoint_does_not_count_for_retention(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    _save(store, 1, 9)
    _flip_last(tmp_path / "step-00000009" / "tensors-00000.safetensors")
    assert store.newest() is not None
    _save(store, 2)
    assert _steps(store) == [9, 2, 1]


def _flip_last(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def test_load_error_lists_all_mismatches(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    info = store.newest()
    assert info is not None
    tensors = {"model.a": torch.zeros(2), "model.b": torch.zeros(5), "model.z": torch.zeros(1)}
    with pytest.raises(
        StateError,
        match=r"step-00000001 does not match the tensors to load: model\.z is not in the checkpoint; "
        r"model\.a is \[3, 4\] float32, expected \[2\] float32; "
        r"model\.b is \[5\] bfloat16, expected \[5\] float32",
    ):
        store.load(info, tensors)


def test_full_disk_keeps_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)

    def full(_descriptor: int, _block: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StateError, match=r"step-00000002 could not be written: .*No space left on device"):
            _save(store, 2)
    assert _steps(store) == [1]
    _save(store, 2)
    assert _steps(store) == [2, 1]


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="step-00000001 could not be written: "):
        _save(CheckpointStore(tmp_path / "file"), 1)


_pickle_is_forbidden = [False]


def _refuse_pickle(event: str, _arguments: object) -> None:
    if _pickle_is_forbidden[0] and event == "pickle.find_class":
        raise AssertionError("something was unpickled")


@pytest.fixture
def _no_pickle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("something was pickled or unpickled")

    sys.addaudithook(_refuse_pickle)
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    _pickle_is_forbidden[0] = True
    yield
    _pickle_is_forbidden[0] = False


@pytest.mark.usefixtures("_no_pickle")
def test_nothing_is_pickled_or_unpickled(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    info = store.newest()
    assert info is not None
    store.load(info, _tensors(0))
    assert info.state == {"step": 1}
    assert {path.suffix for path in info.folder.iterdir()} == {".json", ".safetensors"}
    with pytest.raises(AssertionError, match="something was pickled"):
        pickle.dumps(1)


def test_manifest_above_size_limit_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(_commit, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(StateError, match=r"its manifest has \d+ bytes; expected at most 100\."):
        _save(store, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_listed_does_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    _save(store, 1)
    original, save_folder = Path.iterdir, store.folder / "step-00000002"

    def refuse(path: Path) -> Iterator[Path]:
        if path == store.folder and save_folder.exists():
            raise PermissionError(13, "Permission denied")
        return original(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        _save(store, 2)
    assert _steps(store) == [2, 1]
    assert "could not be read, so no old checkpoint is deleted" in caplog.text


def test_repr_of_checkpoint_is_short(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    assert len(repr(store.newest())) < 300
