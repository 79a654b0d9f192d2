import io
import re
from contextlib import redirect_stderr

import pytest
import torch

from d9d_loop.job.progress import Progress

CPU = torch.device("cpu")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _draw(*, visible: bool = True, bar: bool = True) -> str:
    with redirect_stderr(_Terminal()) as terminal:
        progress = Progress(num_steps=4, done=1, visible=visible, device=CPU, bar=bar)
        progress.values(1, {"loss": 2.5, "learning_rate": 1e-5})
        progress.step()
        progress.line("held-out loss 3")
        progress.close()
    return terminal.getvalue()


def test_a_terminal_shows_a_bar_with_values(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = _draw()
    assert "2/4" in drawn
    assert re.search(r"loss=2\.5, memory=\d+\.\dGiB", drawn)
    assert "learning_rate" not in drawn
    assert capsys.readouterr().out == "held-out loss 3\n"


def test_without_a_bar_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _draw(bar=False) == ""
    assert capsys.readouterr().out == "step 1/4:  loss 2.5  learning_rate 1e-05\nheld-out loss 3\n"


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=4, done=1, visible=True, device=CPU, bar=True)
    progress.step()
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_other_processes_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert _draw(visible=False) == ""
    assert capsys.readouterr().out == ""


def test_a_log_file_gets_a_line_at_most_every_so_often(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=4, done=0, visible=True, device=CPU, bar=False)
    for step in range(1, 5):
        progress.values(step, {"loss": float(step)})
    progress.close()
    assert capsys.readouterr().out == "step 1/4:  loss 1\nstep 4/4:  loss 4\n"


def test_evaluations_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=4, done=0, visible=True, device=CPU, bar=False)
    for step in (2, 4):
        progress.evaluation(step, {"loss": 1.5 * step, "accuracy": 0.25})
    progress.close()
    assert capsys.readouterr().out.splitlines() == [
        "    held-out            loss        accuracy",
        "      step 2          3.0000          0.2500",
        "      step 4          6.0000          0.2500",
    ]
