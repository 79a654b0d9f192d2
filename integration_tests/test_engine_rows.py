"""The engine in every layout: uneven microbatches, several calls, scores, a reference and weights equal one process."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine_rows import Row, adapter_rows, by_hand, run_rows
from mutants import collectives_replaced
from torch import Tensor

import d9d_loop.engine.engine
import d9d_loop.engine.pipeline
import d9d_loop.engine.step_totals
import d9d_modules.vocabulary_scores
import d9d_peft
from d9d_dist import Region
from d9d_dist.testing import differences, run_ranks
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.engine.reference import ReferenceWeights
from d9d_loop.engine.step_totals import StepTotals
from d9d_loop.engine.train_step import TrainStep
from d9d_state.model_stream import gathered_weights

RTOL = 1e-9

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zb1p", "zbv", "dualpipev")

LAYOUTS: dict[str, tuple[dict[str, int], list[Row]]] = {
    "stages": ({"pipeline_parallel": 2}, [Row("tied" if kind == "1f1b" else "dense", kind) for kind in SCHEDULES]),
    "sharded": ({"data_parallel_shard": 2}, [Row("tied")]),
    "replicated": ({"data_parallel_replicate": 2}, [Row("dense")]),
    "tensor": ({"tensor_parallel": 2}, [Row("tied")]),
    "context": ({"context_parallel_shard": 2}, [Row(method=m) for m in ("all_gather", "all_to_all", "ring")]),
    "experts": ({"data_parallel_shard": 2, "expert_parallel": 2}, [Row("moe")]),
    "stages and sharded": ({"pipeline_parallel": 2, "data_parallel_shard": 2}, [Row("tied"), Row("moe", "zbv")]),
}
MORE_LAYOUTS: dict[str, tuple[dict[str, int], list[Row]]] = {
    "four shards": ({"data_parallel_shard": 4}, [Row("dense")]),
    "hybrid": ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, [Row("tied")]),
    "stages and context": (
        {"pipeline_parallel": 2, "context_parallel_shard": 2},
        [Row("tied", "interleaved_1f1b", "ring"), Row("moe", "zb1p")],
    ),
    "stages and tensor": ({"pipeline_parallel": 2, "tensor_parallel": 2}, [Row("tied", "zb1p"), Row("moe")]),
    "context and tensor": ({"context_parallel_shard": 2, "tensor_parallel": 2}, [Row("dense", method="all_to_all")]),
    "experts and stages": (
        {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2},
        [Row("moe", kind) for kind in SCHEDULES],
    ),
}


@cache
def _expected(model: str) -> dict[str, Any]:
    return run_ranks(by_hand, model, world_size=1)[0]


def _first_difference(
    degrees: Mapping[str, int], rows: Sequence[Row], around: Callable[[], AbstractContextManager[object]] | None = None
) -> str | None:
    world_size = prod(degree for name, degree in degrees.items() if name != "expert_parallel")
    by_rank = run_ranks(run_rows, degrees, rows, around, world_size=world_size)
    for index, row in enumerate(rows):
        traces = [traces[index] for traces in by_rank]
        shards = [trace.pop("shards") for trace in traces]
        expected = _expected(row.model)
        for rank, trace in enumerate(traces):
            for key, values in trace.items():
                there = {name: value for name, value in expected[key].items() if name in values}
                found = next(differences({key: values}, {key: there}, rtol=RTOL), None)
                if found is not None:
                    return f"{row}, rank {rank}: {found}"
        for key, values in expected.items():
            missing = values.keys() - {name for trace in traces for name in trace[key]}
            if missing:
                return f"{row}: no rank has {key}: {sorted(missing)}"
        if (problem := _difference_of_shards(shards, traces, expected["weights"])) is not None:
            return f"{row}: {problem}"
    return None


def _difference_of_shards(
    shards: Sequence[Sequence[tuple[str, Tensor, Region]]],
    traces: Sequence[Mapping[str, Any]],
    expected: Mapping[str, Tensor],
) -> str | None:
    """Return a tensor whose shards on all ranks are not exactly the gathered weights of the stage, or None."""
    gathered = {name: tensor for trace in traces for name, tensor in trace["weights"].items()}
    assembled = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for rank_shards in shards:
        for name, shard, region in rank_shards:
            region.of(assembled[name]).copy_(shard)
    return next((name for name in expected if not torch.equal(assembled[name], gathered[name])), None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample("sharded")
def test_the_engine_equals_one_process(layout: str) -> None:
    assert _first_difference(*LAYOUTS[layout]) is None


@pytest.mark.full
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_the_engine_equals_one_process_in_more_layouts(layout: str) -> None:
    assert _first_difference(*MORE_LAYOUTS[layout]) is None


ADAPTER_LAYOUTS: dict[str, dict[str, int]] = {
    "sharded": {"data_parallel_shard": 2},
    "stages": {"pipeline_parallel": 2},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel_shard": 2},
    "stages and tensor": {"pipeline_parallel": 2, "tensor_parallel": 2},
}


def _difference_of_adapters(
    degrees: dict[str, int], around: Callable[[], AbstractContextManager[object]] | None = None
) -> str | None:
    """Compare adapters and their reference with one process, and the reference with the model without adapters."""
    (expected,) = _adapters_in_one_process()
    expected = {**expected, "reference": _expected("dense")["scores before"]}
    for (found,) in run_ranks(adapter_rows, degrees, around, world_size=prod(degrees.values())):
        there = {key: {name: expected[key][name] for name in values} for key, values in found.items()}
        if (difference := next(differences(found, there, rtol=RTOL), None)) is not None:
            return str(difference)
    return None


@cache
def _adapters_in_one_process() -> list[dict[str, Any]]:
    return run_ranks(adapter_rows, {}, world_size=1)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["sharded", *(pytest.param(name, marks=pytest.mark.full) for name in list(ADAPTER_LAYOUTS)[1:])]
)
def test_the_reference_of_an_adapted_model_equals_the_model_without_adapters(layout: str) -> None:
    assert _difference_of_adapters(ADAPTER_LAYOUTS[layout]) is None
    (one,) = _adapters_in_one_process()
    assert next(differences(one["trained"], one["reference"], rtol=1e-3), None), "the adapters must be trained"


NAMED_LAYOUTS = {name: ADAPTER_LAYOUTS[name] for name in ("sharded", "stages and tensor")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", NAMED_LAYOUTS)
@pytest.mark.sample("sharded")
def test_one_adapter_is_trained_and_another_is_the_reference(layout: str) -> None:
    degrees = NAMED_LAYOUTS[layout]
    ((expected,),) = run_ranks(adapter_rows, {}, None, "frozen", world_size=1)
    for (found,) in run_ranks(adapter_rows, degrees, None, "frozen", world_size=prod(degrees.values())):
        there = {key: {name: expected[key][name] for name in values} for key, values in found.items()}
        assert next(differences(found, there, rtol=RTOL), None) is None
    reference, (one,) = expected["reference"], _adapters_in_one_process()
    assert all(torch.equal(value, expected["before"][name]) for name, value in reference.items())
    for others in (expected["trained"], one["reference"]):  # trained adapters, and none
        assert next(differences(reference, others, rtol=1e-3), None), "the reference must have its own adapters"


def _the_reference_keeps_its_adapters() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_peft, "adapters_off", return_value=nullcontext())


def _adapters_stay_off() -> AbstractContextManager[object]:
    real, entered = d9d_peft.adapters_off, []

    def staying(model: Any) -> AbstractContextManager[None]:
        entered.append(real(model))
        entered[-1].__enter__()
        return nullcontext()

    return mock.patch.object(d9d_peft, "adapters_off", staying)


@pytest.mark.full
@pytest.mark.parametrize("bug", [_the_reference_keeps_its_adapters, _adapters_stay_off])
def test_a_deliberate_bug_of_the_reference_is_caught(bug: Callable[[], AbstractContextManager[object]]) -> None:
    assert _difference_of_adapters(ADAPTER_LAYOUTS["sharded"], bug) is not None


def _each_rank_divides_by_its_own_weight() -> AbstractContextManager[object]:
    return collectives_replaced(d9d_loop.engine.step_totals, all_reduce=lambda *args, **kwargs: None)


def _stand_ins_count() -> AbstractContextManager[object]:
    real = TrainStep.forward_backward

    def counting(self: TrainStep, number: int, batches: Any, loss: Any, **options: Any) -> Any:
        own, values = options["num_own"], {}
        timeline = real(self, number, batches, loss, num_own=len(batches), values=values)
        options["values"].update({index: value for index, value in values.items() if index < own})
        return timeline

    return mock.patch.object(TrainStep, "forward_backward", counting)


def _the_weight_is_that_of_the_last_call() -> AbstractContextManager[object]:
    real = TrainStep.forward_backward

    def forgetting(self: TrainStep, *args: Any, **options: Any) -> Any:
        if self._totals is not None:
            self._totals = StepTotals(self._ctx.device)
        return real(self, *args, **options)

    return mock.patch.object(TrainStep, "forward_backward", forgetting)


def _scores_are_in_another_order() -> AbstractContextManager[object]:
    real = Pipeline.gather_tokens

    def swapped(self: Pipeline, values: Any) -> Any:
        return [{name: value.flip(0) for name, value in each.items()} for each in real(self, values)]

    return mock.patch.object(Pipeline, "gather_tokens", swapped)


@contextmanager
def _rows_are_joined_in_rank_order() -> Generator[None]:
    def joined(self: Any, tree: Any, *, dim: int = 1, gradient: str = "equal") -> Any:
        group = self._mesh.get_group()

        def gather(value: Tensor) -> Tensor:
            parts = [torch.empty_like(value) for _ in range(group.size())]
            dist.all_gather(parts, value.contiguous(), group=group)
            return torch.cat(parts, dim)

        return [{name: gather(value) for name, value in each.items()} for each in tree]

    with mock.patch.object(d9d_loop.engine.pipeline.ContextSplit, "join", joined):
        yield


def _the_reference_has_the_trained_weights() -> AbstractContextManager[object]:
    return mock.patch.object(ReferenceWeights, "swapped_in", return_value=nullcontext())


def _the_reference_stays() -> AbstractContextManager[object]:
    @contextmanager
    def staying(self: ReferenceWeights) -> Generator[None]:
        self._set([copy for _, copy in self._copies])
        yield

    return mock.patch.object(ReferenceWeights, "swapped_in", staying)


def _entropy_is_that_of_a_vocabulary_shard() -> AbstractContextManager[object]:
    def only_the_largest(tensor: Tensor, **options: Any) -> None:
        if tensor.dim() == 1:
            dist.all_reduce(tensor, **options)

    return collectives_replaced(d9d_modules.vocabulary_scores, all_reduce=only_the_largest)


@contextmanager
def _weights_yields_values_before_the_step() -> Generator[None]:
    real, first = TrainStep.update, {}

    def remembering(self: TrainStep, number: int) -> Any:
        first.update({id(self._model): {name: p.detach().clone() for name, p in self._model.named_parameters()}})
        return real(self, number)

    def stale(model: Any, *args: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(first[id(model)][name])
        return gathered_weights(model, *args)

    with (
        mock.patch.object(TrainStep, "update", remembering),
        mock.patch.object(d9d_loop.engine.engine, "gathered_weights", stale),
    ):
        yield


def _shards_are_placed_by_their_local_offsets() -> AbstractContextManager[object]:
    real = d9d_loop.engine.engine.weight_shards

    def placed(*args: Any) -> Any:
        for name, shard, region in real(*args):
            yield name, shard, Region((0,) * len(region.sizes), region.sizes)

    return mock.patch.object(d9d_loop.engine.engine, "weight_shards", placed)


MUTANTS: dict[Callable[[], AbstractContextManager[object]], str] = {
    _each_rank_divides_by_its_own_weight: "sharded",
    _stand_ins_count: "sharded",
    _the_weight_is_that_of_the_last_call: "replicated",
    _scores_are_in_another_order: "sharded",
    _rows_are_joined_in_rank_order: "context",
    _the_reference_has_the_trained_weights: "replicated",
    _the_reference_stays: "replicated",
    _entropy_is_that_of_a_vocabulary_shard: "tensor",
    _weights_yields_values_before_the_step: "sharded",
    _shards_are_placed_by_their_local_offsets: "sharded",
}


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "layout"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.sample("_each_rank_divides_by_its_own_weight-", "_entropy_is_that_of_a_vocabulary_shard-")
def test_a_deliberate_bug_is_caught(bug: Callable[[], AbstractContextManager[object]], layout: str) -> None:
    degrees, rows = LAYOUTS[layout]
    assert _first_difference(degrees, rows[:1], bug) is not None
