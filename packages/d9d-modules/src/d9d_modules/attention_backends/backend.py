"""Protocol of attention backends."""

from typing import Protocol, Unpack

from torch import Tensor

from d9d_modules.attention_backends.request import AttentionFeatures, AttentionRequest


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
