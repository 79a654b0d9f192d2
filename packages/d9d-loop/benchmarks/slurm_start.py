"""Seconds from the command to the first step of a job of many ranks, by `srun` and by `torchrun`, as JSON.

Slurm runs on this machine with four nodes; it needs root and Debian's packages of integration_tests/slurm_cluster.py.
The order of the two commands alternates from pair to pair. The bound is a median ratio of 1.3.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "integration_tests"))

from cluster_example import copy_examples, read_losses
from slurm_cluster import NODES, SlurmCluster, why_no_slurm

_POLL_SECONDS = 0.05


def main() -> None:
    """Start the cluster, then measure the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    if (reason := why_no_slurm()) is not None:
        raise SystemExit(reason)
    commands = {
        "srun": ["srun", f"--nodes={len(NODES)}", f"--ntasks-per-node={arguments.ranks // len(NODES)}", "python"],
        "torchrun": ["torchrun", "--nproc-per-node", str(arguments.ranks)],
    }
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        bound.close()
        cluster = SlurmCluster(Path(folder), port=port)
        try:
            copy_examples(Path(folder))
            pairs = [_measure_pair(cluster, commands, number) for number in range(arguments.pairs)]
        finally:
            cluster.close()
    ratios = [pair["srun"] / pair["torchrun"] for pair in pairs]
    figures = {"ranks": arguments.ranks, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({**figures, "seconds": pairs, "median_ratio": round(statistics.median(ratios), 2)}, indent=2))


def _measure_pair(cluster: SlurmCluster, commands: dict[str, list[str]], number: int) -> dict[str, float]:
    names = sorted(commands, reverse=number % 2 == 1)
    return {name: _measure(cluster, commands[name], f"{name}-{number}") for name in names}


def _measure(cluster: SlurmCluster, command: list[str], run: str) -> float:
    """Return the seconds to the first step; wait for the end of the job."""
    folder = cluster.folder
    words = [
        "examples/pretrain.py",
        "--run.name",
        run,
        "--steps",
        "1",
        "--batch.global_size",
        "64",
        "--export",
        "false",
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(cluster.run, *command, *words, cwd=folder, variables={"PATH": path, "OMP_NUM_THREADS": "1"})
        while not read_losses(folder, run):
            if job.done():
                job.result()
                raise RuntimeError(f"{run} ended without a step")
            time.sleep(_POLL_SECONDS)
        seconds = time.perf_counter() - start
    return round(seconds, 1)


if __name__ == "__main__":
    main()
