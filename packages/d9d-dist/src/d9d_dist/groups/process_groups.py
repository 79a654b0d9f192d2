"""Destruction of all process groups, in a process that may create new ones later."""

from functools import _lru_cache_wrapper

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute


def destroy_process_groups() -> None:
    """Destroy all process groups of this process, and clear DTensor's caches, which refer to their meshes.

    With stale caches, a process that later creates another default process group would use destroyed groups.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    # torch.distributed.tensor.debug has a function for this, but importing it needs NumPy.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    # The set of caches depends on the version of torch.
    for owner in (_redistribute, _collective_utils, _collective_utils.MeshTopoInfo):
        for name, member in list(vars(owner).items()):
            if name.endswith("planner_cache") and isinstance(member, dict):
                member.clear()
            elif isinstance(getattr(owner, name), _lru_cache_wrapper):
                getattr(owner, name).cache_clear()
