import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from d9d_dist.testing import run_ranks
from d9d_metrics import (
    Accumulator,
    BinaryAUROC,
    BinaryClassification,
    BitsPerByte,
    Compose,
    ConfusionMatrix,
    Max,
    Metric,
    Min,
    ModelFlops,
    MulticlassClassification,
    MultilabelClassification,
    Perplexity,
    StepTime,
    Sum,
    Throughput,
    WeightedMean,
    accuracy,
    compute_metrics,
    f_beta,
    precision,
    recall,
)
from d9d_metrics.step_clock import StepSeconds
from d9d_metrics.sync import MetricSync, read_values, sync_metrics

Values = list[float]


class PerClassCount(Metric):
    """A metric with accumulators of two dims and several reductions."""

    def __init__(self) -> None:
        self.counts = Accumulator("sum", shape=[2, 3])
        self.largest = Accumulator("max", shape=[3])

    def accumulators(self) -> dict[str, Accumulator]:
        return {"counts": self.counts, "largest": self.largest}

    def update(self, values: torch.Tensor) -> None:
        self.counts.update(values)
        self.largest.update(values.amax(0))

    def compute(self) -> torch.Tensor:
        return self.counts.value.sum(0) - self.largest.value


def every_metric(values: Sequence[float]) -> dict[str, Metric]:
    """Return one of each metric type, updated with the values one by one."""
    total, mean, largest, smallest = Sum(), WeightedMean(), Max(), Min()
    bits, perplexity = BitsPerByte(), Perplexity()
    scores = {"a": accuracy("macro"), "p": precision("weighted"), "r": recall(None), "f": f_beta(2.0, "macro")}
    binary, labels, classes = (
        BinaryClassification(scores, threshold=0.0),
        MultilabelClassification(3, scores, threshold=0.0),
        Compose({"scores": MulticlassClassification(3, scores, top_k=2), "matrix": ConfusionMatrix(3)}),
    )
    binned, exact = BinaryAUROC(num_bins=16, logits=True), BinaryAUROC(num_bins=16, exact_samples=6, logits=True)
    steps = StepTime()
    for value in values:
        total.update(value)
        mean.update(value, abs(value) + 1)
        largest.update(value)
        smallest.update(value)
        bits.update(abs(value), 3)
        perplexity.update(abs(value) / 1e3, 2)
        steps.update(StepSeconds(abs(value), abs(value) / 4, abs(value) / 2))
        predictions_N3 = torch.tensor([[value, -value / 2, 100 - abs(value)]], dtype=torch.float64)
        is_true = torch.tensor([int(value * 7) % 2])
        binary.update(predictions_N3[:, 0], is_true)
        labels.update(predictions_N3, predictions_N3.int() % 2)
        classes.update(predictions_N3, torch.tensor([int(value * 7) % 3]))
        for auroc in (binned, exact):
            auroc.update(predictions_N3[:, 0], is_true)
    return {
        "sum": total,
        "mean": mean,
        "max": largest,
        "min": smallest,
        "bits": bits,
        "perplexity": perplexity,
        "binary": binary,
        "labels": labels,
        "classes": classes,
        "binned": binned,
        "exact": exact,
        "steps": steps,
    }


