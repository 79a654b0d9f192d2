from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig, StageInfo, UserError, materialize, parallelize_fsdp
from d9d_dist.testing import run_ranks
from d9d_modules import (
    DecoderForCausalLM,
    DynamicNtkScaling,
    GroupedQueryParams,
    Qwen3ForCausalLM,
    Qwen3Params,
    checkpoint_activations,
    generate,
)

PARAMS = Qwen3Params(
    vocab_size=19,
    hidden_size=12,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    initializer_range=0.3,
)


@pytest.mark.parametrize(("num_stages", "head_layers"), [(2, 0), (3, 0), (5, 0), (2, 2), (3, 2)])
def test_chained_stages_equal_the_whole_model(num_stages: int, head_layers: int) -> None:
    params = replace(PARAMS, head_layers=head_layers)
    whole = Qwen3ForCausalLM(params).double()
    input_ids = torch.randint(0, 19, (2, 7))
    labels = torch.randint(0, 19, (2, 7))
    position_ids = torch.arange(3, 10).unsqueeze(0)
    expected = whole(input_ids, position_ids=position_ids, labels=labels)
    expected.sum().backward()

    stages = [Qwen3ForCausalLM(params, StageInfo(index, num_stages)).double() for index in range(num_stages)]
    state = whole.state_dict()
    hidden = input_ids
    for stage in stages:
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
        hidden = stage(hidden, position_ids=position_ids, labels=labels)
    hidden.sum().backward()

    torch.testing.assert_close(hidden, expected, rtol=1e-12, atol=1e-12)
    split = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    assert sum(len(list(stage.parameters())) for stage in stages) == len(split)
    torch.testing.assert_close(split, {name: p.grad for name, p in whole.named_parameters()}, rtol=1e-10, atol=1e-12)


def test_a_stage_builds_only_its_own_part() -> None:
    first, middle, last = (Qwen3ForCausalLM(PARAMS, StageInfo(index, 3)) for index in range(3))
    assert list(first.layers) == ["0", "1"]
    assert list(middle.layers) == ["2", "3"]
    assert list(last.layers) == ["4"]
    assert first.backbone.embedding is not None
    assert first.backbone.norm is first.lm_head is None
    assert middle.backbone.embedding is middle.backbone.norm is middle.lm_head is None
    assert last.backbone.embedding is None
    assert last.backbone.norm is not None
    assert last.lm_head is not None


def test_the_last_stage_has_fewer_layers_for_the_cost_of_its_head() -> None:
    params = replace(PARAMS, num_layers=10, head_layers=3)
    found = [[*Qwen3ForCausalLM(params, StageInfo(index, 3)).layers] for index in range(3)]
    assert [len(layers) for layers in found] == [5, 4, 1]
    with pytest.raises(UserError, match=r"head_layers = -1; expected 0 or more"):
        replace(PARAMS, head_layers=-1)


def test_only_the_last_stage_has_a_head() -> None:
    first, last = (Qwen3ForCausalLM(PARAMS, StageInfo(index, 2)) for index in range(2))
    assert first.lm_head is None
    assert last.lm_head is not None


def test_outputs_are_logits_losses_or_hidden_states() -> None:
    input_ids = torch.randint(0, 19, (2, 4))
    model = Qwen3ForCausalLM(PARAMS)
    logits = model(input_ids)
    assert logits.shape == (2, 4, 19)
    labels = torch.randint(0, 19, (2, 4))
    losses = -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model(input_ids, labels=labels), losses)
    assert Qwen3ForCausalLM(PARAMS, StageInfo(0, 2))(input_ids).shape == (2, 4, 12)


def test_no_position_sees_a_later_one() -> None:
    model = Qwen3ForCausalLM(PARAMS)
    input_ids = torch.randint(0, 19, (1, 6))
    changed = input_ids.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 19
    before, after = model(input_ids), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_positions_default_to_a_count_from_zero() -> None:
    model = Qwen3ForCausalLM(PARAMS)
    input_ids = torch.randint(0, 19, (2, 5))
    counted = torch.arange(5).expand(2, 5)
    assert torch.equal(model(input_ids), model(input_ids, position_ids=counted))
    assert not torch.equal(model(input_ids), model(input_ids, position_ids=2 * counted))


