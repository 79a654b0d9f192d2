"""Comparison with an independent implementation: `transformers`' Qwen3 and Llama."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.testing import assert_rounds_like, assert_trees_close
from d9d_modules import (
    LLAMA3,
    QWEN3,
    DecoderForCausalLM,
    DynamicNtkScaling,
    GroupedQueryParams,
    LinearScaling,
    Llama3Params,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    Qwen3Params,
    YarnScaling,
    decoder_from_hugging_face,
    rotary_tables,
)
from d9d_modules.models.decoder_params import RopeScaling
from d9d_state import JsonValue, StateMapper, load_model_state, save_model_state

MAX_POSITIONS = 16


@dataclass(frozen=True)
class Family:
    build: Callable[..., Any]
    config: Callable[[Any], dict[str, JsonValue]]
    mapper: Callable[[Any], StateMapper]
    reference_name: str

    def reference(self, params: Any) -> Any:
        """Return the model of `transformers`."""
        import transformers

        kind = getattr(transformers, self.reference_name)
        return kind(kind.config_class.from_dict(self.config(params)))


FAMILIES = {
    "qwen3": Family(
        Qwen3Params,
        QWEN3.write,
        decoder_from_hugging_face,
        "Qwen3ForCausalLM",
    ),
    "llama3": Family(
        Llama3Params,
        LLAMA3.write,
        decoder_from_hugging_face,
        "LlamaForCausalLM",
    ),
}


SCALINGS: tuple[type[RopeScaling] | None, ...] = (None, *get_args(get_args(RopeScaling)[0]))


@st.composite
def rope_scalings(draw: st.DrawFn, kind: type[RopeScaling] | None, head_dim: int) -> RopeScaling | None:
    factor, original = draw(st.floats(1.0, 8.0)), draw(st.sampled_from([4, 15]))
    if kind is None:
        return None
    if kind in {LinearScaling, NtkScaling}:
        return kind(factor=factor)
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
def decoder_params(
    draw: st.DrawFn, family: str, scaling_kind: type[RopeScaling] | None, *, one_kv_head: bool, is_grouped: bool
) -> Any:
    num_layers = draw(st.integers(1, 3))
    num_kv_heads = 1 if one_kv_head else draw(st.integers(2, 3))
    num_heads = num_kv_heads * (draw(st.integers(2, 3)) if is_grouped else 1)
    head_dim = 2 * draw(st.integers(2 if scaling_kind in (DynamicNtkScaling, NtkScaling) else 1, 8))
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


def _reference(family: Family, params: GroupedQueryParams) -> Any:
    model: Any = family.reference(params)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    _take_rotary_tables(model.model.rotary_emb, params)
    return model


def _keep_float64(model: nn.Module) -> None:
    """Replace the norms of the reference, which round to float32, by norms that keep float64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _take_rotary_tables(rotary: Any, params: GroupedQueryParams) -> None:
    """Check that both rotary tables agree up to float32 rounding, then use one for both models."""
    own_forward = rotary.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        tables = rotary_tables(
            position_ids, head_dim=params.head_dim, theta=params.rope_theta, scaling=params.rope_scaling
        )
        both = tuple(torch.cat((table, table), dim=-1).to(x.dtype) for table in tables)
        # Angles of up to the last position, each with the rounding of a few float32 operations.
        rounding = torch.finfo(torch.float32).eps * position_ids.max().item()
        torch.testing.assert_close(both, own_forward(x, position_ids), rtol=0, atol=4 * rounding)
        return both[0], both[1]

    rotary.forward = forward


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.slow("llama3")
def test_logits_losses_and_gradients_match(name: str) -> None:
    drawn: list[Any] = []
    # The parameters cover all four combinations of query and key/value heads in any draw.
    for index, (kind, one_kv_head) in enumerate(product(SCALINGS, (False, True))):

        @settings(max_examples=3)
        @given(
            params=decoder_params(name, kind, one_kv_head=one_kv_head, is_grouped=index % 4 < 2),
            shape=st.tuples(st.integers(1, 3), st.integers(1, 12)),
            seed=st.integers(0, 1000),
        )
        def match(params: GroupedQueryParams, shape: tuple[int, int], seed: int) -> None:
            drawn.append(params)
            _compare(FAMILIES[name], params, shape=shape, seed=seed)

        match()
    assert len(drawn) >= 30
    assert {params.tie_word_embeddings for params in drawn} == {False, True}
    heads = {(params.num_kv_heads == 1, params.num_heads == params.num_kv_heads) for params in drawn}
    assert heads == {(False, False), (False, True), (True, False), (True, True)}
    assert len({params.head_dim for params in drawn}) > 4
    windows = {params.window(index) is None for params in drawn for index in range(params.num_layers)}
    assert windows == ({False, True} if name == "qwen3" else {True})


