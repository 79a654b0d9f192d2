import io
import re
import time
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
    assert capsys.readouterr().out == ("step 1/4:  loss 2.5  learning_rate 1e-05  0:00:00 elapsed\nheld-out loss 3\n")


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=4, done=1, visible=True, device=CPU, bar=True)
    progress.step()
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_other_processes_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert _draw(visible=False) == ""
    assert capsys.readouterr().out == ""


def test_a_log_file_gets_each_report_with_elapsed_and_remaining_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 60.0, 120.0, 3700.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    progress = Progress(num_steps=10, done=2, visible=True, device=CPU, bar=False)
    for step in (3, 4, 10):
        progress.values(step, {"loss": float(step)})
    monkeypatch.undo()
    progress.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 3/10:  loss 3  0:01:00 elapsed, 0:07:00 remaining",
        "step 4/10:  loss 4  0:02:00 elapsed, 0:06:00 remaining",
        "step 10/10:  loss 10  1:01:40 elapsed, 0:00:00 remaining",
    ]


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


@pytest.mark.parametrize(
    ("flops", "mfu", "shown"),
    [
        (12.34e12, 0.4123, "speed 12.3 TFLOP/s, MFU 41.2 %"),
        (5.6e8, None, "speed 560 MFLOP/s"),
        (0.0, None, "speed 0 MFLOP/s"),
    ],
)
def test_the_speed_has_a_unit(flops: float, mfu: float | None, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=2, done=0, visible=True, device=torch.device("cpu"), bar=False)
    progress.values(1, {"loss": 1.0, "flops_per_second": flops} | ({} if mfu is None else {"mfu": mfu}))
    assert f"loss 1  {shown}  " in capsys.readouterr().out
