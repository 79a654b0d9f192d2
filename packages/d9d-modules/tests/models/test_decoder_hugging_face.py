"""Against an independent implementation: `transformers`' Qwen3 and Llama."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_modules import (
    DecoderForCausalLM,
    DecoderParams,
    DynamicNtkScaling,
    LinearScaling,
    Llama3Params,
    Llama3Scaling,
    LongRopeScaling,
    Qwen3Params,
    RopeScaling,
    YarnScaling,
    llama3_from_hugging_face,
    llama3_hugging_face_config,
    qwen3_from_hugging_face,
    qwen3_hugging_face_config,
    rotary_tables,
)
from d9d_state import JsonValue, StateMapper

MAX_POSITIONS = 16


@dataclass(frozen=True)
class Family:
    build: Callable[..., Any]
    config: Callable[[Any], dict[str, JsonValue]]
    mapper: Callable[[Any], StateMapper]
    reference: type[nn.Module]
    reference_config: type[transformers.PreTrainedConfig]


FAMILIES = {
    "qwen3": Family(
        Qwen3Params,
        qwen3_hugging_face_config,
        qwen3_from_hugging_face,
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config,
    ),
    "llama3": Family(
        Llama3Params,
        llama3_hugging_face_config,
        llama3_from_hugging_face,
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
    ),
}


@st.composite
def rope_scalings(draw: st.DrawFn, head_dim: int) -> RopeScaling | None:
    factor = draw(st.floats(1.0, 8.0))
    original = draw(st.sampled_from([4, 15]))
    factors = st.tuples(*[st.floats(0.5, 4.0)] * (head_dim // 2))
    scalings: list[RopeScaling | None] = [
        None,
        LinearScaling(factor=factor),
        YarnScaling(factor=factor, original_max_positions=original, beta_fast=draw(st.sampled_from([32.0, 2.0]))),
        Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=original),
        LongRopeScaling(
            short_factors=draw(factors), long_factors=draw(factors), factor=factor, original_max_positions=original
        ),
        *([DynamicNtkScaling(factor=factor, original_max_positions=MAX_POSITIONS)] if head_dim > 2 else []),
    ]
    return draw(st.sampled_from(scalings))


@st.composite
def decoder_params(draw: st.DrawFn, family: str) -> Any:
    num_layers = draw(st.integers(1, 3))
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(1, 8))
    sliding: dict[str, Any] = {}
    if family == "qwen3":
        hidden_size = draw(st.integers(2, 24))
        layers = draw(st.sets(st.integers(0, num_layers - 1)))
        if layers:
            sliding = {"sliding_window": draw(st.integers(1, 6)), "sliding_layers": tuple(sorted(layers))}
    else:
        hidden_size = num_heads * draw(st.integers(1, 5))
    return FAMILIES[family].build(
        vocab_size=draw(st.integers(3, 40)),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(st.integers(1, 32)),
        tie_word_embeddings=draw(st.booleans()),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0, 1_000_000.0])),
        rope_scaling=draw(rope_scalings(head_dim)),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        max_position_embeddings=MAX_POSITIONS,
        **sliding,
    )


def _reference(family: Family, params: DecoderParams, dtype: torch.dtype) -> Any:
    model: Any = family.reference(family.reference_config.from_dict(family.config(params))).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                _keep_float64(module)
    _take_rotary_tables(model.model.rotary_emb, params)
    return model


def _keep_float64(norm: Any) -> None:
    """The reference rounds to float32 inside its norm, whatever it is given."""
    epsilon = norm.variance_epsilon
    norm.forward = lambda x: F.rms_norm(x, norm.weight.shape, norm.weight, epsilon)


def _take_rotary_tables(rotary: Any, params: DecoderParams) -> None:
    """Both round their tables to float32, and not to the same side: see that they agree, then take one."""
    own_forward = rotary.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        tables = rotary_tables(
            position_ids, head_dim=params.head_dim, theta=params.rope_theta, scaling=params.rope_scaling
        )
        both = tuple(torch.cat((table, table), dim=-1).to(x.dtype) for table in tables)
        torch.testing.assert_close(both, own_forward(x, position_ids), rtol=0, atol=3e-5)
        return both[0], both[1]

    rotary.forward = forward


def _apply(mapper: StateMapper, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    mapped: dict[str, Tensor] = {}
    for group in mapper.groups:
        mapped |= mapper.apply({name: tensors[name] for name in group.inputs})
    return mapped


def _relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), batch=st.integers(1, 3), length=st.integers(1, 12), seed=st.integers(0, 1000))
def test_logits_losses_and_gradients_match(
    *, name: str, dtype: torch.dtype, tolerance: float, data: st.DataObject, batch: int, length: int, seed: int
) -> None:
    family, params = FAMILIES[name], data.draw(decoder_params(name))
    torch.manual_seed(seed)
    reference = _reference(family, params, dtype)
    mapper = family.mapper(params)
    ours = DecoderForCausalLM(params).to(dtype)
    state = _apply(mapper, reference.state_dict())
    ours.load_state_dict(state, strict=False)
    assert state.keys() == dict(ours.named_parameters()).keys()
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
    expected_gradients = _apply(mapper, named)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for parameter_name, gradient in gradients.items():
        assert gradient is not None, parameter_name
        # Relative to the whole gradient: a single tensor may be zero but for rounding (one token has no one to attend).
        difference = (gradient - expected_gradients[parameter_name]).abs().max()
        assert difference <= tolerance * largest, parameter_name
