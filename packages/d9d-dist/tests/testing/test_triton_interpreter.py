from pathlib import Path

import pytest

from d9d_dist.testing import run_tests_interpreted


def test_a_file_is_run_with_the_interpreter_and_its_tests_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_interpreted.py"
    file.write_text("import os\n\ndef test_it():\n    assert os.environ['TRITON_INTERPRET'] == '1'\n", encoding="utf-8")
    run_tests_interpreted(str(file), num_passed=1)
    with pytest.raises(AssertionError):
        run_tests_interpreted(str(file), num_passed=2)
