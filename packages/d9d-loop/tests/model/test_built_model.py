import copy
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import FunctionProvider, ModelProvider
from d9d_loop.model.built_model import BuiltModel, build_model, build_with_values


def _drawn() -> nn.Module:
    """Draw from every generator that is seeded."""
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight[0] = random.random()  # noqa: S311
        layer.weight[1] = float(np.random.rand())
    return layer


def test_a_single_rank_keeps_the_built_model() -> None:
    layer = nn.Linear(3, 3)
    built = build_model(FunctionProvider(lambda stage: layer), StageInfo(), seed=0, keep_values=True)
    assert built.module is layer
    assert not layer.weight.is_meta


def test_a_function_runs_under_the_seed_of_the_job() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    provider = FunctionProvider(lambda stage: nn.ParameterList([nn.Parameter(torch.rand(3))]))
    built = build_model(provider, StageInfo(), seed=5, keep_values=True)
    assert torch.equal(next(built.module.parameters()), expected)


def test_every_generator_is_seeded_and_restored() -> None:
    provider = FunctionProvider(lambda stage: _drawn())
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    build_model(provider, StageInfo(), seed=5, keep_values=False)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    (weight, _), (again, _), (other, _) = (
        build_with_values(provider, StageInfo(), seed=seed)[0].parameters() for seed in (5, 5, 6)
    )
    assert torch.equal(weight, again)
    assert not (weight == other).any()


def test_other_ranks_keep_the_structure() -> None:
    built = build_model(FunctionProvider(lambda stage: nn.BatchNorm1d(3)), StageInfo(), seed=0, keep_values=False)
    assert all(tensor.is_meta for tensor in [*built.module.parameters(), *built.module.buffers()])
    assert list(built.tensors) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


class _Frozen(nn.Sequential):
    """Keeps its batch norm in evaluation mode, as detectors do."""

    def train(self, mode: bool = True) -> "_Frozen":
        super().train(mode)
        self[0].eval()
        return self


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("keep_values", [False, True])
def test_modules_that_override_train_are_in_the_mode_that_they_choose(is_late: bool, keep_values: bool) -> None:
    def build(stage: StageInfo) -> nn.Module:
        return nn.Sequential(_Frozen(nn.BatchNorm1d(3), nn.Dropout()), nn.Sequential(nn.Dropout().eval()))

    provider = FunctionProvider(build, late_init=is_late)
    built = build_model(provider, StageInfo(), seed=0, keep_values=keep_values).module
    modes = {name: module.training for name, module in built.named_modules()}
    assert modes == {"": True, "0": True, "0.0": False, "0.1": True, "1": True, "1.0": False}


class _OnMeta(ModelProvider):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._make = build

    def build(self, stage: StageInfo) -> nn.Module:
        return self._make()


def _loaded() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    return layer


def _assigned() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2, device="cpu"))
    return layer


def _initialized() -> nn.Module:
    layer = nn.Linear(2, 2)
    nn.init.zeros_(layer.bias)
    return layer


def _applied() -> nn.Module:
    layer = nn.Sequential(nn.Linear(2, 2, bias=False))
    layer.apply(_fill)
    return layer


def _fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.fill_(1)


@pytest.mark.parametrize(
    ("build", "lost"),
    [
        (_loaded, "weight is written to outside of reset_parameters\n  bias is written to outside of"),
        (_assigned, "weight already has values"),
        (_initialized, "bias is written to outside of reset_parameters"),
        (_applied, "0.weight is written to outside of reset_parameters"),
    ],
)
def test_values_that_would_be_lost_on_meta_are_refused(build: Callable[[], nn.Module], lost: str) -> None:
    with pytest.raises(UserError, match=f"(?s)would be lost:\n  {lost}.*Set late_init = False"):
        build_model(_OnMeta(build), StageInfo(), seed=0, keep_values=True)
    provider = FunctionProvider(lambda stage: build(), late_init=True)
    with pytest.raises(UserError, match=f"would be lost:\n  {lost}"):
        build_model(provider, StageInfo(), seed=0, keep_values=True)


def test_values_of_reset_parameters_are_accepted() -> None:
    built = build_model(_OnMeta(lambda: nn.Embedding(4, 2, padding_idx=0)), StageInfo(), seed=0, keep_values=True)
    assert built.tensors["weight"].is_meta


