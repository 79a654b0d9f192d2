"""Values that must be equal between ranks: batches of a data-parallel coordinate, learning rates, prompts."""

import copy
from collections import UserDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import MeshConfig, StageInfo, UserError
from d9d_dist.testing import RankError, run_ranks
from d9d_loop import Engine, EngineConfig, Loss, ModelProvider, Task
from d9d_loop.engine import microbatches
from d9d_loop.engine.batch_digest import digest_batches, find_difference, mix
from d9d_loop.resilience import BadStepConfig, StepGuard, bad_steps
from d9d_loop.resilience.same_values import Same
from d9d_pipeline import Inputs

IDS = torch.arange(12).view(2, 6)
Batch = dict[str, Any]


class _Squares(Task):
    def inputs(self, batch: Batch) -> Inputs:
        return Inputs(batch["x"])

    def loss(self, outputs: Tensor, batch: Batch) -> Loss:
        return Loss(outputs.square().sum(), weight=len(outputs))


TASK = _Squares()


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3))


class _Stages(ModelProvider):
    late_init = False

    def build(self, stage: StageInfo) -> nn.Module:
        return _Stage(stage)


class _Stage(nn.Module):
    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(index): nn.Linear(3, 3) for index in stage.layers(2)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def _engine(mesh: dict[str, int], folder: Path) -> Any:
    config = {"run": {"folder": folder}, "mesh": mesh, "health": {"enabled": False}, "precision": "parameters"}
    return Engine.open(EngineConfig.model_validate(config), model=_Stages(), task=TASK)


def _batches(rank: int, kind: str) -> list[Batch]:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(7))
    match kind:
        case "floats":
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))
        case "scale":
            x = x * (1 + rank)
        case "rounding":
            x = x * (1 + 1e-6 * rank)
        case "shapes":
            x = x[: 2 - rank]
    batch: Batch = {"x": x, "labels": torch.arange(4) + (rank if kind == "labels" else 0), "kind": "a"}
    if kind == "keys" and rank == 0:
        batch["more"] = 1
    return [{**batch, "kind": "ab"[rank]} if kind == "texts" else batch]


def _pass(kind: str, folder: Path) -> str:
    with _engine({"pipeline_parallel": 2}, folder) as engine:
        before = [each.clone() for each in engine.model.parameters()]
        try:
            engine.forward_backward(_batches(engine.ctx.rank, kind), TASK.loss)
            engine.step()
        except UserError as error:
            assert all(map(torch.equal, engine.model.parameters(), before))
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "name"),
    [("labels", "labels"), ("floats", "x"), ("scale", "x"), ("shapes", "x"), ("texts", "kind"), ("keys", "more")],
)
@pytest.mark.sample("labels-labels", "floats-x")
def test_ranks_of_a_coordinate_with_other_batches_are_an_error(kind: str, name: str, tmp_path: Path) -> None:
    for message in run_ranks(_pass, kind, tmp_path, world_size=2):
        assert message.startswith(
            "rank 1 got other batches than rank 0, which has the same data-parallel coordinate 0: "
            f"{name} of batch 0 differs; expected"
        )


def test_batches_may_differ_by_rounding(tmp_path: Path) -> None:
    assert run_ranks(_pass, "rounding", tmp_path, world_size=2) == ["", ""]


def _set_rate(kind: str, folder: Path) -> list[str]:
    found = []
    with _engine({"data_parallel_shard": 1, "data_parallel_replicate": 2}, folder) as engine:
        rank = engine.ctx.rank
        engine.forward_backward(_batches(0, ""), TASK.loss)
        engine.step(0.1)
        engine.forward_backward(_batches(0, ""), TASK.loss)
        before = [each.clone() for each in engine.model.parameters()]
        if kind == "factor":
            engine.set_learning_rates(1.0 + rank)
        if kind == "scheduler":
            engine.optimizer.param_groups[0]["lr"] = 0.1 + rank
        try:
            engine.step({"rate": 0.1 + rank, "one rank": 0.2 if rank else None}.get(kind))
        except UserError as error:
            found.append(str(error))
        assert all(map(torch.equal, engine.model.parameters(), before))
    return found


@pytest.mark.parametrize("kind", ["rate", "factor", "one rank", "scheduler"])
@pytest.mark.sample("rate", "scheduler")
def test_learning_rates_that_differ_between_ranks_are_an_error(kind: str, tmp_path: Path) -> None:
    for found in run_ranks(_set_rate, kind, tmp_path, world_size=2):
        assert len(found) == 1
        assert found[0].startswith(
            "step 2: the learning rates of step(learning_rate) or set_learning_rates(), or `only` of step(), differ"
        )


def _without_guard() -> str:
    with MeshConfig(data_parallel_replicate=2, data_parallel_shard=1).build() as ctx:
        model = _build()
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), ctx=ctx, task=TASK)
        engine.forward_backward(_batches(0, ""), TASK.loss)
        with pytest.raises(UserError, match=r"step 1: the learning rates of .* differ between ranks") as error:
            engine.step(0.1 + ctx.rank)
        return str(error.value)


