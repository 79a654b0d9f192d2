import socket
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

import d9d_dist.groups._rendezvous
from d9d_dist import Launch, StartupTimeoutError, UserError
from d9d_dist.errors import AddressInUseError
from d9d_dist.failures.peers import publish_self
from d9d_dist.groups._rendezvous import connect_store, store_place, wait_for_ranks

SHORT = timedelta(seconds=0.3)


def _launch(rank: int, world_size: int = 4) -> Launch:
    return Launch(
        rank=rank,
        world_size=world_size,
        local_world_size=2,
        node_rank=rank // 2,
        num_nodes=world_size // 2,
        has_launcher=True,
    )


def _publish(store: dist.Store, launch: Launch) -> None:
    """Publish a rank as `wait_for_ranks` does, without waiting."""
    store.set(f"d9d/node/{launch.rank}", f"{launch.node_rank} {launch.local_world_size}")
    publish_self(store, launch.rank)


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Set the launcher's variables to a port that is bound, but on which nobody listens yet."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = int(reserved.getsockname()[1])
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield port


def test_the_error_on_each_rank_names_the_ranks_that_did_not_start_and_their_nodes() -> None:
    store = dist.HashStore()
    _publish(store, _launch(1))
    with pytest.raises(StartupTimeoutError) as caught:
        wait_for_ranks(store, _launch(0), SHORT)
    host = socket.gethostname()
    assert str(caught.value).startswith(
        f"ranks 2, 3 of node 1 did not start within 0.3 s; the other 2 ranks waited on {host}. Check whether"
    )
    with pytest.raises(StartupTimeoutError) as another:
        wait_for_ranks(store, _launch(1), timedelta(days=1))
    assert str(another.value) == str(caught.value)


def test_the_node_of_a_missing_rank_is_right_if_nodes_differ_in_their_number_of_ranks() -> None:
    store = dist.HashStore()
    sizes = {0: (0, 1), 1: (1, 3), 2: (1, 3), 3: (1, 3), 4: (2, 2), 5: (2, 2), 6: (3, 1)}
    launches = {
        rank: Launch(rank=rank, world_size=7, local_world_size=size, node_rank=node, num_nodes=4, has_launcher=True)
        for rank, (node, size) in sizes.items()
    }
    for rank in (1, 2, 4, 5):
        _publish(store, launches[rank])
    with pytest.raises(StartupTimeoutError) as caught:
        wait_for_ranks(store, launches[0], SHORT)
    host = socket.gethostname()
    assert str(caught.value).startswith(f"ranks 3, 6 of node 1 ({host}), node 3 did not start within 0.3 s")


def test_ranks_that_are_missing_are_named_once_while_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(d9d_dist.groups._rendezvous, "_REPORT_AFTER", timedelta(seconds=0.1))
    store = dist.HashStore()
    _publish(store, _launch(1))
    for rank in (0, 1):
        with pytest.raises(StartupTimeoutError, match=r"did not start within 0\.3 s"):
            wait_for_ranks(store, _launch(rank), SHORT)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("d9d: ranks 2, 3 of node 1 did not start within 0.1 s; the other 2 ranks waited on ")
    assert line.endswith("Waiting for up to 0.3 s.")


def test_a_rank_that_waits_for_the_store_says_so(
    monkeypatch: pytest.MonkeyPatch, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(d9d_dist.groups._rendezvous, "_REPORT_AFTER", timedelta(seconds=0.1))
    with pytest.raises(StartupTimeoutError):
        connect_store(_launch(3), SHORT)
    expected = f"waits for the job's store, which rank 0 on 127.0.0.1:{port} hosts, for 0.1 s. Check whether that"
    assert expected in capsys.readouterr().err


def test_all_ranks_start_together() -> None:
    store = dist.HashStore()
    with pytest.raises(StartupTimeoutError, match="rank 1 of node 0"):
        wait_for_ranks(store, _launch(0, world_size=2), SHORT)
    store = dist.HashStore()
    store.add("d9d/num_arrived", 1)
    wait_for_ranks(store, _launch(0, world_size=2), SHORT)


def test_the_error_for_an_unreachable_store_names_the_host_of_the_store(port: int) -> None:
    expected = rf"rank 3 on \S+ did not reach the job's store within 0.3 s. rank 0 on 127.0.0.1:{port} hosts it"
    with pytest.raises(StartupTimeoutError, match=expected):
        connect_store(_launch(3), SHORT)


def test_a_port_in_use_may_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        expected = r"rank 0 cannot listen on MASTER_ADDR = 127\.0\.0\.1 and MASTER_PORT = "
        with pytest.raises(AddressInUseError, match=expected):
            connect_store(_launch(0), SHORT)


def test_a_port_that_is_not_allowed_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = dist.DistNetworkError("The server socket has failed to listen. code: -13, name: EACCES")
    monkeypatch.setattr(dist, "TCPStore", mock.Mock(side_effect=failure))
    with pytest.raises(UserError, match="rank 0 cannot listen on MASTER_ADDR"):
        connect_store(_launch(0), SHORT)


def test_a_launcher_without_an_address_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(UserError, match="set the rank 1 of 4, but not MASTER_PORT; expected the address of rank 0"):
        connect_store(_launch(1), SHORT)


def test_the_store_is_on_rank_0_unless_an_agent_has_one(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    assert store_place(_launch(1)) == f"rank 0 on 127.0.0.1:{port}"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert store_place(_launch(1)) == f"torchrun on 127.0.0.1:{port}"
