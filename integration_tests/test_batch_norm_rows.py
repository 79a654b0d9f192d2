"""Batch norm in every layout: losses, gradients, norms, updates and running statistics equal one process."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import d9d_dist.data_parallel.batch_norm
from d9d_dist import DistributedContext, StageInfo, parallelize_replicate
from d9d_dist.testing import differences
from d9d_loop import Loss, ModelProvider, Task
from d9d_loop.testing import Around, Experiment, parse_layout, trace_layout

BATCH = [
    {"x": torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(row)) + row / 4, "weight": row % 3}
    for row in range(8)
]


@final
class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3, bias=False),  # A bias before a batch norm has no gradient.
            nn.BatchNorm2d(5, momentum=None),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(20, 4, bias=False),
            nn.BatchNorm1d(4, affine=False),
        )

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        # The loss depends on the running statistics, without a gradient.
        kept = torch.cat([buffer for name, buffer in self.named_buffers() if name.endswith("running_var")])
        return super().forward(input), kept


@final
class Provider(ModelProvider):
    late_init = False

    def __init__(self, *, replicate: bool = False) -> None:
        self._replicate = replicate

    def build(self, stage: StageInfo) -> nn.Module:
        return Convolutions()

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        if self._replicate:
            return parallelize_replicate(model, ctx.mesh_for("dense")["dp_replicate"])
        return super().parallelize(model, ctx)


@final
class Weighted(Task):
    def inputs(self, batch: dict[str, Tensor]) -> Mapping[str, Any]:
        return {"input": batch["x"]}

    def loss(self, outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Loss:
        logits, kept = outputs
        losses = logits.exp().mean(1) + kept.sum()
        return Loss((losses * batch["weight"]).sum(), weight=batch["weight"].sum())


@cache
def trace(layout: str, *, replicate: bool = False, around: Around | None = None) -> dict[str, Any]:
    experiment = Experiment(model=Provider(replicate=replicate), batch=BATCH, task=Weighted())
    options: dict[str, Any] = {} if around is None else {"around": around}
    return trace_layout(experiment, parse_layout(layout), **options)


@pytest.mark.parametrize(
    ("layout", "one_process"),
    [
        ("dp_replicate=2", ""),
        ("dp_shard=2", ""),
        ("dp_replicate=2,dp_shard=2", ""),
        ("dp_shard=2,microbatch=2", "microbatch=4"),
        ("dp_replicate=2,dp_shard=2,microbatch=1", "microbatch=4"),
    ],
)
@pytest.mark.slow(
    "dp_replicate=2,dp_shard=2-", "dp_replicate=2,dp_shard=2,microbatch=1-microbatch=4", "dp_replicate=2-"
)
def test_each_layout_equals_one_process_with_as_many_microbatches(layout: str, one_process: str) -> None:
    found = list(differences(trace(layout), trace(one_process)))
    assert not found, f"{len(found)} differences. First: {found[0]}"


def test_replicas_equal_one_process() -> None:
    found = list(differences(trace("dp_replicate=2", replicate=True), trace("")))
    assert not found, f"{len(found)} differences. First: {found[0]}"


def statistics_are_each_ranks_own() -> AbstractContextManager[object]:
    return mock.patch("d9d_loop.engine.model_build.synchronize_batch_norm")


def gradients_through_the_statistics_stay_on_their_rank() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_dist.data_parallel.batch_norm, "sum_over_ranks", lambda x, group: x * group.size())


def running_variances_are_biased() -> AbstractContextManager[object]:
    real = d9d_dist.data_parallel.batch_norm._moments

    def moments(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
        mean, var, count = real(x, group)
        return mean, var, count * 1e12

    return mock.patch.object(d9d_dist.data_parallel.batch_norm, "_moments", moments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [
        statistics_are_each_ranks_own,
        gradients_through_the_statistics_stay_on_their_rank,
        running_variances_are_biased,
    ],
)
def test_a_mutant_is_caught(bug: Around) -> None:
    assert _is_caught(bug)


def _is_caught(bug: Around) -> bool:
    try:
        return any(differences(trace("dp_shard=2", around=bug), trace("")))
    except AssertionError as error:  # ranks diverge, which the buffer check reports
        return "buffers differ between ranks after step 1" in str(error)
