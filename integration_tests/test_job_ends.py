"""Ends of jobs under real launchers: kind of end x phase x launcher, with exit codes, saves and what is left behind.

The table "Ends of a job" of docs/resilience.md states the same facts.
"""

import json
import re
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from ended_jobs import D9D_TORCHRUN, PHASES, ROOT, TORCHRUN, Ended, run_until_end

from d9d_loop.resilience import ExitCode

_KILLED = 128 + signal.SIGKILL
FAILURES = {"user error": ExitCode.USER_ERROR, "exception": ExitCode.EXCEPTION, "exit": 3, "kill": _KILLED}
SIGNALS = {name: 128 + signal.Signals[name] for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")}
_LOSSES = ("lost launcher", "cut store", "lost store")
_NODE_LOSSES = (*_LOSSES, "lost launcher of rank 0", "lost node", "lost node of rank 0")
_RESUMED = ("kill", "SIGTERM", *_NODE_LOSSES)  # kinds of ends after which the job is started again
_BEFORE_STEPS = ("imports", "start")
_WHILE_WRITING = ("in a save", "in an export")
_LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node", "2"],
    "d9d-torchrun": [*D9D_TORCHRUN, "--nproc-per-node", "2"],
}
_NEXT = "next"


class _Cell(NamedTuple):
    """Cell of the matrix."""

    launcher: str
    phase: str
    how: str

    @property
    def rank(self) -> str:
        """Rank that ends first. Rank 0 has the store of the ranks, and writes the files."""
        is_first = self.launcher == "python" or self.phase in _WHILE_WRITING
        return "0" if is_first or self.how.endswith("rank 0") or self.how == "lost store" else "1"

    @property
    def action(self) -> str:
        """Action of `ending_job`."""
        return "kill" if self.how == "lost store" else self.how.removesuffix(" of rank 0")

    @property
    def saves(self) -> bool:
        """True if the job saves the current step before it ends."""
        is_signal = self.how in SIGNALS or self.how.startswith("lost launcher")
        return is_signal and self.phase not in _BEFORE_STEPS

    @property
    def expected_saved(self) -> int | None:
        """Step of the newest checkpoint, at least; `None` for none."""
        if self.phase in _BEFORE_STEPS:
            return None
        if self.how == "cut store" or "export" in self.phase:
            return 4
        if self.saves:
            return {"first step": 1, "in a save": 4}.get(self.phase, 2)
        return 2 if self.phase in ("evaluation", "in a save") else None  # step 2 is saved before its evaluation

    @property
    def expected_code(self) -> int:
        """Exit code of the launcher of the rank that ends first."""
        if self.how.startswith(("lost launcher", "lost node")):
            return _KILLED
        code = expected_code(self.action, self.phase)
        if self.launcher != "torchrun":
            return code
        if self.how == "SIGUSR1":
            return SIGNALS["SIGUSR1"]
        return int(self.how != "cut store" or code != 0)


def expected_code(how: str, phase: str) -> int:
    """Return the exit code of a job in Python or under `d9d-torchrun`; of its ranks, if the launcher is killed."""
    if how in FAILURES:
        return FAILURES[how]
    if phase in _BEFORE_STEPS:
        return SIGNALS.get(how, ExitCode.PEER_LOST)
    if how == "cut store" or "export" in phase:
        return 0  # the job finishes
    codes = {"SIGINT": ExitCode.INTERRUPTED, "lost launcher": ExitCode.PEER_LOST}
    return codes.get(how, ExitCode.STOPPED)


_DOCUMENTED = {
    "`UserError` on a rank": "user error",
    "Exception on a rank": "exception",
    "A rank exits with 3": "exit",
    "A rank is killed, also rank 0 with the ranks' store": "kill",
    **{name: name for name in SIGNALS},
    "The launcher of a node is killed": "lost launcher",
    "A rank loses its connection to the store": "cut store",
}


def test_the_documentation_has_the_table_of_ends() -> None:
    text = (ROOT / "docs" / "resilience.md").read_text(encoding="utf-8")
    section = text.partition("## Ends of a job")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \| (.+) \|$", section, flags=re.MULTILINE)
    assert [row[0] for row in rows] == list(_DOCUMENTED)
    for name, *codes, saved in rows:
        how = _DOCUMENTED[name]
        assert [int(code) for code in codes] == [expected_code(how, phase) for phase in ("start", "save", "export")]
        is_current = _Cell("d9d-torchrun", "save", how).saves
        assert (saved == "the current step") == is_current


def _cells(*launchers: str) -> list[object]:
    found: list[_Cell] = []
    for launcher in launchers:
        losses = {"python": (), "two nodes": _NODE_LOSSES}.get(launcher, _LOSSES)
        found += [_Cell(launcher, phase, how) for phase in PHASES for how in (*FAILURES, *SIGNALS, *losses)]
    return [pytest.param(cell, id="-".join(cell)) for cell in found if _exists(cell)]


def _exists(cell: _Cell) -> bool:
    if cell.how == "cut store" and cell.phase == "imports":
        return False  # there is no connection yet
    if cell.how == "lost store" and cell.launcher == "torchrun":
        return False  # torchrun itself has the store
    return cell.phase not in _WHILE_WRITING or cell.how in ("exit", *_RESUMED)


