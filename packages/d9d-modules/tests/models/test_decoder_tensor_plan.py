from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig, UserError, materialize, parallelize_tensor, sync_gradients
from d9d_dist.testing import assert_trees_close, full_gradients, run_ranks
from d9d_modules import Qwen3ForCausalLM, Qwen3Params, decoder_tensor_plan

PARAMS = Qwen3Params(
    vocab_size=16,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    initializer_range=0.2,
)


def _train(params: Qwen3Params) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[str]]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(params).double()
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], decoder_tensor_plan(model))
        materialize(model, device=ctx.device, seed=0)
        ids, labels = torch.randint(0, 16, (2, 2, 8), generator=torch.Generator().manual_seed(0))
        logits = model(ids).detach()
        model(ids, labels=labels).sum().backward()
        sync_gradients(model)
        whole = [
            name
            for name, parameter in model.named_parameters()
            if isinstance(parameter, DTensor) and parameter.placements[0].is_replicate()
        ]
        return logits, full_gradients(model), whole


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_equal_one_and_only_norms_are_replicated(tied: bool) -> None:
    params = replace(PARAMS, tie_word_embeddings=tied)
    ((logits, gradients, _),) = run_ranks(_train, params, world_size=1)
    for ours, found, whole in run_ranks(_train, params):
        torch.testing.assert_close(ours, logits, rtol=1e-12, atol=1e-12)
        assert_trees_close(found, gradients, rtol=1e-12)
        assert len(whole) == 4 * 2 + 1
        assert all("norm" in name for name in whole)


def _too_many() -> str:
    try:
        _train(PARAMS)
    except UserError as error:
        return str(error)
    return "trained"


def test_a_tp_degree_that_splits_a_head_is_refused() -> None:
    message = (
        "the tp degree = 4 does not divide dim 0 of backbone.layers.0.attention.k_proj.weight, which is 2 blocks of 6. "
        "Use a degree that divides 2."
    )
    assert run_ranks(_too_many, world_size=4) == [message] * 4


def test_a_mixer_without_a_plan_is_refused() -> None:
    model = Qwen3ForCausalLM(PARAMS)
    model.layers["1"].attention = nn.Identity()
    with pytest.raises(UserError, match=r"layers\.1\.attention is a Identity without tensor_plan; expected"):
        decoder_tensor_plan(model)
