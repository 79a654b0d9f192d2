"""A second way for ranks to tell each other things while their collectives are stuck: the job's store."""

from typing import final

import torch.distributed as dist

from d9d_dist._failure import FIRST_FAILURE
from d9d_dist.context import DistributedContext
from d9d_dist.peers import Peer, peers_here


@final
class SideChannel:
    """Short texts by name, that every rank may write and read at any time; made from the job's store.

    It has a connection of its own, so it works in a thread of its own while the main thread waits in the store or in a
    collective. Nothing here waits for a rank; all of it waits for the process that holds the store, which is the
    launcher's under torchrun and rank 0 elsewhere, so a thread that must not wait lets another one ask.

    Every method raises a `RuntimeError` if the store is gone.

    Args:
        ctx: The job's context.
        name: Channels of different names do not see each other's texts.
    """

    def __init__(self, ctx: DistributedContext, *, name: str) -> None:
        self._rank, self._world_size = ctx.rank, ctx.world_size
        self._root = dist.distributed_c10d._get_default_store().clone()
        self._texts = dist.PrefixStore(f"d9d/{name}", self._root)

    def write(self, key: str, text: str) -> None:
        """Write a text, over that which is there."""
        self._texts.set(key, text)

    def write_first(self, key: str, text: str) -> str:
        """Write a text unless there is one.

        Returns:
            What is there now: this rank's text, or that of the rank that was first.
        """
        return self._texts.compare_set(key, "", text).decode(errors="replace")

    def read(self, key: str) -> str | None:
        """The text of a name, or `None` if nobody wrote one yet."""
        return self._texts.get(key).decode(errors="replace") if self._texts.check([key]) else None

    def has(self, *keys: str) -> bool:
        """Whether there is a text for each of some names; one question to the store, however many they are."""
        return self._texts.check(list(keys))

    def first_failure(self) -> tuple[int, str] | None:
        """The rank that was first to leave its `DistributedContext` on an exception, and why; `None` if none did."""
        if not self._root.check([FIRST_FAILURE]):
            return None
        rank, _, text = self._root.get(FIRST_FAILURE).decode(errors="replace").partition("\n")
        return int(rank), text

    def peers_here(self) -> list[Peer]:
        """The other ranks' processes that are on this machine."""
        return peers_here(self._root, (rank for rank in range(self._world_size) if rank != self._rank))
