"""Files through which the agent of `d9d-torchrun` and the ranks of its node communicate, without the network.

The agent writes which host is lost: a connection to a host without power does not break for minutes, but the agents
notice the missing keep-alive within seconds. It also writes whether a spare host waits. The ranks write that their own
host is slow, to request a spare one. And they write their run folder and its command for failures, which the launcher
runs if no rank could.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from d9d_dist.failures.first_failure import FIRST_FAILURE_FILE, NODE_FOLDER

_LOST, _SPARE, _SLOW, _REPLACING = "lost", "spare", "slow", "replacing"
_JOB, _REPORTED = "job", "reported"


def describe_lost_host(rank: int, host: str) -> str:
    """Return a description of a lost host: its first rank, and why it is missing."""
    return f"Rank {rank} is missing: its process on {host} does not answer: the host is down or cut off."


def write_lost_host(text: str | None) -> None:
    """Write the description of a lost host; `None` if no host is lost. The agent calls this."""
    _write(_LOST, text)


def read_lost_host() -> str | None:
    """Return the description of a lost host, or `None`. Local."""
    return _read(_LOST)


def write_spare(*, waits: bool) -> None:
    """Write whether a spare host waits. The agent calls this."""
    _write(_SPARE, "waits" if waits else None)


def spare_waits() -> bool:
    """Return True if a spare host waits that can replace this one. Local."""
    return _read(_SPARE) is not None


def write_slow_host() -> None:
    """Ask the agent to replace this host with a spare once its ranks have exited. Any rank of the host calls this."""
    _write(_SLOW, "slow")


def take_slow_host() -> bool:
    """Return True if the ranks have asked to replace this host, and remove the request. The agent calls this."""
    is_slow = _read(_SLOW) is not None
    _write(_SLOW, None)
    return is_slow


def write_replacing() -> None:
    """Inform the agent that all ranks exit to replace a slow host, and must be restarted. Ranks call this."""
    _write(_REPLACING, "replacing")


def is_replacing() -> bool:
    """Return True if all ranks exit to replace a slow host. The agent calls this."""
    return _read(_REPLACING) is not None


def read_first_failure() -> tuple[int, int | None] | None:
    """Return the rank that failed first and its exit code, as the ranks of this node know. The agent calls this."""
    if (text := _read(FIRST_FAILURE_FILE)) is None:
        return None
    rank, _, code = text.partition("\n")
    return int(rank), int(code) if code else None


def write_user_error(code: int) -> None:
    """Write that this rank has failed with a user error, unless a first failure of the node is known.

    For a batch script of Slurm, whose `srun` kills the other ranks and exits with their larger code.
    """
    if _read(FIRST_FAILURE_FILE) is None:
        _write(FIRST_FAILURE_FILE, f"{os.environ.get('SLURM_PROCID', '0')}\n{code}")


def write_job(folder: Path, on_failure: str | None) -> None:
    """Write the run folder of a job, and the command that runs if the job fails. Ranks call this when they start."""
    _write(_JOB, json.dumps([str(folder.absolute()), on_failure]))


def read_job() -> tuple[Path, str | None] | None:
    """Return what `write_job` has written, or `None`. The launcher calls this."""
    if (text := _read(_JOB)) is None:
        return None
    folder, on_failure = json.loads(text)
    return Path(folder), on_failure


def claims_report() -> bool:
    """Return True for the first process of this node that reports a failure after a start.

    Without `d9d-torchrun`, return True: then the caller decides which rank reports.
    """
    if NODE_FOLDER in os.environ:
        try:
            Path(os.environ[NODE_FOLDER], _REPORTED).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # a full disk: better two reports than none
            return True
    return True


def forget_ranks() -> None:
    """Remove what the last ranks of this node have written. The agent calls this before it starts ranks."""
    for name in (_LOST, _REPLACING, FIRST_FAILURE_FILE, _REPORTED):
        _write(name, None)


def _read(name: str) -> str | None:
    with suppress(OSError, KeyError):
        return Path(os.environ[NODE_FOLDER], name).read_text(encoding="utf-8") or None
    return None


def _write(name: str, text: str | None) -> None:
    if NODE_FOLDER not in os.environ or (text is not None and _read(name) == text):
        return
    path = Path(os.environ[NODE_FOLDER], name)
    with suppress(OSError):  # a full disk must not end a job: these files are optional
        if text is None:
            path.unlink(missing_ok=True)
            return
        new = path.with_suffix(f".{os.getpid()}")  # several ranks may write
        new.write_text(text, encoding="utf-8")
        new.replace(path)
