"""Run the commands of a page as written, in warm ranks instead of new processes, which would import for seconds.

bash splits each line into words, with its quotes, substitutions and comments. `python`, `torchrun --nproc-per-node N`
and the commands of the packages then run as in a shell: in the page's folder, with empty input. Lines with operators of
the shell, such as pipes, are not supported. `uv run python` starts a process in the checkout.
"""

import contextlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

from d9d_dist.testing import run_ranks

_ROOT = Path(__file__).resolve().parents[1]
_TORCHRUN = ["torchrun", "--nproc-per-node"]


def run_commands(code: str, folder: Path, exit_code: int) -> None:
    """Run the lines of a block in order; raise `AssertionError` if one exits with another code than `exit_code`."""
    for line in code.replace("\\\n", " ").splitlines():
        words = _split(line, folder)
        settings = {}
        while words and re.match(r"[A-Z_0-9]+=", words[0]):
            name, _, settings[name] = words.pop(0).partition("=")
        if not words:
            continue
        if words[:3] == ["uv", "run", "python"]:
            run = [sys.executable, *words[3:]]
            done = subprocess.run(run, cwd=_ROOT, env={**os.environ, **settings}, capture_output=True, check=False)
            assert done.returncode == exit_code, f"{line} exited with {done.returncode}: {done.stderr.decode()[-2000:]}"
            continue
        num_ranks = 1
        if words[:2] == _TORCHRUN:
            num_ranks, words = int(words[2]), ["python", *words[3:]]
        codes = run_ranks(_run_in_rank, words, settings, str(folder), world_size=num_ranks)
        assert codes == [exit_code] * num_ranks, f"{line} exited with {codes}; expected {exit_code}"


def _split(line: str, folder: Path) -> list[str]:
    operators = {"|", "||", "&", "&&", ";", "<", ">", ">>"}
    if found := operators.intersection(shlex.shlex(line, posix=True, punctuation_chars=True)):
        raise ValueError(f"got {found} in {line!r}; expected one simple command in a line. Mark the block `no-run`.")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    split = ["bash", "-c", f"printf '%s\\0' {line}"]
    done = subprocess.run(split, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, check=True)
    return [word for word in done.stdout.decode().split("\0")[:-1] if word]


def _run_in_rank(words: list[str], settings: dict[str, str], folder: str) -> int:
    """Run a command in this process, and return its exit code."""
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, settings),
        mock.patch.object(sys, "argv", words[1:] if words[0] == "python" else words),
        Path(os.devnull).open() as empty,
        mock.patch.object(sys, "stdin", empty),
    ):
        try:
            match words:
                case ["python", "-m", module, *rest]:
                    sys.argv = [module, *rest]
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
                case ["python", script, *_]:
                    runpy.run_path(script, run_name="__main__")
                case [name, *_]:
                    (command,) = entry_points(group="console_scripts", name=name)
                    command.load()()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
