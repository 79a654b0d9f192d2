"""Masks of Gemma 3 for rows of several samples.

In layers with a sliding window, `transformers` looks up the images of packed rows, whose tokens see each other in both
directions, by the position of a token in its sample instead of its place in the row. So the masks are made here, of the
same parts, without a change of the places.
"""

from typing import Any

from torch import nn


def mask_packed_rows(model: nn.Module) -> None:
    """Make a model of Gemma 3 compute each sample of a row as if it was alone. Other models are unchanged."""
    for module in model.modules():
        if type(module).__name__ == "Gemma3Model":
            module.register_forward_pre_hook(_with_masks, with_kwargs=True)


def _with_masks(module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the masks of rows without a mask, whose positions start at 0 in each sample."""
    positions = inputs.get("position_ids")
    if positions is None or inputs.get("attention_mask") is not None or inputs.get("token_type_ids") is None:
        return args, inputs
    from transformers.masking_utils import (
        and_masks,
        blockwise_overlay,
        create_causal_mask,
        packed_sequence_mask_function,
        sliding_window_overlay,
    )
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    config, types = module.config.get_text_config(), inputs["token_type_ids"]
    is_own = packed_sequence_mask_function((positions == 0).cumsum(-1))
    of_layers = {
        "full_attention": is_own,
        "sliding_attention": and_masks(is_own, sliding_window_overlay(config.sliding_window)),
    }
    masks = {
        kind: create_causal_mask(
            config,
            module.get_input_embeddings().weight.new_empty(
                *types.shape, 0
            ),  # only its shape, dtype and device are read
            attention_mask=None,
            past_key_values=None,
            or_mask_function=blockwise_overlay(get_block_sequence_ids_for_mask(types, device=types.device)),
            and_mask_function=mask,
        )
        for kind, mask in of_layers.items()
    }
    return args, {**inputs, "attention_mask": masks}
