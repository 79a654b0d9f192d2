"""The contract of a fine-tuning method, and the one function that applies any of them to a model.

A method only says what it would do (`Plan`), and `inject` does it. So a mistake is found before anything has changed,
and methods can be stacked without knowing of each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, final

from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import UserError
from d9d_peft.adapter import ADAPTER, Adapter, attach
from d9d_state import StateMapper, identity_of, keep, parallel


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What a method would do to a model.

    Attributes:
        claimed: Parameters of the model that the method deals with; no other method may. A tied parameter goes by its
            first name (`first_names`).
        trainable: Those of them that are trained as they are.
        adapters: What is put into layers, by the layers' names; all parameters of adapters are trained.
        unmatched: What the method looked for and did not find, as messages for a person.
    """

    claimed: frozenset[str]
    trainable: frozenset[str] = frozenset()
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()


class PeftMethod(Protocol):
    """A way to fine-tune a part of a model: `LoRA`, `DoRA`, `FullTune`, a `Stack` of several, or one of your own."""

    def plan(self, model: nn.Module) -> Plan:
        """Say what to do to a model, and change nothing.

        Args:
            model: On any device, `meta` included, and not parallelised yet.

        Raises:
            UserError: If the method does not fit the model. That it finds nothing to do is said in the plan.
        """
        ...


def inject(method: PeftMethod, model: nn.Module, *, is_part: bool = False) -> StateMapper:
    """Prepare a model for fine-tuning, in place: put a method's adapters in, and freeze what it does not train.

    Layers stay where they are, and parameters keep their names; those of the adapter of the layer `a.q` are
    `a.q.adapter.*`. They are on the device of the weight they belong to, so that on `meta` nothing is allocated, and in
    float32 at least unless the method has another dtype. Call it before parallelising and before the optimizer is made.

    Args:
        method: What to train.
        model: On any device, `meta` included.
        is_part: Whether the model is a pipeline stage, in which a method need not find anything. A method that finds
            nothing in any stage is not noticed then: inject it into the whole model on `meta` once.

    Returns:
        The mapper from the original model's tensors to those of the model as it is now, a tied tensor by its first
        name. `sequential(base_mapper, mapper)` loads the original checkpoint, where the new parameters keep their
        initial values; `mapper.inverse()` leaves them out.

    Raises:
        UserError: If the method does not fit the model or finds nothing in it, or the model has adapters or is
            parallelised already; the model is unchanged then.
    """
    if isinstance(method, nn.Module):
        raise UserError(f"inject() got a {type(method).__name__} as its method; expected inject(method, model).")
    _check_is_first(model)
    plan = method.plan(model)
    if plan.unmatched and not is_part:
        raise UserError(" ".join(plan.unmatched))
    original = identity_of(model)
    new_names: list[str] = []
    for name, adapter in plan.adapters.items():
        attach(adapter, model.get_submodule(name))
        prefix = f"{name}.{ADAPTER}.".lstrip(".")
        new_names += [f"{prefix}{tensor}" for tensor in adapter.state_dict(keep_vars=True)]
    trainable = plan.trainable.union(new_names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    return parallel(original, keep(*new_names)) if new_names else original


def first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter the first name of the same tensor, which is itself where nothing is tied."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _check_is_first(model: nn.Module) -> None:
    """Refuse a model that cannot be prepared any more."""
    for name, module in model.named_modules():
        if isinstance(module._modules.get(ADAPTER), Adapter):
            raise UserError(f"{name} has an adapter already; inject one Stack of methods instead of two methods.")
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            raise UserError(
                f"{name or 'the model'} is parallelised already; expected inject() to come first. Call it where the "
                "model is built."
            )
