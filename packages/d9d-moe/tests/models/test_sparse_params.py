from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig, StageInfo, UserError, materialize, parallelize_fsdp, parallelize_tensor, sync_gradients
from d9d_dist.testing import assert_trees_close, full_gradients, run_ranks
from d9d_modules import DecoderForClassification, Qwen3Params, SwiGLU, checkpoint_activations, decoder_tensor_plan
from d9d_moe import MoELayer, Qwen3MoeForCausalLM, Qwen3MoeParams, RouterLosses, TopKRouter, pop_tokens_per_expert
from d9d_moe.router_losses import BalanceScope

PARAMS = Qwen3MoeParams(
    vocab_size=19,
    hidden_size=12,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    initializer_range=0.3,
    num_experts=5,
    top_k=2,
    expert_intermediate_size=10,
    dense_layers=(1,),
)


def test_like_copies_the_sizes_of_a_dense_model() -> None:
    dense = Qwen3Params(
        vocab_size=19, hidden_size=12, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=6, intermediate_size=20
    )
    experts = {"num_experts": 5, "top_k": 2, "expert_intermediate_size": 10}
    assert Qwen3MoeParams.like(dense, **experts, dense_layers=(1,), initializer_range=0.3) == PARAMS
    with pytest.raises(UserError, match=r"is_causal = False; expected its default, because Qwen3MoeParams has no such"):
        Qwen3MoeParams.like(replace(dense, is_causal=False), **experts)


def test_chained_stages_match_the_whole_model() -> None:
    whole = Qwen3MoeForCausalLM(PARAMS).double()
    input_ids, labels = torch.randint(0, 19, (2, 2, 7))
    expected = whole(input_ids, labels=labels)
    expected.sum().backward()
    state = whole.state_dict()
    stages = [Qwen3MoeForCausalLM(PARAMS, StageInfo(index, 3)).double() for index in range(3)]
    hidden = input_ids
    for stage in stages:
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
        hidden = stage(hidden, labels=labels)
    hidden.sum().backward()
    torch.testing.assert_close(hidden, expected, rtol=1e-12, atol=1e-12)
    split = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    torch.testing.assert_close(split, {name: p.grad for name, p in whole.named_parameters()}, rtol=1e-10, atol=1e-12)


def test_packed_documents_match_separate_documents() -> None:
    model = Qwen3MoeForCausalLM(PARAMS).double()
    first, second = torch.randint(0, 19, (2, 4)), torch.randint(0, 19, (2, 3))
    alone = torch.cat((model(first), model(second)), dim=1)
    packed, document_ids_BL = torch.cat((first, second), dim=1), torch.tensor([0] * 4 + [1] * 3).expand(2, 7)
    # Positions continue over documents: only distances within a document affect the output.
    # The float32 angles of positions up to 6 are rounded.
    rounding = 6 * torch.finfo(torch.float32).eps * alone.abs().max().item()
    torch.testing.assert_close(model(packed, document_ids_BL=document_ids_BL), alone, rtol=0, atol=rounding)
    same_positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    found = model(packed, document_ids_BL=document_ids_BL, position_ids=same_positions)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(packed), alone, atol=1e-2)


@pytest.mark.parametrize("scope", get_args(BalanceScope))
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted_and_has_no_router_losses(scope: BalanceScope, side: str) -> None:
    losses = RouterLosses(balance=0.7, scope=scope, z=0.3)
    model = Qwen3MoeForCausalLM(replace(PARAMS, router_losses=losses)).double()
    ids, padding = torch.randint(0, 19, (2, 5)), torch.randint(0, 19, (2, 3))
    expected = _trained(model, ids, labels=ids)
    parts = [(padding, False), (ids, True)] if side == "left" else [(ids, True), (padding, False)]
    padded = torch.cat([tokens for tokens, _ in parts], dim=1)
    mask_BL = torch.cat([torch.full_like(tokens, is_token) for tokens, is_token in parts], dim=1)
    places = {"position_ids": (mask_BL.cumsum(1) - 1).clamp(min=0), "document_ids_BL": mask_BL, "mask_BL": mask_BL}
    found = _trained(model, padded, labels=padded.where(mask_BL == 1, -100), **places)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_classification_loss_does_not_depend_on_padding() -> None:
    params = replace(PARAMS, router_losses=RouterLosses(balance=0.7, z=0.3))
    model = DecoderForClassification(params, num_classes=3).double()
    ids, labels = torch.randint(0, 19, (2, 8)), torch.tensor([0, 2])
    lengths = torch.tensor([5, 8])
    mask_BL = torch.arange(8) < lengths.unsqueeze(1)
    found = _trained(model, ids, labels=labels, mask_BL=mask_BL)
    alone = [_trained(model, ids[row : row + 1, : lengths[row]], labels=labels[row : row + 1]) for row in range(2)]
    summed = {name: alone[0][name] + alone[1][name] for name in found if name != "losses"}
    expected = {**summed, "losses": torch.cat([each["losses"] for each in alone])}
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def _trained(model: nn.Module, ids: Tensor, *, labels: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
    """Return the losses of labeled tokens, the gradients of their sum, and the tokens per expert."""
    model.zero_grad()
    losses = model(ids, labels=labels, **inputs)
    losses.sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"losses": losses[labels != -100], **gradients, **pop_tokens_per_expert(model)}


