import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_gradients import assert_same_gradients
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import assert_rounds_like, in_float64
from d9d_modules import (
    DecoderForClassification,
    DecoderForEmbedding,
    DecoderWithHeads,
    SwiGLU,
    YarnScaling,
    decoder_lm_head,
    generate,
)
from d9d_moe import (
    DEEPSEEK_V3,
    DeepseekV3ForCausalLM,
    DeepseekV3Params,
    MoELayer,
    RouterLosses,
    sparse_from_hugging_face,
)
from d9d_state import (
    Fp8Blocks,
    ModelFolder,
    dequantize_inputs,
    load_model_state,
    read_model_state,
    save_model_state,
)

PARAMS = DeepseekV3Params(
    vocab_size=19,
    hidden_size=12,
    num_layers=3,
    num_heads=2,
    kv_rank=6,
    q_rank=None,
    head_dim=4,
    rotary_dim=4,
    value_dim=6,
    intermediate_size=20,
    num_dense_layers=1,
    num_experts=6,
    top_k=2,
    expert_intermediate_size=10,
    num_groups=3,
    top_groups=2,
    router_losses=RouterLosses(balance=0.3, z=0.1),
    initializer_range=0.3,
)


def test_chained_stages_match_the_whole_model_with_router_losses() -> None:
    whole = DeepseekV3ForCausalLM(PARAMS).double()
    input_ids, labels = torch.randint(0, 19, (2, 2, 7))
    labels[0, :3] = -100
    expected = whole(input_ids, labels=labels)
    assert expected[0, :3].eq(0).all()
    expected.sum().backward()
    stages = [DeepseekV3ForCausalLM(PARAMS, StageInfo(index, 3)).double() for index in range(3)]
    hidden: Any = input_ids
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        hidden = stage(hidden, labels=labels)
    hidden.sum().backward()
    torch.testing.assert_close(hidden, expected, rtol=1e-12, atol=1e-12)
    split = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    torch.testing.assert_close(split, {name: p.grad for name, p in whole.named_parameters()}, rtol=1e-10, atol=1e-12)


def test_router_losses_are_added_to_token_losses() -> None:
    with_losses, without = (
        DeepseekV3ForCausalLM(replace(PARAMS, router_losses=losses)).double()
        for losses in (PARAMS.router_losses, RouterLosses())
    )
    without.load_state_dict(with_losses.state_dict())
    input_ids, labels = torch.randint(0, 19, (2, 2, 7))
    torch.testing.assert_close(with_losses(input_ids), without(input_ids))
    _, added = with_losses.backbone(input_ids)
    assert added.gt(0).all()
    difference = with_losses(input_ids, labels=labels) - without(input_ids, labels=labels)
    torch.testing.assert_close(difference, added)


def test_the_first_layers_are_dense() -> None:
    model = DeepseekV3ForCausalLM(PARAMS)
    kinds = [type(layer.feed_forward) for layer in model.layers.values()]
    assert kinds == [SwiGLU, MoELayer, MoELayer]