def test_packed_documents_equal_separate_rows() -> None:
    model = Qwen3ForCausalLM(replace(PARAMS, sliding_window=2, sliding_layers=(1, 3))).double()
    first, second = torch.randint(0, 19, (2, 4)), torch.randint(0, 19, (2, 3))
    alone = torch.cat((model(first), model(second)), dim=1)
    packed = torch.cat((first, second), dim=1)
    document_ids_BL = torch.tensor([7, 7, 7, 7, 2, 2, 2]).expand(2, 7)
    # Positions continue over documents: only distances within a document matter.
    # The float32 angles of positions up to 6 are rounded.
    rounding = 6 * torch.finfo(torch.float32).eps * alone.abs().max().item()
    torch.testing.assert_close(model(packed, document_ids_BL=document_ids_BL), alone, rtol=0, atol=rounding)
    same_positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    found = model(packed, document_ids_BL=document_ids_BL, position_ids=same_positions)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(packed), alone, atol=1e-2)
    with pytest.raises(UserError, match=r"document_ids_BL of shape"):
        model(packed, document_ids_BL=document_ids_BL[:, 1:])


def test_left_padding_is_masked_by_its_own_document_id() -> None:
    model = Qwen3ForCausalLM(PARAMS).double()
    text = torch.randint(0, 19, (2, 4))
    padded = torch.cat((torch.zeros(2, 2, dtype=torch.int64), text), dim=1)
    mask_BL = torch.tensor([[0, 0, 1, 1, 1, 1]]).expand(2, 6)
    expected = model(text)
    # The float32 angles of positions up to 5 are rounded.
    rounding = 5 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    torch.testing.assert_close(model(padded, document_ids_BL=mask_BL)[:, 2:], expected, rtol=0, atol=rounding)


def test_only_sliding_layers_have_a_window() -> None:
    ids = torch.randint(0, 19, (1, 8))
    changed = ids.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 19
    reach = {"all": (0, 1, 2, 3, 4), "some": (0, 2)}
    for layers, reaches in (("all", False), ("some", True)):
        model = Qwen3ForCausalLM(replace(PARAMS, sliding_window=2, sliding_layers=reach[layers]))
        # Five layers with a window of two see five positions back; the last position is seven after the first.
        assert torch.allclose(model(ids)[:, 7], model(changed)[:, 7], rtol=0, atol=0) is not reaches, layers


def test_with_rope_length_the_scaling_does_not_depend_on_the_batch() -> None:
    scaling = DynamicNtkScaling(factor=4.0, original_max_positions=4)
    model = Qwen3ForCausalLM(replace(PARAMS, rope_scaling=scaling)).double()
    fixed = Qwen3ForCausalLM(replace(PARAMS, rope_scaling=scaling, rope_length=8)).double()
    fixed.load_state_dict(model.state_dict())
    ids = torch.randint(0, 19, (1, 8))
    torch.testing.assert_close(fixed(ids), model(ids))
    torch.testing.assert_close(fixed(ids[:, :5]), fixed(ids)[:, :5])
    assert not torch.allclose(model(ids[:, :5]), model(ids)[:, :5])


def test_a_tied_head_uses_the_embedding_weight() -> None:
    model = Qwen3ForCausalLM(replace(PARAMS, tie_word_embeddings=True))
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert model.backbone.embedding is not None
    assert model.lm_head is not None
    assert model.lm_head.weight is model.backbone.embedding.weight
    assert model.backbone.norm is not None
    nn.init.zeros_(model.backbone.norm.weight)
    model(torch.tensor([[1]])).sum().backward()
    gradient = model.backbone.embedding.weight.grad
    assert gradient is not None
    assert torch.equal(model(torch.tensor([[1]])), torch.zeros(1, 1, 19))


