from pathlib import Path

import pytest

from d9d_dist import DistributedContext
from d9d_loop.job.journal import Journal
from d9d_loop.report.run_status import describe_runs, main, read_status


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
    assert _status(tmp_path) == {**expected, "state": "failed", "error": "OSError: https://<redacted>@host"}
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
    main([str(tmp_path)])
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "step", "saved", "updated", "hosts", "error"]
    assert row.split()[:3] == [str(tmp_path / "a"), "running", "4/9"]
    status = read_status(tmp_path / "a")
    assert status is not None
    assert "no sign of life" in describe_runs([tmp_path / "a"], now=float(status["time"]) + 100)
