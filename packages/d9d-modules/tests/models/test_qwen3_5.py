"""Qwen3.5 inside a multimodal configuration and checkpoint; d9d-moe compares the models with `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import StageInfo, UserError
from d9d_modules import (
    QWEN3_5,
    DecoderForCausalLM,
    GatedDeltaNet,
    GroupedQueryAttention,
    Qwen35Params,
    decoder_from_hugging_face,
    from_pretrained_config,
)
from d9d_state import ModelFolder, load_model_state, parallel, rename, save_model_state

PARAMS = Qwen35Params(
    vocab_size=19,
    hidden_size=12,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rotary_dim=2,
    intermediate_size=20,
    full_layers=(2,),
    num_linear_key_heads=2,
    num_linear_value_heads=4,
    linear_key_dim=6,
    linear_value_dim=5,
)


def _multimodal() -> dict[str, Any]:
    text = QWEN3_5.write(PARAMS)
    rope = text["rope_parameters"]
    assert isinstance(rope, dict)
    text = {**text, "rope_parameters": {**rope, "mrope_section": [1, 0, 0], "mrope_interleaved": True}}
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}, "tie_word_embeddings": False}


def test_layers_are_linear_or_attention_by_index() -> None:
    kinds = [type(layer.attention) for layer in DecoderForCausalLM(PARAMS).layers.values()]
    assert kinds == [GatedDeltaNet, GatedDeltaNet, GroupedQueryAttention]
    assert QWEN3_5.read(QWEN3_5.write(PARAMS)) == PARAMS


def test_interval_selects_the_layers_with_attention() -> None:
    config = {**QWEN3_5.write(PARAMS), "layer_types": None, "full_attention_interval": 2}
    assert QWEN3_5.read(config).full_layers == (1,)


def test_the_language_model_of_a_multimodal_configuration_is_read() -> None:
    assert QWEN3_5.read(_multimodal()) == PARAMS
    mapper = decoder_from_hugging_face(PARAMS, prefix="model.language_model.")
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in mapper.inputs
    assert "lm_head.weight" in mapper.inputs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True, but False in text_config; expected equal"),
        ({"text_config": 3}, "text_config = 3; expected an object"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq'; expected 'fp8'"),
    ],
)
def test_multimodal_configurations_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        QWEN3_5.read({**_multimodal(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "expected a list of num_hidden_layers = 3 items"),
        ({"attn_output_gate": False}, "attn_output_gate = False; only True is supported"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]; only \[\] is supported"),
        ({"linear_num_key_heads": 3}, "In config.json num_linear_key_heads is linear_num_key_heads"),
    ],
)
def test_unsupported_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DecoderForCausalLM(QWEN3_5.read({**QWEN3_5.write(PARAMS), **changes}))


def test_weights_return_bit_for_bit() -> None:
    mapper, model = decoder_from_hugging_face(PARAMS), DecoderForCausalLM(PARAMS)
    state, inverse = model.state_dict(), mapper.inverse()
    on_disk: dict[str, torch.Tensor] = {}
    for group in inverse.groups:
        on_disk |= inverse.apply({name: state[name] for name in group.inputs})
    assert on_disk["model.layers.0.linear_attn.conv1d.weight"].shape == (2 * 12 + 20, 1, 4)
    again = nn.Module.state_dict(model)
    for group in mapper.groups:
        again |= mapper.apply({name: on_disk[name] for name in group.inputs})
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_the_language_model_of_a_multimodal_folder_is_recognized(tmp_path: Path) -> None:
    model = DecoderForCausalLM(PARAMS)
    mapper = decoder_from_hugging_face(PARAMS, prefix="model.language_model.")
    others = {"mtp.fc.weight": torch.ones(2), "model.visual.patch_embed.weight": torch.ones(3)}
    for name, tensor in others.items():
        model.register_buffer(name.replace(".", "_"), tensor)
    renames = parallel(mapper, *(rename(name, name.replace(".", "_")) for name in others))
    save_model_state(model, tmp_path / "released", renames.inverse(), extra_files={"config.json": _multimodal()})
    found = from_pretrained_config(tmp_path / "released")
    assert found.params == PARAMS
    assert set(found.unused) == set(others)
    again = found.build(StageInfo())
    load_model_state(again, tmp_path / "released", found.load_mapper())
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in again.state_dict().items())
    save_model_state(again, tmp_path / "text", found.state_mapper().inverse(), extra_files=found.export_files())
    text = from_pretrained_config(tmp_path / "text")
    assert text.params == PARAMS
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in ModelFolder.open(tmp_path / "text").tensors
