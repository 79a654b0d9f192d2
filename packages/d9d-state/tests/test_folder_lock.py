import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore, StateError
from d9d_state.folder_lock import locked_folder


def test_second_job_error_names_lock_holder(tmp_path: Path) -> None:
    first, second = CheckpointStore(tmp_path / "a", run_id="mine"), CheckpointStore(tmp_path / "a")
    with first.locked():
        message = rf"a is in use by another job \(process {os.getpid()} on .* of run mine\); expected one job"
        with pytest.raises(StateError, match=message), second.locked():
            pass
        with CheckpointStore(tmp_path / "b").locked():
            pass
    with second.locked(), pytest.raises(StateError, match="in use"), first.locked():
        pass


def test_a_job_waits_for_one_that_is_about_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as first:
        first.enter_context(CheckpointStore(tmp_path).locked())
        monkeypatch.setattr("d9d_state.folder_lock.time.sleep", lambda seconds: first.close())
        with CheckpointStore(tmp_path).locked(wait_seconds=600):
            pass
    assert "is in use by another job" in caplog.text
    assert "waiting up to 600 s for it to end" in caplog.text


def test_folder_without_checkpoints_is_locked_too(tmp_path: Path) -> None:
    message = rf"a is in use by another job \(process {os.getpid()} on [^ ]*\); expected one job"
    with locked_folder(tmp_path / "a"):
        with pytest.raises(StateError, match=message), locked_folder(tmp_path / "a"):
            pass
        with pytest.raises(StateError, match=message), CheckpointStore(tmp_path / "a").locked():
            pass
    with locked_folder(tmp_path / "a"):
        assert [path.name for path in (tmp_path / "a").iterdir()] == ["job.lock"]


def test_lock_is_released_when_the_body_raises(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(KeyError), store.locked():
        raise KeyError
    with store.locked():
        assert store.complete() == []


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"pid":'])
def test_lock_file_content_may_be_corrupt(tmp_path: Path, content: bytes) -> None:
    store = CheckpointStore(tmp_path)
    with store.locked():
        (tmp_path / "job.lock").write_bytes(content)
        with pytest.raises(StateError, match="is in use by another job; expected"), CheckpointStore(tmp_path).locked():
            pass


def test_killed_job_releases_lock_while_its_worker_runs(tmp_path: Path) -> None:
    ready, go_on = os.pipe(), os.pipe()
    job = os.fork()
    if job == 0:
        try:
            os.close(go_on[1])
            with CheckpointStore(tmp_path).locked():
                if os.fork() == 0:  # a worker that outlives the job
                    os.write(ready[1], b"x")
                    os.read(go_on[0], 1)
                    os._exit(0)
                signal.pause()
        finally:
            os._exit(1)
    os.close(ready[1])  # the read below ends if the job fails
    assert os.read(ready[0], 1) == b"x"
    with pytest.raises(StateError, match=rf"process {job} on"), CheckpointStore(tmp_path).locked():
        pass
    os.kill(job, signal.SIGKILL)
    os.waitpid(job, 0)
    with CheckpointStore(tmp_path).locked():
        pass
    for descriptor in (ready[0], *go_on):  # the worker reads the end of its pipe
        os.close(descriptor)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="file could not be locked: "), CheckpointStore(tmp_path / "file").locked():
        pass


def _lock(folder: str) -> list[str]:
    found = []
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        for _ in range(2):
            store = CheckpointStore(folder)
            with store.locked(ctx), pytest.raises(StateError) as caught, CheckpointStore(folder).locked(ctx):
                pass
            found.append(str(caught.value))
    return found


def test_lock_error_is_raised_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(_lock, str(tmp_path))
    assert found[0] == found[1]
    assert all("is in use by another job" in message for message in found[0])
