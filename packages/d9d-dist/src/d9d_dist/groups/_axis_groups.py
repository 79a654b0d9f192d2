"""Process groups over mesh axes. Domains with the same split of the ranks share their process groups by default.

`init_device_mesh` creates new groups for every axis of every mesh, and every rank takes part in creating all of them.
Here each rank creates only its own groups, so start-up time does not grow with the number of ranks.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Size and stride (in ranks) of each axis that a group spans, slowest first. Equal splits of the ranks are equal tuples.
_Split = tuple[tuple[int, int], ...]


class AxisGroups:
    """Process groups of this rank, created on first use.

    Creating a group is collective over all ranks: they must request the same axes in the same order.

    Args:
        timeout: Timeout of the groups.
        separate: Names of axes whose groups are not shared. The collectives of a group run one after another, so an
            all-gather of weights would otherwise wait for an earlier all-to-all of tokens between the same ranks.
    """

    def __init__(self, timeout: timedelta, *, separate: Collection[str] = ()) -> None:
        self._timeout, self._separate = timeout, separate
        self._groups: dict[tuple[_Split, str], dist.ProcessGroup] = {}

    def over(self, domain: Mapping[str, int], axes: Iterable[str], *, name: str) -> dist.ProcessGroup:
        """Return the process group over some axes of a domain. `domain` has the size of every axis, slowest first.

        The group's ranks are in ascending order. Collective over all ranks if the group is new.
        """
        names = set(axes)
        split = _split(domain, names)
        owner = next((axis for axis in self._separate if names == {axis} and domain[axis] > 1), "")
        if (split, owner) not in self._groups:
            self._groups[split, owner] = self._make(split, name, is_shared=not owner)
        return self._groups[split, owner]

    def mesh(self, domain: Mapping[str, int], *, device_type: str) -> DeviceMesh:
        """Return a mesh of all ranks with the axes of a domain. Collective over all ranks if it creates groups."""
        groups = [self.over(domain, [axis], name=f"mesh_{axis}") for axis in domain]
        ranks = torch.arange(dist.get_world_size(), dtype=torch.int, device="cpu").view(*domain.values())
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(domain))
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(domain))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all process groups of this process, including later ones and groups created elsewhere."""
        self._timeout = timeout
        # In torch 2.11 the function is private; later versions deprecate the private name.
        c10d = dist.distributed_c10d
        change = getattr(c10d, "set_timeout" if hasattr(dist, "set_timeout") else "_set_pg_timeout")
        for group in list(c10d._world.pg_map):
            change(timeout, group)

    def _make(self, split: _Split, name: str, *, is_shared: bool) -> dist.ProcessGroup:
        ranks = _ranks_with(dist.get_rank(), split)
        if is_shared and len(ranks) == dist.get_world_size():
            world = dist.group.WORLD
            assert world is not None
            return world
        group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True, group_desc=name)
        assert isinstance(group, dist.ProcessGroup), "this rank is not in its own group"
        return group


def _split(domain: Mapping[str, int], axes: set[str]) -> _Split:
    """Return sizes and strides of the axes. Axes of size 1 are dropped, and adjacent axes are merged."""
    split: list[tuple[int, int]] = []
    stride = 1
    for axis, size in reversed(list(domain.items())):
        if axis in axes and size > 1:
            faster = split.pop() if split and split[-1][0] * split[-1][1] == stride else (1, stride)
            split.append((size * faster[0], faster[1]))
        stride *= size
    return tuple(reversed(split))


def _ranks_with(rank: int, split: _Split) -> list[int]:
    """Return the ranks that differ from `rank` only on the axes of a split, in ascending order."""
    first = rank - sum(rank // stride % size * stride for size, stride in split)
    return [first + sum(steps) for steps in product(*(range(0, size * stride, stride) for size, stride in split))]
