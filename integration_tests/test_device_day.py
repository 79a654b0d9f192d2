"""The script for a day on an accelerator runs to its end on a CPU, and continues after an interruption."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks/device_day.py"


@pytest.mark.full
def test_every_slice_runs_with_tiny_sizes_and_is_not_repeated(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(results) == 17
    assert results["checkpoint"]["measured"]["same bits"] is True
    page = (tmp_path / "page.md").read_text()
    assert "| 8B | 2 of 36 | torch alone |" in page
    assert "Tiny sizes" in page
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_the_tests_marked_gpu_are_run() -> None:
    root, folders = SCRIPT.parent.parent, runpy.run_path(str(SCRIPT))["GPU_TESTS"]
    run = [root / f"packages/d9d-{name}/tests" / folder for name, each in folders.items() for folder in each]
    marked = [path for path in root.glob("packages/*/tests/**/*.py") if "pytest.mark.gpu" in path.read_text()]
    assert len(marked) > 5
    assert [path for path in marked if not any(path.is_relative_to(folder) for folder in run)] == []
