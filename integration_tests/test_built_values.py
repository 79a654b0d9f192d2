"""A function's model trains as in a plain torch loop, in every layout; deliberate bugs are caught."""

import contextlib
import io
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import d9d_dist.values.model_values
import d9d_loop.engine.model_build
import d9d_loop.model.built_model
from d9d_dist import StageInfo
from d9d_dist.testing import RankError, full_parameters, run_ranks
from d9d_dist.values.model_values import built_values
from d9d_loop import Finished, Loss, ModelReady, Task, Trainer, TrainerConfig, validate_config

NUM_STEPS, LEARNING_RATE, SEED = 3, 0.05, 5
Values = dict[str, Tensor]
Bug = Callable[[], AbstractContextManager[object]]


class _Tagger(nn.Module):
    """Model with values set by its constructor: random and constant ones, loaded and frozen layers, ties, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6, padding_idx=0)
        self.position = nn.Parameter(torch.randn(5, 6) * 0.3)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.mix.load_state_dict({"weight": torch.randn(6, 6) / 3, "bias": torch.full((6,), 0.1)})
        self.mix.weight.requires_grad_(False)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("shift", torch.randn(6), persistent=False)
        self.scale: Tensor
        self.shift: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids) + self.position)
        x = x + self.attention(x, x, x)[0]
        return self.head(torch.tanh(self.mix(x)) * self.scale + self.shift)


def _build(stage: StageInfo | None = None) -> nn.Module:
    return _Tagger().double()


def _total(outputs: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), ids.flatten(), reduction="sum")


class _Copy(Task):
    def inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"ids": batch}

    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        return Loss(_total(outputs, batch), weight=batch.numel())


def _data() -> list[Tensor]:
    return list(torch.randint(0, 13, (8, 5), generator=torch.Generator().manual_seed(2)))


@cache
def _plain_loop() -> tuple[Values, Values]:
    """Return the tensors before and after training without d9d."""
    torch.manual_seed(SEED)
    model, ids = _build(), torch.stack(_data())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    before = {name: value.clone() for name, value in _tensors(model).items()}
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        (_total(model(ids), ids) / ids.numel()).backward()
        optimizer.step()
    return before, _tensors(model)


def _tensors(model: nn.Module) -> Values:
    return {**full_parameters(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def _train(folder: Path, mesh: dict[str, int], around: Bug, build: Callable[..., nn.Module]) -> dict[str, Any]:
    sections: dict[str, Any] = {"mesh": mesh, "trackers": (), "export": False, "logging": {"progress": False}}
    sections["resilience"] = {"health": {"enabled": False}}
    values = {"steps": NUM_STEPS, "seed": SEED, "batch": {"global_size": 8}, "run": {"folder": folder}}
    config = validate_config(TrainerConfig, {**values, **sections, "gradients": {"max_norm": None}})
    trace: dict[str, Any] = {}
    printed = io.StringIO()
    with around(), contextlib.redirect_stdout(printed):
        trainer = Trainer(
            config,
            model=build,
            data=_data(),
            task=_Copy(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            lr_schedule=lambda step: 1.0,
        )
        trainer.events.on(ModelReady, lambda ready: trace.update(before=_tensors(ready.model)))
        trainer.events.on(Finished, lambda done: trace.update(after=_tensors(done.model)))
        trainer.train()
    return {**trace, "printed": "built other values" in printed.getvalue()}


def _difference(traces: list[dict[str, Any]]) -> str | None:
    """Return the first difference from the plain loop."""
    before, after = _plain_loop()
    for rank, trace in enumerate(traces):
        if trace["before"].keys() != before.keys() or trace["after"].keys() != after.keys():
            return f"rank {rank} has other tensors"
        for name, value in before.items():
            if not torch.equal(trace["before"][name], value):
                return f"rank {rank} starts from another {name}"
        for name, value in after.items():
            if not torch.linalg.vector_norm(trace["after"][name] - value) <= 1e-9 * torch.linalg.vector_norm(value):
                return f"rank {rank} trained another {name}"
    return None


MESHES = [
    {},
    {"data_parallel_replicate": 2},
    {"data_parallel_shard": 2},
    {"data_parallel_replicate": 2, "data_parallel_shard": 2},
]


@pytest.mark.slow(str(MESHES[-1]))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_equals_a_plain_loop(tmp_path: Path, mesh: dict[str, int]) -> None:
    world_size = 2 ** len(mesh)
    assert _difference(run_ranks(_train, tmp_path, mesh, nullcontext, _build, world_size=world_size)) is None


def _replace(module: Any, name: str, make: Callable[..., Any]) -> AbstractContextManager[object]:
    return mock.patch.object(module, name, partial(make, getattr(module, name)))


def _values_are_drawn_anew() -> AbstractContextManager[object]:
    def place(original: Any, models: Any, *args: Any, **kwargs: Any) -> None:
        original(models, *args, **kwargs)
        with torch.no_grad():
            models[0].norm.weight.to_local().fill_(0.5)

    return _replace(d9d_loop.engine.model_build, "place_values", place)


def _buffers_are_dropped() -> AbstractContextManager[object]:
    def values(original: Any, *args: Any, **kwargs: Any) -> Values:
        found = original(*args, **kwargs)
        return {name: value * 0 if name in ("scale", "shift") else value for name, value in found.items()}

    return _replace(d9d_loop.engine.model_build, "_values_of", values)


@contextmanager
def _ties_are_broken() -> Generator[None]:
    def build(original: Any, *args: Any, **kwargs: Any) -> tuple[nn.Module, Values]:
        model, _ = original(*args, **kwargs)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model, built_values(model)

    with (
        _replace(d9d_loop.model.built_model, "build_with_values", build),
        _replace(d9d_loop.engine.model_build, "build_with_values", build),
    ):
        yield


def _frozen_parts_are_thawed() -> AbstractContextManager[object]:
    def move(original: Any, model: nn.Module) -> None:
        original(model)
        model.requires_grad_()

    return _replace(d9d_loop.model.built_model, "move_to_meta", move)


def _rows_of_a_block_are_shifted() -> AbstractContextManager[object]:
    def send(original: Any, parts: Any, block: Tensor, **kwargs: Any) -> None:
        original(parts, block, **kwargs)
        block.copy_(block.roll(1, 0))

    return _replace(d9d_dist.values.model_values, "_send", send)


def _every_rank_gets_the_first_shard() -> AbstractContextManager[object]:
    def send(original: Any, parts: Any, block: Tensor, **kwargs: Any) -> None:
        original(None if parts is None else [parts[0]] * len(parts), block, **kwargs)

    return _replace(d9d_dist.values.model_values, "_send", send)


BUGS = [
    _values_are_drawn_anew,
    _buffers_are_dropped,
    _ties_are_broken,
    _frozen_parts_are_thawed,
    _rows_of_a_block_are_shifted,
    _every_rank_gets_the_first_shard,
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(tmp_path: Path, bug: Bug) -> None:
    assert _difference(run_ranks(_train, tmp_path, {"data_parallel_shard": 2}, bug, _build, world_size=2)) is not None


def _captured(stage: StageInfo) -> nn.Module:
    """Build the model, whose mixing layer gets its bias from a function that captured the parameter."""
    model = _build()
    mix = model.get_submodule("mix")
    bias = mix.get_parameter("bias")
    mix.forward = lambda x: F.linear(x, mix.get_parameter("weight"), bias)
    return model


def _captures_are_not_refused() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_dist.values.model_values, "_check_no_stale_reference")


def test_a_stale_capture_is_caught_if_it_is_not_refused(tmp_path: Path) -> None:
    mesh = {"data_parallel_shard": 2}
    with pytest.raises(RankError, match=r"mix\.forward holds mix\.bias"):
        run_ranks(_train, tmp_path / "refused", mesh, nullcontext, _captured, world_size=2)
    traces = run_ranks(_train, tmp_path / "stale", mesh, _captures_are_not_refused, _captured, world_size=2)
    assert "trained another" in str(_difference(traces))


def _unseeded(stage: StageInfo) -> nn.Module:
    model = _build()
    torch.seed()
    nn.init.normal_(model.get_parameter("position"))
    return model


@contextmanager
def _differences_are_not_compared() -> Generator[None]:
    with mock.patch.object(d9d_loop.engine.model_build, "report_different_values"):
        yield


@pytest.mark.parametrize(("bug", "is_told"), [(nullcontext, True), (_differences_are_not_compared, False)])
def test_values_of_rank_0_are_used_if_ranks_build_different_values(tmp_path: Path, bug: Bug, is_told: bool) -> None:
    first, second = run_ranks(_train, tmp_path, {"data_parallel_replicate": 2}, bug, _unseeded, world_size=2)
    assert first["printed"] is is_told
    assert all(torch.equal(first["after"][name], value) for name, value in second["after"].items())
