"""Runs of test files in Triton's interpreter, which executes kernels on a CPU."""

import os
import subprocess
import sys


def run_tests_interpreted(file: str, *, num_passed: int) -> None:
    """Assert that `num_passed` tests of a file pass in Triton's interpreter, in a separate process.

    Triton selects the interpreter at import by the environment variable `TRITON_INTERPRET=1`.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-o", "addopts=--import-mode=importlib", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{num_passed} passed" in done.stdout, done.stdout
