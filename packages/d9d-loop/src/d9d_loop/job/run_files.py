"""Files of a run folder: the configuration, and the software and hardware of the job."""

import json
import platform
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue

from d9d_dist import DistributedContext, agree
from d9d_loop.writable import replace_text
from d9d_metrics.peak_memory import peak_bytes
from d9d_metrics.trackers.redaction import redact_command, redact_secrets
from d9d_state import StateError

_PACKAGES = ("d9d-loop", "d9d-dist", "d9d-modules", "d9d-moe", "d9d-peft", "transformers", "numpy")
_MOST_LIVES = 100
_GIT_SECONDS = 5.0


@contextmanager
def writes_together(folder: Path, ctx: DistributedContext) -> Generator[None]:
    """Raise `StateError` on all ranks if the body cannot write to the folder on one rank, e.g. to a full disk.

    Collective over all ranks.
    """
    problem = None
    try:
        yield
    except OSError as error:
        problem = f"{folder} cannot be written: {error}. Free space, or choose another folder with --run.folder."
    agree(problem, error=StateError)


def write_config(resolved: Mapping[str, JsonValue], folder: Path) -> None:
    """Write the configuration to `config.json`, without secrets. An existing file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "config.json", json.dumps(redact_secrets(resolved), indent=2) + "\n")


def write_environment(folder: Path, ctx: DistributedContext, *, started: datetime) -> None:
    """Write versions, device, number of ranks, times and the peak memory of this process to `environment.json`.

    `lives` has an entry for each start of the run: times, host, command line without secrets, commit and versions.
    """
    is_accelerator = ctx.device.type != "cpu"
    described: dict[str, Any] = {
        "started": started.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": ctx.world_size,
        "device": torch.get_device_module().get_device_name() if is_accelerator else "CPU",
        "threads": torch.get_num_threads(),
        "peak_memory_gib": round(peak_bytes(ctx.device) / 2**30, 3),
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        **{name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }
    path = folder / "environment.json"
    names = ("started", "ended", "ranks", "torch", "d9d-loop")
    life = {
        **{name: described[name] for name in names if name in described},
        "host": socket.gethostname(),
        "command": redact_command(sys.argv),
        "commit": _commit(),
    }
    described["lives"] = [*_earlier_lives(path), life][-_MOST_LIVES:]
    replace_text(path, json.dumps(described, indent=2) + "\n")


def _earlier_lives(path: Path) -> list[Any]:
    try:
        lives = json.loads(path.read_text(encoding="utf-8"))["lives"]
    except (OSError, ValueError, KeyError, TypeError):  # the first life, or a file that a killed process did not finish
        return []
    return lives if isinstance(lives, list) else []


def _commit() -> str | None:
    """Return the commit of the current folder, with "+" if files differ from it; `None` outside of a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)  # noqa: S603 - a fixed command
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
