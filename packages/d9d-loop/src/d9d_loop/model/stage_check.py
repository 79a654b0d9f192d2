"""Checks on `meta` that the stages of a provider make up its whole model, before a process group starts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from d9d_dist import StageInfo, UserError, canonical_name
from d9d_dist.planned_device import recorded_blocks
from d9d_loop.model._block_trace import MetaAnswers
from d9d_loop.model.built_model import build_model
from d9d_loop.model.model_provider import ModelProvider
from d9d_pipeline import Inputs
from d9d_pipeline.channel import stage_output
from d9d_pipeline.shared_parameters import shared_names
from d9d_state.module_tensors import aliases


def build_stages(provider: ModelProvider, num_stages: int, *, seed: int = 0) -> list[nn.Module]:
    """Build all pipeline stages of a model and keep their structure on `meta`."""
    stages = [StageInfo(index, num_stages) for index in range(num_stages)]
    return [build_model(provider, stage, seed=seed, keep_values=False).module for stage in stages]


def check_parts(model: nn.Module, stages: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
    """Check that all stages together have exactly the parameters of the model.

    Return the parameters shared by several stages, with the indices of those stages; the owner comes first.

    Raises:
        UserError: Lists parameters that are missing, unexpected or have another shape. Also lists parameters on several
            stages that the model does not tie, or that are trained only on some of these stages. Also lists persistent
            buffers on several stages.
    """
    shared = shared_names([dict(stage.named_parameters()) for stage in stages])
    whole, tied = _shapes(model), _tied_names(model)
    parts = [_shapes(stage) for stage in stages]
    found = {name: shape for part in parts for name, shape in part.items()}
    lines = [f"  {name} is not on any stage" for name in whole if name not in found]
    lines += [f"  {name} is on a stage, but not in the whole model" for name in found if name not in whole]
    lines += [
        f"  {name} is {list(part[name])} on stage {index}, and {list(whole[name])} in the whole model"
        for index, part in enumerate(parts)
        for name in part
        if name in whole and part[name] != whole[name]
    ]
    lines += [
        f"  {name} is on the stages {', '.join(map(str, indices))}, although the model does not tie it"
        for name, indices in shared.items()
        if name not in tied
    ]
    lines += [
        f"  {name} is frozen on some of the stages {', '.join(map(str, indices))} and trained on others"
        for name, indices in shared.items()
        if len({dict(stages[index].named_parameters())[name].requires_grad for index in indices}) > 1
    ]
    buffers = shared_names([_persistent_buffers(stage) for stage in stages])
    lines += [
        f"  the persistent buffer {name} is on the stages {', '.join(map(str, indices))}, but a checkpoint stores only "
        "one of them"
        for name, indices in buffers.items()
    ]
    if lines:
        raise UserError(
            f"the {len(stages)} stages that the model provider builds do not match its whole model:\n"
            + "\n".join(lines)
            + "\nbuild(stage) must build only the layers of its stage (stage.layers(n)), under their names in the "
            "whole model. A tied parameter has the name of its first use on every stage. Buffers computed "
            "from sizes need not be persistent."
        )
    return shared


def _persistent_buffers(stage: nn.Module) -> dict[str, Tensor]:
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    return {name: value for name, value in stage.state_dict(keep_vars=True).items() if name not in parameters}


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {canonical_name(name): parameter.shape for name, parameter in module.named_parameters()}


def _tied_names(model: nn.Module) -> set[str]:
    """Return the first name of each tied parameter."""
    first_names = aliases(dict(model.named_parameters(remove_duplicate=False)))
    return {canonical_name(first) for name, first in first_names.items() if name != first}


def check_chain(model: nn.Module, stages: Sequence[nn.Module], inputs: Inputs, stage_ranks: Sequence[int]) -> None:
    """Run the stages in order on `meta`, each with the output of the previous one.

    Errors are ignored if the whole model cannot run on `meta`. `stage_ranks` are the pipeline ranks of the stages.

    Raises:
        UserError: If a stage rejects its inputs, or an output cannot be sent to the next stage's rank.
    """
    first, shared = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (inputs.first, inputs.shared))
    with torch.no_grad(), torch.device("meta"), MetaAnswers(), recorded_blocks(lambda: lambda num_equal: True):
        try:
            _run_chain(stages, first, shared, stage_ranks)
        except UserError:
            try:
                model(*first, **shared)
            except Exception:
                return
            raise


def _run_chain(
    stages: Sequence[nn.Module], payload: tuple[Any, ...], shared: Mapping[str, Any], stage_ranks: Sequence[int]
) -> None:
    for index, stage in enumerate(stages):
        given = "the microbatch's inputs" if index == 0 else f"what stage {index - 1} returns"
        try:
            payload = (stage(*payload, **shared),)
        except Exception as error:
            raise UserError(
                f"stage {index} of {len(stages)} does not accept {given}, {_show(payload)}: "
                f"{type(error).__name__}: {error}\nThe whole model accepts the same inputs. Each stage must return "
                "the only positional argument of the next stage's forward; keyword arguments go to every stage."
            ) from error
        if index + 1 < len(stages) and stage_ranks[index] != stage_ranks[index + 1]:
            stage_output(payload[0])


def _show(payload: tuple[Any, ...]) -> str:
    shown = pytree.tree_map(
        lambda x: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else x, payload
    )
    return ", ".join(map(str, shown)).replace("'", "") or "no positional arguments"
