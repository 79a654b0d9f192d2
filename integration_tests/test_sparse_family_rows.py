"""Each sparse family gives the results of one process in every layout, in float64: losses, gradients, parameters."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, final
from unittest import mock

import pytest
from oracle_models import MaskedNextToken, samples
from torch import Tensor, nn

import d9d_modules.latent_attention
import d9d_modules.models.decoder_tensor_plan
import d9d_moe.experts
import d9d_moe.grouped_linear
from d9d_dist import DistributedContext, StageInfo
from d9d_dist.testing import differences
from d9d_loop import ModelProvider
from d9d_loop.testing import Around, Experiment, parse_layout, trace_layout
from d9d_modules import (
    CheckpointPolicy,
    DecoderForCausalLM,
    DecoderParams,
    DecoderWithMtp,
    GroupedQueryAttention,
    Qwen35Params,
    RMSNorm,
    YarnScaling,
    mtp_targets,
    parallelize_decoder,
)
from d9d_modules.models.decoder_mtp import MtpLayer
from d9d_modules.models.hybrid import HybridParams
from d9d_moe import (
    DeepseekV3Params,
    Glm4MoeParams,
    GptOssParams,
    GroupedLinear,
    Qwen3NextParams,
    Qwen35MoeParams,
    SharedExperts,
    SigmoidRouter,
    TopKRouter,
    parallelize_moe,
)
from d9d_peft import LoRA, inject
from d9d_pipeline import Inputs

RTOL = 1e-9
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rope_theta": 100.0,
    "initializer_range": 0.2,
    "num_experts": 8,
    "top_k": 3,
    "expert_intermediate_size": 8,
}
HYBRID: dict[str, Any] = {
    "rotary_dim": 4,
    "num_linear_key_heads": 2,
    "num_linear_value_heads": 4,
    "linear_key_dim": 3,
    "linear_value_dim": 5,
    "conv_width": 3,
    "shared_intermediate_size": 6,
    "intermediate_size": 6,
}


def family_params(family: str, num_layers: int) -> DecoderParams:
    """Return the hyperparameters of a family's rows."""
    sizes: dict[str, Any] = {**SIZES, "num_layers": num_layers}
    full = tuple(range(1, num_layers, 2))
    match family:
        case "glm" | "mtp":
            return Glm4MoeParams(
                **sizes,
                intermediate_size=20,
                rotary_dim=4,
                has_qkv_bias=True,
                has_qk_norm=True,
                num_dense_layers=1,
                num_groups=4,
                top_groups=2,
                routed_scale=2.5,
            )
        case "deepseek" | "moonlight":
            latent: dict[str, Any] = {**sizes, "head_dim": 3}
            del latent["num_kv_heads"]
            yarn = YarnScaling(factor=4.0, original_max_positions=8, mscale=1.0, mscale_all_dim=0.7)
            groups = {"q_rank": 6, "num_groups": 4, "top_groups": 2, "rope_scaling": yarn}
            latent |= groups if family == "deepseek" else {"q_rank": None, "num_shared_experts": 2}
            return DeepseekV3Params(
                **latent,
                kv_rank=7,
                rotary_dim=4,
                value_dim=5,
                intermediate_size=20,
                num_dense_layers=1,
                routed_scale=2.5,
            )
        case "qwen3_5_dense":
            of_experts = ("num_experts", "top_k", "expert_intermediate_size", "shared_intermediate_size")
            both: dict[str, Any] = {**sizes, **HYBRID, "intermediate_size": 20}
            return Qwen35Params(**{each: both[each] for each in both if each not in of_experts}, full_layers=full)
        case "gpt_oss":
            window: dict[str, Any] = {"sliding_window": 3, "sliding_layers": tuple(range(0, num_layers, 2))}
            return GptOssParams(**sizes, intermediate_size=8, swiglu_limit=0.5, **window)
        case "qwen3_next":
            return Qwen3NextParams(**sizes, **HYBRID, full_layers=full)
        case "qwen3_5":
            return Qwen35MoeParams(**sizes, **HYBRID, full_layers=full)
        case _:
            raise ValueError(f"no hyperparameters of {family}")


