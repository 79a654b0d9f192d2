import threading
from collections.abc import Mapping
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_metrics import Max, MetricCollector, Sum, WeightedMean


def collected_on_ranks() -> tuple[list[tuple[int, dict[str, float]]], list[bool]]:
    dist.init_process_group("gloo")
    rank, delivered, own = dist.get_rank(), [], []

    def deliver(step: int, values: Mapping[str, float]) -> None:
        delivered.append((step, dict(values)))
        own.append(threading.current_thread() is threading.main_thread())

    total, largest = Sum(), Max()
    with MetricCollector({"total": total, "largest": largest}, dist.group.WORLD, deliver, max_lag=3) as collector:
        for step in range(20):
            total.update(step + 100 * rank)
            largest.update(step * (-1) ** rank)
            collector.collect(step, {"rate": 0.5, "loss": torch.tensor(step / 2)})
            if step == 9:
                collector.flush()
                assert [step for step, _ in delivered] == list(range(10))
    return delivered, own


def test_delivers_reduced_values_in_step_order() -> None:
    for delivered, own in run_ranks(collected_on_ranks, world_size=2):
        assert [step for step, _ in delivered] == list(range(20))
        for step, values in delivered:
            assert list(values) == ["rate", "loss", "total", "largest"]
            assert values == {"rate": 0.5, "loss": step / 2, "total": 2 * step + 100, "largest": float(step)}
        assert not any(own), "values were handed on in the step's thread"


def test_collect_copies_the_state_and_resets_it() -> None:
    values: list[float] = []
    mean = WeightedMean()
    with MetricCollector({"mean": mean}, None, lambda _, got: values.append(got["mean"])) as collector:
        for number in range(5):
            mean.update(number, 1)
            collector.collect(number)
    assert values == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_lag_is_bounded() -> None:
    may_go_on, delivered = threading.Semaphore(0), []

    def deliver(step: int, _values: Mapping[str, float]) -> None:
        assert may_go_on.acquire(timeout=60)
        delivered.append(step)

    collector = MetricCollector({"sum": Sum()}, None, deliver, max_lag=2)
    collector.collect(0)
    collector.collect(1)  # does not wait, although nothing was delivered
    assert delivered == []
    third = threading.Thread(target=collector.collect, args=(2,))
    third.start()
    third.join(timeout=0.2)
    assert third.is_alive(), "a third collection did not wait for the first one"
    may_go_on.release()
    third.join(timeout=60)
    assert delivered == [0]
    for _ in range(2):
        may_go_on.release()
    collector.close()
    assert delivered == [0, 1, 2]


def _collect_thrice(collector: MetricCollector) -> None:
    for _ in range(3):
        collector.collect(1)


def test_an_exception_of_deliver_is_raised_by_the_next_call() -> None:
    def refuse(step: int, _values: Mapping[str, float]) -> None:
        raise UserError(f"step {step} is refused")

    collector = MetricCollector({"sum": Sum()}, None, refuse, max_lag=1)
    for _ in range(3):  # failed collections do not count towards the lag
        with pytest.raises(UserError, match="step 1 is refused"):
            _collect_thrice(collector)
    with suppress(UserError):
        collector.flush()
    collector.collect(2)
    with pytest.raises(UserError, match="step 2 is refused"):
        collector.close()
    collector.close()


def test_an_exception_of_the_body_is_not_masked() -> None:
    def refuse(_step: int, _values: Mapping[str, float]) -> None:
        raise UserError("refused")

    def body() -> None:
        with MetricCollector({"sum": Sum()}, None, refuse) as collector:
            collector.collect(1)
            raise KeyError

    with pytest.raises(KeyError):
        body()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_an_accelerator_no_call_waits_for_the_device() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    delivered = []
    total = Sum().to(device)
    with MetricCollector({"total": total}, None, lambda step, got: delivered.append((step, got["total"]))) as collector:
        for step in range(10):
            work = torch.ones(2**12, 2**12, device=device)
            total.update((work @ work).sum() / 2**36)
            collector.collect(step)
    assert delivered == [(step, 1.0) for step in range(10)]
