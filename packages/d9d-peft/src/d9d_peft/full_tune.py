"""Full tuning of chosen modules: norms or a head, usually beside LoRA in a stack."""

import re
from dataclasses import dataclass
from typing import final

from torch import nn

from d9d_dist import UserError
from d9d_peft._pattern import check_pattern, shorten
from d9d_peft.method import Plan, first_names


@final
@dataclass(frozen=True, slots=True)
class FullTune:
    """Trains every parameter of the modules whose name a pattern is found in, of what is inside them too.

    Attributes:
        pattern: Regular expression, searched in the qualified names of the model's modules: `r"norm$"`.
    """

    pattern: str

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: If the pattern is no regular expression.
        """
        check_pattern(self.pattern, "FullTune")

    def plan(self, model: nn.Module) -> Plan:
        """Leave the parameters of the modules that match trainable.

        Raises:
            UserError: If no module that matches has parameters.
        """
        first = first_names(model)
        parameters = frozenset(
            first[f"{name}.{parameter}"]
            for name, module in model.named_modules(remove_duplicate=False)
            if name and re.search(self.pattern, name)
            for parameter, _ in module.named_parameters()
        )
        if not parameters:
            raise UserError(
                f"FullTune got the pattern {self.pattern!r}, which matches no module with parameters. "
                f"This model has {shorten(_owners(model))}."
            )
        return Plan(claimed=parameters, trainable=parameters)


def _owners(model: nn.Module) -> list[str]:
    """The modules that own parameters themselves."""
    return [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters(recurse=False))
    ]
