"""Runs the examples as jobs in warm ranks, as `python` and `torchrun` would, without the seconds of importing."""

import importlib
import json
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from d9d_dist.testing import RankError, run_ranks
from d9d_loop import command_line

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

TINY_MODEL = {
    "model.hidden_size": "32",
    "model.num_layers": "2",
    "model.head_dim": "16",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.intermediate_size": "48",
    "text.length": "32",
    "text.pattern": "json/*.py",
    "batch.global_size": "8",
    "evaluation.num_samples": "11",
}
"""Overrides that make the main job take a second."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a script ended: its exit code and what it printed."""

    code: int
    output: str
    errors: str

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON object that the last line of the output is."""
        return json.loads(self.output.splitlines()[-1])


def script(name: str, arguments: Sequence[str]) -> Ended:
    """Run an example's `main` in this process, as `python examples/name.py ARGUMENTS` does."""
    module = importlib.import_module(name)
    output, errors = StringIO(), StringIO()
    before, sys.argv = sys.argv, [f"{name}.py", *arguments]
    code = 0
    try:
        with redirect_stdout(output), redirect_stderr(errors), command_line():
            module.main()
    except SystemExit as leave:
        code = int(leave.code or 0)
    finally:
        sys.argv = before
    return Ended(code, output.getvalue(), errors.getvalue())


def options(*parts: Mapping[str, Any], **more: Any) -> list[str]:
    """Overrides as a command line; in `more`, two underscores stand for a dot."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    merged.update({name.replace("__", "."): value for name, value in more.items()})
    return [word for name, value in merged.items() for word in (f"--{name}", str(value))]


def on_ranks(name: str, arguments: Sequence[str], *, world_size: int = 1, timeout: float = 300) -> list[Ended]:
    """Run an example on every rank of a job."""
    return run_ranks(script, name, list(arguments), world_size=world_size, timeout=timeout)


def script_until_killed(name: str, arguments: Sequence[str], seconds: float) -> Ended:
    """Run an example, and kill its process with SIGKILL after so many seconds, unless it has ended by then."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.start()
    try:
        return script(name, arguments)
    finally:
        timer.cancel()


def run_with_kills(name: str, arguments: Sequence[str], *, longest: float, seed: int, world_size: int) -> int:
    """Run an example again and again, killed at random moments, until it ends by itself; how often it was killed.

    Lives get longer, so that a job which makes no progress between two kills ends too.
    """
    moments, kills = random.Random(seed), 0  # noqa: S311
    while _is_killed(name, arguments, moments.uniform(0, longest * 1.5**kills), world_size):
        kills += 1
    return kills


def _is_killed(name: str, arguments: Sequence[str], seconds: float, world_size: int) -> bool:
    try:
        ended, *_ = run_ranks(script_until_killed, name, list(arguments), seconds, world_size=world_size, timeout=300)
    except RankError as error:
        if "exit code -9" in str(error):
            return True
        raise
    assert ended.code == 0, ended.errors
    return False


def records(run_dir: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` holds, without what differs from run to run: times and throughput."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    volatile = {"time", "tokens_per_second", "config"}
    kept = [{k: v for k, v in json.loads(line).items() if k not in volatile} for line in lines]
    return [record for record in kept if record]


def curve(run_dir: Path, name: str) -> list[float]:
    """The values of a name over steps."""
    return [record[name] for record in records(run_dir) if name in record]


def copy_run(source: Path, target: Path) -> Path:
    """Copy a run's folder, to continue it twice."""
    return Path(shutil.copytree(source, target))