def test_a_custom_feed_forward_replaces_the_dense_one() -> None:
    built: list[int] = []

    class Custom(GroupedQueryParams):
        def feed_forward(self, index: int) -> nn.Module:
            built.append(index)
            return nn.Identity()

    sizes = {name: value for name, value in vars(PARAMS).items() if name != "is_causal"}
    model = DecoderForCausalLM(Custom(**sizes), StageInfo(1, 2))
    assert built == [3, 4]
    assert model(torch.randn(1, 2, 12)).shape == (1, 2, 19)
    assert not any("feed_forward." in name for name in model.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_materialize_after_construction_on_meta_sets_all_parameters(tied: bool) -> None:
    params = replace(PARAMS, tie_word_embeddings=tied, hidden_size=64, initializer_range=0.05)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(params)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, device=torch.device("cpu"), seed=3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            assert abs(parameter.std().item() - 0.05) < 0.01, name
    assert model(torch.randint(0, 19, (2, 3))).isfinite().all()


def test_stages_run_on_meta() -> None:
    with torch.device("meta"):
        first, last = (Qwen3ForCausalLM(PARAMS, StageInfo(index, 2)) for index in range(2))
        hidden = first(torch.empty(2, 3, dtype=torch.int64))
        assert hidden.shape == (2, 3, 12)
        assert last(hidden, labels=torch.empty(2, 3, dtype=torch.int64)).shape == (2, 3)


def test_checkpointed_layers_give_the_same_gradients() -> None:
    plain, checkpointed = Qwen3ForCausalLM(PARAMS), Qwen3ForCausalLM(PARAMS)
    checkpointed.load_state_dict(plain.state_dict())
    for layer in checkpointed.layers.values():
        checkpoint_activations(layer)
    input_ids = torch.randint(0, 19, (2, 6))
    for model in (plain, checkpointed):
        model(input_ids, labels=input_ids).sum().backward()
    for (name, parameter), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size = 0; expected a number above 0"),
        ({"num_layers": -1}, r"num_layers = -1; expected a number above 0"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps = 0\.0; expected a number above 0"),
        ({"num_kv_heads": 3}, r"num_kv_heads = 3 does not divide num_heads = 4; use one of 1, 2, 4\."),
        ({"rope_length": 0}, r"rope_length = 0; expected a number above 0"),
        ({"sliding_window": 2}, r"sliding_window = 2, sliding_layers = \(\); expected both or neither"),
        ({"sliding_layers": (1,)}, r"sliding_window = None, sliding_layers = \(1,\); expected both or neither"),
        ({"sliding_window": 0, "sliding_layers": (1,)}, r"sliding_window = 0; expected a number above 0"),
        ({"sliding_window": 2, "sliding_layers": (5,)}, r"sliding_layers contains 5; expected indices from 0 to 4"),
        ({"head_dim": 5}, r"head_dim = 5; RoPE rotates pairs of features: use an even head_dim"),
    ],
)
def test_invalid_sizes_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(PARAMS, **changes)


def test_the_first_and_the_last_stage_of_a_tied_model_have_one_parameter_under_one_name() -> None:
    tied = replace(PARAMS, tie_word_embeddings=True)
    first, middle, last = (Qwen3ForCausalLM(tied, StageInfo(index, 3)) for index in range(3))
    name = "backbone.embedding.weight"
    assert [name in dict(stage.named_parameters()) for stage in (first, middle, last)] == [True, False, True]
    assert "lm_head.weight" not in dict(last.named_parameters())
    last.load_state_dict({name: first.state_dict()[name]}, strict=False)
    hidden = torch.randn(2, 3, PARAMS.hidden_size)
    assert last.backbone.norm is not None
    expected = torch.nn.functional.linear(last.backbone(hidden), first.get_parameter(name))
    torch.testing.assert_close(last(hidden), expected)


