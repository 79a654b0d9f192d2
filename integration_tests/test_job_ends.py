"""Ends of jobs under real launchers: exit code, what is saved, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import os, time
exec(open("quickstart.py").read().split("if __name__")[0])
from d9d_dist import UserError

class Ends(Regression):
    steps = 0

    def loss(self, outputs, batch):
        Ends.steps += 1
        how, _, rank = os.environ["HOW"].partition(" on ")
        if Ends.steps == 3 and os.environ.get("RANK", "0") == rank:
            if how == "exit":
                os._exit(3)
            if how == "kill":
                os.kill(os.getpid(), 9)
            raise UserError("got x, expected y") if how == "user error" else KeyError("x")
        time.sleep(0.02)
        return super().loss(outputs, batch)

with cli_main():
    config = TrainerConfig.from_cli("quickstart.toml")
    Trainer(config, model=lambda stage: Mlp(), data=make_dataset(), task=Ends()).train()
"""
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "d9d-torchrun": [sys.executable, "-m", "d9d_loop.torchrun", "--nproc-per-node", "2"],
    "d9d-torchrun, restarts": [
        sys.executable,
        "-m",
        "d9d_loop.torchrun",
        "--max-restarts",
        "3",
        "--nproc-per-node",
        "2",
    ],
}
_SECONDS = 180.0


def _wait(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        os.sched_yield()


def _is_training(folder: Path) -> bool:
    with suppress(OSError):
        return '"progress"' in (folder / "runs" / "quickstart" / "journal.jsonl").read_text()
    return False


def _children(process: int) -> list[int]:
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _runs(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _end(folder: Path, launcher: str, how: str, *, by: signal.Signals | None = None) -> int:
    """Run a job until it ends, by itself or by a signal to the launcher, without a process left; return the code."""
    for name in ("quickstart.py", "quickstart.toml"):
        (folder / name).write_text((ROOT / "examples" / name).read_text())
    (folder / "script.py").write_text(SCRIPT)
    command = [*LAUNCHERS[launcher], "script.py", "--steps", "100000", "--checkpoint.every", "100000"]
    environment = {**os.environ, "HOW": how, "OMP_NUM_THREADS": "1", "D9D_DEVICE": "cpu"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    ranks: list[int] = []
    try:
        if by is not None:
            _wait(lambda: _is_training(folder))
            ranks = _children(process.pid)
            process.send_signal(by)
        process.wait(_SECONDS)
        _wait(lambda: not any(map(_runs, ranks)))
    finally:
        for each in (process.pid, *ranks):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _saved(folder: Path) -> int:
    """Return the number of checkpoints. None of them is incomplete."""
    names = [path.name for path in (folder / "runs" / "quickstart" / "checkpoints").glob("step-*")]
    assert not [name for name in names if name.endswith(".partial")]
    return len(names)


_FAILURES = {"user error": 2, "exception": 1, "exit": 3, "kill": 137}


@pytest.mark.full
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("how", list(_FAILURES))
def test_the_launcher_exits_with_the_code_of_the_first_failure(tmp_path: Path, how: str, rank: str) -> None:
    code = _end(tmp_path, "d9d-torchrun", f"{how} on {rank}")
    assert code == _FAILURES[how], (tmp_path / "output").read_text()
    assert _saved(tmp_path) == 0


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["d9d-torchrun, restarts"])
@pytest.mark.parametrize(("how", "starts"), [("user error on 1", 1), ("kill on 1", 4)])
def test_restarts_follow_the_table_of_exit_codes(tmp_path: Path, launcher: str, how: str, starts: int) -> None:
    code = _end(tmp_path, launcher, how)
    assert code == _FAILURES[how.partition(" on ")[0]], (tmp_path / "output").read_text()
    journal = (tmp_path / "runs" / "quickstart" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in journal].count("started") == starts


@pytest.mark.full
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("launcher", ["python", "d9d-torchrun"])
def test_signals_save_and_give_the_exit_code_of_the_ranks(tmp_path: Path, launcher: str, by: signal.Signals) -> None:
    code = _end(tmp_path, launcher, "", by=by)
    assert code == (130 if by is signal.SIGINT else 75), (tmp_path / "output").read_text()
    assert _saved(tmp_path) == 1


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "d9d-torchrun"])
def test_ranks_of_a_killed_launcher_save_and_end(tmp_path: Path, launcher: str) -> None:
    assert _end(tmp_path, launcher, "", by=signal.SIGKILL) == 137
    assert _saved(tmp_path) == 1
    assert (tmp_path / "output").stat().st_size < 100_000
    assert "stopped because the launcher is gone" in (tmp_path / "output").read_text()
