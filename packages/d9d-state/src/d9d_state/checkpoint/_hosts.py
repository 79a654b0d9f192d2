"""Hosts of a job: sets of ranks that see the same local folder, and the ring of hosts for replicas."""

import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import torch.distributed as dist

from d9d_dist import DistributedContext, gather_json
from d9d_state import _files
from d9d_state._ranks import failing_together


@final
@dataclass(frozen=True, slots=True)
class Hosts:
    """Ranks of each host, in ascending order; hosts are ordered by their first rank.

    `is_new` is true if the search created the folder of this rank's host.
    """

    ranks: tuple[tuple[int, ...], ...]
    is_new: bool

    @classmethod
    def find(cls, folder: Path, ctx: DistributedContext | None, group: dist.ProcessGroup | None) -> Self:
        """Find the ranks that share each host's folder. Collective.

        Each rank creates a file in the folder and looks for the other ranks' files. Host names are not sufficient,
        because containers on one host may have separate folders. The folder is created if necessary. Raises
        `StateError` on every rank if a rank cannot write to its folder.
        """
        is_new = False
        if ctx is None or ctx.world_size == 1:
            is_new = not folder.exists()
            _files.make_folder(folder)
            return cls(((0,),), is_new)
        nonce = str(gather_json(uuid.uuid4().hex, group)[0])
        token = folder / f".rank-{ctx.rank}-{nonce}"
        with failing_together(ctx, f"{folder} is not writable", group=group):
            is_new = not folder.exists()
            _files.make_folder(folder)
            folder.chmod(0o700)  # raises if another user owns a folder of this name in /dev/shm
            _files.write_file(token, [])
        seen = [rank for rank in range(ctx.world_size) if (folder / f".rank-{rank}-{nonce}").exists()]
        found = sorted(set(map(tuple, gather_json(seen, group))))
        created = gather_json(is_new, group)  # every rank has looked
        with suppress(OSError):  # the other ranks do not wait for an error; later searches ignore the file
            _files.remove_file(token)
        return cls(tuple(found), any(created[rank] for rank in seen))

    def __len__(self) -> int:
        """Return the number of hosts."""
        return len(self.ranks)

    def of(self, rank: int) -> int:
        """Return the host of a rank."""
        return next(host for host, ranks in enumerate(self.ranks) if rank in ranks)

    def replica_ranks(self, rank: int, replicas: int) -> list[int]:
        """Return the ranks that keep the replicas of a rank's part: one on each of the next hosts in the ring."""
        host = self.of(rank)
        index = self.ranks[host].index(rank)
        following = [self.ranks[(host + distance) % len(self)] for distance in range(1, replicas + 1)]
        return [ranks[index % len(ranks)] for ranks in following]

    def spread(self, host: int, item: int) -> int:
        """Return the rank of a host that handles an item, so that items are spread over the host's ranks."""
        return self.ranks[host][item % len(self.ranks[host])]

    def replicated(self, rank: int, replicas: int) -> list[int]:
        """Return the ranks whose replicas a rank keeps."""
        return sorted(each for ranks in self.ranks for each in ranks if rank in self.replica_ranks(each, replicas))
