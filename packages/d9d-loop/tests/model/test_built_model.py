import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import FunctionProvider, ModelProvider
from d9d_loop.model.built_model import build_model


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
    first = build_model(provider, StageInfo(), seed=5, keep_values=False)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert build_model(provider, StageInfo(), seed=5, keep_values=False).digests == first.digests
    other = build_model(provider, StageInfo(), seed=6, keep_values=False).digests
    assert other is not None
    assert first.digests is not None
    assert not set(other.items()) & set(first.digests.items())


def test_other_ranks_keep_the_structure() -> None:
    built = build_model(FunctionProvider(lambda stage: nn.BatchNorm1d(3)), StageInfo(), seed=0, keep_values=False)
    assert all(tensor.is_meta for tensor in [*built.module.parameters(), *built.module.buffers()])
    assert list(built.tensors) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert built.digests is not None
    assert built.digests.keys() == built.tensors.keys()


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
    assert built.digests is None
    assert built.tensors["weight"].is_meta


class _Alone(nn.Module):
    """Model whose build fails if two run at the same time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        path = folder / "building"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        self.weight = nn.Parameter(torch.randn(1 << 20))
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
