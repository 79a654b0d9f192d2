"""Launcher environment of this process, read before any process group exists."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from d9d_dist.errors import UserError


@dataclass(frozen=True, slots=True)
class Launch:
    """Place of this process in the job.

    Attributes:
        local_rank: Rank among the processes of this node.
        device: Device type to use, e.g. "cpu"; `None` for an accelerator if available.
        has_launcher: True if a launcher started this process as one of the ranks of a job.
        store: Address and port of the job's store on rank 0, if the launcher did not set `MASTER_ADDR` and
            `MASTER_PORT`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    device: str | None = None
    has_launcher: bool = False
    store: tuple[str, int] | None = None


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
_MPI = (  # Open MPI; MPICH and Intel MPI
    {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world_size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    {
        "rank": "PMI_RANK",
        "world_size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
        "local_world_size": "MPI_LOCALNRANKS",
    },
)
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_FIRST_PORT, _NUM_PORTS = 20000, 20000


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read the environment variables of torchrun, a Slurm step or MPI; without any of them, return a single process.

    `D9D_DEVICE` selects the device type, e.g. `D9D_DEVICE=cpu` on a machine with an accelerator. In a Slurm step
    (`srun`), the store is on the step's first host, unless `MASTER_ADDR` and `MASTER_PORT` are set. MPI needs these two
    variables. `environment` defaults to the variables of this process.

    Raises:
        UserError: If a variable is not an integer, or the rank is not less than the world size. Also if the variables
            are those of one of several ranks, but do not say how to connect them: each rank would train alone.
    """
    variables = os.environ if environment is None else environment
    launch = _read_torchrun(variables) or _read_slurm(variables) or _read_mpi(variables)
    if launch is None:
        return Launch(device=variables.get("D9D_DEVICE"))
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(
            f"the launcher set rank = {launch.rank} and world size = {launch.world_size}; expected 0 <= rank < "
            "world size. "
            "Start the job with torchrun, or unset RANK and WORLD_SIZE to run a single process."
        )
    return launch


def _read_torchrun(variables: Mapping[str, str]) -> Launch | None:
    given = [name for name in ("RANK", "WORLD_SIZE") if name in variables]
    if len(given) == 1 and variables.get("WORLD_SIZE") != "1":
        missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise UserError(
            f"got {given[0]} = {variables[given[0]]} without {missing}; expected both or neither. Start the job with "
            f"torchrun, or unset {given[0]} to run a single process."
        )
    return _read(variables, _TORCHRUN) if len(given) == 2 else None


def _read_slurm(variables: Mapping[str, str]) -> Launch | None:
    """Read the variables of a Slurm step. In a batch script, Slurm sets the rank of a task too, without a step."""
    if "SLURM_PROCID" not in variables:
        return None
    if "SLURM_STEP_NUM_TASKS" in variables:  # SLURM_NTASKS may be that of the whole job
        variables = {**variables, "SLURM_NTASKS": variables["SLURM_STEP_NUM_TASKS"]}
    launch = _read(variables, _SLURM) if "SLURM_NTASKS" in variables else None
    if launch is not None and (tasks := _tasks_of_nodes(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))):
        launch = replace(launch, local_world_size=tasks[launch.node_rank])
    if launch is None or (launch.world_size == 1 and "MASTER_ADDR" not in variables):
        return None
    if all(name in variables for name in _ADDRESS):
        return launch
    host = variables.get("MASTER_ADDR") or _first_host(variables.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise UserError(
            f"Slurm set SLURM_PROCID = {launch.rank} and SLURM_NTASKS = {launch.world_size}, but neither MASTER_ADDR "
            "nor SLURM_STEP_NODELIST; expected the step of an srun command. Start the tasks with srun, set --ntasks=1 "
            "for a single process, or export MASTER_ADDR and MASTER_PORT."
        )
    job, step = (_integer(variables, name) if name in variables else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = _integer(variables, "MASTER_PORT") if "MASTER_PORT" in variables else None
    return replace(launch, store=(host, port or _FIRST_PORT + (job * 31 + step) % _NUM_PORTS))


def _tasks_of_nodes(text: str) -> list[int]:
    """Return the number of tasks of each node, from Slurm's notation, such as 2(x3),1.

    SLURM_NTASKS_PER_NODE may be that of the job, and differ from the tasks of a step.
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]


def _first_host(hosts: str) -> str:
    """Return the first host of a list in Slurm's notation, such as node[07-09,12],login."""
    found = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,]*))?", hosts)
    return "" if found is None else "".join(part or "" for part in found.groups())


def _read_mpi(variables: Mapping[str, str]) -> Launch | None:
    for names in _MPI:
        if names["rank"] not in variables or names["world_size"] not in variables:
            continue
        launch = _read(variables, names)
        if launch.world_size == 1:
            return None
        if missing := [name for name in _ADDRESS if name not in variables]:
            raise UserError(
                f"MPI set {names['rank']} = {launch.rank} and {names['world_size']} = {launch.world_size}, but "
                f"not {' and '.join(missing)}; expected the address of rank 0. Export the variables on all hosts "
                "(mpirun -x), or start the job with torchrun."
            )
        return launch
    return None


def _read(variables: Mapping[str, str], names: Mapping[str, str]) -> Launch:
    values = {field: _integer(variables, name) for field, name in names.items() if name in variables}
    # Without local_world_size and num_nodes, assume one node.
    values.setdefault("local_world_size", _ceil_div(values["world_size"], values.get("num_nodes", 1)))
    values.setdefault("num_nodes", _ceil_div(values["world_size"], values["local_world_size"]))
    values.setdefault("local_rank", values["rank"] % values["local_world_size"])
    values.setdefault("node_rank", values["rank"] // values["local_world_size"])
    return Launch(store=None, device=variables.get("D9D_DEVICE"), has_launcher=True, **values)


def _integer(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise UserError(f"environment variable {name} = {variables[name]!r}; expected an integer.") from None


def _ceil_div(count: int, parts: int) -> int:
    return -(-count // max(parts, 1))
