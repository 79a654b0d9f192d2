import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import d9d_loop.model._skipped_draws
import d9d_loop.model.built_model
from d9d_dist import StageInfo
from d9d_loop import FunctionProvider
from d9d_loop.model.built_model import BuiltModel, build_model, build_with_values


@pytest.fixture(autouse=True)
def _many_tensors_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(d9d_loop.model._skipped_draws, "_LARGE_BYTES", 256)


def _large() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _scaled() -> nn.Module:
    model = _large()
    model.gain = nn.Parameter(torch.randn(16, 8) * 0.02)
    model.small = nn.Parameter(torch.randn(3).abs() + 1)
    return model


def _loaded() -> nn.Module:
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


@pytest.mark.parametrize("build", [_large, _scaled, _loaded, _copied, _of_torch, _normed, _orthogonal, _frozen])
def test_the_structure_equals_that_of_a_real_build(build: Callable[[], nn.Module]) -> None:
    built, num_builds = _build(build)
    assert num_builds == 1
    expected, _ = build_with_values(FunctionProvider(lambda stage: build()), StageInfo(), seed=0)
    assert _structure(built.module) == _structure(expected)
    assert built.digests == _build(build)[0].digests


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
    if torch.rand(()) < 2:  # drawn after skipped draws: differs from a real build
        model.more = nn.Parameter(torch.zeros(3))
    return model


def _permutes() -> nn.Module:
    model = _large()
    generator = torch.Generator().manual_seed(0)
    nn.init.normal_(model[0].weight, generator=generator)
    model.first = torch.randperm(6, generator=generator).tolist()
    return model


def _keeps_an_unregistered_draw() -> nn.Module:
    model = _large()
    model.noise = [torch.randn(5)]
    return model


def _catches() -> nn.Module:
    model = _large()
    try:
        model.norm = float(model[0].weight.detach().norm())
    except RuntimeError:
        model.norm = 0.0
    return model


def _truncated() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.init.trunc_normal_(layer.weight)
    return layer


NEEDS_VALUES = [
    _reads_an_item,
    _reads_numpy,
    _reads_a_list,
    _branches,
    _permutes,
    _keeps_an_unregistered_draw,
    _catches,
    _truncated,
]


@pytest.mark.parametrize("build", NEEDS_VALUES)
def test_code_that_reads_values_is_rerun_with_them(build: Callable[[], nn.Module]) -> None:
    built, num_builds = _build(build)
    assert num_builds == 2
    expected, _ = build_with_values(FunctionProvider(lambda stage: build()), StageInfo(), seed=0)
    assert _structure(built.module) == _structure(expected)
    for name in ("norm", "total", "first"):
        assert getattr(built.module, name, None) == getattr(expected, name, None)


def _constant() -> nn.Module:
    model = _large()
    nn.init.constant_(model[0].weight, next(_COUNT))
    return model


def _another_part() -> nn.Module:
    model = _large()
    with torch.no_grad():
        model[0].weight[next(_COUNT) % 8] = 0
    return model


def _unseeded() -> nn.Module:
    model = _large()
    torch.seed()
    nn.init.normal_(model[0].weight)
    return model


def _other_generator() -> nn.Module:
    model = _large()
    nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(next(_COUNT)))
    return model


def _loads_other_values() -> nn.Module:
    model = _large()
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(64.0).view(8, 8) + next(_COUNT))
    return model


_COUNT = iter(range(100))


@pytest.mark.parametrize("build", [_constant, _another_part, _unseeded, _other_generator, _loads_other_values])
def test_digests_detect_other_values_without_drawing(build: Callable[[], nn.Module]) -> None:
    first, second = (_build(build) for _ in range(2))
    assert first[1] == second[1] == 1
    assert first[0].digests is not None
    assert second[0].digests is not None
    differ = {name for name, digest in first[0].digests.items() if second[0].digests[name] != digest}
    assert differ == {"0.weight"}


def test_models_below_the_size_limit_are_built_once_with_values() -> None:
    with mock.patch.object(d9d_loop.model._skipped_draws, "_LARGE_BYTES", 1 << 20):
        built, num_builds = _build(_truncated)
    assert num_builds == 1
    assert built.digests is not None


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
