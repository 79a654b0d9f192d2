"""Closed-form sizes against published ones, and against torch modules."""

import pytest
from torch import nn

from d9d_loop.planning import DecoderShape
from d9d_metrics import transformer_flops_per_token

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


def test_flops_are_those_of_the_metric() -> None:
    expected = transformer_flops_per_token(
        num_matmul_parameters=LLAMA_405B.matmul_parameters,
        num_layers=126,
        num_heads=128,
        head_dim=128,
        sequence_length=8192,
    )
    assert LLAMA_405B.flops_per_token(8192) == expected