def test_an_engine_without_a_given_guard_finds_other_learning_rates() -> None:
    assert len(set(run_ranks(_without_guard, world_size=2))) == 1


def _on_device(kind: str) -> tuple[bool, str]:
    """Run the path of accelerators, whose tensors are on the CPU here."""
    with mock.patch.object(bad_steps, "_is_on_host", return_value=False), MeshConfig(tensor_parallel=2).build() as ctx:
        model = _build()
        guard = StepGuard(torch.optim.SGD(model.parameters(), lr=0.1), config=BadStepConfig(), ctx=ctx)
        ids = IDS + ctx.rank if kind == "batches" else IDS
        digest = mix(ids, mix(ids, None)).double()
        same = Same(
            (1.0, 0.1 + ctx.rank if kind == "rates" else 0.1),
            torch.tensor([digest, -torch.inf, -digest, -torch.inf], dtype=torch.float64),
        )
        taken = guard.step(1, loss=torch.tensor(1.0), grad_norm=torch.tensor(1.0), same=same)
        try:
            guard.poll(settle=True)
        except UserError as error:
            return bool(taken), str(error)
        return bool(taken), ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [("", ""), ("rates", "step 1: the learning rates of step"), ("batches", "step 1: the batches of a data-parallel")],
)
def test_on_an_accelerator_the_update_is_skipped_and_the_host_raises_later(kind: str, message: str) -> None:
    for taken, found in run_ranks(_on_device, kind, world_size=2):
        assert taken is not bool(kind)
        assert found.startswith(message)
        assert bool(found) is bool(kind)


def test_digests_depend_on_each_integer_its_place_and_the_order_of_batches() -> None:
    first = {"ids": IDS, "mask": IDS > 3}
    changed = [IDS.clone(), IDS.flip(1), IDS.flip(0), IDS.int(), IDS.view(3, 4)]
    changed[0][1, 2] += 1
    assert digest_batches([first]) == digest_batches([{key: value.clone() for key, value in first.items()}])
    for other in changed:
        assert digest_batches([first]) != digest_batches([{"ids": other, "mask": IDS > 3}])
    assert digest_batches([first, {"ids": IDS + 1}]) != digest_batches([{"ids": IDS + 1}, first])
    digests = {int(mix(each, None)) for each in (*changed[:3], IDS)}
    assert len(digests) == 4
    assert int(mix(IDS, mix(IDS + 1, None))) != int(mix(IDS + 1, mix(IDS, None)))
    assert all(0 <= each < 2**50 for each in digests)


@dataclass
class _Sample:
    value: Any


FLOATS = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
ARRAY = np.arange(6).reshape(2, 3)
LEAVES: list[tuple[Any, Any]] = [
    (FLOATS, -FLOATS),
    (FLOATS, FLOATS.flip(0)),
    (FLOATS.bfloat16(), FLOATS.bfloat16() * 1.5),
    (torch.complex(FLOATS, FLOATS).conj(), torch.complex(FLOATS, FLOATS + 1).conj()),
    (ARRAY, ARRAY + 1),
    (ARRAY.T, ARRAY.reshape(3, 2)),
    (ARRAY[::-1], ARRAY),
    (ARRAY.astype(">f4"), ARRAY.astype(">f4") * 2),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (np.broadcast_to(ARRAY, (2, 2, 3)), np.broadcast_to(ARRAY + 1, (2, 2, 3))),
    (np.int32(3), np.int32(4)),
    (UserDict({"ids": IDS}), UserDict({"ids": IDS + 1})),
    (_Sample(IDS), _Sample(IDS + 1)),
    (torch.nan, torch.inf),
    (b"a", b"b"),
    (FLOATS.to_sparse(), FLOATS[:2].to_sparse()),
    (FLOATS.T.requires_grad_(), FLOATS),
    (0.5, None),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("leaf", "other"), LEAVES)
def test_digests_depend_on_each_leaf(leaf: Any, other: Any) -> None:
    assert digest_batches([{"x": leaf}]) == digest_batches([{"x": copy.deepcopy(leaf)}])
    assert digest_batches([{"x": leaf}]) != digest_batches([{"x": other}])
    assert digest_batches([{"x": leaf, "y": other}]) != digest_batches([{"x": other, "y": leaf}])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_samples_of_large_tensors_are_not_one_column(dtype: torch.dtype) -> None:
    rows = torch.ones(1 << 12, 64, dtype=dtype)
    other = rows.clone()
    other[:, 1] = 3
    assert digest_batches([{"x": rows}]) != digest_batches([{"x": other}])


def _rounded(values: Tensor) -> Tensor:
    """Return each value as one of its neighbors in bfloat16."""
    return (values.bfloat16().view(torch.int16) + 1).view(torch.bfloat16)


