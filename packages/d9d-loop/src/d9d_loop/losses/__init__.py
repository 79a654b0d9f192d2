"""Losses of language models: supervised, preference, reward, policy-gradient and distillation losses.

Every loss takes per-token values and returns a `Loss`, a sum with its weight. So it is exact under any split of the
batch over microbatches and ranks.
"""

from d9d_loop.losses.advantages import AdvantageScale, Baseline, normalize_advantages
from d9d_loop.losses.distillation import DistillationLoss
from d9d_loop.losses.document_sums import sum_per_document
from d9d_loop.losses.importance import ImportanceLevel, truncated_importance
from d9d_loop.losses.kl_divergence import KlForm, kl_divergence
from d9d_loop.losses.next_token import next_token_loss
from d9d_loop.losses.policy import Average, Clipping, PolicyLoss
from d9d_loop.losses.preference import PreferenceKind, PreferenceLoss
from d9d_loop.losses.reward import RewardLoss

__all__ = [
    "AdvantageScale",
    "Average",
    "Baseline",
    "Clipping",
    "DistillationLoss",
    "ImportanceLevel",
    "KlForm",
    "PolicyLoss",
    "PreferenceKind",
    "PreferenceLoss",
    "RewardLoss",
    "kl_divergence",
    "next_token_loss",
    "normalize_advantages",
    "sum_per_document",
    "truncated_importance",
]
