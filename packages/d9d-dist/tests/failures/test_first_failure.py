import threading
import time
import traceback
from unittest import mock

import pytest
import torch.distributed as dist

from d9d_dist import MeshConfig
from d9d_dist.failures.first_failure import first_failure, leave_store, publish_failure, report_failure
from d9d_dist.testing import run_ranks


def _fail_while_others_wait() -> tuple[float, str]:
    """Raise on rank 1 while rank 0 is inside a collective; return each rank's time to leave, and its error."""
    start, text = time.monotonic(), ""
    try:
        with MeshConfig(tensor_parallel=2).build() as ctx:
            group = ctx.group_for("regular", "tp")
            dist.barrier(group)
            if ctx.rank == 1:
                raise KeyError("the culprit")
            dist.barrier(group)
    except (KeyError, RuntimeError) as error:
        text = "".join(traceback.format_exception(error))
    return time.monotonic() - start, text


def test_a_failing_rank_does_not_wait_and_the_others_name_its_error() -> None:
    (waited, waiting), (took, culprit) = run_ranks(_fail_while_others_wait)
    assert "KeyError: 'the culprit'" in culprit
    assert "Rank" not in culprit
    assert "RuntimeError" in waiting
    assert "Rank 1 failed before this rank: KeyError: 'the culprit'" in waiting
    assert max(waited, took) < 150  # the groups' timeout is 30 minutes


def _fail_alike() -> list[str]:
    with pytest.raises(ValueError, match="alike") as caught, MeshConfig(data_parallel_shard=2).build():
        raise ValueError("alike")
    return list(getattr(caught.value, "__notes__", []))


def test_ranks_with_the_same_error_do_not_name_each_other() -> None:
    assert run_ranks(_fail_alike) == [[], []]


def _fail_in_a_group_of_another() -> bool:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(KeyError), MeshConfig().build():
            raise KeyError
        return dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_process_group_started_elsewhere_is_not_destroyed() -> None:
    assert _fail_in_a_group_of_another()


def test_the_first_failure_in_the_order_of_the_store_wins() -> None:
    store = dist.HashStore()
    assert first_failure(store) is None
    assert publish_failure(store, 2, "first") == (2, "first")
    assert publish_failure(store, 1, "second") == (2, "first")
    assert first_failure(store) == (2, "first")


def test_the_host_of_the_store_waits_until_all_other_ranks_have_read_or_ended() -> None:
    store = dist.HashStore()
    publish_failure(store, 3, "its process is gone.", num_ended=1)
    host = threading.Thread(target=leave_store, args=(store,), kwargs={"world_size": 3, "is_host": True})
    host.start()
    host.join(0.1)
    assert host.is_alive()
    leave_store(store, world_size=3, is_host=False)
    host.join(4)  # before its own limit of 5 seconds
    assert not host.is_alive()


def test_a_lost_connection_of_unknown_cause_is_not_recorded_as_the_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    error = RuntimeError("[/gloo/transport/tcp/pair.cc] Connection reset by peer")
    report_failure(error, rank=0, world_size=2, store_place="rank 0 on a:1")
    assert first_failure(store) is None
    assert error.__notes__ == [
        "This rank lost its connection to another rank, which did not report an error: it was killed, or its host is "
        "down or cut off from the network."
    ]


def test_the_note_names_the_host_of_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", mock.Mock(side_effect=ValueError))
    error = dist.DistNetworkError("reset")
    report_failure(error, rank=1, world_size=2, store_place="rank 0 on a:1")
    (note,) = error.__notes__
    assert note.startswith("The job's store, which rank 0 on a:1 hosts, does not answer: that process was killed or is")
