"""Full fine-tuning of selected modules: norms, a head or the embeddings of new tokens, usually in a stack with LoRA."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from torch import nn

from d9d_dist.errors import shorten
from d9d_peft._targets import Target, check_target, is_target
from d9d_peft.method import Plan
from d9d_state.module_tensors import aliases


@final
@dataclass(frozen=True, slots=True)
class FullTune:
    r"""Method that trains all parameters of the modules that a target matches, submodules included.

    Attributes:
        target: Regular expression, searched in the qualified names of the model's modules (`r"norm$"`) and parameters
            (`r"embedding\.weight_special$"`), or module types such as `nn.LayerNorm`.
    """

    target: Target

    def __post_init__(self) -> None:
        """Raise `UserError` if the target is neither a regular expression nor module types."""
        check_target(self.target, "FullTune")

    def plan(self, model: nn.Module) -> Plan:
        """Plan to train the matching parameters; see `PeftMethod.plan`."""
        first = aliases(dict(model.named_parameters(remove_duplicate=False)))
        parameters = frozenset(first[name] for name in self._matches(model))
        modules = model.named_modules()
        owners = [name for name, module in modules if name and next(module.parameters(recurse=False), None) is not None]
        message = (
            f"FullTune got the target {self.target!r}, which matches neither a parameter nor a module with parameters. "
            f"This model has {shorten(owners)}."
        )
        return Plan(claimed=parameters, trainable=parameters, unmatched=() if parameters else (message,))

    def _matches(self, model: nn.Module) -> Iterator[str]:
        """Yield the names of the parameters that match or are in a matching module."""
        for name, module in model.named_modules(remove_duplicate=False):
            if is_target(self.target, name, module):
                yield from (f"{name}.{parameter}".lstrip(".") for parameter, _ in module.named_parameters())
        if isinstance(self.target, str):
            for name, _ in model.named_parameters(remove_duplicate=False):
                if is_target(self.target, name, model):
                    yield name
