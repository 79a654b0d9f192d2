import dataclasses
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from d9d_dist.failures import peers
from d9d_dist.failures.peers import Peer, peers_here, process_state, publish_self


def _wait_for(pid: int, state: str) -> None:
    deadline = time.monotonic() + 30
    while process_state(pid) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_state(pid) == state


def test_process_states_before_and_after_exit() -> None:
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(1)
    _wait_for(child, "runs")
    os.kill(child, signal.SIGSTOP)
    _wait_for(child, "is stopped")
    os.kill(child, signal.SIGCONT)
    _wait_for(child, "runs")
    os.kill(child, signal.SIGKILL)
    _wait_for(child, "is gone")  # a zombie: its parent has not waited for it yet
    os.waitpid(child, 0)
    assert process_state(child) == "is gone"


def test_without_proc_only_liveness_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "readlink", refuse)
    assert process_state(os.getpid()) == "runs"
    assert process_state(1) == "runs"  # may belong to another user
    assert peers._namespace() == ""


def test_only_peers_of_this_machine_are_returned() -> None:
    store = dist.HashStore()
    publish_self(store, 2)
    host, namespace, pid = store.get("d9d/peer/2").decode().split("\n")
    store.set("d9d/peer/0", f"another\n{namespace}\n{pid}")
    store.set("d9d/peer/3", f"{host}\nanother\n{pid}")
    (me,) = peers_here(store, range(5))
    assert me == Peer(2, socket.gethostname(), namespace, os.getpid())
    assert me.state() == "runs"
    assert me.describe() == f"process {os.getpid()} on {socket.gethostname()}"
    assert not dataclasses.replace(me, host="another").is_here
