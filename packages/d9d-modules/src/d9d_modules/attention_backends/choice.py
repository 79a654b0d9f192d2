"""Selection of the attention backend: the first fast one, or the first one in an order given by the user.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

from torch import Tensor

from d9d_dist.errors import UserError
from d9d_modules.attention_backends.backend import (
    AttentionBackend,
    AttentionFeatures,
    AttentionOptions,
    AttentionRequest,
    request_of,
)
from d9d_modules.attention_backends.eager import EagerBackend
from d9d_modules.attention_backends.flash import Flash2Backend, Flash4Backend, VarlenBackend
from d9d_modules.attention_backends.flex import FlexBackend
from d9d_modules.attention_backends.sdpa import SdpaBackend

AttentionBackendName: TypeAlias = Literal["eager", "sdpa", "flex", "flash2", "flash4", "varlen"]
"""Names of the backends in this package."""

ATTENTION_VARIABLE = "D9D_ATTENTION"
"""Environment variable that overrides `backends` of every layer: comma-separated names."""


def default_attention_backends() -> tuple[AttentionBackend, ...]:
    """Return all backends of this package in the order in which `choose_attention_backend` prefers them."""
    # FlexAttention comes after the eager backend, because it is slower on CPUs.
    return Flash4Backend(), Flash2Backend(), SdpaBackend(), EagerBackend(), FlexBackend(), VarlenBackend()


def choose_attention_backend(
    request: AttentionRequest, backends: Sequence[AttentionBackend], *, in_given_order: bool = False
) -> AttentionBackend:
    """Return the first backend that is fast for a request, or else the first that supports it.

    If `in_given_order`, return the first backend that supports the request, even if a later one is fast.

    Raises:
        UserError: If no backend supports the request. The message lists the reason of each backend.
    """
    serving = [backend for backend in backends if backend.rejection(request) is None]
    if not in_given_order:
        serving = [backend for backend in serving if backend.is_fast(request)] or serving
    if serving:
        return serving[0]
    reasons = "".join(f"\n- {backend.name} {backend.rejection(request)}" for backend in backends)
    raise UserError(
        f"no allowed attention backend supports {request}:{reasons}\n"
        f"Allow another backend, or unset `backends` and {ATTENTION_VARIABLE}: eager supports every request."
    )


@final
@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """`d9d_dist.Attention` that selects a backend for each call.

    Attributes:
        sinks: Function that returns the sink logits of the query heads [H]; None for no sinks. Called in each forward
            pass, because parallelism replaces a parameter by this rank's shard only while the layer runs.
        in_given_order: If True, use the first backend that supports a call; if False, prefer fast backends.
    """

    options: AttentionOptions
    sinks: Callable[[], Tensor] | None
    backends: tuple[AttentionBackend, ...]
    in_given_order: bool

    @property
    def is_standard_sdpa(self) -> bool:
        """True if `d9d_dist.sdpa_attention` is equivalent, and a given order of backends, if any, starts with SDPA."""
        return (
            self.options.is_standard_sdpa
            and self.sinks is None
            and (not self.in_given_order or isinstance(self.backends[0], SdpaBackend))
        )

    def of_heads(self, heads: slice) -> "ChosenAttention":
        """See `AttentionOfHeads`. Selects the sinks of these heads."""
        sinks = self.sinks
        return self if sinks is None else replace(self, sinks=lambda: sinks()[heads])

    @property
    def is_causal(self) -> bool:
        """See `DeclaresCausality`."""
        return self.options.is_causal

    @property
    def window(self) -> int | None:
        """See `DeclaresWindow`."""
        return self.options.window

    def __call__(
        self,
        q_BLHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        *,
        documents_BS: Tensor | None = None,
        mask_BLS: Tensor | None = None,
    ) -> Tensor:
        """See `d9d_dist.Attention`; `mask_BLS` as in `AttentionFeatures`.

        Raises:
            UserError: If no backend supports the call, or the numbers of sinks and query heads differ.
        """
        sinks_H = None if self.sinks is None else self.sinks()
        if sinks_H is not None and sinks_H.shape != q_BLHK.shape[2:3]:
            raise UserError(
                f"got sinks of shape {tuple(sinks_H.shape)} for {q_BLHK.shape[2]} heads; expected one for each "
                "query head of this rank. Shard them like the query heads (tensor parallelism: `HeadParallel`)."
            )
        features: AttentionFeatures = {
            "options": self.options.within(k_BSGK.shape[1]),
            "documents_BS": documents_BS,
            "sinks_H": sinks_H,
            "mask_BLS": mask_BLS,
        }
        request = request_of(q_BLHK, k_BSGK, v_BSGK, **features)
        if q_BLHK.numel() == 0:
            # torch's CPU flash kernel divides by the length and crashes the process on empty tensors.
            backend: AttentionBackend = EagerBackend()
        else:
            backend = choose_attention_backend(request, self.backends, in_given_order=self.in_given_order)
        return backend.attend(q_BLHK, k_BSGK, v_BSGK, **features)


def chosen_attention(
    options: AttentionOptions,
    *,
    sinks: Callable[[], Tensor] | None = None,
    backends: Sequence[AttentionBackendName | AttentionBackend] | None = None,
) -> ChosenAttention:
    """Create the attention function of a layer.

    Args:
        options: Causality, window, scale and softcap.
        sinks: Function that returns the sink logits of the query heads [H]; None for no sinks.
        backends: Allowed backends in order of preference; None allows all of this package and prefers fast ones.
            The environment variable `D9D_ATTENTION` overrides this argument.

    Raises:
        UserError: If a backend name is unknown, or `backends` is empty.
    """
    names = [name.strip() for name in os.environ.get(ATTENTION_VARIABLE, "").split(",") if name.strip()]
    wanted: Sequence[str | AttentionBackend] | None = names or backends
    known = {backend.name: backend for backend in default_attention_backends()}
    if wanted is None:
        return ChosenAttention(options, sinks, tuple(known.values()), in_given_order=False)
    unknown = [name for name in wanted if isinstance(name, str) and name not in known]
    if unknown or not wanted:
        source = ATTENTION_VARIABLE if names else "backends"
        raise UserError(
            f"{source} names {', '.join(map(repr, unknown)) or 'no attention backend'}; expected some of "
            f"{', '.join(known)}."
        )
    chosen = tuple(known[each] if isinstance(each, str) else each for each in wanted)
    return ChosenAttention(options, sinks, chosen, in_given_order=True)
