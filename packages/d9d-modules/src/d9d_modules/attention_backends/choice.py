"""Which backend computes a layer's attention: the first that serves it fast, or what the user or the environment says.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

from torch import Tensor

from d9d_dist.errors import UserError
from d9d_modules.attention_backends.backend import AttentionBackend
from d9d_modules.attention_backends.eager import EagerBackend
from d9d_modules.attention_backends.flash import Flash2Backend, Flash4Backend
from d9d_modules.attention_backends.flex import FlexBackend
from d9d_modules.attention_backends.request import AttentionOptions, AttentionRequest, request_of
from d9d_modules.attention_backends.sdpa import SdpaBackend

AttentionBackendName: TypeAlias = Literal["eager", "sdpa", "flex", "flash2", "flash4"]
"""The backends that come with this package."""

BACKEND_VARIABLE = "D9D_ATTENTION"
"""Environment variable that takes the place of every layer's `backends`: names separated by commas."""


def default_attention_backends() -> tuple[AttentionBackend, ...]:
    """All backends of this package, in the order in which `choose_backend` prefers them."""
    # FlexAttention comes last, because where it is not fast, on the CPU, it is the slowest.
    return Flash4Backend(), Flash2Backend(), SdpaBackend(), EagerBackend(), FlexBackend()


def choose_backend(
    request: AttentionRequest, backends: Sequence[AttentionBackend], *, in_given_order: bool = False
) -> AttentionBackend:
    """The first backend that serves a request fast, or else the first that serves it at all.

    Args:
        request: What is asked for.
        backends: What there is to choose from.
        in_given_order: Take the first that serves it, fast or not.

    Raises:
        UserError: If none serves it; the message says why, for each.
    """
    serving = [backend for backend in backends if backend.rejection(request) is None]
    if not in_given_order:
        serving = [backend for backend in serving if backend.is_fast(request)] or serving
    if serving:
        return serving[0]
    reasons = "".join(f"\n- {backend.name} {backend.rejection(request)}" for backend in backends)
    raise UserError(
        f"no attention backend that may be used serves {request}:{reasons}\n"
        f"Allow another backend, or leave `backends` and {BACKEND_VARIABLE} unset: eager serves everything."
    )


@final
@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A `d9d_dist.Attention` that chooses its backend for each call, by what the call needs and what is installed.

    Attributes:
        options: Window, scale and softcap.
        sinks: Gives a score for each head of the queries [H]; None for none. Asked in each call, because parallelism
            puts this rank's part of a parameter in its place only while a layer runs.
        backends: What there is to choose from.
        in_given_order: Whether the first of them that serves a call is taken, or the first that does so fast.
    """

    options: AttentionOptions
    sinks: Callable[[], Tensor] | None
    backends: tuple[AttentionBackend, ...]
    in_given_order: bool

    @property
    def is_plain(self) -> bool:
        """Whether `d9d_dist.sdpa_attention` computes the same, and by a backend that may be used."""
        return (
            self.options.is_plain
            and self.sinks is None
            and (not self.in_given_order or isinstance(self.backends[0], SdpaBackend))
        )

    def of_heads(self, heads: slice) -> "ChosenAttention":
        """See `d9d_dist.AttentionOfHeads`: with the sinks of some of the heads."""
        sinks = self.sinks
        return self if sinks is None else replace(self, sinks=lambda: sinks()[heads])

    def __call__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
        """See `d9d_dist.Attention`; with the options and sinks of this layer. No collectives.

        Raises:
            UserError: If no backend serves the call, or there are not as many sinks as heads.
        """
        sinks_H = None if self.sinks is None else self.sinks()
        if sinks_H is not None and sinks_H.shape != q_BLHK.shape[2:3]:
            raise UserError(
                f"got sinks of the shape {tuple(sinks_H.shape)} for {q_BLHK.shape[2]} heads; expected one for each "
                "head of this rank. Split them as the query heads are split (tensor parallelism: `HeadParallel`)."
            )
        options = self.options.within(k_BSGK.shape[1])
        request = request_of(
            q_BLHK,
            k_BSGK,
            v_BSGK,
            options=options,
            has_documents=documents_BS is not None,
            has_sinks=sinks_H is not None,
        )
        if q_BLHK.numel() == 0:
            # torch's flash kernel for CPUs divides by the length, which ends the process.
            backend: AttentionBackend = EagerBackend()
        else:
            backend = choose_backend(request, self.backends, in_given_order=self.in_given_order)
        return backend.attend(q_BLHK, k_BSGK, v_BSGK, options=options, documents_BS=documents_BS, sinks_H=sinks_H)


def chosen_attention(
    options: AttentionOptions,
    *,
    sinks: Callable[[], Tensor] | None = None,
    backends: Sequence[AttentionBackendName | AttentionBackend] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ChosenAttention:
    """The attention function of a layer.

    Args:
        options: Window, scale and softcap.
        sinks: Gives a score for each head of the queries [H]; None for none.
        backends: Backends that may be used, the preferred first, by name or your own; None for all that are installed.
        environment: Where the variable `D9D_ATTENTION` is looked up, which takes the place of `backends`; None for that
            of the process.

    Raises:
        UserError: If a name is not that of a backend, or there is none.
    """
    variable = (os.environ if environment is None else environment).get(BACKEND_VARIABLE, "")
    names = tuple(name.strip() for name in variable.split(",") if name.strip())
    wanted: Sequence[str | AttentionBackend] | None = names or backends
    known = {backend.name: backend for backend in default_attention_backends()}
    if wanted is None:
        return ChosenAttention(options, sinks, tuple(known.values()), in_given_order=False)
    unknown = [name for name in wanted if isinstance(name, str) and name not in known]
    if unknown or not wanted:
        source = BACKEND_VARIABLE if names else "backends"
        raise UserError(
            f"{source} names {', '.join(map(repr, unknown)) or 'no attention backend'}; expected some of "
            f"{', '.join(known)}."
        )
    chosen = tuple(known[each] if isinstance(each, str) else each for each in wanted)
    return ChosenAttention(options, sinks, chosen, in_given_order=True)
