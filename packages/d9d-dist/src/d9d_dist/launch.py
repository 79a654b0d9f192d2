"""Launcher environment of this process, read before any process group exists."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from d9d_dist.errors import UserError


@dataclass(frozen=True, slots=True)
class Launch:
    """Place of this process in the job.

    Attributes:
        local_rank: Rank among the processes of this node.
        device: Device type to use, e.g. "cpu"; `None` for an accelerator if available.
        has_launcher: True if a launcher started this process and set up a rendezvous (`MASTER_ADDR`, `MASTER_PORT`).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    device: str | None = None
    has_launcher: bool = False


_TORCHRUN = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "num_nodes": "GROUP_WORLD_SIZE",
}
_SLURM = {
    "rank": "SLURM_PROCID",
    "world_size": "SLURM_NTASKS",
    "local_rank": "SLURM_LOCALID",
    "local_world_size": "SLURM_NTASKS_PER_NODE",
    "node_rank": "SLURM_NODEID",
    "num_nodes": "SLURM_NNODES",
}


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read the environment variables of torchrun, else of a Slurm step; without either, return a single process.

    `D9D_DEVICE` selects the device type, e.g. `D9D_DEVICE=cpu` on a machine with an accelerator. Slurm variables are
    used only if `MASTER_ADDR` is set: an interactive Slurm allocation has them without being a distributed job.
    `environment` defaults to the variables of this process.

    Raises:
        UserError: If a variable is not an integer, or the rank is not less than the world size.
    """
    variables = os.environ if environment is None else environment
    if "RANK" in variables and "WORLD_SIZE" in variables:
        launch = _read(variables, _TORCHRUN)
    elif "SLURM_PROCID" in variables and "MASTER_ADDR" in variables:
        launch = _read(variables, _SLURM)
    else:
        return Launch(device=variables.get("D9D_DEVICE"))
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(
            f"the launcher set rank = {launch.rank} and world size = {launch.world_size}; expected 0 <= rank < "
            "world size. "
            "Start the job with torchrun, or unset RANK and WORLD_SIZE to run a single process."
        )
    return launch


def _read(variables: Mapping[str, str], names: Mapping[str, str]) -> Launch:
    values: dict[str, int] = {}
    for field, name in names.items():
        if name not in variables:
            continue
        try:
            values[field] = int(variables[name])
        except ValueError:
            raise UserError(f"environment variable {name} = {variables[name]!r}; expected an integer.") from None
    # Without local_world_size and num_nodes, assume one node.
    values.setdefault("local_world_size", _ceil_div(values["world_size"], values.get("num_nodes", 1)))
    values.setdefault("num_nodes", _ceil_div(values["world_size"], values["local_world_size"]))
    values.setdefault("local_rank", values["rank"] % values["local_world_size"])
    return Launch(**values, device=variables.get("D9D_DEVICE"), has_launcher=True)


def _ceil_div(count: int, parts: int) -> int:
    return -(-count // max(parts, 1))
