"""Checkpoints and models in a real S3 server on this machine, which refuses requests and cuts connections."""

import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from d9d_dist import MeshConfig, full_tensor
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore, load_model_state
from d9d_state.object_path import ObjectPath
from d9d_state.safetensors_file import write_safetensors

_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
_BUCKET = "s3://d9d"
_App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class _Faulty:
    """WSGI application that answers some requests with 503, and cuts the connection of others."""

    def __init__(self, app: _App) -> None:
        self._app, self._draws = app, random.Random(0)  # noqa: S311
        self.rate, self.faults, self.bytes_sent = 0.0, 0, 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        draw = self._draws.random()
        if draw < self.rate:
            self.faults += 1
            if draw < self.rate / 2:
                environ["werkzeug.socket"].close()
            start_response("503 Slow Down", [("Content-Length", "0")])
            return []
        answer = list(self._app(environ, start_response))
        self.bytes_sent += sum(map(len, answer)) if environ["REQUEST_METHOD"] == "GET" else 0
        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, _Faulty]]:
    """URL of the server, and its application."""
    pytest.importorskip("s3fs", reason="needs s3fs, which is optional")
    moto = pytest.importorskip("moto.server", reason="needs moto, which is optional")
    from werkzeug.serving import make_server  # noqa: PLC0415

    app = _Faulty(moto.DomainDispatcherApplication(moto.create_backend_app))
    served = make_server("127.0.0.1", 0, app, threaded=True)
    Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}", app
    served.shutdown()


@pytest.fixture
def bucket(server: tuple[str, _Faulty], monkeypatch: pytest.MonkeyPatch) -> tuple[str, _Faulty]:
    url, app = server
    app.rate, app.faults, app.bytes_sent = 0.0, 0, 0
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
    (path,) = (each for each in (info.root).iterdir() if each.suffix == ".safetensors")
    assert isinstance(path, ObjectPath)
    assert re.search(r'-[2-9]"$', path.filesystem.info(path.url)["ETag"]), "an upload in one part"
    loaded = torch.empty_like(weight)
    store.load(info, {"weight": loaded})
    assert torch.equal(loaded, weight)


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
