"""Ends of jobs under real launchers: exit code, what is saved, and what is left behind."""

import json
import os
import shlex
import signal
import socket
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


PHASES = """
import os, signal
from pathlib import Path

RANK = os.environ.get("RANK", "0")
Path(f"rank-{RANK}.pid").write_text(str(os.getpid()))

def act(phase):
    # End the job as HOW says, in the phase AT on rank ON.
    if (phase, RANK) != (os.environ["AT"], os.environ["ON"]):
        return
    os.environ["AT"] = ""  # once
    how = os.environ["HOW"]
    if how.startswith("SIG"):
        is_launched = "TORCHELASTIC_RUN_ID" in os.environ
        os.kill(os.getppid() if is_launched else os.getpid(), signal.Signals[how])
        if is_launched and phase in ("imports", "start"):
            signal.pause()  # the launcher forwards the signal
    elif how == "lost launcher":
        os.kill(os.getppid(), signal.SIGKILL)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(3)
    elif how == "user error":
        from d9d_dist import UserError
        raise UserError("got x, expected y")
    else:
        raise KeyError("x")

def main():
    exec(open("quickstart.py").read().split("if __name__")[0], globals())
    from d9d_loop import CheckpointStarted, ConfigReady, EvaluationStarted, ModelExported, StepDone
    config = TrainerConfig.from_cli("quickstart.toml")
    data = make_dataset()
    trainer = Trainer(config, model=lambda stage: Mlp(), data=data, evaluation_data=data[:8], task=Regression())
    moments = {ConfigReady: "start", StepDone: "first step", EvaluationStarted: "evaluation", CheckpointStarted: "save",
               ModelExported: "export"}
    for event, phase in moments.items():
        trainer.events.on(event, lambda _, phase=phase: act(phase))
    trainer.train()

from d9d_loop import cli_main
with cli_main():
    act("imports")
    main()
"""
_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
_PHASES = ("imports", "start", "first step", "evaluation", "save", "export")


def _expected(phase: str, how: str) -> int:
    """Return the exit code of an end in a phase: the table of docs/resilience.md."""
    if how == "lost launcher":
        return 137  # of the launcher
    if how in _FAILURES:
        return _FAILURES[how]
    if phase == "export":
        return 0  # the last step is saved, and the job finishes
    if how == "SIGINT":
        return 130
    return 128 + signal.Signals[how] if phase in ("imports", "start") else 75


def _cells() -> list[tuple[str, str, str]]:
    """Return launcher, phase and kind of end. Signals to a launcher may arrive after the end of an export."""
    cells = [("python", phase, how) for phase in _PHASES for how in (*_FAILURES, *_SIGNALS)]
    for launcher in ("torchrun", "d9d-torchrun"):
        for phase in _PHASES:
            signals = () if launcher == "torchrun" or phase == "export" else _SIGNALS
            failures = () if launcher == "torchrun" else tuple(_FAILURES)
            cells += [(launcher, phase, how) for how in (*failures, *signals, "lost launcher")]
    return cells


def _pid(file: Path) -> int:
    return int(file.read_text() or 0)


@pytest.mark.sample("python-imports-SIGTERM", "python-evaluation-SIGUSR1")
@pytest.mark.parametrize(("launcher", "phase", "how"), [pytest.param(*cell, id="-".join(cell)) for cell in _cells()])
def test_ends_in_each_phase(tmp_path: Path, launcher: str, phase: str, how: str) -> None:
    rank = "0" if launcher == "python" else "1"
    end = {"HOW": how, "AT": phase, "ON": rank, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    steps = "4" if phase == "export" else "100000"
    code = _end_in_phase(tmp_path, LAUNCHERS[launcher], end, "--steps", steps)
    output = (tmp_path / "output").read_text()
    assert code == _expected(phase, how), output
    has_trained = phase not in ("imports", "start")
    if phase == "export":
        assert _saved(tmp_path) >= 1
    elif has_trained and how in (*_SIGNALS, "lost launcher"):
        assert _saved(tmp_path) >= 1, output
    elif how != "lost launcher":
        assert _saved(tmp_path) == 0
    if how != "lost launcher":
        assert not list((tmp_path / "tmp").glob("d9d-torchrun-*"))


def _end_in_phase(folder: Path, launcher: list[str], end: dict[str, str], *arguments: str) -> int:
    """Run a job that ends itself, until no process is left; return the exit code."""
    for name in ("quickstart.py", "quickstart.toml"):
        (folder / name).write_text((ROOT / "examples" / name).read_text())
    (folder / "script.py").write_text(PHASES)
    every = ("--checkpoint.every", "2", "--evaluation.every", "2", "--rehearsal", "false")
    command = [*launcher, "script.py", *arguments, *every]
    environment = {**os.environ, **end, "OMP_NUM_THREADS": "1", "D9D_DEVICE": "cpu"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        process.wait(_SECONDS)
        _wait(lambda: not any(_runs(_pid(file)) for file in folder.glob("rank-*.pid")))
    finally:
        for each in (process.pid, *map(_pid, folder.glob("rank-*.pid"))):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@pytest.mark.full
@pytest.mark.parametrize(("how", "rank"), [("user error", "1"), ("kill", "1"), ("exit", "0")])
def test_ends_on_one_of_two_nodes(tmp_path: Path, how: str, rank: str) -> None:
    """The launcher of the other node exits with the same code, or with that of a rank that lost its peer.

    The launcher of rank 0 has the store.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x", "--nproc-per-node", "1"]
    common = [sys.executable, "-m", "d9d_loop.torchrun", "--rdzv-backend", "static", "--max-restarts", "0", *arguments]
    nodes = [f'{shlex.join([*common, "--node-rank", str(node)])} "$@" & p{node}=$!' for node in range(2)]
    script = "; ".join([*nodes, "wait $p0; echo $? > code-0", "wait $p1; echo $? > code-1"])
    end = {"HOW": how, "AT": "first step", "ON": rank}
    _end_in_phase(tmp_path, ["bash", "-c", script, "-"], end, "--steps", "100000")
    codes = [int((tmp_path / f"code-{node}").read_text()) for node in range(2)]
    expected = _expected("first step", how)
    assert codes[int(rank)] == expected, (tmp_path / "output").read_text()
    assert codes[1 - int(rank)] in (expected, 125), (tmp_path / "output").read_text()
