"""Minimal loops of collectives with a fault on one rank at a step."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from forked_faults import Place

import d9d_loop.resilience.hang_watchdog
from d9d_dist import MeshConfig, Timeouts
from d9d_dist.failures.first_failure import NODE_FOLDER
from d9d_loop.resilience import HangWatchdog
from d9d_loop.resilience.node_files import NodeFile, describe_lost_host, write_node_file

BAD_STEP = 3
TIMEOUTS = Timeouts(startup=timedelta(seconds=120), step=timedelta(seconds=1))
"""Collectives keep the start-up timeout, so that the watchdog ends hangs."""


def watched(place: Place, fault: str, culprit: int, timeouts: Timeouts = TIMEOUTS) -> None:
    """Run steps under the watchdog; apply a fault to one rank at `BAD_STEP`."""
    with MeshConfig(data_parallel_shard=-1).build(timeouts=timeouts) as ctx, HangWatchdog(ctx) as watchdog:
        for step in range(1, BAD_STEP + 2):
            watchdog.beat(step)
            if step == BAD_STEP:
                time.sleep(0.5)  # the watchdog has polled at least once, as in any job longer than a second
            if step == BAD_STEP and ctx.rank == culprit:
                do(fault, place)
            dist.all_reduce(torch.ones(()))


def watched_patiently(place: Place, fault: str, culprit: int) -> None:
    """Call `watched` with long timeouts, so that ranks exit by themselves even on a loaded machine."""
    patient = Timeouts(startup=timedelta(seconds=120), step=timedelta(seconds=120))
    with mock.patch.object(d9d_loop.resilience.hang_watchdog, "_EXIT_SECONDS", 120.0):
        watched(place, fault, culprit, patient)


def watched_with_a_lost_host(place: Place) -> None:
    """Wait on all ranks for a host that the agents have lost; rank 1 writes the file with its name."""
    patient = Timeouts(startup=timedelta(seconds=120), step=timedelta(seconds=120))
    with (
        mock.patch.dict(os.environ, {NODE_FOLDER: str(place.folder)}),
        MeshConfig(data_parallel_shard=-1).build(timeouts=patient) as ctx,
        HangWatchdog(ctx) as watchdog,
    ):
        watchdog.beat(1)
        dist.barrier()
        if ctx.rank == 1:
            write_node_file(NodeFile.LOST_HOST, describe_lost_host(4, "host2"))
        time.sleep(100)


def watched_with_a_host_lost_after_a_peer(place: Place, culprit: int) -> None:
    """Let one rank exit because of a lost host, before the other can read the name of the host."""
    with MeshConfig(data_parallel_shard=-1).build(timeouts=TIMEOUTS) as ctx, HangWatchdog(ctx) as watchdog:

        def lost_after_the_peer(_name: NodeFile) -> str | None:
            poller = watchdog._poller
            return None if poller is None or poller.lost is None else describe_lost_host(4, "host2")

        watchdog.beat(1)
        dist.barrier()
        with mock.patch.object(d9d_loop.resilience.hang_watchdog, "read_node_file", side_effect=lost_after_the_peer):
            if ctx.rank == culprit:
                do("is killed", place)
            time.sleep(100)


def watched_victim_of_itself(place: Place, culprit: int) -> None:
    """Kill one rank; the others ignore the error of their collective and do not exit."""
    with MeshConfig(data_parallel_shard=-1).build(timeouts=TIMEOUTS) as ctx, HangWatchdog(ctx) as watchdog:
        watchdog.beat(1)
        dist.barrier()
        if ctx.rank == culprit:
            do("is killed", place)
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(()))
        time.sleep(30)


def watched_failing_late(place: Place) -> None:
    """Let rank 1 hang; rank 0 raises at about the time at which the hang is detected."""
    with MeshConfig(data_parallel_shard=-1).build(timeouts=TIMEOUTS) as ctx, HangWatchdog(ctx) as watchdog:
        watchdog.beat(1)
        time.sleep(1.3 * TIMEOUTS.step.total_seconds())  # as in a first step, which compiles kernels
        dist.barrier()
        watchdog.beat(2)
        if ctx.rank == 1:
            do("sleeps", place)
        time.sleep(0.9 * TIMEOUTS.step.total_seconds())
        raise RuntimeError("connection closed by peer")


def unwatched(place: Place, fault: str, culprit: int) -> None:
    """Run steps without a watchdog."""
    with MeshConfig(data_parallel_shard=-1).build(timeouts=TIMEOUTS) as ctx:
        dist.barrier()
        if ctx.rank == culprit:
            do(fault, place)
        dist.all_reduce(torch.ones(()))


def do(fault: str, place: Place) -> None:
    """Apply a fault to this process."""
    place.fault_is_now()
    match fault:
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "leaves":
            os._exit(3)
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleeps":
            time.sleep(30)
        case "holds the interpreter":
            ctypes.PyDLL(None).sleep(30)
        case "raises":
            raise KeyError("the culprit")
        case _:
            raise AssertionError(fault)
