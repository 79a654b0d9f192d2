"""Checkpoints and models in S3 servers on this machine, behind a proxy that answers with errors and cuts connections.

moto runs in this process. rclone and OpenStack Swift need the lane `s3` of `.ci/nightly`.
"""

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from threading import Lock, Thread
from typing import Any

import pytest
import torch
from s3_servers import KEY, SECRET, SERVERS, App
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from d9d_dist import MeshConfig, full_tensor
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore, StateError, load_model_state
from d9d_state.object_path import ObjectPath
from d9d_state.safetensors_file import write_safetensors

_KEYS = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
    # rclone answers a request for a range with the checksum of the whole object, which botocore would compare.
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}
_BUCKET = "s3://d9d"


class _Faulty:
    """WSGI application that answers some requests with 503, and cuts the connection of others.

    Attributes:
        parts: Numbers of the parts of uploads that it has received, in order.
        name: Name of the server.
        cut_after: Number of parts after which it refuses requests.
        refusals: Number of requests that it refuses then; all of them if negative.
        on_cut: Called before the first request is refused.
    """

    def __init__(self, app: App, *, name: str) -> None:
        self.name = name
        self._app, self._draws, self._lock = app, random.Random(0), Lock()  # noqa: S311
        self.reset()

    def reset(self) -> None:
        self.rate, self.faults, self.bytes_sent, self.bytes_received = 0.0, 0, 0, 0
        self.parts: list[int] = []
        self.cut_after = self.refusals = -1
        self.on_cut: Callable[[], object] = lambda: None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        number = re.search(r"partNumber=(\d+)", environ["QUERY_STRING"])
        if number is None or environ["REQUEST_METHOD"] != "PUT":
            return self._answer(environ, start_response)
        with self._lock:
            if len(self.parts) == self.cut_after:
                self.on_cut()
            answer = self._answer(environ, start_response)
            if environ.get("d9d.answered"):
                self.parts.append(int(number[1]))
                self.bytes_received += int(environ["CONTENT_LENGTH"])
            return answer

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        draw, is_cut = self._draws.random(), len(self.parts) == self.cut_after
        if is_cut or draw < self.rate:
            self.faults += 1
            if self.faults == self.refusals:
                self.cut_after = -1
            if not is_cut and draw < self.rate / 2:
                environ["werkzeug.socket"].close()
            start_response("503 Slow Down", [("Content-Length", "0")])
            return []
        answer = list(self._app(environ, start_response))
        environ["d9d.answered"] = True
        self.bytes_sent += sum(map(len, answer)) if environ["REQUEST_METHOD"] == "GET" else 0
        return answer


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, _Faulty]]:
    """URL of the proxy in front of a server, and its application."""
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs, which is optional")
    s3fs.S3FileSystem.clear_instance_cache()  # it keeps the URL of another server
    serving = pytest.importorskip("werkzeug.serving", reason="needs moto, which is optional")
    folder = tmp_path_factory.mktemp(request.param)
    with SERVERS[request.param](folder) as server:
        app = _Faulty(server, name=request.param)
        served = serving.make_server("127.0.0.1", 0, app, threaded=True)
        Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}", app
        served.shutdown()


@pytest.fixture
def bucket(server: tuple[str, _Faulty], monkeypatch: pytest.MonkeyPatch) -> tuple[str, _Faulty]:
    url, app = server
    app.reset()
    for name, value in {**_KEYS, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(name, value)
    filesystem = ObjectPath.open(_BUCKET).filesystem
    if not filesystem.exists("d9d"):
        filesystem.mkdir("d9d")
    return url, app


def _tensors(rank: int, num_ranks: int, step: int) -> dict[str, Tensor]:
    mesh = MeshConfig(data_parallel_shard=-1).build().mesh_for("dense")["dp_cp_shard"]
    whole = torch.arange(float(1 << 16)).view(256, 256) + step
    local = whole.tensor_split(num_ranks)[rank].clone()
    return {"a": DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())}


