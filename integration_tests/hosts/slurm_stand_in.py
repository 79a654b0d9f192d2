"""Stand-ins for Slurm's commands in a batch script: `srun` starts real tasks on hosts of `Hosts`.

Called with `srun` or `scontrol` and its arguments. `STAND_IN_INITS` has the first process of each host,
`STAND_IN_TASKS` the tasks of a host, and `STAND_IN_MORE` arguments that are added to the command of `srun`.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path


def _srun(arguments: list[str]) -> int:
    """Start the command as one task per rank; return the largest exit code, 128 plus the signal of a killed task."""
    inits, tasks = os.environ["STAND_IN_INITS"].split(), int(os.environ["STAND_IN_TASKS"])
    command = arguments[next(index for index, word in enumerate(arguments) if not word.startswith("-")) :]
    started = []
    for rank in range(len(inits) * tasks):
        slurm = {
            "SLURM_PROCID": rank,
            "SLURM_NTASKS": len(inits) * tasks,
            "SLURM_LOCALID": rank % tasks,
            "SLURM_NTASKS_PER_NODE": tasks,
            "SLURM_NODEID": rank // tasks,
            "SLURM_NNODES": len(inits),
            "SLURM_STEP_NODELIST": f"host[0-{len(inits) - 1}]",
        }
        environment = {**os.environ, **{name: str(value) for name, value in slurm.items()}}
        enter = ["nsenter", "-t", inits[rank // tasks], "--all", f"--wd={Path.cwd()}"]
        started.append(subprocess.Popen([*enter, *command, *shlex.split(os.environ["STAND_IN_MORE"])], env=environment))
    codes = [task.wait() for task in started]
    return max(code if code >= 0 else 128 - code for code in codes)


if __name__ == "__main__":
    sys.exit(_srun(sys.argv[2:]) if sys.argv[1] == "srun" else 0)
