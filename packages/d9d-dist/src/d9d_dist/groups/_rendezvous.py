"""Rendezvous: every rank connects to the job's store and waits there until all ranks have started.

torch's own errors state only the number of ranks or keys of the store; the errors of this module name the missing
ranks.
"""

import os
import socket
import sys
from collections import Counter
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from d9d_dist.collectives.consensus import name_ranks
from d9d_dist.errors import AddressInUseError, StartupTimeoutError, UserError, shorten
from d9d_dist.failures.first_failure import leave_store
from d9d_dist.failures.peers import hosts_of, publish_self
from d9d_dist.failures.slow_report import reported_if_slow
from d9d_dist.groups.launch import Launch

_REPORT_AFTER = timedelta(seconds=15)
_ALL = "all"
_NUM_ARRIVED, _NUM_REPORTS = "d9d/num_arrived", "d9d/num_reports"  # store keys
_START = "d9d/start"  # store key; the value of `_START` is `_ALL` or an error text


def connect_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Return the launcher's store, with a key prefix that is unique to this context.

    Without the prefix, a second context of the process would read keys of the first, such as addresses of peers.

    Raises:
        UserError: If the launcher did not set the address of the store, or rank 0 cannot listen on it.
        AddressInUseError: On rank 0, if another process has the port.
        StartupTimeoutError: If the store is unreachable.
    """
    if launch.store is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = launch.store[0], str(launch.store[1])
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(
            f"the launcher set the rank {launch.rank} of {launch.world_size}, but not {' and '.join(missing)}; "
            "expected the address of rank 0. Start the job with torchrun, or export the variables on all hosts."
        )
    place = store_place(launch)
    try:
        if hosts_store(launch):
            store = _host_store(launch, timeout)
        else:
            with _reported(
                f"rank {launch.rank} on {socket.gethostname()} waits for the job's store, which {place} hosts"
            ):
                store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    except dist.DistNetworkError as error:
        seconds = timeout.total_seconds()
        raise StartupTimeoutError(
            f"rank {launch.rank} on {socket.gethostname()} did not reach the job's store within {seconds:g} s. {place} "
            "hosts it: that process was not started, or the network between the two hosts is cut. Check MASTER_ADDR "
            f"and MASTER_PORT. ({str(error).splitlines()[0]})"
        ) from None
    store.set_timeout(timeout)
    num_contexts = store.add(f"d9d/num_contexts/{launch.rank}", 1)
    return dist.PrefixStore(f"d9d/context_{num_contexts}", store)


def wait_for_ranks(store: dist.Store, launch: Launch, timeout: timedelta) -> None:
    """Wait until all ranks have called this function. Each rank sends few requests to the store.

    If ranks are missing after 15 s, one of the waiting ranks names them on standard error.
    Raises `StartupTimeoutError` on every waiting rank if a rank is missing at the timeout.
    """
    store.set(f"d9d/node/{launch.rank}", f"{launch.node_rank} {launch.local_world_size}")
    publish_self(store, launch.rank)
    if store.add(_NUM_ARRIVED, 1) == launch.world_size:
        store.compare_set(_START, "", _ALL)
    try:
        _wait_and_report(store, launch, timeout)
    except dist.DistStoreError:
        store.compare_set(_START, "", _describe_missing(store, launch, timeout))
    if (problem := store.get(_START).decode(errors="replace")) != _ALL:
        leave_store(store, world_size=store.add(_NUM_ARRIVED, 0), is_host=hosts_store(launch))
        raise StartupTimeoutError(problem)


def _wait_and_report(store: dist.Store, launch: Launch, timeout: timedelta) -> None:
    """Wait for the start. After 15 s, the first rank to look prints the missing ranks, and goes on waiting."""
    try:
        store.wait([_START], min(timeout, _REPORT_AFTER))
    except dist.DistStoreError:
        if timeout <= _REPORT_AFTER:
            raise
    else:
        return
    if store.add(_NUM_REPORTS, 1) == 1:
        message = _describe_missing(store, launch, _REPORT_AFTER)
        print(f"d9d: {message} Waiting for up to {timeout.total_seconds():g} s.", file=sys.stderr, flush=True)
    store.wait([_START], timeout - _REPORT_AFTER)


def _reported(what: str) -> AbstractContextManager[None]:
    """Print `what` on standard error if the body takes longer than 15 s."""
    seconds = _REPORT_AFTER.total_seconds()
    return reported_if_slow(f"{what}, for {seconds:g} s. Check whether that process was started.", seconds=seconds)


def hosts_store(launch: Launch) -> bool:
    """Return True if this process hosts the job's store: rank 0, unless torchrun's agent does."""
    return launch.rank == 0 and not _has_agent_store()


def store_place(launch: Launch) -> str:
    """Return the location of the job's store for messages, e.g. "rank 0 on node0:29500"."""
    if not launch.has_launcher:
        return "this process"
    process = "torchrun" if _has_agent_store() else "rank 0"
    address, port = launch.store or (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    return f"{process} on {address}:{port}"


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _host_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Host the store, without torch's wait for the other ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    options: dict[str, Any] = {"timeout": timeout, "multi_tenant": True, "wait_for_workers": False}
    try:
        return dist.TCPStore(address, port, launch.world_size, is_master=True, **options)
    except dist.DistNetworkError as error:
        # A port in use may become free; another host's address or a port that is not allowed is a user's mistake.
        kind = AddressInUseError if "EADDRINUSE" in str(error) else UserError
        raise kind(
            f"rank 0 cannot listen on MASTER_ADDR = {address} and MASTER_PORT = {port}: "
            f"{str(error).splitlines()[0]}. Use the address of rank 0's host, and a free port."
        ) from None


def _describe_missing(store: dist.Store, launch: Launch, timeout: timedelta) -> str:
    arrived = [rank for rank in range(launch.world_size) if store.check([f"d9d/peer/{rank}"])]
    missing = [rank for rank in range(launch.world_size) if rank not in arrived]
    texts = store.multi_get([f"d9d/node/{rank}" for rank in arrived])
    places = [tuple(map(int, text.decode().split())) for text in texts]  # nodes may differ in their number of ranks
    complete = {node for (node, num_ranks), found in Counter(places).items() if found == num_ranks}
    nodes = [node for node in range(launch.num_nodes) if node not in complete]
    hosts = {node: host for (node, _), host in zip(places, hosts_of(store, arrived), strict=True)}
    where = shorten([f"node {node}" + (f" ({hosts[node]})" if node in hosts else "") for node in nodes])
    return (
        f"{name_ranks(missing)} of {where} did not start within {timeout.total_seconds():g} s; the other "
        f"{len(arrived)} ranks waited on {shorten(sorted(set(hosts.values())))}. Check whether all nodes started their "
        f"ranks, and whether they reach the job's store, which {store_place(launch)} hosts."
    )
