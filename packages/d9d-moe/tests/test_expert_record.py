"""Recorded experts, replayed by routers that would choose others."""

import pytest
import torch
from torch import nn

from d9d_dist import UserError
from d9d_moe import Qwen3MoeForCausalLM, Qwen3MoeParams, record_experts

IDS = torch.arange(10).view(2, 5)
PARAMS = Qwen3MoeParams(
    vocab_size=16,
    hidden_size=8,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=12,
    num_experts=6,
    top_k=2,
    expert_intermediate_size=4,
    initializer_range=0.5,
)


def test_records_are_replayed_by_other_routers() -> None:
    model = Qwen3MoeForCausalLM(PARAMS)
    with record_experts(model) as found:
        first, _ = model(IDS), model(IDS)
    assert [len(passes) for passes in found.values()] == [2, 2, 2]
    assert all(torch.equal(*passes) and passes[0].shape == (2, 5, 2) for passes in found.values())
    indices = torch.stack([passes[0] for passes in found.values()], dim=2)
    assert torch.equal(model(IDS, expert_indices=indices), first)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.copy_(torch.randn_like(parameter))
    with record_experts(model) as others:
        model(IDS)
        model(IDS, expert_indices=indices)
    chosen, replayed = (torch.stack([passes[each] for passes in others.values()], dim=2) for each in range(2))
    assert not torch.equal(chosen, indices)
    assert torch.equal(replayed, indices)
    model(IDS)
    assert [len(passes) for passes in others.values()] == [2, 2, 2], "the hooks are removed"


def test_a_model_without_a_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="got a Linear without a DecoderModel"), record_experts(nn.Linear(2, 2)):
        pass
