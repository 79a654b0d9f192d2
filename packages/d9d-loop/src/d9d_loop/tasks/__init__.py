"""Tasks of decoders on packed rows: pretraining, chats, preference pairs, rewards, sampled answers, distillation."""

from d9d_loop.tasks.packed_tasks import DistillationTask as DistillationTask
from d9d_loop.tasks.packed_tasks import NextTokenTask as NextTokenTask
from d9d_loop.tasks.packed_tasks import PackedBatch as PackedBatch
from d9d_loop.tasks.packed_tasks import PolicyTask as PolicyTask
from d9d_loop.tasks.packed_tasks import PreferenceTask as PreferenceTask
from d9d_loop.tasks.packed_tasks import RewardTask as RewardTask
