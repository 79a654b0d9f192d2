"""Which parameter belongs to which group: by patterns, each parameter to exactly one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from d9d_dist import UserError

Named: TypeAlias = list[tuple[str, Tensor]]
"""Parameters with their names."""

Dims: TypeAlias = Literal["any", "matrices", "vectors"]
"""Parameters of any shape; of two or more dims; of fewer."""

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Selector:
    """Chooses parameters.

    Attributes:
        pattern: Regular expression, searched in the parameters' names.
        of: Of those, which.
    """

    pattern: str
    of: Dims

    def __str__(self) -> str:
        """How a message calls it."""
        return f"pattern = {self.pattern!r}" + ("" if self.of == "any" else f" of {self.of}")

    def chooses(self, name: str, parameter: Tensor) -> bool:
        """Whether it chooses a parameter."""
        fits = self.of == "any" or (self.of == "matrices") == is_matrix(parameter)
        return fits and re.search(self.pattern, name) is not None


def is_matrix(parameter: Tensor) -> bool:
    """Whether a parameter is a matrix, or a stack of them; what is not is a norm's weight, a bias or a number."""
    return parameter.ndim >= 2


def assign(named: Named, selectors: Sequence[Selector], *, whole: bool = True) -> list[Named]:
    """Give every parameter to the first selector that chooses it.

    Args:
        named: Trainable parameters with their names.
        selectors: In the order in which they are asked.
        whole: Whether these are the parameters of a whole model; a stage of one may have none for a selector.

    Returns:
        The parameters that none chooses, then those of each selector, in the order given; together all of them.

    Raises:
        UserError: If a selector of a whole model gets no parameter.
    """
    found: list[Named] = [[] for _ in (None, *selectors)]
    for name, parameter in named:
        chosen = (number for number, each in enumerate(selectors, 1) if each.chooses(name, parameter))
        found[next(chosen, 0)].append((name, parameter))
    for number, selector in enumerate(selectors, 1):
        if whole and not found[number]:
            raise UserError(_explain(named, selector))
    return found


def _explain(named: Named, selector: Selector) -> str:
    if any(selector.chooses(name, parameter) for name, parameter in named):
        return (
            f"the optimizer's group with {selector} gets no parameter, since groups before it take all of its; "
            "expected at least one. Put it before them, or leave it out."
        )
    names = [name for name, _ in named]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"the optimizer's group with {selector} matches no trainable parameter; expected at least one of "
        f"{', '.join(names[:_SHOWN])}{more}. Correct the pattern, which is searched in these names, or leave it out."
    )
