"""Topology, collectives, parallelism and exact gradients for PyTorch."""

from d9d_dist.context import DistributedContext
from d9d_dist.data_parallel import Precision, parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from d9d_dist.errors import UserError
from d9d_dist.gradients import clip_grad_norm_, global_grad_norm, scale_gradients_, set_gradient_sync
from d9d_dist.late_init import ModuleLateInit, canonical_name, materialize
from d9d_dist.launch import Launch, read_launch
from d9d_dist.mesh import MeshConfig
from d9d_dist.seeds import seed_everything, stream_key
from d9d_dist.stage import StageInfo

__all__ = [
    "DistributedContext",
    "Launch",
    "MeshConfig",
    "ModuleLateInit",
    "Precision",
    "StageInfo",
    "UserError",
    "canonical_name",
    "clip_grad_norm_",
    "global_grad_norm",
    "materialize",
    "parallelize_fsdp",
    "parallelize_hsdp",
    "parallelize_replicate",
    "read_launch",
    "scale_gradients_",
    "seed_everything",
    "set_gradient_sync",
    "stream_key",
]
