import os
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch.distributed as dist

from d9d_dist import UserError
from d9d_dist.failures import first_failure
from d9d_loop import cli_main
from d9d_loop.data import DataError
from d9d_state import StateError


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_a_successful_body_is_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    with cli_main():
        print("done")
    assert capsys.readouterr() == ("done\n", "")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("steps = 0; expected 1 or more."), 2, "d9d: steps = 0; expected 1 or more.\n"),
        (KeyboardInterrupt(), 130, "d9d: interrupted.\n"),
    ],
)
def test_an_error_gives_one_message_and_an_exit_code(
    error: BaseException,
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    late = isinstance(error, UserError)
    monkeypatch.setattr(time, "sleep", waits.append)
    for local_rank, shown in (("0", text), ("1", text if late else "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit) as stop, cli_main():
            raise error
        assert stop.value.code == code
        assert stop.value.__suppress_context__
        assert capsys.readouterr() == ("", shown)
        assert waits == ([5.0] if late and local_rank == "1" else [])


_FAILS = """
import os, time
from d9d_dist import UserError
from d9d_loop import cli_main

with cli_main():
    time.sleep(1.5 if os.environ["LOCAL_RANK"] == "0" else 0)
    if os.environ["LOCAL_RANK"] != os.environ["IS_FINE"]:
        raise UserError("mesh.pipeline_parallel = 3.")
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fine", ["none", "0"])
def test_a_launcher_shows_the_error_of_ranks_once_though_another_fails_before_rank_0(fine: str, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(_FAILS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "fails.py"]
    found = subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "IS_FINE": fine},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stderr.count("d9d: mesh.pipeline_parallel = 3.") == 1, found.stderr


def test_a_single_process_prints_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), cli_main():
        raise UserError("no.")
    assert capsys.readouterr().err == "d9d: no.\n"


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(7)])
def test_other_exceptions_propagate(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)) as passed, cli_main():
        raise error
    assert passed.value is error
    assert capsys.readouterr() == ("", "")


def test_state_that_cannot_be_written_is_a_message_on_each_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    error = StateError("checkpoints/step-00000004: no space left.")
    error.add_note("Rank 0 failed before this rank: StateError")
    with pytest.raises(SystemExit) as stop, cli_main():
        raise error
    assert stop.value.code == 1
    assert capsys.readouterr().err == (
        "d9d: checkpoints/step-00000004: no space left. Rank 0 failed before this rank: StateError\n"
    )


def test_the_first_error_of_a_running_job_is_printed_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits"))
    store, error = dist.HashStore(), UserError("3 results for 4 samples.")
    first_failure._report(store, error, 3, 4)
    with pytest.raises(SystemExit), cli_main():
        raise error
    assert capsys.readouterr().err == "d9d: 3 results for 4 samples.\n"
    late = UserError("3 results for 4 samples.")
    first_failure._report(store, late, 2, 4)
    assert first_failure.PUBLISHED not in vars(late)


def test_ctrl_c_in_the_wait_for_rank_0_prints_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(SystemExit), cli_main():
        raise UserError("no.")
    assert capsys.readouterr().err == "d9d: no.\n"


def test_an_error_on_one_rank_is_printed_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    error = UserError("a sample is missing.")
    error.add_note("on rank 3")
    with pytest.raises(SystemExit), cli_main():
        raise error
    assert capsys.readouterr().err == "d9d: a sample is missing. (on rank 3)\n"


def test_invalid_data_found_by_a_running_job_are_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    error = DataError("sample 9 could not be read: chats.jsonl, byte 3: expected a JSON object.")
    error.__cause__ = UserError("chats.jsonl, byte 3: expected a JSON object.")
    with pytest.raises(SystemExit) as exit_, cli_main():
        raise error
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"d9d: {error}\n"


_HELP = """
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
sys.modules["torch"] = None
from importlib.metadata import entry_points
for command in entry_points(group="console_scripts"):
    if not command.module.startswith("d9d_") or command.name == "d9d-torchrun":
        continue
    main = command.load()
    sys.argv = ["command", "--help"]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, command.name
"""


def test_the_help_of_commands_does_not_import_torch() -> None:
    subprocess.run([sys.executable, "-c", _HELP], check=True, stdout=subprocess.DEVNULL)


def test_d9d_tokenize_prints_user_errors_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["d9d-tokenize", "text.txt", "--output", str(tmp_path / "tokens"), "--tokenizer", "missing.json"]
    monkeypatch.setattr("sys.argv", words)
    (command,) = entry_points(group="console_scripts", name="d9d-tokenize")
    with pytest.raises(SystemExit) as stop:
        command.load()()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("d9d: the tokenizer missing.json does not exist; expected")


@pytest.mark.parametrize("kind", [dist.DistNetworkError, StateError, RuntimeError])
def test_a_rank_whose_connection_broke_exits_with_125(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    error = kind("lost")
    if kind is not dist.DistNetworkError:
        error.__cause__ = RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer")
    error.add_note("Rank 1 failed before this rank: UserError: no.")
    with pytest.raises(SystemExit) as stop, cli_main():
        raise error
    assert stop.value.code == 125
    assert capsys.readouterr().err == "d9d: lost Rank 1 failed before this rank: UserError: no.\n"


@pytest.mark.parametrize("first", ["", "3\n1"])
def test_a_user_error_in_a_slurm_task_tells_the_batch_script_its_code(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun` kills the other tasks, and exits with their code, which is larger."""
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("D9D_NODE_FOLDER", str(tmp_path))
    if first:
        (tmp_path / "first_failure").write_text(first)
    with pytest.raises(SystemExit, match="2"), cli_main():
        raise UserError("batch.global_size = 64 cannot be divided evenly over 12 data-parallel ranks")
    assert (tmp_path / "first_failure").read_text() == (first or "5\n2")
