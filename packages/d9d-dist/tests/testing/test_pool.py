import contextlib
import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import Device, RankError, RankPool, accelerators_for, run_ranks
from d9d_dist.testing.pool import _imported_modules


@dataclass(frozen=True)
class _Point:
    x: int


def _sum_of_ranks(point: _Point) -> tuple[_Point, torch.Tensor]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        total = torch.tensor(ctx.rank)
        dist.all_reduce(total)
        return _Point(point.x + ctx.rank), total


def _pid() -> int:
    return os.getpid()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_are_in_rank_order(world_size: int) -> None:
    results = run_ranks(_sum_of_ranks, _Point(10), world_size=world_size)
    assert [point for point, _ in results] == [_Point(10 + rank) for rank in range(world_size)]
    assert all(total.item() == sum(range(world_size)) for _, total in results)


def test_processes_are_reused() -> None:
    first = run_ranks(_pid, world_size=4)
    assert run_ranks(_pid, world_size=2) == first[:2]
    assert len(set(first)) == 4
    assert os.getpid() not in first


def _has_dynamo() -> bool:
    return "torch._dynamo" in sys.modules


def test_a_new_rank_has_imported_the_lazy_modules_of_optimizers() -> None:
    with RankPool() as pool:
        assert pool.run(_has_dynamo, world_size=1) == [True]


def test_ranks_are_forked_with_the_packages_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("d9d_other", "d9d_other.part", "d9d_other._kernel", "d9dish"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    found = _imported_modules()
    assert {"d9d_dist", "d9d_dist.testing", "d9d_other", "d9d_other.part", "hypothesis"} <= set(found)
    assert not {"d9d_other._kernel", "d9dish", "d9d_dist.testing._worker"} & set(found)


def test_a_rank_loads_a_module_that_it_cannot_import_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late.py").write_text("import os\n\ndef where():\n    return os.getpid(), __name__, __file__\n")
    spec = importlib.util.spec_from_file_location("not_a_package.late", tmp_path / "late.py")
    assert spec is not None
    assert spec.loader is not None
    late = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, late.__name__, late)
    spec.loader.exec_module(late)
    [(process, name, file)] = run_ranks(late.where, world_size=1)
    assert process != os.getpid()
    assert (name, file) == ("not_a_package.late", str(tmp_path / "late.py"))


def _fail_on_rank_1() -> None:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        print("before the end")
        if ctx.rank == 1:
            raise KeyError("the culprit")
        ctx.barrier()


def test_the_error_names_the_failing_rank_and_the_pool_recovers() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 was the first.*--- rank 1 ---.*KeyError: 'the culprit'") as caught:
        run_ranks(_fail_on_rank_1, world_size=3)
    assert caught.value.rank == 1
    assert "before the end" in str(caught.value)
    assert run_ranks(_pid, world_size=2)


def _die_on_rank_0() -> None:
    if os.environ["RANK"] == "0":
        os._exit(7)
    time.sleep(30)


def test_the_error_names_a_rank_whose_process_died() -> None:
    with pytest.raises(RankError, match=r"--- rank 0 ---\nThe process died with exit code 7\."):
        run_ranks(_die_on_rank_0)


def _hang_on_rank_1() -> None:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        if ctx.rank == 1:
            _oversleep()
        ctx.barrier()


def _oversleep() -> None:
    time.sleep(60)


def _reset_handler() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.slow
def test_a_hang_shows_the_stacks_of_all_ranks() -> None:
    run_ranks(_reset_handler)  # starts the processes, so that both ranks hang in time; a job resets handlers, too
    with pytest.raises(RankError) as caught:
        run_ranks(_hang_on_rank_1, timeout=6)
    message = str(caught.value)
    assert "ranks 0, 1 did not finish within 6 s; finished: none." in message
    before, after = message.split("--- stacks of rank 1 ---")
    assert "_oversleep" in after
    assert "barrier" in before


def _exit() -> None:
    raise SystemExit(3)


def test_an_exit_is_a_failure() -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(_exit)


def test_equal_errors_of_ranks_are_shown_once() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_exit, world_size=2)
    assert str(caught.value).count("Traceback") == 1


def _closures() -> list[Callable[[], Any]]:
    def inner() -> None: ...

    return [inner, lambda: None]


@pytest.mark.parametrize("function", _closures())
def test_refuses_a_function_that_other_processes_cannot_import(function: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="pass a function that is defined at the top level of a module"):
        run_ranks(function)


def _place() -> tuple[str, str | None, float]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        total = torch.ones((), device=ctx.device)
        dist.all_reduce(total)
        return ctx.device.type, os.environ.get("D9D_DEVICE"), total.item()


def test_ranks_run_on_the_requested_device(device: Device) -> None:
    for kind, variable, total in run_ranks(_place, device=device):
        assert (kind == "cpu") == (device == "cpu")
        assert variable == ("cpu" if device == "cpu" else None)
        assert total == 2.0


def test_refuses_more_ranks_than_accelerators_before_starting_any() -> None:
    ranks = torch.accelerator.device_count() + 1
    assert not accelerators_for(ranks)
    message = (
        f"got {ranks} ranks with device = 'accelerator' on a machine with {ranks - 1} accelerators; expected one per "
        "rank. Check accelerators_for(world_size) first, and skip the test or run it on the CPU."
    )
    with RankPool() as pool, pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        pool.run(_place, world_size=ranks, device="accelerator")


def _set_and_unset() -> str | None:
    return os.environ.get("D9D_DEVICE")


def test_accelerator_ranks_do_not_inherit_the_cpu_device_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool() as pool:
        assert pool.run(_set_and_unset, world_size=1) == ["cpu"]
        monkeypatch.setattr("d9d_dist.testing.pool.accelerators_for", lambda world_size: world_size == 1)
        assert pool.run(_set_and_unset, world_size=1, device="accelerator") == [None]


def _fails_to_connect_once(marker: str) -> int:
    with contextlib.suppress(FileExistsError):
        Path(marker).touch(exist_ok=False)
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc] Connection closed by peer")
    return os.getpid()


def _fails_to_connect() -> None:
    raise RuntimeError("Gloo connectFullMesh failed with [pair.cc] Connection closed by peer")


def test_a_lost_gloo_connection_is_retried_once(tmp_path: Path) -> None:
    assert run_ranks(_fails_to_connect_once, str(tmp_path / "marker"), world_size=1)[0] != os.getpid()
    with pytest.raises(RankError, match=r"(?s)1 of 1 ranks failed.*connectFullMesh"):
        run_ranks(_fails_to_connect, world_size=1)


def _slow_to_tell(rank: int) -> None:
    """Fail on `rank` but report late; the other ranks fail because of it and report earlier."""
    try:
        with MeshConfig(data_parallel_shard=-1).build() as ctx:
            if ctx.rank == rank:
                raise RuntimeError("no more coffee")
            ctx.barrier()
    except RuntimeError as error:
        if "coffee" in str(error):
            time.sleep(0.3)
        raise


def test_the_error_names_the_first_failure_even_if_an_affected_rank_reports_earlier() -> None:
    with pytest.raises(RankError, match=r"2 of 2 ranks failed; rank 1 was the first\.") as caught:
        run_ranks(_slow_to_tell, 1)
    assert caught.value.rank == 1
