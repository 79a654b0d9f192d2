"""Attention backends behind one protocol, selected by the features that a call needs."""

from d9d_modules.attention_backends.backend import AttentionBackend
from d9d_modules.attention_backends.choice import (
    ATTENTION_VARIABLE,
    AttentionBackendName,
    ChosenAttention,
    choose_attention_backend,
    chosen_attention,
    default_attention_backends,
)
from d9d_modules.attention_backends.eager import EagerBackend
from d9d_modules.attention_backends.flash import Flash2Backend, Flash4Backend, VarlenBackend
from d9d_modules.attention_backends.flex import FlexBackend
from d9d_modules.attention_backends.request import AttentionFeatures, AttentionOptions, AttentionRequest
from d9d_modules.attention_backends.sdpa import SdpaBackend
from d9d_modules.attention_backends.visibility import documents_of_lengths

__all__ = [
    "ATTENTION_VARIABLE",
    "AttentionBackend",
    "AttentionBackendName",
    "AttentionFeatures",
    "AttentionOptions",
    "AttentionRequest",
    "ChosenAttention",
    "EagerBackend",
    "Flash2Backend",
    "Flash4Backend",
    "FlexBackend",
    "SdpaBackend",
    "VarlenBackend",
    "choose_attention_backend",
    "chosen_attention",
    "default_attention_backends",
    "documents_of_lengths",
]
