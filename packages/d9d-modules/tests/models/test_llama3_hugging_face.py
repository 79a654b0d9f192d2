"""Names and `config.json` compared with `transformers`' Llama; `test_decoder_hugging_face` compares results."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from d9d_dist import UserError
from d9d_dist.testing import assert_rounds_like
from d9d_modules import (
    Llama3ForCausalLM,
    Llama3Params,
    Llama3Scaling,
    llama3_from_hugging_face,
    llama3_hugging_face_config,
    llama3_params_from_hugging_face,
)
from d9d_state import load_model_state, save_model_state

PARAMS = Llama3Params(
    vocab_size=21,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=24,
    rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16),
    initializer_range=0.2,
    max_position_embeddings=128,
)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "rope_scaling": None}])
def test_the_config_survives_the_round_trip(changes: dict[str, Any]) -> None:
    params = replace(PARAMS, **changes)
    written = json.loads(json.dumps(llama3_hugging_face_config(params)))
    assert llama3_params_from_hugging_face(written) == params
    # The file that `transformers` writes itself.
    assert llama3_params_from_hugging_face(LlamaConfig.from_dict(written).to_diff_dict()) == params


def test_head_sizes_are_optional() -> None:
    written = {**llama3_hugging_face_config(PARAMS), "head_dim": None}
    del written["num_key_value_heads"]
    params = llama3_params_from_hugging_face(written)
    assert (params.head_dim, params.num_kv_heads) == (4, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, r"config\.json has model_type = 'qwen3'; only 'llama' is supported"),
        ({"hidden_act": "gelu"}, r"config\.json has hidden_act = 'gelu'; only 'silu' is supported"),
        ({"attention_bias": True}, r"config\.json has attention_bias = True; only False is supported"),
        ({"mlp_bias": True}, r"config\.json has mlp_bias = True; only False is supported"),
        ({"hidden_size": None}, r"config\.json has no 'hidden_size'"),
    ],
)
def test_an_unsupported_config_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llama3_params_from_hugging_face({**llama3_hugging_face_config(PARAMS), **changes})


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_go_both_ways(tmp_path: Path, tied: bool) -> None:
    params = replace(PARAMS, tie_word_embeddings=tied)
    model, mapper = Llama3ForCausalLM(params), llama3_from_hugging_face(params)
    config = llama3_hugging_face_config(params)
    save_model_state(model, tmp_path / "export", mapper.inverse(), extra_files={"config.json": config})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert isinstance(reference, LlamaForCausalLM)
    input_ids = torch.randint(0, params.vocab_size, (2, 9))
    exact = copy.deepcopy(model).double()(input_ids)
    assert_rounds_like([reference(input_ids).logits], [exact], peer=[model(input_ids)])

    reference.save_pretrained(tmp_path / "saved")
    loaded = Llama3ForCausalLM(
        llama3_params_from_hugging_face(json.loads((tmp_path / "saved/config.json").read_text()))
    )
    load_model_state(loaded, tmp_path / "saved", mapper)
    assert torch.equal(loaded(input_ids), model(input_ids))