def test_classification_and_embedding_heads() -> None:
    input_ids = torch.randint(0, 19, (2, 7))
    classifier = DecoderForClassification(PARAMS, num_classes=3).double()
    logits = classifier(input_ids)
    assert logits.shape == (2, 3)
    losses = classifier(input_ids, labels=torch.tensor([2, -100]))
    _, added = classifier.backbone(input_ids)
    torch.testing.assert_close(losses[0], -logits[0].log_softmax(-1)[2] + added[0].mean())
    assert losses[1] == 0
    embedder = DecoderForEmbedding(replace(PARAMS, router_losses=RouterLosses()), embedding_size=5)
    torch.testing.assert_close(embedder(input_ids).norm(dim=-1), torch.ones(2))
    with pytest.raises(UserError, match=r"the model has router losses, but an embedding model computes no loss"):
        DecoderForEmbedding(PARAMS)
    with pytest.raises(
        UserError, match=r"the model has router losses, but a model with named heads has several losses"
    ):
        DecoderWithHeads(PARAMS, heads={"text": decoder_lm_head})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_rank": 0}, "kv_rank = 0; expected a number above 0"),
        ({"q_rank": 0}, "q_rank = 0; expected a number above 0"),
        ({"num_dense_layers": 4}, "num_dense_layers = 4; expected 0 to num_layers = 3"),
        ({"num_shared_experts": -1}, "num_shared_experts = -1; expected 0"),
        ({"rotary_dim": 3}, "rotary_dim = 3; expected an even number"),
        ({"top_k": 7}, "top_k = 7; expected 1 <= top_k <= num_experts = 6"),
        ({"num_groups": 4}, "num_groups = 4; expected a divisor of num_experts = 6"),
    ],
)
def test_invalid_params_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(PARAMS, **changes)


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (
            torch.zeros(2, 3, 12),
            r"stage 1 got \(2, 3, 12\) of torch\.float32; expected .*, in a tuple with the router losses",
        ),
        ((torch.zeros(2, 3, 5), torch.zeros(2, 3)), r"expected .*\[batch, length, 12\]"),
    ],
)
def test_input_of_another_stage_is_refused(received: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DeepseekV3ForCausalLM(PARAMS, StageInfo(1, 3))(received)


YARN = YarnScaling(factor=4.0, original_max_positions=8, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.8)


@st.composite
def deepseek_v3_params(draw: st.DrawFn) -> DeepseekV3Params:
    num_layers = draw(st.integers(1, 3))
    num_groups = draw(st.integers(1, 3))
    num_experts = num_groups * draw(st.integers(2, 3))
    top_groups = draw(st.integers(1, num_groups))
    reachable = num_experts // num_groups * top_groups
    return DeepseekV3Params(
        vocab_size=draw(st.integers(3, 40)),
        hidden_size=draw(st.sampled_from([8, 10])),
        num_layers=num_layers,
        num_heads=draw(st.integers(1, 3)),
        kv_rank=draw(st.integers(1, 8)),
        q_rank=draw(st.sampled_from([None, 5])),
        head_dim=draw(st.integers(1, 6)),
        rotary_dim=2 * draw(st.integers(1, 3)),
        value_dim=draw(st.integers(1, 8)),
        intermediate_size=draw(st.integers(1, 20)),
        num_dense_layers=draw(st.integers(0, num_layers)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, reachable)),
        expert_intermediate_size=draw(st.sampled_from([4, 7])),
        num_shared_experts=draw(st.integers(1, 2)),
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=draw(st.booleans()),
        routed_scale=draw(st.sampled_from([1.0, 2.5])),
        rotary_layout=draw(st.sampled_from(["interleaved", "half"])),
        rope_scaling=draw(st.sampled_from([None, YARN])),
        max_position_embeddings=32,
    )


def _exported() -> DeepseekV3Params:
    return DeepseekV3Params(
        vocab_size=21,
        hidden_size=16,
        num_layers=3,
        num_heads=2,
        kv_rank=6,
        q_rank=8,
        head_dim=4,
        rotary_dim=4,
        value_dim=4,
        intermediate_size=24,
        num_dense_layers=1,
        num_experts=4,
        top_k=2,
        expert_intermediate_size=12,
        num_groups=2,
        top_groups=1,
        routed_scale=2.5,
        initializer_range=0.2,
        rope_scaling=YARN,
        max_position_embeddings=32,
    )