@final
@dataclass(frozen=True, slots=True)
class Row:
    """Family, layout, and options."""

    family: str
    layout: str
    checkpointing: CheckpointPolicy = "none"
    lora: bool = False

    @property
    def name(self) -> str:
        checkpointing = [] if self.checkpointing == "none" else [self.checkpointing]
        return ",".join([self.family, self.layout, *checkpointing, *(["lora"] if self.lora else [])])


@final
@dataclass(frozen=True, slots=True)
class FamilyProvider(ModelProvider):
    """Builds and parallelizes a family as a user does."""

    row: Row
    num_layers: int

    def build(self, stage: StageInfo) -> nn.Module:
        params = family_params(self.row.family, self.num_layers)
        is_mtp = self.row.family == "mtp"
        model = DecoderWithMtp(params, stage, num_mtp_layers=2) if is_mtp else DecoderForCausalLM(params, stage)
        if self.row.lora:
            inject(LoRA(r"_proj$", rank=2, alpha=4), model, is_part=stage.count > 1)
        for module in model.modules():
            if isinstance(module, TopKRouter | GroupedLinear | nn.Linear) and isinstance(module.bias, nn.Parameter):
                module.reset_parameters = partial(_draw, module, type(module).reset_parameters)
        return model

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        experts = None if self.row.family in DENSE else parallelize_moe
        parallelize_decoder(model, ctx, experts=experts, checkpointing=self.row.checkpointing)


def _draw(module: nn.Module, reset: Callable[..., None]) -> None:
    """Draw biases too, so that a bias that is lost or shifted changes the results."""
    reset(module)
    nn.init.normal_(module.get_parameter("bias"), std=0.5)


class MtpNextToken(MaskedNextToken):
    """Passes the targets of multi-token prediction to the model."""

    def inputs(self, batch: Any) -> Inputs:
        known = super().inputs(batch)
        targets = {"mtp_ids_BLK": batch["mtp_ids"], "mtp_labels_BLK": batch["mtp_labels"]}
        return Inputs(*known.first, **known.shared, **targets)


