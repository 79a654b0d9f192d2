"""Comparison of the sparse families with `transformers`: logits, losses, gradients, weights and `config.json`."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_gradients import assert_same_gradients
from torch.nn import functional as F

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import KeepFloat64
from d9d_modules import (
    QWEN3_5,
    DecoderForCausalLM,
    DecoderForClassification,
    DecoderModel,
    DecoderParams,
    DecoderWithMtp,
    HuggingFaceFamily,
    Qwen35Params,
    YarnScaling,
    decoder_from_hugging_face,
    from_pretrained_config,
    quantization_from_hugging_face,
)
from d9d_modules.compiling import compile_layers
from d9d_modules.models.decoder_mtp import mtp_from_hugging_face
from d9d_modules.models.hybrid import HybridParams
from d9d_modules.models.pretrained import known_families
from d9d_moe import (
    DEEPSEEK_V3,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    KIMI_K2,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    DeepseekV3Params,
    Glm4MoeParams,
    GptOssParams,
    Qwen3MoeParams,
    Qwen3NextParams,
    Qwen35MoeParams,
    SparseParams,
    sparse_from_hugging_face,
)
from d9d_moe.models.experts_hugging_face import ExpertsLayout
from d9d_state import (
    Fp8Blocks,
    ModelFolder,
    Mxfp4,
    StateMapper,
    dequantize_inputs,
    load_model_state,
    parallel,
    read_model_state,
    save_model_state,
)

PUBLISHED = Path(__file__).parent / "published_sparse"


@dataclass(frozen=True)
class Family:
    """Family and its reference; `params` draws hyperparameters, with small numbers from `pick`."""

    files: HuggingFaceFamily[Any]
    reference_name: str
    params: Callable[["Pick"], DecoderParams]

    @property
    def reference(self) -> Any:
        """Class of the model in `transformers`."""
        import transformers

        return getattr(transformers, self.reference_name)

    def mapper(self, params: DecoderParams, layout: ExpertsLayout = "per_expert") -> StateMapper:
        """Return the mapper of the weights."""
        if isinstance(params, SparseParams):
            return sparse_from_hugging_face(params, layout=layout)
        return decoder_from_hugging_face(params)


class Pick:
    """Random choices that depend only on the seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *choices: Any) -> Any:
        return choices[torch.randint(len(choices), (), generator=self._generator)]


def _sizes(pick: Pick) -> dict[str, Any]:
    return {
        "vocab_size": pick(13, 24),
        "hidden_size": pick(8, 12),
        "num_layers": pick(1, 2, 3),
        "tie_word_embeddings": pick(False, False, True),
        "rms_norm_eps": pick(1e-6, 1e-4),
        "rope_theta": 100.0,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
    }


def _heads(pick: Pick) -> dict[str, Any]:
    num_kv_heads = pick(1, 2)
    return {"num_heads": num_kv_heads * pick(1, 2, 3), "num_kv_heads": num_kv_heads}


