"""Activation checkpointing as a function over a module: less memory for one more forward pass."""

from functools import partial
from typing import Literal, TypeAlias, get_args

from torch import nn
from torch.utils.checkpoint import checkpoint

from d9d_dist.errors import UserError

CheckpointPolicy: TypeAlias = Literal["none", "full"]


def checkpoint_activations(module: nn.Module, *, policy: CheckpointPolicy = "full") -> None:
    """Change what `module` keeps between its forward and its backward pass; never what it computes.

    The module is changed in place: no wrapper, so the names of parameters stay. Call it on each layer of a model,
    before `parallelize_hsdp`.

    Args:
        module: The module whose forward pass is to be run again during its backward pass.
        policy: `"full"` keeps the inputs alone; `"none"` leaves the module as it is.

    Raises:
        UserError: If there is no such policy.
    """
    match policy:
        case "none":
            return
        case "full":
            # The instance's forward hides the class's; hooks around it (FSDP's too) are left out of the second run.
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        case _:
            raise UserError(f"checkpoint policy {policy!r}; expected one of {', '.join(get_args(CheckpointPolicy))}.")
