"""Cost of a vision tower in blocks of the language model, from the FLOPs of a microbatch on `meta`."""

from collections.abc import Iterable
from itertools import dropwhile
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from d9d_loop.model._block_trace import find_blocks
from d9d_loop.model.known_values import known_values
from d9d_loop.model.operator_flops import grouped_flops
from d9d_pipeline import Inputs


def tower_cost(model: Any, inputs: Inputs) -> float:
    """Return the FLOPs of the tower and the projector as a multiple of those of a block; 0 without images.

    0 if the model does not run without values, or has no list of blocks: the cost is then unknown.
    """
    if inputs.shared.get("pixel_values") is None or not hasattr(model.base_model, "get_image_features"):
        return 0.0
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops})
    try:
        on_meta, blocks = find_blocks(model, axis="mesh.pipeline_parallel")
        with torch.no_grad(), known_values(), counter:
            on_meta(*inputs.first, **inputs.shared)
    except Exception:
        return 0.0
    found, root = counter.get_flop_counts(), type(on_meta).__name__
    decoder, head = on_meta.get_decoder(), on_meta.get_output_embeddings()
    names = {module: f"{root}.{name}" for name, module in on_meta.named_modules()}
    flops = {name: sum(each.values()) for name, each in found.items()}
    if names[decoder] not in flops:  # the model calls parts of it
        return 0.0
    of_tower = flops[root] - flops[names[decoder]] - flops.get(names[head], 0)
    num_blocks = len(on_meta.get_submodule(blocks))
    of_block = sum(flops.get(f"{root}.{blocks}.{index}", 0) for index in range(num_blocks)) / num_blocks
    of_texts = dict.fromkeys(model.get_decoder().parameters())
    tower = [each for each in model.base_model.parameters() if each not in of_texts]
    (reach, share), (reach_of_texts, share_of_texts) = _trained(tower), _trained(of_texts)
    passes = 1 + reach + share  # forward, and the gradients of inputs and of trained weights
    passes_of_texts = 1 + (1 if share else reach_of_texts) + share_of_texts
    return passes * of_tower / (passes_of_texts * of_block) if of_block else 0.0


def _trained(parameters: Iterable[nn.Parameter]) -> tuple[float, float]:
    """Return two shares of the elements: from the first trained parameter on, and in trained parameters.

    Parameters are in the order of their use, so backward computes gradients of activations in the first share.
    """
    sizes = [(each.numel(), each.requires_grad) for each in parameters]
    total = sum(size for size, _ in sizes)
    reached = [size for size, _ in dropwhile(lambda each: not each[1], sizes)]
    return sum(reached) / total, sum(size for size, is_trained in sizes if is_trained) / total
