"""Hosts that the agent of `d9d-torchrun` has lost, for the ranks of its node.

A connection to a host without power does not break for minutes. The agents notice the missing keep-alive within
seconds, and write the host to a file on their node, which the watchdogs of the ranks read without the network.
"""

import os
from contextlib import suppress
from pathlib import Path

LOST_HOSTS = "D9D_LOST_HOSTS"
"""Environment variable with the path of the file."""


def describe_lost_host(rank: int, host: str) -> str:
    """Return the content of the file: the first rank of the host, and why it is missing."""
    return f"Rank {rank} is missing: its process on {host} does not answer: the host is down or cut off."


def read_lost_host() -> str | None:
    """Return the description of a lost host, or `None`. Local."""
    with suppress(OSError, KeyError):
        return Path(os.environ[LOST_HOSTS]).read_text(encoding="utf-8") or None
    return None
