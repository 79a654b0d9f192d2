"""Commented configuration files to start from: `d9d-train --init sft`. They are in the folder `starters`."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import get_args

from d9d_dist import UserError
from d9d_loop.jobs.job_config import JobKind

_FOLDER = files("d9d_loop.jobs").joinpath("starters")
STARTERS: Mapping[str, str] = {
    job: _FOLDER.joinpath(f"{job}.toml").read_text(encoding="utf-8") for job in get_args(JobKind)
}
"""Content of the starter file of each job."""


def write_starter(job: str, folder: Path) -> Path:
    """Write the starter file of a job to a folder, as `JOB.toml`; raise `UserError` if the file exists."""
    if job not in STARTERS:
        raise UserError(f"--init {job}: no such job; expected one of {', '.join(STARTERS)}.")
    path = folder / f"{job}.toml"
    if path.exists():
        raise UserError(f"{path} already exists; rename or remove it first.")
    path.write_text(STARTERS[job], encoding="utf-8")
    return path
