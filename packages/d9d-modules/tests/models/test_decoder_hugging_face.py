"""Comparison with an independent implementation: `transformers`' Qwen3 and Llama."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
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
from d9d_state import JsonValue, StateMapper, load_model_state, save_model_state

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


SCALINGS: tuple[type[RopeScaling] | None, ...] = (None, *get_args(get_args(RopeScaling)[0]))


@st.composite
def rope_scalings(draw: st.DrawFn, kind: type[RopeScaling] | None, head_dim: int) -> RopeScaling | None:
    factor, original = draw(st.floats(1.0, 8.0)), draw(st.sampled_from([4, 15]))
    if kind is None:
        return None
    if kind is LinearScaling:
        return LinearScaling(factor=factor)
    if kind is DynamicNtkScaling:
        return DynamicNtkScaling(factor=factor, original_max_positions=MAX_POSITIONS)
    if kind is YarnScaling:
        beta_fast = draw(st.sampled_from([32.0, 2.0]))
        return YarnScaling(factor=factor, original_max_positions=original, beta_fast=beta_fast)
    if kind is Llama3Scaling:
        return Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=original)
    assert kind is LongRopeScaling
    short, long = draw(st.tuples(*2 * [st.tuples(*[st.floats(0.5, 4.0)] * (head_dim // 2))]))
    return LongRopeScaling(short_factors=short, long_factors=long, factor=factor, original_max_positions=original)


@st.composite
def decoder_params(draw: st.DrawFn, family: str, scaling_kind: type[RopeScaling] | None) -> Any:
    num_layers = draw(st.integers(1, 3))
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(2 if scaling_kind is DynamicNtkScaling else 1, 8))
    scaling = draw(rope_scalings(scaling_kind, head_dim))
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
        rope_scaling=scaling,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        # Dynamic NTK scaling starts beyond the pretraining length.
        max_position_embeddings=MAX_POSITIONS if isinstance(scaling, DynamicNtkScaling) else 64,
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
    """Replace the norm of the reference, which always rounds to float32."""
    epsilon = norm.variance_epsilon
    norm.forward = lambda x: F.rms_norm(x, norm.weight.shape, norm.weight, epsilon)


def _take_rotary_tables(rotary: Any, params: DecoderParams) -> None:
    """Check that both rotary tables agree up to float32 rounding, then use one for both models."""
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
def test_logits_losses_and_gradients_match(name: str, dtype: torch.dtype, tolerance: float) -> None:
    drawn: list[Any] = []
    for kind in SCALINGS:

        @settings(max_examples=6, deadline=None, derandomize=True, database=None)
        @given(
            params=decoder_params(name, kind),
            shape=st.tuples(st.integers(1, 3), st.integers(1, 12)),
            seed=st.integers(0, 1000),
        )
        def match(params: DecoderParams, shape: tuple[int, int], seed: int) -> None:
            drawn.append(params)
            _compare(FAMILIES[name], params, dtype=dtype, tolerance=tolerance, shape=shape, seed=seed)

        match()
    assert len(drawn) >= 30
    assert {params.tie_word_embeddings for params in drawn} == {False, True}
    heads = {(params.num_kv_heads == 1, params.num_heads == params.num_kv_heads) for params in drawn}
    assert heads == {(False, False), (False, True), (True, False), (True, True)}
    assert len({params.head_dim for params in drawn}) > 4
    windows = {params.window(index) is None for params in drawn for index in range(params.num_layers)}
    assert windows == ({False, True} if name == "qwen3" else {True})


def _compare(
    family: Family, params: Any, *, dtype: torch.dtype, tolerance: float, shape: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    reference = _reference(family, params, dtype)
    mapper = family.mapper(params)
    ours = DecoderForCausalLM(params).to(dtype)
    state = _apply(mapper, reference.state_dict())
    ours.load_state_dict(state, strict=False)
    assert state.keys() == dict(ours.named_parameters()).keys()
    input_ids, labels = torch.randint(0, params.vocab_size, (2, *shape))
    labels[:, 1::3] = -100
    position_ids = torch.arange(shape[1]) + torch.randint(0, 50, (shape[0], 1))

    expected_logits = reference(input_ids, position_ids=position_ids).logits
    assert _relative_error(ours(input_ids, position_ids=position_ids), expected_logits) <= tolerance

    expected = F.cross_entropy(expected_logits.flatten(0, 1), labels.flatten(), reduction="none").view(shape)
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
        expected_gradient = expected_gradients[parameter_name]
        # A tensor may be zero up to rounding: a single token attends only to itself.
        scale = max(expected_gradient.abs().max(), 1e-2 * largest)
        assert (gradient - expected_gradient).abs().max() <= tolerance * scale, parameter_name


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_what_was_imported_is_exported_bit_for_bit(tmp_path: Path, name: str, tied: bool, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    params = family.build(
        vocab_size=21,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=24,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    reference: Any = family.reference(family.reference_config.from_dict(family.config(params)))
    reference.to(dtype).save_pretrained(tmp_path / "theirs")
    ours, mapper = DecoderForCausalLM(params).to(dtype), family.mapper(params)
    load_model_state(ours, tmp_path / "theirs", mapper)
    config = family.config(params)
    save_model_state(ours, tmp_path / "ours", mapper.inverse(), extra_files={"config.json": config})

    _assert_same_bits(_tensors(tmp_path / "ours"), _tensors(tmp_path / "theirs"))
    original, exported = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f) for f in ("theirs", "ours"))
    assert exported.dtype == dtype
    _assert_same_bits(exported.state_dict(), original.state_dict())
    input_ids = torch.randint(0, params.vocab_size, (2, 9))
    assert torch.equal(exported(input_ids).logits, original(input_ids).logits)
    # A checkpoint saved by transformers is read back.
    exported.save_pretrained(tmp_path / "again")
    again = DecoderForCausalLM(params).to(dtype)
    load_model_state(again, tmp_path / "again", mapper)
    _assert_same_bits(dict(again.state_dict()), dict(ours.state_dict()))
