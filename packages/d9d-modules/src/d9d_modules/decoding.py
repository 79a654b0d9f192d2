"""Next-token logits of a decoder, either from caches of its token mixers or from the whole context.

Shape legend: B batch, L new positions, S positions of the context, V vocabulary.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist.values.buffer_values import BufferValues
from d9d_modules.decoder import DecoderLayer
from d9d_modules.lm_head import LanguageModelHead
from d9d_modules.mixer_cache import MixerCache, SupportsCache
from d9d_modules.models.decoder_heads import DecoderForCausalLM
from d9d_modules.models.decoder_model import DecoderModel

NextLogits: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""Function that returns the logits [B, V] after the tokens [B, S]; the mask is False at left padding, None for none."""


@final
class WholeContext:
    """`NextLogits` that runs the model on the whole context for each token.

    Args:
        model: Maps token ids [B, L] to logits [B, L, V]. For padded rows the model also gets `position_ids` and
            `document_ids_BL`.
        multiple: Pad rows on the right to a multiple of this length.
        max_context: Use only this many tokens at the end of the context; positions restart at 0.
    """

    def __init__(self, model: Callable[..., Any], *, multiple: int, max_context: int) -> None:
        self._model, self._multiple, self._max_context = model, multiple, max_context

    def __call__(self, ids_BS: Tensor, mask_BS: Tensor | None) -> Tensor:
        """See `NextLogits`."""
        ids_BS = ids_BS[:, -self._max_context :]
        length = ids_BS.shape[1]
        padding = (0, -length % self._multiple)
        arguments = {}
        if mask_BS is not None:
            mask_BS = mask_BS[:, -self._max_context :]
            positions_BS = F.pad(row_positions(mask_BS), padding)
            arguments = {"position_ids": positions_BS, "document_ids_BL": F.pad(mask_BS.long(), padding, value=1)}
        return self._model(F.pad(ids_BS, padding), **arguments)[:, length - 1]


@final
class CachedContext:
    """`NextLogits` that computes only the positions that are not in the caches of the token mixers yet.

    Rows that become longer than `max_context` are computed by `WholeContext`: their positions restart at 0.
    """

    def __init__(self, model: nn.Module, *, capacity: int, multiple: int, max_context: int) -> None:
        self._model, self._multiple, self._max_context = model, multiple, max_context
        mixers = [layer.attention for layer in model.modules() if isinstance(layer, DecoderLayer)]
        self._mixers = [mixer for mixer in mixers if isinstance(mixer, SupportsCache)]
        self._heads = [module for module in model.modules() if isinstance(module, LanguageModelHead)]
        self._length = 0
        # The last pass writes its padding after the last position.
        capacity = min(capacity, max_context) + multiple - 1
        self._caches: list[MixerCache] = [mixer.start_cache(capacity) for mixer in self._mixers]

    def close(self) -> None:
        """Free the caches."""
        self._caches = []
        for mixer in self._mixers:
            mixer.drop_cache()
        for head in self._heads:
            head.logit_positions = slice(None)

    def __call__(self, ids_BS: Tensor, mask_BS: Tensor | None) -> Tensor:
        """See `NextLogits`. Rows continue those of the previous call."""
        length = ids_BS.shape[1]
        if length > self._max_context:
            self.close()
            return WholeContext(self._model, multiple=self._multiple, max_context=self._max_context)(ids_BS, mask_BS)
        new_BL = ids_BS[:, self._length :]
        num_new = new_BL.shape[1]
        padding = (0, -num_new % self._multiple)
        if mask_BS is None:
            positions_BL = torch.arange(self._length, length, device=ids_BS.device).unsqueeze(0)
            documents_BL = None
        else:
            positions_BL = row_positions(mask_BS)[:, self._length :]
            documents_BL = F.pad(mask_BS[:, self._length :].long(), padding, value=1)
        for cache in self._caches:
            cache.num_new = num_new
        for head in self._heads:
            head.logit_positions = slice(num_new - 1, num_new)
        self._length = length
        logits_B1V = self._model(
            F.pad(new_BL, padding), position_ids=F.pad(positions_BL, padding), document_ids_BL=documents_BL
        )
        return logits_B1V[:, 0]


def why_no_cache(model: Callable[..., Any]) -> str | None:
    """Return the reason why a model cannot generate from caches, as the end of a sentence; None if caches work."""
    if not isinstance(model, nn.Module):
        return "the model is a function, whose layers are not known"
    modules = dict(model.named_modules())
    backbones = {name: module for name, module in modules.items() if isinstance(module, DecoderModel)}
    if len(backbones) != 1 or not any(isinstance(module, DecoderForCausalLM) for module in modules.values()):
        return f"the model is a {type(model).__name__}, not a DecoderForCausalLM"
    for name, backbone in backbones.items():
        if backbone.stage.count > 1:
            return f"the model is one of {backbone.stage.count} pipeline stages"
        if backbone.full_sequence_reason is not None:
            return f"{name} {backbone.full_sequence_reason}"
    layers = {name: module for name, module in modules.items() if isinstance(module, DecoderLayer)}
    reasons = (_why_no_mixer_cache(name, layer) for name, layer in layers.items())
    return next((reason for reason in reasons if reason is not None), None)


def _why_no_mixer_cache(name: str, layer: DecoderLayer) -> str | None:
    mixer = layer.attention
    if not isinstance(mixer, SupportsCache):
        return f"{name}.attention is a {type(mixer).__name__} without start_cache"
    reason = mixer.why_no_cache()
    return None if reason is None else f"{name}.attention {reason}"


def row_positions(mask_BS: Tensor) -> Tensor:
    """Return the position of each token in its row [B, S], int64, for left-padded rows; 0 at padding."""
    return (mask_BS.long().cumsum(dim=1) - 1).clamp(min=0)


@contextmanager
def evaluating(model: Callable[..., Any]) -> Generator[None]:
    """Use evaluation mode inside the context, and bypass `torch.compile`, because the length changes with each step.

    Afterwards the buffers of the model have their earlier values.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    buffers = BufferValues(model) if isinstance(model, nn.Module) else None
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    # Importing torch._dynamo takes seconds; before its import nothing is compiled.
    has_dynamo = modules and "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if has_dynamo else nullcontext():
        try:
            yield
        finally:
            if buffers is not None:
                buffers.restore()
            for module in training:
                module.training = True
