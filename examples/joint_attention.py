"""A vision-language model by early fusion: image features and tokens are one sequence of a causal decoder.

    python examples/joint_attention.py
    torchrun --nproc-per-node 4 examples/joint_attention.py --run.name stages \
        --mesh.pipeline_parallel 2 --mesh.tensor_parallel 2    # the same losses
"""

from pathlib import Path

import torch
from image_text import NUM_PATCHES, decoder_layer, rotary, train
from torch import nn

from d9d_loop import cli_main


class JointLayer(nn.Module):
    """Decoder layer over the image features, then the text. A text without an image does not see the features."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = decoder_layer()

    def forward(
        self, image_BPD: torch.Tensor, text_BLD: torch.Tensor, has_image_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_BSD = torch.cat((image_BPD, text_BLD), dim=1)
        is_text_S = torch.arange(x_BSD.shape[1], device=x_BSD.device) >= NUM_PATCHES
        documents_BS = (~has_image_B[:, None] & is_text_S).long()
        x_BSD = self.layer(x_BSD, rotary(x_BSD), document_ids_BL=documents_BS)
        return x_BSD[:, :NUM_PATCHES], x_BSD[:, NUM_PATCHES:]


if __name__ == "__main__":
    with cli_main():
        train(JointLayer, Path(__file__).with_suffix(".toml"))