LOG_PROBS = -10 * torch.rand(2, 7, generator=torch.Generator().manual_seed(1))
NOISE = 2e-6 * torch.randn(64, generator=torch.Generator().manual_seed(1))
SPARSE = torch.tensor([0.0, 0.0, 0.0, 0.25, -3.0, 1e9, -torch.inf, torch.nan])
CLOSE: dict[str, tuple[Any, Any]] = {
    "bfloat16": (LOG_PROBS.bfloat16(), _rounded(LOG_PROBS)),
    "computed in bfloat16": (LOG_PROBS.bfloat16().float(), _rounded(LOG_PROBS).double().float()),
    "differences of equal policies": (NOISE, NOISE.flip(0)),
    "fills": (SPARSE, SPARSE * (1 + 1e-6)),
    "cancellation": (torch.tensor([1.0, -1.0, 0.002]), torch.tensor([1.0, -1.0, -0.002])),
    "numbers": ([0.25, 1e-4, 1e30, torch.nan, torch.inf], [0.2500001, 1.00001e-4, 1e30, torch.nan, torch.inf]),
    "arrays": (LOG_PROBS.numpy(), LOG_PROBS.numpy() * (1 + 1e-6)),
}
OTHER: dict[str, tuple[Any, Any]] = {
    "a value": (LOG_PROBS, LOG_PROBS + F.one_hot(torch.tensor([3, 5]), 7) * 0.5),
    "fills": (SPARSE, SPARSE + 0.1),
    "a fill": (SPARSE, SPARSE.nan_to_num(posinf=1.0, neginf=-1e9, nan=torch.nan)),
    "scale": (LOG_PROBS, LOG_PROBS * 1.1),
    "small": (torch.full((4,), 1e-4), torch.full((4,), 2e-4)),
    "number": ([0.0, 0.25], [1e-4, 0.25]),
    "order of numbers": ([0.5, 0.25], [0.25, 0.5]),
    "complex": (torch.complex(FLOATS, FLOATS), torch.complex(FLOATS, -FLOATS)),
}


def _differences() -> list[tuple[str, Any]]:
    with MeshConfig(tensor_parallel=2).build() as ctx:
        group = ctx.group_for("batch", "pp", "cp", "tp")
        # Three leaves: whether a difference counts does not depend on the place of a leaf.
        return [
            (name, find_difference([{"a": 1.0, "b": FLOATS, "x": pair[ctx.rank], "y": IDS}], group))
            for name, pair in {**{f"close {name}": pair for name, pair in CLOSE.items()}, **OTHER}.items()
        ]


def test_only_differences_by_rounding_are_accepted() -> None:
    first, second = run_ranks(_differences, world_size=2)
    assert first == second
    assert [name for name, found in first if found is None] == [f"close {name}" for name in CLOSE]
    found = dict(first)
    assert found["scale"] == (1, 0, "x of batch 0")
    assert found["number"] == (1, 0, "x.0 of batch 0")


def _call_alone(call: str, folder: Path) -> str:
    calls: dict[str, Callable[[Engine], object]] = {
        "weights()": lambda engine: list(engine.weights()),
        "save()": lambda engine: engine.save(),
        "load()": lambda engine: engine.load(),
        "score()": lambda engine: engine.score(_batches(0, ""), lambda outputs, batch: {"outputs": outputs}),
    }
    with _engine({"data_parallel_shard": 1, "data_parallel_replicate": 2}, folder) as engine:
        if engine.ctx.rank == 0:
            with pytest.raises(UserError) as error:
                calls[call](engine)
        else:
            with pytest.raises(UserError) as error:
                engine.forward_backward(_batches(0, ""), TASK.loss)
        return str(error.value)


@pytest.mark.parametrize("call", ["weights()", "save()", "load()", "score()"])
@pytest.mark.sample("weights()")
def test_a_call_of_one_rank_is_an_error(call: str, tmp_path: Path) -> None:
    for message in run_ranks(_call_alone, call, tmp_path, world_size=2):
        assert message.startswith(
            f"rank 1 called forward_backward() of the engine while rank 0 called {call}; expected"
        )


def _compare_nothing() -> AbstractContextManager[object]:
    return mock.patch.object(microbatches, "digest_batches", return_value=0)


def _compare_no_rates() -> AbstractContextManager[object]:
    return mock.patch.object(Same, "on_host", return_value=[0.0] * 4)


def _with_bug(bug: Callable[[], AbstractContextManager[object]], run: Callable[..., Any], *args: Any) -> Any:
    with bug():
        return run(*args)


@pytest.mark.parametrize(
    ("bug", "run", "kind", "missed"),
    [(_compare_nothing, _pass, "labels", ""), (_compare_no_rates, _set_rate, "rate", None)],
    ids=["ranks with other rows", "another rate on one rank"],
)
@pytest.mark.full
def test_without_the_comparison_ranks_differ_silently(
    bug: Callable[[], AbstractContextManager[object]], run: Any, kind: str, missed: str | None, tmp_path: Path
) -> None:
    """The comparison is what finds the fault: nothing else does."""
    if missed is None:
        with pytest.raises(RankError, match="AssertionError"):  # the update was applied
            run_ranks(_with_bug, bug, run, kind, tmp_path, world_size=2)
    else:
        assert run_ranks(_with_bug, bug, run, kind, tmp_path, world_size=2) == [missed] * 2
