"""The contract of a fine-tuning method, and the one function that applies any of them to a model.

A method only says what it would do (`Plan`), and `inject` does it. So a mistake is found before anything has changed,
and methods can be stacked without knowing of each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, final

from torch import nn

from d9d_state import StateMapper, identity, identity_of, parallel, scope


@final
@dataclass(frozen=True, slots=True)
class Replacement:
    """A module that takes the place of another one.

    Attributes:
        module: The new module; it usually holds the old one.
        mapper: From the tensor names of the old module to those of the new one, both without the module's own name.
        trainable: Which parameters of the new module are trained, without the module's own name.
    """

    module: nn.Module
    mapper: StateMapper
    trainable: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What a method would do to a model.

    Attributes:
        claimed: Parameters of the original model that the method deals with; no other method may. A tied parameter
            goes by its first name (`first_names`).
        trainable: Those of them that are trained as they are.
        replacements: New modules by the name of the module that they replace. A module that the model holds under
            several names occurs under each, with the same replacement.
    """

    claimed: frozenset[str]
    trainable: frozenset[str] = frozenset()
    replacements: Mapping[str, Replacement] = field(default_factory=dict)


class PeftMethod(Protocol):
    """A way to fine-tune a part of a model: `LoRA`, `FullTune`, a `Stack` of several, or one of your own."""

    def plan(self, model: nn.Module) -> Plan:
        """Say what to do to a model, and change nothing.

        Args:
            model: On any device, `meta` included, and not parallelised yet.

        Raises:
            UserError: If the method does not fit the model.
        """
        ...


def inject(method: PeftMethod, model: nn.Module) -> StateMapper:
    """Prepare a model for fine-tuning, in place: put a method's modules in, and freeze what it does not train.

    Call it before parallelising and before the optimizer is made. New parameters are on the device and of the dtype of
    those they belong to, so that on `meta` nothing is allocated.

    Args:
        method: What to train.
        model: On any device, `meta` included.

    Returns:
        The mapper from the original model's tensors to those of the model as it is now, a tied tensor by its first
        name. `sequential(base_mapper, mapper)` loads the original checkpoint, where the new parameters keep their
        initial values; `mapper.inverse()` leaves them out and gives the original names back.

    Raises:
        UserError: If the method does not fit the model; the model is unchanged then.
    """
    plan = method.plan(model)
    original_names = list(model.state_dict(keep_vars=True))
    for name, replacement in plan.replacements.items():
        model.set_submodule(name, replacement.module)
    trainable = plan.trainable | {
        f"{name}.{parameter}" for name, replacement in plan.replacements.items() for parameter in replacement.trainable
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    return _mapper(original_names, plan, model)


def first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter the first name of the same tensor, which is itself where nothing is tied."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _mapper(original_names: list[str], plan: Plan, injected: nn.Module) -> StateMapper:
    """The mapper that `inject` returns."""
    replaced = [scope(f"{name}.", f"{name}.", item.mapper) for name, item in plan.replacements.items()]
    consumed = {name for mapper in replaced for name in mapper.inputs}
    untouched = identity(*(name for name in original_names if name not in consumed))
    # Built over all names; then the groups that only fill a tied tensor once more are left out.
    return parallel(untouched, *replaced).restrict(outputs=identity_of(injected).outputs)
