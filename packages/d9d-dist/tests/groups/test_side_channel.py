import threading
from contextlib import suppress
from typing import cast

import torch.distributed as dist

from d9d_dist import MeshConfig
from d9d_dist.failures.peers import publish_self, set_acknowledged
from d9d_dist.groups.side_channel import SideChannel
from d9d_dist.testing import run_ranks


def _talk() -> tuple[str | None, str, list[int]]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        mine, other = SideChannel(ctx, name="a"), SideChannel(ctx, name="b")
        assert mine.read("never") is None
        assert mine.first_failure() is None
        mine.write(f"from/{ctx.rank}", f"rank {ctx.rank}")
        ctx.barrier()
        assert mine.has("from/0", "from/1")
        assert not mine.has("from/0", "from/2")
        assert not other.has("from/0")
        first = mine.write_first("first", str(ctx.rank))
        here = [peer.rank for peer in mine.peers_here()]
        heard: list[str | None] = []
        thread = threading.Thread(target=lambda: heard.append(mine.read(f"from/{1 - ctx.rank}")))
        thread.start()
        thread.join()
        return heard[0], first, here


def test_ranks_communicate_beside_collectives_in_any_thread() -> None:
    (heard_0, first_0, here_0), (heard_1, first_1, here_1) = run_ranks(_talk)
    assert (heard_0, heard_1) == ("rank 1", "rank 0")
    assert first_0 == first_1
    assert first_0 in {"0", "1"}
    assert (here_0, here_1) == ([1], [0])


class _LateStore:
    """A store that writes only once it answers a later request of the same connection."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._sent: dict[str, str] = {}

    def set(self, key: str, text: str) -> None:
        self._sent[key] = text

    def check(self, keys: list[str]) -> bool:
        self.texts.update(self._sent)
        return all(key in self.texts for key in keys)


def test_a_text_has_arrived_when_the_write_returns() -> None:
    store = _LateStore()
    set_acknowledged(cast("dist.Store", store), "key", "text")
    publish_self(cast("dist.Store", store), 3)
    assert store.texts["key"] == "text"
    assert "d9d/peer/3" in store.texts


def _fail() -> tuple[int, str] | None:
    failed: tuple[int, str] | None = None
    with suppress(KeyError), MeshConfig(data_parallel_shard=-1).build() as ctx:
        channel = SideChannel(ctx, name="a")
        ctx.barrier()
        if ctx.rank == 1:
            raise KeyError("why")
        while failed is None:
            failed = channel.first_failure()
    return failed


def test_the_first_failure_is_reported() -> None:
    assert run_ranks(_fail)[0] == (1, "KeyError: 'why'")
