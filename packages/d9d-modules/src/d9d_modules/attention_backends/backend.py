"""The contract of an attention backend: what it can serve, and the computation."""

from typing import Protocol

from torch import Tensor

from d9d_modules.attention_backends.request import AttentionOptions, AttentionRequest


class AttentionBackend(Protocol):
    """One way to compute attention. Issues no collectives.

    Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
    """

    @property
    def name(self) -> str:
        """What it is called in arguments, in the environment variable and in messages."""
        ...

    def rejection(self, request: AttentionRequest) -> str | None:
        """Why it cannot serve a request, as the end of a sentence that starts with its name; None if it can."""
        ...

    def is_fast(self, request: AttentionRequest) -> bool:
        """Whether it serves without a mask or scores [L, S] in memory, and without waiting for the device.

        Asked only for requests that it can serve.
        """
        ...

    def attend(
        self,
        q_BLHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        *,
        options: AttentionOptions,
        documents_BS: Tensor | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Serve a request.

        Args:
            q_BLHK: Queries [B, L, H, K] of the *last* L of the S positions.
            k_BSGK: Keys [B, S, G, K]; each serves H / G query heads.
            v_BSGK: Values [B, S, G, K].
            options: Window, scale and softcap.
            documents_BS: Which document each position belongs to [B, S], integers: a position attends within its
                document only. None: each row is one document.
            sinks_H: A score for each head [H] that takes part in the softmax beside those of the keys and has no value
                ("gpt-oss", arXiv:2508.10925, section 2.2); not scaled, not capped. None: no sinks.

        Returns:
            The attended values [B, L, H, K], in the dtype of the queries.
        """
        ...
