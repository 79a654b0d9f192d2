"""Activation checkpointing, of one module or of the layers of a model."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, create_selective_checkpoint_contexts
from torch.utils.checkpoint import CheckpointPolicy as _OperatorPolicy

from d9d_dist.errors import UserError
from d9d_dist.values.recomputation import recompute

CheckpointPolicy: TypeAlias = Literal["none", "full", "selective"]
"""Tensors to save: all ("none"), inputs only ("full"), inputs and outputs of expensive operators ("selective")."""

Operator: TypeAlias = Callable[..., Any]
"""A torch operator, such as `torch.ops.aten.mm.default`."""


def default_saved_operators() -> frozenset[Operator]:
    """Return the operators whose outputs the policy "selective" saves: matrix products, attention and collectives.

    The collectives are the functional ones, which tensor and expert parallelism use. All other operators are recomputed
    because they are memory-bound. The all-gather of context parallelism is recomputed because its result is large.
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


# FSDP of a module inside a checkpointed block records its all-gathers with profiler operators. The recomputation may
# run other profiler operators than forward, so their results must not be saved.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


def checkpoint_activations(
    module: nn.Module, *, policy: CheckpointPolicy = "full", keep: Collection[Operator] | None = None
) -> None:
    """Enable activation checkpointing for a module, in place. Results and buffers do not change.

    The module is not wrapped, so parameter names stay the same. The recomputation has the buffers that forward had.
    Call this function on each layer of a model, after `parallelize_tensor` and before compilation and
    `parallelize_hsdp`.

    Args:
        module: Module whose forward pass is recomputed during its backward pass.
        policy: `"full"` saves only the inputs; `"selective"` also saves the outputs of the operators in `keep`;
            `"none"` does nothing.
        keep: Operators whose outputs `"selective"` saves; None for `default_saved_operators()`.

    Raises:
        UserError: If the policy is unknown, `keep` is given for a policy other than `"selective"`, or the module has no
            `forward`, as `nn.ModuleList`.
    """
    if type(module).forward is nn.Module.forward:
        raise UserError(f"a {type(module).__name__} has no forward; expected a layer. Checkpoint each of its modules.")
    if keep is not None and policy != "selective":
        raise UserError(f"keep = {sorted(map(str, keep))} with policy = {policy!r}; expected policy = 'selective'.")
    match policy:
        case "none":
            return
        case "full":
            recompute(module)
        case "selective":
            operators = default_saved_operators() if keep is None else frozenset(keep)
            recompute(module, partial(create_selective_checkpoint_contexts, partial(_policy_of, operators)))
        case _:
            raise UserError(f"checkpoint policy {policy!r}; expected one of {', '.join(get_args(CheckpointPolicy))}.")


def checkpoint_layers(
    layers: nn.ModuleDict,
    *,
    policy: CheckpointPolicy = "full",
    every: int = 1,
    keep: Collection[Operator] | None = None,
) -> None:
    """Call `checkpoint_activations` on every n-th layer of a model or pipeline stage.

    Layers whose global index, their key in `layers`, is a multiple of `every` are checkpointed; the others save all
    activations. The choice does not depend on the pipeline layout.

    Raises:
        UserError: If `every` is below 1, the policy is unknown, or `keep` is given for a policy other than
            `"selective"`.
    """
    if every < 1:
        raise UserError(f"every = {every}; expected 1 (each layer) or more.")
    for index, layer in layers.items():
        if int(index) % every == 0:
            checkpoint_activations(layer, policy=policy, keep=keep)


def _policy_of(operators: frozenset[Operator], context: Any, operator: Operator, *args: Any, **kwargs: Any) -> Any:
    return _OperatorPolicy.MUST_SAVE if operator in operators else _OperatorPolicy.PREFER_RECOMPUTE
