"""Closed-form sizes against published ones, and against torch modules."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from d9d_loop.planning import DecoderShape

LLAMA_405B = DecoderShape(
    vocab_size=128256,
    hidden_size=16384,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=53248,
)
DEEPSEEK_V3 = DecoderShape(
    vocab_size=129280,
    hidden_size=7168,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_dim=128,
    intermediate_size=18432,
    num_experts=256,
    top_k=8,
    expert_size=2048,
    num_dense_layers=3,
    shared_size=2048,
    latent=(1536, 512, 64, 128),
)


@pytest.mark.parametrize(("shape", "billions"), [(LLAMA_405B, 405.85), (DEEPSEEK_V3, 671.03)])
def test_parameters_of_published_models(shape: DecoderShape, billions: float) -> None:
    assert shape.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_gpt_counts_the_matrices_of_a_torch_layer() -> None:
    shape = DecoderShape.gpt(hidden_size=64, num_layers=3, num_heads=4, vocab_size=100, length=16)
    layer = nn.TransformerEncoderLayer(64, 4, 256)
    matrices = sum(each.numel() for each in layer.parameters() if each.dim() == 2)
    assert shape.attention_parameters + shape.dense_parameters == matrices


def test_flops_equal_the_count_of_torch() -> None:
    """A step of products of the layers' sizes and of unmasked attention, counted by torch."""
    shape = DecoderShape(
        vocab_size=96,
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
    )
    x = torch.ones(16, 32, requires_grad=True)
    q, k, v, out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 32)
    gate, up, down, head = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 96)
    with FlopCounterMode(display=False) as counter:
        queries = q(x).unflatten(-1, (4, 8)).transpose(0, 1)
        keys, values = (each(x).unflatten(-1, (2, 8)).transpose(0, 1).repeat_interleave(2, 0) for each in (k, v))
        x = out(((queries @ keys.mT).softmax(-1) @ values).transpose(0, 1).flatten(1))
        head(down(functional.silu(gate(x)) * up(x))).sum().backward()
    assert shape.flops_per_token(16, causal=False) * 16 == counter.get_total_flops()
