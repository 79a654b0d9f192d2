from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from d9d_dist import DistributedContext, StageInfo, UserError
from d9d_loop import Loss, ModelProvider, Task, Trainer, TrainerConfig, pretrained_model, validate_config
from d9d_loop.model.pretrained_model import PretrainedProvider
from d9d_state import JsonValue, StateMapper, read_model_state, rename, save_model_state


class _Recognized:
    """A linear layer whose weight has another name in the folder."""

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self.folder, self.options = Path(folder), options

    def build(self, stage: StageInfo) -> nn.Module:
        return nn.Linear(2, 1, bias=False)

    def parallelize(self, model: nn.Module, ctx: DistributedContext, **options: Any) -> None:
        assert options == {"checkpointing": "full"}

    def state_mapper(self) -> StateMapper:
        return rename("exported", "weight")

    def load_mapper(self) -> StateMapper:
        return rename("released", "weight")

    def export_files(self) -> Mapping[str, JsonValue]:
        return {"config.json": {"model_type": "linear"}}


class _Regression(Task):
    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"]}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(outputs.square().sum(), weight=len(outputs))


@contextmanager
def _registered(*names: str) -> Generator[None]:
    entries = [EntryPoint(name, f"{__name__}:_Recognized", "d9d.model_recognizers") for name in names]
    with (
        mock.patch("d9d_loop.model.pretrained_model.entry_points", return_value=entries),
        mock.patch.object(EntryPoint, "load", return_value=_Recognized),
    ):
        yield


def _provider(folder: Path, **options: Any) -> ModelProvider:
    with _registered("one"):
        return pretrained_model(folder, parallelize={"checkpointing": "full"}, **options)


def test_a_job_starts_from_the_folder_and_exports_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = torch.tensor([[3.0, -2.0]])
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = weight
    save_model_state(model, tmp_path / "released", rename("weight", "released"))
    config = validate_config(
        TrainerConfig, {"steps": 1, "batch": {"global_size": 2}, "optimizer": {"learning_rate": 1e-12}}
    )
    data = [{"x": torch.ones(2)} for _ in range(4)]
    provider = _provider(tmp_path / "released", head="any")
    assert isinstance(provider, PretrainedProvider)
    assert isinstance(provider.recognized, _Recognized)
    assert provider.recognized.options == {"head": "any"}
    result = Trainer(config, model=provider, data=data, task=_Regression()).train()
    assert result.export_dir is not None
    exported = dict(read_model_state(result.export_dir))
    assert exported.keys() == {"exported"}
    torch.testing.assert_close(exported["exported"], weight)
    assert (result.export_dir / "config.json").exists()
    assert torch.equal(
        dict(read_model_state(result.export_dir, provider.load_mapper(model, result.export_dir)))["weight"], weight
    )
    assert _provider(tmp_path / "released", from_scratch=True).initial_weights is None


def test_the_error_without_a_recognizer_names_the_package_to_install(tmp_path: Path) -> None:
    with _registered(), pytest.raises(ModuleNotFoundError, match=r"Install it: pip install \./packages/d9d-mod"):
        pretrained_model(tmp_path)
    with (
        _registered("one", "two"),
        pytest.raises(UserError, match="expected one installed package"),
    ):
        pretrained_model(tmp_path)