def _compare(family: Family, params: Any, *, shape: tuple[int, int], seed: int) -> None:
    """Compare the results in float64, and the rounding errors of float32 with each other."""
    torch.manual_seed(seed)
    reference, mapper = _reference(family, params), family.mapper(params)
    ours = DecoderForCausalLM(params)
    state = mapper.apply_all(reference.state_dict())
    ours.load_state_dict(state, strict=False)
    assert state.keys() == dict(ours.named_parameters()).keys()
    input_ids, labels = torch.randint(0, params.vocab_size, (2, *shape))
    labels[:, 1::3] = -100
    position_ids = torch.arange(shape[1]) + torch.randint(0, 50, (shape[0], 1))

    single = _results(ours, mapper=None, input_ids=input_ids, position_ids=position_ids, labels=labels)
    peer = _results(reference, mapper=mapper, input_ids=input_ids, position_ids=position_ids, labels=labels)
    _keep_float64(reference)
    ours.double(), reference.double()
    exact = _results(reference, mapper=mapper, input_ids=input_ids, position_ids=position_ids, labels=labels)
    double = _results(ours, mapper=None, input_ids=input_ids, position_ids=position_ids, labels=labels)
    for kind in exact:
        assert_trees_close(double[kind], exact[kind], rtol=1e-10, atol=1e-10)
        assert_rounds_like(single[kind], exact[kind], peer=peer[kind])


def _results(
    model: nn.Module, *, mapper: StateMapper | None, input_ids: Tensor, position_ids: Tensor, labels: Tensor
) -> dict[str, Any]:
    """Return logits, losses and gradients; `mapper` renames the gradients of the reference."""
    model.zero_grad()
    output = model(input_ids, position_ids=position_ids)
    if mapper is None:
        logits, losses = output, model(input_ids, position_ids=position_ids, labels=labels)
    else:
        logits = output.logits
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    losses.sum().backward()
    # Copies: a model that is cast to float64 casts its gradients in place.
    gradients = {name: grad.clone() for name, p in model.named_parameters() if (grad := p.grad) is not None}
    return {
        "logits": logits.detach(),
        "losses": losses.detach(),
        "gradients": gradients if mapper is None else mapper.apply_all(gradients),
    }


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
def test_imported_weights_are_exported_bit_for_bit(tmp_path: Path, name: str, tied: bool, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

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
    reference: Any = family.reference(params)
    reference.to(dtype).save_pretrained(tmp_path / "theirs")
    ours, mapper = DecoderForCausalLM(params).to(dtype), family.mapper(params)
    load_model_state(ours, tmp_path / "theirs", mapper)
    config = family.config(params)
    save_model_state(ours, tmp_path / "ours", mapper.inverse(), extra_files={"config.json": config})

    _assert_same_bits(_tensors(tmp_path / "ours"), _tensors(tmp_path / "theirs"))
    original, exported = (AutoModelForCausalLM.from_pretrained(tmp_path / f) for f in ("theirs", "ours"))
    assert exported.dtype == dtype
    _assert_same_bits(exported.state_dict(), original.state_dict())
    input_ids = torch.randint(0, params.vocab_size, (2, 9))
    assert torch.equal(exported(input_ids).logits, original(input_ids).logits)
    # A checkpoint saved by transformers is read back.
    exported.save_pretrained(tmp_path / "again")
    again = DecoderForCausalLM(params).to(dtype)
    load_model_state(again, tmp_path / "again", mapper)
    _assert_same_bits(dict(again.state_dict()), dict(ours.state_dict()))
