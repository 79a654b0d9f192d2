"""FSDP parameters that stay gathered between the microbatches of a step.

A pipeline stage alternates between forward and backward of many microbatches. If FSDP freed the gathered parameters
after every pass, every pass would gather them again.
"""

from collections.abc import Iterator
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule

_KEPT = WeakSet[FSDPModule]()


def mark_as_kept_gathered(module: FSDPModule) -> None:
    """Record that FSDP keeps this module's parameters gathered after forward."""
    _KEPT.add(module)


def free_gathered_after_backward(module: nn.Module, enabled: bool) -> None:
    """Set whether the next backward frees the parameters of submodules with `reshard_after_forward=False`.

    Pass False for all microbatches of a step except the last.
    """
    for child in _kept(module):
        child.set_reshard_after_backward(enabled, recurse=False)


def free_gathered(module: nn.Module) -> None:
    """Free the gathered parameters of submodules with `reshard_after_forward=False`, after forward without backward."""
    for child in _kept(module):
        child.reshard()


def free_all_gathered(module: nn.Module) -> None:
    """Free all parameters that FSDP may hold gathered: it does not notice changes of their shards."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def _kept(module: nn.Module) -> Iterator[FSDPModule]:
    return (child for child in module.modules() if isinstance(child, FSDPModule) and child in _KEPT)
