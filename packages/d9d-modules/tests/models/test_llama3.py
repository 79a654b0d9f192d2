import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from d9d_dist import StageInfo, UserError, materialize
from d9d_dist.testing import assert_rounds_like, in_float64
from d9d_modules import LLAMA3, Llama3ForCausalLM, Llama3Params, Llama3Scaling, decoder_from_hugging_face
from d9d_state import load_model_state, save_model_state

PARAMS = Llama3Params(
    vocab_size=19,
    hidden_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    tie_word_embeddings=True,
    rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=4),
    initializer_range=0.3,
)


def test_chained_stages_equal_the_whole_tied_model() -> None:
    whole = Llama3ForCausalLM(PARAMS).double()
    state = whole.state_dict()
    input_ids, labels = torch.randint(0, 19, (2, 2, 7))
    hidden = input_ids
    for index in range(3):
        stage = Llama3ForCausalLM(PARAMS, StageInfo(index, 3)).double()
        assert list(stage.layers) == [str(index)]
        own = {name: state[name] for name in stage.state_dict() if name != "lm_head.weight"}
        stage.load_state_dict(own, strict=False)
        hidden = stage(hidden, labels=labels)
    torch.testing.assert_close(hidden, whole(input_ids, labels=labels), rtol=1e-12, atol=1e-12)


def test_there_is_no_qk_norm_and_no_window() -> None:
    model = Llama3ForCausalLM(PARAMS)
    names = {name.split("layers.0.")[-1] for name in model.state_dict() if "layers.0." in name}
    attention = {f"attention.{projection}_proj.weight" for projection in "qkvo"}
    feed_forward = {f"feed_forward.{projection}_proj.weight" for projection in ("gate", "up", "down")}
    assert names == attention | feed_forward | {"attention_norm.weight", "feed_forward_norm.weight"}
    assert PARAMS.window(0) is None


def test_the_scaling_changes_the_result() -> None:
    scaled, plain = Llama3ForCausalLM(PARAMS), Llama3ForCausalLM(replace(PARAMS, rope_scaling=None))
    plain.load_state_dict(scaled.state_dict())
    input_ids = torch.randint(0, 19, (1, 9))
    assert not torch.allclose(scaled(input_ids), plain(input_ids), atol=1e-4)


def test_materialize_after_construction_on_meta_sets_all_parameters() -> None:
    with torch.device("meta"):
        model = Llama3ForCausalLM(PARAMS)
        assert model(torch.empty(2, 3, dtype=torch.int64)).shape == (2, 3, 19)
    materialize(model, device=torch.device("cpu"), seed=3)
    assert model(torch.randint(0, 19, (2, 3))).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, r"num_layers = 0; expected a number above 0"),
        ({"num_kv_heads": 3}, r"num_kv_heads = 3 does not divide num_heads = 4; use one of 1, 2, 4\."),
    ],
)
def test_invalid_sizes_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(PARAMS, **changes)


EXPORTED = Llama3Params(
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
    from transformers import LlamaConfig

    params = replace(EXPORTED, **changes)
    written = json.loads(json.dumps(LLAMA3.write(params)))
    assert LLAMA3.read(written) == params
    # The file that `transformers` writes itself.
    assert LLAMA3.read(LlamaConfig.from_dict(written).to_diff_dict()) == params


def test_head_sizes_are_optional() -> None:
    written = {**LLAMA3.write(EXPORTED), "head_dim": None}
    del written["num_key_value_heads"]
    params = LLAMA3.read(written)
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
        LLAMA3.read({**LLAMA3.write(EXPORTED), **changes})


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_are_exchanged_with_transformers(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    params = replace(EXPORTED, tie_word_embeddings=tied)
    model, mapper = Llama3ForCausalLM(params), decoder_from_hugging_face(params)
    config = LLAMA3.write(params)
    save_model_state(model, tmp_path / "export", mapper.inverse(), extra_files={"config.json": config})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert isinstance(reference, LlamaForCausalLM)
    input_ids = torch.randint(0, params.vocab_size, (2, 9))
    assert_rounds_like(model(input_ids), in_float64(reference, input_ids).logits, peer=reference(input_ids).logits)

    reference.save_pretrained(tmp_path / "saved")
    loaded = Llama3ForCausalLM(LLAMA3.read(json.loads((tmp_path / "saved/config.json").read_text())))
    load_model_state(loaded, tmp_path / "saved", mapper)
    assert torch.equal(loaded(input_ids), model(input_ids))


def test_a_window_is_not_exported() -> None:
    params = replace(EXPORTED, sliding_window=3, sliding_layers=(0,))
    with pytest.raises(
        UserError, match=r"LlamaForCausalLM cannot express sliding_window = 3 \(read as None\), sliding_"
    ):
        LLAMA3.write(params)
