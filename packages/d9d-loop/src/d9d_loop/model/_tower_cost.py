"""Cost of a vision tower in blocks of the language model, from the FLOPs of a microbatch on `meta`."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from d9d_loop.model._block_trace import find_blocks
from d9d_loop.model.known_values import known_values
from d9d_pipeline import Inputs


def tower_cost(model: Any, inputs: Inputs, *, num_parts: int) -> int:
    """Return the rounded FLOPs of the tower and the projector, in those of a block; 0 without images.

    `num_parts` is the number of ranks over which the rows of a block are split; each has all images.
    """
    if inputs.shared.get("pixel_values") is None or not hasattr(model.base_model, "get_image_features"):
        return 0
    on_meta, blocks = find_blocks(model, axis="mesh.pipeline_parallel")
    with torch.no_grad(), known_values(), FlopCounterMode(display=False) as counter:
        on_meta(*inputs.first, **inputs.shared)
    found, root = counter.get_flop_counts(), type(on_meta).__name__
    decoder, head = on_meta.get_decoder(), on_meta.get_output_embeddings()
    names = {module: f"{root}.{name}" for name, module in on_meta.named_modules()}
    flops = {name: sum(each.values()) for name, each in found.items()}
    of_tower = flops[root] - flops[names[decoder]] - flops.get(names[head], 0)
    num_blocks = len(on_meta.get_submodule(blocks))
    of_block = sum(flops.get(f"{root}.{blocks}.{index}", 0) for index in range(num_blocks)) / num_blocks
    of_texts = {*model.get_decoder().parameters()}
    tower = [each for each in model.base_model.parameters() if each not in of_texts]
    share, share_of_texts = _trained_share(tower), _trained_share(of_texts)
    passes = 1 + (share > 0) + share  # forward, and the gradients of inputs and of trained weights
    passes_of_texts = 1 + (share + share_of_texts > 0) + share_of_texts
    return round(passes * of_tower / (passes_of_texts * of_block / num_parts))


def _trained_share(parameters: Any) -> float:
    sizes = [(each.numel(), each.requires_grad) for each in parameters]
    return sum(size for size, is_trained in sizes if is_trained) / sum(size for size, _ in sizes)
