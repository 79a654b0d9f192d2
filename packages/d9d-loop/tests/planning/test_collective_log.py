"""Names, groups and bytes of recorded collectives under a fake process group."""

import torch
import torch.distributed as dist

from d9d_loop.planning import Collective, fake_ranks
from d9d_loop.planning.step_record import recorded


def test_each_collective_has_its_group_and_bytes() -> None:
    with fake_ranks(1, 4):
        group = dist.new_group([1, 3])
        assert isinstance(group, dist.ProcessGroup)
        x, whole = torch.zeros(6), torch.zeros(12)
        with recorded() as record:
            dist.all_reduce(x)
            dist.all_gather_into_tensor(whole, x, group=group)
            dist.send(x, group_dst=1, group=group)
            x.add_(1)
    assert record.collectives == [
        Collective("all_reduce", (0, 1, 2, 3), 24),
        Collective("all_gather", (1, 3), 48),
        Collective("send", (3,), 24),
    ]
