"""The one source of truth for topology: who this rank is, which device it has, and the meshes it is part of."""

import logging
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from d9d_dist._agreement import check_agreement
from d9d_dist._axis_groups import AxisGroups
from d9d_dist._failure import abort_process_groups, report_failure
from d9d_dist.errors import UserError
from d9d_dist.launch import Launch
from d9d_dist.peers import publish_self

Domain = Literal["regular", "dense", "expert", "batch", "flat"]
Domains = Mapping[Domain, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a collective waits for its ranks before it fails.

    Attributes:
        startup: From `MeshConfig.build` on, while ranks import, load and compile, some much longer than others.
        step: Once the job steps, when a rank that is late is a rank that is lost: `ctx.set_timeout(ctx.timeouts.step)`.
    """

    startup: timedelta = timedelta(minutes=30)
    step: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        """Refuse times that are not positive.

        Raises:
            UserError: If one is not.
        """
        for name, timeout in (("startup", self.startup), ("step", self.step)):
            _check_timeout(f"timeouts.{name}", timeout)


class DistributedContext:
    """A rank's membership in a job. Made by `MeshConfig.build`.

    Building is collective over all ranks: it starts the default process group, unless one is running already, checks
    that all ranks have the same mesh, and makes one group for each set of ranks that an axis of a domain spans. Use it
    as a context manager: leaving it on an exception waits for no other rank. Or call `close`.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank on this node.
        node_rank: Index of this node.
        num_nodes: Number of nodes.
        timeouts: How long collectives may wait; that of start-up holds until `set_timeout` is called.
        device: The device of this rank: an accelerator where there is one, else the CPU.
        logger: A logger whose messages name the rank.
    """

    def __init__(self, domains: Domains, *, launch: Launch, timeouts: Timeouts) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.local_rank = launch.local_rank
        self.node_rank = launch.node_rank
        self.num_nodes = launch.num_nodes
        self.timeouts = timeouts
        self.device = _device(launch)
        self.logger = _RankLogger(logging.getLogger("d9d"), {"rank": self.rank, "world_size": self.world_size})
        self._domains = domains
        self._groups = AxisGroups(timeouts.startup)
        self._owns_process_group = not dist.is_initialized()
        if self._owns_process_group:
            _start_process_group(self.device, launch, timeouts.startup)
        try:
            publish_self(dist.distributed_c10d._get_default_store(), self.rank)
            self.check_agreement("the mesh", repr(domains))
            self._meshes = {
                domain: self._groups.mesh(axes, device_type=self.device.type) for domain, axes in domains.items()
            }
        except BaseException as error:
            self._leave(error)
            raise

    def __enter__(self) -> Self:
        """Give the context itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the job; on an exception without waiting for other ranks, which are told of it."""
        if error is None:
            self.close()
        else:
            self._leave(error)

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which alone writes what is written once."""
        return self.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    def mesh_for(self, domain: Domain) -> DeviceMesh:
        """The mesh of a domain; slice it by axis names, e.g. `ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]`.

        Raises:
            UserError: If there is no such domain.
        """
        if domain not in self._meshes:
            raise UserError(f"got the mesh domain {domain!r}; expected one of {', '.join(self._meshes)}.")
        return self._meshes[domain]

    def group_for(self, domain: Domain, *axes: str) -> dist.ProcessGroup:
        """The process group over one axis of a domain, or over several together, e.g. `group_for("batch", "dp", "cp")`.

        It holds the ranks that differ from this one on those axes only, in ascending order. Equal sets of ranks have
        one group, whatever domain and axes they are asked for by. Collective over all ranks of the job the first time
        that several axes are asked for: every rank asks for the same groups in the same order.

        Args:
            domain: The domain whose axes these are.
            axes: One or more names, in any order.

        Raises:
            UserError: If there is no such domain, the domain has no such axis, or no axis or one axis twice is given.
        """
        for axis in axes:
            self._check_axis(domain, axis)
        if not axes or len(set(axes)) < len(axes):
            raise UserError(f"got the axes ({', '.join(axes)}); expected one or more axes of the mesh, each once.")
        return self._groups.over(self._domains[domain], axes, name=f"mesh_{'_'.join(axes)}")

    def coordinate(self, domain: Domain, axis: str) -> int:
        """The position of this rank on an axis.

        Raises:
            UserError: If the domain has no such axis.
        """
        self._check_axis(domain, axis)
        return self.mesh_for(domain).get_local_rank(axis)

    def size(self, domain: Domain, axis: str) -> int:
        """The number of ranks on an axis.

        Raises:
            UserError: If the domain has no such axis.
        """
        self._check_axis(domain, axis)
        return self._domains[domain][axis]

    def _check_axis(self, domain: Domain, axis: str) -> None:
        self.mesh_for(domain)
        names = self._domains[domain]
        if axis not in names:
            raise UserError(f"got the axis {axis!r} of the {domain} mesh; expected one of {', '.join(names)}.")

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long every collective that starts from now on may wait for its ranks. No collectives.

        It holds for all process groups that this process has by now, flattened meshes' included, and for those that
        `group_for` makes later. Groups that others make later have torch's own timeout until this is called again.

        Args:
            timeout: The time; all ranks set the same.

        Raises:
            UserError: If it is not positive.
        """
        _check_timeout("timeout", timeout)
        self._groups.set_timeout(timeout)

    def check_agreement(self, name: str, value: str | bytes) -> None:
        """Check that a value, such as the text of a configuration, is the same on all ranks.

        Collective over all ranks: an all-gather of a digest of 32 bytes.

        Args:
            name: What the value is, for the message: "the optimizer configuration".
            value: The value of this rank.

        Raises:
            UserError: On every rank, with the same message, which names the ranks that differ from the majority, or
                from the lowest rank where there is none.
        """
        check_agreement(name, value, device=self.device)

    def align_groups(self) -> None:
        """Let all ranks name the next process group alike, after some made groups of their own that others did not.

        Collective over all ranks: one all-reduce. torch numbers groups by how many each rank has made; without this the
        next one that all ranks make would wait for ever.
        """
        world = dist.distributed_c10d._world
        count = torch.tensor(world.group_count, device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        world.group_count = int(count)

    def wait_world(self) -> None:
        """Wait until every rank has come here."""
        # Without being told, torch guesses the device from the global rank, which is wrong where nodes are half used.
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.device.index])

    @contextmanager
    def main_process_first(self) -> Generator[None]:
        """Run the body on rank 0 first, then on all other ranks.

        Collective over all ranks, which wait for the body within the groups' timeout. If the body fails on rank 0, the
        others do not run it.

        Raises:
            RuntimeError: On all other ranks, if the body fails on rank 0.
        """
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Generator[None]:
        """Run the body on the first rank of every node first, then on all other ranks; see `main_process_first`.

        Raises:
            RuntimeError: On all ranks but those on which the body failed, if it fails on the first rank of a node.
        """
        yield from self._first(self.is_local_main_process)

    def _first(self, goes_first: bool) -> Generator[None]:
        if not goes_first:
            self._wait_for_first(failed=False)
        try:
            yield
        except BaseException:
            if goes_first:
                self._wait_for_first(failed=True)
            raise
        if goes_first:
            self._wait_for_first(failed=False)

    def _wait_for_first(self, *, failed: bool) -> None:
        """Meet all ranks when those that go first are through, and stop if one of them failed."""
        first_failed = torch.tensor(self.rank if failed else self.world_size, device=self.device)
        dist.all_reduce(first_failed, op=dist.ReduceOp.MIN)
        rank = int(first_failed)
        if rank < self.world_size and not failed:
            raise RuntimeError(
                f"rank {rank} failed in what it does before the other ranks, so this rank stops too; the traceback of "
                f"rank {rank} says why."
            )

    def close(self) -> None:
        """End the process group if this context started it. Safe to call twice."""
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_process_group = False

    def _leave(self, error: BaseException) -> None:
        """End the process group, if this context started it, while other ranks may be inside collectives."""
        if self._owns_process_group and dist.is_initialized():
            report_failure(error, rank=self.rank, world_size=self.world_size)
            abort_process_groups()
        self._owns_process_group = False


class _RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Puts `[rank 2/8]` before messages, where there is more than one rank."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        place = self.extra or {}
        if place.get("world_size") == 1:
            return msg, kwargs
        return f"[rank {place.get('rank')}/{place.get('world_size')}] {msg}", kwargs


def _check_timeout(name: str, timeout: timedelta) -> None:
    if timeout <= timedelta(0):
        raise UserError(f"{name} = {timeout}; expected a positive time.")


def _device(launch: Launch) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or launch.device == "cpu":
        return torch.device("cpu")
    if launch.local_world_size > torch.accelerator.device_count():
        raise UserError(
            f"{launch.local_world_size} ranks on a node with {torch.accelerator.device_count()} accelerators; expected "
            "at most one rank for each. Start fewer ranks, or set D9D_DEVICE=cpu to run them all on the CPU."
        )
    device = torch.device(accelerator.type, launch.local_rank)
    torch.accelerator.set_device_index(device)
    return device


def _start_process_group(device: torch.device, launch: Launch, timeout: timedelta) -> None:
    backend = dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        backend = f"cpu:{dist.get_default_backend_for_device('cpu')},{device.type}:{backend}"
    store = _meet(launch, timeout) if launch.has_launcher else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)


def _meet(launch: Launch, timeout: timedelta) -> dist.Store:
    """The launcher's store, with keys of this context's own.

    A process may build a context, close it and build another. In the same keys the second would find where the peers of
    the first listened.
    """
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    store.set_timeout(timeout)
    num_contexts = store.add(f"d9d/num_contexts/{launch.rank}", 1)
    return dist.PrefixStore(f"d9d/context_{num_contexts}", store)