def _glm(pick: Pick) -> Glm4MoeParams:
    sizes, num_groups = _sizes(pick), pick(1, 2)
    head_dim = pick(4, 8)
    return Glm4MoeParams(
        **sizes,
        **_heads(pick),
        head_dim=head_dim,
        rotary_dim=pick(head_dim // 2, head_dim),
        has_qkv_bias=pick(False, True),
        has_qk_norm=pick(False, True),
        intermediate_size=pick(5, 16),
        num_dense_layers=min(pick(0, 1, 2), sizes["num_layers"]),
        num_experts=4 * num_groups,
        num_groups=num_groups,
        top_groups=pick(1, num_groups),
        top_k=pick(1, 2, 3),
        expert_intermediate_size=pick(3, 8),
        num_shared_experts=pick(1, 2),
        renormalize=pick(False, True),
        routed_scale=pick(1.0, 2.5),
    )


def _deepseek(pick: Pick, *, num_groups: int | None = None, **changes: Any) -> DeepseekV3Params:
    sizes, num_groups = _sizes(pick), num_groups or pick(1, 2)
    yarn = YarnScaling(factor=4.0, original_max_positions=8, mscale=1.0, mscale_all_dim=0.7)
    drawn = {
        "q_rank": pick(None, 6),
        "rotary_layout": pick("interleaved", "half"),
        "routed_scale": pick(1.0, 2.5),
        "rope_scaling": pick(None, yarn),
    }
    return DeepseekV3Params(
        **sizes,
        num_heads=pick(1, 3),
        kv_rank=pick(4, 7),
        head_dim=pick(3, 4),
        rotary_dim=pick(2, 4, 6),
        value_dim=pick(4, 5),
        intermediate_size=pick(5, 16),
        num_dense_layers=min(pick(0, 1, 2, 3), sizes["num_layers"]),
        num_experts=4 * num_groups,
        num_groups=num_groups,
        top_groups=pick(1, num_groups),
        top_k=pick(1, 2, 4),
        expert_intermediate_size=pick(3, 8),
        num_shared_experts=pick(1, 2),
        renormalize=pick(False, True),
        **{**drawn, **changes},
    )


def _kimi_k2(pick: Pick) -> DeepseekV3Params:
    yarn = YarnScaling(factor=4.0, original_max_positions=8, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)
    return _deepseek(pick, num_groups=1, q_rank=5, routed_scale=2.827, rope_scaling=yarn)


def _moonlight(pick: Pick) -> DeepseekV3Params:
    return _deepseek(pick, num_groups=1, q_rank=None, routed_scale=2.446, rope_scaling=None)


def _gpt_oss(pick: Pick) -> GptOssParams:
    sizes, size = _sizes(pick), pick(5, 8)
    sliding = tuple(range(0, sizes["num_layers"], 2)) if pick(True, False, True) else ()
    yarn = YarnScaling(factor=4.0, original_max_positions=8, truncate=False)
    return GptOssParams(
        **sizes,
        **_heads(pick),
        head_dim=pick(4, 6),
        intermediate_size=size,
        expert_intermediate_size=size,
        num_experts=pick(4, 5),
        top_k=pick(1, 2, 4),
        has_attention_bias=pick(True, True, False),
        swiglu_limit=pick(0.5, 7.0),
        sliding_window=pick(1, 3) if sliding else None,
        sliding_layers=sliding,
        rope_scaling=pick(None, yarn),
    )


def _qwen3_moe(pick: Pick) -> Qwen3MoeParams:
    sizes, window = _sizes(pick), pick(None, 3)
    return Qwen3MoeParams(
        **sizes,
        **_heads(pick),
        head_dim=pick(4, 6),
        intermediate_size=pick(5, 16),
        num_experts=pick(4, 5),
        top_k=pick(1, 2, 4),
        expert_intermediate_size=pick(3, 8),
        renormalize=pick(True, False),
        dense_layers=pick((), (0,)),
        sliding_window=window,
        sliding_layers=() if window is None else tuple(range(sizes["num_layers"])),
        rope_scaling=pick(None, YarnScaling(factor=4.0, original_max_positions=8)),
    )


def _hybrid(pick: Pick) -> dict[str, Any]:
    sizes, head_dim, num_key_heads = _sizes(pick), pick(4, 8), pick(1, 2)
    layers = range(sizes["num_layers"])
    return {
        **sizes,
        **_heads(pick),
        "head_dim": head_dim,
        "rotary_dim": pick(head_dim // 2, head_dim),
        "full_layers": tuple(index for index in layers if pick(True, False)),
        "num_linear_key_heads": num_key_heads,
        "num_linear_value_heads": num_key_heads * pick(1, 2, 3),
        "linear_key_dim": pick(4, 6),
        "linear_value_dim": pick(4, 5),
        "conv_width": pick(2, 4),
    }


def _sparse_hybrid(pick: Pick) -> dict[str, Any]:
    return {
        "num_experts": pick(4, 5),
        "top_k": pick(1, 2, 3),
        "expert_intermediate_size": pick(3, 8),
        "shared_intermediate_size": pick(5, 6),
    }


def _qwen3_next(pick: Pick) -> Qwen3NextParams:
    return Qwen3NextParams(
        **_hybrid(pick),
        **_sparse_hybrid(pick),
        intermediate_size=pick(5, 16),
        renormalize=pick(True, False),
        dense_layers=pick((), (0,)),
    )


def _qwen3_5_moe(pick: Pick) -> Qwen35MoeParams:
    hybrid, sparse = _hybrid(pick), _sparse_hybrid(pick)
    return Qwen35MoeParams(**hybrid, **sparse, intermediate_size=sparse["shared_intermediate_size"])


def _qwen3_5(pick: Pick) -> Qwen35Params:
    return Qwen35Params(**_hybrid(pick), intermediate_size=pick(5, 16))


FAMILIES = {
    "qwen3_moe": Family(QWEN3_MOE, "Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3_next": Family(QWEN3_NEXT, "Qwen3NextForCausalLM", _qwen3_next),
    "qwen3_5_moe": Family(QWEN3_5_MOE, "Qwen3_5MoeForCausalLM", _qwen3_5_moe),
    "qwen3_5": Family(QWEN3_5, "Qwen3_5ForCausalLM", _qwen3_5),
    "glm4_moe": Family(GLM4_MOE, "Glm4MoeForCausalLM", _glm),
    "glm4_moe_lite": Family(GLM4_MOE_LITE, "Glm4MoeLiteForCausalLM", _deepseek),
    "deepseek_v3": Family(DEEPSEEK_V3, "DeepseekV3ForCausalLM", _deepseek),
    "kimi_k2": Family(KIMI_K2, "DeepseekV3ForCausalLM", _kimi_k2),
    "moonlight": Family(DEEPSEEK_V3, "DeepseekV3ForCausalLM", _moonlight),
    "gpt_oss": Family(GPT_OSS, "GptOssForCausalLM", _gpt_oss),
}
CASES = [
    pytest.param(name, seed, marks=[] if seed < 2 else [pytest.mark.full]) for name in FAMILIES for seed in range(12)
]


def test_every_sparse_or_hybrid_family_is_compared() -> None:
    compared = {each.files.model_type for each in FAMILIES.values()}
    known = known_families().values()
    assert {each.model_type for each in known if issubclass(each.params, SparseParams | HybridParams)} == compared


def _build(name: str, seed: int) -> tuple[Family, Any, Any]:
    """Return family, hyperparameters, and the reference with random weights in float32."""
    family = FAMILIES[name]
    params = family.params(Pick(seed))
    config = family.reference.config_class.from_dict(json.loads(json.dumps(family.files.write(params))))
    config._experts_implementation = "eager"
    model = family.reference(config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor_name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in tensor_name else 0.0, std=0.3)
        for tensor_name, buffer in model.named_buffers():
            if tensor_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    return family, params, model


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_logits_losses_and_gradients_match(name: str, seed: int) -> None:
    """In float64, with the positions' angles in float32 in both implementations."""
    family, params, reference = _build(name, seed)
    reference = reference.double()
    for module in reference.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.float()
    mapper = family.mapper(params, layout="fused")
    ours = DecoderForCausalLM(params).double()
    ours.load_state_dict(mapper.apply_all(dict(reference.state_dict())), strict=not params.tie_word_embeddings)
    input_ids, labels = torch.randint(0, params.vocab_size, (2, 2, 9))
    labels[:, 1::3] = -100
    with KeepFloat64():
        expected = reference(input_ids, use_cache=False).logits
        wanted = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        wanted.sum().backward()
    # YaRN multiplies the tables by a factor, which is rounded to float32: 9 positions with two roundings each.
    tolerance = 1e-10 if params.rope_scaling is None else 9 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(ours(input_ids), expected, rtol=tolerance, atol=tolerance)
    losses = ours(input_ids, labels=labels)
    torch.testing.assert_close(losses, wanted, rtol=tolerance, atol=tolerance)
    losses.sum().backward()
    named = reference.state_dict(keep_vars=True)
    assert_same_gradients(ours, mapper, named, tolerance=10 * tolerance)


def _layout_on_disk(folder: Path) -> ExpertsLayout:
    return (
        "fused"
        if any(name.endswith("experts.down_proj") for name in ModelFolder.open(folder).tensors)
        else "per_expert"
    )


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_weights_and_config_are_exchanged_bit_for_bit(name: str, seed: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, params, reference = _build(name, seed)
    reference.save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert family.files.read(config) == params  # transformers knows Kimi K2 as DeepSeek-V3
    ours, mapper = DecoderForCausalLM(params), family.mapper(params, _layout_on_disk(tmp_path / "theirs"))
    load_model_state(ours, tmp_path / "theirs", mapper)
    written = family.files.write(params)
    save_model_state(ours, tmp_path / "ours", mapper.inverse(), extra_files={"config.json": written})
    theirs, again = (dict(read_model_state(tmp_path / folder)) for folder in ("theirs", "ours"))
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[each], tensor) for each, tensor in theirs.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(loaded, family.reference)
    state = loaded.state_dict()
    assert all(torch.equal(state[each], tensor) for each, tensor in reference.state_dict().items())
    assert family.files.read(json.loads(json.dumps(written))) == params


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sample("qwen3_5_moe-per_expert", "qwen3_5_moe-fused", "kimi_k2-fused")
def test_both_layouts_of_experts_are_recognized(name: str, layout: ExpertsLayout, tmp_path: Path) -> None:
    """Also an export, which `transformers` loads."""
    from transformers import AutoModelForCausalLM

    family = FAMILIES[name]
    params: Any = family.params(Pick(2))
    model = DecoderForCausalLM(params)
    config = {"config.json": family.files.write(params)}
    save_model_state(model, tmp_path / "stored", family.mapper(params, layout).inverse(), extra_files=config)
    found = from_pretrained_config(tmp_path / "stored")
    again = found.build(StageInfo())
    load_model_state(again, tmp_path / "stored", found.load_mapper())
    assert all(torch.equal(again.state_dict()[each], tensor) for each, tensor in model.state_dict().items())
    save_model_state(again, tmp_path / "ours", found.state_mapper().inverse(), extra_files=found.export_files())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", experts_implementation="eager")
    assert isinstance(loaded, family.reference)
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(again(ids), loaded(ids).logits, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_of_packed_rows_give_the_losses_of_separate_documents(name: str) -> None:
    """Two stages of a packed row give the losses of the separate documents."""
    changes = {"sliding_layers": (), "sliding_window": None, "full_layers": (1,), "dense_layers": ()}
    params: Any = FAMILIES[name].params(Pick(3))
    changes = {field: value for field, value in changes.items() if hasattr(params, field)}
    params = replace(params, num_layers=2, tie_word_embeddings=False, **changes)
    whole = DecoderForCausalLM(params).double()
    input_ids, labels = torch.randint(0, params.vocab_size, (2, 1, 9))
    lengths = [4, 5]
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    documents = torch.tensor([[0] * lengths[0] + [7] * lengths[1]])
    hidden: Any = input_ids
    names: list[str] = []
    for index in range(2):
        stage = DecoderForCausalLM(params, StageInfo(index, 2)).double()
        stage.load_state_dict({each: whole.state_dict()[each] for each in stage.state_dict()})
        names += stage.state_dict()
        hidden = stage(hidden, position_ids=positions, document_ids_BL=documents, labels=labels)
    expected = [
        whole(ids, labels=each)
        for ids, each in zip(input_ids.split(lengths, dim=1), labels.split(lengths, dim=1), strict=True)
    ]
    torch.testing.assert_close(hidden, torch.cat(expected, dim=1), rtol=1e-9, atol=1e-9)
    assert sorted(names) == sorted(FAMILIES[name].mapper(params).outputs)
    assert DecoderForClassification(params, num_classes=3).double()(input_ids).shape == (1, 3)


CLASSIFIERS = [name for name in FAMILIES if name not in {"glm4_moe", "glm4_moe_lite", "qwen3_5_moe"}]
"""Families whose classifier `transformers` has."""


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.sample("gpt_oss")
def test_a_classifier_equals_transformers(name: str, tmp_path: Path) -> None:
    """A saved classifier is recognized, and the backbone of an embedder is loaded from the same folder."""
    import transformers

    family, params, _ = _build(name, 4)
    entries = {**family.files.write(params), "num_labels": 3, "pad_token_id": None}
    config = family.reference.config_class.from_dict(json.loads(json.dumps(entries)))
    config._experts_implementation = "eager"
    build: Any = getattr(transformers, family.reference_name.replace("CausalLM", "SequenceClassification"))
    reference = build(config)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.3)
    reference.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "model_type": family.files.model_type}))
    found = from_pretrained_config(tmp_path, head="classification", num_classes=3)
    model = found.build(StageInfo()).eval()
    load_model_state(model, tmp_path, found.load_mapper())
    ids = torch.randint(0, params.vocab_size, (1, 7))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    embedder = from_pretrained_config(tmp_path, head="embedding")
    backbone: Any = embedder.build(StageInfo())
    load_model_state(backbone, tmp_path, embedder.load_mapper())
    assert torch.equal(backbone.eval().backbone(ids), model.get_submodule("backbone")(ids))
    assert embedder.unused == ("score.weight",)


