import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from d9d_dist import DistributedContext
from d9d_dist.failures.first_failure import Failure
from d9d_loop.job.journal import Journal
from d9d_loop.report.run_status import describe_runs, main, read_status, write_status


def _status(folder: Path) -> dict[str, object]:
    status = read_status(folder)
    assert status is not None
    return {name: value for name, value in status.items() if name not in ("time", "saved_at")}


def test_the_status_follows_the_journal(tmp_path: Path, ctx: DistributedContext) -> None:
    journal = Journal(tmp_path, ctx, steps=20, hosts=["node0", "node1"])
    journal.started(3, "id")
    journal.progress(12, saved=10)
    expected = {"steps": 20, "hosts": ["node0", "node1"], "step": 12, "saved": 10, "run_id": "id", "error": None}
    assert _status(tmp_path) == {**expected, "state": "running"}
    journal.failed("OSError: https://me:canary@host")
    assert _status(tmp_path) == {
        **expected,
        "state": "failed",
        "error": "OSError: https://<redacted>@host",
        "first": None,
    }
    journal.ended(20, "finished")
    assert (_status(tmp_path)["state"], _status(tmp_path)["saved"]) == ("finished", 20)
    assert not list(tmp_path.glob(".status*"))


def test_the_command_prints_a_table_of_runs(
    tmp_path: Path, ctx: DistributedContext, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Journal(tmp_path / name, ctx, steps=9, hosts=["node0"]).started(4, "id")
    (tmp_path / "b" / "status.json").write_text("damaged")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no run")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "status.json").write_text('{"state": "failed", "time": "x", "hosts": 3, "error": ["e"]}')
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "journal.jsonl").write_text('{"event": "progress", "time": 1, "step": 7, "saved": 6}\n')
    main([str(tmp_path)])
    header, row, *other = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()).removeprefix(f"{tmp_path}/") for line in other] == [
        "b unknown 4/- - 0 s ago status.json cannot be read",
        "c failed -/- - - ['e']",
        f"d unknown 7/- 6 {other[2].split()[4]} s ago no status.json",
    ]
    assert header.split() == ["run", "state", "step", "saved", "updated", "hosts", "error"]
    assert row.split()[:3] == [str(tmp_path / "a"), "running", "4/9"]
    status = read_status(tmp_path / "a")
    assert status is not None
    assert "no sign of life" in describe_runs([tmp_path / "a"], now=float(status["time"]) + 100)
    assert "100 s ahead of this clock" in describe_runs([tmp_path / "a"], now=float(status["time"]) - 100)


def test_a_failure_because_of_a_full_disk_is_in_the_status(tmp_path: Path, ctx: DistributedContext) -> None:
    journal = Journal(tmp_path, ctx, steps=9, hosts=["a long name of a host that is overwritten"])
    journal.started(0, "id")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(Path, "write_text", side_effect=full):  # no block is free for another file
        journal.failed("StateError: No space left on device")
        assert _status(tmp_path)["error"] == "StateError: No space left on device"
        write_status(tmp_path, {"state": "failed"})
    assert _status(tmp_path) == {"state": "failed"}
    with mock.patch.object(Path, "write_text", side_effect=full), pytest.raises(FileNotFoundError):
        write_status(tmp_path / "other", {"state": "failed"})
    assert [path.name for path in tmp_path.iterdir()].count("other") == 0


def test_a_path_that_is_no_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "missing")])
    expected = "missing cannot be read: No such file or directory; expected a run folder, or a folder of runs."
    assert expected in capsys.readouterr().err


def test_the_table_shows_the_first_failure(tmp_path: Path, ctx: DistributedContext) -> None:
    journal = Journal(tmp_path, ctx)
    journal.started(0, "id")
    journal.failed("RuntimeError: Connection closed by peer", Failure(1, "KeyError: 'x'"))
    assert "  rank 1: KeyError: 'x'" in describe_runs([tmp_path], now=0)
