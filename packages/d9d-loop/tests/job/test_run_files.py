import errno
import json
from pathlib import Path
from unittest import mock

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_loop.job.run_files import write_config, writes_together
from d9d_pipeline import OneForwardOneBackward, Timeline, build, simulate
from d9d_pipeline.plot import draw_measured, draw_program
from d9d_state import StateError

PROGRAM = build(OneForwardOneBackward(), num_ranks=2, num_microbatches=3)


def test_the_configuration_is_written_without_secrets_and_replaced(tmp_path: Path) -> None:
    for steps in (5, 10):
        write_config({"steps": steps, "api_key": "canary"}, tmp_path / "deep" / "mine")
    (file,) = (tmp_path / "deep" / "mine").iterdir()
    text = file.read_text(encoding="utf-8")
    assert "canary" not in text
    assert json.loads(text)["steps"] == 10


def _write_to_a_full_disk(folder: Path) -> str:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        try:
            with (
                writes_together(folder, ctx),
                mock.patch.object(Path, "replace", side_effect=OSError(errno.ENOSPC, "")),
            ):
                if ctx.is_main_process:
                    write_config({"steps": 10}, folder)
        except StateError as error:
            return str(error)
    return "no error"


def test_a_full_disk_is_one_error_with_the_folder_on_all_ranks(tmp_path: Path) -> None:
    errors = run_ranks(_write_to_a_full_disk, tmp_path)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"rank 0: {tmp_path} cannot be written: [Errno 28] . Free space")
    assert list(tmp_path.iterdir()) == []


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
    with mock.patch("d9d_pipeline.plot.find_spec", return_value=None):
        draw_program(PROGRAM, tmp_path, title="1f1b")
    assert [path.name for path in tmp_path.iterdir()] == ["schedule.txt"]
