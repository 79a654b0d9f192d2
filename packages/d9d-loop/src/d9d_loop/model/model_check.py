"""Checks of a built or parallelized model."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from d9d_dist import DistributedContext, UserError, canonical_name, gather_json
from d9d_dist.data_parallel.batch_norm import is_synchronized
from d9d_dist.data_parallel.embedding_rows import writes_to_rows
from d9d_pipeline import RankStages
from d9d_state import TensorInfo, check_saveable, model_tensors


def stand_in_problem(model: nn.Module, dp_size: int) -> str:
    """Return a message if results of a model in training mode would include stand-ins of other ranks; else empty."""
    modules = [module for module in model.modules() if module.training and dp_size > 1]
    if any(map(is_synchronized, modules)):
        what, remedy = "batch norms in training mode, whose statistics", "call eval() on the batch norms"
    elif any(map(_counts_batch, modules)) and not takes_mask(model):
        what = 'router losses of scope "batch" and a forward without mask_BL, so the load of experts'
        remedy = 'pass the mask_BL of the batch to MoELayer, or choose the scope "sequence"'
    else:
        return ""
    return (
        f"the model has {what} would include stand-in batches; expected as many microbatches on all ranks. Pass equal "
        f"numbers, or {remedy}."
    )


def _counts_batch(module: nn.Module) -> bool:
    """Return True for an MoE layer whose router losses count the tokens of a microbatch; see `RouterLosses`."""
    return getattr(getattr(module, "losses", None), "follow_batch", False) is True


def takes_mask(model: nn.Module) -> bool:
    """Return True if all stages of a rank take `mask_BL`, or pass it on to a module that does, by `**kwargs`."""
    stages = model.children() if isinstance(model, RankStages) else [model]
    return all(map(_stage_takes_mask, stages))


def _stage_takes_mask(stage: nn.Module) -> bool:
    own = arguments_of(stage)
    passes_on = any(each.kind is each.VAR_KEYWORD for each in own.values())
    return "mask_BL" in own or (passes_on and any("mask_BL" in arguments_of(part) for part in stage.modules()))


def arguments_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a module's forward by name; empty if it is compiled by TorchScript."""
    try:
        return inspect.signature(module.forward).parameters
    except ValueError:
        return {}


def dropout_names(module: Any) -> list[str]:
    """Return the names of the positive dropout probabilities of a module, or of a configuration of `transformers`."""
    if isinstance(module, _DropoutNd):
        return ["p"] if module.p > 0 else []
    return [name for name, each in vars(module).items() if "drop" in name and isinstance(each, float) and each > 0]


def describe_tensors(model: nn.Module) -> dict[str, TensorInfo]:
    """Return the global shape and dtype of every parameter and persistent buffer, by name."""
    return {name.removeprefix("model."): TensorInfo.of(tensor) for name, tensor in model_tensors(model).items()}


def check_unchanged(model: nn.Module, built: Mapping[str, TensorInfo]) -> None:
    """Check that `parallelize` changed no name, global shape or dtype of `built`, else raise `UserError`.

    Otherwise the model's checkpoints would not fit the model that is built after a restart.
    """
    now = describe_tensors(model)
    lines = [
        f"  {name}: built as {built[name].describe() if name in built else 'nothing'}, now "
        f"{now[name].describe() if name in now else 'nothing'}"
        for name in dict.fromkeys([*built, *now])
        if built.get(name) != now.get(name)
    ]
    if lines:
        raise UserError(
            "the model provider's parallelize changed the model, so that its checkpoints could not be resumed:\n"
            + "\n".join(lines)
            + "\nChange the model in build; to compute in another dtype, pass a Precision to parallelize_hsdp."
        )


def check_trained_dtypes(model: nn.Module) -> None:
    """Raise `UserError` if a parameter is trained in float16, whose range is too small without a scaled loss."""
    names = [name for name, each in model.named_parameters() if each.requires_grad and each.dtype == torch.float16]
    if names:
        raise UserError(
            f"{names[0]} and {len(names) - 1} other trained parameters are float16; expected float32 or bfloat16, "
            "because the squares of gradients below 2.4e-4, and an optimizer's eps of 1e-8, are 0 in float16. Use "
            "float32 parameters: model.dtype = float32 in a text job, dtype=torch.float32 of hugging_face_model."
        )


def check_parameters_are_saveable(model: nn.Module) -> None:
    """Raise `UserError` if a checkpoint cannot store a trained parameter, such as one of complex128."""
    try:
        check_saveable({name: each for name, each in model.named_parameters() if each.requires_grad})
    except ValueError as error:
        raise UserError(f"a trained parameter cannot be saved: {error}") from None


