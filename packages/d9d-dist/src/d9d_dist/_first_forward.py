"""Detection of parameter writes in the first forward of an FSDP module; sharding would lose the writes."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist.errors import UserError
from d9d_dist.late_init import canonical_name


def refuse_writes_in_first_forward(module: nn.Module) -> None:
    """Make the first forward raise `UserError` if it replaces or writes to parameters: FSDP would lose the writes.

    Call it before `fully_shard`: the check must run after the hooks of tensor parallelism restore the parameters and
    before FSDP frees them.
    """
    before: dict[str, tuple[torch.Tensor, int, int]] = {}

    def note(_module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # Traced tensors have no version counters.
        before.update({name: (each, each.data_ptr(), each._version) for name, each in _gathered(module)})

    def compare(_module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for handle in handles:
            handle.remove()
        names = [
            canonical_name(name)
            for name, each in _gathered(module)
            if name in before and not _is_same(before[name], each)
        ]
        before.clear()
        if names:
            raise UserError(
                f"forward replaces or writes to {', '.join(names)}, for example by .to(dtype) or under no_grad; "
                "expected only reads, because each forward gathers the sharded parameters again. Set the parameters' "
                "dtype in build, or compute a new tensor from them."
            )

    handles = [
        module.register_forward_pre_hook(note),
        module.register_forward_hook(compare),
    ]


def _is_same(before: tuple[torch.Tensor, int, int], parameter: torch.Tensor) -> bool:
    tensor, pointer, version = before
    return tensor is parameter and pointer == parameter.data_ptr() and version == parameter._version


def _gathered(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, each) for name, each in module.named_parameters() if not isinstance(each, DTensor)]
