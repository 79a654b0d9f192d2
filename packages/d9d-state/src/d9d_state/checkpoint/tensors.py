"""Checkpoint names of a job's tensors: `model.<name>` and `optimizer.<parameter>.<key>`."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import UserError
from d9d_state.checkpoint.info import CheckpointInfo
from d9d_state.module_tensors import unique_tensors
from d9d_state.tensor_info import TensorInfo

_MODEL = "model."
_OPTIMIZER = "optimizer."
_COUNTERS = ("step", "mu_product")  # scalars that torch's optimizers keep on the CPU, except when capturable or fused


def model_tensors(model: nn.Module, *, trainable_only: bool = False) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer, tied tensors once, as `model.<name>`, to save or to load into.

    With `trainable_only`, parameters that do not require gradients are omitted. Buffers are always included, because
    training may change them.
    """
    return {_MODEL + name: tensor.detach() for name, tensor in _held_tensors(model, trainable_only).items()}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state tensors as `optimizer.<parameter>.<key>`, to save or to load into.

    Numbers in the optimizer state are in `non_tensor_optimizer_state`.

    Raises:
        ValueError: If the optimizer updates a tensor that is not a parameter of the model. Also if its state has a
            value that is not a tensor, a number or `None`.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter, _ in named_parameters(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}{name}.{key}"] = value
            elif not (value is None or isinstance(value, bool | int | float)):
                raise ValueError(
                    f"{type(optimizer).__name__} has state {key} of type {type(value).__name__} for {name}, which a "
                    "checkpoint cannot store; expected tensors and numbers. Use another optimizer."
                )
    return tensors


def prepare_optimizer_for_load(model: nn.Module, optimizer: Optimizer, info: CheckpointInfo) -> None:
    """Allocate uninitialized state of an optimizer, of the class that was saved, with names and shapes of a checkpoint.

    Then `optimizer_tensors` can be loaded. Existing state is replaced. State of the parameter's shape gets the
    parameter's device and placements. The step counter is on the device where torch's optimizers keep it. Parameters
    without state in the checkpoint, because they never had a gradient, get no state.

    Raises:
        ValueError: If the optimizer updates a tensor that is not a parameter of the model.
    """
    saved: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor_info in info.tensors.items():
        if name.startswith(_OPTIMIZER):
            parameter_name, _, key = name.removeprefix(_OPTIMIZER).rpartition(".")
            saved.setdefault(parameter_name, {})[key] = tensor_info
    for name, parameter, group in named_parameters(model, optimizer):
        optimizer.state.pop(parameter, None)
        if name in saved:
            optimizer.state[parameter] = {
                key: _empty_state(key, tensor_info, parameter, group) for key, tensor_info in saved[name].items()
            }


def check_same_model(info: CheckpointInfo, model: nn.Module, *, trainable_only: bool = False) -> None:
    """Check that a checkpoint was saved from the same model, which may be on the meta device. Reads no tensor data.

    `trainable_only` is the value that was passed to `model_tensors` at the save.

    Raises:
        UserError: Listing every tensor that is missing, unexpected, or has a different shape or dtype.
    """
    saved = {
        name.removeprefix(_MODEL): tensor_info for name, tensor_info in info.tensors.items() if name.startswith(_MODEL)
    }
    wanted = {name: TensorInfo.of(tensor) for name, tensor in _held_tensors(model, trainable_only).items()}
    has = "has the trainable" if trainable_only else "has"
    lines = [f"  the model {has} {name}, the checkpoint does not" for name in wanted if name not in saved]
    lines += [f"  the checkpoint {has} {name}, the model does not" for name in saved if name not in wanted]
    lines += [
        f"  {name} is {saved[name].describe()} in the checkpoint, {wanted[name].describe()} in the model"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    if lines:
        raise UserError(
            f"{info.root} is a checkpoint of a different model:\n"
            + "\n".join(lines)
            + "\nUse the configuration of the run that saved it, or another run folder."
        )


def named_parameters(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor, Mapping[str, object]]]:
    """Return name, parameter and group of all tensors that the optimizer updates.

    Raises `ValueError` for a tensor that is not a parameter of the model.
    """
    names = {id(parameter): name for name, parameter in unique_tensors(model).items()}
    found: list[tuple[str, Tensor, Mapping[str, object]]] = []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"got parameter {position} of optimizer group {index}, which is not a parameter of the model; "
                    "create the optimizer from the parameters of the parallelized model."
                )
            found.append((names[id(parameter)], parameter, group))
    return found


def _held_tensors(model: nn.Module, trainable_only: bool) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in unique_tensors(model).items()
        if tensor.requires_grad or not (trainable_only and isinstance(tensor, nn.Parameter))
    }


def _empty_state(key: str, info: TensorInfo, parameter: Tensor, group: Mapping[str, object]) -> Tensor:
    if key in _COUNTERS and info.shape == ():
        on_device = bool(group.get("capturable")) or bool(group.get("fused"))
        return torch.empty((), dtype=info.dtype, device=parameter.device if on_device else "cpu")
    if info.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=info.dtype, requires_grad=False)
    return torch.empty(info.shape, dtype=info.dtype, device=parameter.device)
