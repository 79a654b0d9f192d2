import torch

from d9d_dist import MeshConfig, Precision, materialize, sync_gradients
from d9d_dist.testing import full_gradients, run_ranks
from d9d_modules import Qwen3Params
from d9d_moe import Qwen3MoeForCausalLM, Qwen3MoeParams, RouterLosses, parallelize_moe_decoder, qwen3_moe_tensor_plan

PARAMS = Qwen3MoeParams(
    decoder=Qwen3Params(
        vocab_size=16,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=16,
        initializer_range=0.2,
    ),
    num_experts=4,
    top_k=4,  # of all experts: rounding cannot choose others
    expert_intermediate_size=8,
    router_losses=RouterLosses(balance=0.1, z=0.1),
)


def _train(*, precision: Precision | None, shard_replicas: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with MeshConfig(data_parallel_shard=-1, expert_parallel=-1 if shard_replicas else 1).build() as ctx:
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(PARAMS)
        parallelize_moe_decoder(
            model,
            ctx,
            plan=qwen3_moe_tensor_plan(PARAMS),
            precision=precision,
            shard_replicas=shard_replicas,
            checkpointing="full",
        )
        materialize(model, device=ctx.device, seed=0)
        ids = torch.arange(8).unsqueeze(0)
        losses = model(ids, labels=ids + 1)
        losses.sum().backward()
        sync_gradients(model)
        return losses.detach(), full_gradients(model)


def _train_both(shard_replicas: bool) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    mixed = Precision(compute=torch.bfloat16, reduce=torch.float32)
    return [_train(precision=each, shard_replicas=shard_replicas) for each in (None, mixed)]


def test_experts_compute_in_the_given_precision() -> None:
    for shard_replicas, world_size in ((True, 2), (False, 2), (True, 1)):
        for (losses, gradients), (mixed_losses, mixed_gradients) in run_ranks(
            _train_both, shard_replicas, world_size=world_size
        ):
            assert mixed_losses.dtype == torch.float32
            assert not torch.equal(mixed_losses, losses)
            torch.testing.assert_close(mixed_losses, losses, rtol=0.05, atol=0.05)
            for name, gradient in mixed_gradients.items():
                assert gradient.dtype == torch.float32
                assert (gradient - gradients[name]).norm() <= 0.1 * gradients[name].norm(), name
