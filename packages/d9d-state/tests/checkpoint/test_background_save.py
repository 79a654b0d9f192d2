"""Background saves contain the values at call time, and every error is raised."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from d9d_dist import DistributedContext, MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore, StateError
from d9d_state.checkpoint._background import Background


class _Gate:
    """Blocks every write of a background thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._opened = threading.Event()
        write = os.write

        def wait_and_write(descriptor: int, data: memoryview) -> int:
            if threading.current_thread().name == "d9d-checkpoint":
                assert self._opened.wait(60)
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", wait_and_write)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Gate]:
    gate = _Gate(monkeypatch)
    yield gate
    gate.open()


def _tensors(value: float) -> dict[str, Tensor]:
    value /= 3  # a dtype of lower precision would round it
    return {
        "model.a": torch.full((300, 7), value),
        "model.b": torch.full((5,), value, dtype=torch.bfloat16),
        "strided": torch.full((4, 3), value).t(),
        "scalar": torch.tensor(value),
        "empty": torch.empty(0, 2),
    }


def _loaded(store: CheckpointStore, step: int) -> dict[str, Tensor]:
    info = store.newest()
    assert info is not None
    assert (info.step, info.state, info.rank_states) == (step, {"step": step}, [[step]])
    tensors = _tensors(-1.0)
    store.load(info, tensors)
    return tensors


def _save(store: CheckpointStore, step: int, tensors: dict[str, Tensor]) -> None:
    store.save(step, tensors, state={"step": step}, rank_state=[step], background=True)


def test_async_save_contains_values_at_call_time(tmp_path: Path, gate: _Gate) -> None:
    store = CheckpointStore(tmp_path)
    tensors = _tensors(1.0)
    _save(store, 1, tensors)
    for tensor in tensors.values():
        tensor.fill_(2.0)
    assert store.complete() == []
    store.raise_if_failed()
    gate.open()
    store.wait()
    for name, tensor in _loaded(store, 1).items():
        assert torch.equal(tensor, _tensors(1.0)[name]), name


def test_only_one_save_runs_at_a_time(tmp_path: Path, gate: _Gate) -> None:
    with CheckpointStore(tmp_path, keep_last=1) as store:
        _save(store, 1, _tensors(1.0))
        threading.Timer(0.2, gate.open).start()
        _save(store, 2, _tensors(2.0))  # must wait for the first save, which uses the same buffer
        assert (tmp_path / "step-00000001").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]
    for name, tensor in _loaded(store, 2).items():
        assert torch.equal(tensor, _tensors(2.0)[name]), name


def test_host_buffer_is_allocated_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.prepare(_tensors(0.0))
    store._staging._wait()
    buffer = store._staging._buffer.data_ptr()
    for step in (1, 2):
        _save(store, step, _tensors(1.0))
        store.wait()
    assert store._staging._buffer.data_ptr() == buffer
    assert store._planner.num_plans == 1


def test_argument_errors_are_raised_immediately(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1, _tensors(1.0))
    with pytest.raises(UserError, match="step-00000001 exists and is complete"):
        _save(store, 1, _tensors(1.0))
    with pytest.raises(ValueError, match=r"safetensors files do not support torch\.complex128"):
        store.save(2, {"a": torch.ones(1, dtype=torch.complex128)}, background=True)


def _fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)


_ASK: dict[str, Callable[[CheckpointStore], object]] = {
    "raise_if_failed": CheckpointStore.raise_if_failed,
    "wait": CheckpointStore.wait,
    "close": CheckpointStore.close,
    "save": lambda store: store.save(2, {}),
    "background save": lambda store: store.save(2, {}, background=True),
    "newest": CheckpointStore.newest,
    "exit": lambda store: store.__exit__(None, None),
}


@pytest.mark.parametrize("ask", _ASK)
def test_background_error_is_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ask: str
) -> None:
    store = CheckpointStore(tmp_path)
    with monkeypatch.context() as patch:
        _fill_disk(patch)
        _save(store, 1, _tensors(1.0))
        thread = store._background._thread
        assert thread is not None
        thread.join()
    assert "step-00000001 could not be written: [Errno 28] No space left on device" in caplog.text
    with pytest.raises(StateError, match=r"step-00000001 could not be written: .*No space left"):
        _ASK[ask](store)
    store.raise_if_failed()
    assert list(tmp_path.iterdir()) == []  # the partial folder is deleted
    _save(store, 1, _tensors(1.0))
    store.wait()
    assert torch.equal(_loaded(store, 1)["scalar"], _tensors(1.0)["scalar"])


def test_background_error_does_not_mask_another_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill_disk(monkeypatch)
    store = CheckpointStore(tmp_path)

    def interrupt() -> None:
        with store:
            _save(store, 1, _tensors(1.0))
            raise KeyError

    with pytest.raises(KeyError):
        interrupt()
    store.raise_if_failed()