def test_invalid_inputs_raise() -> None:
    first, last = (Qwen3ForCausalLM(PARAMS, StageInfo(index, 2)) for index in range(2))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(UserError, match=r"the first stage got \(2, 3\) of torch\.float32; expected token ids"):
        first(ids.float())
    with pytest.raises(UserError, match=r"the first stage got \(3,\) of torch\.int64; expected token ids"):
        first(ids[0])
    with pytest.raises(UserError, match=r"stage 1 got \(2, 3\) of torch\.int64; expected the hidden states .* 12\]"):
        last(ids)
    with pytest.raises(UserError, match=r"stage 1 got \(2, 3, 8\) of torch\.float32; expected the hidden states"):
        last(torch.zeros(2, 3, 8))
    with pytest.raises(UserError, match=r"position_ids have shape \(3,\); expected \(2, 3\) or \(1, 3\)"):
        first(ids, position_ids=torch.arange(3))
    with pytest.raises(UserError, match=r"got token ids from 19 to 19; expected token ids within 0 \.\.\. 18\."):
        first(ids + 19)
    with pytest.raises(UserError, match=r"labels have shape \(2, 4\); expected \(2, 3\)"):
        last(torch.zeros(2, 3, 12), labels=torch.zeros(2, 4, dtype=torch.int64))


def test_positions_out_of_range_raise() -> None:
    short = replace(PARAMS, max_position_embeddings=4)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    position_ids = torch.arange(5).unsqueeze(0)
    for index, hidden in enumerate((ids[:, :4], torch.zeros(2, 4, PARAMS.hidden_size))):
        stage = Qwen3ForCausalLM(short, StageInfo(index, 2))
        stage(hidden, position_ids=position_ids[:, :4])
        with pytest.raises(
            UserError, match=r"position_ids range from 1 to 4; expected from 0 to 3\. Split or truncate"
        ):
            stage(hidden, position_ids=position_ids[:, 1:])
        with pytest.raises(UserError, match=r"position_ids range from -1 to 2; expected from 0 to 3\."):
            stage(hidden, position_ids=position_ids[:, :4] - 1)
    with pytest.raises(UserError, match=r"got rows of 5 tokens; expected at most max_position_embeddings = 4\."):
        Qwen3ForCausalLM(short)(ids)
    beyond = replace(short, rope_scaling=DynamicNtkScaling(factor=2.0, original_max_positions=4))
    assert Qwen3ForCausalLM(beyond)(ids, position_ids=position_ids + 100).shape == (2, 5, 19)


def _sharded_run(params: Qwen3Params, input_ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients of the summed loss, as full tensors, and a greedy continuation."""
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["dp_cp_shard"]
        with torch.device("meta"):
            model = Qwen3ForCausalLM(params).double()
        for layer in model.layers.values():
            checkpoint_activations(layer)
            parallelize_fsdp(layer, mesh)
        parallelize_fsdp(model, mesh)
        materialize(model, device=ctx.device, seed=7)
        mine = input_ids.chunk(2)[ctx.rank]
        model(mine, labels=mine).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        full = {name: g.full_tensor() for name, g in gradients.items() if isinstance(g, DTensor)}
        return full, generate(model, input_ids, max_new_tokens=3, max_context=5, temperature=0).token_ids


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sample("True")
def test_a_sharded_model_gives_the_gradients_of_one_process(tied: bool) -> None:
    params = replace(PARAMS, tie_word_embeddings=tied, num_layers=2)
    input_ids = torch.randint(0, 19, (4, 6))
    with torch.device("meta"):
        model = Qwen3ForCausalLM(params).double()
    materialize(model, device=torch.device("cpu"), seed=7)
    model(input_ids, labels=input_ids).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    continued = generate(model, input_ids, max_new_tokens=3, max_context=5, temperature=0).token_ids
    for gradients, text in run_ranks(_sharded_run, params, input_ids, world_size=2):
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(text, continued)
