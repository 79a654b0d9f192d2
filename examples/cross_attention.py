"""A vision-language model by cross attention: the text reads the image features in gated layers (Flamingo).

    python examples/cross_attention.py
    torchrun --nproc-per-node 4 examples/cross_attention.py --run.name stages \
        --mesh.pipeline_parallel 2 --mesh.tensor_parallel 2    # the same losses
"""

from pathlib import Path
from typing import Any

import torch
from image_text import HEAD_DIM, NUM_HEADS, SIZE, decoder_layer, rotary, train
from torch import nn

from d9d_dist import ColumnParallel, RowParallel
from d9d_loop import cli_main
from d9d_modules import AttentionOptions, Linear, RMSNorm, chosen_attention


class CrossAttention(nn.Module):
    """Attention of each token to all image features, times the hyperbolic tangent of a learned gate."""

    def __init__(self) -> None:
        super().__init__()
        width = NUM_HEADS * HEAD_DIM
        self.norm = RMSNorm(SIZE)
        self.q_proj, self.k_proj, self.v_proj = Linear(SIZE, width), Linear(SIZE, width), Linear(SIZE, width)
        self.o_proj = Linear(width, SIZE)
        self.gate = nn.Parameter(torch.empty(1))
        self.attention_function = chosen_attention(AttentionOptions(is_causal=False))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gate, 0.5)

    def forward(self, text_BLD: torch.Tensor, image_BPD: torch.Tensor) -> torch.Tensor:
        q_BLHK = self.q_proj(self.norm(text_BLD)).unflatten(-1, (-1, HEAD_DIM))
        k_BPHK, v_BPHK = (each(image_BPD).unflatten(-1, (-1, HEAD_DIM)) for each in (self.k_proj, self.v_proj))
        return self.o_proj(self.attention_function(q_BLHK, k_BPHK, v_BPHK).flatten(2)) * self.gate.tanh()

    def tensor_plan(self, name: str) -> dict[str, Any]:
        """Return the tensor-parallel plan: by heads."""
        heads = ColumnParallel(head_dim=HEAD_DIM)
        return {f"{name}.{each}_proj": heads for each in "qkv"} | {f"{name}.o_proj": RowParallel()}


class CrossLayer(nn.Module):
    """Cross attention, which adds nothing to a text without an image, and a decoder layer of the text."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.cross, self.layer = CrossAttention(), decoder_layer()

    def forward(
        self, image_BPD: torch.Tensor, text_BLD: torch.Tensor, has_image_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text_BLD = text_BLD + self.cross(text_BLD, image_BPD) * has_image_B[:, None, None]
        return image_BPD, self.layer(text_BLD, rotary(text_BLD))


if __name__ == "__main__":
    with cli_main():
        train(CrossLayer, Path(__file__).with_suffix(".toml"))
