"""Against an independent implementation: `transformers`' Qwen3."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Reference
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from d9d_dist import StageInfo, UserError
from d9d_modules import (
    Qwen3ForCausalLM,
    Qwen3Params,
    qwen3_from_hugging_face,
    qwen3_hugging_face_config,
    qwen3_params_from_hugging_face,
)
from d9d_state import StateMapper, load_model_state, save_model_state


@st.composite
def qwen3_params(draw: st.DrawFn) -> Qwen3Params:
    num_kv_heads = draw(st.integers(1, 3))
    return Qwen3Params(
        vocab_size=draw(st.integers(3, 40)),
        hidden_size=draw(st.integers(2, 24)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        intermediate_size=draw(st.integers(1, 32)),
        tie_word_embeddings=draw(st.booleans()),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0, 1_000_000.0])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
    )


def _reference(params: Qwen3Params, dtype: torch.dtype) -> Reference:
    model = Reference(Qwen3Config.from_dict(qwen3_hugging_face_config(params))).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    if dtype == torch.float64:
        for module in model.modules():
            if isinstance(module, Qwen3RMSNorm):
                _keep_float64(module)
    return model


def _keep_float64(norm: Qwen3RMSNorm) -> None:
    """The reference rounds to float32 inside its norm, whatever it is given."""
    epsilon = norm.variance_epsilon

    def forward(hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, norm.weight.shape, norm.weight, epsilon)

    norm.forward = forward


def _ours(params: Qwen3Params, state: dict[str, Tensor], dtype: torch.dtype) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(params).to(dtype)
    missing, unexpected = model.load_state_dict(_apply(qwen3_from_hugging_face(params), state), strict=False)
    assert missing == (["lm_head.weight"] if params.tie_word_embeddings else [])
    assert not unexpected
    return model


def _apply(mapper: StateMapper, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    mapped: dict[str, Tensor] = {}
    for group in mapper.groups:
        mapped |= mapper.apply({name: tensors[name] for name in group.inputs})
    return mapped


def _own_state(reference: nn.Module, *, tied: bool) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in reference.state_dict().items() if not (tied and name == "lm_head.weight")}


def _relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(params=qwen3_params(), batch=st.integers(1, 3), length=st.integers(1, 12), seed=st.integers(0, 1000))
def test_logits_losses_and_gradients_match(
    *, dtype: torch.dtype, tolerance: float, params: Qwen3Params, batch: int, length: int, seed: int
) -> None:
    torch.manual_seed(seed)
    reference = _reference(params, dtype)
    ours = _ours(params, _own_state(reference, tied=params.tie_word_embeddings), dtype)
    input_ids, labels = torch.randint(0, params.vocab_size, (2, batch, length))
    labels[:, 1::3] = -100
    position_ids = torch.arange(length) + torch.randint(0, 50, (batch, 1))

    expected_logits = reference(input_ids, position_ids=position_ids).logits
    assert _relative_error(ours(input_ids, position_ids=position_ids), expected_logits) <= tolerance

    expected = F.cross_entropy(expected_logits.flatten(0, 1), labels.flatten(), reduction="none").view(batch, length)
    losses = ours(input_ids, position_ids=position_ids, labels=labels)
    assert _relative_error(losses, expected) <= tolerance

    expected.sum().backward()
    losses.sum().backward()
    named = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    expected_gradients = _apply(qwen3_from_hugging_face(params), named)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        assert gradient is not None, name
        # Relative to the whole gradient: a single tensor may be zero but for rounding (one token has no one to attend).
        assert (gradient - expected_gradients[name]).abs().max() <= tolerance * largest, name


@pytest.mark.parametrize("tied", [False, True])
def test_every_stage_finds_its_tensors_in_the_checkpoint(tied: bool) -> None:
    params = _params(tied=tied)
    num_stages = 1 if tied else 3
    mapper = qwen3_from_hugging_face(params)
    built = [
        name
        for i in range(num_stages)
        for name, _ in Qwen3ForCausalLM(params, StageInfo(i, num_stages)).named_parameters()
    ]
    assert sorted(built) == sorted(mapper.outputs)
    reference = _reference(params, torch.float32)
    assert set(mapper.inputs) == set(_own_state(reference, tied=tied))


def _params(*, tied: bool = False) -> Qwen3Params:
    return Qwen3Params(
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


@pytest.mark.parametrize("tied", [False, True])
def test_the_config_survives_the_round_trip(tied: bool) -> None:
    params = _params(tied=tied)
    written = json.loads(json.dumps(qwen3_hugging_face_config(params)))
    assert qwen3_params_from_hugging_face(written) == params
    # As `transformers` writes it itself.
    assert qwen3_params_from_hugging_face(Qwen3Config.from_dict(written).to_diff_dict()) == params


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"config\.json has model_type = 'llama'; only 'qwen3' is supported"),
        ({"hidden_act": "gelu"}, r"config\.json has hidden_act = 'gelu'; only 'silu' is supported"),
        ({"attention_bias": True}, r"config\.json has attention_bias = True; only False is supported"),
        ({"use_sliding_window": True}, r"config\.json has use_sliding_window = True; only False is supported"),
        ({"head_dim": None}, r"config\.json has no 'head_dim'"),
        ({"num_key_value_heads": 3}, r"num_kv_heads = 3 does not divide num_heads = 4"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        qwen3_params_from_hugging_face({**qwen3_hugging_face_config(_params()), **changes})


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_loads_in_the_reference(tmp_path: Path, tied: bool) -> None:
    params = _params(tied=tied)
    model = Qwen3ForCausalLM(params)
    mapper = qwen3_from_hugging_face(params).inverse()
    save_model_state(model, tmp_path / "export", mapper, extra_files={"config.json": qwen3_hugging_face_config(params)})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert isinstance(reference, Reference)
    input_ids = torch.randint(0, params.vocab_size, (2, 9))
    assert _relative_error(model(input_ids), reference(input_ids).logits) <= 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_the_reference_loads_in_stages(tmp_path: Path, tied: bool) -> None:
    reference = _reference(_params(tied=tied), torch.float32)
    reference.save_pretrained(tmp_path)
    params = qwen3_params_from_hugging_face(json.loads((tmp_path / "config.json").read_text()))
    input_ids = torch.randint(0, params.vocab_size, (2, 9))
    hidden, num_stages = input_ids, 1 if tied else 2
    for index in range(num_stages):
        stage = Qwen3ForCausalLM(params, StageInfo(index, num_stages))
        load_model_state(stage, tmp_path, qwen3_from_hugging_face(params))
        hidden = stage(hidden)
    assert _relative_error(hidden, reference(input_ids).logits) <= 1e-5
