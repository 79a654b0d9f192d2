import torch
from torch import nn

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
