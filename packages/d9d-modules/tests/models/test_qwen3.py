"""Comparison with an independent implementation: `transformers`' Qwen3."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import assert_rounds_like, in_float64
from d9d_modules import (
    QWEN3,
    LongRopeScaling,
    Qwen3ForCausalLM,
    Qwen3Params,
    YarnScaling,
    decoder_from_hugging_face,
)
from d9d_state import load_model_state, save_model_state


def _reference(params: Qwen3Params) -> Any:
    from transformers import Qwen3Config
    from transformers import Qwen3ForCausalLM as Reference

    model = Reference(Qwen3Config.from_dict(QWEN3.write(params)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def _own_state(reference: nn.Module, *, tied: bool) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in reference.state_dict().items() if not (tied and name == "lm_head.weight")}


@pytest.mark.parametrize("tied", [False, True])
def test_every_stage_finds_its_tensors_in_the_checkpoint(tied: bool) -> None:
    params = _params(tied=tied)
    num_stages = 1 if tied else 3
    mapper = decoder_from_hugging_face(params)
    built = [
        name
        for i in range(num_stages)
        for name, _ in Qwen3ForCausalLM(params, StageInfo(i, num_stages)).named_parameters()
    ]
    assert sorted(built) == sorted(mapper.outputs)
    reference = _reference(params)
    assert set(mapper.inputs) == set(_own_state(reference, tied=tied))


def _params(*, tied: bool = False, **changes: Any) -> Qwen3Params:
    params = Qwen3Params(
        vocab_size=21,
        hidden_size=16,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=24,
        tie_word_embeddings=tied,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        max_position_embeddings=128,
    )
    return replace(params, **changes)


SLIDING = {"sliding_window": 3, "sliding_layers": (0, 2)}
YARN = YarnScaling(factor=4.0, original_max_positions=32)


@pytest.mark.parametrize("layers", [[0, 2], (2, 0), (0, 2, 0)])
def test_layers_of_a_window_have_any_order(layers: Any) -> None:
    written = QWEN3.write(_params(sliding_window=3, sliding_layers=layers))
    assert written == QWEN3.write(_params(sliding_window=3, sliding_layers=(0, 2)))


def test_factors_of_a_scaling_may_be_lists() -> None:
    short: Any = [1.0, 2.0, 3.0]
    written = QWEN3.write(
        _params(
            rope_scaling=LongRopeScaling(short_factors=short, long_factors=short, factor=4.0, original_max_positions=32)
        )
    )
    read = QWEN3.read(written).rope_scaling
    assert isinstance(read, LongRopeScaling)
    assert read.long_factors == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("changes", [{}, {"tied": True}, SLIDING, {"rope_scaling": YARN}])
def test_the_config_survives_the_round_trip(changes: dict[str, Any]) -> None:
    from transformers import Qwen3Config

    params = _params(**changes)
    written = json.loads(json.dumps(QWEN3.write(params)))
    assert QWEN3.read(written) == params
    # The file that `transformers` writes itself.
    assert QWEN3.read(Qwen3Config.from_dict(written).to_diff_dict()) == params


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"config\.json has model_type = 'llama'; only 'qwen3' is supported"),
        ({"hidden_act": "gelu"}, r"config\.json has hidden_act = 'gelu'; only 'silu' is supported"),
        ({"attention_bias": True}, r"config\.json has attention_bias = True; only False is supported"),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            r"layer_types = .*; expected a list of num_hidden_layers = 3 items",
        ),
        ({"rope_scaling": {"rope_type": "proportional"}}, r"config\.json has rope_type = 'proportional'"),
        ({"head_dim": None}, r"config\.json has no 'head_dim'"),
        ({"num_key_value_heads": 3}, r"num_kv_heads = 3 does not divide num_heads = 4"),
    ],
)
def test_an_unsupported_config_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        QWEN3.read({**QWEN3.write(_params()), **changes})


def test_layers_from_max_window_layers_on_have_a_window() -> None:
    written = {**QWEN3.write(_params()), "use_sliding_window": True, "sliding_window": 7}
    params = QWEN3.read({**written, "max_window_layers": 2})
    assert (params.sliding_window, params.sliding_layers) == (7, (2,))
    assert QWEN3.read(written) == _params()


def test_a_missing_window_is_that_of_the_reference_and_null_is_none() -> None:
    from transformers import Qwen3Config

    written: dict[str, Any] = {**QWEN3.write(_params()), "use_sliding_window": True, "max_window_layers": 2}
    assert QWEN3.read(written).sliding_window is None
    del written["sliding_window"]
    assert QWEN3.read(written).sliding_window == Qwen3Config(**written).sliding_window == 4096


@pytest.mark.parametrize("changes", [{}, {"tied": True}, SLIDING, {"rope_scaling": YARN}])
def test_an_export_loads_in_the_reference(tmp_path: Path, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM
    from transformers import Qwen3ForCausalLM as Reference

    params = _params(**changes)
    model = Qwen3ForCausalLM(params)
    mapper = decoder_from_hugging_face(params).inverse()
    save_model_state(model, tmp_path / "export", mapper, extra_files={"config.json": QWEN3.write(params)})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert isinstance(reference, Reference)
    input_ids = torch.randint(0, params.vocab_size, (2, 9))
    assert_rounds_like(model(input_ids), in_float64(reference, input_ids).logits, peer=reference(input_ids).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_the_reference_loads_in_stages(tmp_path: Path, tied: bool) -> None:
    reference = _reference(_params(tied=tied))
    reference.save_pretrained(tmp_path)
    params = QWEN3.read(json.loads((tmp_path / "config.json").read_text()))
    input_ids = torch.randint(0, params.vocab_size, (2, 9))
    hidden, num_stages = input_ids, 1 if tied else 2
    for index in range(num_stages):
        stage = Qwen3ForCausalLM(params, StageInfo(index, num_stages))
        load_model_state(stage, tmp_path, decoder_from_hugging_face(params))
        hidden = stage(hidden)
    assert_rounds_like(hidden, in_float64(reference, input_ids).logits, peer=reference(input_ids).logits)