def _published() -> list[Any]:
    """Return all configurations; the first of each family runs in the default run."""
    return [
        pytest.param(name, size, id=size["_name_or_path"], marks=[pytest.mark.full] if number else [])
        for name, sizes in json.loads((PUBLISHED.with_suffix(".json")).read_text()).items()
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(("name", "config"), _published())
@pytest.mark.slow(
    "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-27B", "moonshotai/Kimi-K2-Instruct", "zai-org/GLM-4.7-Flash"
)
def test_published_configurations_are_accepted(name: str, config: dict[str, Any]) -> None:
    """The released `config.json` builds a model on `meta`, with the number of parameters of the release."""
    families: dict[str, HuggingFaceFamily[Any]] = {
        each.model_type: each for each in (DEEPSEEK_V3, KIMI_K2, GLM4_MOE, GLM4_MOE_LITE, GPT_OSS, QWEN3_NEXT)
    }
    families |= {"qwen3_5_moe": QWEN3_5_MOE, "qwen3_5": QWEN3_5}
    config = dict(config)
    billions = config.pop("billions of parameters")
    params = families[name].read(config)
    quantization_from_hugging_face(config)
    with torch.device("meta"):
        model = DecoderModel(replace(params, num_layers=params.num_layers))
    head = 0 if params.tie_word_embeddings else params.vocab_size * params.hidden_size
    total = sum(parameter.numel() for parameter in model.parameters()) + head
    assert abs(total / 1e9 - billions) <= 0.01 * billions, total


def test_gpt_oss_loads_released_mxfp4_weights(tmp_path: Path) -> None:
    params = replace(_gpt_oss(Pick(0)), hidden_size=32, intermediate_size=64, expert_intermediate_size=64)
    plain = sparse_from_hugging_face(params)
    scaled = [name for name in plain.inputs if name.endswith("_proj") and "experts" in name]
    stored = [f"{name}_{part}" for name in scaled for part in ("blocks", "scales")]
    model = DecoderForCausalLM(params)
    save_model_state(model, tmp_path, dequantize_inputs(plain, Mxfp4(), [*plain.inputs, *stored]).inverse())
    folder = ModelFolder.open(tmp_path)
    assert folder.tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (params.num_experts, 128, 1, 16)
    again = DecoderForCausalLM(params)
    load_model_state(again, tmp_path, dequantize_inputs(plain, Mxfp4(), folder.tensors))
    held = dict(read_model_state(tmp_path))
    name = "model.layers.0.mlp.experts.down_proj"
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    expected = mxfp4.convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"], dtype=torch.float32)
    assert torch.equal(again.get_parameter("backbone.layers.0.feed_forward.experts.down_proj.weight"), expected.mT)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt_oss", {"renormalize": False}, "renormalize = False; expected True"),
        ("gpt_oss", {"intermediate_size": 99}, "intermediate_size = 99, expert_intermediate_size = .*; expected equal"),
        ("gpt_oss", {"swiglu_limit": 0.0}, r"swiglu_limit = 0\.0; expected a number above 0"),
        ("glm4_moe", {"num_dense_layers": 9}, "num_dense_layers = 9; expected 0 to num_layers"),
        ("glm4_moe", {"rotary_dim": 3}, "rotary_dim = 3; expected an even number"),
    ],
)
def test_invalid_params_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DecoderForCausalLM(replace(FAMILIES[name].params(Pick(0)), **changes))


