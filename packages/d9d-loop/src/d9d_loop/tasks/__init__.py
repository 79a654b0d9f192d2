"""Tasks of decoders on packed rows: pretraining, chats, preference pairs, rewards, sampled answers, distillation."""

from d9d_loop.tasks.distillation_task import DistillationTask
from d9d_loop.tasks.next_token_task import NextTokenTask
from d9d_loop.tasks.packed_inputs import PackedBatch
from d9d_loop.tasks.policy_task import PolicyTask
from d9d_loop.tasks.preference_task import PreferenceTask
from d9d_loop.tasks.reward_task import RewardTask

__all__ = ["DistillationTask", "NextTokenTask", "PackedBatch", "PolicyTask", "PreferenceTask", "RewardTask"]
