"""Protocol of fine-tuning methods, and the function `inject` that applies a method to a model.

A method returns a `Plan` and does not change the model; `inject` applies the plan. Errors are thus found before the
model changes, and independent methods can be stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, final

from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_peft.adapter import DEFAULT_ADAPTER, Adapter, adapter_parameters, adapters_of, attach, child_name
from d9d_state import StateMapper, identity_of, keep, parallel


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Changes that a method makes to a model.

    Attributes:
        claimed: Names of the model's parameters that the method trains or adapts; no other method of a `Stack` may
            claim them. A tied parameter has its first name (`aliases`).
        trainable: Names of the claimed parameters that are trained directly, without an adapter.
        adapters: Adapters by the name of their layer; all their parameters are trained.
        unmatched: Error messages for targets that match nothing.
    """

    claimed: frozenset[str]
    trainable: frozenset[str] = frozenset()
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()


class PeftMethod(Protocol):
    """Fine-tuning method: `LoRA`, `DoRA`, `FullTune`, a `Stack` of methods, or a custom method."""

    def plan(self, model: nn.Module) -> Plan:
        """Return the changes to a model, without changing it.

        Args:
            model: Model on any device, `meta` included, before it is parallelized.

        Raises:
            UserError: If the method cannot be applied to the model. A target without matches adds a message to
                `Plan.unmatched` instead.
        """
        ...


def inject(
    method: PeftMethod,
    model: nn.Module,
    *,
    is_part: bool = False,
    adapter: str = DEFAULT_ADAPTER,
    trainable: bool = True,
) -> StateMapper:
    """Prepare a model for fine-tuning, in place: add the method's adapters and freeze all other parameters.

    Call `inject` before the model is parallelized and the optimizer is created. Layers are not replaced. Parameters
    keep their names; an adapter of layer `a.q` adds the parameters `a.q.adapter.*` on the device of the layer's weight,
    `meta` included. The dtype of these parameters is at least float32 unless the method sets another dtype.

    Further calls with other names add more adapters to the same model. The adapters of the first call are active;
    `use_adapter` activates others. A further call changes neither the earlier adapters nor which of them are trained.

    Args:
        method: Fine-tuning method.
        model: Model on any device, `meta` included.
        is_part: True if the model is a pipeline stage, where a method may match nothing. To detect a target without
            matches in any stage, inject the method into the whole model on `meta` once.
        adapter: Name of the adapters, a Python identifier. The parameters of an adapter `reward` are
            `a.q.adapter_reward.*`.
        trainable: False to freeze the new adapters too, for adapters that are loaded and only evaluated.

    Returns:
        The mapper from the tensors of the original model to those of the changed model; a tied tensor has its first
        name. `sequential(base_mapper, mapper)` loads the original checkpoint; the new parameters keep their initial
        values. `mapper.inverse()` drops the new parameters.

    Raises:
        UserError: If the method cannot be applied or matches nothing, or the model already has adapters of this name or
            is already parallelized. Also if a further call, or a call with `trainable=False`, would train parameters
            without an adapter (`FullTune`) or adapt layers with such parameters. The model is then unchanged.
    """
    if isinstance(method, nn.Module):
        raise UserError(f"inject() got a {type(method).__name__} as its method; expected inject(method, model).")
    if not adapter.isidentifier():
        raise UserError(f"inject got adapter = {adapter!r}; expected a Python identifier, such as 'reward'.")
    is_first = _check_unprepared(model, child_name(adapter))
    plan = method.plan(model)
    if plan.unmatched and not is_part:
        raise UserError(" ".join(plan.unmatched))
    if not is_first or not trainable:
        _check_adapters_only(model, plan, adapter)
    original = identity_of(model)
    if is_first:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in plan.trainable)
    new_names: list[str] = []
    modules = dict(model.named_modules())
    for name, module in plan.adapters.items():
        attach(module, modules[name], adapter)
        prefix, state = f"{name}.{child_name(adapter)}.".lstrip("."), module.state_dict(keep_vars=True)
        new_names += [f"{prefix}{tensor}" for tensor in state]
        for tensor in state.values():
            if tensor.requires_grad != trainable and isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(trainable)
    return parallel(original, keep(*new_names)) if new_names else original


def _check_unprepared(model: nn.Module, child: str) -> bool:
    """Raise `UserError` if a model has adapters in children of this name or is parallelized.

    Return True if the model has no adapters at all.
    """
    is_first = True
    for name, module in model.named_modules():
        adapters = adapters_of(module) if module._modules else {}
        is_first = is_first and not adapters
        if child in adapters:
            raise UserError(
                f"{name} already has an adapter of this name; expected a model without one. Call inject() once, with a "
                "Stack of all methods, or pass another name: inject(method, model, adapter='second')."
            )
        for parameter in module._parameters.values():
            if isinstance(parameter, DTensor):
                raise UserError(
                    f"{name or 'the model'} is already parallelized; expected a model before parallelization. Call "
                    "inject() where the model is built."
                )
    return is_first


def _check_adapters_only(model: nn.Module, plan: Plan, adapter: str) -> None:
    """Raise `UserError` if a plan trains the model's own parameters, or adapts layers whose own parameters are trained.

    The model's own parameters do not belong to an adapter name: the adapters of all names share them.
    """
    owned = adapter_parameters(model)
    tuned = {name for name, value in model.named_parameters() if value.requires_grad and id(value) not in owned}
    shared = sorted(plan.trainable | (plan.claimed & tuned if owned else set()))
    if shared:
        raise UserError(
            f"inject got adapter = {adapter!r} and parameters that are trained without an adapter: {shorten(shared)}; "
            "expected only adapters on frozen parameters. Use LoRA or DoRA instead of FullTune."
        )
