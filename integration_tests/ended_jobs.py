"""Runs of `ending_job` under real launchers: exit codes, what is saved, and what is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from safetensors import safe_open

from d9d_dist.failures.peers import process_state

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600.0  # timeout of a job, on a machine with other jobs
PHASES = ("imports", "start", "first step", "evaluation", "save", "in a save", "in an export", "export")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
D9D_TORCHRUN = [sys.executable, "-m", "d9d_loop.torchrun"]

# A background command of a script ignores SIGINT, and one of nohup SIGHUP; its subprocesses would ignore them, too.
_WITH_SIGNALS = ["env", "--default-signal=HUP,INT"]

_SETTINGS = {
    "checkpoint.every": "2",
    "evaluation.every": "2",
    "rehearsal": "false",
    "data.num_workers": "1",
    "logging.progress": "false",
    "resilience.timeouts.startup_seconds": "60",
}


@final
@dataclass(frozen=True)
class Ended:
    """End of a job in a folder: exit codes of its launchers, as shells report them, and the combined output."""

    folder: Path
    codes: list[int]
    output: str

    @property
    def saved(self) -> int | None:
        """Step of the newest checkpoint with a final name; `None` without one."""
        names = [path.name for path in self._checkpoints() if not path.name.endswith(".partial")]
        return max((int(name.removeprefix("step-")) for name in names), default=None)

    def partial(self) -> list[str]:
        """Return the names of partial folders of saves and exports."""
        folders = [*self._checkpoints(), *(self.folder / "runs" / "quickstart").glob("export*")]
        return [path.name for path in folders if path.name.endswith(".partial")]

    def left_in_memory(self) -> list[str]:
        """Return the names of files in shared memory that processes of the job have created."""
        pids = "|".join("|".join(file.read_text(encoding="ascii").split()) for file in self.folder.glob("*.pids"))
        names = [path.name for path in Path("/dev/shm").iterdir()]  # noqa: S108 - Linux' file system for shared memory
        return [name for name in names if pids and re.search(rf"_({pids})_", name)]

    def left_in_temporary_folder(self) -> list[str]:
        """Return the names in the job's temporary folder, except those that torchrun itself never deletes."""
        names = [path.name for path in _temporary(self.folder).iterdir()]
        return [name for name in names if not name.startswith("torchelastic_")]

    def export_is_whole(self) -> bool:
        """Return True if the export has every parameter, or if there is no export."""
        file = self.folder / "runs" / "quickstart" / "export" / "model.safetensors"
        if not file.parent.is_dir():
            return True
        with safe_open(file, framework="numpy") as tensors:
            return sorted(tensors.keys()) == ["down.bias", "down.weight", "up.bias", "up.weight"]

    def _checkpoints(self) -> list[Path]:
        return list((self.folder / "runs" / "quickstart" / "checkpoints").glob("step-*"))


def run_until_end(
    folder: Path,
    launchers: Sequence[Sequence[str]],
    *,
    how: str,
    at: str,
    on: str,
    then: Callable[[], object] = list,
    log: str = "output",
) -> Ended:
    """Run a job that ends itself, by one launcher for each node, until no process of it is left.

    The function `then` is called as soon as the launchers have ended. The file `log` gets the output.
    """
    for name in ("quickstart.py", "quickstart.toml", "ending_job.py"):
        source = ROOT / ("integration_tests" if name == "ending_job.py" else "examples") / name
        (folder / name).write_bytes(source.read_bytes())
    _temporary(folder).mkdir(exist_ok=True)
    end = {"HOW": how, "AT": at, "ON": on, "TMPDIR": str(_temporary(folder))}
    environment = {**os.environ, **end, "OMP_NUM_THREADS": "1", "D9D_DEVICE": "cpu"}
    steps = "4" if "export" in at or how == "cut store" else "100000"
    arguments = [word for name, value in {**_SETTINGS, "steps": steps}.items() for word in (f"--{name}", value)]
    with (folder / log).open("w") as output:
        started = [
            subprocess.Popen(
                [*_WITH_SIGNALS, *launcher, "ending_job.py", *arguments],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=output,
            )
            for launcher in launchers
        ]
    try:
        for process in started:
            process.wait(SECONDS)
        then()
        wait_for(lambda: not _processes(folder))
    finally:
        for left in _processes(folder):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        for process in started:
            process.wait()
    codes = [each.returncode if each.returncode >= 0 else 128 - each.returncode for each in started]
    return Ended(folder, codes, (folder / log).read_text(encoding="utf-8"))


def wait_for(is_true: Callable[[], bool]) -> None:
    """Wait until a condition holds, for a limited time."""
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _temporary(folder: Path) -> Path:
    """Return the temporary folder of a job. Its path is short: those of the sockets in it have at most 107 bytes."""
    return folder.parent / f"{zlib.crc32(folder.name.encode()):x}"


def _processes(folder: Path) -> list[int]:
    """Return the processes of a job: those with its temporary folder in their environment."""
    mark, found = f"TMPDIR={_temporary(folder)}\0".encode(), list[int]()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (path / "environ").read_bytes() and process_state(int(path.name)) != "is gone":
                found.append(int(path.name))
    return found