def test_models_that_a_config_cannot_express_are_refused() -> None:
    params = replace(_glm(Pick(0)), num_shared_experts=0)
    with pytest.raises(UserError, match=r"cannot express these hyperparameters: config\.json has n_shared_experts = 0"):
        GLM4_MOE.write(params)
    params = replace(_glm(Pick(0)), sliding_window=3, sliding_layers=(0,))
    with pytest.raises(UserError, match=r"Glm4MoeForCausalLM cannot express sliding_window = 3 \(read as None\)"):
        GLM4_MOE.write(params)


def test_kimi_k2_is_deepseek_v3_under_another_name() -> None:
    written = {**KIMI_K2.write(_kimi()), "num_nextn_predict_layers": 0}
    assert written["model_type"] == "deepseek_v3"  # transformers knows no other
    config = {**written, "model_type": "kimi_k2"}
    assert KIMI_K2.read(config) == KIMI_K2.read(written) == DEEPSEEK_V3.read(written) == _kimi()
    with pytest.raises(UserError, match="model_type = 'kimi_k2'; only 'deepseek_v3' is supported"):
        DEEPSEEK_V3.read(config)


def _kimi() -> DeepseekV3Params:
    return DeepseekV3Params(
        vocab_size=19,
        hidden_size=12,
        num_layers=3,
        num_heads=2,
        kv_rank=6,
        q_rank=4,
        head_dim=4,
        rotary_dim=4,
        value_dim=6,
        intermediate_size=20,
        num_dense_layers=1,
        num_experts=6,
        top_k=2,
        expert_intermediate_size=10,
        routed_scale=2.827,
        rope_theta=50_000.0,
    )


