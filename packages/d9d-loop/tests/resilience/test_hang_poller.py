import re
import socket

import pytest

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_loop.resilience.hang_poller import HangPoller
from d9d_loop.resilience.hang_report import RankPlace


def _explain(has_second_poller: bool, text: str) -> list[str]:
    """Return the notes of an error of rank 0; rank 1 may have no watchdog, so that it never answers."""
    error = RuntimeError(f"[/gloo/transport/tcp/pair.cc] {text}")
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        place = RankPlace(1, "a step", None, "here")
        poller = HangPoller(ctx, place=lambda: place, stuck_seconds=lambda: 0.0)
        if ctx.rank == 0 or has_second_poller:
            poller.start()
        ctx.barrier()
        if ctx.rank == 0:
            poller.explain(error)
        ctx.barrier()
        poller.leave_store()
        if ctx.rank == 0 or has_second_poller:
            poller.leave(has_finished=True)
    return getattr(error, "__notes__", [])


ALL_ANSWER = "This rank failed first: a connection broke, but all ranks answer: the network between the hosts was inter"
ONE_IS_SILENT = f"Rank 1 failed before this rank: its process on {re.escape(socket.gethostname())} does not answer: k"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_second_poller", "text", "expected"),
    [
        (True, "Connection reset by peer", [ALL_ANSWER]),
        (False, "Connection reset by peer", [ONE_IS_SILENT]),
        (True, "Timed out waiting 3000ms for recv operation to complete", []),
    ],
    ids=["all answer", "one is silent", "one is late"],
)
def test_a_roll_call_names_the_rank_that_does_not_answer(
    has_second_poller: bool, text: str, expected: list[str]
) -> None:
    notes, _ = run_ranks(_explain, has_second_poller, text)
    assert len(notes) == len(expected)
    assert all(map(re.match, expected, notes))
