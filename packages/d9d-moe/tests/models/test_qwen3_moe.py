"""Comparison with an independent implementation: Qwen3-MoE of `transformers`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import assert_rounds_like, assert_trees_close, in_float64
from d9d_modules import generate
from d9d_moe import QWEN3_MOE, Qwen3MoeForCausalLM, Qwen3MoeParams, RouterLosses, sparse_from_hugging_face
from d9d_moe.models import experts_hugging_face
from d9d_state import StateMapper, load_model_state, save_model_state, stack


@st.composite
def qwen3_moe_params(draw: st.DrawFn) -> Qwen3MoeParams:
    num_kv_heads = draw(st.integers(1, 2))
    num_layers = draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 6))
    window = draw(st.sampled_from([None, 1, 3]))
    return Qwen3MoeParams(
        vocab_size=draw(st.integers(3, 40)),
        # In float32 multiples of 4 use the grouped kernel, other sizes the loop.
        hidden_size=draw(st.sampled_from([4, 8, 16, 10])),
        num_layers=num_layers,
        num_heads=num_kv_heads * draw(st.integers(1, 2)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 6)),
        intermediate_size=draw(st.integers(1, 20)),
        tie_word_embeddings=draw(st.booleans()),
        rope_theta=10_000.0,
        sliding_window=window,
        sliding_layers=() if window is None else tuple(range(num_layers)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        expert_intermediate_size=draw(st.sampled_from([4, 12, 7])),
        renormalize=draw(st.booleans()),
        dense_layers=tuple(draw(st.sets(st.integers(0, num_layers - 1), max_size=1))),
    )


def _params(*, tied: bool = False) -> Qwen3MoeParams:
    return Qwen3MoeParams(
        vocab_size=21,
        hidden_size=16,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=24,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        num_experts=4,
        top_k=2,
        expert_intermediate_size=12,
        dense_layers=(1,),
    )


def _reference(params: Qwen3MoeParams) -> Any:
    from transformers import Qwen3MoeConfig
    from transformers import Qwen3MoeForCausalLM as Reference

    config = Qwen3MoeConfig.from_dict(QWEN3_MOE.write(params))
    # The default is torch's grouped kernel, which supports neither float64 nor unaligned sizes.
    config._experts_implementation = "eager"
    model = Reference(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def _keep_float64(module: nn.Module) -> None:
    """Replace the norms and routers of the reference, which round to float32, by versions that keep float64."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

    match module:
        case Qwen3MoeRMSNorm():
            module.forward = partial(_norm, module)
        case Qwen3MoeTopKRouter():
            module.forward = partial(_route, module)


