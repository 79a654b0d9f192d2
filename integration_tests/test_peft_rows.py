"""Fine-tuning in every layout: LoRA and DoRA give the results of one process, through the Trainer."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, final

import pytest
import torch
from oracle import parse_cell
from oracle_decoders import FAMILIES, MORE_FAMILIES
from oracle_grid import RTOL
from oracle_models import VOCAB, MaskedNextToken, decoder, samples
from torch import Tensor, nn

from d9d_dist import (
    ColumnParallel,
    DistributedContext,
    RowParallel,
    StageInfo,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_dist.testing import differences
from d9d_loop import ModelProvider
from d9d_loop.testing import Experiment, parse_layout, trace_layout
from d9d_modules import LanguageModelHead, SplitTokenEmbedding
from d9d_peft import DoRA, FullTune, LoRA, PeftMethod, Stack, inject

DENSE = r"attention\.(q|k|v|o)_proj|feed_forward\.\w+_proj"
METHODS: dict[str, PeftMethod] = {
    "lora": LoRA(DENSE, rank=3, alpha=12),
    "dora": DoRA(DENSE, rank=3, alpha=12, rank_stabilized=True),
    "vocabulary": LoRA(r"embedding$|lm_head$|attention", rank=3, alpha=12),
    "tied vocabulary": LoRA(r"embedding$|lm_head$|attention", rank=3, alpha=12),
    "dora experts": Stack(DoRA(r"experts", rank=3, alpha=12), LoRA("attention", rank=2)),
    "experts": Stack(LoRA(r"experts", rank=3, alpha=12), LoRA("attention", rank=2), FullTune("norm")),
    "ends": Stack(LoRA(r"layers\.0\.attention", rank=3), FullTune("lm_head")),
    "new tokens": Stack(LoRA("layers", rank=2), FullTune(r"weight_new$")),
    **dict.fromkeys((*FAMILIES, *MORE_FAMILIES), LoRA(DENSE, rank=2, alpha=6)),
}


@final
@dataclass(frozen=True)
class Adapted(ModelProvider):
    """Fine-tuning of another provider's model."""

    base: ModelProvider
    method: PeftMethod

    def build(self, stage: StageInfo) -> nn.Module:
        model = self.base.build(stage)
        inject(self.method, model, is_part=stage.count > 1)
        return model

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        self.base.parallelize(model, ctx)


class SplitModel(nn.Module):
    """Model with trained new tokens in its vocabulary, and one block between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = SplitTokenEmbedding({"orig": VOCAB - 5, "new": 5}, 12, init_std=0.5)
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 12))
        self.head = LanguageModelHead(12, {"orig": VOCAB - 5, "new": 5}, init_std=0.5)

    def forward(self, ids: Tensor, *, labels: Tensor, position_ids: Tensor, document_ids_BL: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(ids)), labels=labels)


@final
@dataclass(frozen=True)
class SplitProvider(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return SplitModel()

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense = ctx.mesh_for("dense")
        parallelize_tensor(model, dense["tp"], {"layers.0": ColumnParallel(), "layers.2": RowParallel()})
        parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard")


def provider(method: str) -> ModelProvider:
    match method:
        case "new tokens":
            return SplitProvider()
        case "tied vocabulary":
            return decoder("tied", method="all_gather", checkpointing="full", num_layers=4)
        case "experts" | "dora experts":
            return decoder("moe", method="all_gather", checkpointing="none", num_layers=4)
        case _:
            return decoder("dense", method="all_gather", checkpointing="full", num_layers=4)


ROWS = (
    ("lora", "dp_shard=2,tp=2,microbatch=2"),
    ("lora", "pp=2,tp=2,schedule=zbv,microbatch=2"),
    ("lora", "dp_replicate=2,cp_shard=2"),
    ("dora", "tp=2"),
    ("dora", "pp=2,dp_shard=2,microbatch=2"),
    ("ends", "pp=4,microbatch=4"),
    ("experts", "tp=2"),
    ("experts", "pp=2,dp_shard=2,schedule=zb1p,microbatch=2"),
    ("experts", "ep=2,dp_shard=2"),
    ("experts", "pp=2,ep=2,tp=2,microbatch=2"),
    ("new tokens", "dp_shard=2,tp=2"),
    ("tied vocabulary", "dp_shard=2,tp=2"),
    ("vocabulary", "pp=2,dp_shard=2,schedule=zb1p,microbatch=2"),
    ("dora experts", "tp=2,dp_shard=2"),
    ("dora experts", "pp=2,ep=2,tp=2,microbatch=2"),
)
FAMILY_ROWS = (
    ("gemma3", "dp_shard=2,tp=2"),
    ("encoder", "pp=2,dp_shard=2"),
    *(
        (family, layout)
        for family in (*FAMILIES, *MORE_FAMILIES)
        for layout in ("tp=2", "pp=2", "dp_replicate=2,dp_shard=2")
    ),
)


def trace(method: str, layout: str) -> dict[str, Any]:
    if method in (*FAMILIES, *MORE_FAMILIES):
        experiment = parse_cell(f"{method},rows=packed").experiment
    else:
        experiment = Experiment(model=provider(method), batch=samples(ragged=True), task=MaskedNextToken())
    experiment = replace(experiment, model=Adapted(experiment.model, METHODS[method]))
    return trace_layout(experiment, parse_layout(layout))


@cache
def one_process(method: str) -> dict[str, Any]:
    return trace(method, "")


@pytest.mark.parametrize(("method", "layout"), [*ROWS, *FAMILY_ROWS])
@pytest.mark.sample("experts-ep=2,dp_shard=2")
@pytest.mark.slow("dora-tp=2", "ends-pp=4,microbatch=4")
def test_fine_tuning_in_a_layout_equals_one_process(method: str, layout: str) -> None:
    expected = one_process(method)
    found = list(differences(trace(method, layout), expected, rtol=RTOL))
    assert not found, f"{len(found)} differences. First: {found[0]}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sample("lora", "experts")
@pytest.mark.slow("dora", "new tokens", "ends")
def test_only_selected_parameters_are_trained(method: str) -> None:
    first, last = (one_process(method)[f"step {step}"]["gradients"] for step in (1, 3))
    assert first.keys() == last.keys()
    with torch.device("meta"):
        base = parse_cell(method).experiment.model if method in (*FAMILIES, *MORE_FAMILIES) else provider(method)
        model = Adapted(base, METHODS[method]).build(StageInfo(0, 1))
    assert last.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # After the first steps every parameter affects the loss, A as well as B.
    assert all(gradient.abs().max() > 1e-9 for gradient in last.values())
    assert any(name.endswith("lora_a") for name in last)