def _save_and_load(endpoint: str, folder: str) -> list[int]:
    s3fs: Any = import_module("s3fs")  # optional
    s3fs.S3FileSystem.clear_instance_cache()  # the ranks have run with another server
    os.environ.update({**_KEYS, "AWS_ENDPOINT_URL": endpoint})
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        store = CheckpointStore(folder, keep_last=2)
        for step in (1, 2, 3):
            store.save(step, _tensors(ctx.rank, ctx.world_size, step), rank_state=ctx.rank, background=True, ctx=ctx)
        store.wait()
        info = store.newest(ctx)
        assert info is not None
        loaded = _tensors(ctx.rank, ctx.world_size, 0)
        store.load(info, loaded, ctx)
        expected = _tensors(ctx.rank, ctx.world_size, info.step)
        assert torch.equal(full_tensor(loaded["a"]), full_tensor(expected["a"]))
        assert info.rank_states == list(range(ctx.world_size))
        return [each.step for each in store.complete()]


@pytest.mark.full
@pytest.mark.parametrize("rate", [0.0, 0.2], ids=["calm", "a fifth of the requests fails"])
def test_ranks_save_and_load_checkpoints(bucket: tuple[str, _Faulty], rate: float) -> None:
    url, app = bucket
    app.rate = rate
    assert run_ranks(_save_and_load, url, f"{_BUCKET}/run-{rate}/checkpoints") == [[3, 2]] * 2
    assert (app.faults > 0) == (rate > 0)


@pytest.mark.full
def test_large_upload_has_several_parts(bucket: tuple[str, _Faulty]) -> None:
    _, app = bucket
    app.rate = 0.1
    weight = torch.rand(5 << 20)
    store = CheckpointStore(f"{_BUCKET}/large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d9d_state.object_path._MULTIPART", 5 << 20)  # the smallest that S3 allows
        store.save(1, {"weight": weight})
    info = store.newest()
    assert info is not None
    assert len(app.parts) >= 2, "an upload in one part"
    loaded = torch.empty_like(weight)
    store.load(info, {"weight": loaded})
    assert torch.equal(loaded, weight)


_PART = 1 << 18  # bytes; S3 allows no less than 5 MiB
_NUM_PARTS = 21
_SAVE = f"""
import sys, torch
from d9d_state import CheckpointStore, object_path
object_path._MULTIPART = {_PART}
CheckpointStore(sys.argv[1]).save(1, {{"weight": torch.arange({20 * _PART // 4}, dtype=torch.int32)}})
"""


