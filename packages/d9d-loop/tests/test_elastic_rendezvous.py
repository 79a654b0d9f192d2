import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _RendezvousExitOp

from d9d_loop import elastic_rendezvous
from d9d_loop.elastic_rendezvous import QuickRendezvous

_SECONDS = 60.0
_LONG_AGO = timedelta(days=1)


@pytest.fixture(autouse=True)
def _as_in_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as d9d-torchrun does


def _node(store: dist.Store, name: str) -> QuickRendezvous:
    backend = C10dRendezvousBackend(store, "job")
    torchs = DynamicRendezvousHandler.from_backend("job", store, backend, 2, 2, name, keep_alive_interval=100)
    return QuickRendezvous(torchs, backend, host="host0")


@contextmanager
def _threads() -> Generator[Callable[[QuickRendezvous], "Future[int]"]]:
    """Return a function that lets a node join the next round in a thread, and returns its rank."""
    with ThreadPoolExecutor(3) as pool:
        yield lambda node: pool.submit(lambda: node.next_rendezvous().rank)


def _wait(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def _lose(lost: QuickRendezvous, by: QuickRendezvous) -> None:
    """Let the keep-alive of a node expire, as another node sees it."""
    lost._stop_heartbeats()
    holder = by._state_holder
    holder.sync()
    holder.state.last_heartbeats[lost._this_node] = datetime.now(UTC) - _LONG_AGO
    holder.mark_dirty()
    _wait(lambda: bool(holder.sync()))


def test_operations_do_not_inspect_the_stack_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[int] = []
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda depth=2: names.append(depth))
    store = dist.HashStore()
    nodes = [_node(store, name) for name in ("host0", "host1")]
    with _threads() as join:
        assert sorted(rank.result(_SECONDS) for rank in [join(node) for node in nodes]) == [0, 1]
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
    assert names == []


def test_a_node_that_waits_says_how_many_nodes_are_missing() -> None:
    store = dist.HashStore()
    first, second = (_node(store, name) for name in ("host0", "host1"))
    with _threads() as join:
        joined = [join(first)]
        _wait(lambda: bool(first._state_holder.state.participants))
        assert "after 15 s, 1 of 2 nodes have joined the rendezvous" in first._describe_wait()
        assert "(host0). Start d9d-torchrun on the missing nodes." in first._describe_wait()
        joined.append(join(second))
        assert sorted(rank.result(_SECONDS) for rank in joined) == [0, 1]


def test_a_spare_node_joins_only_after_a_node_is_lost_and_the_others_know_which() -> None:
    store = dist.HashStore()
    first, second, spare = (_node(store, name) for name in ("host0", "host1", "host2"))
    with _threads() as join:
        ranks = [join(first), join(second)]
        _wait(lambda: all(rank.done() for rank in ranks))
        waits = join(spare)
        _wait(lambda: first.num_nodes_waiting() == 0 and bool(first._state_holder.state.redundancy_list))

        ranks = [join(first)]
        _wait(lambda: second.num_nodes_waiting() == 1)  # the first one, which restarts its ranks
        assert second.lost_nodes() == []
        ranks.append(join(second))
        assert sorted(rank.result(_SECONDS) for rank in ranks) == [0, 1]
        assert not waits.done()
        assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0

        lost_rank = ranks[1].result()
        _lose(second, by=first)
        _wait(lambda: first.num_nodes_waiting() == 1)  # the spare node
        assert first.lost_nodes() == [(lost_rank, "host1")]
        again = join(first)
        assert {again.result(_SECONDS), waits.result(_SECONDS)} == {0, 1}
        assert first.lost_nodes() == []
        for node in (first, spare):
            node.shutdown()


def test_a_slow_node_changes_places_with_a_spare_one() -> None:
    store = dist.HashStore()
    first, slow, spare = (_node(store, name) for name in ("host0", "host1", "host2"))
    with _threads() as join:
        ranks = [join(first), join(slow)]
        _wait(lambda: all(rank.done() for rank in ranks))
        assert not slow.has_spare()
        waits = join(spare)
        _wait(lambda: slow.num_nodes_waiting() == 0 and slow.has_spare())
        slow.yield_to_spare()
        waits_again = join(slow)
        _wait(lambda: first.num_nodes_waiting() == 1)  # the spare node
        assert first.lost_nodes() == []
        assert first.is_broken()
        again = join(first)
        assert {again.result(_SECONDS), waits.result(_SECONDS)} == {0, 1}
        assert not waits_again.done()
        assert first.num_nodes_waiting() == 0
        assert first._state_holder.state.redundancy_list == {slow._this_node}
        assert not first.has_spare()  # that node was slow
        for node in (first, spare):
            node.shutdown()
        # The job has ended without that node, and the node knows it. So no other node must keep the store open.
        assert isinstance(waits_again.exception(_SECONDS), RendezvousGracefulExitError)
        spare._state_holder.sync()
        assert not spare._state_holder.state.redundancy_list


def test_a_slow_node_joins_again_if_no_spare_node_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_rendezvous, "_YIELD_SECONDS", 1.0)
    store = dist.HashStore()
    first, slow = (_node(store, name) for name in ("host0", "host1"))
    with _threads() as join:
        ranks = [join(first), join(slow)]
        _wait(lambda: all(rank.done() for rank in ranks))
        slow.yield_to_spare()
        ranks = [join(slow)]
        _wait(lambda: first.num_nodes_waiting() == 0 and first.is_broken())
        assert first._state_holder.state.redundancy_list == {slow._this_node}
        ranks.append(join(first))
        assert sorted(rank.result(_SECONDS) for rank in ranks) == [0, 1]
        for node in (first, slow):
            node.shutdown()


def test_a_node_that_leaves_a_round_counts_as_waiting_for_the_next_one_at_once() -> None:
    store = dist.HashStore()
    first, second = (_node(store, name) for name in ("host0", "host1"))
    with _threads() as join:
        ranks = [join(first), join(second)]
        _wait(lambda: all(rank.done() for rank in ranks))
    assert not second.is_broken()
    first._op_executor.run(_RendezvousExitOp(), time.monotonic() + _SECONDS)  # it does not join yet
    _wait(lambda: second.num_nodes_waiting() == 1)
    assert second.lost_nodes() == []
    assert second.is_broken()
    for node in (first, second):
        node.shutdown()


def test_a_node_that_joins_too_late_does_not_interrupt_the_others() -> None:
    store = dist.HashStore()
    first, second, late = (_node(store, name) for name in ("host0", "host1", "host2"))
    with _threads() as join:
        ranks = [join(first), join(second)]
        _wait(lambda: all(rank.done() for rank in ranks))
        holder = first._state_holder
        holder.state.wait_list.add(late._this_node)  # it waited for this round, which was full before
        holder.state.last_heartbeats[late._this_node] = datetime.now(UTC)
        holder.mark_dirty()
        _wait(lambda: bool(holder.sync()))
        assert second.num_nodes_waiting() == first.num_nodes_waiting() == 0
        assert not first.is_broken()
        waits = join(late)
        _wait(lambda: first.num_nodes_waiting() == 0 and late._this_node in holder.state.redundancy_list)
        assert late._this_node not in holder.state.wait_list
        first.shutdown()
        assert waits.exception(_SECONDS) is not None  # the job has ended without it
        second.shutdown()
