import fcntl
import os
import signal
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest import mock

import pytest
import torch

from d9d_dist import UserError
from d9d_dist.host_lock import host_lock
from d9d_loop.data import TokenFile, cached_token_file
from d9d_loop.data.in_fork import in_fork
from d9d_loop.data.token_file_writer import new_folder, write_once


def _write_until_killed(target: Path, connection: Connection) -> None:
    with new_folder(target) as path:
        (path / "tokens").write_bytes(b"half of it")
        connection.send(None)
        signal.pause()


def test_leftovers_of_killed_writers_are_removed_and_running_ones_kept(tmp_path: Path) -> None:
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_write_until_killed, args=(tmp_path / "one", theirs), daemon=True)
    process.start()
    theirs.close()  # the call below ends if the process fails
    ours.recv()
    (left,) = tmp_path.iterdir()
    with new_folder(tmp_path / "another") as beside:
        assert set(tmp_path.iterdir()) == {left, beside}
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with new_folder(tmp_path / "one") as last:
            assert set(tmp_path.iterdir()) == {beside, last}
    assert {path.name for path in tmp_path.iterdir()} == {"one", "another"}


def test_folders_of_other_machines_are_kept(tmp_path: Path) -> None:
    with mock.patch("socket.gethostname", return_value="elsewhere"), new_folder(tmp_path / "one") as other:
        pass
    other.mkdir()  # a lock of another machine is not visible here
    with new_folder(tmp_path / "two"):
        pass
    assert set(tmp_path.iterdir()) == {other, tmp_path / "one", tmp_path / "two"}


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError("no locks available")))
    with new_folder(tmp_path / "one") as first, new_folder(tmp_path / "two"):
        assert first.exists()
    assert set(tmp_path.iterdir()) == {tmp_path / "one", tmp_path / "two"}


def test_a_folder_has_the_name_that_others_remove_only_when_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = fcntl.flock

    def meanwhile(descriptor: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", locked)
        with new_folder(tmp_path / "two"):
            pass
        locked(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", meanwhile)
    with new_folder(tmp_path / "one") as path:
        assert path.exists()
    assert set(tmp_path.iterdir()) == {tmp_path / "one", tmp_path / "two"}


def test_a_new_folder_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "one"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o750


TEXTS = [b"one", b"", b"another"]


def test_bytes_are_tokens_and_empty_documents_are_dropped(tmp_path: Path) -> None:
    file = cached_token_file(TEXTS, tmp_path)
    assert [bytes(file[index]["tokens"].tolist()) for index in range(len(file))] == [b"one", b"another"]
    file.verify()


def test_a_tokenizer_may_return_a_tensor(tmp_path: Path) -> None:
    file = cached_token_file([b"\0", b"ab"], tmp_path, tokenize=lambda text: torch.tensor(list(text)), name="org/bytes")
    assert [sample["tokens"].tolist() for sample in map(file.__getitem__, range(len(file)))] == [[0], [97, 98]]
    assert [path.parent for path in tmp_path.iterdir()] == [tmp_path]
    assert len(list(tmp_path.glob("org-bytes-*"))) == 1


def test_an_existing_file_is_reused(tmp_path: Path) -> None:
    asked: list[bytes] = []

    def words(text: bytes) -> list[int]:
        asked.append(text)
        return [len(word) for word in text.split()]

    for _ in range(2):
        file = cached_token_file([b"to be or not"], tmp_path, tokenize=words, name="words", vocab_size=8)
        assert file[0]["tokens"].tolist() == [2, 2, 2, 3]
    assert asked == [b"to be or not"]
    assert file.manifest.about == {"tokenizer": "words"}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "other",
    [{"documents": [b"on", b"e", b"another"]}, {"documents": TEXTS[:2]}, {"name": "octets"}, {"vocab_size": 257}],
    ids=["cut elsewhere", "fewer", "tokenized otherwise", "another vocabulary"],
)
def test_other_documents_or_options_are_cached_in_another_file(tmp_path: Path, other: dict[str, Any]) -> None:
    cached_token_file(TEXTS, tmp_path)
    arguments: dict[str, Any] = {"documents": TEXTS, "cache": tmp_path, **other}
    cached_token_file(**arguments)
    assert len(list(tmp_path.iterdir())) == 2


def test_one_of_several_concurrent_ranks_tokenizes(tmp_path: Path) -> None:
    all_ask, tokenized = Barrier(3, timeout=30), list[bytes]()

    def tokenize(text: bytes) -> list[int]:
        tokenized.append(text)
        return list(text)

    def ask() -> TokenFile:
        all_ask.wait()
        return cached_token_file(TEXTS, tmp_path, tokenize=tokenize)

    with ThreadPoolExecutor(3) as pool:
        files = [each.result() for each in [pool.submit(ask) for _ in range(3)]]
    assert [bytes(file[1]["tokens"].tolist()) for file in files] == [b"another"] * 3
    assert tokenized == TEXTS
    assert [path.name.startswith("bytes-") for path in tmp_path.iterdir()] == [True]


def test_ranks_that_wait_for_a_writer_that_fails_raise_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not measure a folder of images again, up to the broken one. A later job does."""
    all_ask, calls = Barrier(3, timeout=30), list[int]()

    @contextmanager
    def lock(kind: str, key: str) -> Generator[None]:
        all_ask.wait()
        with host_lock(kind, key):
            yield

    def write() -> None:
        calls.append(1)
        raise UserError(f"image {len(calls)} is broken")

    def ask() -> str:
        with pytest.raises(UserError) as raised:
            write_once(tmp_path / "lengths", write)
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool, monkeypatch.context() as patch:
        patch.setattr("d9d_loop.data.token_file_writer.host_lock", lock)
        messages = [each.result() for each in [pool.submit(ask) for _ in range(3)]]
    assert messages == ["image 1 is broken"] * 3
    assert ask() == "image 2 is broken"


def test_a_rank_that_calls_after_a_failure_raises_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that started after the failure is one of a later job, and a process that has raised it tries again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def ask(number: int) -> str:
        with pytest.raises(UserError) as raised:
            write_once(tmp_path / "lengths", mock.Mock(side_effect=UserError(f"image {number} is broken")))
        return str(raised.value)

    assert in_fork(lambda: ask(1)) == "image 1 is broken"
    (failure,) = tmp_path.glob("d9d-failed-*")
    earlier = failure.stat().st_mtime_ns - 10**8  # more than a tick of the times of processes
    os.utime(failure, ns=(earlier, earlier))
    assert in_fork(lambda: ask(2)) == "image 2 is broken"
    assert ask(3) == "image 2 is broken"
    assert ask(4) == "image 4 is broken"


def test_the_first_of_several_machines_gives_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their locks do not exclude each other."""
    all_write = Barrier(3, timeout=30)
    monkeypatch.setattr("d9d_loop.data.token_file_writer.host_lock", lambda kind, key: nullcontext())

    def together(text: bytes) -> list[int]:
        all_write.wait()
        return list(text)

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(cached_token_file, TEXTS, tmp_path, tokenize=together) for _ in range(3)]
        files = [each.result() for each in asked]
    assert [bytes(file[1]["tokens"].tolist()) for file in files] == [b"another"] * 3
    assert [path.name.startswith("bytes-") for path in tmp_path.iterdir()] == [True]


def test_failed_writes_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no documents were written; expected at least one"):
        cached_token_file([b"", b""], tmp_path)
    with pytest.raises(UserError, match="document 0 has the tokens 101 to 111; expected 0 to 99"):
        cached_token_file(TEXTS, tmp_path, vocab_size=100)
    assert list(tmp_path.iterdir()) == []
