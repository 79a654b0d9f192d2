"""Model FLOPs of a training step as a formula: a part for each row of the inputs, and one for each pair of positions.

Images have a part for each patch, and one for each pair of patches of an image or of a window. The head has a part for
each label, if the model computes no other logits.

A job measures its coefficients once. `d9d_metrics.transformer_flops_per_token` is the same for known sizes.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, final

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn import functional as F

from d9d_metrics.flops import num_pairs


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFlops:
    """FLOPs of attention layers with the same mask, for each pair of a query and a key that the mask allows.

    Attributes:
        per_pair: FLOPs of a pair, summed over heads and layers.
        is_causal: True if a position attends to itself and earlier positions only.
        window: Sliding-window size, as in `d9d_modules.AttentionOptions`; `None` for no limit.
        chunk: Size of the chunks of a row within which positions attend, as in Llama 4; `None` for no chunks.
    """

    per_pair: float
    is_causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def pairs_of_lengths(self, lengths: Iterable[float]) -> float:
        """Return the number of pairs in rows of one document each, of some lengths."""
        return sum(num_pairs(each, causal=self.is_causal, window=self.window, chunk=self.chunk) for each in lengths)

    def pairs_at(self, numbers_BL: Tensor) -> Tensor:
        """Return the number of pairs, 0-dim int64, in packed rows. No host-device synchronization.

        `numbers_BL`, integer, numbers the positions of each document from 1, in the order of the row; 0 at padding. So
        `min(number, window)` keys up to a position are visible. Without causality, as many are visible after it in the
        whole document.
        """
        if self.chunk is not None:
            since_chunk_L = torch.arange(numbers_BL.shape[1], device=numbers_BL.device) % self.chunk + 1
            numbers_BL = numbers_BL.minimum(since_chunk_L)
        if self.window is not None:
            numbers_BL = numbers_BL.clamp(max=self.window)
        num_seen = numbers_BL.sum()
        return num_seen if self.is_causal else 2 * num_seen - (numbers_BL > 0).sum()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFlops:
    """FLOPs of the vision tower and the projector of a `transformers` model, for the inputs of its images.

    Their sizes are those of `image_grid_thw` [N, 3]: frames, and patches vertically and horizontally; or those of
    `image_sizes` [N, 2] in pixels. Without them, all images or tiles [..., C, H, W] of `pixel_values` are of the same
    size; those of zeros among several of a sample are padding. FLOPs of other sizes, and of videos, are not known.

    Attributes:
        per_patch: FLOPs of a patch; of a pixel without sizes. `None` if no images were measured.
        per_pair: Window sizes in patches, vertically and horizontally, `None` for whole frames; and the FLOPs of a pair
            of patches in the same window, summed over heads and layers.
        patch_size: Pixels of a patch in each dimension, for `image_sizes`; `None` if these are not read.
        size: Measured height and width in pixels of tiles, without sizes of images.
    """

    per_patch: float | None
    per_pair: tuple[tuple[int | None, float], ...] = ()
    patch_size: int | None = None
    size: tuple[int, int] | None = None

    def of(self, inputs: Mapping[str, Any]) -> Tensor | float:
        """Return the FLOPs of the images among a model's inputs, NaN if unknown. No host-device synchronization."""
        if inputs.get("pixel_values_videos") is not None:
            return math.nan
        pixels = inputs.get("pixel_values")
        if not isinstance(pixels, Tensor) or not pixels.numel():
            return 0.0
        if self.per_patch is None:
            return math.nan
        if (sizes_N3 := sizes_in_patches(inputs, self.patch_size)) is None:
            has_padding = pixels.dim() > 4
            num_tiles = pixels.flatten(0, -4).flatten(1).any(1).sum().double() if has_padding else len(pixels)
            per_tile = self.per_patch * pixels.shape[-2] * pixels.shape[-1]
            return num_tiles * (per_tile if self.size in {None, tuple(pixels.shape[-2:])} else math.nan)
        total = self.per_patch * sizes_N3.prod(1).sum().double()
        for window, flops in self.per_pair:
            total = total + flops * pairs_of_patches(sizes_N3, window)
        return total


def sizes_in_patches(inputs: Mapping[str, Any], patch_size: int | None) -> Tensor | None:
    """Return the sizes [N, 3] of the images among a model's inputs: frames, and patches in both dimensions."""
    if patch_size is None:
        return inputs.get("image_grid_thw")
    return F.pad(inputs["image_sizes"] // patch_size, (1, 0), value=1)


def pairs_of_patches(sizes_N3: Tensor, window: int | None) -> Tensor:
    """Return the number of pairs of patches in the same window, or in the same frame, 0-dim."""
    sizes_N2 = sizes_N3[:, 1:].long()
    squares_N2 = sizes_N2**2 if window is None else sizes_N2 // window * window**2 + (sizes_N2 % window) ** 2
    return (sizes_N3[:, 0] * squares_N2.prod(1)).sum()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FlopFormula:
    """Model FLOPs of forward and backward passes; see `d9d_metrics.flops` for what they include.

    Attributes:
        per_row: FLOPs of a row of the inputs, without attention. A row is a token, or an element of another input.
        attention: Attention layers, by mask.
        images: Vision tower and projector, whose FLOPs are not among those of the rows; `None` without one.
        per_label: FLOPs of the logits of a label; 0 if the rows include those of all positions.
    """

    per_row: float
    attention: tuple[AttentionFlops, ...] = ()
    images: ImageFlops | None = None
    per_label: float = 0.0

    def of_lengths(self, lengths: Iterable[float]) -> float:
        """Return the FLOPs of documents of some lengths, in tokens."""
        lengths = tuple(lengths)
        pairs = sum(each.per_pair * each.pairs_of_lengths(lengths) for each in self.attention)
        return self.per_row * sum(lengths) + pairs

    def at(self, numbers_BL: Tensor) -> Tensor:
        """Return the FLOPs of packed rows, 0-dim float64; for `numbers_BL` see `AttentionFlops.pairs_at`."""
        total = self.per_row * (numbers_BL > 0).sum().double()
        for each in self.attention:
            total = total + each.per_pair * each.pairs_at(numbers_BL)
        return total

    def to_json(self) -> dict[str, Any]:
        """Return the coefficients as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the formula with coefficients of `to_json`."""
        return TypeAdapter(cls).validate_python(values)
