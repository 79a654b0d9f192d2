"""Several fine-tuning methods on one model, on disjoint sets of parameters."""

from itertools import combinations
from typing import final

from torch import nn

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_peft.method import PeftMethod, Plan


@final
class Stack:
    """Method that applies several methods, which must claim disjoint sets of parameters."""

    def __init__(self, *methods: PeftMethod) -> None:
        """Stack one or more methods; their order has no effect.

        Raises:
            UserError: If there are no methods, or a list of methods is passed.
        """
        if methods and isinstance(methods[0], list | tuple):
            raise UserError("Stack got a list of methods; expected separate arguments, as in Stack(*methods).")
        if not methods:
            raise UserError("Stack got no methods; expected at least one, as in Stack(LoRA(...), FullTune(...)).")
        self._methods = methods

    def plan(self, model: nn.Module) -> Plan:
        """Return the union of the methods' plans.

        Raises:
            UserError: If a method cannot be applied to the model, or two methods claim the same parameters.
        """
        plans = [(method, method.plan(model)) for method in self._methods]
        for (one, one_plan), (other, other_plan) in combinations(plans, 2):
            if overlap := sorted(one_plan.claimed & other_plan.claimed):
                raise UserError(
                    f"{one} and {other} both claim {shorten(overlap)}; expected at most one method per parameter. "
                    "Narrow one of the targets."
                )
        return Plan(
            claimed=frozenset().union(*(plan.claimed for _, plan in plans)),
            trainable=frozenset().union(*(plan.trainable for _, plan in plans)),
            adapters={name: adapter for _, plan in plans for name, adapter in plan.adapters.items()},
            unmatched=tuple(message for _, plan in plans for message in plan.unmatched),
        )
