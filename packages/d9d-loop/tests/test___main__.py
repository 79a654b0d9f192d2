import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # import torch raises ImportError
from d9d_loop.__main__ import main
main()
"""

_JOB = 'job = "pretrain"\nsteps = 1\nbatch.global_size = 1\nmodel.family = "qwen3"\ndataset.files = ["a.txt"]\n'


def _run(folder: Path, *words: str, code: str = _WITHOUT_TORCH) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], "[optimizer]"),
        (["--help", "optimizer"], "--optimizer.momentum"),
        (["job.toml", "--help", "dataset"], "--dataset.text_field"),
        (["--schema"], '"$schema"'),
        (["--init"], "d9d-train --init sft"),
    ],
)
def test_help_needs_no_torch(words: list[str], shown: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(_JOB)
    run = _run(tmp_path, *words)
    assert (run.returncode, shown in run.stdout) == (0, True), run.stderr


@pytest.mark.parametrize(
    ("text", "words", "problem"),
    [
        (_JOB + "optimizer.learning_rat = 1.0\n", [], "optimizer.learning_rat"),
        (_JOB, ["--dataset.lenght", "3"], "dataset.lenght"),
        (_JOB.replace("steps = 1", "steps = 0"), [], "steps = 0"),
        ("batch.global_size = 1\nstep = 3\n", [], "step is not a configuration key"),
        (_JOB, ["--batch.microbatch_size", "2"], "batch.global_size = 1 cannot be divided evenly over 1 data-parallel"),
        (_JOB, ["--mesh.tensor_parallel", "2"], "to divide 1"),
    ],
)
def test_invalid_keys_are_reported_before_torch_is_imported(
    text: str, words: list[str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(text)
    run = _run(tmp_path, "job.toml", *words)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("d9d: ")
    assert problem in run.stderr
    assert "Traceback" not in run.stderr


def test_a_plan_of_a_batch_that_cannot_be_divided_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(_JOB)
    words = ["job.toml", "--world-size", "8", "--hardware", "h100-dgx"]
    run = _run(tmp_path, *words, code=_WITHOUT_TORCH.replace("d9d_loop.__main__", "d9d_loop.planning.__main__"))
    assert run.stderr.startswith("d9d: batch.global_size = 1 cannot be divided evenly over 8 data-parallel ranks")
