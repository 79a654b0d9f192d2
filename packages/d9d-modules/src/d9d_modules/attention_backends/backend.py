"""Protocol of attention backends, the options of a layer, and the features of a call."""

from dataclasses import dataclass, field, replace
from typing import NotRequired, Protocol, TypedDict, Unpack, final

import torch
from torch import Tensor

from d9d_dist.errors import UserError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Options of softmax attention.

    Attributes:
        is_causal: If True, a position attends to itself and earlier positions only; if False, to later ones too.
        window: Sliding-window size: a position attends to itself and the `window - 1` positions before it
            ("Longformer", arXiv:2004.05150, section 3.1), and without causality to the `window - 1` positions after it.
            None: no limit.
        scale: Softmax scale, by which query-key products are multiplied; None for 1/sqrt(head dim).
        softcap: Soft-cap of the scores, `softcap * tanh(score / softcap)` ("Gemma 2", arXiv:2408.00118, section 2);
            None disables it.

    Raises:
        UserError: If a window, scale or softcap is not above 0.
    """

    is_causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and value <= 0:
                raise UserError(f"{name} = {value}; expected above 0, or None.")

    def within(self, key_length: int) -> "AttentionOptions":
        """Return the options for rows of `key_length` positions; a window that covers the whole row is removed."""
        return replace(self, window=None) if self.window is not None and self.window >= key_length else self

    @property
    def is_standard_sdpa(self) -> bool:
        """True if all options have their defaults, that is, plain causal attention as in `d9d_dist.Attention`."""
        return self == AttentionOptions()


@final
class AttentionFeatures(TypedDict):
    """Arguments of an attention call besides queries, keys and values.

    Attributes:
        options: Causality, window, scale and softcap.
        documents_BS: Document id of each position [B, S], integer: a position attends only within its document. None:
            each row is one document.
        sinks_H: Sink logit of each head [H], added to the softmax denominator ("gpt-oss", arXiv:2508.10925, section
            2.2); neither scaled nor soft-capped. None: no sinks.
        mask_BLS: Boolean mask of visible keys [B, L, S] or [1, L, S], in addition to causality, window and documents.
            A query without a visible key, such as left padding, has output 0 and no gradient. None: no mask.
    """

    options: AttentionOptions
    documents_BS: Tensor | None
    sinks_H: Tensor | None
    mask_BLS: NotRequired[Tensor | None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """Features of an attention call that decide which backends support it. Holds no tensors.

    Attributes:
        has_mask: True if the call has the argument `mask_BLS`.
        has_prefix_keys: True if there are more keys than queries: the queries are the last positions of the row.
        needs_gradient: True if a backward pass may follow.
    """

    options: AttentionOptions = field(default_factory=AttentionOptions)
    has_sinks: bool = False
    has_documents: bool = False
    has_mask: bool = False
    has_prefix_keys: bool = False
    needs_gradient: bool = True
    dtype: torch.dtype
    device: torch.device
    head_dim: int

    def __str__(self) -> str:
        options = self.options
        details = [
            *([] if options.window is None else [f"a window of {options.window}"]),
            *([] if options.softcap is None else [f"a softcap of {options.softcap}"]),
            *(["sinks"] if self.has_sinks else []),
            *(["packed documents"] if self.has_documents else []),
            *(["a mask"] if self.has_mask else []),
        ]
        place = f"head dim {self.head_dim}, {self.dtype}, {self.device.type}"
        backward = ", with backward" if self.needs_gradient else ""
        kind = "causal" if options.is_causal else "bidirectional"
        return f"{kind} attention{' with ' if details else ''}{', '.join(details)} ({place}{backward})"


def request_of(
    q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **features: Unpack[AttentionFeatures]
) -> AttentionRequest:
    """Build the request of an attention call."""
    return AttentionRequest(
        options=features["options"],
        has_sinks=features["sinks_H"] is not None,
        has_documents=features["documents_BS"] is not None,
        has_mask=features.get("mask_BLS") is not None,
        has_prefix_keys=q_BLHK.shape[1] != k_BSGK.shape[1],
        needs_gradient=torch.is_grad_enabled() and any(x.requires_grad for x in (q_BLHK, k_BSGK, v_BSGK)),
        dtype=q_BLHK.dtype,
        device=q_BLHK.device,
        head_dim=q_BLHK.shape[-1],
    )


class AttentionBackend(Protocol):
    """Implementation of softmax attention. Issues no collectives.

    Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
    """

    @property
    def name(self) -> str:
        """Name used in arguments, in the environment variable `D9D_ATTENTION` and in error messages."""
        ...

    def rejection(self, request: AttentionRequest) -> str | None:
        """Return the reason why the backend does not support a request, or None if it does.

        The reason completes a sentence that starts with the backend's name, such as "has no softcap".
        """
        ...

    def is_fast(self, request: AttentionRequest) -> bool:
        """Return True if a call needs no [L, S] mask or scores in memory and no host-device synchronization.

        Called only for supported requests.
        """
        ...

    def attend(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **features: Unpack[AttentionFeatures]) -> Tensor:
        """Compute attention [B, L, H, K] in the dtype of the queries, which are the *last* L of the S positions.

        H / G query heads share a key/value head.
        """
        ...
