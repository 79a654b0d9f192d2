"""QLoRA in layouts: adapters over a quantized base train as LoRA over its dequantized weights, through the Trainer."""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final
from unittest import mock

import pytest
import torch
from oracle_grid import RTOL
from oracle_models import MaskedNextToken, decoder, samples
from own_decoder import Decoder
from post_training import rows
from test_peft_rows import METHODS
from torch import Tensor, nn

from d9d_dist import DistributedContext, ModuleLateInit, StageInfo, UserError
from d9d_dist.testing import differences, run_ranks
from d9d_loop import Engine, EngineConfig, ModelProvider
from d9d_loop.tasks import NextTokenTask
from d9d_loop.testing import Around, Experiment, parse_layout, trace_layout
from d9d_peft import inject, quantize_base
from d9d_peft.quantized_base import QuantizedWeight
from d9d_state import StateMapper, save_model_state, sequential

BLOCK_SIZE = 2  # each rank of a row-parallel layer has whole blocks


@final
@dataclass
class Quantized(ModelProvider):
    """Adapters over a base that is quantized, or that has the dequantized values.

    Attributes:
        kind: Model of the oracle.
        folder: Folder of the dense weights, which are quantized while they are loaded; `None` to quantize what `build`
            draws.
        is_dense: True for the dequantized values in dense weights.
    """

    kind: str
    folder: Path | None = None
    is_dense: bool = False

    late_init = False

    @property
    def initial_weights(self) -> Path | None:
        return self.folder

    def build(self, stage: StageInfo) -> nn.Module:
        if not self.is_dense:
            return self._build(stage)[0]
        with torch.random.fork_rng():
            quantized, mapper = self._build(stage)
        model, _ = self._adapted(stage)
        for name in (group.outputs[0] for group in mapper.groups if len(group.outputs) > 1):
            layer = quantized.get_submodule(name.removesuffix(".weight"))
            dense = layer.get_submodule("quantized")(layer.get_parameter("weight"), torch.float64)
            model.get_parameter(name).data = dense
        return model

    def _build(self, stage: StageInfo) -> tuple[nn.Module, StateMapper]:
        model, injected = self._adapted(stage)
        return model, sequential(injected, quantize_base(model, block_size=BLOCK_SIZE))

    def _adapted(self, stage: StageInfo) -> tuple[nn.Module, StateMapper]:
        with torch.device("cpu" if self.folder is None else "meta"):
            model = _drawn(self.base, stage)
        injected = inject(METHODS["experts" if self.kind == "moe" else "lora"], model, is_part=stage.count > 1)
        _draw_adapters(model)
        return model, injected

    @property
    def base(self) -> Decoder:
        return decoder(self.kind, method="all_gather", checkpointing="full", num_layers=4)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        self.base.parallelize(model, ctx)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        _, mapper = self._adapted(StageInfo()) if self.is_dense else self._build(StageInfo())
        return sequential(self.base.state_mapper(model), mapper)


def _drawn(provider: Decoder, stage: StageInfo) -> nn.Module:
    """Build a model in float64 whose modules have drawn their values."""
    model = provider.build(stage).double()
    for module in model.modules():
        if isinstance(module, ModuleLateInit):
            module.reset_parameters()
    return model


def _draw_adapters(model: nn.Module) -> None:
    """Give each parameter of an adapter values that depend on its name only, also if the base is on `meta`."""
    for name, given in list(model.named_parameters()):
        if ".adapter." not in name:
            continue
        owner, _, key = name.rpartition(".")
        draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(given.shape, generator=draws, dtype=torch.float64) * 0.3
        model.get_submodule(owner).register_parameter(key, nn.Parameter(value))


def _experiment(kind: str, **options: Any) -> Experiment:
    """Return an experiment on a dense or sparse decoder; `packed`: supervised fine-tuning on packed documents."""
    if kind == "packed":
        return Experiment(model=Quantized("dense", **options), batch=rows(), task=NextTokenTask())
    return Experiment(model=Quantized(kind, **options), batch=samples(ragged=True), task=MaskedNextToken())


def _trained(trace: dict[str, Any]) -> dict[str, Any]:
    """Return a trace with the parameters of the adapters only: those of the base differ in form."""
    adapters = {name: value for name, value in trace["parameters"].items() if ".adapter." in name}
    assert adapters
    return {**trace, "parameters": adapters}


@cache
def _dense(kind: str) -> dict[str, Any]:
    return _trained(trace_layout(_experiment(kind, is_dense=True), parse_layout("")))


