"""A vision-language model as a mixture of transformers: own weights for images and texts, one attention over both.

Liang et al. 2024, https://arxiv.org/abs/2411.04996.

    python examples/mixture_of_transformers.py
    torchrun --nproc-per-node 4 examples/mixture_of_transformers.py --run.name stages \
        --mesh.pipeline_parallel 2 --mesh.tensor_parallel 2    # the same losses
"""

from pathlib import Path
from typing import Any

import torch
from image_text import HEAD_DIM, NUM_HEADS, NUM_LAYERS, NUM_PATCHES, SIZE, rotary, train
from torch import nn

from d9d_dist import ColumnParallel, RowParallel
from d9d_loop import cli_main
from d9d_modules import AttentionOptions, Linear, RMSNorm, SwiGLU, apply_rotary, chosen_attention


class Projections(nn.Module):
    """Queries, keys and values of one modality."""

    def __init__(self) -> None:
        super().__init__()
        width = NUM_HEADS * HEAD_DIM
        self.norm = RMSNorm(SIZE)
        self.q_proj, self.k_proj, self.v_proj = Linear(SIZE, width), Linear(SIZE, width), Linear(SIZE, width)

    def forward(self, x_BLD: torch.Tensor) -> list[torch.Tensor]:
        normed_BLD = self.norm(x_BLD)
        return [each(normed_BLD).unflatten(-1, (-1, HEAD_DIM)) for each in (self.q_proj, self.k_proj, self.v_proj)]

    def tensor_plan(self, name: str) -> dict[str, Any]:
        """Return the tensor-parallel plan: by heads."""
        return {f"{name}.{each}_proj": ColumnParallel(head_dim=HEAD_DIM) for each in "qkv"}


class Outputs(nn.Module):
    """Output projection and feed-forward block of one modality."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj, self.norm = Linear(NUM_HEADS * HEAD_DIM, SIZE), RMSNorm(SIZE)
        self.feed_forward = SwiGLU(SIZE, 3 * SIZE)

    def forward(self, x_BLD: torch.Tensor, attended_BLHK: torch.Tensor) -> torch.Tensor:
        x_BLD = x_BLD + self.o_proj(attended_BLHK.flatten(2))
        return x_BLD + self.feed_forward(self.norm(x_BLD))

    def tensor_plan(self, name: str) -> dict[str, Any]:
        """Return the tensor-parallel plan: by heads; the feed-forward block has its own."""
        return {f"{name}.o_proj": RowParallel()}


class MixtureLayer(nn.Module):
    """Causal attention over image features and text, with the weights of its modality for each position.

    The last layer computes no new image features, because nothing reads them.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.of_image, self.of_text, self.after_text = Projections(), Projections(), Outputs()
        self.after_image = Outputs() if index < NUM_LAYERS - 1 else None
        self.attention_function = chosen_attention(AttentionOptions())

    def forward(
        self, image_BPD: torch.Tensor, text_BLD: torch.Tensor, has_image_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(self.of_image(image_BPD), self.of_text(text_BLD), strict=True)
        q_BSHK, k_BSHK, v_BSHK = (torch.cat(pair, dim=1) for pair in pairs)
        tables = rotary(q_BSHK)
        q_BSHK, k_BSHK = apply_rotary(q_BSHK, tables), apply_rotary(k_BSHK, tables)
        is_text_S = torch.arange(q_BSHK.shape[1], device=q_BSHK.device) >= NUM_PATCHES
        documents_BS = (~has_image_B[:, None] & is_text_S).long()  # a text without an image does not see the features
        attended_BSHK = self.attention_function(q_BSHK, k_BSHK, v_BSHK, documents_BS=documents_BS)
        text_BLD = self.after_text(text_BLD, attended_BSHK[:, NUM_PATCHES:])
        if self.after_image is not None:
            image_BPD = self.after_image(image_BPD, attended_BSHK[:, :NUM_PATCHES])
        return image_BPD, text_BLD


if __name__ == "__main__":
    with cli_main():
        train(MixtureLayer, Path(__file__).with_suffix(".toml"))
