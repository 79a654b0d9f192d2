"""Rendezvous of `d9d-torchrun`: torch's c10d rendezvous, but with shorter waits; it also reports lost nodes.

torch's agents poll the state of the rendezvous once a second, and read a copy that may be a second old. A round takes
several of these polls. In torch's rendezvous, a spare node competes with the nodes that restart their ranks, and a node
that joins too late makes all nodes restart once more. Here the spare node joins only if a node is missing.

For each operation, torch also records an event, which no handler receives by default. To name the caller, torch calls
`inspect.stack()` twice. Under `python -m` some frames have no source file, so each call searches all imported modules:
12 ms with the modules of torchrun, 24 ms with the modules of a job. This rendezvous records no events.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, final

from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _RendezvousContext,
    _RendezvousState,
    _should_keep_alive,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKEND: Final = "c10d-quick"
"""Name of the rendezvous for `--rdzv-backend`, after `register`."""

_POLL_SECONDS = 0.1
_REPORT_SECONDS = 15.0
_LEAVE_SECONDS = 3.0  # time for spare nodes to notice the end of a job
_YIELD_SECONDS = 30.0  # time for a spare node to replace a slow node; afterwards the slow node joins again
_NODES_PER_SECOND = 256  # polls of all nodes together; above 25 nodes, each node polls less often


def register() -> None:
    """Register the rendezvous with torch. May be called again."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(parameters)
    torchs = create_handler(store, backend, parameters)
    host = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)[0]
    return QuickRendezvous(torchs, backend, host=host)


