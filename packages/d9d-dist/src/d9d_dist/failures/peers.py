"""States of the ranks' processes, to find the cause of a failed collective.

Only processes on this machine can be inspected.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

ProcessState = Literal["runs", "is stopped", "is gone"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Process of a rank: host, process-id namespace (a container may have its own) and process id."""

    rank: int
    host: str
    namespace: str
    pid: int

    @property
    def is_here(self) -> bool:
        """True if the process id is valid in this process: same host and same namespace."""
        return (self.host, self.namespace) == (socket.gethostname(), _namespace())

    def state(self) -> ProcessState:
        """Return the state of the process. Requires `is_here`."""
        return process_state(self.pid)

    def describe(self) -> str:
        """Format process id and host for a message."""
        return f"process {self.pid} on {self.host}"


def set_acknowledged(store: dist.Store, key: str, text: str) -> None:
    """Write a text into the store; when this returns, all ranks can read it.

    `TCPStore.set` sends and does not wait: another rank may ask for the key after a barrier and before the write.
    """
    store.set(key, text)
    store.check([key])  # answered after the write, which came over the same connection


def publish_self(store: dist.Store, rank: int) -> None:
    """Publish this rank's host, namespace and process id in the store."""
    set_acknowledged(store, f"d9d/peer/{rank}", f"{socket.gethostname()}\n{_namespace()}\n{os.getpid()}")


def peers_here(store: dist.Store, ranks: Iterable[int]) -> list[Peer]:
    """Return the processes of the given ranks on this machine. Skips ranks that have not called `publish_self`."""
    return [peer for peer in _peers(store, list(ranks)) if peer.is_here]


def hosts_of(store: dist.Store, ranks: Sequence[int]) -> list[str]:
    """Return the host name of each rank. All ranks must have called `publish_self`."""
    return [peer.host for peer in _peers(store, ranks)]


def _peers(store: dist.Store, ranks: Sequence[int]) -> list[Peer]:
    """Return the processes of the ranks that called `publish_self`. Two requests to the store if all ranks have."""
    keys = {rank: f"d9d/peer/{rank}" for rank in ranks}
    if not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    texts = store.multi_get(list(keys.values())) if keys else []
    return [_parse(rank, text.decode()) for rank, text in zip(keys, texts, strict=True)]


def process_state(pid: int) -> ProcessState:
    """Return the state of a process on this machine."""
    with suppress(OSError):
        # "pid (name) state ..."; the name may contain parentheses.
        letter = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        return "is gone" if letter in "ZX" else "is stopped" if letter in "Tt" else "runs"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "is gone"
    except PermissionError:
        pass
    return "runs"


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # a system without namespaces
        return ""


def _parse(rank: int, text: str) -> Peer:
    host, namespace, pid = text.split("\n")
    return Peer(rank, host, namespace, int(pid))