def _with_targets(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = (sample[name].unsqueeze(0) for name in ("input_ids", "labels", "documents"))
    ids, labels = mtp_targets(*rows, num_mtp_layers=2)
    return {**sample, "mtp_ids": ids[0], "mtp_labels": labels[0]}


def _trace(row: Row, num_layers: int, *, num_steps: int = 2, around: Around = nullcontext) -> dict[str, Any]:
    is_mtp = row.family == "mtp"
    experiment = Experiment(
        model=FamilyProvider(row, num_layers),
        batch=[_with_targets(each) for each in samples(ragged=True)] if is_mtp else samples(ragged=True),
        task=MtpNextToken() if is_mtp else MaskedNextToken(),
        num_steps=num_steps,
    )
    return trace_layout(experiment, parse_layout(row.layout), around=around)


@cache
def _one_process(family: str, num_layers: int, lora: bool, num_steps: int = 2) -> dict[str, Any]:
    return _trace(Row(family, "", lora=lora), num_layers, num_steps=num_steps)


def _differences(row: Row, *, num_steps: int = 2, around: Around = nullcontext) -> list[str]:
    layout = parse_layout(row.layout)
    num_layers = max(2, layout.mesh.pipeline_parallel * layout.schedule.build().stages_per_rank)
    trace = _trace(row, num_layers, num_steps=num_steps, around=around)
    expected = _one_process(row.family, num_layers, row.lora, num_steps)
    return [str(found) for found in differences(trace, expected, rtol=RTOL)]


FAMILIES = ("glm", "deepseek", "moonlight", "gpt_oss", "qwen3_next", "qwen3_5", "mtp")
DENSE = ("qwen3_5_dense",)
LAYOUTS = [
    "dp_shard=2",
    "dp_replicate=2",
    "cp_shard=2",
    "cp_replicate=2",
    "tp=2",
    "ep=2,dp_shard=2",
    "pp=2,microbatch=2",
    "ep=2,cp_shard=2,tp=2",
    "pp=2,ep=2,dp_shard=2,schedule=zb1p,microbatch=1",
    "pp=2,cp_shard=2,tp=2,microbatch=2",
    "pp=2,schedule=zbv,microbatch=2",
    "dp_shard=2,tp=2",
]
ROWS = [
    *(Row(family, layout) for family in FAMILIES for layout in LAYOUTS),
    *(Row(family, layout) for family in DENSE for layout in LAYOUTS if "ep=" not in layout),
    *(Row(family, "ep=2,dp_shard=2,tp=2", "full", lora=True) for family in FAMILIES),
    *(Row(family, "dp_shard=2,tp=2", "full", lora=True) for family in DENSE),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.sample("gpt_oss,ep=2,dp_shard=2", "glm,tp=2")
@pytest.mark.slow("qwen3_next,cp_shard=2", "mtp,pp=2,microbatch=2")
def test_each_family_equals_one_process(row: Row) -> None:
    found = _differences(row)
    assert not found, f"{len(found)} differences. First: {found[:4]}"


# --- deliberate bugs

Bug: TypeAlias = Callable[[], AbstractContextManager[object]]


def _all_experts_use_the_bias_of_the_first() -> AbstractContextManager[object]:
    real = d9d_moe.grouped_linear.bias_of_rows

    def first(bias_GO: Tensor, x_NI: Tensor, counts_G: Tensor) -> Tensor:
        return real(bias_GO[:1].expand_as(bias_GO), x_NI, counts_G)

    return mock.patch.object(d9d_moe.grouped_linear, "bias_of_rows", first)


def _clamped_experts_lose_their_residual() -> AbstractContextManager[object]:
    real = d9d_moe.experts.clamped_swiglu
    return mock.patch.object(
        d9d_moe.experts, "clamped_swiglu", lambda gate, up, **options: real(gate, up - 1, **options)
    )


def _the_router_ignores_its_bias() -> AbstractContextManager[object]:
    real = TopKRouter.forward

    def forward(self: TopKRouter, x_TD: Tensor) -> Any:
        with mock.patch.object(self, "bias", None):
            return real(self, x_TD)

    return mock.patch.object(TopKRouter, "forward", forward)


def _shared_experts_are_not_gated() -> AbstractContextManager[object]:
    return mock.patch.object(SharedExperts, "forward", lambda self, x: self.experts(x))


def _norms_are_not_zero_centered() -> AbstractContextManager[object]:
    real = RMSNorm.forward

    def forward(self: RMSNorm, *args: Any) -> Any:
        with mock.patch.object(self, "zero_centered", False):
            return real(self, *args)

    return mock.patch.object(RMSNorm, "forward", forward)


def _mtp_layers_are_not_sequence_parallel() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_modules.models.decoder_tensor_plan, "MtpLayer", type(None))


def _the_mtp_loss_reaches_only_the_last_layer() -> AbstractContextManager[object]:
    real = MtpLayer.forward

    def forward(self: MtpLayer, embedded_BLD: Tensor, hidden_BLD: Tensor, *args: Any, **options: Any) -> Any:
        return real(self, embedded_BLD, hidden_BLD.detach(), *args, **options)

    return mock.patch.object(MtpLayer, "forward", forward)


def _copies_of_the_embedding_differ() -> AbstractContextManager[object]:
    real = MtpLayer.forward

    def forward(self: MtpLayer, embedded_BLD: Tensor, *args: Any, **options: Any) -> Any:
        return real(self, embedded_BLD.detach(), *args, **options)

    return mock.patch.object(MtpLayer, "forward", forward)


def _latent_features_are_rotated_as_halves() -> AbstractContextManager[object]:
    real = d9d_modules.latent_attention.apply_rotary
    return mock.patch.object(
        d9d_modules.latent_attention, "apply_rotary", lambda x, tables, *, layout: real(x, tables, layout="half")
    )


def _experts_are_chosen_from_all_groups() -> AbstractContextManager[object]:
    return mock.patch.object(SigmoidRouter, "_mask_other_groups", lambda self, biased: biased)


def _the_softmax_scale_ignores_yarn() -> AbstractContextManager[object]:
    return mock.patch.object(YarnScaling, "temperature", return_value=1.0)


def _outputs_of_attention_are_not_gated() -> AbstractContextManager[object]:
    real = GroupedQueryAttention.forward

    def forward(self: GroupedQueryAttention, *args: Any, **options: Any) -> Any:
        with mock.patch.object(self, "gate_proj", None):
            return real(self, *args, **options)

    return mock.patch.object(GroupedQueryAttention, "forward", forward)


def _weights_of_experts_are_not_scaled() -> AbstractContextManager[object]:
    real = SigmoidRouter.forward

    def forward(self: SigmoidRouter, *args: Any) -> Any:
        with mock.patch.object(self, "scale", 1.0):
            return real(self, *args)

    return mock.patch.object(SigmoidRouter, "forward", forward)


def _layers_of_a_stage_are_counted_from_zero() -> AbstractContextManager[object]:
    real = HybridParams.mixer_kind
    return mock.patch.object(HybridParams, "mixer_kind", lambda self, index: real(self, 1))


MUTANTS: list[tuple[Bug, Row]] = [
    (_latent_features_are_rotated_as_halves, Row("deepseek", "tp=2")),
    (_experts_are_chosen_from_all_groups, Row("glm", "tp=2")),
    (_the_softmax_scale_ignores_yarn, Row("deepseek", "pp=2,microbatch=2")),
    (_outputs_of_attention_are_not_gated, Row("qwen3_5", "dp_shard=2,tp=2")),
    (_weights_of_experts_are_not_scaled, Row("moonlight", "cp_replicate=2")),
    (_layers_of_a_stage_are_counted_from_zero, Row("qwen3_5_dense", "dp_shard=2")),
    (_mtp_layers_are_not_sequence_parallel, Row("mtp", "ep=2,cp_shard=2,tp=2")),
    (_the_mtp_loss_reaches_only_the_last_layer, Row("mtp", "pp=2,microbatch=2")),
    (_copies_of_the_embedding_differ, Row("mtp", "pp=2,microbatch=2")),
    (_all_experts_use_the_bias_of_the_first, Row("gpt_oss", "ep=2,dp_shard=2")),
    (_clamped_experts_lose_their_residual, Row("gpt_oss", "ep=2,dp_shard=2")),
    (_the_router_ignores_its_bias, Row("gpt_oss", "ep=2,dp_shard=2")),
    (_shared_experts_are_not_gated, Row("qwen3_next", "cp_shard=2")),
    (_norms_are_not_zero_centered, Row("qwen3_next", "cp_shard=2")),
]


QUICK = {
    _the_mtp_loss_reaches_only_the_last_layer,
    _copies_of_the_embedding_differ,
    _clamped_experts_lose_their_residual,
    _norms_are_not_zero_centered,
}
"""At least one bug of each row that the default run compares."""


# The lane `jobs` of .ci/nightly catches the others.
@pytest.mark.slow
@pytest.mark.parametrize(("bug", "row"), MUTANTS, ids=[getattr(bug, "__name__", "") for bug, _ in MUTANTS])
@pytest.mark.sample(*(getattr(bug, "__name__", "") for bug, _ in MUTANTS if bug in QUICK))
def test_a_bug_is_caught(bug: Bug, row: Row) -> None:
    try:
        found = _differences(row, num_steps=1, around=bug)
    except AssertionError as error:
        found = [str(error)]  # ranks disagree with each other
    assert found