@final
class QuickRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous with shorter waits. `torchs` is torch's handler; `host` is the store's host, for messages."""

    def __init__(self, torchs: DynamicRendezvousHandler, backend: C10dRendezvousBackend, *, host: str) -> None:
        self.host = host
        seconds = min(1.0, max(_POLL_SECONDS, torchs.settings.max_nodes / _NODES_PER_SECOND))
        holder = _BackendRendezvousStateHolder(backend, torchs.settings)
        holder._cache_duration = seconds  # ty: ignore[invalid-assignment]
        super().__init__(torchs._this_node, torchs.settings, BACKEND, torchs._store, holder)
        self._quick = _QuickExecutor(torchs._this_node, holder, torchs.settings, seconds=seconds)
        self._op_executor = self._quick
        self._ranks: dict[Any, int] = {}
        self._seen: set[Any] = set()

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, as torch's handler does. After 15 s, print how many nodes are missing."""
        timer = threading.Timer(_REPORT_SECONDS, lambda: print(self._describe_wait(), file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()
        try:
            joined = super().next_rendezvous()
        except RendezvousGracefulExitError:
            self._leave_spares()
            raise
        finally:
            timer.cancel()
        self._ranks = dict(self._state_holder.state.participants)
        self._seen.update(self._ranks)
        return joined

    def _describe_wait(self) -> str:
        state, needed = self._state_holder.state, self.settings.min_nodes
        if state.redundancy_list:
            return f"d9d-torchrun: {self._this_node.addr} waits as a spare node of {self.host}."
        present = sorted({node.addr for node in (*state.participants, *state.wait_list)})
        return (
            f"d9d-torchrun: after {_REPORT_SECONDS:g} s, {len(state.participants)} of {needed} nodes have joined the "
            f"rendezvous at {self.host} ({', '.join(present[:8])}). Start d9d-torchrun on the missing nodes."
        )

    def shutdown(self) -> bool:
        """Close the rendezvous, and wait until the spare nodes have left: this node may hold the store."""
        is_closed, deadline = super().shutdown(), time.monotonic() + _LEAVE_SECONDS
        with suppress(RendezvousError):
            while self._state_holder.state.redundancy_list and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                self._state_holder.sync()
        return is_closed

    def _leave_spares(self) -> None:
        """Remove this node from the spare nodes of a closed rendezvous; `shutdown` on another node waits for this."""
        holder = self._state_holder
        with suppress(RendezvousError):
            while self._this_node in holder.state.redundancy_list:
                holder.state.redundancy_list.remove(self._this_node)
                holder.mark_dirty()
                holder.sync()  # if another node has written a state, it replaces this node's copy

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that can join if the ranks are restarted."""
        num_waiting = super().num_nodes_waiting()
        is_full = len(self._state_holder.state.participants) >= self.settings.max_nodes
        return 0 if is_full else num_waiting

    def has_spare(self) -> bool:
        """Return True if a spare node waits with which this node has not trained before. Sends no request to the store.

        Earlier peers do not count, because two slow nodes would otherwise replace each other repeatedly.
        """
        return bool(self._state_holder.state.redundancy_list - self._seen)

    def yield_to_spare(self) -> None:
        """Become a spare node, so that another spare node replaces this node in the next round.

        If no spare node joins within 30 seconds, this node joins again.
        """
        self._quick.yields_until = time.monotonic() + _YIELD_SECONDS

    def lost_nodes(self) -> Sequence[tuple[int, str]]:
        """Return rank and host of the nodes of this round whose keep-alive has timed out.

        A node that has left the round to join the next one is not lost. Sends no request to the store.
        """
        state = self._state_holder.state
        present = {*_coming_nodes(state), *state.redundancy_list}
        return [(rank, node.addr) for node, rank in self._ranks.items() if node not in present]

    def is_broken(self) -> bool:
        """Return True if a node has left this round, so its ranks have exited. Sends no request to the store."""
        state = self._state_holder.state
        return not self._ranks.keys().isdisjoint(state.wait_list | state.redundancy_list)

    def _record(self, *arguments: Any, **named: Any) -> None:
        """Record no event."""


class _QuickExecutor(_DistributedRendezvousOpExecutor):
    """Executor of rendezvous operations, which polls the state more often than torch's executor."""

    def __init__(self, *arguments: Any, seconds: float) -> None:
        super().__init__(*arguments)
        self._seconds = seconds
        self.yields_until = 0.0

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[..., float] | None = None,
    ) -> None:
        """Run an operation as torch's executor does, but wait `seconds` between polls instead of one second."""

        def next_action(ctx: _RendezvousContext, until: float) -> _Action:
            while (action := self._without_races(state_handler(ctx, until), ctx)) is _Action.SYNC:
                time.sleep(self._seconds)
                self._state_holder.sync()
                self._state = ctx.state = self._state_holder.state
            return action

        super().run(next_action, deadline, update_deadline)

    def _record(self, *arguments: Any, **named: Any) -> None:
        """Record no event."""

    def _remove_from_participants(self) -> None:
        """Leave a round, and join the wait list of the next round in the same update.

        A node that yields to a spare node joins the spare nodes instead.
        """
        is_complete = self._state.complete
        super()._remove_from_participants()
        if is_complete and self._yields:
            self._add_to_redundancy_list()
        elif is_complete:
            self._add_to_wait_list()

    @property
    def _yields(self) -> bool:
        return time.monotonic() < self.yields_until

    def _without_races(self, action: _Action, ctx: _RendezvousContext) -> _Action:
        """Return torch's action, or its replacement for a spare node or a node that joined too late for a round."""
        state, size = ctx.state, ctx.settings.max_nodes
        match action:
            case _Action.REMOVE_FROM_REDUNDANCY_LIST if self._yields or len(_coming_nodes(state)) >= size:
                return _Action.KEEP_ALIVE if _should_keep_alive(ctx) else _Action.SYNC
            case _Action.SYNC | _Action.KEEP_ALIVE:
                is_late = state.complete and len(state.participants) >= size
                if is_late and ctx.node in state.wait_list:
                    return _Action.REMOVE_FROM_WAIT_LIST  # torch then adds the node to the redundancy list
        return action


def _coming_nodes(state: _RendezvousState) -> set[Any]:
    """Return the nodes of this round, and those waiting for the next one."""
    return {*state.participants, *state.wait_list}
