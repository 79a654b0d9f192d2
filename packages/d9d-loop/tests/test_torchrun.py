import subprocess
import sys

import pytest

from d9d_loop.torchrun import main

_HELPS = """
import sys
from d9d_loop.torchrun import main
main(["--help"])
assert "torch" not in sys.modules
"""


def test_help_imports_no_torch_and_names_the_help_of_torchrun() -> None:
    done = subprocess.run([sys.executable, "-c", _HELPS], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: d9d-torchrun [--warm] [OPTIONS OF TORCHRUN] SCRIPT")
    assert "--warm" in done.stdout.partition("options:")[2]
    assert "see torchrun --help." in done.stdout.replace("\n", " ")


def test_help_beside_other_options_lists_those_of_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--nnodes", "2", "--help"])
    shown = capsys.readouterr().out
    assert "--nproc-per-node" in shown
    assert "--warm" in shown