def _weight() -> Tensor:
    return torch.arange(20 * _PART // 4, dtype=torch.int32)


@pytest.fixture
def cut(
    bucket: tuple[str, _Faulty], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> CheckpointStore:
    """Store with a save of step 1 that lost the connection after 14 of the 21 parts of its tensor file."""
    _, app = bucket
    store = CheckpointStore(f"{_BUCKET}/{request.node.name}")
    monkeypatch.setattr("d9d_state.object_path._MULTIPART", _PART)
    with monkeypatch.context() as patch:
        patch.setattr("d9d_state.object_path._ATTEMPTS", 1)
        patch.setattr("s3fs.S3FileSystem.retries", 1)
        app.cut_after = 14
        with pytest.raises(StateError, match="could not be reached in 1 attempts"):
            store.save(1, {"weight": _weight()})
    assert len(app.parts) == 14
    app.reset()
    return store


def _is_saved(store: CheckpointStore, weight: Tensor) -> bool:
    info, loaded = store.newest(), torch.zeros_like(weight)
    assert info is not None
    store.load(info, {"weight": loaded})
    return torch.equal(loaded, weight)


def _unfinished(store: CheckpointStore) -> list[Any]:
    assert isinstance(store.root, ObjectPath)
    assert store.root._in_s3 is not None
    return store.root._in_s3.unfinished()


@pytest.mark.full
def test_upload_of_a_killed_process_continues(bucket: tuple[str, _Faulty], monkeypatch: pytest.MonkeyPatch) -> None:
    _, app = bucket
    url = f"{_BUCKET}/killed"
    with subprocess.Popen([sys.executable, "-c", _SAVE, url]) as process:
        app.cut_after, app.on_cut = 14, process.kill
        assert process.wait() < 0
    stored = set(app.parts)
    assert len(stored) == 14
    app.reset()
    monkeypatch.setattr("d9d_state.object_path._MULTIPART", _PART)
    store = CheckpointStore(url)
    assert store.newest() is None
    store.discard_partials()
    store.check_new()
    store.save(1, {"weight": _weight()})
    assert sorted(app.parts) == sorted(set(range(1, _NUM_PARTS + 1)) - stored)
    assert app.bytes_received < 0.34 * _weight().nbytes
    assert _is_saved(store, _weight())


@pytest.mark.full
def test_upload_continues_when_the_connection_returns(
    bucket: tuple[str, _Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, app = bucket
    store = CheckpointStore(f"{_BUCKET}/lost")
    monkeypatch.setattr("d9d_state.object_path._MULTIPART", _PART)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    app.cut_after, app.refusals = 14, 4
    store.save(1, {"weight": _weight()})
    assert sorted(app.parts) == list(range(1, _NUM_PARTS + 1)), "a part was sent twice"
    assert app.faults == 4
    assert _is_saved(store, _weight())


@pytest.mark.full
def test_stored_part_with_other_bytes_is_sent_again(bucket: tuple[str, _Faulty], cut: CheckpointStore) -> None:
    _, app = bucket
    if app.name == "rclone":
        pytest.skip("rclone does not replace a stored part")
    ((found, upload_id),) = _unfinished(cut)
    found._call("upload_part", Key=found.key, UploadId=upload_id, PartNumber=2, Body=bytes(_PART))
    app.reset()
    cut.save(1, {"weight": _weight()})
    assert 2 in app.parts
    assert len(app.parts) == 8
    assert _is_saved(cut, _weight())


@pytest.mark.full
def test_after_a_cut_upload_changed_values_are_sent_completely(
    bucket: tuple[str, _Faulty], cut: CheckpointStore
) -> None:
    _, app = bucket
    cut.save(1, {"weight": _weight() + 1})
    assert set(app.parts) == set(range(1, _NUM_PARTS + 1))
    # rclone does not replace a stored part, so the upload starts again.
    assert app.name == "rclone" or len(app.parts) == _NUM_PARTS
    assert _is_saved(cut, _weight() + 1)


@pytest.mark.full
def test_cut_upload_is_aborted_by_a_later_save(cut: CheckpointStore) -> None:
    ObjectPath.open(f"{cut.root}/step-00000001/rank-00007.json").upload([b"0"])
    cut.discard_partials()
    assert len(_unfinished(cut)) == 1
    cut.save(2, {"weight": torch.zeros(3)})
    assert _unfinished(cut) == []
    # rclone also lists empty folders.
    names = [path.name for path in cut.root.iterdir() if isinstance(path, ObjectPath) and path.sizes()]
    assert [name for name in names if "step" in name] == ["step-00000002"]


@pytest.mark.full
def test_stored_file_is_not_sent_again(
    bucket: tuple[str, _Faulty], cut: CheckpointStore, save_without_manifest: Callable[..., None]
) -> None:
    _, app = bucket
    save_without_manifest(cut, 1, {"weight": _weight()})
    app.reset()
    cut.save(1, {"weight": _weight()})
    assert len(app.parts) == (_NUM_PARTS if app.name == "rclone" else 0)  # rclone's ETag is not that of the parts
    assert _is_saved(cut, _weight())


@pytest.mark.full
def test_model_is_loaded_with_requests_for_its_bytes(bucket: tuple[str, _Faulty]) -> None:
    _, app = bucket
    saved, model = nn.Linear(64, 32), nn.Linear(64, 32)
    path = ObjectPath.open(f"{_BUCKET}/model") / "model.safetensors"
    write_safetensors(path, {**saved.state_dict(), "another": torch.rand(1 << 20)})
    app.bytes_sent = 0
    load_model_state(model, path.parent.url, unused="ignore", progress=False)
    assert torch.equal(model.weight, saved.weight)
    num_bytes = sum(tensor.nbytes for tensor in saved.state_dict().values())
    assert num_bytes <= app.bytes_sent < num_bytes + 10_000  # the header, and answers about the objects


_SKEW = r"s3://d9d/skew.*denies access: .*the clock of this host"
_LATE = "Bad Request"


@pytest.mark.full
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wrong_clock_is_an_error_that_names_it(hours: int, bucket: tuple[str, _Faulty]) -> None:
    _, app = bucket
    if app.name == "moto":
        pytest.skip("moto checks no clocks")
    shifted = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=hours)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda *_, **__: shifted)
        # rclone answers a late HEAD request with 400, which says no more.
        with pytest.raises((PermissionError, StateError), match=_LATE if app.name == "rclone" and hours < 0 else _SKEW):
            CheckpointStore(f"{_BUCKET}/skew").save(1, {"weight": torch.zeros(3)})