def computed_on_ranks(cases: list[list[Values]]) -> list[dict[str, float]]:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    return [compute_metrics(every_metric(case[rank]), group) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@settings(max_examples=4)
@given(data=st.data())
@pytest.mark.sample("1")
@pytest.mark.slow("2")
def test_synced_values_equal_one_process_for_any_split_of_the_data(world_size: int, data: st.DataObject) -> None:
    values = st.lists(st.floats(-1e3, 1e3, width=32), max_size=6)
    split = st.lists(values, min_size=world_size, max_size=world_size)
    cases = data.draw(st.lists(split, min_size=3, max_size=12))
    results = run_ranks(computed_on_ranks, cases, world_size=world_size)
    for rank_results in results:
        for case, result in zip(cases, rank_results, strict=True):
            expected = compute_metrics(every_metric([value for part in case for value in part]), None)
            # The samples may fit per rank but not in one process: then only the value over ranks is exact.
            fits = sum(map(len, case)) <= 6
            excluded = () if fits else ("exact/value", "exact/error_bound")
            for name in excluded:
                del expected[name]
            assert {k: v for k, v in result.items() if k not in excluded} == pytest.approx(
                expected, rel=1e-12, abs=1e-10, nan_ok=True
            )
    assert all(repr(result) == repr(results[0]) for result in results), "ranks disagree"


def count_collectives() -> tuple[int, list[float], list[float]]:
    dist.init_process_group("gloo")
    count = PerClassCount()
    count.update(torch.arange(6.0).view(2, 3) * (1 if dist.get_rank() == 0 else -1))
    metrics = {f"mean {i}": WeightedMean() for i in range(20)} | {"count": count, "max": Max(), "min": Min()}
    with torch.profiler.profile() as profile:
        synced = sync_metrics(metrics, dist.group.WORLD)
    num_collectives = sum(event.name == "gloo:all_reduce" for event in profile.events())
    return num_collectives, synced["count"].compute().tolist(), count.counts.value.flatten().tolist()


def test_all_metrics_share_one_collective_for_any_shapes() -> None:
    first, second = run_ranks(count_collectives, world_size=2)
    assert first[0] == second[0] == 1
    assert first[1] == second[1] == [-3.0, -4.0, -5.0]
    assert first[2] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "the local state changed"


def sync_thrice_over_a_mesh() -> tuple[list[float], float, float, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank = dist.get_rank()
    total, other, largest = Sum(), Sum(), Max()
    total.update(10.0**rank)
    other.update(-1.0)
    largest.update(math.nan if rank == 2 else float(rank))
    metrics = {"total": total, "other": other, "largest": largest}
    if rank == 3:
        metrics = dict(reversed(metrics.items()))
    both = [sync_metrics(metrics, mesh)["total"].compute().item() for _ in range(2)]
    row = compute_metrics({"total": total}, mesh["b"])["total"]
    synced = sync_metrics(metrics, mesh)
    return both, row, total.compute().item(), bool(synced["largest"].compute().isnan())


def test_repeated_syncs_over_a_mesh_accept_metrics_in_any_order() -> None:
    results = run_ranks(sync_thrice_over_a_mesh, world_size=4)
    assert [result[0] for result in results] == [[1111.0, 1111.0]] * 4
    assert [result[1] for result in results] == [11.0, 11.0, 1100.0, 1100.0]
    assert [result[2] for result in results] == [1.0, 10.0, 100.0, 1000.0]
    assert [result[3] for result in results] == [True] * 4


def test_without_a_group_metrics_are_copied() -> None:
    metric = Max()
    metric.update(1.0)
    synced = sync_metrics({"max": metric}, None)["max"]
    metric.update(2.0)
    assert (synced.compute().item(), metric.compute().item()) == (1.0, 2.0)


def test_no_metrics_give_no_values() -> None:
    assert sync_metrics({}, None) == {}
    assert compute_metrics({}, None) == {}


def work_of_uneven_ranks() -> list[dict[str, float]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    throughput, flops = Throughput(), ModelFlops(peak=100.0)
    if rank != 1:  # one rank has no work
        for _ in range(2):
            throughput.update(30, 0.5 + rank)
            flops.update(30, 0.5 + rank)
    metrics: dict[str, Metric] = {"throughput": throughput, "flops": flops}
    before = compute_metrics(metrics, dist.group.WORLD)
    throughput.reset()
    throughput.update(1, 2.0)
    return [before, compute_metrics(metrics, dist.group.WORLD)]


def test_rates_divide_the_work_of_all_ranks_by_the_longest_time() -> None:
    for before, after in run_ranks(work_of_uneven_ranks, world_size=3):
        expected = {"throughput": 120 / 5, "flops/flops_per_second": 120 / 5, "flops/mfu": 120 / (100 * (1 + 5))}
        assert before == pytest.approx(expected, rel=1e-12)
        assert after["throughput"] == 3 / 2


class LargeCounts(Metric):
    """Counts that float64 cannot represent exactly, as a scalar and as a matrix."""

    def __init__(self) -> None:
        self.one, self.many, self.sum = Accumulator("count"), Accumulator("count", shape=[2, 2]), Accumulator("sum")

    def compute(self) -> torch.Tensor:
        return torch.cat([self.one.value.view(1), self.many.value.flatten(), self.sum.value.long().view(1)])


def count_over_a_mesh() -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2, 2))
    large = LargeCounts()
    large.one.update(2**60 + dist.get_rank())
    large.many.update(torch.tensor([[2**53 + 1, -1], [-(2**40), 2**32 - 1]]))
    large.sum.update(1)
    synced = [sync_metrics({"large": large, "max": Max()}, over) for over in (mesh, None)]
    return [each["large"].compute().tolist() for each in synced]


def test_counts_are_exact_on_every_rank() -> None:
    for rank, (all_ranks, alone) in enumerate(run_ranks(count_over_a_mesh, world_size=4)):
        assert all_ranks == [2**62 + 6, 2**55 + 4, -4, -(2**42), 2**34 - 4, 4]
        assert alone == [2**60 + rank, 2**53 + 1, -1, -(2**40), 2**32 - 1, 1]


def sync_again_and_again() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2))
    total = Sum()
    metrics: dict[str, Metric] = {"sum": total, "min": Min(), "auroc": BinaryAUROC(exact_samples=2)}
    sync, values = MetricSync(metrics, mesh), []
    for step in range(3):
        total.update(step)
        pending = sync.start()
        total.update(1000.0)
        reduced = pending.wait()
        values.append(read_values({"sum": reduced["sum"].compute()})["sum"])
        total.reset()
    return values


def test_a_reused_sync_reduces_the_state_at_start() -> None:
    assert run_ranks(sync_again_and_again, world_size=4) == [[0.0, 4.0, 8.0]] * 4


def test_replaced_values_are_reduced() -> None:
    total, mean = Sum(), WeightedMean()
    first, second = MetricSync({"total": total, "mean": mean}, None), MetricSync({"total": total}, None)
    for sync in (first, second, first):
        total.update(1)
        mean.update(6, 2)
        sync.start().wait()
    total.accumulators()["total"].value = torch.tensor(10.0, dtype=torch.float64)
    total.to("cpu").update(1)
    for sync in (first, second):
        assert sync.start().wait()["total"].compute().item() == 11
    assert first.start().wait()["mean"].compute().item() == 3
    assert total.compute().item() == 11


def test_metrics_first_synced_in_inference_mode_can_be_updated_outside() -> None:
    count = PerClassCount()
    with torch.inference_mode():
        compute_metrics({"count": count}, None)
    count.update(torch.ones(2, 3))
    assert compute_metrics({"count": count}, None) == {"count/0": 1.0, "count/1": 1.0, "count/2": 1.0}