def _norm(norm: Any, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _route(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(hidden_states.flatten(0, -2), router.weight)
    chosen, indices = logits.softmax(-1).topk(router.top_k)
    return logits, chosen / chosen.sum(-1, keepdim=True) if router.norm_topk_prob else chosen, indices


def _on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the reference's tensors, with fused experts, to the names and shapes of its checkpoint files."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[name] = tensor
            continue
        prefix, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(tensor):
            projections = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
            for projection, part in zip(projections, matrix.chunk(len(projections)), strict=True):
                result[f"{prefix}.{expert}.{projection}.weight"] = part
    return result


@settings(max_examples=30)
@given(params=qwen3_moe_params(), batch=st.integers(1, 3), length=st.integers(1, 10), seed=st.integers(0, 1000))
def test_logits_losses_and_gradients_match(*, params: Qwen3MoeParams, batch: int, length: int, seed: int) -> None:
    """Compare the results in float64, and the rounding errors of float32 with each other."""
    torch.manual_seed(seed)
    mapper = sparse_from_hugging_face(params)
    reference = _reference(params)
    ours = Qwen3MoeForCausalLM(params)
    ours.load_state_dict(mapper.apply_all(_on_disk(dict(reference.named_parameters()))), strict=False)
    input_ids, labels = torch.randint(0, params.vocab_size, (2, batch, length))
    labels[:, 1::3] = -100

    single, peer = _results(ours, input_ids, labels), _results_of(reference, mapper, input_ids, labels)
    for module in reference.modules():
        _keep_float64(module)
    double = _results(ours.double(), input_ids, labels)
    exact = _results_of(reference.double(), mapper, input_ids, labels)
    for kind in exact:
        assert_trees_close(double[kind], exact[kind], rtol=1e-10, atol=1e-10)
        assert_rounds_like(single[kind], exact[kind], peer=peer[kind])


def test_greedy_text_equals_transformers() -> None:
    torch.manual_seed(1)
    params = replace(_params(), sliding_window=4, sliding_layers=(0, 1, 2))
    reference = _reference(params).double().eval()
    reference.apply(_keep_float64)
    model = Qwen3MoeForCausalLM(params).double()
    model.load_state_dict(sparse_from_hugging_face(params).apply_all(_on_disk(reference.state_dict())))
    prompts = torch.randint(1, 21, (2, 6))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    expected = reference.generate(
        prompts, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=99
    )
    got = generate(
        model, prompts, prompt_mask=mask, max_new_tokens=10, max_context=30, temperature=0, use_cache=True
    ).token_ids
    assert torch.equal(got, expected)


def _results(model: nn.Module, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return logits, losses and gradients of our model."""
    model.zero_grad()
    logits, losses = model(input_ids), model(input_ids, labels=labels)
    losses.sum().backward()
    # Copies: a model that is cast to float64 casts its gradients in place.
    gradients = {name: grad.clone() for name, p in model.named_parameters() if (grad := p.grad) is not None}
    return {"logits": logits.detach(), "losses": losses.detach(), "gradients": gradients}


def _results_of(reference: Any, mapper: StateMapper, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return logits, losses and gradients of the reference, under the names of our model."""
    reference.zero_grad()
    logits = reference(input_ids).logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    losses.sum().backward()
    # Some parameters have no gradient: routers with one renormalized expert, experts without tokens.
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in reference.named_parameters()
    }
    return {
        "logits": logits.detach(),
        "losses": losses.detach(),
        "gradients": mapper.apply_all(_on_disk(gradients)),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_loads_its_tensors_from_the_checkpoint(tied: bool) -> None:
    params = _params(tied=tied)
    count = 1 if tied else 3
    built = [
        name for i in range(count) for name, _ in Qwen3MoeForCausalLM(params, StageInfo(i, count)).named_parameters()
    ]
    mapper = sparse_from_hugging_face(params)
    assert sorted(built) == sorted(mapper.outputs)
    assert set(mapper.inputs) == set(_on_disk(dict(_reference(params).named_parameters())))


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_loads_in_the_reference(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM
    from transformers import Qwen3MoeForCausalLM as Reference

    params = _params(tied=tied)
    model = Qwen3MoeForCausalLM(params)
    save_model_state(
        model,
        tmp_path / "export",
        sparse_from_hugging_face(params).inverse(),
        extra_files={"config.json": QWEN3_MOE.write(params)},
    )
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert isinstance(reference, Reference)
    reference.config._experts_implementation = "eager"  # torch's grouped kernel takes no float64
    input_ids = torch.randint(0, 21, (2, 9))
    assert_rounds_like(model(input_ids), in_float64(reference, input_ids).logits, peer=reference(input_ids).logits)


def test_swapped_experts_change_the_output(tmp_path: Path) -> None:
    params, ids = _params(tied=False), torch.randint(0, 21, (2, 9))
    reference = _reference(params)
    reference.save_pretrained(tmp_path)

    def swapped(names: Sequence[str], name: str) -> StateMapper:
        return stack([names[1], names[0], *names[2:]], name)

    with mock.patch.object(experts_hugging_face, "stack", swapped):
        mapper = sparse_from_hugging_face(params)
    model = Qwen3MoeForCausalLM(params)
    load_model_state(model, tmp_path, mapper)
    assert not torch.allclose(model(ids), reference(ids).logits, rtol=0, atol=1e-2)


def test_global_load_is_not_exported(tmp_path: Path) -> None:
    params = replace(_params(tied=False), router_losses=RouterLosses(balance=0.1, scope="global_batch"))
    mapper = sparse_from_hugging_face(params)
    model, again = Qwen3MoeForCausalLM(params), Qwen3MoeForCausalLM(params)
    load = "backbone.layers.0.feed_forward.global_load"
    model.get_buffer(load).fill_(3.0)
    save_model_state(model, tmp_path, mapper.inverse())
    load_model_state(again, tmp_path, mapper)
    assert again.get_buffer(load).eq(1.0).all()
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("global_load")}
    torch.testing.assert_close({name: again.state_dict()[name] for name in state}, state, rtol=0, atol=0)
    assert not any("load" in name for name in load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("tied", [False, True])
def test_reference_checkpoint_loads_into_stages(tmp_path: Path, tied: bool) -> None:
    reference = _reference(_params(tied=tied))
    reference.save_pretrained(tmp_path)
    params = QWEN3_MOE.read(json.loads((tmp_path / "config.json").read_text()))
    input_ids = torch.randint(0, 21, (2, 9))
    hidden, num_stages = input_ids, 1 if tied else 2
    for index in range(num_stages):
        stage = Qwen3MoeForCausalLM(params, StageInfo(index, num_stages))
        load_model_state(stage, tmp_path, sparse_from_hugging_face(params))
        hidden = stage(hidden)
    assert_rounds_like(hidden, in_float64(reference, input_ids).logits, peer=reference(input_ids).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_import_and_export_round_trip_is_bitwise(tmp_path: Path, tied: bool) -> None:
    """Import and export, with the reference's conversion of the experts in both directions."""
    from transformers import AutoModelForCausalLM

    params = _params(tied=tied)
    _reference(params).save_pretrained(tmp_path / "theirs")
    ours, mapper = Qwen3MoeForCausalLM(params), sparse_from_hugging_face(params)
    load_model_state(ours, tmp_path / "theirs", mapper)
    config = QWEN3_MOE.write(params)
    save_model_state(ours, tmp_path / "ours", mapper.inverse(), extra_files={"config.json": config})
    original, exported = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("theirs", "ours"))
    exported.save_pretrained(tmp_path / "again")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours", "again")]
    for found, expected in ((files[1], files[0]), (files[2], files[0]), (exported.state_dict(), original.state_dict())):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    input_ids = torch.randint(0, 21, (2, 9))
    assert torch.equal(exported(input_ids).logits, original(input_ids).logits)


WINDOWS = {"sliding_window": 3, "sliding_layers": (0, 1, 2)}


@pytest.mark.parametrize("changes", [{}, WINDOWS])
def test_config_round_trip(changes: dict[str, Any]) -> None:
    from transformers import Qwen3MoeConfig

    params = _params()
    params = replace(params, **changes)
    written = json.loads(json.dumps(QWEN3_MOE.write(params)))
    assert QWEN3_MOE.read(written) == params
    # The config as `transformers` writes it.
    assert QWEN3_MOE.read(Qwen3MoeConfig.from_dict(written).to_diff_dict()) == params


def test_a_window_in_only_some_layers_cannot_be_written_to_the_config() -> None:
    params = _params()
    params = replace(params, sliding_window=3, sliding_layers=(0, 2))
    with pytest.raises(UserError, match=r"cannot express sliding_layers = \(0, 2\) \(read as \(0, 1, 2\)\); expected"):
        QWEN3_MOE.write(params)


def test_sparse_step_selects_dense_layers() -> None:
    config = {**QWEN3_MOE.write(_params()), "decoder_sparse_step": 2, "mlp_only_layers": None}
    assert QWEN3_MOE.read(config).dense_layers == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, r"config\.json has model_type = 'qwen3'; only 'qwen3_moe' is supported"),
        ({"attention_bias": True}, r"config\.json has attention_bias = True; only False is supported"),
        ({"num_experts": None}, r"config\.json has no 'num_experts'"),
        ({"mlp_only_layers": "0"}, r"config\.json has mlp_only_layers = '0'; expected a list of layer indices"),
        ({"mlp_only_layers": [3]}, r"config\.json has mlp_only_layers = \[3\]; expected .* from 0 to 2"),
        ({"decoder_sparse_step": 0}, r"config\.json has decoder_sparse_step = 0; expected a value of type int above 0"),
        ({"attention_dropout": 0.1}, r"config\.json has attention_dropout = 0\.1; only 0\.0 is supported"),
        (
            {"num_local_experts": 5},
            r"config\.json has num_experts = 4 and num_local_experts = 5; expected equal numbers",
        ),
        ({"shared_expert_gate": True}, r"config\.json has shared_expert_gate = True; expected only known entries"),
    ],
)
def test_unsupported_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        QWEN3_MOE.read({**QWEN3_MOE.write(_params()), **changes})


def test_a_missing_window_is_that_of_the_reference_and_null_is_none() -> None:
    from transformers import Qwen3MoeConfig

    written: dict[str, Any] = {**QWEN3_MOE.write(_params()), "use_sliding_window": True}
    assert QWEN3_MOE.read(written).sliding_window is None
    del written["sliding_window"]
    assert QWEN3_MOE.read(written).sliding_window == Qwen3MoeConfig(**written).sliding_window == 4096


def test_a_missing_size_of_a_head_is_that_of_the_reference() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    written: dict[str, Any] = QWEN3_MOE.write(_params())
    del written["head_dim"]
    attention = Qwen3MoeAttention(Qwen3MoeConfig(**written), 0)
    assert QWEN3_MOE.read(written).head_dim == attention.head_dim
