"""Losses of language models: supervised, preference, reward, policy-gradient and distillation losses.

Every loss takes per-token values and returns a `Loss`, a sum with its weight. So it is exact under any split of the
batch over microbatches and ranks.
"""

from d9d_loop.losses.advantages import AdvantageScale as AdvantageScale
from d9d_loop.losses.advantages import Baseline as Baseline
from d9d_loop.losses.advantages import normalize_advantages as normalize_advantages
from d9d_loop.losses.distillation import DistillationLoss as DistillationLoss
from d9d_loop.losses.document_sums import sum_per_document as sum_per_document
from d9d_loop.losses.next_token import next_token_loss as next_token_loss
from d9d_loop.losses.policy import Average as Average
from d9d_loop.losses.policy import Clipping as Clipping
from d9d_loop.losses.policy import ImportanceLevel as ImportanceLevel
from d9d_loop.losses.policy import KlForm as KlForm
from d9d_loop.losses.policy import PolicyLoss as PolicyLoss
from d9d_loop.losses.policy import kl_divergence as kl_divergence
from d9d_loop.losses.policy import truncated_importance as truncated_importance
from d9d_loop.losses.preference import PreferenceLoss as PreferenceLoss
from d9d_loop.losses.preference import RewardLoss as RewardLoss
from d9d_loop.preference_kind import PreferenceKind as PreferenceKind
