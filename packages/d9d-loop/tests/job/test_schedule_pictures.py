from pathlib import Path
from unittest import mock

from d9d_loop.job.schedule_pictures import draw_measured, draw_program
from d9d_pipeline import OneForwardOneBackward, Timeline, build, simulate

PROGRAM = build(OneForwardOneBackward(), num_ranks=2, num_microbatches=3)


def test_a_program_and_a_measured_step_are_drawn(tmp_path: Path) -> None:
    draw_program(PROGRAM, tmp_path, title="1f1b")
    draw_measured(Timeline(simulate(PROGRAM).ranks, unit="s"), tmp_path, title="step 2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "schedule.png",
        "schedule.txt",
        "schedule_measured.png",
        "schedule_measured.txt",
    ]
    text = (tmp_path / "schedule.txt").read_text()
    assert text.startswith("1f1b\nrank 0: ")
    assert (tmp_path / "schedule.png").read_bytes()[1:4] == b"PNG"


def test_without_matplotlib_only_text_is_written(tmp_path: Path) -> None:
    with mock.patch("d9d_loop.job.schedule_pictures.find_spec", return_value=None):
        draw_program(PROGRAM, tmp_path, title="1f1b")
    assert [path.name for path in tmp_path.iterdir()] == ["schedule.txt"]
