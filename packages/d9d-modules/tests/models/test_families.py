"""Comparison of every dense family with an independent implementation, `transformers`, on random configurations."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.testing import KeepFloat64, assert_trees_close
from d9d_modules import (
    GEMMA3,
    GLM4,
    MISTRAL,
    MODERNBERT,
    QWEN3,
    DecoderForCausalLM,
    GroupedQueryParams,
    HuggingFaceFamily,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    YarnScaling,
)
from d9d_modules.compiling import compile_layers
from d9d_modules.models import pretrained
from d9d_modules.models.hybrid import HybridParams
from d9d_modules.models.pretrained import known_families
from d9d_state import StateMapper, load_model_state, save_model_state

# Families of hybrids are compared in `test_sparse_families.py` of d9d-moe.
FAMILIES: dict[str, HuggingFaceFamily[Any]] = {
    family.model_type: family for family in pretrained.FAMILIES if not issubclass(family.params, HybridParams)
}
SCALINGS = (
    None,
    LinearScaling(factor=3.0),
    NtkScaling(factor=2.5),
    YarnScaling(factor=4.0, original_max_positions=8, beta_fast=4.0),
    Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8),
)


def draw_params(family: HuggingFaceFamily[Any], seed: int) -> Any:
    """Draw hyperparameters that `transformers` accepts; seeds 0 to 9 cover every choice of a family."""
    draw = random.Random(seed)  # noqa: S311
    num_layers, num_kv_heads = draw.randint(2, 4), draw.randint(1, 3)
    num_heads = num_kv_heads * draw.randint(1, 3)
    head_dim = 2 * draw.randint(2, 8)
    chosen: dict[str, Any] = {}
    has_windows = {"sliding_window", "local_attention"} & {*family.used} and seed % 2
    if has_windows:
        layers = range(num_layers)
        chosen["sliding_window"] = draw.randint(2, 6)
        chosen["sliding_layers"] = (
            tuple(layers) if family is MISTRAL else tuple(sorted(draw.sample(layers, draw.randint(1, num_layers))))
        )
    if family is GLM4:
        chosen |= {"rotary_dim": 2 * draw.randint(2, head_dim // 2), "qkv_bias": seed % 3 > 0}
    if family in (QWEN3, GEMMA3):
        chosen["is_causal"] = seed % 4 < 2
    if family is GEMMA3:
        chosen |= {
            "query_pre_attn_scalar": draw.randint(2, 40),
            "final_softcap": None if seed % 3 else 2.0,
            "sliding_rope_theta": draw.choice([50.0, 1000.0]),
        }
    hidden_size = num_heads * draw.randint(1, 5)
    if family is MODERNBERT:
        hidden_size, num_kv_heads = num_heads * head_dim, num_heads
        names = ("attention_bias", "feed_forward_bias", "norm_bias", "lm_head_bias", "transform_bias")
        chosen |= {name: draw.random() < 0.5 for name in names}
        chosen |= {
            "sliding_rope_theta": draw.choice([50.0, 1000.0]),
            "classifier_pooling": draw.choice(["cls", "mean"]),
        }
    return family.params(
        vocab_size=draw.randint(3, 40),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=draw.randint(1, 32),
        tie_word_embeddings=draw.random() < 0.5,
        rope_theta=draw.choice([100.0, 10_000.0, 1_000_000.0]),
        rope_scaling=SCALINGS[seed % len(SCALINGS)],
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-2]),
        initializer_range=0.3,
        max_position_embeddings=64,
        **chosen,
    )


def reference_of(family: HuggingFaceFamily[Any], params: GroupedQueryParams) -> Any:
    """Build the model of `transformers` from the configuration that d9d writes, with random weights and biases."""
    # The padding embedding is trained like any other, so there is no padding token.
    import transformers

    written: dict[str, Any] = {**family.write(params), "pad_token_id": None}
    model: Any = getattr(transformers, family.architecture)(transformers.AutoConfig.for_model(**written))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and not params.zero_centered_norms), std=0.3)
    for module in model.modules():
        if hasattr(module, "is_causal"):  # transformers ignores is_causal of a configuration with SDPA
            module.is_causal = params.attention_form.is_causal
    return model


def _compute_norms_in_float64(model: nn.Module, *, zero_centered: bool) -> None:
    """Replace the norms of the reference, which round to float32, by norms that compute in float64."""

    def norm(module: Any, x: Tensor) -> Tensor:
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        return F.rms_norm(x, module.weight.shape, module.weight + float(zero_centered), eps)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm, module)
        for name, buffer in [*module.named_buffers(recurse=False)]:  # angles are float32 in both implementations
            if name.endswith("inv_freq"):
                setattr(module, name, buffer.float())


def apply_mapper(mapper: StateMapper, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    mapped: dict[str, Tensor] = {}
    for group in mapper.groups:
        mapped |= mapper.apply({name: tensors[name] for name in group.inputs})
    return mapped


def _seeds() -> list[ParameterSet]:
    """Two configurations of each family in a default run, twelve with `--all`."""
    return [
        pytest.param(name, seed, id=f"{name}-{seed}", marks=[] if seed in {2, 5} else [pytest.mark.full])
        for name in FAMILIES
        for seed in range(12)
    ]


@pytest.mark.parametrize(("name", "seed"), _seeds())
def test_logits_losses_and_gradients_match(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    family = FAMILIES[name]
    params = draw_params(family, seed)
    mapper = family.mapper(params)
    reference, ours = reference_of(family, params).double(), DecoderForCausalLM(params).double()
    _compute_norms_in_float64(reference, zero_centered=params.zero_centered_norms)
    state = apply_mapper(mapper, reference.state_dict())
    assert state.keys() == dict(ours.named_parameters()).keys()
    ours.load_state_dict(state, strict=False)
    input_ids, labels = torch.randint(0, params.vocab_size, (2, 2, 11))
    labels[:, 1::3] = -100
    positions = torch.arange(11) + torch.randint(0, 50, (2, 1))

    with KeepFloat64():
        logits = reference(input_ids, position_ids=positions).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    expected.sum().backward()
    losses = ours(input_ids, position_ids=positions, labels=labels)
    losses.sum().backward()
    torch.testing.assert_close(ours(input_ids, position_ids=positions), logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert_trees_close(
        {name: p.grad for name, p in ours.named_parameters() if p.grad is not None},
        apply_mapper(mapper, gradients),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), _seeds())
def test_weights_and_config_round_trip_through_transformers(tmp_path: Path, name: str, seed: int) -> None:
    import transformers

    family = FAMILIES[name]
    params = draw_params(family, seed)
    reference = reference_of(family, params)
    reference.save_pretrained(tmp_path / "theirs")
    found = family.read(transformers.AutoConfig.from_pretrained(tmp_path / "theirs").to_diff_dict())
    assert family.write(found) == family.write(params)
    ours = DecoderForCausalLM(found)
    load_model_state(ours, tmp_path / "theirs", family.mapper(found))
    save_model_state(
        ours,
        tmp_path / "ours",
        family.mapper(found).inverse(),
        extra_files={"config.json": {**family.write(found), "pad_token_id": None}},
    )
    written, original = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert_trees_close(written, original, rtol=0, atol=0)
    again = type(reference).from_pretrained(tmp_path / "ours")
    assert_trees_close(again.state_dict(), reference.state_dict(), rtol=0, atol=0)


def _of(model_type: str, *sizes: int, **entries: Any) -> dict[str, Any]:
    """Return a configuration with these sizes: vocabulary, hidden, feed-forward, numbers of layers and heads."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kinds: dict[str, dict[str, Any]] = {
        "qwen2": {"hidden_act": "silu", "rope_theta": 1e6, "use_sliding_window": False, "use_mrope": False},
        "mistral": {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_dropout": 0.0},
        "glm4": {"hidden_act": "silu", "rope_theta": 10_000.0, "head_dim": 128, "partial_rotary_factor": 0.5},
        "gemma3_text": {
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000,
            "rope_local_base_freq": 10_000,
            "rope_scaling": None,
            "sliding_window": 512,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "cache_implementation": "hybrid",
        },
        "qwen3": {"head_dim": 128, "rope_theta": 1e6, "attention_bias": False, "max_window_layers": 36},
        "modernbert": {
            "hidden_activation": "gelu",
            "global_rope_theta": 160_000.0,
            "local_rope_theta": 10_000.0,
            "global_attn_every_n_layers": 3,
            "local_attention": 128,
            "position_embedding_type": "absolute",
            "layer_norm_eps": 1e-5,
            "norm_eps": 1e-5,
            "norm_bias": False,
            "decoder_bias": True,
            "classifier_pooling": "mean",
            "sparse_prediction": False,
            "deterministic_flash_attn": False,
        },
        "llama": {"rope_theta": 500_000.0, "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5},
    }
    base = {"model_type": model_type, "torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02}
    return {**base, **kinds[model_type], **dict(zip(names, sizes, strict=True)), **entries}


def _encoder(*sizes: int, **entries: Any) -> tuple[dict[str, Any], int]:
    """Return an entry of `PUBLISHED` from the sizes of a ModernBERT (see `_of`) and its number of parameters."""
    *sizes_, number = sizes
    return _of("modernbert", *sizes_, **entries), number


def _nested(hidden_size: int, intermediate_size: int, num_hidden_layers: int, **entries: Any) -> dict[str, Any]:
    """Return the language model of a multimodal Gemma 3, whose other entries have the defaults of `transformers`."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": num_hidden_layers}
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    return {"model_type": "gemma3_text", **sizes, **scaling, **entries}


LLAMA31 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
LONG = {"max_position_embeddings": 131_072}
SCALED = {**LONG, "rope_scaling": {**LLAMA31, "original_max_position_embeddings": 8192}}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-0.5B": (
        _of("qwen2", 151_936, 896, 4864, 24, 14, num_key_value_heads=2, tie_word_embeddings=True, max_window_layers=24),
        494_032_768,
    ),
    "Qwen2.5-7B": (_of("qwen2", 152_064, 3584, 18_944, 28, 28, num_key_value_heads=4, **LONG), 7_615_616_512),
    "Qwen2.5-72B": (_of("qwen2", 152_064, 8192, 29_568, 80, 64, num_key_value_heads=8, **LONG), 72_706_203_648),
    "Mistral-7B-v0.1": (
        _of("mistral", 32_000, 4096, 14_336, 32, 32, num_key_value_heads=8, sliding_window=4096, rope_theta=10_000.0),
        7_241_732_096,
    ),
    "Mistral-7B-v0.3": (
        _of("mistral", 32_768, 4096, 14_336, 32, 32, num_key_value_heads=8, sliding_window=None, rope_theta=1e6),
        7_248_023_552,
    ),
    "Mistral-Nemo-2407": (
        _of(
            "mistral",
            131_072,
            5120,
            14_336,
            40,
            32,
            num_key_value_heads=8,
            head_dim=128,
            sliding_window=None,
            rope_theta=1e6,
        ),
        12_247_782_400,
    ),
    "Mistral-Small-24B-2501": (
        _of(
            "mistral",
            131_072,
            5120,
            32_768,
            40,
            32,
            num_key_value_heads=8,
            head_dim=128,
            sliding_window=None,
            rope_theta=1e8,
        ),
        23_572_403_200,
    ),
    "GLM-4-9B-0414": (
        _of("glm4", 151_552, 4096, 13_696, 40, 32, num_key_value_heads=2, attention_bias=True, rms_norm_eps=1e-5),
        9_400_279_040,
    ),
    "GLM-4-32B-0414": (
        _of("glm4", 151_552, 6144, 23_040, 61, 48, num_key_value_heads=2, attention_bias=False, rms_norm_eps=1e-5),
        32_566_081_536,
    ),
    "GLM-Z1-Rumination-32B-0414": (
        _of("glm4", 151_552, 6144, 23_040, 61, 48, num_key_value_heads=8, attention_bias=False, rms_norm_eps=1e-5),
        32_566_081_536 + 61 * 2 * 6 * 128 * 6144,  # six key/value heads more than the model above
    ),
    "gemma-3-270m": (
        _of("gemma3_text", 262_144, 640, 2048, 18, 4, num_key_value_heads=1, _sliding_window_pattern=6),
        268_098_176,
    ),
    "gemma-3-1b": (
        _of("gemma3_text", 262_144, 1152, 6912, 26, 4, num_key_value_heads=1, sliding_window_pattern=6),
        999_885_952,
    ),
    "embeddinggemma-300m": (
        _of("gemma3_text", 262_144, 768, 1152, 24, 3, num_key_value_heads=1, use_bidirectional_attention=True),
        302_863_104,
    ),
    **{  # the whole model without vision tower (416,866,032) and projector
        name: ({"model_type": "gemma3", "text_config": text, "vision_config": {}, "mm_tokens_per_image": 256}, number)
        for name, text, number in (
            ("gemma-3-4b", _nested(2560, 10_240, 34), 4_300_079_472 - 419_816_304),
            (
                "gemma-3-12b",
                _nested(3840, 15_360, 48, num_attention_heads=16, num_key_value_heads=8),
                12_187_325_040 - 421_290_864,
            ),
        )
    },
    "Qwen3-0.6B": (
        _of("qwen3", 151_936, 1024, 3072, 28, 16, num_key_value_heads=8, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": (_of("qwen3", 151_936, 4096, 12_288, 36, 32, num_key_value_heads=8), 8_190_735_360),
    "Qwen3-32B": (_of("qwen3", 151_936, 5120, 25_600, 64, 64, num_key_value_heads=8), 32_762_123_264),
    "Llama-3.2-1B": (
        _of(
            "llama",
            128_256,
            2048,
            8192,
            16,
            32,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
            **SCALED,
        ),
        1_235_814_400,
    ),
    "Llama-3.1-8B": (_of("llama", 128_256, 4096, 14_336, 32, 32, num_key_value_heads=8, **SCALED), 8_030_261_248),
    "ModernBERT-base": _encoder(50_368, 768, 1152, 22, 12, 149_655_232),
    "ModernBERT-large": _encoder(50_368, 1024, 2624, 28, 16, 395_881_664),
    "mmBERT-base": _encoder(256_000, 768, 1152, 22, 12, 307_786_240, local_rope_theta=160_000.0),
    "modernbert-ja-30m": _encoder(102_400, 256, 1024, 10, 4, 36_873_728),
    "modernbert-ja-310m": _encoder(102_400, 768, 3072, 25, 12, 315_304_960),
    "ettin-encoder-17m": _encoder(50_368, 256, 384, 7, 4, 16_913_600),
    "ettin-encoder-1b": _encoder(50_368, 1792, 3840, 28, 28, 1_031_314_112),
    "Llama-3.1-70B": (_of("llama", 128_256, 8192, 28_672, 80, 64, num_key_value_heads=8, **SCALED), 70_553_706_496),
}
"""Published configurations, and the published numbers of parameters."""


QUICK = ("ModernBERT-base", "Qwen2.5-0.5B", "Mistral-7B-v0.1", "GLM-4-9B-0414", "gemma-3-4b", "embeddinggemma-300m")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in PUBLISHED]
)
def test_published_configurations_are_accepted(name: str) -> None:
    config, num_parameters = PUBLISHED[name]
    params = known_families()[config["model_type"]].read(config)
    with torch.device("meta"):
        model = DecoderForCausalLM(params)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    is_sliding = [params.mixer_kind(index) == "sliding_attention" for index in range(params.num_layers)]
    expected = [(index + 1) % 6 > 0 for index in range(params.num_layers)]
    if config["model_type"] == "modernbert":
        expected = [index % 3 > 0 for index in range(params.num_layers)]
    elif "gemma" not in name:
        expected = [name == "Mistral-7B-v0.1"] * params.num_layers
    assert is_sliding == expected
    assert params.attention_form.is_causal is (name != "embeddinggemma-300m" and config["model_type"] != "modernbert")


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_layers_are_one_graph(name: str) -> None:
    """A graph break is an error with `fullgraph`; the documents are packed."""
    torch._dynamo.reset()
    params = draw_params(FAMILIES[name], 2)
    model, labels = DecoderForCausalLM(params), torch.randint(0, params.vocab_size, (2, 9))
    positions = torch.tensor([[*range(4), *range(5)]]).expand(2, 9).contiguous()
    documents = torch.tensor([[0] * 4 + [1] * 5]).expand(2, 9).contiguous()

    def run() -> tuple[torch.Tensor, ...]:
        losses = model(labels, labels=labels, position_ids=positions, document_ids_BL=documents)
        return losses, *torch.autograd.grad(losses.sum(), list(model.parameters()), allow_unused=True)

    expected = run()
    compile_layers(model.backbone.layers, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(), expected)
