"""Neither loading nor the collectives of saves and loads unpickle anything."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_forked
from no_pickle import forbid_unpickling
from tiny_checkpoint import begin, tensors
from torch import nn

from d9d_dist import DistributedContext
from d9d_state import CheckpointStore, load_model_state, model_tensors, rng_state, save_model_state, set_rng_state

_PICKLED = pickle.dumps(CheckpointStore)  # pickles a class by name


def _with_torch(data: object) -> None:
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    torch.load(file)


_WAYS: dict[str, Callable[[], object]] = {
    "a class": lambda: pickle.loads(_PICKLED),  # noqa: S301 - must fail
    "a number": lambda: pickle.loads(pickle.dumps(1)),  # noqa: S301
    "a file of torch": lambda: _with_torch(torch.ones(1)),
    "what another rank sends": lambda: dist.all_gather_object([None, None], 1),
}


@pytest.mark.parametrize("way", _WAYS)
def test_unpickling_guard_detects_pickle(tmp_path: Path, way: str) -> None:
    def work(_ctx: DistributedContext) -> None:
        forbid_unpickling()
        with pytest.raises(AssertionError, match="something is unpickled"):
            _WAYS[way]()

    assert run_forked(work, tmp_path / "ranks", world_size=2, faults={}) == [0, 0]


def _resume(folder: Path, ctx: DistributedContext) -> None:
    forbid_unpickling()
    store = CheckpointStore(folder)
    info = store.newest(ctx)
    assert info is not None
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    store.load(info, loaded, ctx)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(2).items())
    assert info.state == {"step": 2}
    set_rng_state(rng_state())
    store.save(3, tensors(3), rank_state=rng_state(), ctx=ctx)
    store.save(4, tensors(4), rank_state=rng_state(), background=True, ctx=ctx)
    store.close()
    newest = store.newest(ctx)
    assert newest is not None
    assert newest.step == 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_job_resumes_and_saves(tmp_path: Path, world_size: int) -> None:
    folder = tmp_path / "checkpoints"
    begin(folder, 1, 2)
    work: Callable[[DistributedContext], None] = lambda ctx: _resume(folder, ctx)  # noqa: E731 - short, and also closes
    assert run_forked(work, folder, world_size=world_size, faults={}) == [0] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_model_export_and_load_unpickle_nothing(tmp_path: Path, world_size: int) -> None:
    def work(ctx: DistributedContext) -> None:
        forbid_unpickling()
        model, other = nn.Linear(2, 3), nn.Linear(2, 3)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 3)
        save_model_state(model, tmp_path / "export", ctx=ctx, max_shard_bytes=1)
        load_model_state(other, tmp_path / "export")
        for name, tensor in model_tensors(model).items():
            assert torch.equal(tensor, model_tensors(other)[name])

    assert run_forked(work, tmp_path / "ranks", world_size=world_size, faults={}) == [0] * world_size
