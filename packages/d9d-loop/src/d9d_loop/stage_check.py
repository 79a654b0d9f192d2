"""Whether the stages that a provider builds make up its model, found on `meta` before anything starts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from d9d_dist import StageInfo, UserError, canonical_name
from d9d_loop.model_provider import ModelProvider
from d9d_pipeline import Inputs, shared_names


def check_stages(
    provider: ModelProvider, model: nn.Module, *, num_stages: int, inputs: Inputs
) -> dict[str, tuple[int, ...]]:
    """Build every stage on `meta`, and check that they make up the model and take what the stage before them returns.

    Args:
        provider: Builds stages.
        model: The whole model, on `meta`.
        num_stages: Number of stages.
        inputs: What one microbatch feeds in.

    Returns:
        The names of parameters that several stages have, with those stages.

    Raises:
        UserError: If tensors are missing, are on several stages though the model does not tie them, or have other
            shapes than in the model; or if a stage does not take what the one before it returns.
    """
    with torch.device("meta"):
        stages = [provider.build(StageInfo(index, num_stages)) for index in range(num_stages)]
    shared = shared_names([dict(stage.named_parameters()) for stage in stages])
    _check_tensors(model, stages, shared)
    _check_chain(model, stages, inputs)
    return shared


def _check_tensors(model: nn.Module, stages: Sequence[nn.Module], shared: Mapping[str, tuple[int, ...]]) -> None:
    whole, tied = _shapes(model), _tied_names(model)
    parts = [_shapes(stage) for stage in stages]
    found = {name: shape for part in parts for name, shape in part.items()}
    lines = [f"  {name} is on no stage" for name in whole if name not in found]
    lines += [f"  {name} is on a stage, but not in the whole model" for name in found if name not in whole]
    lines += [
        f"  {name} is {list(part[name])} on stage {index}, and {list(whole[name])} in the whole model"
        for index, part in enumerate(parts)
        for name in part
        if name in whole and part[name] != whole[name]
    ]
    lines += [
        f"  {name} is on the stages {', '.join(map(str, indices))}, though the model does not tie it to anything"
        for name, indices in shared.items()
        if name not in tied
    ]
    if lines:
        raise UserError(
            f"the {len(stages)} stages that the model provider builds do not make up its model:\n"
            + "\n".join(lines)
            + "\nLet build(stage) make only the layers of its stage (stage.layers(n)), under their names in the whole "
            "model; what it ties has the name of the first of its places, wherever it is used."
        )


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {canonical_name(name): parameter.shape for name, parameter in module.named_parameters()}


def _tied_names(model: nn.Module) -> set[str]:
    """First names of parameters that the model uses in several places."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_name(name))
    return {places[0] for places in names.values() if len(places) > 1}


def _check_chain(model: nn.Module, stages: Sequence[nn.Module], inputs: Inputs) -> None:
    """Run all stages on `meta`, unless the whole model itself cannot be run there."""
    first, shared = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (inputs.first, inputs.shared))
    with torch.no_grad(), torch.device("meta"):
        try:
            model(*first, **shared)
        except Exception:
            return
        payload: tuple[Any, ...] = first
        for index, stage in enumerate(stages):
            try:
                payload = (stage(*payload, **shared),)
            except Exception as error:
                got = (
                    f"the microbatch's inputs, {_show(payload)}"
                    if index == 0
                    else f"what stage {index - 1} returns, {_show(payload)}"
                )
                raise UserError(
                    f"stage {index} of {len(stages)} does not take {got}: {type(error).__name__}: {error}\nThe whole "
                    "model takes the same inputs. Let each stage return what the next one's forward takes as its only "
                    "positional argument; keyword arguments go to every stage."
                ) from error


def _show(payload: tuple[Any, ...]) -> str:
    shown = pytree.tree_map(
        lambda x: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else x, payload
    )
    return ", ".join(map(str, shown)).replace("'", "") or "no positional arguments"