def test_background_error_replaces_that_of_a_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may raise the error first, and leave the collectives of this rank."""
    _fill_disk(monkeypatch)
    store = CheckpointStore(tmp_path)

    def lose_the_peer() -> None:
        with store:
            _save(store, 1, _tensors(1.0))
            raise dist.DistNetworkError("connection closed by peer")

    with pytest.raises(StateError, match="No space left"):
        lose_the_peer()


def _forget(folder: Path) -> None:
    torch.set_num_threads(1)  # OpenMP would wait for the parent's threads, which do not exist in the child
    CheckpointStore(folder).save(1, {"a": torch.ones(3_000_000)}, background=True)


def test_exiting_process_completes_its_save(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_forget, args=(tmp_path,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    info = CheckpointStore(tmp_path).newest()
    assert info is not None
    assert info.step == 1


def test_a_killed_process_leaves_no_checkpoint(tmp_path: Path, gate: _Gate) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _save(CheckpointStore(tmp_path), 1, _tensors(1.0))
            os.write(writer, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)  # the read below ends if the child fails
    assert os.read(reader, 1) == b"x"
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(reader)
    store = CheckpointStore(tmp_path)
    assert store.newest() is None
    store.discard_partials()
    assert list(tmp_path.iterdir()) == []


def _on_ranks(folder: str) -> dict[str, object]:
    """Save in the background while the default group is busy, fail on one rank, and save again."""
    found: dict[str, object] = {}
    with MeshConfig(data_parallel_shard=2).build() as ctx, CheckpointStore(f"{folder}/a", keep_last=2) as store:
        mesh = ctx.mesh_for("dense")["dp_cp_shard"]
        whole = torch.arange(10.0).view(5, 2) / 7
        tensors: dict[str, Tensor] = {
            "model.sharded": distribute_tensor(whole, mesh, [Shard(0)]),
            "model.replicated": distribute_tensor(whole + 1, mesh, [Replicate()]),
            f"model.own.{ctx.rank}": torch.full((3,), float(ctx.rank)),
        }
        store.prepare(tensors, ctx)
        for step in (1, 2):
            store.save(step, tensors, rank_state=ctx.rank, background=True, ctx=ctx)
            for tensor in tensors.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(100)
                for _ in range(20):
                    dist.all_reduce(torch.ones(100))
        store.wait()
        found["plans"] = store._planner.num_plans
        found["failed"] = _fail_on_one(CheckpointStore(f"{folder}/b"), ctx.rank, tensors, ctx)
    return found


def _fail_on_one(store: CheckpointStore, rank: int, tensors: dict[str, Tensor], ctx: DistributedContext) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            _fill_disk(patch)
        store.save(3, tensors, background=True, ctx=ctx)
        with pytest.raises(StateError) as caught:
            store.wait()
    store.save(3, tensors, ctx=ctx)
    return str(caught.value)


def test_ranks_save_in_the_background(tmp_path: Path) -> None:
    found = run_ranks(_on_ranks, str(tmp_path))
    assert found[0] == found[1]
    assert found[0]["plans"] == 1
    assert "rank 1: " in str(found[0]["failed"])
    assert "No space left" in str(found[0]["failed"])
    assert [info.step for info in CheckpointStore(tmp_path / "b").complete()] == [3]
    store = CheckpointStore(tmp_path / "a")
    for info in store.complete():
        tensors = {name: torch.zeros(wanted.shape) for name, wanted in info.tensors.items()}
        store.load(info, tensors)
        added = 100.0 * (info.step - 1)
        whole = torch.arange(10.0).view(5, 2) / 7 + added
        assert torch.equal(tensors["model.sharded"], whole)
        assert torch.equal(tensors["model.replicated"], whole + 1)
        assert [tensors[f"model.own.{rank}"].tolist() for rank in (0, 1)] == [[added] * 3, [1 + added] * 3]


def _dies(folder: str, died: str) -> str:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        store = CheckpointStore(folder)
        if ctx.rank == 1:
            pytest.MonkeyPatch().setattr(os, "fsync", lambda _descriptor: os._exit(0))
        store.save(1, {"a": torch.ones(3)}, background=True, ctx=ctx)
        try:
            store.wait()
        except StateError as error:
            Path(died).write_text(str(error))
        return ""


def test_dead_rank_raises_on_other_ranks(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(_dies, str(tmp_path / "a"), str(tmp_path / "message"))
    assert "step-00000001 failed: " in (tmp_path / "message").read_text()
    assert CheckpointStore(tmp_path / "a").newest() is None


def test_lock_is_released_after_the_save(tmp_path: Path, gate: _Gate) -> None:
    with CheckpointStore(tmp_path) as store:
        timer = threading.Timer(0.3, gate.open)
        with store.locked():
            _save(store, 1, _tensors(1.0))
            timer.start()
        assert [info.step for info in store.complete()] == [1]


def test_interrupted_wait_keeps_the_lock(tmp_path: Path, gate: _Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)

    def interrupted(_self: object) -> None:
        raise KeyboardInterrupt

    def save_locked() -> None:
        with store.locked():
            _save(store, 1, _tensors(1.0))
            monkeypatch.setattr(Background, "join", interrupted)

    join = Background.join
    with pytest.raises(KeyboardInterrupt):
        save_locked()
    monkeypatch.setattr(Background, "join", join)
    with pytest.raises(StateError, match="in use by another job"), CheckpointStore(tmp_path).locked():
        pass
    gate.open()
    store.wait()
