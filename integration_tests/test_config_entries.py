"""Every entry of every family's `config.json` gives the results of `transformers`, or an error that names it."""

import json
import logging
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_modules import (
    GEMMA3,
    GLM4,
    LLAMA3,
    MISTRAL,
    MODERNBERT,
    QWEN2,
    QWEN3,
    QWEN3_5,
    DecoderForCausalLM,
    HuggingFaceFamily,
)
from d9d_modules.models.hugging_face_irrelevant import IRRELEVANT
from d9d_modules.models.hybrid import HybridParams
from d9d_moe import (
    DEEPSEEK_V3,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    SparseParams,
    sparse_from_hugging_face,
)
from d9d_state import StateMapper

REMOVED = "an entry that is removed"

# From rounding errors of 6e-8 over about a hundred operations of two layers; an edit changes more than 1e-3.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Family:
    """Family, and the sizes of its smallest configuration."""

    files: HuggingFaceFamily[Any]
    sizes: dict[str, Any]

    @property
    def reference(self) -> Any:
        """Class of the model in `transformers`."""
        import transformers

        return getattr(transformers, self.files.architecture)

    def mapper(self, params: Any) -> StateMapper:
        """Return the mapper of the weights in memory."""
        if isinstance(params, SparseParams):
            return sparse_from_hugging_face(params, layout="fused")
        return self.files.mapper(params)

    @property
    def tolerance(self) -> float:
        """Tolerance of the logits; a recurrence accumulates rounding errors."""
        return 20 * TOLERANCE if issubclass(self.files.params, HybridParams) else TOLERANCE


SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.5,
}
HEADS = {"num_key_value_heads": 1, "head_dim": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 6}
GROUPS = {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
LATENT = {
    **GROUPS,
    "num_key_value_heads": 2,
    "kv_lora_rank": 4,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
HYBRID = {
    **HEADS,
    **EXPERTS,
    "head_dim": 16,  # of which a quarter is rotated
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 2,
    "shared_expert_intermediate_size": 5,
    "num_experts": 4,
}
LINEAR = {name: size for name, size in HYBRID.items() if "expert" not in name and name != "moe_intermediate_size"}
BOTH_KINDS = ["full_attention", "sliding_attention"]
FAMILIES = {
    files.model_type: Family(files, {"pad_token_id": None, **sizes})
    for files, sizes in (
        (QWEN3, HEADS),
        (LLAMA3, HEADS),
        (QWEN3_MOE, {**HEADS, **EXPERTS, "num_experts": 4}),
        (DEEPSEEK_V3, {**LATENT, "first_k_dense_replace": 1, "num_mtp_layers": 0}),
        (GLM4_MOE_LITE, LATENT),
        (QWEN2, HEADS),
        (MISTRAL, {**HEADS, "sliding_window": None}),
        (MODERNBERT, {"layer_types": BOTH_KINDS, "local_attention": 4}),
        (GLM4, {**HEADS, "head_dim": 8}),
        (GEMMA3, {**HEADS, "query_pre_attn_scalar": 9}),
        (GLM4_MOE, {**HEADS, **GROUPS, "head_dim": 8, "num_mtp_layers": 0}),  # of which a half is rotated
        (GPT_OSS, {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3}),
        (QWEN3_NEXT, HYBRID),
        (QWEN3_5, LINEAR),
        (QWEN3_5_MOE, HYBRID),
    )
}
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 3},
    "gemma3_text": {"sliding_window": 3, "layer_types": BOTH_KINDS},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
THETA = {"rope_theta": 100.0}
SCALINGS = [
    YARN,
    {**YARN, **THETA},
    {**YARN, **THETA, "mscale": 0.7, "mscale_all_dim": 0.4},
    {**YARN, **THETA, "mscale_all_dim": 0.4},
    {**YARN, **THETA, "attention_factor": 1.5, "beta_fast": 2.0, "beta_slow": 0.5, "truncate": False},
    {"type": "yarn", "factor": 2.0, **THETA},
    {**THETA, "rope_type": "linear", "factor": 2.0},
    {**THETA, "rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0},
    {**THETA, "rope_type": "linear", "factor": 2.0, "attention_factor": 3.0},
    {**THETA, "rope_type": "dynamic", "factor": 2.0},
    {**THETA, "rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4},
    {
        **THETA,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4,
    },
    {**THETA, "rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0], "factor": 2.0},
    {**THETA, "rope_type": "default", "partial_rotary_factor": 0.5},
    {**THETA, "rope_type": "default", "factor": 2.0},
    {"full_attention": {**THETA, "rope_type": "default"}},
    {"full_attention": {**THETA, **YARN}, "sliding_attention": {"rope_theta": 50.0}},
    {"full_attention": THETA, "sliding_attention": {**THETA, "rope_type": "linear", "factor": 2.0}},
    {},
]
# Entries that transformers ignores. Some would change its models; a later version may read the others.
UNKNOWN = {"is_causal": False, "use_bidirectional_attention": True, "logit_scale": 2.0, "per_layer_config": {"0": {}}}
PLAUSIBLE: dict[str, list[Any]] = {
    "rope_parameters": [*SCALINGS, {**THETA, "rope_type": "new"}],
    "rope_scaling": SCALINGS,
    "hidden_act": ["gelu", "silu"],
    "hidden_activation": ["gelu", "gelu_pytorch_tanh"],
    "mlp_layer_types": [["dense", "sparse"], ["sparse", "dense"], ["sparse"] * 2, ["dense"] * 2, ["dense"]],
    "classifier_pooling": ["cls", "mean", "max"],
    "layer_types": [["sliding_attention"] * 2, ["full_attention"] * 2, ["full_attention"], ["linear_attention"] * 2],
    "mlp_only_layers": [[0], [1], [5], ["0"], [0.0]],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "noaux_tc"],
    "model_type": ["gpt2"],
    "quantization_config": [{"quant_method": "awq"}],
    "head_dim": [2, 4],
    "num_attention_heads": [1, 4],
    "qk_head_dim": [8, 12],
    "rms_norm_eps": [0.1],
    "tie_word_embeddings": [True, False],
    "first_k_dense_replace": [0, 2],
}
ANYTHING = [None, True, False, 0, 1, 2, 3, -1, 0.0, 0.5, 2.5, float("nan"), float("inf"), "1", [], {}, REMOVED]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(level)


@cache
def _base(family: str, *, sliding: bool) -> dict[str, Any]:
    """Return a configuration with every entry, as `transformers` writes it."""
    chosen = FAMILIES[family]
    windows: dict[str, Any] = (
        WINDOWS.get(family, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1})
        if sliding
        else {}
    )
    written = chosen.reference.config_class(**{**SIZES, **chosen.sizes, **windows}).to_dict()
    return json.loads(json.dumps({**written, "experts_implementation": "eager"}, default=str))


def _edited(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    if value is REMOVED:
        return {name: entry for name, entry in base.items() if name != key}
    return {**base, key: value}


def _reference(family: Family, config: dict[str, Any]) -> nn.Module | None:
    """Return the model of `transformers`; None if it cannot be built or run."""
    try:
        torch.manual_seed(0)
        built = family.reference.config_class.from_dict(deepcopy(config))
        built._attn_implementation = "eager"  # with SDPA, transformers ignores is_causal of a configuration
        model = family.reference(built).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
        _logits(model)
    except Exception:  # any exception means that transformers does not support this configuration
        return None
    return model


def _logits(model: nn.Module) -> Tensor:
    torch.manual_seed(1)  # for dropout
    ids = torch.arange(2 * 9).view(2, 9) * 7 % 11
    output = model(ids)
    return output if isinstance(output, Tensor) else output.logits


def _own(family: Family, params: Any, reference: nn.Module) -> nn.Module:
    mapper, model = family.mapper(params), DecoderForCausalLM(params)
    model.load_state_dict(mapper.apply_all(reference.state_dict()), strict=False)
    return model


def _check(family: Family, base: dict[str, Any], key: str, value: Any) -> str:
    return _outcome(family, _edited(base, key, value), [key])


def _outcome(family: Family, config: dict[str, Any], edited: list[str]) -> str:
    def refused(error: UserError) -> str:
        return "refused" if any(key in str(error) for key in edited) else f"refused, but not by name: {error}"

    try:
        params = family.files.read(config)
    except UserError as error:
        return refused(error)
    reference = _reference(family, config)
    if reference is None:
        return "transformers cannot"
    expected = _logits(reference)
    try:
        logits = _logits(_own(family, params, reference))
    except UserError as error:
        return refused(error)
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    return "equal" if error <= family.tolerance else f"logits that differ by {error:.2g}"


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sample("qwen3-True")
@pytest.mark.slow("qwen3-False")
def test_every_edit_is_applied_or_refused_with_the_name_of_the_entry(name: str, sliding: bool) -> None:
    family = FAMILIES[name]
    files = family.files
    if sliding and (name == "gpt_oss" or "sliding_window" not in files.used):
        pytest.skip("a family without these entries")
    base = _base(name, sliding=sliding)
    assert _check(family, base, "vocab_size", 11) == "equal", "the configuration itself"
    keys = ("layer_types", "max_window_layers", "num_hidden_layers", "sliding_window", "use_sliding_window")
    outcomes: dict[tuple[str, str], str] = {}
    for key in keys if sliding else dict.fromkeys([*base, *files.used, *IRRELEVANT, *files.irrelevant, *UNKNOWN]):
        is_used = key in files.used
        for value in [*PLAUSIBLE.get(key, []), *ANYTHING] if is_used else [UNKNOWN.get(key, 1)]:
            outcomes[key, repr(value)] = outcome = _check(family, base, key, value)
            expected = ["transformers cannot", "equal"] if key in {*IRRELEVANT, *files.irrelevant} else ["refused"]
            if is_used:
                expected = ["transformers cannot", "equal", "refused"]
            assert outcome in expected, f"{key} = {value!r}"
    assert list(outcomes.values()).count("equal") >= 5, outcomes


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_random_combinations_of_edits_are_applied_or_refused(name: str) -> None:
    """Three edits at once, of entries that the family reads; each edit alone is applied."""
    family, draw = FAMILIES[name], random.Random(0)  # noqa: S311
    base = _base(name, sliding=False)
    numbers = (0, 1, 2, 3, 4, 6, 8, 0.5, 2.5, True, False)
    edits = {key: [value for value in (*PLAUSIBLE.get(key, ()), *numbers) if value != base.get(key)] for key in base}
    applied = {
        key: [value for value in values if _check(family, base, key, value) == "equal"]
        for key, values in edits.items()
        if key in family.files.used
    }
    keys = [key for key, values in applied.items() if values]
    outcomes = []
    for _ in range(60):
        chosen = {key: draw.choice(applied[key]) for key in draw.sample(keys, 3)}
        outcomes.append(_outcome(family, {**base, **chosen}, [*chosen]))
        assert outcomes[-1] in ("transformers cannot", "equal", "refused"), chosen
    assert outcomes.count("equal") >= 40, outcomes
