import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig, parallelize_hsdp
from d9d_dist.testing import assert_trees_close, full_parameters, run_ranks
from d9d_loop import AdamWConfig


def test_builds_adamw_that_decays_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    optimizer = AdamWConfig(learning_rate=0.5, betas=(0.1, 0.2), eps=1e-3, weight_decay=0.3).build(model)
    assert isinstance(optimizer, torch.optim.AdamW)
    decayed, plain = optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 2), (4, 3)]
    assert [tuple(p.shape) for p in plain["params"]] == [(3,), (3,), (3,)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 1e-3)


def test_leaves_frozen_parameters_and_empty_groups_out() -> None:
    model = nn.Linear(2, 3)
    model.weight.requires_grad_(False)
    (group,) = AdamWConfig().build(model).param_groups
    assert group["params"] == [model.bias]


def _train(*, local: bool) -> tuple[dict[str, torch.Tensor], bool]:
    """Three steps on parameters of which some have a smaller part, or none, on the last rank."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_cp_shard",], shard_axis="dp_cp_shard")
        ours = AdamWConfig(learning_rate=0.1, weight_decay=0.3).build(model)
        optimizer = ours if local else torch.optim.AdamW(ours.param_groups, foreach=False)
        for _ in range(3):
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        return full_parameters(model), all(isinstance(value, DTensor) for value in states)


def _train_both() -> tuple[tuple[dict[str, torch.Tensor], bool], ...]:
    torch.manual_seed(1)
    first = _train(local=True)
    torch.manual_seed(1)
    return first, _train(local=False)


def test_sharded_parameters_are_updated_as_torch_does_and_states_stay_distributed() -> None:
    for (ours, has_distributed_states), (theirs, _) in run_ranks(_train_both, world_size=2):
        assert_trees_close(ours, theirs, rtol=1e-6)
        assert has_distributed_states
