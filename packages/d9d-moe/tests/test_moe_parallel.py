from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig, Precision, UserError, materialize, sync_gradients
from d9d_dist.testing import full_gradients, run_ranks
from d9d_modules import parallelize_decoder
from d9d_moe import (
    MoELayer,
    Qwen3MoeForCausalLM,
    Qwen3MoeParams,
    RouterLosses,
    TopKRouter,
    parallelize_moe,
)


def _refusals() -> list[str]:
    messages = []
    cases: list[tuple[int, dict[str, Any]]] = [(5, {}), (4, {"dispatch": "deep_ep"}), (4, {"dispatch": "pigeons"})]
    with MeshConfig(data_parallel_shard=-1, expert_parallel=2).build() as ctx:
        for num_experts, options in cases:
            with torch.device("meta"):
                model = nn.Sequential(MoELayer(4, 4, router=TopKRouter(4, num_experts=num_experts, top_k=1)))
            try:
                parallelize_moe(model, ctx, **options)
            except UserError as error:
                messages.append(str(error))
    return messages


def test_invalid_options_are_refused_on_all_ranks() -> None:
    for messages in run_ranks(_refusals, world_size=2):
        uneven, deep_ep, unknown = messages
        assert "mesh.expert_parallel = 2 does not divide the 5 experts of 0. Use a degree that divides 5." in uneven
        assert "dispatch = 'deep_ep' on a CPU" in deep_ep
        assert "dispatch = 'pigeons'; expected one of all_to_all, deep_ep, or a function that builds" in unknown


def _names_and_shapes() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    with MeshConfig(data_parallel_shard=-1, expert_parallel=2).build() as ctx:
        with torch.device("meta"):
            model = nn.Sequential(MoELayer(4, 6, router=TopKRouter(4, num_experts=4, top_k=1)))
        parallelize_moe(model, ctx)
        return {
            name: (tuple(parameter.shape), tuple(parameter.to_local().shape))
            for name, parameter in model.named_parameters()
            if "experts" in name and isinstance(parameter, DTensor)
        }


def test_experts_keep_their_global_names_and_shapes() -> None:
    for found in run_ranks(_names_and_shapes, world_size=4):
        assert found == {
            "0.experts.gate_proj.weight": ((4, 6, 4), (1, 6, 4)),
            "0.experts.up_proj.weight": ((4, 6, 4), (1, 6, 4)),
            "0.experts.down_proj.weight": ((4, 4, 6), (1, 4, 6)),
        }


def _dtypes_of_experts(degrees: Sequence[int]) -> list[tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes of computation and output for float32 rows, for each expert-parallel degree."""
    seen = []
    for degree, shard_replicas in product(degrees, (True, False)):
        with MeshConfig(data_parallel_shard=-1, expert_parallel=degree).build() as ctx:
            block = MoELayer(8, 8, router=TopKRouter(8, num_experts=4, top_k=4))
            precision = Precision(compute=torch.bfloat16, reduce=torch.float32)
            parallelize_moe(block, ctx, shard_replicas=shard_replicas, precision=precision)
            block.experts.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
            y = block(torch.randn(3, 8))
            y.sum().backward()
            seen.append(y.dtype)
    return list(zip(seen[::2], seen[1::2], strict=True))


def test_rows_are_cast_to_the_precision_in_every_layout() -> None:
    for found in [
        *run_ranks(_dtypes_of_experts, [1, 2], world_size=2),
        *run_ranks(_dtypes_of_experts, [1], world_size=1),
    ]:
        assert set(found) == {(torch.bfloat16, torch.bfloat16)}


DECODER = Qwen3MoeParams(
    vocab_size=16,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=16,
    initializer_range=0.2,
    num_experts=4,
    top_k=4,  # of all experts: rounding cannot choose others
    expert_intermediate_size=8,
    router_losses=RouterLosses(balance=0.1, z=0.1),
)


def _train_decoder(
    *, precision: Precision | None, shard_replicas: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with MeshConfig(data_parallel_shard=-1, expert_parallel=-1 if shard_replicas else 1).build() as ctx:
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(DECODER)
        experts = partial(parallelize_moe, shard_replicas=shard_replicas)
        parallelize_decoder(model, ctx, experts=experts, precision=precision, checkpointing="full")
        materialize(model, device=ctx.device, seed=0)
        ids = torch.arange(8).unsqueeze(0)
        losses = model(ids, labels=ids + 1)
        losses.sum().backward()
        sync_gradients(model)
        return losses.detach(), full_gradients(model)


def _train_both(shard_replicas: bool) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    mixed = Precision(compute=torch.bfloat16, reduce=torch.float32)
    return [_train_decoder(precision=each, shard_replicas=shard_replicas) for each in (None, mixed)]


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


def _without_experts() -> str:
    with MeshConfig().build() as ctx:
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(DECODER)
        try:
            parallelize_decoder(model, ctx)
        except UserError as error:
            return str(error)
    return "parallelized"


def test_a_model_with_experts_needs_a_function_that_shards_them() -> None:
    (message,) = run_ranks(_without_experts, world_size=1)
    assert message == (
        "backbone.layers.0.feed_forward has experts, but experts = None; expected a function that shards them. Pass "
        "experts=d9d_moe.parallelize_moe."
    )
