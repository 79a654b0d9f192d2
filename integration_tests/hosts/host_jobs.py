"""Functions that ranks run in the tests of several hosts."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hosts.forked_hosts import Place
from hosts.hosts import PORT

from faulty_jobs import trains  # isort: skip - its folder is added to the path by `forked_hosts`


def stays_away(place: Place, culprit: int, **sections: Any) -> None:
    """Run a job to which one rank does not come."""
    if place.rank != culprit:
        trains(place, "nothing", culprit, **sections)
    while len(list(place.folder.glob("errors-*"))) < 3:
        time.sleep(0.01)


def agent(place: Place, fault: str, culprit: int, **sections: Any) -> None:
    """Run torchrun's agent of a host, for two or three hosts with one rank each, which are forked."""
    launch = LaunchConfig(
        min_nodes=2,
        max_nodes=3,
        nproc_per_node=1,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint=f"host0:{PORT}",
        # Long enough that a busy machine loses no agent, and that all three join the first rendezvous.
        rdzv_configs={
            "last_call_timeout": 20,
            "keep_alive_interval": 3,
            "keep_alive_max_attempt": 5,
            "read_timeout": 20,
        },
        max_restarts=2,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(launch, _life)(str(place.folder), fault, culprit, sections)


def _life(folder: str, fault: str, culprit: int, sections: dict[str, Any]) -> None:
    """Run a rank between two restarts; only the first one has the fault."""
    # In the only thread: replaces the thread pool that did not survive the fork. Otherwise the main thread and that of
    # autograd replace it at the same time in the first backward, and torch aborts ("Invalid thread pool!").
    torch.set_num_threads(1)
    place = Place(Path(folder), int(os.environ["RANK"]))
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not (place.folder / "fault").exists()
    trains(place, fault if is_first else "nothing", culprit, **sections)
    (place.folder / f"finished-{place.rank}-of-{os.environ['WORLD_SIZE']}").touch()
