"""Emulated float8 in every layout that supports it: losses, gradients and updates equal one process."""

from dataclasses import dataclass
from functools import cache
from typing import Any, final

import pytest
import torch
from oracle_grid import RTOL
from oracle_models import VOCAB, MaskedNextToken, samples
from torch import nn

from d9d_dist import DistributedContext, MeshConfig, StageInfo, UserError
from d9d_dist.testing import differences, run_ranks
from d9d_loop import ModelProvider
from d9d_loop.testing import Experiment, parse_layout, trace_layout
from d9d_modules import CheckpointPolicy, Float8, Qwen3ForCausalLM, Qwen3Params, parallelize_decoder
from d9d_modules.float8 import Float8Recipe

PARAMS = Qwen3Params(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=32,
    initializer_range=0.2,
)


@final
@dataclass(frozen=True)
class InFloat8(ModelProvider):
    recipe: Float8Recipe | None
    checkpointing: CheckpointPolicy = "none"

    def build(self, stage: StageInfo) -> nn.Module:
        return Qwen3ForCausalLM(PARAMS, stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        float8 = None if self.recipe is None else Float8(recipe=self.recipe, emulate=True)
        parallelize_decoder(model, ctx, checkpointing=self.checkpointing, float8=float8)


def trace(provider: InFloat8, layout: str) -> dict[str, Any]:
    experiment = Experiment(model=provider, batch=samples(ragged=True), task=MaskedNextToken())
    return trace_layout(experiment, parse_layout(layout))


@cache
def one_process(recipe: Float8Recipe | None) -> dict[str, Any]:
    return trace(InFloat8(recipe), "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["dp_shard=2,microbatch=2", "dp_replicate=2,cp_shard=2", "pp=2,dp_shard=2,schedule=zb1p,microbatch=1"],
)
@pytest.mark.sample("dp_shard=2,microbatch=2")
def test_each_layout_equals_one_process(layout: str) -> None:
    expected = one_process("rowwise_with_gw_hp")
    found = list(differences(trace(InFloat8("rowwise_with_gw_hp", "full"), layout), expected, rtol=RTOL))
    assert not found, f"{len(found)} differences. First: {found[0]}"


def test_float8_changes_the_loss_by_rounding() -> None:
    losses = {recipe: one_process(recipe)["step 1"]["loss"] for recipe in (None, "rowwise_with_gw_hp")}
    assert 1e-5 < abs(losses["rowwise_with_gw_hp"] / losses[None] - 1) < 0.05


def test_tensor_parallel_ranks_are_refused() -> None:
    assert all("with tensor-parallel degree 2; expected 1" in message for message in run_ranks(_refusal, world_size=2))


def _refusal() -> str:
    with MeshConfig(tensor_parallel=2).build() as ctx, torch.device("meta"):
        with pytest.raises(UserError) as refused:
            InFloat8("rowwise").parallelize(Qwen3ForCausalLM(PARAMS), ctx)
        return str(refused.value)