def describe_precision(model: nn.Module, *, computes_in_bfloat16: bool) -> str | None:
    """Return a note about the dtypes of trained parameters; `None` if all computation is in float32."""
    dtypes = {each.dtype for each in model.parameters() if each.requires_grad}
    if torch.bfloat16 in dtypes:
        return (
            "d9d: trained parameters are bfloat16: updates far below a value are rounded away, except with "
            "optimizer.kind = stochastic_adamw. float32 parameters keep them."
        )
    if not computes_in_bfloat16:
        return None
    return (
        "d9d: forward and backward compute in bfloat16; parameters and sums of gradients stay in float32. "
        'precision = "parameters" computes in the dtype of the parameters.'
    )


def describe_modes(model: nn.Module) -> str | None:
    """Return a warning if modules are in evaluation mode, as after `from_pretrained`; `None` if none is."""
    names = [name for name, module in model.named_modules() if not module.training]
    if not names:
        return None
    return (
        f"d9d: {len(names)} of {sum(1 for _ in model.modules())} modules are in evaluation mode "
        f"({names[0] or 'the whole model'}): they train without dropout and without gradient checkpointing. "
        "from_pretrained returns a model in this mode; call model.train() where the model is built."
    )


def sum_gradients(model: nn.Module) -> None:
    """Make torch's `fully_shard`, if `parallelize` called it, sum gradients over ranks instead of averaging them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support pre-multiplied sums


def check_parallelized(model: nn.Module, ctx: DistributedContext) -> None:
    """Check that every trainable parameter is a DTensor over all ranks of its stage, if the stage has several ranks.

    Raises:
        UserError: Lists parameters on fewer ranks, whose gradients would not be reduced over all ranks. Also lists
            modules that write to their weight in forward, such as embeddings with max_norm, if the weight is sharded.
    """
    num_ranks = ctx.world_size // ctx.size("dense", "pp")
    alone = [
        canonical_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and (parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1) != num_ranks
    ]
    written = [
        canonical_name(name)
        for name, module in model.named_modules()
        if writes_to_rows(module)
        and any(not place.is_replicate() for each in module.parameters() for place in getattr(each, "placements", ()))
    ]
    if written:
        raise UserError(
            f"the model provider's parallelize sharded {', '.join(written)}, whose max_norm writes to the weight in "
            "forward; expected replicated embeddings. Shard with parallelize_hsdp, which replicates such embeddings."
        )
    if alone:
        tensor_parallel = 'parallelize_tensor(model, dense["tp"], plan), then ' if ctx.size("dense", "tp") > 1 else ""
        raise UserError(
            f"the model provider's parallelize placed {', '.join(alone)} on fewer than the {num_ranks} ranks of a "
            "stage, so their gradients would not be summed over all ranks; expected DTensors on every axis with "
            f"several ranks, from calls on the whole model: {tensor_parallel}"
            'parallelize_hsdp(model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"], shard_axis="dp_cp_shard").'
        )


def check_same_parameters(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Raise `UserError` if a step created, replaced or deleted parameters: the optimizer holds the built ones."""
    now = dict(model.named_parameters())
    changed = [canonical_name(name) for name, each in now.items() if before.get(name) is not each]
    changed += [canonical_name(name) for name in before if name not in now]
    if changed:
        raise UserError(
            f"the first step created, replaced or deleted the parameters {', '.join(changed)}; expected the built "
            "parameters, because the optimizer updates only these. Create all in build; call a lazy module once there."
        )


def check_experts_are_shared_out(stages: Iterable[nn.Module], ctx: DistributedContext) -> None:
    """Raise `UserError` if the expert-parallel degree is above 1, but no parameter is sharded by expert parallelism.

    Collective if the degree is above 1: an all-gather, because a rank's stages may contain no experts.
    """
    num_ranks = ctx.size("expert", "ep_shard")
    if num_ranks == 1:
        return
    parameters = [each for stage in stages for each in stage.parameters() if isinstance(each, DTensor)]
    here = any("ep_shard" in (each.device_mesh.mesh_dim_names or ()) for each in parameters)
    if not any(gather_json(here)):
        raise UserError(
            f"mesh.expert_parallel = {num_ranks}, but no experts are sharded; expected a model with experts. Set it to "
            "1, or call parallelize_moe(model, ctx) of d9d_moe in parallelize of your own model provider."
        )