class _Alone(nn.Module):
    """Model whose build fails if two run at the same time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        path = folder / "building"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        self.weight = nn.Parameter(torch.arange(1.0 + 2**20).normal_())  # cannot be built on `meta`
        path.unlink()


def _build_alone(folder: Path) -> int:
    for _ in range(10):
        build_model(FunctionProvider(lambda stage: _Alone(folder)), StageInfo(), seed=0, keep_values=False)
    return 1


def test_ranks_of_a_host_take_turns(tmp_path: Path) -> None:
    assert run_ranks(_build_alone, tmp_path, world_size=2) == [1, 1]


def test_an_error_of_the_function_propagates_and_releases_the_host() -> None:
    def build(stage: StageInfo) -> Any:
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            build_model(FunctionProvider(build), StageInfo(), seed=0, keep_values=False)


def _large() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _scaled() -> nn.Module:
    model = _large()
    model.gain = nn.Parameter(torch.randn(16, 8) * 0.02)
    model.small = nn.Parameter(torch.randn(3).abs() + 1)
    return model


def _filled_by_state() -> nn.Module:
    model = _large()
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    return model


def _copied() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, copy.deepcopy(layer))


def _of_torch() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 8, padding_idx=3), nn.LSTM(8, 8), nn.Transformer(8, 2, 1, 1, 8))


def _normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


def _orthogonal() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.init.orthogonal_(layer.weight)
    return layer


def _frozen() -> nn.Module:
    model = _large()
    model[0].requires_grad_(False).eval()
    model[1].weight = model[0].weight
    return model


def _truncated() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.init.trunc_normal_(layer.weight)
    return layer


def _has_rates() -> nn.Module:
    model = _large()
    model.rates = torch.linspace(0, 1, 3).tolist()
    model.table = [torch.arange(4.0)]
    return model


STRUCTURES = [_large, _scaled, _filled_by_state, _copied, _of_torch, _orthogonal, _frozen, _truncated, _has_rates]


@pytest.mark.parametrize("build", STRUCTURES)
def test_the_structure_equals_that_of_a_real_build(build: Callable[[], nn.Module]) -> None:
    built, num_builds = _build(build)
    assert num_builds == 1
    expected, _ = build_with_values(FunctionProvider(lambda stage: build()), StageInfo(), seed=0)
    assert _structure(built.module) == _structure(expected)
    assert getattr(built.module, "rates", None) == getattr(expected, "rates", None)
    assert not any(table.is_meta for table in getattr(built.module, "table", ()))


def _reads_an_item() -> nn.Module:
    model = _large()
    model.norm = float(model[0].weight.detach().norm())
    return model


def _reads_numpy() -> nn.Module:
    model = _large()
    model.total = model[0].weight.detach().numpy().sum()
    return model


def _reads_a_list() -> nn.Module:
    model = _large()
    model.first = model[0].weight.tolist()
    return model


def _branches() -> nn.Module:
    model = _large()
    if torch.randint(9, ()) < 9:  # its generator has not advanced: differs from a build with values
        model.more = nn.Parameter(torch.zeros(3))
    return model


def _keeps_an_unregistered_draw() -> nn.Module:
    model = _large()
    model.noise = [torch.randn(5)]
    return model


def _keeps_an_object() -> nn.Module:
    model = _large()
    model.queue = SimpleNamespace(rows=torch.zeros(2))
    return model


def _draws_into_a_list() -> nn.Module:
    model = _large()
    model.noise = [torch.arange(3.0).normal_()]
    return model


def _catches() -> nn.Module:
    model = _large()
    try:
        model.norm = float(model[0].weight.detach().norm())
    except RuntimeError:
        model.norm = 0.0
    return model


NEEDS_VALUES = [
    _reads_an_item,
    _reads_numpy,
    _reads_a_list,
    _branches,
    _keeps_an_unregistered_draw,
    _keeps_an_object,
    _draws_into_a_list,
    _catches,
]


@pytest.mark.parametrize("build", NEEDS_VALUES)
def test_code_that_reads_values_is_rerun_with_them(build: Callable[[], nn.Module]) -> None:
    built, num_builds = _build(build)
    assert num_builds == 2
    expected, _ = build_with_values(FunctionProvider(lambda stage: build()), StageInfo(), seed=0)
    assert _structure(built.module) == _structure(expected)
    for name in ("norm", "total", "first"):
        assert getattr(built.module, name, None) == getattr(expected, name, None)
    assert torch.equal(_first_of(built.module), _first_of(expected))


def _first_of(module: Any) -> torch.Tensor:
    """Return the tensor that a module keeps outside of its registries, if any."""
    return getattr(module, "noise", [getattr(module, "queue", SimpleNamespace(rows=torch.empty(0))).rows])[0]


def test_a_build_that_begins_on_meta_and_reads_weights_reads_them_once() -> None:
    num_reads: list[int] = []

    def build(stage: StageInfo) -> nn.Module:
        with torch.device("meta"):
            layer = nn.Linear(2, 2)
        num_reads.append(1)
        layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, assign=True)
        return layer

    built = build_model(FunctionProvider(build), StageInfo(), seed=0, keep_values=False)
    assert len(num_reads) == 1
    assert built.without_values == frozenset()


def test_a_build_on_meta_without_a_late_init_is_an_error() -> None:
    def build(stage: StageInfo) -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(2, 2)

    with pytest.raises(UserError, match="the model was built without values for weight, bias; expected real tensors"):
        build_model(FunctionProvider(build), StageInfo(), seed=0, keep_values=False)


def _build(build: Callable[[], nn.Module]) -> tuple[BuiltModel, int]:
    """Return the structure, and the number of calls of the function."""
    calls: list[int] = []

    def counted(stage: StageInfo) -> nn.Module:
        calls.append(1)
        return build()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        built = build_model(FunctionProvider(counted), StageInfo(), seed=0, keep_values=False)
    return built, len(calls)


def _structure(module: nn.Module) -> object:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return [
        (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, type(tensor))
        for name, tensor in tensors
    ], [(name, part.training) for name, part in module.named_modules()]
