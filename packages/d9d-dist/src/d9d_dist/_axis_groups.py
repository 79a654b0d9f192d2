"""Process groups over mesh axes, one for each set of ranks: domains that split ranks alike share their communicators.

`init_device_mesh` makes new groups for every axis of every mesh, and every rank takes part in making all of them. Here
each rank makes the groups it belongs to and no others, so starting up costs the same on eight ranks and on 100,000.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# The sizes and strides, in ranks, of the axes that a group spans, the slowest first: equal splits have equal ones.
_Split = tuple[tuple[int, int], ...]


class AxisGroups:
    """The process groups of this rank, made when they are first asked for.

    A group that is not there yet is made collectively: all ranks of the job ask for it, in the same order.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._groups: dict[_Split, dist.ProcessGroup] = {}

    def over(self, domain: Mapping[str, int], axes: Iterable[str], *, name: str) -> dist.ProcessGroup:
        """The group over some axes of a domain together.

        Args:
            domain: Sizes of all axes by name, slowest first.
            axes: Names of the axes to span, in any order; ranks of the group are in the domain's order.
            name: What torch's debugging tools call the group, where it is not there yet.
        """
        split = _split(domain, set(axes))
        if split not in self._groups:
            self._groups[split] = self._make(split, name)
        return self._groups[split]

    def mesh(self, domain: Mapping[str, int], *, device_type: str) -> DeviceMesh:
        """A mesh of all ranks with the axes of a domain; a root mesh of its own."""
        groups = [self.over(domain, [axis], name=f"mesh_{axis}") for axis in domain]
        ranks = torch.arange(dist.get_world_size(), dtype=torch.int, device="cpu").view(*domain.values())
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(domain))
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(domain))

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of every group of this process, those that others made included, and of later ones."""
        self._timeout = timeout
        # torch 2.11 has it under a private name only, of which later ones warn.
        name = "set_timeout" if hasattr(dist, "set_timeout") else "_set_pg_timeout"
        change = getattr(dist.distributed_c10d, name)
        for group in list(dist.distributed_c10d._world.pg_map):
            change(timeout, group)

    def _make(self, split: _Split, name: str) -> dist.ProcessGroup:
        ranks = _ranks_with(dist.get_rank(), split)
        if len(ranks) == dist.get_world_size():
            world = dist.group.WORLD
            assert world is not None
            return world
        group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True, group_desc=name)
        assert isinstance(group, dist.ProcessGroup), "a rank is in the groups it makes"
        return group


def _split(domain: Mapping[str, int], axes: set[str]) -> _Split:
    """Sizes and strides without axes of one rank, and with neighbours that count on from each other made one."""
    split: list[tuple[int, int]] = []
    stride = 1
    for axis, size in reversed(list(domain.items())):
        if axis in axes and size > 1:
            faster = split.pop() if split and split[-1][0] * split[-1][1] == stride else (1, stride)
            split.append((size * faster[0], faster[1]))
        stride *= size
    return tuple(reversed(split))


def _ranks_with(rank: int, split: _Split) -> list[int]:
    """All ranks that differ from `rank` on the axes of a split only, ascending."""
    first = rank - sum(rank // stride % size * stride for size, stride in split)
    return [first + sum(steps) for steps in product(*(range(0, size * stride, stride) for size, stride in split))]
