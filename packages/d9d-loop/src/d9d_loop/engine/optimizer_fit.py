"""Build of a job's optimizer, and check that it can use the state of another class."""

import inspect
from collections import OrderedDict, defaultdict
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import UserError, parameter_roles
from d9d_dist.lazy_exports import paused_collection
from d9d_loop.optimizers.optimizer import OptimizerProvider, OptimizerSettings, layer_depths


def optimizer_provider(
    given: OptimizerProvider | None, config: OptimizerSettings, whole: nn.Module
) -> OptimizerProvider:
    """Return the function that builds the optimizer: the given one, or else that of the configuration.

    Raises `UserError` if the configuration does not fit the whole model.
    """
    if given is not None:
        return given
    with paused_collection():  # an optimizer of torch imports torch._dynamo
        config.build(whole)
    # A stage need not match every parameter group: the groups are checked on the whole model.
    return partial(config.build, whole=False, roles=parameter_roles(whole), depths=layer_depths(whole))


def check_optimizer(built: object) -> Optimizer:
    """Return the optimizer of a provider. Raise `UserError` if it is not an optimizer, or needs a closure."""
    if not isinstance(built, Optimizer):
        raise UserError(
            f"the function that builds the optimizer returned a {type(built).__name__}; expected a "
            "torch.optim.Optimizer of the model's parameters."
        )
    required = [
        name
        for name, argument in inspect.signature(built.step).parameters.items()
        if argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD
    ]
    if required:
        raise UserError(
            f"{type(built).__name__}.step needs the argument {required[0]}; expected an optimizer that updates the "
            "parameters from their gradients. Use another optimizer: a job does not run the step again in a closure."
        )
    return built


def check_state_fits(optimizer: Optimizer, before: str) -> None:
    """Raise `UserError` if a step of an optimizer needs a value that the state of another class does not have.

    `before` is the class of the optimizer that was saved. A copy of the optimizer updates one parameter of one
    element in each group, whose state has the same names. Other failures of the copy are ignored: the step itself
    reports them. Call it after the state is loaded.
    """
    for group in optimizer.param_groups:
        loaded = next((parameter for parameter in group["params"] if optimizer.state.get(parameter)), None)
        missing = None if loaded is None else _missing_key(optimizer, group, loaded)
        if loaded is not None and missing is not None:
            now, names = type(optimizer).__qualname__, ", ".join(optimizer.state[loaded])
            raise UserError(
                f"the checkpoint has the state of {before} ({names}), but the optimizer is now {now}, which needs "
                f"{missing}; expected an optimizer that can continue from this state. Use {before} again, or "
                "--run.name for a new run, which may start from the exported weights (--initial_weights)."
            )


def _missing_key(optimizer: Optimizer, group: dict[str, Any], loaded: Tensor) -> str | None:
    """Return the name of a value that a step does not find in the state; `None` if there is none."""
    state = optimizer.state[loaded]
    with suppress(Exception):
        small = nn.Parameter(torch.zeros([1] * loaded.dim(), dtype=loaded.dtype, device=loaded.device))
        small.grad = torch.zeros_like(small)
        probe: Any = object.__new__(type(optimizer))  # a copy would call __setstate__, which may need the values
        vars(probe).update(vars(optimizer))
        probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        probe.param_groups, probe.state = [{**group, "params": [small]}], defaultdict(dict)
        probe.state[small] = {key: _small(value) for key, value in state.items()}
        try:
            probe.step()
        except KeyError as error:
            key = error.args[0]
            return key if isinstance(key, str) and key not in state else None
    return None


def _small(value: Any) -> Any:
    """Return zeros with one element for a tensor, and the value itself for anything else."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros([1] * value.dim(), dtype=value.dtype, device=value.device)