def test_dense_layers_are_selected_by_global_index() -> None:
    stage = Qwen3MoeForCausalLM(PARAMS, StageInfo(0, 2))
    blocks = [layer.feed_forward for layer in stage.layers.values()]
    assert isinstance(blocks[0], MoELayer)
    assert isinstance(blocks[1], SwiGLU)
    last = Qwen3MoeForCausalLM(PARAMS, StageInfo(1, 2))
    assert all(isinstance(layer.feed_forward, MoELayer) for layer in last.layers.values())


def test_params_set_the_sizes_of_experts() -> None:
    model = Qwen3MoeForCausalLM(replace(PARAMS, renormalize=False))
    block = model.layers["0"].feed_forward
    assert isinstance(block, MoELayer)
    assert block.get_parameter("experts.gate_proj.weight").shape == (5, 10, 12)
    assert block.router.top_k == 2
    assert isinstance(block.router, TopKRouter)
    assert not block.router.renormalize


def test_materialized_from_meta_computes_finite_outputs() -> None:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(replace(PARAMS, tie_word_embeddings=True))
    materialize(model, device=torch.device("cpu"), seed=0)
    ids = torch.randint(0, 19, (2, 3))
    assert model(ids, labels=ids).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stages_run_on_meta(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        first, last = (Qwen3MoeForCausalLM(PARAMS, StageInfo(index, 2)).to(dtype) for index in range(2))
        hidden = first(torch.empty(2, 3, dtype=torch.int64))
        losses = last(hidden, labels=torch.empty(2, 3, dtype=torch.int64))
    assert (hidden.shape, hidden.dtype) == ((2, 3, 12), dtype)
    assert (losses.shape, losses.dtype) == ((2, 3), dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, r"num_experts = 0; expected a number above 0"),
        ({"expert_intermediate_size": 0}, r"expert_intermediate_size = 0; expected a number above 0"),
        ({"top_k": 6}, r"top_k = 6; expected 1 <= top_k <= num_experts = 5"),
        ({"dense_layers": (0, 4)}, r"dense_layers contains 4; expected indices from 0 to 3"),
    ],
)
def test_invalid_params_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(PARAMS, **changes)


def test_last_stage_of_a_tied_model_has_the_embedding() -> None:
    tied = replace(PARAMS, tie_word_embeddings=True)
    names = dict(Qwen3MoeForCausalLM(tied, StageInfo(1, 2)).named_parameters())
    assert "backbone.embedding.weight" in names
    assert "lm_head.weight" not in names


def _sharded_gradients(params: Qwen3MoeParams, input_ids: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the summed loss as full tensors."""
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["dp_cp_shard"]
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(params).double()
        for layer in model.layers.values():
            checkpoint_activations(layer)
            parallelize_fsdp(layer, mesh)
        parallelize_fsdp(model, mesh)
        materialize(model, device=ctx.device, seed=7)
        mine = input_ids.chunk(2)[ctx.rank]
        model(mine, labels=mine).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return {name: g.full_tensor() for name, g in gradients.items() if isinstance(g, DTensor)}


def test_sharded_gradients_match_one_process() -> None:
    input_ids = torch.randint(0, 19, (4, 6))
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(PARAMS).double()
    materialize(model, device=torch.device("cpu"), seed=7)
    model(input_ids, labels=input_ids).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradients in run_ranks(_sharded_gradients, PARAMS, input_ids, world_size=2):
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)


SPLIT = Qwen3MoeParams(
    vocab_size=16,
    hidden_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    initializer_range=0.2,
    num_experts=4,
    top_k=2,
    expert_intermediate_size=8,
    dense_layers=(1,),
)


def _train_split() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(SPLIT).double()
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], decoder_tensor_plan(model))
        materialize(model, device=ctx.device, seed=0)
        ids, labels = torch.randint(0, 16, (2, 2, 8), generator=torch.Generator().manual_seed(0))
        losses = model(ids, labels=labels)
        losses.sum().backward()
        sync_gradients(model)
        return losses.detach(), full_gradients(model)


def test_two_tensor_parallel_ranks_match_one() -> None:
    ((losses, gradients),) = run_ranks(_train_split, world_size=1)
    for found, ours in run_ranks(_train_split):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=1e-12)
        assert_trees_close(ours, gradients, rtol=1e-12)
