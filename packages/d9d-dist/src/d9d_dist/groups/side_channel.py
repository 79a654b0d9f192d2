"""Exchange of short texts between ranks through the job's store, even while collectives are stuck."""

from collections.abc import Sequence
from typing import final

import torch.distributed as dist

from d9d_dist.failures.first_failure import Failure, first_failure, leave_store, publish_failure
from d9d_dist.failures.peers import Peer, hosts_of, peers_here, set_acknowledged
from d9d_dist.groups.context import DistributedContext


@final
class SideChannel:
    """Texts by key in the job's store, which every rank may write and read at any time.

    The channel has its own connection, so a thread can use it while the main thread waits in the store or in a
    collective. No method waits for a rank, but all methods wait for the process that hosts the store: the launcher
    under torchrun, else rank 0. Every method raises a `RuntimeError` if the store is unreachable.

    Channels with different names have separate keys.
    """

    def __init__(self, ctx: DistributedContext, *, name: str) -> None:
        self._rank, self._world_size, self._is_host = ctx.rank, ctx.world_size, ctx.hosts_store
        self._root = dist.distributed_c10d._get_default_store().clone()
        self._texts = dist.PrefixStore(f"d9d/{name}", self._root)

    def write(self, key: str, text: str) -> None:
        """Write a text, which overwrites the previous one. When this returns, all ranks can read it."""
        set_acknowledged(self._texts, key, text)

    def write_first(self, key: str, text: str) -> str:
        """Write a text unless the key already has a text; return the text of the key."""
        return self._texts.compare_set(key, "", text).decode(errors="replace")

    def read(self, key: str) -> str | None:
        """Return the text of a key; `None` if the key has none yet."""
        return self._texts.get(key).decode(errors="replace") if self._texts.check([key]) else None

    def has(self, *keys: str) -> bool:
        """Return True if all keys have a text. A single request to the store."""
        return self._texts.check(list(keys))

    def first_failure(self) -> Failure | None:
        """Return the failure of the first rank that failed, in the order of the store, or `None`."""
        return first_failure(self._root)

    def publish_failure(self, rank: int, text: str, *, num_ended: int = 0) -> None:
        """Publish the failure of a rank unless another failure was published before.

        `num_ended` is the number of ranks that have ended without a report.
        """
        publish_failure(self._root, rank, text, num_ended=num_ended)

    def leave(self) -> None:
        """Mark this process as done with the store, before it exits.

        The rank that hosts the store waits until all ranks have called this or have ended, for up to 5 seconds.
        """
        leave_store(self._root, world_size=self._world_size, is_host=self._is_host)

    def hosts_of(self, ranks: Sequence[int]) -> list[str]:
        """Return the host name of each rank."""
        return hosts_of(self._root, ranks)

    def peers_here(self) -> list[Peer]:
        """Return the processes of other ranks on this machine."""
        return peers_here(self._root, (rank for rank in range(self._world_size) if rank != self._rank))