def test_families_are_registered_by_model_type() -> None:
    registered = known_families()
    sparse = {
        "deepseek_v3",
        "kimi_k2",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "qwen3_next",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    }
    assert sparse <= registered.keys()
    assert registered["qwen3_5_moe"] is registered["qwen3_5_moe_text"]


def test_a_released_folder_is_read_unchanged(tmp_path: Path) -> None:
    """Float8 weights and the tensors of layers for multi-token prediction, recognized without further arguments."""
    params = _kimi()
    model = DecoderWithMtp(params, num_mtp_layers=2)
    mapper = parallel(sparse_from_hugging_face(params), mtp_from_hugging_face(params, num_mtp_layers=2))
    scales = [f"{name}_scale_inv" for name in mapper.inputs if name.endswith(("_proj.weight", "_with_mqa.weight"))]
    stored = dequantize_inputs(mapper, Fp8Blocks((8, 4)), [*mapper.inputs, *scales])
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 4], "activation_scheme": "dynamic"}
    config = {**KIMI_K2.write(params), "num_nextn_predict_layers": 2, "quantization_config": quantization}
    save_model_state(model, tmp_path, stored.inverse(), extra_files={"config.json": config})
    found = from_pretrained_config(tmp_path)
    again = found.build(StageInfo())
    load_model_state(again, tmp_path, found.load_mapper())
    assert "model.layers.3.eh_proj.weight" in found.unused
    assert {name.split(".")[2] for name in found.unused} == {"3", "4"}
    largest = again.get_parameter("backbone.layers.0.attention.o_proj.weight").abs().max()
    difference = again.get_parameter("backbone.layers.0.attention.o_proj.weight") - model.get_parameter(
        "backbone.layers.0.attention.o_proj.weight"
    )
    assert 0 < difference.abs().max() <= 2**-4 * largest


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_layers_are_one_graph(name: str) -> None:
    """A graph break is an error with `fullgraph`; the documents are packed."""
    torch._dynamo.reset()
    params: Any = FAMILIES[name].params(Pick(1))
    model, labels = DecoderForCausalLM(params), torch.randint(0, params.vocab_size, (2, 9))
    positions = torch.tensor([[*range(4), *range(5)]]).expand(2, 9).contiguous()
    documents = torch.tensor([[0] * 4 + [1] * 5]).expand(2, 9).contiguous()

    def run() -> tuple[torch.Tensor, ...]:
        losses = model(labels, labels=labels, position_ids=positions, document_ids_BL=documents)
        return losses, *torch.autograd.grad(losses.sum(), list(model.parameters()), allow_unused=True)

    expected = run()
    compile_layers(model.backbone.layers, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(), expected)