def _reference(params: DeepseekV3Params) -> Any:
    """Return the reference model in float64."""
    from transformers import DeepseekV3Config
    from transformers import DeepseekV3ForCausalLM as Reference
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm, DeepseekV3TopkRouter

    config = DeepseekV3Config.from_dict(DEEPSEEK_V3.write(params))
    # The default is torch's grouped kernel, which supports neither float64 nor unaligned sizes.
    config._experts_implementation = "eager"
    model = Reference(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    for module in model.modules():
        match module:  # its norm and its router round to float32 for any input dtype
            case DeepseekV3RMSNorm():
                module.forward = partial(_norm, module)
            case DeepseekV3TopkRouter():
                module.forward = partial(_route, module)
    return model


def _norm(norm: Any, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _route(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert router.top_k is not None
    assert router.topk_group is not None
    logits = F.linear(hidden_states.flatten(0, -2), router.weight)
    scores = logits.sigmoid()
    groups = (scores + router.e_score_correction_bias).unflatten(-1, (router.num_group, -1))
    best = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    worst_chosen = best.sort(dim=-1, descending=True).values[:, router.topk_group - 1]
    chosen = torch.where((best >= worst_chosen[:, None])[..., None], groups, -torch.inf).flatten(1)
    indices = chosen.topk(router.top_k).indices
    weights = scores.gather(1, indices)
    if router.norm_topk_prob is True:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * router.routed_scaling_factor, indices


def _relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


@settings(max_examples=25)
@given(params=deepseek_v3_params(), batch=st.integers(1, 3), length=st.integers(1, 10), seed=st.integers(0, 1000))
def test_logits_and_gradients_match(*, params: DeepseekV3Params, batch: int, length: int, seed: int) -> None:
    torch.manual_seed(seed)
    mapper = sparse_from_hugging_face(params, layout="fused")
    reference = _reference(params)
    ours = DeepseekV3ForCausalLM(params).double()
    ours.load_state_dict(mapper.apply_all(dict(reference.state_dict())))
    input_ids = torch.randint(0, params.vocab_size, (batch, length))
    got, expected = ours(input_ids), reference(input_ids).logits
    # Both implementations round the angles of at most 10 positions to float32, in a different order.
    rounding = 10 * torch.finfo(torch.float32).eps
    assert _relative_error(got, expected) <= rounding

    gradient = torch.randn_like(expected)
    got.backward(gradient)
    expected.backward(gradient)
    assert_same_gradients(ours, mapper, reference.state_dict(keep_vars=True), tolerance=8 * rounding)


def test_the_latent_cache_does_not_change_greedy_text() -> None:
    torch.manual_seed(1)
    model = DeepseekV3ForCausalLM(PARAMS).double()
    prompts = torch.randint(1, 19, (2, 6))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    cached, whole = (
        generate(
            model, prompts, prompt_mask=mask, max_new_tokens=10, max_context=30, temperature=0, use_cache=use_cache
        )
        for use_cache in (True, False)
    )
    assert torch.equal(cached.token_ids, whole.token_ids)
    torch.testing.assert_close(cached.log_probs, whole.log_probs, rtol=torch.finfo(torch.float32).eps, atol=0)


def test_each_stage_loads_its_tensors_from_the_checkpoint() -> None:
    params = _exported()
    built = [name for i in range(3) for name in DeepseekV3ForCausalLM(params, StageInfo(i, 3)).state_dict()]
    for layout in ("per_expert", "fused"):
        assert sorted(built) == sorted(sparse_from_hugging_face(params, layout=layout).outputs)


def test_an_export_loads_in_the_reference_and_back(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers import DeepseekV3ForCausalLM as Reference

    params = _exported()
    mapper = sparse_from_hugging_face(params)
    model = DeepseekV3ForCausalLM(params)
    for index in (1, 2):
        torch.nn.init.normal_(model.get_buffer(f"backbone.layers.{index}.feed_forward.router.selection_bias"))
    files = {"config.json": DEEPSEEK_V3.write(params)}
    save_model_state(model, tmp_path / "export", mapper.inverse(), extra_files=files)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert isinstance(reference, Reference)
    reference.config._experts_implementation = "eager"  # torch's grouped kernel takes no float64
    input_ids = torch.randint(0, 21, (2, 9))
    assert_rounds_like(model(input_ids), in_float64(reference, input_ids).logits, peer=reference(input_ids).logits)

    reference.save_pretrained(tmp_path / "theirs")
    again = DeepseekV3ForCausalLM(params)
    load_model_state(again, tmp_path / "theirs", mapper)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_a_released_float8_checkpoint_loads(tmp_path: Path) -> None:
    """Quantized as in the release: all linear layers of the decoder layers, but neither routers nor embeddings."""
    params = _exported()
    plain = sparse_from_hugging_face(params)
    layout = Fp8Blocks((8, 4))
    scaled = [name for name in plain.inputs if re.search(r"_proj(_with_mqa)?\.weight$", name)]
    assert len(scaled) == 3 * 5 + 3 + 2 * (3 + 3 * 4)
    mapper = dequantize_inputs(plain, layout, [*plain.inputs, *(f"{name}_scale_inv" for name in scaled)])
    model, again = DeepseekV3ForCausalLM(params), DeepseekV3ForCausalLM(params)
    save_model_state(model, tmp_path, mapper.inverse())
    load_model_state(again, tmp_path, dequantize_inputs(plain, layout, ModelFolder.open(tmp_path).tensors))
    held = dict(read_model_state(tmp_path))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert held[name].dtype == torch.float8_e4m3fn
    scales = held[f"{name}_scale_inv"].repeat_interleave(8, 0)[:12].repeat_interleave(4, 1)
    got = again.get_parameter("backbone.layers.1.feed_forward.experts.up_proj.weight")[3]
    assert torch.equal(got, held[name].float() * scales)
    assert (got - model.get_parameter("backbone.layers.1.feed_forward.experts.up_proj.weight")[3]).abs().max() > 0
    embedding = "backbone.embedding.weight"
    assert torch.equal(again.get_parameter(embedding), model.get_parameter(embedding))


@pytest.mark.parametrize("changes", [{}, {"q_rank": None, "rotary_layout": "half", "rope_scaling": None}])
def test_config_round_trip(changes: dict[str, Any]) -> None:
    params = replace(_exported(), **changes)
    written = json.loads(json.dumps(DEEPSEEK_V3.write(params)))
    assert DEEPSEEK_V3.read(written) == params


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, r"config\.json has model_type = 'qwen3'; only 'deepseek_v3' is supported"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            r"quantization_config of config\.json has quant_method = 'awq'; expected 'fp8'",
        ),
        ({"n_group": None}, r"config\.json has no 'n_group'; expected a value of type int"),
        ({"topk_group": None}, r"config\.json has no 'topk_group'"),
        ({"attention_bias": True}, r"config\.json has attention_bias = True; only False is supported"),
        ({"scoring_func": "softmax"}, r"config\.json has scoring_func = 'softmax'; only 'sigmoid' is supported"),
        ({"moe_layer_freq": 2}, r"config\.json has moe_layer_freq = 2; only 1 is supported"),
        ({"kv_lora_rank": None}, r"config\.json has no 'kv_lora_rank'"),
        ({"head_dim": 3}, r"config\.json has head_dim = 3; expected qk_rope_head_dim = "),
        ({"num_key_value_heads": 1}, r"config\.json has num_key_value_heads = 1; expected num_attention_heads = "),
        ({"num_experts_per_tok": 99}, r"top_k = 99; .*In config\.json .*top_k is num_experts_per_tok"),
        (
            {
                "rope_parameters": None,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0},
            },
            r"rope_scaling of config\.json, of rope_type 'linear', has mscale_all_dim = 1\.0; expected only known",
        ),
    ],
)
def test_unsupported_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DEEPSEEK_V3.read({**DEEPSEEK_V3.write(_exported()), **changes})


def test_missing_q_lora_rank_is_refused() -> None:
    config = DEEPSEEK_V3.write(_exported())
    del config["q_lora_rank"]
    with pytest.raises(UserError, match=r"config\.json has no 'q_lora_rank'; expected a value of type int"):
        DEEPSEEK_V3.read(config)


def test_config_without_shared_experts_is_refused() -> None:
    with pytest.raises(UserError, match="n_shared_experts = 0"):
        DEEPSEEK_V3.write(replace(_exported(), num_shared_experts=0))
