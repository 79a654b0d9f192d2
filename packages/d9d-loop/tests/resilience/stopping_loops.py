"""Loops that are stopped by signals."""

import os
import signal
import time

import torch.distributed as dist
from forked_faults import Place

from d9d_dist import MeshConfig
from d9d_loop.resilience import StopConfig, Stopped, StopSignals


def stops(place: Place, signals: dict[int, tuple[int, str]], every: int) -> None:
    """Ranks get signals before the end of steps; return the step at which each stops, and the agreed signal."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        with StopSignals(StopConfig(every=every), ctx) as stop:
            for step in range(1, 100):
                dist.barrier()
                if ctx.rank in signals and signals[ctx.rank][0] == step:
                    os.kill(os.getpid(), signal.Signals[signals[ctx.rank][1]])
                if (by := stop.agreed()) is not None:
                    break
        assert by is not None
    stopped = Stopped(by, step=step)
    os.write(2, f"{stopped}".encode())
    raise stopped


def saves_for_ever(place: Place, grace: float | None, second: str | None) -> None:
    """Simulate a save that never ends, with a second signal after half a second."""
    with (
        MeshConfig(data_parallel_shard=-1).build() as ctx,
        StopSignals(StopConfig(grace_seconds=grace, repeat_seconds=0.3), ctx) as stop,
    ):
        dist.barrier()
        place.fault_is_now()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # immediately: counts as the same signal
        while stop.agreed() is None:
            dist.barrier()
        if second is not None:
            # A child process sends it while the main thread is in native code, where no Python handler runs.
            child = os.fork()
            if child == 0:
                time.sleep(0.5)
                os.kill(os.getppid(), signal.Signals[second])
                os._exit(0)
        time.sleep(30)


def trains_until_the_launcher_is_gone() -> tuple[object, str]:
    """Return the exit code and the cause of the stop."""
    with MeshConfig().build() as ctx, StopSignals(StopConfig(), ctx) as stop:
        while (by := stop.agreed()) is None:
            os.sched_yield()
    stopped = Stopped(by, step=1)
    return stopped.code, stopped.cause