def _difference(kind: str, layout: str, *, streamed: bool = False, around: Around = nullcontext) -> str | None:
    if not streamed:
        found = trace_layout(_experiment(kind), parse_layout(layout), around=around)
    else:
        with TemporaryDirectory() as folder:
            torch.manual_seed(0)  # the seed of the job
            base = Quantized("dense" if kind == "packed" else kind).base
            model = _drawn(base, StageInfo())
            save_model_state(model, folder, base.state_mapper(model).inverse())
            experiment = _experiment(kind, folder=Path(folder))
            found = trace_layout(experiment, parse_layout(layout), around=around)
    difference = next(differences(_trained(found), _dense(kind), rtol=RTOL), None)
    return None if difference is None else str(difference)


ROWS = (
    ("dense", "dp_shard=2,tp=2,microbatch=2", True),
    ("dense", "", False),
    ("dense", "dp_replicate=2,dp_shard=2", False),
    ("dense", "tp=2,cp_shard=2", True),
    ("dense", "pp=2,dp_shard=2,schedule=zb1p,microbatch=2", True),
    ("dense", "pp=2,tp=2,schedule=zbv,microbatch=2", False),
    ("packed", "dp_shard=2,microbatch=2", False),
    ("packed", "pp=2,cp_shard=2,microbatch=2", True),
    ("moe", "ep=2,dp_shard=2", True),
    ("moe", "tp=2,dp_shard=2", False),
    ("moe", "pp=2,ep=2,tp=2,microbatch=2", True),
)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout", "streamed"), ROWS)
def test_a_quantized_base_trains_as_its_dequantized_weights(kind: str, layout: str, streamed: bool) -> None:
    assert _difference(kind, layout, streamed=streamed) is None


def _handed_over(kind: str, mesh: dict[str, int], folder: Path, is_dense: bool = False) -> dict[str, Tensor]:
    config = EngineConfig.model_validate(
        {"run": {"folder": folder}, "mesh": mesh, "health": {"enabled": False}, "optimizer": {"learning_rate": 0.1}}
    )
    torch.manual_seed(0)
    task = MaskedNextToken()
    with Engine.open(config, model=Quantized(kind, is_dense=is_dense), task=task) as engine:
        with pytest.raises(UserError, match=r"omit \d+ trained parameters.*save_adapters.*base_only=True"):
            engine.weights()
        if not is_dense:
            with pytest.raises(UserError, match=r"is computed from .* by the state mapper.*Use weights\(\) without sh"):
                list(engine.weights(shards=True, base_only=True))
        return {name: tensor.clone() for name, tensor in engine.weights(base_only=True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("dense", {"tensor_parallel": 2}),
        pytest.param("moe", {"data_parallel_shard": 2, "expert_parallel": 2}, marks=pytest.mark.full),
        pytest.param("moe", {"pipeline_parallel": 2, "data_parallel_shard": 2}, marks=pytest.mark.full),
    ],
)
def test_engine_weights_of_a_quantized_base_are_dequantized(kind: str, mesh: dict[str, int], tmp_path: Path) -> None:
    (expected,) = run_ranks(_handed_over, kind, {}, tmp_path, True, world_size=1)
    size = prod(degree for name, degree in mesh.items() if name != "expert_parallel")
    found = run_ranks(_handed_over, kind, mesh, tmp_path, world_size=size)
    assert {name for each in found for name in each} == expected.keys()
    assert any("layers.0.mlp" in name for name in expected), "names of Hugging Face"
    for each in found:
        assert all(torch.equal(tensor, expected[name]) for name, tensor in each.items())


def _scales_of_other_rows() -> AbstractContextManager[object]:
    real = QuantizedWeight.forward
    return mock.patch.object(
        QuantizedWeight, "forward", lambda self, codes, dtype: real(self, codes.roll(1, 0), dtype).roll(-1, 0)
    )


def _scales_are_not_split() -> AbstractContextManager[object]:
    """Let each tensor-parallel rank have the scales of the first rows."""

    def first(self: QuantizedWeight, codes: Tensor, dtype: torch.dtype) -> Tensor:
        rows = self.scales[..., :1, :].expand_as(self.scales)
        with mock.patch.object(self, "scales", nn.Parameter(rows, requires_grad=False)):
            return real(self, codes, dtype)

    real = QuantizedWeight.forward
    return mock.patch.object(QuantizedWeight, "forward", first)


@pytest.mark.full
@pytest.mark.parametrize("bug", [_scales_of_other_rows, _scales_are_not_split])
def test_a_deliberate_bug_is_caught(bug: Callable[[], AbstractContextManager[object]]) -> None:
    assert _difference("dense", "dp_shard=2", around=bug) is not None
