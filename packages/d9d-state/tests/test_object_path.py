"""Models and checkpoints in an object store, here fsspec's file system in memory, with failing requests."""

import json
import uuid
from collections.abc import Callable, Container, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import Region, UserError
from d9d_state import CheckpointStore, ModelFolder, StateError, check_same_model, load_model_state, model_tensors
from d9d_state.checkpoint.manifest import with_digest
from d9d_state.object_path import ObjectPath
from d9d_state.region_reader import RegionReader
from d9d_state.safetensors_file import write_safetensors


@pytest.fixture
def prefix() -> Iterator[ObjectPath]:
    path = ObjectPath.open(f"memory://{uuid.uuid4().hex}")
    yield path
    path.filesystem.rm(path.url, recursive=True) if path.exists() else None


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the waits between attempts instead of waiting."""
    waited: list[float] = []
    monkeypatch.setattr("d9d_state.object_path.time.sleep", waited.append)
    return waited


class _Requests:
    """Counts the requests of a file system, and fails those of chosen numbers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, prefix: ObjectPath, *names: str, failing: Container[int] = ()
    ) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []
        for name in names:
            call = getattr(prefix.filesystem, name)
            monkeypatch.setattr(prefix.filesystem, name, self._wrapped(name, call, failing))

    def _wrapped(self, name: str, call: Any, failing: Container[int]) -> Any:
        def request(*args: Any, **options: Any) -> Any:
            self.made.append((name, options))
            if len(self.made) in failing:
                raise ConnectionResetError("503 Slow Down")
            return call(*args, **options)

        return request


def test_checkpoints_are_saved_found_verified_and_deleted(prefix: ObjectPath) -> None:
    model = nn.Linear(3, 2)
    store = CheckpointStore(prefix.url, keep_last=2)
    for step in (1, 2, 3):
        store.save(
            step, {"model.weight": model.weight + step, "model.bias": model.bias}, state={"step": step}, background=True
        )
    store.wait()
    assert [info.step for info in store.complete()] == [3, 2]
    info = store.newest()
    assert info is not None
    check_same_model(info, model)
    assert (info.step, info.state, info.is_verified) == (3, {"step": 3}, True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in model_tensors(model).items()}
    store.load(info, loaded)
    assert torch.equal(loaded["model.weight"], model.weight + 3)
    with pytest.raises(UserError, match="step-00000003 exists and is complete"):
        store.save(3, {"model.weight": model.weight})
    with pytest.raises(UserError, match="is in an object store; expected a local folder"):
        _ = info.folder


