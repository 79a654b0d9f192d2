"""Tasks of decoders on packed rows: pretraining, chats, preference pairs, rewards, sampled answers, distillation."""

from d9d_loop.tasks.distillation_task import DistillationTask as DistillationTask
from d9d_loop.tasks.next_token_task import NextTokenTask as NextTokenTask
from d9d_loop.tasks.packed_inputs import PackedBatch as PackedBatch
from d9d_loop.tasks.policy_task import PolicyTask as PolicyTask
from d9d_loop.tasks.preference_task import PreferenceTask as PreferenceTask
from d9d_loop.tasks.reward_task import RewardTask as RewardTask
