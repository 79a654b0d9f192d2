"""Files through which the agent of `d9d-torchrun` and the ranks of its node communicate, without the network.

The agent writes which host is lost: a connection to a host without power does not break for minutes, but the agents
notice the missing keep-alive within seconds. The launcher runs the command of `JOB` for failures if no rank could.
"""

import json
import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from d9d_dist.failures.first_failure import FIRST_FAILURE_FILE, NODE_FOLDER


class NodeFile(StrEnum):
    """Files of a node. Those without a described content only exist or do not."""

    LOST_HOST = "lost"
    """Description of a lost host. The agent writes it."""
    SPARE_HOST = "spare"
    """A spare host waits that can replace this one. The agent writes it."""
    SLOW_HOST = "slow"
    """Request to replace this host with a spare one once its ranks have exited. Any of its ranks writes it."""
    REPLACING = "replacing"
    """All ranks exit to replace a slow host, and must be restarted. Ranks write it."""
    FIRST_FAILURE = FIRST_FAILURE_FILE
    """The rank that failed first, and its exit code. Ranks write it."""
    JOB = "job"
    """The run folder, and the command that runs if the job fails. Ranks write it when they start."""
    REPORTED = "reported"
    """A process of this node reports the failure of the last start. That process writes it."""


def read_node_file(name: NodeFile) -> str | None:
    """Return the content of a file of this node; `None` if there is none. Local."""
    with suppress(OSError, KeyError):
        return Path(os.environ[NODE_FOLDER], name).read_text(encoding="utf-8") or None
    return None


def write_node_file(name: NodeFile, text: str | None) -> None:
    """Write a file of this node; `None` removes it. Without `d9d-torchrun`, do nothing."""
    if NODE_FOLDER not in os.environ or (text is not None and read_node_file(name) == text):
        return
    path = Path(os.environ[NODE_FOLDER], name)
    with suppress(OSError):  # a full disk must not end a job: these files are optional
        if text is None:
            path.unlink(missing_ok=True)
            return
        new = path.with_suffix(f".{os.getpid()}")  # several ranks may write
        new.write_text(text, encoding="utf-8")
        new.replace(path)


def describe_lost_host(rank: int, host: str) -> str:
    """Return a description of a lost host: its first rank, and why it is missing."""
    return f"Rank {rank} is missing: its process on {host} does not answer: the host is down or cut off."


def take_slow_host() -> bool:
    """Return True if the ranks have asked to replace this host, and remove the request. The agent calls this."""
    is_slow = read_node_file(NodeFile.SLOW_HOST) is not None
    write_node_file(NodeFile.SLOW_HOST, None)
    return is_slow


def read_first_failure() -> tuple[int, int | None] | None:
    """Return the rank that failed first and its exit code, as the ranks of this node know. The agent calls this."""
    if (text := read_node_file(NodeFile.FIRST_FAILURE)) is None:
        return None
    rank, _, code = text.partition("\n")
    return int(rank), int(code) if code else None


def write_user_error(code: int) -> None:
    """Write that this rank has failed with a user error, unless a first failure of the node is known.

    For a batch script of Slurm, whose `srun` kills the other ranks and exits with their larger code.
    """
    if read_node_file(NodeFile.FIRST_FAILURE) is None:
        write_node_file(NodeFile.FIRST_FAILURE, f"{os.environ.get('SLURM_PROCID', '0')}\n{code}")


def write_job(folder: Path, on_failure: str | None) -> None:
    """Write the run folder of a job, and the command that runs if the job fails. Ranks call this when they start."""
    write_node_file(NodeFile.JOB, json.dumps([str(folder.absolute()), on_failure]))


def read_job() -> tuple[Path, str | None] | None:
    """Return what `write_job` has written, or `None`. The launcher calls this."""
    if (text := read_node_file(NodeFile.JOB)) is None:
        return None
    folder, on_failure = json.loads(text)
    return Path(folder), on_failure


def claims_report() -> bool:
    """Return True for the first process of this node that reports a failure after a start.

    Without `d9d-torchrun`, return True: then the caller decides which rank reports.
    """
    if NODE_FOLDER in os.environ:
        try:
            Path(os.environ[NODE_FOLDER], NodeFile.REPORTED).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # a full disk: better two reports than none
            return True
    return True


def forget_ranks() -> None:
    """Remove what the last ranks of this node have written. The agent calls this before it starts ranks."""
    for name in (NodeFile.LOST_HOST, NodeFile.REPLACING, NodeFile.FIRST_FAILURE, NodeFile.REPORTED):
        write_node_file(name, None)
