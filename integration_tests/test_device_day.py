"""The script for a day on an accelerator runs to its end on a CPU, and goes on after an interruption."""

import json
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
