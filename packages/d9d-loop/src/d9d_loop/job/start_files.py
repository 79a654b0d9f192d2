"""Files that the main process writes to the run folder at the start of a job."""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import JsonValue

from d9d_dist import DistributedContext, agree
from d9d_metrics import redact_secrets
from d9d_state import StateError


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
    partial = folder / ".config.json.partial"
    try:
        partial.write_text(json.dumps(redact_secrets(resolved), indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / "config.json")
    finally:
        partial.unlink(missing_ok=True)