@pytest.mark.slow("python-evaluation-SIGTERM")
@pytest.mark.sample("python-evaluation-SIGTERM")
@pytest.mark.parametrize("cell", _cells(*_LAUNCHERS))
def test_ends_in_each_phase(tmp_path: Path, cell: _Cell) -> None:
    ended, following = _end(tmp_path, cell, [_LAUNCHERS[cell.launcher]])
    assert ended.codes == [cell.expected_code], ended.output
    _assert_saved(cell, ended, following)
    _assert_nothing_left(cell, ended)


def _end(folder: Path, cell: _Cell, launchers: list[list[str]]) -> tuple[Ended, Ended | None]:
    """Run a job until it ends; right then, start it again in one process. Return both ends."""
    started: list[Ended] = []

    def start_again() -> None:
        at = cell.phase if "export" in cell.phase else "first step"
        started.append(run_until_end(folder, [_LAUNCHERS["python"]], how="SIGTERM", at=at, on="0", log=_NEXT))

    then = start_again if cell.how in _RESUMED else list
    ended = run_until_end(folder, launchers, how=cell.action, at=cell.phase, on=cell.rank, then=then)
    return ended, started[0] if started else None


def _assert_saved(cell: _Cell, ended: Ended, following: Ended | None) -> None:
    found = re.findall(r"after step (\d+), which is saved", ended.output)
    assert len(set(found)) == (1 if cell.saves and "export" not in cell.phase else 0), ended.output
    saved = int(found[0]) if found else cell.expected_saved
    assert saved is None or cell.expected_saved is not None
    assert (saved or 0) >= (cell.expected_saved or 0)
    if following is None:
        assert ended.saved == saved
        return
    assert following.codes == [0 if "export" in cell.phase else ExitCode.STOPPED], following.output
    start = "starts from scratch" if saved is None else f"resumed from step {saved} at"
    assert start in following.output, following.output


def _assert_nothing_left(cell: _Cell, ended: Ended) -> None:
    """Check files. `run_until_end` has checked that no process is left."""
    assert len(ended.output) < 100_000
    assert ended.left_in_memory() == []
    launchers = [name for name in ended.left_in_temporary_folder() if name.startswith("d9d-torchrun-")]
    assert len(launchers) == (cell.launcher != "torchrun" and cell.how.startswith(("lost launcher", "lost node")))
    assert ended.export_is_whole()
    if cell.how == "exit" and cell.phase in _WHILE_WRITING:  # other cells of these phases start the job again
        assert ended.partial() == [{"in a save": "step-00000004.partial"}.get(cell.phase, "export.partial")]
    else:
        assert ended.partial() == []


@pytest.mark.full
@pytest.mark.parametrize("how", ["user error", "exception", "exit"])
def test_the_launcher_exits_with_the_code_of_the_first_failure(tmp_path: Path, how: str) -> None:
    ended = run_until_end(tmp_path, [_LAUNCHERS["d9d-torchrun"]], how=how, at="first step", on="0")
    assert ended.codes == [FAILURES[how]], ended.output


@pytest.mark.full
@pytest.mark.parametrize(("how", "starts"), [("user error", 1), ("kill", 4)])
def test_restarts_follow_the_table_of_exit_codes(tmp_path: Path, how: str, starts: int) -> None:
    launcher = [*D9D_TORCHRUN, "--max-restarts", "3", "--nproc-per-node", "2"]
    ended = run_until_end(tmp_path, [launcher], how=how, at="first step", on="1")
    assert ended.codes == [FAILURES[how]], ended.output
    journal = (tmp_path / "runs" / "quickstart" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in journal].count("started") == starts


@pytest.mark.full
@pytest.mark.parametrize("cell", _cells("two nodes"))
def test_ends_on_one_of_two_nodes(tmp_path: Path, cell: _Cell) -> None:
    """The launcher of the other node exits with the same code, or with that of a rank that lost its peer.

    The launcher of rank 0 has the store of the launchers. A rank that never starts causes a start-up timeout.
    """
    ended, following = _end(tmp_path, cell, _two_nodes())
    own, other = (ended.codes[rank] for rank in (int(cell.rank), 1 - int(cell.rank)))
    assert own == cell.expected_code, ended.output
    assert other in _codes_of_the_other_node(cell), ended.output
    _assert_saved(cell, ended, following)
    _assert_nothing_left(cell, ended)


def _two_nodes() -> list[list[str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rendezvous = ["--rdzv-backend", "static", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
    common = [*D9D_TORCHRUN, "--max-restarts", "0", *rendezvous, "--nnodes", "2", "--nproc-per-node", "1"]
    return [[*common, "--node-rank", str(node)] for node in range(2)]


def _codes_of_the_other_node(cell: _Cell) -> tuple[int, ...]:
    if cell.phase == "imports":
        return (ExitCode.HANG,)
    if cell.how in FAILURES or cell.how == "lost store":
        return (cell.expected_code, ExitCode.PEER_LOST)
    if cell.how.startswith("lost"):
        return (0, ExitCode.PEER_LOST) if "export" in cell.phase else (ExitCode.PEER_LOST,)
    if cell.phase == "start":  # the ranks know the code of a rank that was interrupted, but not of one that was killed
        return (cell.expected_code, ExitCode.PEER_LOST) if cell.how == "SIGINT" else (ExitCode.PEER_LOST,)
    return (cell.expected_code,)
