import torch

from d9d_dist import MeshConfig, materialize, parallelize_tensor, sync_gradients
from d9d_dist.testing import assert_trees_close, full_gradients, run_ranks
from d9d_modules import Qwen3Params
from d9d_moe import Qwen3MoeForCausalLM, Qwen3MoeParams, qwen3_moe_tensor_plan

PARAMS = Qwen3MoeParams(
    decoder=Qwen3Params(
        vocab_size=16,
        hidden_size=12,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=20,
        initializer_range=0.2,
    ),
    num_experts=4,
    top_k=2,
    expert_intermediate_size=8,
    dense_layers=(1,),
)


def _train() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(PARAMS).double()
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], qwen3_moe_tensor_plan(PARAMS))
        materialize(model, device=ctx.device, seed=0)
        ids, labels = torch.randint(0, 16, (2, 2, 8), generator=torch.Generator().manual_seed(0))
        losses = model(ids, labels=labels)
        losses.sum().backward()
        sync_gradients(model)
        return losses.detach(), full_gradients(model)


def test_two_ranks_match_one() -> None:
    ((losses, gradients),) = run_ranks(_train, world_size=1)
    for found, ours in run_ranks(_train):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=1e-12)
        assert_trees_close(ours, gradients, rtol=1e-12)
