"""Distributed context of a rank: its place in the job, its device, its meshes and its process groups."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist.collectives.consensus import agree
from d9d_dist.errors import UserError
from d9d_dist.failures.first_failure import abort_process_groups, leave_store, report_failure
from d9d_dist.failures.peers import publish_self
from d9d_dist.groups._axis_groups import AxisGroups
from d9d_dist.groups._rendezvous import connect_store, hosts_store, store_place, wait_for_ranks
from d9d_dist.groups.launch import Launch
from d9d_dist.groups.timeouts import Timeouts, check_timeout
from d9d_dist.precision import PrecisionName, precision_of_job

Domain = Literal["regular", "dense", "expert", "batch", "flat"]
Domains = Mapping[Domain, Mapping[str, int]]


class DistributedContext(AbstractContextManager["DistributedContext"]):
    """Membership of this rank in a job, created by `MeshConfig.build`.

    Construction is collective over all ranks. It starts the default process group, unless one exists, and checks that
    all ranks have the same mesh. It creates a process group for each set of ranks that an axis of a domain spans. Use
    the context in a `with` statement, or call `close`. On an exception, leaving the `with` body does not wait for other
    ranks.

    Attributes:
        timeouts: Timeouts of collectives. The start-up timeout applies until `set_timeout` is called.
        device: Device of this rank: an accelerator if available and not disabled by `Launch.device`, else the CPU.
        hosts_store: True if this process hosts the job's store, which other ranks cannot reach after the process ends.
        store_place: Location of the job's store for messages, e.g. "rank 0 on node0:29500".
        precision: Precision of the job, which `parallelize_decoder` and model providers use by default.
        is_autocast: True if the job runs its model under `torch.autocast` in bfloat16.
    """

    def __init__(
        self, domains: Domains, *, launch: Launch, timeouts: Timeouts, precision: PrecisionName = "parameters"
    ) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.local_rank = launch.local_rank
        self.node_rank = launch.node_rank
        self.num_nodes = launch.num_nodes
        self.timeouts = timeouts
        self.device = _device(launch)
        self.precision = precision_of_job(precision, self.device)
        self.is_autocast = precision == "autocast"
        self._domains = domains
        # On an accelerator, all-to-alls of tokens overlap with all-gathers of weights; gloo's collectives block anyway.
        self._groups = AxisGroups(timeouts.startup, separate=() if self.device.type == "cpu" else ("ep_shard",))
        self._owns_process_group = not dist.is_initialized()
        self.hosts_store = self._owns_process_group and hosts_store(launch)
        self.store_place = store_place(launch)
        if self._owns_process_group:
            _start_process_group(self.device, launch, timeouts.startup)
        try:
            publish_self(dist.distributed_c10d._get_default_store(), self.rank)
            agree(same={"the mesh": repr(domains)})
            self._meshes = {
                domain: self._groups.mesh(axes, device_type=self.device.type) for domain, axes in domains.items()
            }
        except BaseException as error:
            self._abort(error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the job. On an exception, publish it for the other ranks and do not wait for them."""
        if error is None:
            self.close()
        else:
            self._abort(error)

    @property
    def is_main_process(self) -> bool:
        """True on rank 0, which writes the files that are shared by the whole job."""
        return self.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on the first rank of each node."""
        return self.local_rank == 0

    def mesh_for(self, domain: Domain) -> DeviceMesh:
        """Return the mesh of a domain. Slice it by axis names: `ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]`.

        Raises `UserError` for an unknown domain.
        """
        if domain not in self._meshes:
            raise UserError(f"got the mesh domain {domain!r}; expected one of {', '.join(self._meshes)}.")
        return self._meshes[domain]

    def group_for(self, domain: Domain, *axes: str) -> dist.ProcessGroup:
        """Return the process group over one or more axes of a domain, e.g. `group_for("batch", "dp", "cp")`.

        The group has the ranks that differ from this rank only on those axes, in ascending order. Equal sets of ranks
        share one group, for any domain and axes; on accelerators `ep_shard` has a group of its own. The first request
        for several axes is collective over all ranks of the job: every rank must request the same groups in the same
        order.

        Raises:
            UserError: If the domain or an axis does not exist, no axis is given, or an axis is given twice.
        """
        for axis in axes:
            self._check_axis(domain, axis)
        if not axes or len(set(axes)) < len(axes):
            raise UserError(f"got the axes ({', '.join(axes)}); expected one or more axes of the mesh, each once.")
        return self._groups.over(self._domains[domain], axes, name=f"mesh_{'_'.join(axes)}")

    def coordinate(self, domain: Domain, axis: str) -> int:
        """Return this rank's coordinate on an axis. Raises `UserError` for an unknown domain or axis."""
        self._check_axis(domain, axis)
        return self.mesh_for(domain).get_local_rank(axis)

    def size(self, domain: Domain, axis: str) -> int:
        """Return the size of an axis, in ranks. Raises `UserError` for an unknown domain or axis."""
        self._check_axis(domain, axis)
        return self._domains[domain][axis]

    def _check_axis(self, domain: Domain, axis: str) -> None:
        self.mesh_for(domain)
        names = self._domains[domain]
        if axis not in names:
            raise UserError(f"got the axis {axis!r} of the {domain} mesh; expected one of {', '.join(names)}.")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all collectives that start from now on. No collectives; call it equally on all ranks.

        Applies to all process groups of this process, including flattened meshes, and to groups that `group_for`
        creates later. Groups that other code creates later have torch's default timeout until the next call. Raises
        `UserError` if the timeout is not positive.
        """
        check_timeout("timeout", timeout)
        self._groups.set_timeout(timeout)

    def align_groups(self) -> None:
        """Align torch's counter of process groups between ranks, after only some of the ranks have created groups.

        Collective over all ranks: one all-reduce. torch names a group by the rank's number of created groups. With
        different counters, the next group created by all ranks would deadlock.
        """
        world = dist.distributed_c10d._world
        count = torch.tensor(world.group_count, device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        world.group_count = int(count)

    def barrier(self) -> None:
        """Wait for all ranks. Collective: one barrier."""
        # By default torch infers the device from the global rank, which is wrong if nodes are only partly used.
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.device.index])

    @contextmanager
    def main_process_first(self, *, per_node: bool = False) -> Generator[None]:
        """Run the body on rank 0, or with `per_node` on the first rank of every node; then on all other ranks.

        Collective over all ranks. Other ranks wait for the bodies of the first ranks, at most for the groups' timeout.
        If the body raises on a first rank, a `RuntimeError` is raised on every rank whose own body did not raise; ranks
        that are not first skip the body.
        """
        goes_first = self.is_local_main_process if per_node else self.is_main_process
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
        """Synchronize all ranks after the body of the first ranks; raise if the body failed on one of them."""
        first_failed = torch.tensor(self.rank if failed else self.world_size, device=self.device)
        dist.all_reduce(first_failed, op=dist.ReduceOp.MIN)
        rank = int(first_failed)
        if rank < self.world_size and not failed:
            raise RuntimeError(
                f"rank {rank} failed in code that it runs before other ranks, so this rank stops too; see the "
                f"traceback of rank {rank}."
            )

    def close(self) -> None:
        """Destroy the process group if this context started it. Safe to call twice."""
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_process_group = False

    def _abort(self, error: BaseException) -> None:
        """Abort the process group if this context started it; other ranks may be inside collectives."""
        if self._owns_process_group and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            report_failure(error, rank=self.rank, world_size=self.world_size, store_place=self.store_place)
            abort_process_groups()
            leave_store(store, world_size=self.world_size, is_host=self.hosts_store)
        self._owns_process_group = False


def _device(launch: Launch) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or launch.device == "cpu":
        return torch.device("cpu")
    if launch.local_world_size > torch.accelerator.device_count():
        raise UserError(
            f"{launch.local_world_size} ranks on a node with {torch.accelerator.device_count()} accelerators; expected "
            "at most one rank per accelerator. Start fewer ranks, or set D9D_DEVICE=cpu to run all ranks on the CPU."
        )
    device = torch.device(accelerator.type, launch.local_rank)
    torch.accelerator.set_device_index(device)
    return device


def _start_process_group(device: torch.device, launch: Launch, timeout: timedelta) -> None:
    backend = dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        backend = f"cpu:{dist.get_default_backend_for_device('cpu')},{device.type}:{backend}"
    store = connect_store(launch, timeout) if launch.has_launcher else dist.HashStore()
    wait_for_ranks(store, launch, timeout)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
