"""Activation checkpointing as functions over a module and over a model's layers: less memory for more computation."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as _OperatorPolicy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from d9d_dist.errors import UserError

CheckpointPolicy: TypeAlias = Literal["none", "full", "selective"]
"""What is kept of a forward pass: everything; the inputs alone; the inputs and the results of costly operators."""

Operator: TypeAlias = Callable[..., Any]
"""An operator of torch, such as `torch.ops.aten.mm.default`."""


def costly_operators() -> frozenset[Operator]:
    """Operators whose results the policy "selective" keeps: matrix products, attention, and collectives.

    Norms, activations and everything else that only reads and writes memory is computed again.
    """
    aten = torch.ops.aten
    operators: set[Operator] = {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.higher_order.flex_attention,
    }
    if torch.distributed.is_available():
        functional = torch.ops._c10d_functional
        operators |= {
            functional.all_gather_into_tensor.default,
            functional.all_reduce.default,
            functional.all_to_all_single.default,
            functional.reduce_scatter_tensor.default,
        }
    return frozenset(operators)


def checkpoint_activations(
    module: nn.Module, *, policy: CheckpointPolicy = "full", keep: Collection[Operator] | None = None
) -> None:
    """Change what `module` keeps between its forward and its backward pass; never what it computes.

    The module is changed in place: no wrapper, so the names of parameters stay. Call it on each layer of a model, after
    `parallelize_tensor`, before compiling and before `parallelize_hsdp`.

    Args:
        module: The module whose forward pass is to be run again during its backward pass.
        policy: `"full"` keeps the inputs alone; `"selective"` also the results of some operators, which are then not
            computed again; `"none"` leaves the module as it is.
        keep: The operators of `"selective"`; None for `costly_operators()`.

    Raises:
        UserError: If there is no such policy, or operators are given for another one.
    """
    if keep is not None and policy != "selective":
        raise UserError(f"keep = {sorted(map(str, keep))} with policy = {policy!r}; expected policy = 'selective'.")
    match policy:
        case "none":
            return
        case "full":
            # The instance's forward hides the class's; hooks around it (FSDP's too) are left out of the second run.
            module.forward = partial(_checkpointed, module.forward)
        case "selective":
            operators = costly_operators() if keep is None else frozenset(keep)
            contexts = partial(create_selective_checkpoint_contexts, partial(_policy_of, operators))
            module.forward = partial(_checkpointed, module.forward, context_fn=contexts)
        case _:
            raise UserError(f"checkpoint policy {policy!r}; expected one of {', '.join(get_args(CheckpointPolicy))}.")


def checkpoint_layers(
    layers: nn.ModuleDict,
    *,
    policy: CheckpointPolicy = "full",
    every: int = 1,
    keep: Collection[Operator] | None = None,
) -> None:
    """Checkpoint every n-th layer of a model, or of the part of it that a pipeline stage has.

    Args:
        layers: Layers by their index in the whole model, so that every layout checkpoints the same ones.
        policy: See `checkpoint_activations`.
        every: The layers whose index it divides are checkpointed, the others keep everything.
        keep: See `checkpoint_activations`.

    Raises:
        UserError: If `every` is below 1, or the policy does not fit.
    """
    if every < 1:
        raise UserError(f"every = {every}; expected 1 (each layer) or more.")
    for index, layer in layers.items():
        if int(index) % every == 0:
            checkpoint_activations(layer, policy=policy, keep=keep)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A function of our own: torch.compile skips a module whose forward is torch's checkpoint itself.
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _policy_of(operators: frozenset[Operator], context: Any, operator: Operator, *args: Any, **kwargs: Any) -> Any:
    return _OperatorPolicy.MUST_SAVE if operator in operators else _OperatorPolicy.PREFER_RECOMPUTE
