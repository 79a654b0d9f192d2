"""What a layer asks of attention, so that it can be matched against what backends can do."""

from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from d9d_dist.errors import UserError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How a layer attends: causal softmax attention, with these changes.

    Attributes:
        window: A position attends to so many positions, itself and those right before it ("Longformer",
            arXiv:2004.05150, section 3.1, one-sided); None: to all before it.
        scale: Multiplies the products of queries and keys; None: 1/sqrt(head dim).
        softcap: Scores become `softcap * tanh(score / softcap)` ("Gemma 2", arXiv:2408.00118, section 2); None: as they
            are.

    Raises:
        UserError: If an option is not above 0.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Refuse options that no attention can have."""
        for name, value in (("window", self.window), ("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and value <= 0:
                raise UserError(f"{name} = {value}; expected above 0, or None.")

    def within(self, key_length: int) -> "AttentionOptions":
        """The same for rows of this length: a window that none of them reaches is none."""
        return replace(self, window=None) if self.window is not None and self.window >= key_length else self

    @property
    def is_plain(self) -> bool:
        """Whether this is the attention of `d9d_dist.Attention`, with nothing changed."""
        return self.window is None and self.scale is None and self.softcap is None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """Everything on which it can depend whether a backend serves a call, and no values of tensors.

    Attributes:
        options: How the layer attends.
        has_sinks: Whether there is a sink for each head.
        has_documents: Whether several documents are packed into a row.
        is_prefix: Whether the queries are the last of more positions than there are queries.
        needs_gradient: Whether a backward pass may follow.
        dtype: Of queries, keys and values.
        device: Where they are.
        head_dim: Size of one head.
    """

    options: AttentionOptions = field(default_factory=AttentionOptions)
    has_sinks: bool = False
    has_documents: bool = False
    is_prefix: bool = False
    needs_gradient: bool = True
    dtype: torch.dtype
    device: torch.device
    head_dim: int

    def __str__(self) -> str:
        """What is asked for, in words."""
        options = self.options
        details = [
            *([] if options.window is None else [f"a window of {options.window}"]),
            *([] if options.softcap is None else [f"a softcap of {options.softcap}"]),
            *(["sinks"] if self.has_sinks else []),
            *(["packed documents"] if self.has_documents else []),
        ]
        place = f"head dim {self.head_dim}, {self.dtype}, {self.device.type}"
        backward = ", with backward" if self.needs_gradient else ""
        return f"causal attention{' with ' if details else ''}{', '.join(details)} ({place}{backward})"


def request_of(
    q_BLHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    *,
    options: AttentionOptions,
    has_documents: bool,
    has_sinks: bool,
) -> AttentionRequest:
    """The request that a call of an attention function makes."""
    return AttentionRequest(
        options=options,
        has_sinks=has_sinks,
        has_documents=has_documents,
        is_prefix=q_BLHK.shape[1] != k_BSGK.shape[1],
        needs_gradient=torch.is_grad_enabled() and any(x.requires_grad for x in (q_BLHK, k_BSGK, v_BSGK)),
        dtype=q_BLHK.dtype,
        device=q_BLHK.device,
        head_dim=q_BLHK.shape[-1],
    )
