"""The one source of truth for topology: who this rank is, which device it has, and the meshes it is part of."""

import logging
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from d9d_dist.errors import UserError
from d9d_dist.launch import Launch

Domain = Literal["regular", "dense", "expert", "batch", "flat"]
Domains = Mapping[Domain, Mapping[str, int]]


class DistributedContext:
    """A rank's membership in a job. Made by `MeshConfig.build`.

    Building is collective over all ranks: it starts the default process group, unless one is running already, and one
    group for each axis of each domain. Use it as a context manager, or call `close`.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank on this node.
        node_rank: Index of this node.
        device: The device of this rank: an accelerator where there is one, else the CPU.
        logger: A logger whose messages name the rank.
    """

    def __init__(self, domains: Domains, *, launch: Launch, timeout: timedelta) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.local_rank = launch.local_rank
        self.node_rank = launch.node_rank
        self.device = _device(launch)
        self.logger = _RankLogger(logging.getLogger("d9d"), {"rank": self.rank, "world_size": self.world_size})
        self._owns_process_group = not dist.is_initialized()
        if self._owns_process_group:
            _start_process_group(self.device, launch, timeout)
        self._meshes = {
            domain: init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
            for domain, axes in domains.items()
        }

    def __enter__(self) -> Self:
        """Give the context itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the job."""
        self.close()

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
            ValueError: If there is no such domain.
        """
        if domain not in self._meshes:
            raise ValueError(f"got the mesh domain {domain!r}; expected one of {', '.join(self._meshes)}.")
        return self._meshes[domain]

    def coordinate(self, domain: Domain, axis: str) -> int:
        """The position of this rank on an axis.

        Raises:
            ValueError: If the domain has no such axis.
        """
        mesh = self.mesh_for(domain)
        names = mesh.mesh_dim_names or ()
        if axis not in names:
            raise ValueError(f"got the axis {axis!r} of the {domain} mesh; expected one of {', '.join(names)}.")
        return mesh.get_local_rank(axis)

    def size(self, domain: Domain, axis: str) -> int:
        """The number of ranks on an axis.

        Raises:
            ValueError: If the domain has no such axis.
        """
        self.coordinate(domain, axis)
        return self.mesh_for(domain)[axis].size()

    def wait_world(self) -> None:
        """Wait until every rank has come here."""
        dist.barrier()

    @contextmanager
    def main_process_first(self) -> Generator[None]:
        """Run the body on rank 0 first, then on all other ranks; also if it fails on rank 0."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Generator[None]:
        """Run the body on the first rank of every node first, then on the others of the node."""
        yield from self._first(self.is_local_main_process)

    def _first(self, goes_first: bool) -> Generator[None]:
        if not goes_first:
            self.wait_world()
        try:
            yield
        finally:
            if goes_first:
                self.wait_world()

    def close(self) -> None:
        """End the process group if this context started it. Safe to call twice, and after an exception on one rank."""
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_process_group = False


class _RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Puts `[rank 2/8]` before messages, where there is more than one rank."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        place = self.extra or {}
        if place.get("world_size") == 1:
            return msg, kwargs
        return f"[rank {place.get('rank')}/{place.get('world_size')}] {msg}", kwargs


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
    if launch.has_launcher:
        dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