def test_manifest_is_uploaded_last_and_deleted_first(prefix: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []
    for name in ("pipe_file", "rm_file"):
        call = getattr(prefix.filesystem, name)

        def request(path: str, *args: Any, call: Any = call, name: str = name) -> Any:
            requests.append(f"{name} {path.rpartition('/')[2]}")
            return call(path, *args)

        monkeypatch.setattr(prefix.filesystem, name, request)
    store = CheckpointStore(prefix.url, keep_last=1)
    store.save(1, {"a": torch.ones(2)})
    assert requests[-1] == "pipe_file manifest.json"
    requests.clear()
    store.save(2, {"a": torch.ones(2)})
    assert requests.index("rm_file manifest.json") == next(i for i, each in enumerate(requests) if "rm_file" in each)


def test_damage_is_found_and_the_step_before_is_used(prefix: ObjectPath) -> None:
    store = CheckpointStore(prefix.url)
    for step in (1, 2):
        store.save(step, {"a": torch.full((4,), float(step))})
    path = prefix / "step-00000002" / "tensors-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.upload([bytes(data)])
    info = store.newest()
    assert info is not None
    assert info.step == 1
    store.save(2, {"a": torch.zeros(4)})  # replaces the damaged one
    newest = store.newest()
    assert newest is not None
    assert newest.step == 2


def test_a_checkpoint_of_another_version_is_not_deleted(prefix: ObjectPath) -> None:
    store = CheckpointStore(prefix.url)
    for step in (1, 2):
        store.save(step, {"a": torch.full((4,), float(step))})
    manifest = prefix / "step-00000002" / "manifest.json"
    body = {key: value for key, value in json.loads(manifest.read_bytes()).items() if key != "sha256"}
    manifest.upload([with_digest({**body, "version": 4})])
    message = "it has format version 4; this d9d-state reads version 3"
    with pytest.raises(UserError, match=message):
        store.newest()
    with pytest.raises(UserError, match=message):
        store.save(2, {"a": torch.zeros(4)})
    assert b'"version":4' in manifest.read_bytes()


def test_interrupted_upload_is_no_checkpoint_and_is_deleted_by_a_later_save(
    prefix: ObjectPath, save_without_manifest: Callable[..., None]
) -> None:
    store = CheckpointStore(prefix.url)
    store.save(1, {"a": torch.ones(2)})
    save_without_manifest(store, 2, {"a": torch.ones(2)})
    assert (prefix / "step-00000002").is_dir()
    assert [info.step for info in CheckpointStore(prefix.url).complete()] == [1]
    CheckpointStore(prefix.url).discard_partials()
    assert (prefix / "step-00000002").exists()
    CheckpointStore(prefix.url).save(3, {"a": torch.ones(2)})
    assert not (prefix / "step-00000002").exists()


def test_interrupted_first_save_is_continued_with_fewer_ranks(prefix: ObjectPath) -> None:
    for rank in (0, 1):
        (prefix / "step-00000001" / f"tensors-{rank:05d}.safetensors").upload([b"cut"])
    store = CheckpointStore(prefix.url)
    store.discard_partials()
    store.check_new()
    store.save(1, {"a": torch.ones(2)})
    assert not (prefix / "step-00000001" / "tensors-00001.safetensors").exists()
    newest = store.newest()
    assert newest is not None
    assert newest.step == 1


def test_failed_requests_are_repeated_with_growing_waits(
    prefix: ObjectPath, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = _Requests(monkeypatch, prefix, "pipe_file", "cat_file", "ls", "info", failing=(1, 2, 5, 8, 13, 14))
    store = CheckpointStore(prefix.url)
    store.save(1, {"a": torch.arange(5)})
    info = store.newest()
    assert info is not None
    loaded = torch.zeros(5, dtype=torch.int64)
    store.load(info, {"a": loaded})
    assert torch.equal(loaded, torch.arange(5))
    assert len(requests.made) > 14
    assert len(waits) == 6
    assert waits[1] > 0.5 * waits[0]


def test_unreachable_store_is_an_error_and_not_damage(
    prefix: ObjectPath, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(prefix.url)
    store.save(1, {"a": torch.ones(2)})
    _Requests(monkeypatch, prefix, "cat_file", failing=range(100))
    with pytest.raises(StateError, match=r"could not be reached in 6 attempts: 503 Slow Down"):
        store.newest()
    assert len(waits) == 5


def test_a_shard_is_read_by_requests_for_its_bytes_only(prefix: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.rand(64, 2048)
    write_safetensors(prefix / "model.safetensors", {"weight": weight, "other": torch.rand(50_000)})
    folder = ModelFolder.open(prefix.url)
    requests = _Requests(monkeypatch, prefix, "cat_file")
    rows = torch.empty(16, 2048)
    with RegionReader(folder) as reader:
        reader.read_into("weight", Region((16, 0), (16, 2048)), rows)
        assert reader.num_bytes_read == rows.nbytes
    assert torch.equal(rows, weight[16:32])
    assert sum(options["end"] - options["start"] for _, options in requests.made) == rows.nbytes


def test_model_is_loaded_from_a_url(prefix: ObjectPath) -> None:
    saved, model = nn.Linear(4, 3), nn.Linear(4, 3)
    write_safetensors(prefix / "model.safetensors", dict(saved.state_dict()))
    load_model_state(model, prefix.url, progress=False)
    assert torch.equal(model.weight, saved.weight)
    with pytest.raises(UserError, match=r"nowhere contains no model; expected model.safetensors"):
        load_model_state(model, f"{prefix.url}/nowhere")


def test_unknown_protocol_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot be opened: Protocol not known: nope"):
        ObjectPath.open("nope://bucket/run")
