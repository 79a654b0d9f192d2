"""What the three vision-language examples share: captions of small images, a tower, pipeline stages, parallelization.

Shape legend: B samples, P patches, C pixels of a patch, L tokens, D hidden size, H heads, K head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import (
    DistributedContext,
    StageInfo,
    VocabParallelEmbedding,
    VocabParallelHead,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_loop import Loss, ModelProvider, Task, Trainer, TrainerConfig
from d9d_modules import (
    AttentionOptions,
    DecoderLayer,
    GroupedQueryAttention,
    LanguageModelHead,
    RMSNorm,
    SwiGLU,
    TokenEmbedding,
    rotary_tables,
)
from d9d_pipeline import Inputs

NUM_LAYERS, SIZE, NUM_HEADS, HEAD_DIM = 4, 32, 4, 8
NUM_PATCHES, NUM_PIXELS = 9, 12
NUM_COLORS = 8
VOCAB_SIZE = NUM_PATCHES + NUM_COLORS + 3
START, NO_IMAGE, END = VOCAB_SIZE - 3, VOCAB_SIZE - 2, VOCAB_SIZE - 1


def captions(count: int) -> list[dict[str, torch.Tensor]]:
    """Return images with one bright patch, captioned by its place and color. Each fourth sample has no image."""
    draws, samples = torch.Generator().manual_seed(0), []
    for number in range(count):
        place, color = (int(torch.randint(0, most, (), generator=draws)) for most in (NUM_PATCHES, NUM_COLORS))
        patches = 0.1 * torch.randn(NUM_PATCHES, NUM_PIXELS, generator=draws)
        patches[place, color] += 4
        has_image = number % 4 != 3
        words = [place, NUM_PATCHES + color, place] if has_image else [NO_IMAGE] * 3
        ids = torch.tensor([START, *words, END])
        samples.append(
            {"ids": ids[:-1], "labels": ids[1:], "patches": patches * has_image, "has_image": torch.tensor(has_image)}
        )
    return samples


class Caption(Task):
    weight_unit = "tokens"

    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["ids"], batch["patches"], has_image_B=batch["has_image"], labels_BL=batch["labels"])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss.sum(outputs, batch["labels"].numel())


def attention(*, is_causal: bool) -> GroupedQueryAttention:
    options = AttentionOptions(is_causal=is_causal)
    return GroupedQueryAttention(SIZE, num_heads=NUM_HEADS, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, options=options)


def decoder_layer(*, is_causal: bool = True) -> DecoderLayer:
    return DecoderLayer(SIZE, attention=attention(is_causal=is_causal), feed_forward=SwiGLU(SIZE, 3 * SIZE))


def rotary(x_BLD: torch.Tensor) -> Any:
    positions_BL = torch.arange(x_BLD.shape[1], device=x_BLD.device).expand(x_BLD.shape[:2])
    return rotary_tables(positions_BL, head_dim=HEAD_DIM, theta=100.0)


class Tower(nn.Module):
    """Two layers in which all patches of an image see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.positions = nn.Linear(NUM_PIXELS, SIZE), nn.Embedding(NUM_PATCHES, SIZE)
        self.layers = nn.ModuleList(decoder_layer(is_causal=False) for _ in range(2))
        self.projector = nn.Linear(SIZE, SIZE)

    def forward(self, patches_BPC: torch.Tensor) -> torch.Tensor:
        x_BPD = self.patch(patches_BPC) + self.positions(torch.arange(NUM_PATCHES, device=patches_BPC.device))
        for layer in self.layers:
            x_BPD = layer(x_BPD, rotary(x_BPD))
        return self.projector(x_BPD)


class Stage(nn.Module):
    """The tower and the embedding on the first stage; layers of features and text; the head on the last stage."""

    def __init__(self, stage: StageInfo, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stage = stage
        if stage.is_first:
            self.tower, self.embedding = Tower(), TokenEmbedding(VOCAB_SIZE, SIZE)
        self.layers = nn.ModuleDict({str(index): layer(index) for index in stage.layers(NUM_LAYERS)})
        if stage.is_last:
            self.norm, self.head = RMSNorm(SIZE), LanguageModelHead(SIZE, VOCAB_SIZE)

    def forward(
        self, received: Any, patches_BPC: Any = None, *, has_image_B: torch.Tensor, labels_BL: torch.Tensor
    ) -> Any:
        pair = (self.tower(patches_BPC), self.embedding(received)) if self.stage.is_first else received
        for layer in self.layers.values():
            pair = layer(*pair, has_image_B)
        return self.head(self.norm(pair[1]), labels=labels_BL) if self.stage.is_last else pair


@dataclass(frozen=True)
class VisionLanguageModel(ModelProvider):
    """Model of layers, which return image features [B, P, D] and text [B, L, D] of both, and the flags of images."""

    layer: Callable[[int], nn.Module]

    def build(self, stage: StageInfo) -> nn.Module:
        return Stage(stage, self.layer)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense = ctx.mesh_for("dense")
        split(model, dense["tp"])
        dp = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
        for layer in model.get_submodule("layers").children():
            parallelize_hsdp(layer, dp, shard_axis="dp_cp_shard", precision=ctx.precision)
        parallelize_hsdp(model, dp, shard_axis="dp_cp_shard", precision=ctx.precision)


def split(model: nn.Module, tp: DeviceMesh) -> None:
    """Split attention by heads, feed-forward blocks by features, and the vocabulary."""
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if callable(own := getattr(module, "tensor_plan", None)):
            plan |= own(name)
    ends = {"embedding": VocabParallelEmbedding(), "head": VocabParallelHead()}
    parallelize_tensor(model, tp, plan | {name: style for name, style in ends.items() if hasattr(model, name)})


def train(layer: Callable[[int], nn.Module], config: Path) -> None:
    """Train and evaluate a model of these layers. Without the image, the loss is at least 0.75 (ln 9 + ln 8) / 4."""
    data = captions(1100)
    model = VisionLanguageModel(layer)
    trainer = Trainer(
        TrainerConfig.from_cli(config), model=model, data=data[100:], evaluation_data=data[:100], task=Caption()
    )
    print(trainer.train().evaluation)
