import torch
from torch import Tensor, nn

from d9d_modules import DecoderLayer, RMSNorm, rotary_tables
from d9d_modules.rope import RotaryTables


class _Attention(nn.Module):
    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        return 2 * x + rotary.cos.sum()


class _DocumentAttention(nn.Module):
    def forward(self, x: Tensor, rotary: RotaryTables, *, document_ids_BL: Tensor) -> Tensor:
        return x * document_ids_BL.unsqueeze(-1)


class _FeedForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x + 1


def test_both_blocks_are_pre_norm_and_residual() -> None:
    layer = DecoderLayer(
        4, attention=_Attention(), feed_forward=_FeedForward(), norm=lambda: RMSNorm(4, eps=0.1)
    ).double()
    weights = [layer.get_parameter(f"{name}_norm.weight") for name in ("attention", "feed_forward")]
    for weight in weights:
        nn.init.normal_(weight)
    rotary = rotary_tables(torch.arange(3).unsqueeze(0), head_dim=2, theta=10.0)
    x = torch.randn(2, 3, 4, dtype=torch.float64)

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight

    attended = x + 2 * norm(x, weights[0]) + rotary.cos.sum()
    expected = attended + 3 * norm(attended, weights[1]) + 1
    torch.testing.assert_close(layer(x, rotary), expected)


def test_sandwich_norms_normalize_the_outputs_of_both_blocks() -> None:
    layer = DecoderLayer(
        4,
        attention=_Attention(),
        feed_forward=_FeedForward(),
        norm=lambda: RMSNorm(4, eps=0.1, zero_centered=True),
        sandwich_norms=True,
    ).double()
    names = ("attention_norm", "attention_output_norm", "feed_forward_norm", "feed_forward_output_norm")
    for name in names:
        nn.init.normal_(layer.get_parameter(f"{name}.weight"))
    rotary = rotary_tables(torch.arange(3).unsqueeze(0), head_dim=2, theta=10.0)
    x = torch.randn(2, 3, 4, dtype=torch.float64)

    def norm(y: Tensor, name: str) -> Tensor:
        weight = 1 + layer.get_parameter(f"{name}.weight")
        return y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight

    attended = x + norm(2 * norm(x, names[0]) + rotary.cos.sum(), names[1])
    expected = attended + norm(3 * norm(attended, names[2]) + 1, names[3])
    torch.testing.assert_close(layer(x, rotary), expected)


def test_document_ids_are_passed_to_the_attention() -> None:
    layer = DecoderLayer(4, attention=_DocumentAttention(), feed_forward=_FeedForward()).double()
    rotary = rotary_tables(torch.arange(3).unsqueeze(0), head_dim=2, theta=10.0)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 1], [5, 5, 7]])
    attended = x + layer.attention_norm(x) * documents.unsqueeze(-1)
    expected = attended + 3 * layer.feed_forward_norm(attended) + 1
    torch.testing.assert_close(layer(x, rotary, document_ids_BL=documents), expected)


class _Narrow(nn.Module):
    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        return x.bfloat16()


def test_attention_may_change_the_dtype() -> None:
    layer = DecoderLayer(4, attention=_Narrow(), feed_forward=_FeedForward(), norm=lambda: RMSNorm(4, eps=0.1))
    x, rotary = torch.randn(1, 3, 4), rotary_tables(torch.arange(3).unsqueeze(0), head_dim=2, theta=10.0)
    assert layer(x, rotary).dtype == torch.float32
