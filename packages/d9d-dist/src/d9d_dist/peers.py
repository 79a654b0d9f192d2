"""Which process plays which rank, and whether it still runs: a collective that fails names victims, never the cause.

Only processes of this machine can be looked at. Ranks of another one learn from those beside the process that is gone.
"""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

ProcessState = Literal["runs", "is stopped", "is gone"]


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that plays a rank.

    Attributes:
        rank: Global rank.
        host: Name of its machine.
        namespace: What process ids are unique within, on that machine: containers of one host may have their own.
        pid: Its process id there.
    """

    rank: int
    host: str
    namespace: str
    pid: int

    @property
    def is_here(self) -> bool:
        """Whether its process id means something to this process."""
        return (self.host, self.namespace) == (socket.gethostname(), _namespace())

    def state(self) -> ProcessState:
        """Whether its process runs. Only for a peer that is here."""
        return process_state(self.pid)

    def describe(self) -> str:
        """Where it is, for a message."""
        return f"process {self.pid} on {self.host}"


def publish_self(store: dist.Store, rank: int) -> None:
    """Tell the other ranks which process plays this one."""
    store.set(f"d9d/peer/{rank}", f"{socket.gethostname()}\n{_namespace()}\n{os.getpid()}")


def peers_here(store: dist.Store, ranks: Iterable[int]) -> list[Peer]:
    """Those of some ranks, as far as they have published themselves, whose processes are on this machine."""
    keys = {rank: f"d9d/peer/{rank}" for rank in ranks}
    if not store.check(list(keys.values())):  # one question where all are there, as they are but at the start
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    peers = [_parse(rank, store.get(key).decode()) for rank, key in keys.items()]
    return [peer for peer in peers if peer.is_here]


def process_state(pid: int) -> ProcessState:
    """Whether a process of this machine runs."""
    with suppress(OSError):
        # "pid (name) state ..."; a name may hold anything, parentheses too.
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
    except OSError:  # a system that has none
        return ""


def _parse(rank: int, text: str) -> Peer:
    host, namespace, pid = text.split("\n")
    return Peer(rank, host, namespace, int(pid))
